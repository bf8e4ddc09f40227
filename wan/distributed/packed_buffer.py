"""The send and receive buffers of all-to-alls: one contiguous slot for each rank and head chunk.

Legend: B batch, s tokens or rows of scales, N all heads, h heads of one slot, m slots of one size,
D channels of a tensor.

A slot holds [B,s,h,tensors,D] for each `TensorSpec`, so that tensors of one shape and dtype are
interleaved head by head. q, k and v share a spec: with a batch of one they are received as
[1,S,h,3,D] without a copy. The scales of FP8 follow as further specs; the buffer is then uint8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from wan.settings.attention_modes import Range

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of `count` interleaved tensors, each with `width` channels per head."""

    batch: int
    rows: int
    count: int
    width: int
    dtype: torch.dtype

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of all the tensors."""
        return self.batch * self.rows * self.count * self.width * self.dtype.itemsize


def make_tensor_specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """Describes tensors [B,s,N,D]; consecutive ones of one shape and dtype share a spec."""
    shapes = [(x.shape[0], x.shape[1], x.shape[3], x.dtype) for x in tensors]
    return tuple(
        TensorSpec(b, s, count, d, dtype) for (b, s, d, dtype), count in _count_repeats(shapes)
    )


def _count_repeats(values: Iterable[T]) -> list[tuple[T, int]]:
    """Counts consecutive equal values; the compiler of torch 2.9 cannot trace `groupby`."""
    counts: list[tuple[T, int]] = []
    for value in values:
        if counts and counts[-1][0] == value:
            counts[-1] = value, counts[-1][1] + 1
        else:
            counts.append((value, 1))
    return counts


class PackedBuffer:
    """One buffer with a slot for each rank, or for each head chunk and rank.

    Args:
        specs: The tensors of every slot.
        heads_per_slot: Number of heads of each slot.
        memory: The buffer, or the device on which it is allocated.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        heads_per_slot: Sequence[int],
        memory: Tensor | torch.device,
    ) -> None:
        self.specs, self.heads_per_slot = tuple(specs), tuple(heads_per_slot)
        dtypes = {spec.dtype for spec in specs}
        dtype = next(iter(dtypes))
        # gloo has no float8, so dtypes of one byte are sent as uint8
        unit_dtype = dtype if len(dtypes) == 1 and dtype.itemsize > 1 else torch.uint8
        self._elements_per_head = sum(spec.head_bytes for spec in specs) // unit_dtype.itemsize
        if isinstance(memory, torch.device):
            memory = torch.empty(
                self._elements_per_head * sum(heads_per_slot), dtype=unit_dtype, device=memory
            )
        self.memory = memory.view(-1)

    @property
    def splits(self) -> list[int]:
        """Elements of each slot."""
        return [self._elements_per_head * num_heads for num_heads in self.heads_per_slot]

    @property
    def by_rank(self) -> Tensor:
        """The buffer [ranks, ...] if all slots have equal heads; with one spec, with its axes."""
        by_rank = self.memory.view(len(self.heads_per_slot), -1)
        if len(self.specs) > 1:
            return by_rank
        (spec,), num_heads = self.specs, self.heads_per_slot[0]
        return by_rank.view(-1, spec.batch, spec.rows, num_heads, spec.count * spec.width)

    def iter_views(self, spec_index: int) -> Iterator[tuple[Range, Tensor]]:
        """Yields the tensors of one spec as views [m,B,s,h,tensors,D], with the heads they hold.

        Consecutive slots of equal heads share a view. The range of heads counts over all slots.
        """
        spec, start = self.specs[spec_index], 0
        preceding_bytes = sum(earlier_spec.head_bytes for earlier_spec in self.specs[:spec_index])
        unit_size = self.memory.dtype.itemsize
        spec_start = preceding_bytes // unit_size
        spec_stop = (preceding_bytes + spec.head_bytes) // unit_size
        for num_heads, num_slots in _count_repeats(self.heads_per_slot):
            stop = start + num_heads * num_slots
            view = self.memory[start * self._elements_per_head : stop * self._elements_per_head]
            view = view.view(-1, num_heads * self._elements_per_head)[
                :, num_heads * spec_start : num_heads * spec_stop
            ]
            shape = (spec.batch, spec.rows, num_heads, spec.count, spec.width)
            yield (start, stop), view.view(spec.dtype).unflatten(-1, shape)
            start = stop

    def split_chunks(self, chunk_heads: Sequence[Sequence[int]]) -> list[PackedBuffer]:
        """Splits the buffer into head chunks, which take over its memory.

        chunk_heads: For each chunk, the numbers of heads of its slots.
        """
        memory = self.memory.split([self._elements_per_head * sum(heads) for heads in chunk_heads])
        self.memory = self.memory[:0].clone()  # so that the memory is freed with the last chunk
        return [PackedBuffer(self.specs, *sizes) for sizes in zip(chunk_heads, memory, strict=True)]

    def write(self, index: int, x_BsND: Tensor, first_row: int = 0) -> None:
        """Writes rows of tensor `index`, which counts over all specs, from `first_row` on."""
        spec_index, index_in_spec = 0, index
        while index_in_spec >= self.specs[spec_index].count:
            index_in_spec -= self.specs[spec_index].count
            spec_index += 1
        for (start, stop), view in self.iter_views(spec_index):
            values = x_BsND[:, :, start:stop].unflatten(2, (view.shape[0], -1)).movedim(2, 0)
            view[:, :, first_row : first_row + x_BsND.shape[1], :, index_in_spec].copy_(values)

    def unpack(self) -> list[Tensor]:
        """Returns the received tensors [B,S,h,D]: joins the rows of all slots, of equal heads.

        With one spec and a batch of one these are views; otherwise each is copied once.
        """
        tensors: list[Tensor] = []
        for index in range(len(self.specs)):
            ((_, view_mBshTD),) = self.iter_views(index)
            tensors += [x_mBshD.movedim(0, 1).flatten(1, 2) for x_mBshD in view_mBshTD.unbind(4)]
        return tensors


def pack_tensors(tensors: Sequence[Tensor], heads_per_rank: Sequence[int]) -> PackedBuffer:
    """Packs tensors [B,s,N,D] into a send buffer; rank r gets `heads_per_rank[r]` of N."""
    buffer = PackedBuffer(make_tensor_specs(tensors), heads_per_rank, tensors[0].device)
    for index, x in enumerate(tensors):
        buffer.write(index, x)
    return buffer
