"""Attention modes of FA_Power_Cap: head chunks, query blocks, their order, and token shards.

A mode sets the number of head chunks of an attention call, the number of query blocks of each
chunk, and the order in which chunks are exchanged and computed. A new mode is a new row of `MODES`.
Everything is computed with integers and without torch, so that settings and planner use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

Range = tuple[int, int]
Grid = tuple[int, int, int]
"""Tokens along frame, height and width."""

Action = tuple[str, int]
"""(action, chunk). start: send q, k and v; attend: receive them, compute, and start to send the
result back; finish: receive the result."""

Order = Callable[[int], Iterator[Action]]
"""order(chunks): yields the actions of a call in their order."""


def order_sequentially(chunks: int) -> Iterator[Action]:
    """Yields all actions of a chunk before those of the next; the device idles in exchanges."""
    for chunk in range(chunks):
        yield "start", chunk
        yield "attend", chunk
        yield "finish", chunk


def order_with_overlap(chunks: int) -> Iterator[Action]:
    """Yields an order in which each exchange runs during the attention of a neighboring chunk."""
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
    """How a call of the attention layer is split into head chunks and query blocks.

    Attributes:
        name: Name in logs and records.
        chunks: Maximum of head chunks of a call.
        blocks: Query blocks of each chunk.
        order: Yields the actions of a call.
    """

    name: str
    chunks: int
    blocks: int
    order: Order

    @property
    def overlaps(self) -> bool:
        """Whether a chunk is computed during the exchange of another one."""
        chunk_order = [chunk for _, chunk in self.order(2)]
        return sum(a != b for a, b in pairwise(chunk_order)) > 1


MODES = {  # by --comm_type
    0: Mode("baseline", chunks=1, blocks=1, order=order_sequentially),
    # As published: the device idles in ten exchanges, and mode 2 splits queries into two blocks.
    1: Mode("InsertComm", chunks=10, blocks=1, order=order_sequentially),
    2: Mode("BlockAttn", chunks=10, blocks=2, order=order_sequentially),
}
CHUNKED_MODES = tuple(comm_type for comm_type, mode in MODES.items() if mode.chunks > 1)
# The opposite aim: exchanges overlap with attention, and the device does not idle.
OVERLAP = Mode("A2A/FA overlap", chunks=10, blocks=1, order=order_with_overlap)


def select_attention_mode(
    comm_type: int, fa_alltoall_overlap: bool = False, chunks: int | None = None
) -> Mode:
    """Returns the mode that these settings select.

    Args:
        comm_type: Key of `MODES`.
        fa_alltoall_overlap: Selects `OVERLAP`.
        chunks: Replaces the mode's maximum of head chunks.

    Raises:
        ValueError: The mode does not exist, or `chunks` is set for a mode without chunks.
    """
    legal = list(MODES)
    if comm_type not in legal:
        allowed = ", ".join(str(value) for value in legal[:-1])
        raise ValueError(f"comm_type must be {allowed}, or {legal[-1]}, but got {comm_type}.")
    mode = OVERLAP if fa_alltoall_overlap else MODES[comm_type]
    if chunks is None:
        return mode
    if chunks < 1 or mode.chunks == 1:
        raise ValueError(f"chunks must be at least 1, and None for mode 0, but got {chunks}.")
    return replace(mode, chunks=chunks)


def split_evenly(total: int, num_parts: int) -> tuple[Range, ...]:
    """Splits range(total) into consecutive ranges of nearly equal sizes, larger ones first.

    >>> split_evenly(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    size, extra = total // num_parts, total % num_parts  # torch.compile cannot trace divmod
    borders = [i * size + min(i, extra) for i in range(num_parts + 1)]
    # strict=False would be strict to the compiler of torch 2.9
    return tuple(zip(borders[:-1], borders[1:], strict=True))


def count_heads_per_rank(heads: int, world: int) -> tuple[int, ...]:
    """Returns the number of heads of each rank; they differ by at most one.

    >>> count_heads_per_rank(40, 6)
    (7, 7, 7, 7, 6, 6)
    """
    return tuple(b - a for a, b in split_evenly(heads, world))


def split_heads(heads: int, world: int, max_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Splits the heads of a call into chunks, and returns the heads of each rank in each chunk.

    All ranks have the same number of chunks, at most `max_chunks`. Concatenating the ranks' results
    in each chunk, then the chunks, restores the order of the heads.

    >>> split_heads(7, 3, 10)
    ((2, 1, 1), (1, 1, 1))
    """
    by_rank = count_heads_per_rank(heads, world)
    chunks = min(max_chunks, *by_rank)
    return tuple(
        zip(*(count_heads_per_rank(rank_heads, chunks) for rank_heads in by_rank), strict=True)
    )


def list_head_ranges(heads: int, world: int, max_chunks: int) -> tuple[Range, ...]:
    """Returns the chunks of a call as ranges of global heads.

    >>> list_head_ranges(40, 8, 10)
    ((0, 8), (8, 16), (16, 24), (24, 32), (32, 40))
    """
    borders = list(accumulate(map(sum, split_heads(heads, world, max_chunks))))
    return tuple(zip([0, *borders[:-1]], borders, strict=True))


def count_heads_per_chunk(
    heads: int, world: int, max_chunks: int, rank: int = 0
) -> tuple[int, ...]:
    """Returns the number of a rank's heads in each chunk; no rank has more than the first.

    >>> count_heads_per_chunk(24, 2, 10)
    (2, 2, 1, 1, 1, 1, 1, 1, 1, 1)
    """
    return tuple(chunk[rank] for chunk in split_heads(heads, world, max_chunks))


def q_ranges(rows: int, blocks: int, multiple: int = 1) -> tuple[Range, ...]:
    """Returns the query blocks of a call as ranges of rows.

    Borders are rounded up to `multiple`, the rows per quantization scale. With multiple 1 the
    result is that of `torch.tensor_split`; with a larger one, empty blocks are omitted.

    >>> q_ranges(300, 2, 128)
    ((0, 256), (256, 300))
    """
    if multiple == 1:
        return split_evenly(rows, blocks)
    borders = [min(-(-b // multiple) * multiple, rows) for _, b in split_evenly(rows, blocks)]
    return tuple((a, b) for a, b in zip([0, *borders[:-1]], borders, strict=True) if a < b)


def count_valid_rows(tokens: int, rank: int, rows: int) -> int:
    """Returns how many of `tokens` a rank has where each rank has `rows` consecutive ones."""
    return min(max(tokens - rank * rows, 0), rows)


@dataclass(frozen=True)
class TokenPlan:
    """Split of a sequence into consecutive shards of equal length, with padding at its end.

    Attributes:
        tokens: Tokens without padding.
        ranks: Ranks that share the sequence.
        multiple: The length of a shard is a multiple of this (rows per quantization scale or per
            block of a sparse mask).
    """

    tokens: int
    ranks: int
    multiple: int = 1

    @property
    def shard_len(self) -> int:
        per_rank = -(-self.tokens // self.ranks)
        return -(-per_rank // self.multiple) * self.multiple

    @property
    def padded_len(self) -> int:
        """Length of the sequence with padding."""
        return self.shard_len * self.ranks

    def count_valid_tokens(self, rank: int) -> int:
        """Returns the number of a rank's tokens without padding, which is at the end of a shard."""
        return count_valid_rows(self.tokens, rank, self.shard_len)

    def shard_segments(self, lengths: Sequence[int], rank: int) -> tuple[int, ...]:
        """Returns the length of each segment of the sequence within a rank's shard.

        Padding belongs to the last segment. Segments outside the shard have length 0.

        Args:
            lengths: Lengths of consecutive segments over the sequence.
            rank: Rank of the shard.
        """
        begin, end = rank * self.shard_len, (rank + 1) * self.shard_len
        borders = [sum(lengths[:i]) for i in range(len(lengths))] + [self.padded_len]
        clipped = [min(max(b, begin), end) for b in borders]
        return tuple(b - a for a, b in zip(clipped[:-1], clipped[1:], strict=True))
