"""Interfaces of the components of `WanModel`, and their implementations for one device.

Legend: B batch, S all tokens, L this rank's tokens, N heads, D head size, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import Kernel
from wan.kernels.sdpa import SdpaKernel
from wan.modules.fused_ops import BlockOps
from wan.modules.lockstep import BlockIterator
from wan.settings.attention_modes import Grid
from wan.utils import trace
from wan.utils.partial_attention import KvBlock


class LayerKeys(Protocol):
    """Keys other than those of the tokens, in one call of self-attention."""

    @property
    def needs_lse(self) -> bool:
        """Whether `attend` takes kernels that return the log-sum-exp only."""

    @property
    def is_recording(self) -> bool:
        """Whether the call only records its keys, and attends to no others."""

    def record(
        self, chunk: int, k_1SND: Tensor, v_1SND: Tensor, ring: tuple[int, int] = (0, 1)
    ) -> None:
        """Keeps the keys and values of a head chunk. ring: this rank's index, and its size."""

    def attend(
        self,
        kernel: Kernel,
        q_blocks: Sequence[tuple[int, Tensor]],
        kv_blocks: Iterable[KvBlock],
        valid_rows: Sequence[int],
        chunk: int = 0,
        device_type: str | None = None,
    ) -> list[Tensor]:
        """Computes attention of each query block to the call's keys and to the others.

        Args:
            q_blocks: Global index of the first row, and [1,S,N,D].
            kv_blocks: Those of the ring, or a single one; all are consumed.
            valid_rows: Rows without padding of each owner of a block.
            chunk: The head chunk.
            device_type: As in `LseMerger`.
        """


class FurtherKeys(Protocol):
    """Keys other than those of the tokens, in a forward pass.

    They are those of a reference video (`wan.modules.reference_kv`), or of earlier frames
    (`wan.modules.kv_cache`).

    Attributes:
        layers: The layers that run, in this order.
    """

    @property
    def layers(self) -> Sequence[int]: ...

    def get_layer(self, layer: int) -> LayerKeys: ...


class AttentionCall(Protocol):
    """A self-attention call: q, k and v are written, then the result is computed."""

    @property
    def takes_slices(self) -> bool:
        """Whether tokens may be written in slices, which are copied at once.

        Otherwise q, k and v are written as one tensor each, which is kept until it is used.
        """

    def write(self, index: int, x_BLND: Tensor, first_token: int = 0) -> None:
        """Writes tokens first_token, first_token + 1, ... of q (index 0), k (1) or v (2)."""

    def finish(self) -> Tensor:
        """Computes attention [B,L,N,D] after q, k and v have been written; call it once."""


class SelfAttention(Protocol):
    """Self-attention over all tokens of a video; takes this rank's q, k and v with all heads."""

    def start(
        self,
        x_BLC: Tensor,
        num_heads: int,
        *,
        valid_len: int | None = None,
        step: StepInfo | None = None,
        further_keys: LayerKeys | None = None,
    ) -> AttentionCall:
        """Starts a call for q, k and v with the tokens, dtype and device of x.

        further_keys: Attended to as well as those of the tokens.
        """


class TensorCall:
    """An `AttentionCall` that keeps q, k and v, and computes attend(q, k, v)."""

    takes_slices = False

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._attend = attend
        self._qkv: dict[int, Tensor] = {}

    def write(self, index: int, x_BLND: Tensor, first_token: int = 0) -> None:
        self._qkv[index] = x_BLND

    def finish(self) -> Tensor:
        return self._attend(*(self._qkv.pop(index) for index in range(3)))


AttentionFactory = Callable[[int], SelfAttention]
"""make_attention(layer): the self-attention of a block."""


class SequenceShard(Protocol):
    """How the token sequence is ordered and sharded over the ranks; tokens are dimension 1.

    Tokens outside the blocks are in raster order (frame, row, column). Inside, another order is
    possible, because attention is permutation-equivariant. Shards are padded to equal lengths;
    self-attention masks the padding by `valid_len`, and padded tokens belong to the last segment. A
    segment is a run of consecutive tokens, for example those of the video.
    """

    def permute(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        """Permutes the global sequence from raster order into the order of the shards."""

    def shard(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        """Permutes and pads the global sequence in raster order, and returns this rank's tokens."""

    def gather(self, x_BLC: Tensor, grid: Grid) -> Tensor:
        """Gathers the shards of all ranks into the global sequence in raster order."""

    def get_local_segment_lengths(self, segment_lengths: Sequence[int]) -> tuple[int, ...]:
        """Returns the length of each segment's part on this rank.

        segment_lengths: Lengths of the consecutive segments of the global sequence.
        """

    def count_valid_tokens(self, num_tokens: int) -> int:
        """Number of tokens on this rank that are not padding, in a sequence of `num_tokens`."""

    def get_local_offset(self, num_tokens: int) -> int:
        """Global index of this rank's first token in a sequence of `num_tokens`."""

    def get_padded_length(self, num_tokens: int) -> int:
        """Number of tokens on all ranks, with the padding of a sequence of `num_tokens`."""


class SingleDeviceAttention:
    """Self-attention of a sequence that is not sharded: a single kernel call."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def start(
        self,
        x_BLC: Tensor,
        num_heads: int,
        *,
        valid_len: int | None = None,
        step: StepInfo | None = None,
        further_keys: LayerKeys | None = None,
    ) -> TensorCall:
        attend = self if further_keys is None else partial(self, further_keys=further_keys)
        return TensorCall(partial(attend, valid_len=valid_len, step=step))

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLND: Tensor,
        v_BLND: Tensor,
        /,
        *,
        valid_len: int | None = None,
        step: StepInfo | None = None,
        further_keys: LayerKeys | None = None,
    ) -> Tensor:
        """Computes attention to the first `valid_len` keys; `step` is ignored."""
        k_BLND, v_BLND = k_BLND[:, :valid_len], v_BLND[:, :valid_len]
        if further_keys is not None and further_keys.is_recording:
            further_keys.record(0, k_BLND, v_BLND)
        elif further_keys is not None:
            kv_blocks, valid_rows = [(0, k_BLND, v_BLND)], [k_BLND.shape[1]]
            with trace.add_context(chunk=0):
                return further_keys.attend(self.kernel, [(0, q_BLND)], kv_blocks, valid_rows)[0]
        with trace.span("attention", q_BLND, chunk=0, block=0, method="dense"):
            return self.kernel(q_BLND, k_BLND, v_BLND)


class UnshardedSequence:
    """The sequence of one device: in raster order, without padding."""

    def permute(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        return x_BSC

    def shard(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        return x_BSC

    def gather(self, x_BLC: Tensor, grid: Grid) -> Tensor:
        return x_BLC

    def get_local_segment_lengths(self, segment_lengths: Sequence[int]) -> tuple[int, ...]:
        return tuple(segment_lengths)

    def count_valid_tokens(self, num_tokens: int) -> int:
        return num_tokens

    def get_local_offset(self, num_tokens: int) -> int:
        return 0

    def get_padded_length(self, num_tokens: int) -> int:
        return num_tokens


IterateBlocks = Callable[[Tensor, int, int | None], BlockIterator[Tensor]]
"""iterate_blocks(x_BLC, start, stop): runs blocks start to stop - 1 (None: to the last one) and
returns x, updated in place."""


class SkipBlocks(Protocol):
    """Computes the output of the last block, possibly without running all blocks.

    See `wan.cache.residual`.
    """

    def iterate(
        self,
        x_BLC: Tensor,
        blocks: IterateBlocks,
        step: StepInfo | None,
        num_valid: int,
        dtype: torch.dtype,
        /,
    ) -> BlockIterator[Tensor]: ...


SkipAttention = Callable[[Callable[[], Tensor], StepInfo | None, int], Tensor]
"""skip(attend, step, layer): attend(), or its output of an earlier step; see
`wan.cache.attention`."""


@dataclass(frozen=True)
class ModelComponents:
    """Components a model is built with. The defaults are for one device.

    Attributes:
        attention: Makes the self-attention of each block.
        cross_attention_kernel: A dense kernel.
        sequence_shard: Orders and shards the tokens.
        ops: Norms, modulation, RoPE and GELU.
        text_kv_cache: Cache the keys and values of the prompt between steps.
        step_cache: Skips blocks in some steps.
        attention_cache: Skips self-attention in some steps.
        streams_reference: Keep Animate-2's `ReferenceKV` in the host's memory.
        keeps_kv_in_host_memory: Decides before a video whether its `KVCache` is in host memory.
    """

    attention: AttentionFactory = lambda layer: SingleDeviceAttention(SdpaKernel())
    cross_attention_kernel: Kernel = field(default_factory=SdpaKernel)
    sequence_shard: SequenceShard = field(default_factory=UnshardedSequence)
    ops: BlockOps = field(default_factory=BlockOps)
    text_kv_cache: bool = False
    step_cache: SkipBlocks | None = None
    attention_cache: SkipAttention | None = None
    streams_reference: bool = False
    keeps_kv_in_host_memory: Callable[[], bool] = lambda: False
