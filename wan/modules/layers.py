"""The small fp32 pieces of a block: norms, modulation, gated residuals, GELU.

Legend: B batch, L tokens, C channels, R runs. Tokens with the same timestep share one row of
modulation, so a row covers a *run* of consecutive tokens and is never expanded per token. A
text-to-video forward has one run; the 5B image mode has two (first frame at t=0, then the rest).

In inference the residual stream is updated in place, which saves one copy of it at the peak, and
the float32 steps between two matrix products run on a slice of tokens at a time (`by_slices`); with
autograd on, every operation returns a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.modules.ops import PLAIN, SmallOps


def by_slices(
    compute: Callable[..., Tensor],
    x_BLC: Tensor,
    dtype: torch.dtype,
    *rows_L: Tensor,
    overwrite: bool = False,
) -> Tensor:
    """compute(x, *rows) in dtype, for a computation that sees each token alone.

    overwrite: x is used only here, so the result may take its memory (hooks that keep x must copy).

    Float32 copies of all tokens are the memory peak of a bfloat16 model and, on a CPU, cost more
    time than the arithmetic; a slice's copies are small and stay in the cache. The compiler, which
    fuses them away, and autograd, which keeps them, get all tokens at once.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return compute(x_BLC, *rows_L).to(dtype)
    # 4 MiB of float32 on a CPU: small enough for memory that is reused without page faults, large
    # enough that threads seldom wait for each other. Accelerators: kernels that outlast a launch.
    elements = 1 << (20 if x_BLC.device.type == "cpu" else 24)
    size = max(1, elements // (x_BLC.shape[0] * x_BLC.shape[2]))
    reuse = overwrite and x_BLC.dtype == dtype
    out_BLC = x_BLC if reuse else torch.empty_like(x_BLC, dtype=dtype)
    for first in range(0, x_BLC.shape[1], size):
        part = slice(first, first + size)
        out_BLC[:, part] = compute(x_BLC[:, part], *(rows[part] for rows in rows_L))
    return out_BLC


class WanRMSNorm(nn.Module):
    """RMS norm over all channels (before heads are split), computed and returned in float32."""

    def __init__(self, dim: int, eps: float, ops: SmallOps = PLAIN) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.ops.rms_norm(x_BLC, self.weight, self.eps)


class WanLayerNorm(nn.LayerNorm):
    """Layer norm computed and returned in float32, whatever the input's dtype."""

    def __init__(self, dim: int, eps: float, ops: SmallOps = PLAIN) -> None:
        super().__init__(dim, eps)
        self.ops = ops

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.ops.layer_norm(x_BLC, self.weight, self.bias, self.eps)


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
    x_BLC: Tensor,
    shift_BRC: Tensor,
    scale_BRC: Tensor,
    runs: Sequence[int],
    eps: float,
    dtype: torch.dtype,
    ops: SmallOps = PLAIN,
) -> Tensor:
    """layer_norm(x) * (1 + scale) + shift with each run's own row; float32 inside, dtype out."""
    parts = zip(
        x_BLC.split(list(runs), 1), shift_BRC.split(1, 1), scale_BRC.split(1, 1), strict=True
    )

    def one(x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            return ops.modulated_norm(x, shift_B1C, scale_B1C, eps)

        return by_slices(compute, x_BLC, dtype)

    normed = [one(*part) for part in parts]
    return normed[0] if len(normed) == 1 else torch.cat(normed, dim=1)


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
