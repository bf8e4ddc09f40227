"""What an exchange sends and receives: memory with one piece for each rank.

Legend: B batch, s tokens or rows of scales, N all heads, h heads of one piece, m pieces of one
size, D channels of a tensor.

A piece is contiguous: for each part [B,s,h,tensors,D], so that tensors of one shape and dtype lie
beside each other, head by head. Q, k and v are such a part, and what has arrived of them is, for a
batch of one, [1,S,h,3,D] without a copy. Scales of FP8 are parts behind it; then all are bytes.
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
    """Tensors of one shape and dtype: `count` of them with `width` channels each."""

    batch: int
    rows: int
    count: int
    width: int
    dtype: torch.dtype

    @property
    def head_bytes(self) -> int:
        """Bytes of one head."""
        return self.batch * self.rows * self.count * self.width * self.dtype.itemsize


def parts_of(tensors: Sequence[Tensor]) -> tuple[Part, ...]:
    """The parts of tensors [B,s,N,D]; neighbours of one shape and dtype share a part."""
    shapes = groupby((x.shape[0], x.shape[1], x.shape[3], x.dtype) for x in tensors)
    return tuple(Part(b, s, len(list(same)), d, dtype) for (b, s, d, dtype), same in shapes)


class Pieces:
    """Memory of pieces, one behind the other.

    Args:
        parts: Of each piece.
        heads: Of each piece, which may differ.
        memory: What holds them, or the device on which memory is taken.
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
        # gloo has no float8, so single bytes are sent as bytes
        unit = one if len(dtypes) == 1 and one.itemsize > 1 else torch.uint8
        self._per_head = sum(part.head_bytes for part in parts) // unit.itemsize
        if isinstance(memory, torch.device):
            memory = torch.empty(self._per_head * sum(heads), dtype=unit, device=memory)
        self.memory = memory.view(-1)

    @property
    def splits(self) -> list[int]:
        """Elements of each piece."""
        return [self._per_head * heads for heads in self.heads]

    @property
    def by_rank(self) -> Tensor:
        """The memory of equal pieces with an axis of ranks; of one part, with that part's axes."""
        by_rank = self.memory.view(len(self.heads), -1)
        if len(self.parts) > 1:
            return by_rank
        (part,), heads = self.parts, self.heads[0]
        return by_rank.view(-1, part.batch, part.rows, heads, part.count * part.width)

    def runs(self, index: int) -> Iterator[tuple[Range, Tensor]]:
        """One part as views [m,B,s,h,tensors,D], a view for each run of pieces of one size.

        Beside each stands the range of its heads among the heads of all pieces.
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
        """The pieces of each chunk, which take over the memory. shares: heads of its pieces."""
        memory = self.memory.split([self._per_head * sum(share) for share in shares])
        self.memory = self.memory[:0].clone()  # so that it is freed when all chunks are
        return [Pieces(self.parts, *both) for both in zip(shares, memory, strict=True)]

    def put(self, place: int, x_BsND: Tensor, row: int = 0) -> None:
        """Writes rows of one of the tensors, which are counted through all parts."""
        index = 0
        while place >= self.parts[index].count:
            place -= self.parts[index].count
            index += 1
        for (first, last), run in self.runs(index):
            heads = x_BsND[:, :, first:last].unflatten(2, (run.shape[0], -1)).movedim(2, 0)
            run[:, :, row : row + x_BsND.shape[1], :, place].copy_(heads)

    def tensors(self) -> list[Tensor]:
        """What has arrived, [B,S,h,D] each; pieces have equal heads, and their rows are joined.

        Of one part and a batch of one these are views, else each is copied once.
        """
        found: list[Tensor] = []
        for index in range(len(self.parts)):
            ((_, run_mBshTD),) = self.runs(index)
            found += (x_mBshD.movedim(0, 1).flatten(1, 2) for x_mBshD in run_mBshTD.unbind(4))
        return found


def packed(tensors: Sequence[Tensor], heads: Sequence[int]) -> Pieces:
    """Pieces of tensors [B,s,N,D], `heads` of N for each rank in turn; each is written once."""
    pieces = Pieces(parts_of(tensors), heads, tensors[0].device)
    for place, x in enumerate(tensors):
        pieces.put(place, x)
    return pieces
