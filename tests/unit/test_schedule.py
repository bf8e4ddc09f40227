"""How attention is divided: the modes, the chunk table, ranges that cover, orders of events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wan.settings.attention_modes import (
    MODES,
    OVERLAP,
    Action,
    Mode,
    Range,
    count_heads_per_chunk,
    list_head_ranges,
    order_sequentially,
    order_with_overlap,
    q_ranges,
    select_attention_mode,
    split_evenly,
)

CALM = settings(deadline=None)  # the machine may be busy


def sizes(ranges: tuple[Range, ...]) -> list[int]:
    return [b - a for a, b in ranges]


def assert_covers(ranges: tuple[Range, ...], total: int) -> None:
    """Consecutive, from 0 to total, nothing twice."""
    assert [i for a, b in ranges for i in range(a, b)] == list(range(total))


CHUNKS: dict[tuple[int, int], list[int]] = {  # heads and ranks -> heads of each chunk on a rank
    (40, 2): [2] * 10,
    (40, 4): [1] * 10,
    (40, 5): [1] * 8,
    (40, 8): [1] * 5,
    (24, 2): [2, 2] + [1] * 8,
    (24, 3): [1] * 8,
    (24, 4): [1] * 6,
    (24, 8): [1] * 3,
    (40, 1): [4] * 10,
    (12, 12): [1],
}


def test_chunk_table() -> None:
    """As in the feature's description."""
    expected = {case: [case[1] * h for h in per_rank] for case, per_rank in CHUNKS.items()}
    assert {case: sizes(list_head_ranges(*case, 10)) for case in CHUNKS} == expected
    assert {case: list(count_heads_per_chunk(*case, 10)) for case in CHUNKS} == CHUNKS


@CALM
@given(local=st.integers(1, 64), world=st.integers(1, 16), most=st.integers(1, 12))
def test_head_ranges(local: int, world: int, most: int) -> None:
    ranges = list_head_ranges(local * world, world, most)
    assert_covers(ranges, local * world)
    assert len(ranges) == min(most, local)
    assert all(size and size % world == 0 for size in sizes(ranges))
    assert max(sizes(ranges)) - min(sizes(ranges)) <= world


@CALM
@given(rows=st.integers(0, 5000), blocks=st.integers(1, 12))
def test_query_blocks_are_those_of_tensor_split(rows: int, blocks: int) -> None:
    expected = [x.tolist() for x in torch.arange(rows).tensor_split(blocks)]
    for ranges in (q_ranges(rows, blocks), split_evenly(rows, blocks)):
        assert [list(range(a, b)) for a, b in ranges] == expected


@CALM
@given(rows=st.integers(0, 5000), blocks=st.integers(1, 4), multiple=st.sampled_from([128, 256]))
def test_query_blocks_of_a_quantiser(rows: int, blocks: int, multiple: int) -> None:
    """Row blocks of the whole call are never divided, and each block is about its share."""
    ranges = q_ranges(rows, blocks, multiple)
    assert_covers(ranges, rows)
    assert all(a < b and a % multiple == 0 for a, b in ranges)
    assert len(ranges) <= blocks
    assert all(size < rows / blocks + multiple for size in sizes(ranges))


def test_the_published_modes() -> None:
    rows = {comm_type: (row.name, row.chunks, row.blocks) for comm_type, row in MODES.items()}
    assert rows[0] == ("baseline", 1, 1)
    assert rows[1] == ("InsertComm", 10, 1)
    assert rows[2] == ("BlockAttn", 10, 2)
    assert (OVERLAP.name, OVERLAP.chunks, OVERLAP.blocks) == ("A2A/FA overlap", 10, 1)
    assert OVERLAP.overlaps and not any(MODES[comm_type].overlaps for comm_type in range(3))


def test_an_order_overlaps_where_chunks_are_between_one_another() -> None:
    def last_first(chunks: int) -> Iterator[Action]:
        for chunk in reversed(range(chunks)):
            yield from (("start", chunk), ("attend", chunk), ("finish", chunk))

    def all_first(chunks: int) -> Iterator[Action]:
        for verb in ("start", "attend", "finish"):
            yield from ((verb, chunk) for chunk in range(chunks))

    assert not Mode("last first", 10, 1, last_first).overlaps
    assert Mode("all first", 10, 1, all_first).overlaps


def test_a_run_asks_for_a_row() -> None:
    """Modes with chunks accept another number of them; the rest of the row is unchanged."""
    for (comm_type, row), overlap in product(MODES.items(), (False, True)):
        row = OVERLAP if overlap else row
        assert select_attention_mode(comm_type, overlap) is row
        if comm_type or overlap:
            expected = replace(row, chunks=3)
            assert select_attention_mode(comm_type, overlap, 3) == expected
    with pytest.raises(ValueError, match=r"comm_type must be 0, 1, .*, but got nonsense\.$"):
        select_attention_mode("nonsense")  # type: ignore[arg-type]
    for comm_type, chunks in ((0, 2), (0, 1), (1, 0), (2, -1)):
        with pytest.raises(ValueError, match="chunks must be at least 1, and None for mode 0"):
            select_attention_mode(comm_type, chunks=chunks)


def test_orders() -> None:
    """With overlap, when a chunk is attended to, the next has been started, and no other."""
    verbs = ("start", "attend", "finish")
    assert list(order_sequentially(3)) == [(verb, chunk) for chunk in range(3) for verb in verbs]
    assert " ".join(f"{verb}{chunk}" for verb, chunk in order_with_overlap(4)) == (
        "start0 start1 attend0 start2 attend1 finish0 start3 attend2 finish1 attend3 finish2 "
        "finish3"
    )
    assert [*order_with_overlap(1)] == [*order_sequentially(1)]
