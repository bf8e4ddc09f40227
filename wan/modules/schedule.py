"""How an attention call is cut into pieces, and in which order they run: integers only."""

from __future__ import annotations

from collections.abc import Iterator

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

    A chunk's head count is a multiple of `world`, so that each card gets as many of it, and joining
    the chunks' results on the head axis restores the order.

    >>> head_ranges(40, 8)
    ((0, 8), (8, 16), (16, 24), (24, 32), (32, 40))
    """
    local = heads // world
    return tuple((a * world, b * world) for a, b in near_even(local, min(max_chunks, local)))


def heads_per_chunk(heads: int, world: int, max_chunks: int = MAX_CHUNKS) -> tuple[int, ...]:
    """How many heads a card holds of each chunk.

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
