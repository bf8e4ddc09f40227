"""The nearest run that fits into a device's memory: fewest flags, then another topology, then both.

Candidates are measured only where their bound (`wan.planner.bound`) leaves them possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from wan.cli.planned import Setup
from wan.planner import bound
from wan.planner.measure import Planner
from wan.settings.parallel import Parallel, legal

MOST_RANKS = 512  # and at most eight times as many as there are


class Fitting(NamedTuple):
    """The flags that make it, its ranks, and the bytes that the fullest one holds."""

    flags: str
    ranks: int
    need: int


def nearest(planner: Planner, memory: int) -> Fitting | None:
    """The first candidate that fits."""
    for flags, setup in _candidates(planner):
        if max(bound.stages(setup, planner.request).values()) <= memory:
            need = planner.need(setup)
            if need <= memory:
                return Fitting(flags, setup.parallel.world_size, need)
    return None


def _candidates(planner: Planner) -> Iterator[tuple[str, Setup]]:
    """The present topology with one flag that is not given, two, ..., all; other topologies
    without a flag; other topologies with all flags.
    """
    setup, flags = planner.setup, _flags(planner)
    for count in range(1, len(flags) + 1):
        for chosen in combinations(flags, count):
            yield " ".join(chosen), _changed(setup, chosen)
    for chosen in ((), flags) if flags else ((),):
        for words, parallel in _topologies(planner):
            changed = _changed(replace(setup, parallel=parallel), chosen)
            yield " ".join((words, *chosen)), changed


def _topologies(planner: Planner) -> Iterator[tuple[str, Parallel]]:
    """Every other topology than the present one: as many ranks, then more."""
    present, heads = planner.setup.parallel, planner.setup.checkpoint.heads
    world = present.world_size
    for ranks in range(world, max(world, min(8 * world, MOST_RANKS)) + 1):
        for cfg, ring, ulysses in sorted(legal(ranks, heads), key=lambda s: s[0] != present.cfg_size):
            sizes = {"cfg_size": cfg, "ring_size": ring, "ulysses_size": ulysses}
            other = replace(present, world_size=ranks, **sizes)
            if other != present and _is_possible(planner, other):
                words = f"--cfg_size {cfg} " if cfg > 1 else ""
                yield f"{words}--ring_size {ring} --ulysses_size {ulysses}", other


def _is_possible(planner: Planner, parallel: Parallel) -> bool:
    """As `wan.settings.parallel` would accept it with the flags that were given."""
    attention, execution = planner.setup.attention, planner.setup.execution
    exchanges = parallel.comm_type or parallel.fa_alltoall_overlap or attention.quant_alltoall
    return not (
        (exchanges and parallel.ulysses_size == 1)
        or (parallel.cfg_size == 2 and not planner.is_guided)
        or (parallel.ring_size > 1 and execution.compile)
        or (parallel.ring_size == 1 and parallel.ring_type != "ring")
    )


def _flags(planner: Planner) -> tuple[str, ...]:
    """Flags that take memory from the fullest rank and are not given."""
    execution, parallel = planner.setup.execution, planner.setup.parallel
    several, text_here = parallel.world_size > 1, not (execution.t5_cpu or parallel.t5_fsdp)
    offers = {
        "--offload_model true": not execution.offload_model,
        "--vae_tiling": not execution.vae_tiling,
        "--dit_fsdp": several and not parallel.dit_fsdp and planner.setup.quantised is None,
        "--t5_fsdp": several and text_here,
        "--t5_cpu": not several and text_here and planner.device.type != "cpu",
    }
    return tuple(flag for flag, offered in offers.items() if offered)


def _changed(setup: Setup, flags: Iterable[str]) -> Setup:
    fields = {flag.split()[0].removeprefix("--"): True for flag in flags}
    sharded = {name: fields.pop(name) for name in ("dit_fsdp", "t5_fsdp") if name in fields}
    parallel = replace(setup.parallel, **sharded)
    return replace(setup, parallel=parallel, execution=replace(setup.execution, **fields))
