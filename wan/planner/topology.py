"""Finds the nearest run that fits on a device.

Candidates are tried in this order: one more memory setting, then two and more; block offload;
another topology; another topology with all memory settings. A candidate is measured only if its
estimate (`wan.pipeline.memory`) fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

from wan.pipeline.memory import fullest
from wan.pipeline.setup import Setup
from wan.planner.measure import Planner
from wan.settings.errors import InputError
from wan.settings.parallel import SIZES, Parallel, legal, resolve, size_flags

BLOCKS, TILES = "`offload_model=block`", "`vae_tiling`"
MOST_RANKS = 512  # and at most eight times the ranks of the run


def nearest(planner: Planner, memory: int) -> tuple[str, int, int] | None:
    """Finds the first candidate that fits.

    Returns:
        Its settings as text, its number of ranks, and the bytes of the rank with the most memory;
        None if no candidate fits.
    """
    for words, setup in _candidates(planner, memory):
        if fullest(setup, planner.request)[1] <= memory:
            for decoding, _ in decodings(setup):
                need = planner.need(decoding)
                if need <= memory:
                    return words, setup.parallel.world_size, need
    return None


def decodings(setup: Setup) -> Iterator[tuple[Setup, str]]:
    """Yields the decoding methods of a run in the order of its attempts, with a description."""
    yield setup, ""
    several, execution = setup.parallel.world_size > 1, setup.execution
    if several and not (execution.vae_parallel or execution.vae_tiling):
        shared = replace(execution, vae_parallel=True)
        yield replace(setup, execution=shared), ", if all ranks share the rows of the VAE"
    if not execution.vae_tiling:
        tiles = replace(execution, vae_parallel=False, vae_tiling=True)
        yield replace(setup, execution=tiles), ", if the VAE decodes in tiles, which is not exact"


def _candidates(planner: Planner, memory: int) -> Iterator[tuple[str, Setup]]:
    present, others = planner.setup, list(_topologies(planner))
    settings = _settings(planner, present, memory)
    for count in range(1, len(settings) + 1):
        for chosen in combinations(settings, count):
            yield " ".join(chosen), _changed(present, chosen)
    if present.execution.offload_model != "block":
        for chosen in ((BLOCKS,), (BLOCKS, TILES)):
            with suppress(InputError):  # another setting may exclude it
                yield " ".join(chosen), _changed(present, chosen)
    yield from others
    for words, setup in others:
        settings = _settings(planner, setup, memory)
        yield " ".join((words, *settings)), _changed(setup, settings)


def _topologies(planner: Planner) -> Iterator[tuple[str, Setup]]:
    """Yields every other topology that the settings allow, with its flags; fewest ranks first."""
    present, heads = planner.setup.parallel, planner.setup.checkpoint.heads
    values = {f.name: getattr(present, f.name) for f in fields(Parallel)}
    kept = {f.name: values[f.name] for f in fields(Parallel) if values[f.name] != f.default}
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


def _settings(planner: Planner, setup: Setup, memory: int) -> tuple[str, ...]:
    """Lists the missing settings that would reduce the memory of a stage that does not fit."""
    execution, parallel, several = setup.execution, setup.parallel, setup.parallel.world_size > 1
    large = {name for name, usage in planner.stages().items() if usage.total() > memory}
    text = "text encoder" in large or execution.offload_model is False
    text = text and not (execution.t5_cpu or parallel.t5_fsdp)
    shards = several and isinstance(execution.offload_model, bool)
    offers = {
        "`offload_model=true`": execution.offload_model is False,
        "`dit_fsdp`": shards and not parallel.dit_fsdp and setup.quantised is None,
        "`t5_fsdp`": shards and text,
        "`t5_cpu`": not several and text and planner.device.type != "cpu",
    }
    return tuple(setting for setting, offered in offers.items() if offered)


def _changed(setup: Setup, settings: Iterable[str]) -> Setup:
    changes: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.strip("`").partition("=")
        changes[name] = value if value == "block" else True
    sharded = {name: changes.pop(name) for name in ("dit_fsdp", "t5_fsdp") if name in changes}
    parallel, execution = replace(setup.parallel, **sharded), replace(setup.execution, **changes)
    return replace(setup, parallel=parallel, execution=execution)
