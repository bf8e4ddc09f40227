"""Helpers of comparisons with official tensors: distances, weights and parts of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from wan.modules.vae import video_vae
from wan.pipeline.pipeline import run_locally
from wan.utils.log import StageTimer

CPU = torch.device("cpu")


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return (actual.double() - expected.double()).abs().max().item()


def weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in load_file(path).items()}


class Networks:
    """Replaces a pipeline's store of experts by a single network."""

    def get(self, _: str) -> Any:
        return self

    def prefetch(self, _: str) -> None: ...


class PipelineParts:
    """The parts of a pipeline that generating clips needs, with the official test weights.

    Args:
        folder: Folder of the official tensors of one kind of network.
        cases: The file of a complete run.
        experts: The network of the run.
    """

    def __init__(self, folder: Path, cases: str, experts: Networks) -> None:
        tensors = load_file(folder / cases)
        self.contexts = tensors["context"], tensors["context_null"]
        self.stage_timer = StageTimer(lambda: None)
        self.device: Any = type("Device", (), {"torch_device": CPU})
        self.experts: Any = experts
        self.torch_device, self.overlap_decoding = CPU, False
        self.cached_prompt_embeds: dict[str, Tensor] = {}
        self.run_on_rank0 = run_locally
        vae_spec = video_vae.read_vae_spec(folder.parent / "vae21.weights.safetensors")
        self.vae = video_vae.VideoVAE(vae_spec.load(device=CPU, dtype_of=lambda *_: torch.float32))
        self.encode_video, self.decode = self.vae.encode, self.vae.decode

    def encode_prompt(self, *_: object) -> tuple[Tensor, Tensor]:
        return self.contexts

    def denoise(self, video: Any, **_: Any) -> Tensor:
        return video.advance(self.experts)

    def release(self, _: object) -> None: ...

    def release_vae(self) -> None: ...

    def make_preview(self, *_: object) -> None: ...
