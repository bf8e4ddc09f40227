"""Finds the nearest run that fits on a device.

Candidates are tried in this order: one more memory setting, then two and more; block offload;
another topology; another topology with all memory settings. A candidate is measured only if its
estimate (`wan.pipeline.memory_estimate`) fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

from wan.pipeline.memory_estimate import find_fullest_stage
from wan.pipeline.setup import Setup
from wan.planner.measure import Planner
from wan.settings.errors import InputError
from wan.settings.parallel import (
    SIZE_FLAGS,
    Parallel,
    enumerate_topologies,
    format_topology,
    resolve_topology,
)

BLOCKS_SETTING, TILING_SETTING = "`offload_model=block`", "`vae_tiling`"
MAX_RANKS = 512  # and at most eight times the ranks of the run


def find_nearest_run(planner: Planner, memory: int) -> tuple[str, int, int] | None:
    """Finds the first candidate that fits.

    Returns:
        Its settings as text, its number of ranks, and the bytes of the rank with the most memory;
        None if no candidate fits.
    """
    for settings, setup in iter_candidates(planner, memory):
        if find_fullest_stage(setup, planner.params)[1] <= memory:
            for decoding, _ in iter_decodings(setup):
                need = planner.compute_peak_bytes(decoding)
                if need <= memory:
                    return settings, setup.parallel.world_size, need
    return None


def iter_decodings(setup: Setup) -> Iterator[tuple[Setup, str]]:
    """Yields the decoding methods of a run in the order of its attempts, with a description."""
    yield setup, ""
    is_distributed, execution = setup.parallel.world_size > 1, setup.execution
    if is_distributed and not (execution.vae_parallel or execution.vae_tiling):
        row_parallel = replace(execution, vae_parallel=True, overlap_decoding=False)
        yield replace(setup, execution=row_parallel), ", if all ranks share the rows of the VAE"
    if not execution.vae_tiling:
        tiled = replace(execution, vae_parallel=False, vae_tiling=True, overlap_decoding=False)
        yield replace(setup, execution=tiled), ", if the VAE decodes in tiles, which is not exact"


def iter_candidates(planner: Planner, memory: int) -> Iterator[tuple[str, Setup]]:
    """Yields the settings of each candidate, in backticks, and its checked setup."""
    current, topologies = planner.setup, list(_iter_topologies(planner))
    settings = _list_saving_settings(planner, current, memory)
    for count in range(1, len(settings) + 1):
        for chosen in combinations(settings, count):
            yield " ".join(chosen), _apply_settings(current, chosen)
    if current.execution.offload_model != "block":
        for chosen in ((BLOCKS_SETTING,), (BLOCKS_SETTING, TILING_SETTING)):
            with suppress(InputError):  # another setting may exclude it
                yield " ".join(chosen), _apply_settings(current, chosen)
    yield from topologies
    for sizes, setup in topologies:
        settings = _list_saving_settings(planner, setup, memory)
        yield " ".join((sizes, *settings)), _apply_settings(setup, settings)


def _iter_topologies(planner: Planner) -> Iterator[tuple[str, Setup]]:
    """Yields every other topology that the settings allow, with its flags; fewest ranks first."""
    current, heads = planner.setup.parallel, planner.setup.checkpoint.num_heads
    values = {f.name: getattr(current, f.name) for f in fields(Parallel)}
    changes = {f.name: values[f.name] for f in fields(Parallel) if values[f.name] != f.default}
    changes["compile"] = planner.setup.execution.compile
    world = current.world_size
    for ranks in range(world, max(world, min(8 * world, MAX_RANKS)) + 1):
        for sizes in sorted(
            enumerate_topologies(ranks, heads), key=lambda sizes: sizes[0] != current.cfg_size
        ):
            try:
                other, _ = resolve_topology(
                    changes | dict(zip(SIZE_FLAGS, sizes, strict=True)), ranks, heads
                )
                setup = replace(planner.setup, parallel=other)
                setup.check_params(planner.params)
            except InputError:
                continue
            if other != current:
                drops_cfg = sizes[0] == 1 != current.cfg_size
                yield "`cfg_size=1` " * drops_cfg + format_topology(*sizes), setup


def _list_saving_settings(planner: Planner, setup: Setup, memory: int) -> tuple[str, ...]:
    """Lists the missing settings that would reduce the memory of a stage that does not fit."""
    execution, parallel = setup.execution, setup.parallel
    is_distributed = setup.parallel.world_size > 1
    stages = {
        name for name, usage in planner.compute_stage_memory().items() if usage.total() > memory
    }
    reduces_text = "text encoder" in stages or execution.offload_model is False
    reduces_text = reduces_text and not (execution.t5_cpu or parallel.t5_fsdp)
    can_shard = is_distributed and isinstance(execution.offload_model, bool)
    candidates = {
        "`offload_model=true`": execution.offload_model is False,
        "`dit_fsdp`": can_shard and not parallel.dit_fsdp,
        "`t5_fsdp`": can_shard and reduces_text,
        "`t5_cpu`": not is_distributed and reduces_text and planner.device.type != "cpu",
    }
    return tuple(name for name, applies in candidates.items() if applies and _allows(setup, name))


def _allows(setup: Setup, setting: str) -> bool:
    try:
        _apply_settings(setup, (setting,))
    except InputError:  # another setting excludes it
        return False
    return True


def _apply_settings(setup: Setup, settings: Iterable[str]) -> Setup:
    changes: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.strip("`").partition("=")
        changes[name] = value if value == "block" else True
    fsdp_changes = {name: changes.pop(name) for name in ("dit_fsdp", "t5_fsdp") if name in changes}
    parallel = replace(setup.parallel, **fsdp_changes)
    execution = replace(setup.execution, **changes)
    return replace(setup, parallel=parallel, execution=execution)
