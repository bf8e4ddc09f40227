"""Topologies: default choices and refusals; each refusal names settings that work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import check_refusals
from wan.planner.placement import list_layouts
from wan.settings.attention_modes import MODES
from wan.settings.errors import COMMAND_LINE_NAMING, InputError
from wan.settings.parallel import (
    Parallel,
    check_guidance,
    enumerate_topologies,
    note_machine_spanning,
    resolve_topology,
)

GUIDE_SCALES = (3.0, 4.0)


def sizes(world: int, heads: int = 40, **flags: Any) -> tuple[int, int, int]:
    return resolve_topology(flags, world, heads)[0].mesh_shape


def refusal(world: int, heads: int = 40, guide: Any = GUIDE_SCALES, **flags: Any) -> str:
    with pytest.raises(InputError) as caught:
        resolve_and_check(flags, world, heads, guide)
    caught.value.naming = COMMAND_LINE_NAMING
    return str(caught.value)


def resolve_and_check(
    flags: dict[str, Any], world: int, heads: int, guide: tuple[float, float]
) -> tuple[Parallel, tuple[str, ...]]:
    parallel, notices = resolve_topology(flags, world, heads)
    return parallel, (*notices, *check_guidance(parallel, guide, heads))


CHOSEN: list[tuple[int, int, dict[str, int], tuple[int, int, int]]] = [
    (1, 40, {}, (1, 1, 1)),
    (8, 40, {}, (1, 1, 8)),
    (16, 40, {}, (1, 2, 8)),
    (16, 24, {}, (1, 2, 8)),
    (7, 40, {}, (1, 1, 7)),
    (6, 40, {}, (1, 1, 6)),
    (16, 12, {}, (1, 4, 4)),
    (17, 12, {}, (1, 17, 1)),
    (16, 40, {"ulysses_size": 16}, (1, 1, 16)),
    (8, 40, {"ulysses_size": 1}, (1, 8, 1)),
    (8, 40, {"ring_size": 1}, (1, 1, 8)),
    (8, 40, {"ring_size": 4}, (1, 4, 2)),
    (16, 40, {"cfg_size": 2}, (2, 1, 8)),
    (16, 40, {"cfg_size": 2, "ring_size": 2, "ulysses_size": 4}, (2, 2, 4)),
]


def test_missing_sizes_are_chosen() -> None:
    assert [(*case[:3], sizes(case[0], case[1], **case[2])) for case in CHOSEN] == CHOSEN


def test_refusals_list_what_works() -> None:
    messages = {
        "too many": refusal(64, 40, ulysses_size=64),
        "another product": refusal(8, ring_size=2, ulysses_size=3, heads=24),
        "one branch": refusal(4, guide=(1.0, 1.0), cfg_size=2),
        "one rank": refusal(1, comm_type=1),
        "one head each": refusal(8, comm_type=2, ulysses_size=1),
        "two modes": refusal(8, comm_type=1, fa_alltoall_overlap=True),
        "compiled ring": refusal(2, compile=True, ring_size=2),
        "shards on the CPU": refusal(2, t5_fsdp=True, t5_cpu=True),
        "chunks of a rank with fewer heads": refusal(6, 40, ulysses_size=6, comm_type=1, chunks=7),
    }
    authors = "comm_type optimization requires ulysses_size > 1."
    assert all(messages[case].startswith(authors) for case in ("one rank", "one head each"))
    check_refusals(
        "parallel", {case: text.removeprefix(authors) for case, text in messages.items()}
    )


def test_notices() -> None:
    def announce(world: int, heads: int, **flags: int) -> tuple[str, ...]:
        return resolve_and_check(flags, world, heads, (1.0, 4.0))[1]

    assert announce(16, 40) == ("Chosen: `ring_size=2` `ulysses_size=8` for 16 ranks.",)
    assert announce(16, 40, ring_size=2, ulysses_size=8) == announce(1, 40) == ()
    assert announce(6, 40)[1] == "40 heads on 6 ranks of a Ulysses group: 7, 7, 7, 7, 6, 6."
    (notice,) = announce(4, 40, cfg_size=2, ulysses_size=2, ring_size=1)
    assert "low-noise" in notice
    assert "nothing to interleave" in announce(12, 12, comm_type=1, ulysses_size=12)[0]


@given(
    world=st.integers(1, 64),
    heads=st.sampled_from([12, 24, 40]),
    flags=st.fixed_dictionaries(
        {},
        optional={
            "cfg_size": st.integers(1, 2),
            "ring_size": st.integers(1, 16),
            "ulysses_size": st.integers(1, 64),
            "ring_type": st.sampled_from(["ring", "bidirectional"]),
            "comm_type": st.sampled_from(list(MODES)),
            "chunks": st.integers(1, 20),
            "fa_alltoall_overlap": st.booleans(),
            "dit_fsdp": st.booleans(),
            "t5_fsdp": st.booleans(),
            "t5_cpu": st.booleans(),
            "compile": st.booleans(),
        },
    ),
    guide=st.tuples(st.sampled_from([1.0, 3.0]), st.sampled_from([1.0, 4.0])),
)
def test_any_flags_resolve_or_are_refused(
    world: int, heads: int, flags: dict[str, Any], guide: tuple[float, float]
) -> None:
    """Resolved flags are consistent and keep their values; proposals of refusals resolve."""
    try:
        parallel, _ = resolve_and_check(flags, world, heads, guide)
    except InputError as error:
        error.naming = COMMAND_LINE_NAMING
        assert "\n" not in str(error) and str(error).endswith(".")
        for proposal in re.findall(r"(?:: |; )((?:--\w+ \d+ ?)+)", str(error)):
            proposed = {k: int(n) for k, n in re.findall(r"--(\w+) (\d+)", proposal)}
            resolve_topology({"cfg_size": 1, **proposed}, world, heads)
        return
    assert parallel.cfg_size * parallel.sequence_size == world
    assert heads >= parallel.ulysses_size
    assert all(getattr(parallel, k) == v for k, v in flags.items() if hasattr(parallel, k))
    assert parallel.mesh_shape in set(enumerate_topologies(world, heads))
    assert parallel.comm_type == 0 or parallel.ulysses_size > 1


SPANNING: list[tuple[int, int, dict[str, int], str | None]] = [  # ranks, and those on a machine
    (16, 8, {"ulysses_size": 16}, "--ring_size 2 --ulysses_size 8"),
    (12, 6, {}, "--ring_size 2 --ulysses_size 6"),  # 40 heads: ulysses 12, unevenly
    (4, 1, {}, "--ring_size 4 --ulysses_size 1"),
    (16, 8, {}, None),
    (8, 8, {}, None),
    (16, 8, {"ulysses_size": 1}, None),
]


def test_groups_that_span_machines_are_noticed() -> None:
    for world, per_machine, flags, inside in SPANNING:
        notices = note_machine_spanning(resolve_topology(flags, world, 40)[0], per_machine, 40)
        assert len(notices) == (inside is not None), (world, per_machine)
        assert inside is None or inside in COMMAND_LINE_NAMING.render(notices[0])


def test_layouts_on_two_machines() -> None:
    """There are 8 ranks, 4 on each machine, and q of a rank's tokens takes 1 MB."""
    by_sizes = {layout.sizes: layout for layout in list_layouts(8, 40, 2, 8e6, (100.0, 10.0))}
    ulysses_only, hybrid = by_sizes[1, 1, 8], by_sizes[1, 2, 4]
    assert (ulysses_only.bytes_inside, ulysses_only.bytes_between) == pytest.approx(
        (4e6 * 3 / 8, 4e6 * 4 / 8)
    )
    assert (hybrid.bytes_inside, hybrid.bytes_between) == pytest.approx((4e6 * 3 / 4, 2e6))
    assert ulysses_only.seconds == pytest.approx(1.5e6 / 1e11 + 2e6 / 1e10)
    ring_only = by_sizes[1, 8, 1]  # the rank that passes on to the other machine
    assert (ring_only.bytes_inside, ring_only.bytes_between) == pytest.approx((0, 14e6))
    rings_inside = by_sizes[2, 2, 2]  # the last rank of a ring passes on to its first one
    assert (rings_inside.bytes_inside, rings_inside.bytes_between) == pytest.approx((8e6, 0))
    assert list_layouts(8, 40, 2, 8e6, None)[0].bytes_between == min(
        item.bytes_between for item in by_sizes.values()
    )
    with pytest.raises(InputError, match="does not divide the 8 ranks"):
        list_layouts(8, 40, 3, 8e6, None)
