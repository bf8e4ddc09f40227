"""generate.py --device npu from prompt to latents and to the video, on 1, 2 and 4 ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.dist import run
from tests.distributed.topology import ROWS, Topology
from tests.npu_sim import measured
from tests.npu_sim.latents import LONG, MODES, WAYS, Way, arguments, far, latents

pytestmark = pytest.mark.dist

WHOLE = [mode for mode, row in ROWS.items() if row.blocks == 1]
LAYOUTS = (Topology(2, 2), Topology(4, 1), Topology(2, 1), Topology(2, 2, "bidirectional"))


@cache
def alone(rig: Path, way: Way) -> Tensor:
    """What one process makes; nothing is exchanged there."""
    flags = tuple(flag for flag in way.flags if flag != "--quant_alltoall")
    return run(1, latents, arguments(rig, way._replace(flags=flags)), way.chip)[0]


def check_modes(rig: Path, name: str, way: Way, layout: Topology, modes: list[str]) -> None:
    ranks_of = ["--ulysses_size", str(layout.ulysses), "--ring_size", str(layout.ring)]
    ranks_of += ["--ring_type", layout.ring_type] if layout.ring > 1 else []
    found = {}
    for mode in modes:
        asked = [*arguments(rig, way), *ranks_of, *MODES[mode]]
        ranks = run(layout.world, latents, asked, way.chip, timeout=300)
        assert all(torch.equal(ranks[0], other) for other in ranks)
        found[mode] = ranks[0]
    for mode in modes:
        if ROWS[mode].blocks == 1 or name not in ("dense", "laser"):
            assert torch.equal(found[mode], found["0"]), mode
    errors = {"ranks from one": far(found["0"], alone(rig, way))}
    for mode in found:
        if ROWS[mode].blocks > 1:
            errors[f"mode {mode} from 0"] = far(found[mode], found["0"])
    measured.note(f"latents, {name}", len(modes), errors)
    assert all(error < 1e-2 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, LAYOUTS[i % 4]) for i, name in enumerate(sorted(set(WAYS) - {"laser"}))],
    ids=str,
)
def test_latents_of_all_modes(rig: Path, name: str, layout: Topology) -> None:
    check_modes(rig, name, WAYS[name], layout, list(MODES))


def test_latents_of_pytorchs_own_kernel(rig: Path) -> None:
    """--attention_backend sdpa, alone and merged by a ring, against the vendor's kernel."""
    way = WAYS["dense"]
    asked = [*arguments(rig, way), "--attention_backend", "sdpa"]
    one = run(1, latents, asked, way.chip)[0]
    ring = run(2, latents, [*asked, "--ring_size", "2"], way.chip)[0]
    errors = [far(found, alone(rig, way)) for found in (one, ring)]
    assert all(0 < error < 1e-2 for error in errors), errors


def test_latents_of_laser(rig: Path) -> None:
    """2048 tokens, and so no second block of queries."""
    check_modes(rig, "laser", WAYS["laser"], Topology(2, 1), WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_latents_of_all_layouts(rig: Path, name: str, layout: Topology) -> None:
    """Laser's second block of queries needs 4096 tokens, twice that on a ring."""
    if name != "laser":
        check_modes(rig, name, WAYS[name], layout, list(MODES))
    elif layout.ring == 1:
        check_modes(rig, name, WAYS[name]._replace(size=LONG), layout, list(MODES))
    else:
        check_modes(rig, name, WAYS[name]._replace(size=LONG), layout, WHOLE)
