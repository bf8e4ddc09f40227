"""The first-block cache on diffusers' pipelines skips the steps of diffusers' cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from torch import Tensor

from tests.conftest import slow
from tests.diffusers_runs import TOLERANCE, Video, make_video, parallelized_pipe
from tests.dist import run_on_ranks
from tests.numerics.test_diffusers import make_diffusers_latents
from wan.diffusers import apply_cache_on_pipe, deparallelize

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]


def record_computed_steps(pipe: Any, recorded_steps: list[tuple[int, int]]) -> list[Any]:
    """Record (network, step) whenever a network computes all of its blocks; return the hooks."""
    return [
        network.blocks[-1].ffn.register_forward_hook(
            lambda *_, index=index: recorded_steps.append((index, pipe.scheduler.step_index or 0))
        )
        for index, network in enumerate((pipe.transformer, pipe.transformer_2))
    ]


@pytest.mark.parametrize("threshold", [0.5, slow(0.8)])
@pytest.mark.usefixtures("one_thread")
def test_first_block_cache_computes_the_same_steps_as_diffusers(
    tiny: Any, threshold: float
) -> None:
    call = (tiny("t2v-A14B", "diffusers"), [], "unipc", True, 20)
    steps: list[list[tuple[int, int]]] = [[], []]

    def cache_with_diffusers(pipe: Any) -> None:
        record_computed_steps(pipe, steps[0])
        for network in (pipe.transformer, pipe.transformer_2):
            network.enable_cache(FirstBlockCacheConfig(threshold=threshold))

    def cache_with_wan(pipe: Any) -> None:
        record_computed_steps(pipe, steps[1])
        apply_cache_on_pipe(pipe, "first_block", threshold=threshold, warmup=0)

    expected, actual = (
        make_diffusers_latents(*call, prepare=cache)
        for cache in (cache_with_diffusers, cache_with_wan)
    )
    assert steps[0] == steps[1] and 4 < len(steps[0]) < 40
    assert (actual - expected).abs().max() <= TOLERANCE


def run_with_different_weights(video: Video) -> tuple[Any, Any, Tensor]:
    """On one rank with other weights in the first block: run alone, then shared.

    Returns (steps computed alone, steps computed when shared, latents of the shared run).
    """
    torch.set_num_threads(1)
    pipe, alone_steps, shared_steps = video.pipe(), list[Any](), list[Any]()
    for network in (pipe.transformer, pipe.transformer_2):
        network.blocks[0].scale_shift_table.data *= 1 + 4 * torch.distributed.get_rank()
    hooks = record_computed_steps(pipe, alone_steps)
    video.latents(apply_cache_on_pipe(pipe, "first_block", threshold=0.5))
    for hook in hooks:
        hook.remove()
    record_computed_steps(pipe, shared_steps)
    with parallelized_pipe(deparallelize(pipe)):
        apply_cache_on_pipe(pipe, "first_block", threshold=0.5)
        return alone_steps, shared_steps, video.latents(pipe)


def test_ranks_that_disagree_skip_together(tiny: Any) -> None:
    """In this case diffusers' cache hangs (docs/diffusers.md)."""
    first, second = run_on_ranks(
        2, run_with_different_weights, make_video(tiny, "2.2", steps=10), timeout=60
    )
    assert first[0] != second[0], "alone they skip other steps"
    assert first[1] == second[1] and 4 < len(first[1]) < 20
    assert torch.equal(first[2], second[2]) and first[2].isfinite().all()
