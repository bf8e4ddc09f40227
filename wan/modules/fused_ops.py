"""Operations of a block between its matrix products: norms, modulation, RoPE, residuals, GELU.

Legend: B batch, L this rank's tokens, C channels, N heads, D head size, R segments: consecutive
tokens that share a row of modulation, such as a timestep segment (see `blocks`).

Operations compute in float32. In inference they update the residual stream x in place and process a
slice of tokens at a time (`apply_in_slices`); with autograd they return new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels.interfaces import PLAIN_OPS, SmallOps
from wan.modules.rope import RopeTable, apply_rope
from wan.settings.numerics import get_slice_numel
from wan.utils.torch_private import gelu_in_place, is_called_directly

_GELU = 2 * math.sqrt(2 / math.pi)


WriteTokens = Callable[[Tensor, int], None]
"""write(x_BLND, first_token): stores tokens from first_token on; any floating dtype."""


OpRunner = Callable[..., Tensor]
"""run_op(op, x, *args): runs an operation of `BlockOps`, eagerly or as a compiled function."""


def run_eager(op: Callable[..., Tensor], x: Tensor, /, *args: object) -> Tensor:
    """Runs an operation eagerly."""
    return op(x, *args)


class BlockOps:
    """The operations of a block between its matrix products; all blocks share an instance.

    Args:
        ops: Vendor kernels, which replace single operations.
        run_op: Runs the methods whose names start with an underscore. They are functions of tensors
            of one segment, so that they can be compiled.
        device_type: Type of the computing device; None: that of the tensors.
        fuses_gelu: Let linear layers compute GELU after them by their `forward_gelu`, if they can.
    """

    def __init__(
        self,
        ops: SmallOps = PLAIN_OPS,
        run_op: OpRunner = run_eager,
        device_type: str | None = None,
        fuses_gelu: bool = False,
    ) -> None:
        self._run_op, self._device_type = run_op, device_type
        self._fuses_gelu = fuses_gelu
        self._modulated_norm_kernel = ops.modulated_norm or modulated_norm
        self._layer_norm_kernel = ops.layer_norm or compute_layer_norm
        self._rms_norm_kernel = ops.rms_norm or compute_rms_norm
        self._rope_kernel = ops.rope or apply_rope

    def modulated_norm(
        self,
        x_BLC: Tensor,
        shift_BRC: Tensor,
        scale_BRC: Tensor,
        segments: Sequence[int],
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Computes layer_norm(x) * (1 + scale) + shift per segment, in dtype."""
        segment_inputs = _split_segments(segments, (x_BLC,), (shift_BRC, scale_BRC))
        return _concat_segments(
            [self._run_op(self._modulated_norm, *inputs, eps, dtype) for inputs in segment_inputs]
        )

    def gated_add(
        self, x_BLC: Tensor, y_BLC: Tensor, gate_BRC: Tensor, segments: Sequence[int]
    ) -> Tensor:
        """Computes x + gate * y per segment."""
        segment_inputs = _split_segments(segments, (x_BLC, y_BLC), (gate_BRC,))
        if torch.is_grad_enabled():
            return _concat_segments([torch.addcmul(x, y, gate) for x, y, gate in segment_inputs])
        for inputs in segment_inputs:
            self._run_op(self._add, *inputs)
        return x_BLC

    def gated_add_norm(
        self,
        x_BLC: Tensor,
        y_BLC: Tensor,
        gate_BRC: Tensor,
        segments: Sequence[int],
        norm: torch.nn.LayerNorm,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Returns x + gate * y and its layer norm in dtype."""
        affine = norm.weight, norm.bias, norm.eps, dtype
        if torch.is_grad_enabled():
            x_BLC = self.gated_add(x_BLC, y_BLC, gate_BRC, segments)
            return x_BLC, self._layer_norm_kernel(x_BLC, *affine[:3]).to(dtype)
        segment_inputs = _split_segments(segments, (x_BLC, y_BLC), (gate_BRC,))
        return x_BLC, _concat_segments(
            [self._run_op(self._add_norm, *inputs, *affine) for inputs in segment_inputs]
        )

    def add_modulated_norm(
        self,
        x_BLC: Tensor,
        y_BLC: Tensor,
        shift_BRC: Tensor,
        scale_BRC: Tensor,
        segments: Sequence[int],
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Returns x + y and its modulated norm in dtype."""
        if torch.is_grad_enabled():
            x_BLC = x_BLC + y_BLC
            return x_BLC, self.modulated_norm(x_BLC, shift_BRC, scale_BRC, segments, eps, dtype)
        segment_inputs = _split_segments(segments, (x_BLC, y_BLC), (shift_BRC, scale_BRC))
        outputs = [
            self._run_op(self._add_modulated_norm, *inputs, eps, dtype) for inputs in segment_inputs
        ]
        return x_BLC, _concat_segments(outputs)

    def norm_and_rotate(
        self,
        x_BLC: Tensor,
        weight_C: Tensor | None,
        heads: int,
        eps: float,
        rope: RopeTable | None = None,
        write: WriteTokens | None = None,
    ) -> Tensor:
        """Applies RMS norm over all channels and RoPE; [B,L,N,D] in the dtype of x.

        Args:
            x_BLC: May be overwritten.
            weight_C: None: no norm.
            rope: None: no rotation.
            write: Receives the result, slice by slice if possible; the returned tensor is then not
                used.
        """
        if rope is not None:
            if write is not None and self._run_op is run_eager:
                return self._norm_rope(x_BLC, *rope, weight_C, heads, eps, write)
            x_BLND = self._run_op(self._norm_rope, x_BLC, *rope, weight_C, heads, eps)
        else:
            if weight_C is not None:
                x_BLC = self._run_op(self._rms_norm, x_BLC, weight_C, eps)
            x_BLND = x_BLC.unflatten(-1, (heads, -1))
        if write is not None:
            write(x_BLND, 0)
        return x_BLND

    def linear_gelu(self, linear: Any, x_BLC: Tensor) -> Tensor:
        """Applies a linear layer, and GELU with the tanh approximation."""
        if self._fuses_gelu and is_called_directly(linear):
            forward_gelu = getattr(linear, "forward_gelu", None)
            out_BLC = None if forward_gelu is None else forward_gelu(x_BLC)
            if out_BLC is not None:
                return out_BLC
        return self.gelu(linear(x_BLC))

    def gelu(self, x_BLC: Tensor) -> Tensor:
        """Applies GELU with the tanh approximation; in place in inference."""
        if torch.is_grad_enabled():
            return F.gelu(x_BLC, approximate="tanh")
        return self._run_op(self._gelu, x_BLC)

    def _modulated_norm(
        self, x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        return self.apply_in_slices(
            lambda x: self._modulated_norm_kernel(x, shift_B1C, scale_B1C, eps), x_BLC, dtype
        )

    def _add(self, x_BLC: Tensor, y_BLC: Tensor, gate_B1C: Tensor | None = None) -> Tensor:
        for x, y in self._split_addends(x_BLC, y_BLC):
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
        return self.apply_in_slices(
            lambda x: self._layer_norm_kernel(x, weight_C, bias_C, eps), x_BLC, dtype
        )

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
        write: WriteTokens | None = None,
    ) -> Tensor:
        def compute(x_BLC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            normed = (
                x_BLC.float() if weight_C is None else self._rms_norm_kernel(x_BLC, weight_C, eps)
            )
            return self._rope_kernel(normed.unflatten(-1, (heads, -1)), (cos, sin)).flatten(2)

        rope_table = cos_L1D, sin_L1D
        if write is not None:
            for tokens in self._token_slices(x_BLC):
                result = compute(x_BLC[:, tokens], *(table[tokens] for table in rope_table))
                write(result.unflatten(-1, (heads, -1)), tokens.start)
            return x_BLC
        out_BLC = self.apply_in_slices(compute, x_BLC, x_BLC.dtype, *rope_table, overwrite=True)
        return out_BLC.unflatten(-1, (heads, -1))

    def _rms_norm(self, x_BLC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        def compute(x_BLC: Tensor) -> Tensor:
            return self._rms_norm_kernel(x_BLC, weight_C, eps)

        return self.apply_in_slices(compute, x_BLC, x_BLC.dtype, overwrite=True)

    def _gelu(self, x_BLC: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the same function with an exponential instead of tanh
            x = x_BLC.float()
            return x_BLC.copy_(x * torch.sigmoid(_GELU * (x + 0.044715 * x * x * x)))
        return gelu_in_place(x_BLC)

    def apply_in_slices(
        self,
        compute: Callable[..., Tensor],
        x_BLC: Tensor,
        dtype: torch.dtype,
        *rows_L: Tensor,
        overwrite: bool = False,
    ) -> Tensor:
        """Applies a token-wise function to slices of tokens; returns compute(x, *rows) in dtype.

        Float32 copies of all tokens would be the memory peak of a bfloat16 model and, on a CPU,
        take longer than the arithmetic; copies of a slice are small and stay in the cache. The
        compiler, which fuses the copies, and autograd, which saves them, process all tokens at
        once.

        overwrite: x is not needed afterwards, so the result may reuse its memory (a hook that keeps
        x must copy it).
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return compute(x_BLC, *rows_L).to(dtype)
        in_place = overwrite and x_BLC.dtype == dtype
        out_BLC = x_BLC if in_place else torch.empty_like(x_BLC, dtype=dtype)
        for tokens in self._token_slices(x_BLC):
            out_BLC[:, tokens] = compute(x_BLC[:, tokens], *(rows[tokens] for rows in rows_L))
        return out_BLC

    def _split_addends(self, x_BLC: Tensor, y_BLC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields x and y for x += y, in slices if PyTorch would convert all of y on a CPU."""
        on_cpu = (self._device_type or x_BLC.device.type) == "cpu"
        if x_BLC.dtype == y_BLC.dtype or not on_cpu or torch.compiler.is_compiling():
            yield x_BLC, y_BLC
            return
        for token_slice in self._token_slices(x_BLC):
            yield x_BLC[:, token_slice], y_BLC[:, token_slice].to(x_BLC.dtype)

    def _token_slices(self, x_BLC: Tensor) -> Iterator[slice]:
        """Yields slices of tokens that are processed at a time."""
        elements = get_slice_numel(self._device_type or x_BLC.device.type)
        size = max(1, elements // (x_BLC.shape[0] * x_BLC.shape[2]))
        if x_BLC.is_meta:  # planning: one of thousands of slices has the same memory peak
            yield slice(0, size)
            return
        for first in range(0, x_BLC.shape[1], size):
            yield slice(first, first + size)


def _split_segments(
    segments: Sequence[int], tokens: Sequence[Tensor], modulations: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """Yields for each segment its slices of the tokens [B,L,C] and its modulations [B,1,C]."""
    if len(tokens[0]) > 1:  # samples of one timestep each, see `WanModel.forward`
        return iter([(*tokens, *modulations)])
    # Index sample 0 first: other strides would make the compiler build another graph.
    token_parts = ([segment[None] for segment in x[0].split(list(segments))] for x in tokens)
    modulation_parts = ([row[None, None] for row in x[0]] for x in modulations)
    return zip(*token_parts, *modulation_parts, strict=True)


def _concat_segments(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


# Reference operations, each of which a vendor kernel may replace (`SmallOps`; the fourth is
# `rope.apply_rope`). Inputs of any floating dtype, weights and modulation are converted to float32;
# results are float32.


def compute_rms_norm(x_BLC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) * weight over the channels; float32 [B,L,C]."""
    x = x_BLC.float()
    # The norm reduction reads x once; mean(x**2) would materialize x**2 first.
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
    return x * torch.rsqrt(mean_square + eps) * weight_C.float()


def compute_layer_norm(
    x_BLC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float
) -> Tensor:
    """Computes (x - mean) / sqrt(var + eps) * weight + bias over the channels; float32 [B,L,C]."""
    weight, bias = (None if p is None else p.float() for p in (weight_C, bias_C))
    return F.layer_norm(x_BLC.float(), x_BLC.shape[-1:], weight, bias, eps)


def modulated_norm(x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor, eps: float) -> Tensor:
    """Computes layer_norm(x) * (1 + scale) + shift with one row of modulation; float32 [B,L,C].

    shift_B1C, scale_B1C: float32.
    """
    shape = x_BLC.shape[-1:]
    if x_BLC.shape[0] == 1:  # as the affine part of the norm: one pass over memory
        return F.layer_norm(x_BLC.float(), shape, 1 + scale_B1C[0, 0], shift_B1C[0, 0], eps)
    return torch.addcmul(shift_B1C, F.layer_norm(x_BLC.float(), shape, eps=eps), 1 + scale_B1C)
