"""What attention is made of: dense kernels, methods built on kernels, and what both are given.

Legend: B batch, S tokens, N heads, D head size, C channels. Everything takes and returns [B,S,N,D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor

from wan.device import Device
from wan.settings.kernels import Dense
from wan.settings.schedule import Grid


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One forward pass of one expert and, inside self-attention, which call of it this is.

    Attributes:
        index: Sampling step, from 0.
        count: Number of sampling steps.
        branch: "cond" or "uncond", the guidance branch.
        expert: "high_noise", "low_noise" or "dit" (models with a single network).
        grid: Tokens along frame, height and width.
        valid_len: Number of real tokens; tokens behind it are padding.
        sample: Which of the samples that a model computes one after the other.
        layer: Index of the block; None outside the blocks.
        first_head: Global index of the first head that this rank attends with.
        first_row: Place of this rank's first query row in the whole sequence.
    """

    index: int
    count: int
    branch: str
    expert: str
    grid: Grid
    valid_len: int
    sample: int = 0
    layer: int | None = None
    first_head: int = 0
    first_row: int = 0


Load = Callable[[str], Any]
"""load("module:name"): the object of that name, imported when it is asked for."""


@dataclass(frozen=True)
class Target:
    """What kernels are built for.

    Attributes:
        device: The device that computes, with its row of the table of devices.
        head_dim: Channels of a head.
        dtype: Of q, k and v.
        row: Of the table of kernels, the dense one that is built.
        load: Imports kernels and the vendors' operators by their names.
    """

    device: Device
    head_dim: int
    dtype: torch.dtype
    load: Load = resolve_name
    row: Dense | None = None


class Kernel(Protocol):
    """Dense attention, softmax(q k^T / sqrt(D)) v; q and k may have different lengths."""

    @property
    def name(self) -> str:
        """What computes, for logs and records."""
        ...

    @property
    def can_return_lse(self) -> bool:
        """Whether `with_lse` exists, which a real ring needs."""
        ...

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor: ...

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        """The result and the log-sum-exp (natural log, float32 [B,N,S]) of each row's logits."""
        ...


@dataclass(frozen=True, slots=True)
class Payload:
    """A tensor of queries, keys or values together with its scales, where it is quantised.

    Attributes:
        values: [B,S,N,D], any strides; with a scale they stand for values * scale.
        scale: float32 [B,ceil(S/rows),N,1]; None where the values stand for themselves.
        rows: Tokens that share a scale.
    """

    values: Tensor
    scale: Tensor | None = None
    rows: int = 1

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors: the values, and then the scales if there are any."""
        return (self.values,) if self.scale is None else (self.values, self.scale)

    def map(self, change: Callable[[Tensor], Tensor]) -> Payload:
        """The same with every part changed, the values first: a change may be an exchange."""
        values = change(self.values)
        return Payload(values, None if self.scale is None else change(self.scale), self.rows)

    def cut(self, first: int, last: int) -> Payload:
        """Tokens first to last (excluded), as views; ValueError where first is inside a block."""
        if first % self.rows:
            raise ValueError(f"a cut must begin at a multiple of {self.rows} rows, not at {first}")
        scale = self.scale
        if scale is not None:
            scale = scale[:, first // self.rows : -(-last // self.rows)]
        return Payload(self.values[:, first:last], scale, self.rows)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[B,S,N,D]: what quantised values stand for, the product taken in float32, in dtype.

        Values that stand for themselves are returned as they are.
        """
        if self.scale is None:
            return self.values
        scale = self.scale.repeat_interleave(self.rows, dim=1)[:, : self.values.shape[1]]
        return (self.values.float() * scale).to(dtype)


def divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device.

    Where a GPU's tensor is divided by a number, PyTorch multiplies by the reciprocal instead. A
    scale that differs in its last bit rounds some values to another code.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


QKV = tuple[Payload, Payload, Payload]

AttendRows = Callable[[Payload, int], Tensor]
"""attend(q_block, first): the result [B,rows,N,D] of a block of the queries that begins at their
row `first`, against all keys."""


class Method(Protocol):
    """Attention that first prepares the keys and values, once for all query blocks."""

    @property
    def name(self) -> str:
        """What computes, for logs and records."""
        ...

    @property
    def q_multiple(self) -> int:
        """Query blocks begin at multiples of this."""
        ...

    @property
    def is_total(self) -> bool:
        """Whether it applies to every call."""
        ...

    @property
    def packs(self) -> bool:
        """Whether `pack` makes something else of q, k and v."""
        ...

    def applies(self, step: StepInfo | None) -> bool:
        """Whether this call is computed this way. ValueError where that cannot be told."""
        ...

    def pack(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, valid: int, step: StepInfo | None
    ) -> QKV:
        """What the exchanges send for q, k, v of this rank's tokens, before `prepare`.

        valid: the real ones among the tokens; what is in the rows behind them must not matter.
        """
        ...

    def prepare(self, q: Payload, k: Payload, v: Payload, step: StepInfo | None) -> AttendRows:
        """q, k, v: what `pack` made, exchanged, without padding."""
        ...


@dataclass(frozen=True)
class SmallOps:
    """Replacements of a block's small operations; None keeps the plain one of the same name.

    Each takes and returns what the plain one (`wan.modules.small_ops`, `wan.modules.rope`) does:
    float32 results [B,S,...]. It sees a slice of the tokens, any float dtype (rope: float32),
    possibly strided, and must not change its inputs. rope: x [B,S,N,D] and its rows of the table,
    (cos, signed sin) [S,1,D].
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] | None = None
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor] | None = None
    modulated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    rope: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] | None = None


PLAIN = SmallOps()
