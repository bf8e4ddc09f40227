"""How self-attention is divided, as integers: modes, head chunks, query blocks, token shards.

Nothing here needs torch, so that settings and the planner use it too. A mode of FA_Power_Cap is a
row: into how many chunks of heads a call is divided, into how many blocks of queries each chunk,
and in which order chunks are exchanged and attended to. A new mode is a new row of `MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

Range = tuple[int, int]
Grid = tuple[int, int, int]
"""Tokens along frame, height and width."""

Action = tuple[str, int]
"""(verb, chunk). start: send q, k, v; attend: receive and compute; finish: send the result back."""

Order = Callable[[int], Iterator[Action]]
"""order(chunks): what happens to which chunk, one event after the other."""


def in_order(chunks: int) -> Iterator[Action]:
    """Each chunk is exchanged, computed and sent back before the next: the device's rests."""
    for chunk in range(chunks):
        yield "start", chunk
        yield "attend", chunk
        yield "finish", chunk


def pipelined(chunks: int) -> Iterator[Action]:
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
class Mode:
    """How a call of the attention layer is divided.

    Attributes:
        name: For logs and records.
        chunks: Most head chunks of a call.
        blocks: Query blocks of each chunk.
        order: Of exchanges and attention.
    """

    name: str
    chunks: int
    blocks: int
    order: Order

    @property
    def overlaps(self) -> bool:
        """Whether the order computes a chunk while an exchange of another one is under way."""
        of_two = [chunk for _, chunk in self.order(2)]
        return sum(a != b for a, b in pairwise(of_two)) > 1


MODES = {  # by --comm_type
    0: Mode("baseline", chunks=1, blocks=1, order=in_order),
    # As published: ten exchanges are enough rests for the device, and queries have two blocks.
    1: Mode("InsertComm", chunks=10, blocks=1, order=in_order),
    2: Mode("BlockAttn", chunks=10, blocks=2, order=in_order),
}
# The opposite aim: exchanges are hidden under attention, and there are no rests.
OVERLAP = Mode("A2A/FA overlap", chunks=10, blocks=1, order=pipelined)


def mode_of(comm_type: int, fa_alltoall_overlap: bool = False, chunks: int | None = None) -> Mode:
    """The row that a run asks for, perhaps with another number of chunks.

    Raises:
        ValueError: There is no such row, or chunks are given for one that has none.
    """
    legal = list(MODES)
    if comm_type not in legal:
        words = ", ".join(str(value) for value in legal[:-1])
        raise ValueError(f"comm_type must be {words}, or {legal[-1]}, but got {comm_type}.")
    mode = OVERLAP if fa_alltoall_overlap else MODES[comm_type]
    if chunks is None:
        return mode
    if chunks < 1 or mode.chunks == 1:
        raise ValueError(f"chunks must be at least 1, and None for mode 0, but got {chunks}.")
    return replace(mode, chunks=chunks)


def near_even(total: int, parts: int) -> tuple[Range, ...]:
    """`parts` consecutive ranges that cover range(total), sizes as equal as possible, larger first.

    >>> near_even(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    size, extra = total // parts, total % parts  # divmod does not trace where total is symbolic
    borders = [i * size + min(i, extra) for i in range(parts + 1)]
    return tuple(zip(borders, borders[1:], strict=False))


def heads_per_rank(heads: int, world: int) -> tuple[int, ...]:
    """How many heads each rank attends with: as many as the others, or one more.

    >>> heads_per_rank(40, 6)
    (7, 7, 7, 7, 6, 6)
    """
    return tuple(b - a for a, b in near_even(heads, world))


def head_split(heads: int, world: int, most: int) -> tuple[tuple[int, ...], ...]:
    """How many heads of each chunk of a call, `most` chunks at most, each rank attends with.

    Every rank has as many chunks. Joining the chunks' results on the head axis, and in a chunk the
    ranks', restores the order.

    >>> head_split(7, 3, 10)
    ((2, 1, 1), (1, 1, 1))
    """
    of_rank = heads_per_rank(heads, world)
    chunks = min(most, *of_rank)
    return tuple(zip(*(heads_per_rank(mine, chunks) for mine in of_rank), strict=True))


def head_ranges(heads: int, world: int, most: int) -> tuple[Range, ...]:
    """The chunks of a call as ranges of global heads.

    >>> head_ranges(40, 8, 10)
    ((0, 8), (8, 16), (16, 24), (24, 32), (32, 40))
    """
    ends = list(accumulate(map(sum, head_split(heads, world, most))))
    return tuple(zip([0, *ends], ends, strict=False))


def heads_per_chunk(heads: int, world: int, most: int, rank: int = 0) -> tuple[int, ...]:
    """How many heads a rank holds of each chunk; the first rank has most.

    >>> heads_per_chunk(24, 2, 10)
    (2, 2, 1, 1, 1, 1, 1, 1, 1, 1)
    """
    return tuple(chunk[rank] for chunk in head_split(heads, world, most))


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


def valid_rows(tokens: int, rank: int, rows: int) -> int:
    """How many of `tokens` lie on a rank, where each rank in turn holds `rows`."""
    return min(max(tokens - rank * rows, 0), rows)


@dataclass(frozen=True)
class TokenPlan:
    """Equal, consecutive shards of a sequence; what is missing at its end is padding.

    Attributes:
        tokens: Real tokens.
        ranks: How many share them.
        multiple: A shard's length is a multiple of this (the row blocks of quantised exchanges and
            sparse masks).
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
        return valid_rows(self.tokens, rank, self.shard_len)

    def runs(self, lengths: Sequence[int], rank: int) -> tuple[int, ...]:
        """Lengths, within a rank's shard, of runs given by their whole lengths.

        Padding belongs to the last run. Runs that the shard does not touch have length 0.
        """
        begin, end = rank * self.shard_len, (rank + 1) * self.shard_len
        borders = [sum(lengths[:i]) for i in range(len(lengths))] + [self.padded]
        clipped = [min(max(b, begin), end) for b in borders]
        return tuple(b - a for a, b in zip(clipped, clipped[1:], strict=False))
