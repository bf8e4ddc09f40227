"""The nearest run that fits into a device's memory: fewest flags, then blocks that are copied in
every forward, then another topology, then that and flags.

Candidates are measured only where their bound (`wan.pipeline.bound`) leaves them possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

from wan.pipeline import bound
from wan.pipeline.setup import Setup
from wan.planner.measure import Planner
from wan.settings.errors import InputError
from wan.settings.parallel import SIZES, Parallel, legal, resolve, size_flags

STREAMED, TILED = "--offload_model block", "--vae_tiling"
MOST_RANKS = 512  # and at most eight times as many as there are


def nearest(planner: Planner, memory: int) -> tuple[str, int, int] | None:
    """The first candidate that fits: its flags, ranks, and bytes of the fullest one."""
    for flags, setup in _candidates(planner, memory):
        if max(bound.least(setup, planner.request).values()) <= memory:
            for one, _ in means(setup):
                need = planner.need(one)
                if need <= memory:
                    return flags, setup.parallel.world_size, need
    return None


def means(setup: Setup) -> Iterator[tuple[Setup, str]]:
    """How a run may decode, in the order in which it does by itself; and that in words."""
    yield setup, ""
    several, execution = setup.parallel.world_size > 1, setup.execution
    if several and not (execution.vae_parallel or execution.vae_tiling):
        shared = replace(execution, vae_parallel=True)
        yield replace(setup, execution=shared), ", if all ranks share the rows of the VAE"
    if not execution.vae_tiling:
        tiles = replace(execution, vae_parallel=False, vae_tiling=True)
        yield replace(setup, execution=tiles), ", if the VAE decodes in tiles, which is not exact"


def _candidates(planner: Planner, memory: int) -> Iterator[tuple[str, Setup]]:
    """The present topology with one flag more, two, ..., all, or streamed; others with none; others
    with all."""
    present, others = planner.setup, list(_topologies(planner))
    flags = _flags(planner, present, memory)
    for count in range(1, len(flags) + 1):
        for chosen in combinations(flags, count):
            yield " ".join(chosen), _changed(present, chosen)
    streamed = (
        [] if present.execution.offload_model == "block" else [(STREAMED,), (STREAMED, TILED)]
    )
    for chosen in streamed:
        with suppress(InputError):  # what it excludes is given
            yield " ".join(chosen), _changed(present, chosen)
    yield from others
    for words, setup in others:
        flags = _flags(planner, setup, memory)
        yield " ".join((words, *flags)), _changed(setup, flags)


def _topologies(planner: Planner) -> Iterator[tuple[str, Setup]]:
    """Every other topology that the given flags allow: as many ranks, then more."""
    present, heads = planner.setup.parallel, planner.setup.checkpoint.heads
    given = {f.name: getattr(present, f.name) for f in fields(Parallel)}
    kept = {f.name: given[f.name] for f in fields(Parallel) if given[f.name] != f.default}
    kept["compile"] = planner.setup.execution.compile
    world = present.world_size
    for ranks in range(world, max(world, min(8 * world, MOST_RANKS)) + 1):
        for sizes in sorted(legal(ranks, heads), key=lambda sizes: sizes[0] != present.cfg_size):
            try:
                other, _ = resolve(kept | dict(zip(SIZES, sizes, strict=True)), ranks, heads)
                setup = replace(planner.setup, parallel=other)
                setup.check_request(planner.request)
            except InputError:
                continue
            if other != present:
                yield size_flags(*sizes), setup


def _flags(planner: Planner, setup: Setup, memory: int) -> tuple[str, ...]:
    """Flags that take memory from a stage that is too large, and are not given."""
    execution, parallel, several = setup.execution, setup.parallel, setup.parallel.world_size > 1
    large = {name for name, parts in planner.stages().items() if parts.total() > memory}
    text = "text encoder" in large or execution.offload_model is False
    text = text and not (execution.t5_cpu or parallel.t5_fsdp)
    shards = several and isinstance(execution.offload_model, bool)
    offers = {
        "--offload_model true": execution.offload_model is False,
        "--dit_fsdp": shards and not parallel.dit_fsdp and setup.quantised is None,
        "--t5_fsdp": shards and text,
        "--t5_cpu": not several and text and planner.device.type != "cpu",
    }
    return tuple(flag for flag, offered in offers.items() if offered)


def _changed(setup: Setup, flags: Iterable[str]) -> Setup:
    on: dict[str, Any] = {flag.split()[0].removeprefix("--"): True for flag in flags}
    if STREAMED in flags:
        on["offload_model"] = "block"
    sharded = {name: on.pop(name) for name in ("dit_fsdp", "t5_fsdp") if name in on}
    parallel, execution = replace(setup.parallel, **sharded), replace(setup.execution, **on)
    return replace(setup, parallel=parallel, execution=execution)
