"""Step caches on diffusers' pipelines skip the steps of diffusers' cache, and of `wan` alone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from torch import Tensor

import wan
from tests.conftest import slow
from tests.diffusers_runs import TOLERANCE, Settings, Video, make_video, parallelized_pipe
from tests.dist import run_on_ranks
from tests.numerics.test_diffusers import make_diffusers_latents
from wan.configs import WAN_CONFIGS
from wan.diffusers import apply_cache_on_pipe, deparallelize
from wan.settings.flags import FLAGS

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
    generator = torch.Generator().manual_seed(5)
    context, negative = (torch.randn(n, 64, generator=generator) for n in (9, 20))
    call = (tiny("t2v-A14B", "diffusers"), [], "unipc", True, context, negative, 20)
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


POLICIES: dict[str, Settings] = {
    "first_block": {"threshold": 0.7, "order": 1},
    "tea": {"coefficients": (1.0, 0.0), "threshold": 2.0},
    "steps:0,1,2,5,6,7,10": {},
    "attention": {"start_step": 1, "attentioncache_interval": 2, "end_step": 9},
    "cfg": {},
}


@pytest.mark.parametrize("policy", [slow(policy) for policy in POLICIES])
@pytest.mark.usefixtures("one_thread")
def test_caches_of_ranks(tiny: Any, policy: str) -> None:
    """Ranks skip the steps that one process skips, with diffusers' pipeline and with `wan`'s."""
    generator = torch.Generator().manual_seed(5)
    context, negative = (torch.randn(n, 64, generator=generator) for n in (9, 20))
    cache_kwargs = {n if n in FLAGS else f"step_cache_{n}": v for n, v in POLICIES[policy].items()}
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"), step_cache=policy, **cache_kwargs)
    expected = model.generate(
        "",
        size=(96, 64),
        frame_num=9,
        sampling_steps=12,
        shift=5.0,
        guide_scale=(3.0, 4.0),
        seed=3,
        prompt_embeds=context,
        negative_prompt_embeds=negative,
        output_type="latent",
    )
    assert model.step_cache is not None
    call = (tiny("t2v-A14B", "diffusers"), [], "unipc", True, context, negative, 12)
    layouts = [{"comm_type": 1}] if policy == "cfg" else [{"comm_type": 1}, {"cfg_size": 2}]
    for settings in layouts:
        for latents, computed in run_on_ranks(
            2, run_cached, settings, policy, POLICIES[policy], call
        ):
            if policy != "first_block" or "cfg_size" not in settings:  # its branches agree
                assert (latents - expected).abs().max() <= TOLERANCE
            uncond = model.step_cache["computed"]["uncond"]
            assert 0 < len(uncond) < 12
            if policy in ("tea", "first_block") and "cfg_size" not in settings:
                assert len(computed) == len(uncond) + len(model.step_cache["computed"]["cond"])


def run_cached(settings: Settings, policy: str, parameters: Settings, call: Any) -> Any:
    """On one rank: return the latents and the steps in which a network computed all blocks."""
    torch.set_num_threads(1)
    recorded_steps: list[tuple[int, int]] = []

    with ExitStack() as stack:

        def prepare(pipe: Any) -> None:
            record_computed_steps(pipe, recorded_steps)
            stack.enter_context(parallelized_pipe(pipe, **settings))
            apply_cache_on_pipe(pipe, policy, **parameters)

        return make_diffusers_latents(*call, prepare=prepare), recorded_steps


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
    """In this case diffusers' cache hangs: see benchmarks/diffusers_parallel.py."""
    first, second = run_on_ranks(
        2, run_with_different_weights, make_video(tiny, "2.2", steps=10), timeout=60
    )
    assert first[0] != second[0], "alone they skip other steps"
    assert first[1] == second[1] and 4 < len(first[1]) < 20
    assert torch.equal(first[2], second[2]) and first[2].isfinite().all()


@pytest.mark.slow
def test_mag_computes_the_same_steps_as_wan(tiny: Any) -> None:
    """The published MagCache curve, on diffusers' noise levels of the same shift."""
    recorded_steps: list[tuple[int, int]] = []
    video = make_video(tiny, "2.2", steps=40)
    pipe = apply_cache_on_pipe(video.pipe(), "mag", threshold=0.04)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=12.0)
    record_computed_steps(pipe, recorded_steps)
    video.latents(pipe)
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"), step_cache="mag")
    model.generate("", size=(96, 64), frame_num=9, sampling_steps=40, shift=12.0, guide_scale=5.0)
    assert model.step_cache is not None
    steps = model.step_cache["computed"]
    assert sorted(step for _, step in recorded_steps) == sorted(steps["cond"] + steps["uncond"])
