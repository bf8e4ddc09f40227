"""Interfaces of attention kernels and attention backends, and the data types of their arguments.

Legend: B batch, S tokens, N heads, D head size, C channels. Tensors are [B,S,N,D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor

from wan.device import Device
from wan.kernels.forward_context import StepInfo
from wan.settings.kernels import DenseKernelRow

Load = Callable[[str], Any]
"""load("module:name"): imports a module and returns the object of that name."""


@dataclass(frozen=True)
class Target:
    """The device, shape and dtype that a kernel is built for.

    Attributes:
        dtype: Of q, k and v.
        load: Imports kernels and vendors' operators by name.
        dense_row: The row of the dense kernel in the table of kernels.
    """

    device: Device
    head_dim: int
    dtype: torch.dtype
    load: Load = resolve_name
    dense_row: DenseKernelRow | None = None


class Kernel(Protocol):
    """Dense attention, softmax(q k^T / sqrt(D)) v; q and k may have different lengths."""

    @property
    def name(self) -> str:
        """For logs and records."""

    @property
    def can_return_lse(self) -> bool:
        """Whether `with_lse` exists, without which ring attention gathers K and V."""

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor: ...

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        """Returns the result and the log-sum-exp of the logits (natural log, float32 [B,N,S])."""


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """Queries, keys or values of an attention call; quantized if they have a scale.

    Attributes:
        values: [B,S,N,D], any strides; with a scale the tensor is values * scale.
        scale: float32 [B,ceil(S/rows_per_scale),N,1]; None: not quantized.
        rows_per_scale: Tokens that share a scale.
    """

    values: Tensor
    scale: Tensor | None = None
    rows_per_scale: int = 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The values, and the scales if quantized."""
        return (self.values,) if self.scale is None else (self.values, self.scale)

    def map(self, function: Callable[[Tensor], Tensor]) -> AttentionInput:
        """Applies a function to the values, then to the scales; it may be a collective."""
        values = function(self.values)
        return AttentionInput(
            values, None if self.scale is None else function(self.scale), self.rows_per_scale
        )

    def slice_rows(self, start: int, stop: int) -> AttentionInput:
        """Returns views of tokens start to stop - 1; ValueError if start splits a scale."""
        if start % self.rows_per_scale:
            raise ValueError(
                f"slices must begin at a multiple of {self.rows_per_scale} rows, not at {start}"
            )
        scale = self.scale
        if scale is not None:
            scale = scale[:, start // self.rows_per_scale : -(-stop // self.rows_per_scale)]
        return AttentionInput(self.values[:, start:stop], scale, self.rows_per_scale)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns values * scale [B,S,N,D] in dtype, multiplied in float32.

        Values without a scale are returned unchanged.
        """
        if self.scale is None:
            return self.values
        scale = self.scale.repeat_interleave(self.rows_per_scale, dim=1)[:, : self.values.shape[1]]
        return (self.values.float() * scale).to(dtype)


def divide_exactly(x: Tensor, divisor: float) -> Tensor:
    """Computes x / divisor, rounded once on every device.

    On GPUs PyTorch divides by a Python number by multiplying with its reciprocal. A scale that
    differs in its last bit rounds some values to another code.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


QKV = tuple[AttentionInput, AttentionInput, AttentionInput]

AttendRows = Callable[[AttentionInput, int], Tensor]
"""attend(q_block, first_local_row): the result [B,rows,N,D] of the query block that begins at row
`first_local_row` of this rank's q, against all keys."""


class AttentionBackend(Protocol):
    """An attention implementation that prepares keys and values once for all query blocks."""

    @property
    def name(self) -> str:
        """For logs and records."""

    @property
    def q_multiple(self) -> int:
        """Query blocks begin at multiples of this."""

    @property
    def always_applies(self) -> bool:
        """Whether the backend applies to every call."""

    @property
    def quantizes_before_exchange(self) -> bool:
        """Whether `quantize` changes q, k and v."""

    def applies_to(self, step: StepInfo | None) -> bool:
        """Whether the backend computes this call; ValueError if it needs a step and gets None."""

    def quantize(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, num_valid: int, step: StepInfo | None
    ) -> QKV:
        """Converts q, k, v of this rank's tokens to the tensors of the all-to-all.

        num_valid: tokens without padding; the values of padding rows must not matter.
        """

    def prepare_kv(
        self, q: AttentionInput, k: AttentionInput, v: AttentionInput, step: StepInfo | None
    ) -> AttendRows:
        """Prepares attention to k and v; q, k, v are results of `quantize`, without padding."""


@dataclass(frozen=True)
class SmallOps:
    """Vendors' kernels for the small operations of a block; None: the PyTorch operation.

    Arguments and results are those of the PyTorch functions (`wan.modules.fused_ops`,
    `wan.modules.rope`): float32 results [B,S,...]. An input is a slice of the tokens in any float
    dtype (rope: float32), possibly strided, and must not be changed. rope: x [B,S,N,D] and its rows
    of the table, (cos, signed sin) [S,1,D].
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] | None = None
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor] | None = None
    modulated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    rope: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] | None = None


PLAIN_OPS = SmallOps()
