"""What a block computes between its matrix products: norms, modulation, RoPE, residuals, GELU.

Legend: B batch, L this device's tokens, C channels, N heads, D head size, R runs of tokens with the
same timestep (see `blocks`).

Everything is computed in float32. In inference the residual stream x is updated in place, and a
step runs on a slice of tokens at a time (`by_slices`); with autograd on, it returns new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels.base import PLAIN, SmallOps
from wan.modules.rope import RopeTable, apply_rope
from wan.settings.numerics import slice_elements
from wan.torch_private import gelu_in_place

_GELU = 2 * math.sqrt(2 / math.pi)


Put = Callable[[Tensor, int], None]
"""put(x_BLND, first): takes the tokens from `first` on, of any floating dtype."""


class Runner(Protocol):
    """Carries out a step: as it is written, or as a compiled function that does the same."""

    def __call__(self, step: Callable[..., Tensor], x: Tensor, /, *rest: object) -> Tensor: ...


def as_written(step: Callable[..., Tensor], x: Tensor, /, *rest: object) -> Tensor:
    """Calls the step."""
    return step(x, *rest)


class BlockOps:
    """The steps of a block; one instance serves all blocks.

    Args:
        ops: A vendor's kernels for single operations.
        run: Carries out the steps, which are the methods that begin with an underscore: functions
            of tensors, all rows of which have the same timestep.
        device_type: Of the device that computes; None: that of the tensors.
    """

    def __init__(
        self, ops: SmallOps = PLAIN, run: Runner = as_written, device_type: str | None = None
    ) -> None:
        self._run, self._device_type = run, device_type
        self._norm = ops.modulated_norm or modulated_norm
        self._layer = ops.layer_norm or layer_norm
        self._rms = ops.rms_norm or rms_norm
        self._rope = ops.rope or apply_rope

    def modulated_norm(
        self,
        x_BLC: Tensor,
        shift_BRC: Tensor,
        scale_BRC: Tensor,
        runs: Sequence[int],
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """layer_norm(x) * (1 + scale) + shift with each run's own rows, in dtype."""
        pieces = _runs(runs, (x_BLC,), (shift_BRC, scale_BRC))
        return _joined([self._run(self._modulated_norm, *piece, eps, dtype) for piece in pieces])

    def gated_add(
        self, x_BLC: Tensor, y_BLC: Tensor, gate_BRC: Tensor, runs: Sequence[int]
    ) -> Tensor:
        """x + gate * y with each run's own gate."""
        pieces = _runs(runs, (x_BLC, y_BLC), (gate_BRC,))
        if torch.is_grad_enabled():
            return _joined([torch.addcmul(x, y, gate) for x, y, gate in pieces])
        for piece in pieces:
            self._run(self._add, *piece)
        return x_BLC

    def gated_add_norm(
        self,
        x_BLC: Tensor,
        y_BLC: Tensor,
        gate_BRC: Tensor,
        runs: Sequence[int],
        norm: torch.nn.LayerNorm,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """`gated_add`, and the layer norm of it in dtype."""
        affine = norm.weight, norm.bias, norm.eps, dtype
        if torch.is_grad_enabled():
            x_BLC = self.gated_add(x_BLC, y_BLC, gate_BRC, runs)
            return x_BLC, self._layer(x_BLC, *affine[:3]).to(dtype)
        pieces = _runs(runs, (x_BLC, y_BLC), (gate_BRC,))
        return x_BLC, _joined([self._run(self._add_norm, *piece, *affine) for piece in pieces])

    def add_modulated_norm(
        self,
        x_BLC: Tensor,
        y_BLC: Tensor,
        shift_BRC: Tensor,
        scale_BRC: Tensor,
        runs: Sequence[int],
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """x + y, and the modulated norm of it."""
        if torch.is_grad_enabled():
            x_BLC = x_BLC + y_BLC
            return x_BLC, self.modulated_norm(x_BLC, shift_BRC, scale_BRC, runs, eps, dtype)
        pieces = _runs(runs, (x_BLC, y_BLC), (shift_BRC, scale_BRC))
        found = [self._run(self._add_modulated_norm, *piece, eps, dtype) for piece in pieces]
        return x_BLC, _joined(found)

    def norm_heads(
        self,
        x_BLC: Tensor,
        weight_C: Tensor | None,
        heads: int,
        eps: float,
        rope: RopeTable | None = None,
        put: Put | None = None,
    ) -> Tensor:
        """[B,L,N,D] in x's dtype: the RMS norm over all channels, and the rotation; x is used up.

        weight_C: None where the network has no such norm. put: gets the result too, slice by slice
        where nothing else would, and then x is returned.
        """
        if rope is not None:
            if put is not None and self._run is as_written:
                return self._norm_rope(x_BLC, *rope, weight_C, heads, eps, put)
            x_BLND = self._run(self._norm_rope, x_BLC, *rope, weight_C, heads, eps)
        else:
            if weight_C is not None:
                x_BLC = self._run(self._rms_norm, x_BLC, weight_C, eps)
            x_BLND = x_BLC.unflatten(-1, (heads, -1))
        if put is not None:
            put(x_BLND, 0)
        return x_BLND

    def gelu(self, x_BLC: Tensor) -> Tensor:
        """GELU in its tanh form; in place in inference, where the input is always ours."""
        if torch.is_grad_enabled():
            return F.gelu(x_BLC, approximate="tanh")
        return self._run(self._gelu, x_BLC)

    def _modulated_norm(
        self, x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        return self.by_slices(
            lambda part: self._norm(part, shift_B1C, scale_B1C, eps), x_BLC, dtype
        )

    def _add(self, x_BLC: Tensor, y_BLC: Tensor, gate_B1C: Tensor | None = None) -> Tensor:
        for x, y in self._in_place(x_BLC, y_BLC):
            x.add_(y) if gate_B1C is None else x.addcmul_(y, gate_B1C)
        return x_BLC

    def _add_norm(
        self,
        x_BLC: Tensor,
        y_BLC: Tensor,
        gate_B1C: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        self._add(x_BLC, y_BLC, gate_B1C)
        return self.by_slices(lambda part: self._layer(part, weight_C, bias_C, eps), x_BLC, dtype)

    def _add_modulated_norm(
        self,
        x_BLC: Tensor,
        y_BLC: Tensor,
        shift_B1C: Tensor,
        scale_B1C: Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        self._add(x_BLC, y_BLC)
        return self._modulated_norm(x_BLC, shift_B1C, scale_B1C, eps, dtype)

    def _norm_rope(
        self,
        x_BLC: Tensor,
        cos_L1D: Tensor,
        sin_L1D: Tensor,
        weight_C: Tensor | None,
        heads: int,
        eps: float,
        put: Put | None = None,
    ) -> Tensor:
        def compute(x_BLC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            normed = x_BLC.float() if weight_C is None else self._rms(x_BLC, weight_C, eps)
            return self._rope(normed.unflatten(-1, (heads, -1)), (cos, sin)).flatten(2)

        rows = cos_L1D, sin_L1D
        if put is not None:
            for part in self._slices(x_BLC):
                result = compute(x_BLC[:, part], *(table[part] for table in rows))
                put(result.unflatten(-1, (heads, -1)), part.start)
            return x_BLC
        out_BLC = self.by_slices(compute, x_BLC, x_BLC.dtype, *rows, overwrite=True)
        return out_BLC.unflatten(-1, (heads, -1))

    def _rms_norm(self, x_BLC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        def compute(x_BLC: Tensor) -> Tensor:
            return self._rms(x_BLC, weight_C, eps)

        return self.by_slices(compute, x_BLC, x_BLC.dtype, overwrite=True)

    def _gelu(self, x_BLC: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the same function by one exponential instead of a tanh
            x = x_BLC.float()
            return x_BLC.copy_(x * torch.sigmoid(_GELU * (x + 0.044715 * x * x * x)))
        return gelu_in_place(x_BLC)

    def by_slices(
        self,
        compute: Callable[..., Tensor],
        x_BLC: Tensor,
        dtype: torch.dtype,
        *rows_L: Tensor,
        overwrite: bool = False,
    ) -> Tensor:
        """compute(x, *rows) in dtype, for a computation that sees each token alone.

        Float32 copies of all tokens are the memory peak of a bfloat16 model and, on a CPU, cost
        more time than the arithmetic; a slice's copies are small and stay in the cache. The
        compiler, which fuses them away, and autograd, which keeps them, get all tokens at once.

        overwrite: x is used only here, so the result may take its memory (hooks that keep x must
        copy it).
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return compute(x_BLC, *rows_L).to(dtype)
        reuse = overwrite and x_BLC.dtype == dtype
        out_BLC = x_BLC if reuse else torch.empty_like(x_BLC, dtype=dtype)
        for part in self._slices(x_BLC):
            out_BLC[:, part] = compute(x_BLC[:, part], *(rows[part] for rows in rows_L))
        return out_BLC

    def _in_place(self, x_BLC: Tensor, y_BLC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """x and y for x += y; in slices where PyTorch on a CPU would convert all of y."""
        on_cpu = (self._device_type or x_BLC.device.type) == "cpu"
        if x_BLC.dtype == y_BLC.dtype or not on_cpu or torch.compiler.is_compiling():
            yield x_BLC, y_BLC
            return
        for part in self._slices(x_BLC):
            yield x_BLC[:, part], y_BLC[:, part].to(x_BLC.dtype)

    def _slices(self, x_BLC: Tensor) -> Iterator[slice]:
        """The tokens that are handled at a time."""
        elements = slice_elements(self._device_type or x_BLC.device.type)
        size = max(1, elements // (x_BLC.shape[0] * x_BLC.shape[2]))
        if x_BLC.is_meta:  # a plan: every slice takes what one takes, and there may be thousands
            yield slice(0, size)
            return
        for first in range(0, x_BLC.shape[1], size):
            yield slice(first, first + size)


def _runs(
    runs: Sequence[int], tokens: Sequence[Tensor], rows: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """For each run its part of the tokens [B,L,C], and its rows [B,1,C]."""
    if len(tokens[0]) > 1:  # samples of one timestep each, see `WanModel.forward`
        return iter([(*tokens, *rows)])
    # Of one sample, with the strides of whole tensors: a compiler takes others for another kind.
    parts = ([part[None] for part in x[0].split(list(runs))] for x in tokens)
    return zip(*parts, *([row[None, None] for row in x[0]] for x in rows), strict=True)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


# The small operations, which a vendor's fused kernels may replace one by one (`SmallOps`; the
# fourth is `rope.apply_rope`). Results are float32 whatever the input's dtype; weights and
# modulation too enter the arithmetic as float32.


def rms_norm(x_BLC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the channels; float32 [B,L,C]."""
    x = x_BLC.float()
    # The norm reduction reads x once; mean(x**2) would materialise x**2 first.
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
    return x * torch.rsqrt(mean_square + eps) * weight_C.float()


def layer_norm(x_BLC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the channels; float32 [B,L,C]."""
    weight, bias = (None if p is None else p.float() for p in (weight_C, bias_C))
    return F.layer_norm(x_BLC.float(), x_BLC.shape[-1:], weight, bias, eps)


def modulated_norm(x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor, eps: float) -> Tensor:
    """layer_norm(x) * (1 + scale) + shift, one row of modulation for all tokens; float32 [B,L,C].

    shift, scale: float32.
    """
    shape = x_BLC.shape[-1:]
    if x_BLC.shape[0] == 1:  # one row: it is the affine part of the norm, one pass over memory
        return F.layer_norm(x_BLC.float(), shape, 1 + scale_B1C[0, 0], shift_B1C[0, 0], eps)
    return torch.addcmul(shift_B1C, F.layer_norm(x_BLC.float(), shape, eps=eps), 1 + scale_B1C)
