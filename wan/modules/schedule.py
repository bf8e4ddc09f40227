"""How an attention call is cut into pieces, and in which order they run: integers only.

Which tokens each rank computes, as integers (no torch, so that it can be planned anywhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_CHUNKS = 10  # the published InsertComm: ten exchanges are enough rests for the chip

Range = tuple[int, int]
Event = tuple[str, int]
"""(verb, chunk). start: send q, k, v; attend: receive and compute; finish: send the result back."""


def near_even(total: int, parts: int) -> tuple[Range, ...]:
    """`parts` consecutive ranges that cover range(total), sizes as equal as possible, larger first.

    >>> near_even(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    size, extra = divmod(total, parts)
    borders = [i * size + min(i, extra) for i in range(parts + 1)]
    return tuple(zip(borders, borders[1:], strict=False))


def head_ranges(heads: int, world: int, max_chunks: int = MAX_CHUNKS) -> tuple[Range, ...]:
    """The chunks of a call as ranges of global heads; `world` divides `heads`.

    A chunk's head count is a multiple of `world`, so that each rank gets as many of it, and joining
    the chunks' results on the head axis restores the order.

    >>> head_ranges(40, 8)
    ((0, 8), (8, 16), (16, 24), (24, 32), (32, 40))
    """
    local = heads // world
    return tuple((a * world, b * world) for a, b in near_even(local, min(max_chunks, local)))


def heads_per_chunk(heads: int, world: int, max_chunks: int = MAX_CHUNKS) -> tuple[int, ...]:
    """How many heads a rank holds of each chunk.

    >>> heads_per_chunk(24, 2)
    (2, 2, 1, 1, 1, 1, 1, 1, 1, 1)
    """
    return tuple((b - a) // world for a, b in head_ranges(heads, world, max_chunks))


def q_ranges(rows: int, blocks: int, multiple: int = 1) -> tuple[Range, ...]:
    """The query blocks of a call. Borders are rounded up to `multiple` (a quantiser's row block).

    Equal to `torch.tensor_split` at multiple 1; with a larger one, empty blocks are left out.

    >>> q_ranges(300, 2, 128)
    ((0, 256), (256, 300))
    """
    if multiple == 1:
        return near_even(rows, blocks)
    borders = [min(-(-b // multiple) * multiple, rows) for _, b in near_even(rows, blocks)]
    return tuple((a, b) for a, b in zip([0, *borders], borders, strict=False) if a < b)


def in_order(chunks: int) -> Iterator[Event]:
    """Each chunk is exchanged, computed and sent back before the next begins: the chip's rests."""
    for chunk in range(chunks):
        yield "start", chunk
        yield "attend", chunk
        yield "finish", chunk


def pipelined(chunks: int) -> Iterator[Event]:
    """Exchanges run while a neighbouring chunk is computed, one chunk ahead."""
    yield "start", 0
    for chunk in range(chunks):
        if chunk + 1 < chunks:
            yield "start", chunk + 1
        yield "attend", chunk
        if chunk:
            yield "finish", chunk - 1
    yield "finish", chunks - 1


@dataclass(frozen=True)
class TokenPlan:
    """Equal, consecutive shards of a sequence; what is missing at its end is padding (integers).

    tokens: real tokens. ranks: how many share them. multiple: a shard's length is a multiple of
    this (the row blocks of quantised exchanges and sparse masks).
    """

    tokens: int
    ranks: int
    multiple: int = 1

    @property
    def shard_len(self) -> int:
        per_rank = -(-self.tokens // self.ranks)
        return -(-per_rank // self.multiple) * self.multiple

    @property
    def padded(self) -> int:
        """Length of the whole sequence with padding."""
        return self.shard_len * self.ranks

    def valid(self, rank: int) -> int:
        """Real tokens of a rank; they come before its padding."""
        return min(max(self.tokens - rank * self.shard_len, 0), self.shard_len)

    def runs(self, lengths: Sequence[int], rank: int) -> tuple[int, ...]:
        """Lengths, within a rank's shard, of runs given by their whole lengths.

        Padding belongs to the last run. Runs that the shard does not touch have length 0.
        """
        begin, end = rank * self.shard_len, (rank + 1) * self.shard_len
        borders = [sum(lengths[:i]) for i in range(len(lengths))] + [self.padded]
        clipped = [min(max(b, begin), end) for b in borders]
        return tuple(b - a for a, b in zip(clipped, clipped[1:], strict=False))
