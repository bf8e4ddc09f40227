"""What a layer may know about the moment it runs in.

What a dense attention kernel is, and what a way of attending ("method") built on kernels is.

Legend: B batch, S tokens, N heads, D head size. Everything takes and returns [B,S,N,D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One forward pass of one expert, as seen by the attention layers and caches.

    index: 0-based sampling step; count: number of sampling steps.
    branch: "cond" or "uncond", the guidance branch.
    expert: "high_noise", "low_noise" or "dit" (models with a single network).
    grid: tokens along frame, height and width.
    valid_len: number of real tokens; tokens behind it are padding.
    sample: which of the samples that a model computes one after the other.
    """

    index: int
    count: int
    branch: str
    expert: str
    grid: tuple[int, int, int]
    valid_len: int
    sample: int = 0


class Kernel(Protocol):
    """softmax(q k^T / sqrt(D)) v over whole sequences; q and k may have different lengths."""

    @property
    def name(self) -> str:
        """For logs and records."""
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
class Call:
    """Which attention call this is, for methods that plan, cache, or differ from layer to layer.

    step, steps: 0-based sampling step, and how many there are. expert, branch, sample: as in
    `StepInfo`. layer: index of the block. first_head: global index of the first head that this rank
    attends with. first_row: place of its first query row in the whole sequence. grid: tokens along
    frame, height and width.
    """

    step: int
    steps: int
    expert: str
    branch: str
    sample: int
    layer: int
    first_head: int
    first_row: int
    grid: tuple[int, int, int]


AttendRows = Callable[[Any, int], Tensor]
"""attend(q_block, first): the result [B,rows,N,D] of a block of the queries that begins at their
row `first`, against all keys."""


class Method(Protocol):
    """A way of attending that first prepares the keys and values, once for all query blocks."""

    @property
    def name(self) -> str:
        """For logs and records."""
        ...

    @property
    def q_multiple(self) -> int:
        """Query blocks begin at multiples of this."""
        ...

    def applies(self, call: Call | None) -> bool:
        """Whether this call is computed this way. ValueError where that cannot be told."""
        ...

    def pack(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, valid: int, call: Call | None
    ) -> Sequence[Any]:
        """What travels in the exchanges for q, k, v of this rank's tokens, before `prepare`.

        valid: the real ones among the tokens; what is in the rows behind them must not matter.
        """
        ...

    def prepare(self, q: Any, k: Any, v: Any, call: Call | None) -> AttendRows:
        """q, k, v [B,S,N,D], tensors or (where the method says so) `Quantised`; no padding."""
        ...
