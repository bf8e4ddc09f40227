"""Every Wan pipeline of diffusers generates the same latents on ranks as without them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.conftest import slow
from tests.diffusers_classes import CASES
from tests.diffusers_runs import Settings
from tests.dist import run_on_ranks
from wan.diffusers import apply_cache_on_pipe, deparallelize, parallelize_pipe

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]
LIMIT = 1e-4
SETTINGS: dict[int, list[Settings]] = {
    1: [{}],
    2: [{"ulysses_size": 2}, {"ring_size": 2}],
    3: [{"ring_size": 3}],
}
LAYOUTS: dict[str, list[Settings]] = {  # by default, besides mode 1
    "animate": [],
    "video": [],
    "control, high noise": [],
    "control, low noise": [{"ring_size": 2}, {"cfg_size": 2}],
    "modular image": [],
    "modular 2.2 image": [{"ulysses_size": 2}, {"cfg_size": 2}],
}
SKIPPING = "steps:0,2"
# Policy -> its settings; each skips some of twelve steps.
POLICIES: dict[str, Settings] = {
    "first_block": {"threshold": 100.0, "order": 1},
    "tea": {"coefficients": (1.0, 0.0), "threshold": 2.0},
    "attention": {"start_step": 1, "attentioncache_interval": 2, "end_step": 9},
    "cfg": {},
}
Call = tuple[Settings | None, str | None]
"""(settings of the ranks, or None without them; policy of a step cache)."""


def run_case(name: str, calls: Sequence[Call], steps: int) -> list[Tensor]:
    """On one rank, or without ranks: the latents of each call of one pipeline."""
    torch.set_num_threads(1)
    case, results = CASES[name](), []
    for settings, policy in calls:
        if settings is not None:
            parallelize_pipe(case.pipe, **settings)
        if policy is not None:
            apply_cache_on_pipe(case.pipe, policy, force=True, **POLICIES.get(policy, {}))
        results.append(case.make_latents(steps))
        deparallelize(case.pipe)
    return results


def check_case(
    name: str, policy: str, settings: Sequence[Settings], world: int = 2, steps: int = 4
) -> None:
    """Compare without a cache, with one that skips nothing, and with one that skips steps."""
    plain, skipping = run_case(name, [(None, None), (None, policy)], steps)
    assert (skipping - plain).abs().max() > 10 * LIMIT
    first, *others = settings
    complete_policy = f"steps:{','.join(map(str, range(steps)))}"
    calls: list[Call] = [
        (first, complete_policy),
        (first, policy),
        *((other, None) for other in others),
    ]
    for complete, actual, *latents in run_on_ranks(world, run_case, name, calls, steps):
        assert (actual - skipping).abs().max() <= LIMIT
        for result in (complete, *latents):
            assert (result - plain).abs().max() <= LIMIT


@pytest.mark.parametrize("name", [name if name in LAYOUTS else slow(name) for name in CASES])
@pytest.mark.usefixtures("one_thread")
def test_ranks_make_the_latents_of_the_pipeline(name: str) -> None:
    check_case(name, SKIPPING, [{"comm_type": 1}, *LAYOUTS.get(name, ())])


@pytest.mark.slow
@pytest.mark.parametrize("world", SETTINGS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("one_thread")
def test_all_layouts(name: str, world: int) -> None:
    guided = [{"cfg_size": 2}] if world == 2 and name != "animate" else []
    check_case(name, SKIPPING, SETTINGS[world] + guided, world)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("one_thread")
def test_all_policies(policy: str) -> None:
    for name in ("video", "modular 2.2"):
        check_case(name, policy, [{"comm_type": 1}], steps=12)
