"""What `WanModel` needs from outside, and the versions that serve a single device.

Legend: B batch, S all tokens, L this device's tokens, N heads, D head size, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from wan import trace
from wan.kernels.base import Kernel, StepInfo
from wan.kernels.sdpa import SdpaKernel
from wan.modules.small_ops import BlockOps
from wan.settings.schedule import Grid


class SelfAttention(Protocol):
    """Self-attention over all tokens of the video, given this device's tokens of all heads."""

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLND: Tensor,
        v_BLND: Tensor,
        /,
        *,
        valid_len: int | None = None,
        step: StepInfo | None = None,
    ) -> Tensor: ...


class Sending(Protocol):
    """A call of self-attention whose q, k and v are written where they will be sent from."""

    def put(self, place: int, x_BLND: Tensor, first: int = 0) -> None:
        """Takes tokens from `first` on, of q (place 0), k (1) or v (2)."""
        ...

    def attend(self, *, valid_len: int | None = None, step: StepInfo | None = None) -> Tensor:
        """The call, once everything has been written."""
        ...


@runtime_checkable
class SendsWritten(Protocol):
    """Self-attention that may want q, k and v written in place of given."""

    def begin(self, x_BLC: Tensor, heads: int, step: StepInfo | None) -> Sending | None:
        """A call for these tokens; None: it is to be called with tensors."""
        ...


MakeAttention = Callable[[int], SelfAttention]
"""Makes the self-attention of a block from the block's index."""


class TokenShard(Protocol):
    """Which tokens this device computes, and in which order the tokens of a grid stand.

    Outside, tokens are in raster order (frame, row, column); attention does not mind another one.
    The methods see the token axis as dimension 1. `shard` pads where the devices need equal parts,
    and whoever attends masks by valid_len; padded tokens belong to the last run.
    """

    def arrange(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        """The whole sequence, from raster order into the order in which tokens stand."""
        ...

    def shard(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        """This device's tokens out of the whole (arranged, padded) sequence."""
        ...

    def gather(self, x_BLC: Tensor, grid: Grid) -> Tensor:
        """The whole sequence in raster order, from every device's part."""
        ...

    def runs(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Lengths, on this device, of consecutive arranged runs given by their whole lengths."""
        ...

    def valid(self, tokens: int) -> int:
        """How many of this device's tokens are real, of so many in all."""
        ...

    def first(self, tokens: int) -> int:
        """The place of this device's first token in a sequence of so many."""
        ...


class LocalAttention:
    """Self-attention when one device holds the whole sequence: a single kernel call."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLND: Tensor,
        v_BLND: Tensor,
        /,
        *,
        valid_len: int | None = None,
        step: StepInfo | None = None,
    ) -> Tensor:
        """Keys at or behind valid_len are not attended to; step does not matter here."""
        k_BLND, v_BLND = k_BLND[:, :valid_len], v_BLND[:, :valid_len]
        with trace.span("attention", q_BLND, chunk=0, block=0, method="dense"):
            return self.kernel(q_BLND, k_BLND, v_BLND)


class LocalTokens:
    """One device computes every token, in raster order; nothing is padded."""

    def arrange(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        return x_BSC

    def shard(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        return x_BSC

    def gather(self, x_BLC: Tensor, grid: Grid) -> Tensor:
        return x_BLC

    def runs(self, lengths: Sequence[int]) -> tuple[int, ...]:
        return tuple(lengths)

    def valid(self, tokens: int) -> int:
        return tokens

    def first(self, tokens: int) -> int:
        return 0


Blocks = Callable[[Tensor, int, int | None], Tensor]
"""blocks(x_BLC, first, last): x, updated in place, behind the blocks first to last (excluded)."""
SkipBlocks = Callable[[Tensor, Blocks, StepInfo | None, int, torch.dtype], Tensor]
"""skip(x_BLC, blocks, step, valid, dtype): x behind all blocks; see `wan.cache.residual`."""
SkipAttention = Callable[[Callable[[], Tensor], StepInfo | None, int], Tensor]
"""skip(attend, step, layer): what attend() returns or has returned; see `wan.cache.attention`."""


@dataclass(frozen=True)
class Collaborators:
    """What a model is given beside its sizes; the defaults serve a single device.

    Attributes:
        attention: Makes each block's self-attention over all tokens.
        kernel: Dense attention, used for the text.
        tokens: Which tokens this device computes.
        ops: What blocks compute between matrix products.
        text_kv_cache: Whether the text's keys and values are kept from step to step.
        step_cache: Skips blocks.
        attention_cache: Skips self-attention.
    """

    attention: MakeAttention = lambda layer: LocalAttention(SdpaKernel())
    kernel: Kernel = field(default_factory=SdpaKernel)
    tokens: TokenShard = field(default_factory=LocalTokens)
    ops: BlockOps = field(default_factory=BlockOps)
    text_kv_cache: bool = False
    step_cache: SkipBlocks | None = None
    attention_cache: SkipAttention | None = None
