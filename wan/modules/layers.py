"""The small fp32 pieces of a block: norms, modulation, gated residuals, GELU.

Legend: B batch, L tokens, C channels, R runs. Tokens with the same timestep share one row of
modulation, so a row covers a *run* of consecutive tokens and is never expanded per token. A
text-to-video forward has one run; the 5B image mode has two (first frame at t=0, then the rest).

In inference the residual stream is updated in place, which saves one copy of it at the peak;
with autograd on, every operation returns a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WanRMSNorm(nn.Module):
    """RMS norm over all channels (before heads are split), computed and returned in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BLC: Tensor) -> Tensor:
        x = x_BLC.float()
        # The norm reduction reads x once; mean(x**2) would materialise x**2 first.
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
        return x * torch.rsqrt(mean_square + self.eps) * self.weight.float()


class WanLayerNorm(nn.LayerNorm):
    """Layer norm computed and returned in float32, whatever the input's dtype."""

    def forward(self, x_BLC: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.layer_norm(x_BLC.float(), self.normalized_shape, weight, bias, self.eps)


class TanhGELU(nn.Module):
    """GELU in its tanh form; in place in inference, where the input is always ours."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.gelu(x, approximate="tanh")
        return torch.ops.aten.gelu_(x, approximate="tanh")


def fp32_linear(linear: Any, x: Tensor) -> Tensor:
    """The layer applied in float32, also when its weights are stored in bfloat16."""
    return F.linear(x.float(), linear.weight.float(), linear.bias.float())


def modulated_norm(
    x_BLC: Tensor, shift_BRC: Tensor, scale_BRC: Tensor, runs: Sequence[int], eps: float
) -> Tensor:
    """layer_norm(x) * (1 + scale) + shift with each run's own row, in float32."""
    if len(runs) > 1:
        parts = x_BLC.split(list(runs), dim=1)
        rows = zip(shift_BRC.split(1, dim=1), scale_BRC.split(1, dim=1), strict=True)
        return torch.cat(
            [
                modulated_norm(p, *row, (p.shape[1],), eps)
                for p, row in zip(parts, rows, strict=True)
            ],
            dim=1,
        )
    shape = x_BLC.shape[-1:]
    if x_BLC.shape[0] == 1:  # one row: it is the affine part of the norm, one pass over memory
        return F.layer_norm(x_BLC.float(), shape, 1 + scale_BRC[0, 0], shift_BRC[0, 0], eps)
    return torch.addcmul(shift_BRC, F.layer_norm(x_BLC.float(), shape, eps=eps), 1 + scale_BRC)


def gated_add(x_BLC: Tensor, y_BLC: Tensor, gate_BRC: Tensor, runs: Sequence[int]) -> Tensor:
    """x + gate * y with each run's own gate; x is the float32 residual stream."""
    split = list(runs)
    parts = zip(x_BLC.split(split, 1), y_BLC.split(split, 1), gate_BRC.split(1, 1), strict=True)
    if torch.is_grad_enabled():
        return torch.cat([torch.addcmul(x, y, gate) for x, y, gate in parts], dim=1)
    for x, y, gate in parts:
        x.addcmul_(y, gate)
    return x_BLC


def residual_add(x_BLC: Tensor, y_BLC: Tensor) -> Tensor:
    """x + y, where x is the float32 residual stream."""
    return x_BLC + y_BLC if torch.is_grad_enabled() else x_BLC.add_(y_BLC)
