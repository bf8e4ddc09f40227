"""Helpers of comparisons: prompt embeddings, and self-attention that records its sample index."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.kernels.sdpa import SdpaKernel
from wan.modules.interfaces import SingleDeviceAttention, TensorCall

STEP = StepInfo(1, 4, "cond", "dit", (1, 1, 1), 1)


def make_prompt_embeds() -> dict[str, Tensor]:
    """Make embeddings of a prompt and a negative prompt."""
    generator = torch.Generator().manual_seed(5)
    names = {"prompt_embeds": 9, "negative_prompt_embeds": 20}
    return {name: torch.randn(rows, 64, generator=generator) for name, rows in names.items()}


def pad_prompt_embeds(embeds: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pad the embeddings to 512 tokens with a batch axis, as diffusers expects them."""
    return {name: F.pad(x, (0, 0, 0, 512 - len(x)))[None] for name, x in embeds.items()}


def make_diffusers_call(has_two_experts: bool) -> dict[str, Any]:
    """Make the arguments of diffusers' pipelines that all comparisons of whole runs share."""
    guidance = {"guidance_scale": 5.0}
    if has_two_experts:
        guidance = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}
    embeds = pad_prompt_embeds(make_prompt_embeds())
    return {**guidance, **embeds, "num_frames": 9, "output_type": "latent"}


class SampleRecorder:
    """Makes each block's attention; `samples` has the sample index of each call."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def __call__(self, layer: int) -> Any:
        samples = self.samples

        class Recorded(SingleDeviceAttention):
            def start(self, *x_heads: Any, step: Any = None, **context: Any) -> TensorCall:
                samples.append(step.sample)
                return super().start(*x_heads, step=step, **context)

        return Recorded(SdpaKernel())
