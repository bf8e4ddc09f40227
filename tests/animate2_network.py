"""A small network of Animate-2 with random weights, and its inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan.modules.animate2 import WanAnimate2Model
from wan.modules.interfaces import ModelComponents

Grid = tuple[int, int, int]
SIZES = {
    "text_len": 8,
    "in_dim": 36,
    "dim": 96,
    "ffn_dim": 64,
    "freq_dim": 16,
    "text_dim": 24,
    "out_dim": 16,
    "num_heads": 12,
    "num_layers": 3,
}
SKIPPED = 1  # block


@cache
def make_weights(num_layers: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        model = WanAnimate2Model(**SIZES | {"num_layers": num_layers})
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.5)
    return model.state_dict()


def make_network(num_layers: int = 3, **components: Any) -> WanAnimate2Model:
    with torch.device("meta"):
        model = WanAnimate2Model(
            **SIZES | {"num_layers": num_layers}, components=ModelComponents(**components)
        )
    weights = {name: x.clone() for name, x in make_weights(num_layers).items()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval().requires_grad_(False)


class Case(NamedTuple):
    """Token grids of a clip.

    Attributes:
        reference: Of the reference video.
        frame: Rows and columns of the generated video.
        full_frames: Latent frames of the generated video in a full clip.
    """

    reference: Grid
    frame: tuple[int, int]
    full_frames: int

    @property
    def generated(self) -> Grid:
        return self.reference[0] + 1, *self.frame


CASES = {
    "equal grids": Case((2, 3, 4), (3, 4), 3),
    "smaller reference": Case((2, 3, 3), (3, 4), 3),
    "larger reference": Case((2, 3, 4), (3, 3), 3),
    "short clip": Case((2, 3, 4), (3, 4), 5),
    "short clip, other grid": Case((3, 2, 4), (3, 3), 6),
}


@dataclass(frozen=True)
class Inputs:
    """Random inputs of the reference pass and of one denoising step."""

    reference: Tensor
    reference_text: Tensor
    reference_clip: Tensor
    x: Tensor
    y: Tensor
    text: Tensor
    clip: Tensor
    t: Tensor


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    (f, h, w), (rows, columns) = case.reference, case.frame
    size = (f + 1, 2 * rows, 2 * columns)
    return Inputs(
        reference=noise(36, f, 2 * h, 2 * w),
        reference_text=noise(6, 24),
        reference_clip=noise(1, 7, 1280),
        x=noise(16, *size),
        y=noise(20, *size),
        text=noise(5, 24),
        clip=noise(1, 7, 1280),
        t=torch.tensor([537.0]),
    )


def compute_velocity(
    model: WanAnimate2Model,
    case: Case,
    skip_blocks: tuple[int, ...] = (),
    log_scale: float = 0.0,
    step_context: AbstractContextManager[object] | None = None,
    **reference_options: Any,
) -> Tensor:
    """Runs the reference pass, and one denoising step in `step_context`."""
    inputs = make_inputs(case)
    reference_kv = model.compute_reference_kv(
        inputs.reference,
        inputs.reference_text,
        inputs.reference_clip,
        tuple(inputs.x.shape[1:]),
        full_frames=case.full_frames,
        **reference_options,
    )
    with nullcontext() if step_context is None else step_context:
        (velocity,) = model(
            [inputs.x],
            inputs.t,
            [inputs.text],
            inputs.x[0].numel() // 4,
            [inputs.y],
            clip_fea=inputs.clip,
            reference_kv=reference_kv,
            skip_blocks=skip_blocks,
            log_scale=log_scale,
        )
    return velocity
