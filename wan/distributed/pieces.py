"""The send and receive buffer of an all-to-all: one contiguous slot for each rank.

Legend: B batch, s tokens or rows of scales, N all heads, h heads of one slot, m slots of one size,
D channels of a tensor.

A slot holds [B,s,h,tensors,D] for each `TensorSpec`, so that tensors of one shape and dtype are
interleaved head by head. q, k and v share a spec: with a batch of one they are received as
[1,S,h,3,D] without a copy. The scales of FP8 follow as further specs; the buffer is then uint8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from wan.settings.schedule import Range


@dataclass(frozen=True)
class Part:
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


def parts_of(tensors: Sequence[Tensor]) -> tuple[Part, ...]:
    """Describes tensors [B,s,N,D]; consecutive ones of one shape and dtype share a spec."""
    shapes = groupby((x.shape[0], x.shape[1], x.shape[3], x.dtype) for x in tensors)
    return tuple(Part(b, s, len(list(same)), d, dtype) for (b, s, d, dtype), same in shapes)


class Pieces:
    """One buffer with a slot for each rank.

    Args:
        specs: The tensors of every slot.
        heads: Heads of each slot.
        memory: The buffer, or the device on which it is allocated.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        heads: Sequence[int],
        memory: Tensor | torch.device,
    ) -> None:
        self.parts, self.heads = tuple(parts), tuple(heads)
        dtypes = {part.dtype for part in parts}
        one = next(iter(dtypes))
        # gloo has no float8, so dtypes of one byte are sent as uint8
        unit = one if len(dtypes) == 1 and one.itemsize > 1 else torch.uint8
        self._per_head = sum(part.head_bytes for part in parts) // unit.itemsize
        if isinstance(memory, torch.device):
            memory = torch.empty(self._per_head * sum(heads), dtype=unit, device=memory)
        self.memory = memory.view(-1)

    @property
    def splits(self) -> list[int]:
        """Elements of each slot."""
        return [self._per_head * heads for heads in self.heads]

    @property
    def by_rank(self) -> Tensor:
        """The buffer [ranks, ...] if all slots have equal heads; with one spec, with its axes."""
        by_rank = self.memory.view(len(self.heads), -1)
        if len(self.parts) > 1:
            return by_rank
        (part,), heads = self.parts, self.heads[0]
        return by_rank.view(-1, part.batch, part.rows, heads, part.count * part.width)

    def runs(self, index: int) -> Iterator[tuple[Range, Tensor]]:
        """Yields the tensors of one spec as views [m,B,s,h,tensors,D], with the heads they hold.

        Consecutive slots of equal heads share a view. The range of heads counts over all slots.
        """
        part, first = self.parts[index], 0
        before = sum(other.head_bytes for other in self.parts[:index])
        unit = self.memory.dtype.itemsize
        begin, end = before // unit, (before + part.head_bytes) // unit
        for heads, same in groupby(self.heads):
            last = first + heads * len(list(same))
            run = self.memory[first * self._per_head : last * self._per_head]
            run = run.view(-1, heads * self._per_head)[:, heads * begin : heads * end]
            shape = (part.batch, part.rows, heads, part.count, part.width)
            yield (first, last), run.view(part.dtype).unflatten(-1, shape)
            first = last

    def chunks(self, shares: Sequence[Sequence[int]]) -> list[Pieces]:
        """Splits the buffer into head chunks, which take over its memory.

        chunk_heads: For each chunk, the heads of its slots.
        """
        memory = self.memory.split([self._per_head * sum(share) for share in shares])
        self.memory = self.memory[:0].clone()  # so that the memory is freed with the last chunk
        return [Pieces(self.parts, *both) for both in zip(shares, memory, strict=True)]

    def put(self, place: int, x_BsND: Tensor, row: int = 0) -> None:
        """Writes rows of tensor `index`, which counts over all specs, from `first_row` on."""
        index = 0
        while place >= self.parts[index].count:
            place -= self.parts[index].count
            index += 1
        for (first, last), run in self.runs(index):
            heads = x_BsND[:, :, first:last].unflatten(2, (run.shape[0], -1)).movedim(2, 0)
            run[:, :, row : row + x_BsND.shape[1], :, place].copy_(heads)

    def tensors(self) -> list[Tensor]:
        """Returns the received tensors [B,S,h,D]: joins the rows of all slots, of equal heads.

        With one spec and a batch of one these are views; otherwise each is copied once.
        """
        found: list[Tensor] = []
        for index in range(len(self.parts)):
            ((_, run_mBshTD),) = self.runs(index)
            found += (x_mBshD.movedim(0, 1).flatten(1, 2) for x_mBshD in run_mBshTD.unbind(4))
        return found


def packed(tensors: Sequence[Tensor], heads: Sequence[int]) -> Pieces:
    """Packs tensors [B,s,N,D] into a send buffer; each rank in turn gets `heads` of N."""
    pieces = Pieces(parts_of(tensors), heads, tensors[0].device)
    for place, x in enumerate(tensors):
        pieces.put(place, x)
    return pieces
