"""Every Wan pipeline of diffusers generates the same latents on ranks as without them."""

from __future__ import annotations

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
UNGUIDED = ("animate",)
SETTINGS: dict[int, list[Settings]] = {
    1: [{}],
    2: [{"ulysses_size": 2}, {"ulysses_size": 2, "comm_type": 1}, {"ring_size": 2}],
    3: [{"ring_size": 3}],
}
STEPS = 6
PLAIN_CASES = {"control, low noise", "modular 2.2 image"}
CACHED_CASES = {"animate", "video", "control, high noise", "modular image"}
# The first one skips no step, the second one three.
CACHES = ("steps:0,1,2,3,4,5", "steps:0,2,4")


def run_case(name: str, settings: list[Settings]) -> list[Tensor]:
    """On one rank: the latents with each of the settings."""
    torch.set_num_threads(1)
    case, results = CASES[name](), []
    for parallel_settings in settings:
        parallelize_pipe(case.pipe, **parallel_settings)
        results.append(case.make_latents())
        deparallelize(case.pipe)
    return results


@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
@pytest.mark.parametrize("name", [name if name in PLAIN_CASES else slow(name) for name in CASES])
@pytest.mark.usefixtures("one_thread")
def test_ranks_make_the_latents_of_the_pipeline(name: str, world: int) -> None:
    expected = CASES[name]().make_latents()
    settings = [*SETTINGS[world]]
    if world == 2 and name not in UNGUIDED:
        settings.append({"cfg_size": 2})
    for results in run_on_ranks(world, run_case, name, settings):
        for parallel_settings, latents in zip(settings, results, strict=True):
            assert (latents - expected).abs().max() <= LIMIT, parallel_settings


def run_cached_case(name: str, settings: Settings | None) -> list[Tensor]:
    """The latents with each of the caches."""
    torch.set_num_threads(1)
    case, results = CASES[name](), []
    for policy in CACHES:
        if settings is not None:
            parallelize_pipe(case.pipe, **settings)
        apply_cache_on_pipe(case.pipe, policy, force=True)
        results.append(case.make_latents(STEPS))
        deparallelize(case.pipe)
    return results


@pytest.mark.parametrize("name", [name if name in CACHED_CASES else slow(name) for name in CASES])
@pytest.mark.usefixtures("one_thread")
def test_caches_skip_the_same_steps_on_ranks(name: str) -> None:
    plain = CASES[name]().make_latents(STEPS)
    complete, skipping = run_cached_case(name, None)
    assert (complete - plain).abs().max() <= LIMIT
    assert (skipping - plain).abs().max() > 10 * LIMIT
    for actual_complete, actual_skipping in run_on_ranks(
        2, run_cached_case, name, {"comm_type": 1}
    ):
        assert (actual_complete - plain).abs().max() <= LIMIT
        assert (actual_skipping - skipping).abs().max() <= LIMIT
