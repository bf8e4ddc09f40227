"""Guidance against diffusers' guiders, closed forms, and networks whose result is known.

Legend: B batch, L tokens, C channels.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.guiders import AdaptiveProjectedGuidance, ClassifierFreeZeroStarGuidance
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer
from torch import Tensor

from tests.pipelines import resolve_plan
from tests.refusals import check_refusals, get_refusal
from wan.cache.policy import BRANCHES, make_policy
from wan.guidance.guider import make_guider, select_skipped_blocks
from wan.guidance.nag import NormalizedAttention
from wan.kernels.forward_context import CrossAttentionGuidance, StepInfo
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.pipeline.denoise import DenoisingLoop
from wan.settings.guidance import GUIDERS
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import PRESETS
from wan.settings.step_cache import StepCache
from wan.tasks.base import DenoiseInputs, VideoParams, make_video_params

SHAPE = (16, 2, 4, 6)
REFUSED = {
    "a word": "--guider best",
    "scale 1": "--guider cfg_zero --sample_guide_scale 1",
    "apg at scale 1": "--guider apg --sample_guide_scale 1",
    "zero steps without": "--guider cfg:zero_init_steps=1",
    "zero steps of another": "--guider apg:zero_init_steps=1",
    "a parameter twice": "--guider apg:eta=1,eta=1",
    "only zero steps": "--guider cfg_zero:zero_init_steps=40",
    "negative zero steps": "--guider cfg_zero:zero_init_steps=-1",
    "eta of another": "--guider cfg_zero:eta=0",
    "large eta": "--guider apg:eta=2",
    "momentum 1": "--guider apg:momentum=1",
    "negative threshold": "--guider apg:threshold=-1",
    "no number": "--slg_blocks nine",
    "no block": "--slg_blocks 40",
    "all blocks": "--slg_blocks 0-39",
    "skipped at scale 1": "--slg_blocks 9 --sample_guide_scale 1",
    "start without blocks": "--slg_blocks :start=0.2",
    "start after stop": "--slg_blocks 9:start=0.95",
    "start at stop": "--slg_blocks 9:start=0.9",
    "empty parameter": "--slg_blocks 9:",
    "a percentage": "--slg_blocks 9:stop=90",
    "skipped with adapters": "--task s2v-14B --slg_blocks 9 --offload_model block",
    "NAG's scale 1": "--nag_scale 1",
    "tau without scale": "--nag_scale :tau=2",
    "small tau": "--nag_scale 5:tau=0.5",
    "large alpha": "--nag_scale 5:alpha=1.5",
    "another norm": "--nag_scale 5:norm=l3",
}


def make_params(**values: Any) -> VideoParams:
    settings = {"prompt": "", "size": (48, 32), "frame_num": 5, "base_seed": 1, "sample_steps": 20}
    return make_video_params(PRESETS["t2v-1.3B"], settings | values)


def draw(*shape: int, seed: int = 0, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_refused() -> None:
    messages = {
        name: get_refusal(lambda text: resolve_plan(*text.split()), flags)
        for name, flags in REFUSED.items()
    }
    check_refusals("guidance", messages)


@pytest.mark.parametrize("name", GUIDERS)
def test_equal_branches_are_not_changed(name: str) -> None:
    [cond] = draw(*SHAPE, count=1)
    assert_close(make_guider(make_params(guider=name)).combine(cond, cond.clone(), 4.0), cond)


def test_cfg_zero_is_that_of_diffusers() -> None:
    guider = make_guider(make_params(guider="cfg_zero:zero_init_steps=2"))
    oracle = ClassifierFreeZeroStarGuidance(guidance_scale=4.5, zero_init_steps=2)
    assert guider.num_zero_steps == 2
    for step in range(2, 5):
        cond, uncond = draw(*SHAPE, seed=step)
        oracle._step = step
        assert_close(
            guider.combine(cond, uncond, 4.5), oracle.forward(cond[None], uncond[None]).pred[0]
        )
    defaults = {
        steps: make_guider(make_params(guider="cfg_zero", sample_steps=steps)) for steps in (8, 9)
    }
    assert [guider.num_zero_steps for guider in defaults.values()] == [0, 1]


@pytest.mark.parametrize(
    ("momentum", "eta", "threshold"),
    [(0.0, 0.0, 0.0), (0.0, 0.7, 0.4), (-0.5, 0.7, 0.0), (-0.5, 0.0, 50.0), (0.25, 0.7, 0.4)],
)
def test_apg_is_that_of_diffusers(momentum: float, eta: float, threshold: float) -> None:
    parameters = f"momentum={momentum},eta={eta},threshold={threshold}"
    guider = make_guider(make_params(guider=f"apg:{parameters}"))
    oracle = AdaptiveProjectedGuidance(
        guidance_scale=4.5,
        adaptive_projected_guidance_momentum=momentum,
        adaptive_projected_guidance_rescale=threshold * np.prod(SHAPE) ** 0.5,
        eta=eta,
    )
    oracle.momentum_buffer = MomentumBuffer(momentum)
    for step in range(3):
        cond, uncond = draw(*SHAPE, seed=step)
        oracle._step = step
        assert_close(
            guider.combine(cond, uncond, 4.5), oracle.forward(cond[None], uncond[None]).pred[0]
        )


def combine_attention(
    z: Tensor, n: Tensor, scale: float, tau: float, alpha: float, p: int
) -> Tensor:
    """The paper's formulas, a token at a time in float64."""
    z, n = z.double(), n.double()
    guided = scale * z - (scale - 1) * n
    for index in np.ndindex(*z.shape[:2]):
        ratio = guided[index].abs().pow(p).sum() ** (1 / p) / z[index].abs().pow(p).sum() ** (1 / p)
        guided[index] *= min(ratio.item(), tau) / ratio.item()
    return alpha * guided + (1 - alpha) * z


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize(
    ("scale", "tau", "alpha"), [(5.0, None, None), (11.0, 1.5, 0.5), (2, 9, 1)]
)
def test_nag_is_its_formula(
    norm: str, scale: float, tau: Any, alpha: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("wan.guidance.nag._NUM_ROWS", 3)  # 5 tokens in two parts
    given = "" if tau is None else f"tau={tau},alpha={alpha},"
    combine = NormalizedAttention(make_params(nag_scale=f"{scale}:{given}norm={norm}"))
    z, n = draw(2, 5, 3, 4)
    n[0] = z[0] + 0.01 * n[0]  # below the limit
    expected = combine_attention(z, n, scale, tau or 2.5, alpha or 0.25, 1 if norm == "l1" else 2)
    assert_close(combine(z, n.clone()).double(), expected)


def test_nag_without_an_effect_changes_no_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        z, n = (x.to(dtype) for x in draw(1, 7, 3, 4))
        combine = NormalizedAttention(make_params(nag_scale="5:alpha=0"))
        assert torch.equal(combine(z, n.clone()), z)
        assert torch.equal(NormalizedAttention(make_params(nag_scale="11"))(z, z.clone()), z)


NETWORKS: dict[str, dict[str, Any]] = {"t2v": {}, "images of Wan2.1": {"image_dim": 12}}


def make_network(keeps_text: bool, image_dim: int = 0) -> WanModel:
    torch.manual_seed(3)
    sizes = {"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 3, "freq_dim": 16}
    components = ModelComponents(text_kv_cache=keeps_text)
    network = WanModel(
        "i2v" if image_dim else "t2v", text_len=6, in_dim=4, text_dim=8, out_dim=4,
        image_dim=image_dim, components=components, **sizes,
    )  # fmt: skip
    for parameter in network.parameters():  # some are zero at the start
        torch.nn.init.normal_(parameter, std=0.3)
    return network.eval().requires_grad_(False)


STEP = StepInfo(0, 4, "cond", "dit", (2, 2, 3), 12)


@pytest.mark.parametrize("keeps_text", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
def test_nag_in_every_cross_attention(kind: str, keeps_text: bool) -> None:
    """Hooks compute the same from outside; the image's attention is added without guidance."""
    network = make_network(keeps_text, **NETWORKS[kind])
    [x], [text], [negative] = draw(4, 2, 4, 6, count=1), draw(5, 8, count=1), draw(3, 8, count=1)
    combine = NormalizedAttention(make_params(nag_scale="7"))
    step = replace(STEP, text_guidance=CrossAttentionGuidance(negative, combine))
    kwargs = {"clip_fea": torch.ones(1, 2, 12)} if network.img_emb is not None else {}
    t = torch.tensor([500.0])

    def run(info: StepInfo, context: Tensor = text) -> Tensor:
        return network([x], t, [context], 12, **kwargs, step=info)[0]

    plain = run(STEP)
    with torch.no_grad():
        guided = [run(info, text) for info in (step, step, replace(step, index=1))]
        assert all(torch.equal(guided[0], other) for other in guided) and torch.equal(
            run(STEP), plain
        )
        assert not torch.allclose(guided[0], plain, atol=1e-3)
        same = CrossAttentionGuidance(text, combine)
        assert torch.equal(run(replace(STEP, text_guidance=same)), plain)
        assert torch.equal(run(step.for_branch("uncond")), plain)
    padded = torch.nn.functional.pad(negative, (0, 0, 0, 3))
    context = network.text_embedding(padded[None])
    for block in network.blocks:
        attention = block.cross_attn

        def forward(x_BLC: Tensor, kv: Any, _: Any, attention: Any = attention) -> Tensor:
            q = attention.project_q(x_BLC)
            k, v = attention.project_k(context), attention.project_v(context)
            z, n = attention.kernel(q, *kv[:2]), attention.kernel(q, k, v)
            out = combine_attention(z, n, 7.0, 2.5, 0.25, 1).float()
            return attention.project_out(out + (attention.kernel(q, *kv[2:]) if kwargs else 0))

        attention.forward = forward
    assert_close(run(STEP), guided[0])


@pytest.mark.parametrize("skipped", [(1,), (0, 2)])
def test_a_skipped_block_is_the_identity(skipped: tuple[int, ...]) -> None:
    network, other = make_network(False), make_network(False)
    for layer in skipped:  # gates of 0, and no cross-attention
        other.blocks[layer].forward = lambda x, *_: (x, None)
    [x], [text] = draw(4, 2, 4, 6, count=1), draw(5, 8, count=1)
    step = replace(STEP, skipped_blocks=skipped)
    runs = [
        model([x], torch.tensor([500.0]), [text], 12, step=info)[0]
        for model, info in ((network, step.for_branch("uncond")), (other, STEP), (network, STEP))
    ]
    assert torch.equal(runs[0], runs[1]) and not torch.allclose(runs[0], runs[2])
    with torch.no_grad():
        assert torch.equal(
            network([x], torch.tensor([500.0]), [text], 12, step=step.for_branch("cond"))[0],
            runs[2],
        )


Calls = list[tuple[int, str, tuple[int, ...]]]


def run_loop(params: VideoParams, cache: Any = None, fixed: int = 0) -> tuple[Tensor, Calls]:
    """Denoises with a smooth network; returns the latents and its calls."""
    calls = Calls()
    [noise, weight] = draw(*params.latent_shape)

    def network(x: list[Tensor], t: Tensor, *_: Any, step: StepInfo, **__: Any) -> list[Tensor]:
        calls.append((step.index, step.branch, step.skipped_blocks))
        velocity = (x[0] * weight).tanh() + (0.3 if step.branch == "cond" else 0.1) * weight
        return [velocity]

    def restore(x: Tensor) -> Tensor:
        return torch.cat((noise[:, :fixed], x[:, fixed:]), 1)

    experts: Any = SimpleNamespace(get=lambda _: network, prefetch=lambda _: None)
    inputs = DenoiseInputs(
        noise, torch.zeros(0), torch.zeros(0), restore_fixed_frames=restore, num_fixed_frames=fixed
    )
    if cache is not None:
        cache.start_video(params)
    return DenoisingLoop(params, inputs).advance(experts, step_cache=cache), calls


def test_steps_of_velocity_zero_call_no_network() -> None:
    params = make_params(guider="cfg_zero:zero_init_steps=3", sample_solver="euler")
    latents, calls = run_loop(params)
    assert [index for index, *_ in calls] == [i for i in range(3, 20) for _ in range(2)]
    first = draw(*params.latent_shape)[0]
    sigmas = make_noise_schedule(params).sigmas
    x, weight = draw(*params.latent_shape)
    for s, s_next in zip(sigmas[3:], sigmas[4:], strict=False):
        cond, uncond = (np.tanh((x * weight).numpy()) + a * weight.numpy() for a in (0.3, 0.1))
        a = (cond * uncond).sum() / (uncond**2).sum()
        x = x + (s_next - s) * torch.from_numpy(a * uncond + 5.0 * (cond - a * uncond))
    assert_close(latents, x)
    assert not torch.equal(latents, first)


@pytest.mark.parametrize(
    ("strength", "computed"), [(None, range(6, 17)), (0.8, range(6, 17)), (0.5, range(10, 17))]
)
def test_zero_steps_are_the_first_of_the_whole_schedule(
    strength: float | None, computed: range
) -> None:
    """Each has two forward passes; a video that starts from another one may have none."""
    params = make_params(
        guider="cfg_zero:zero_init_steps=3",
        sample_steps=9,
        sample_solver="res_2s",
        strength=strength,
    )
    _, calls = run_loop(params)
    assert [index for index, *_ in calls[::2]] == [*computed]


def test_blocks_are_skipped_in_some_steps_of_one_branch() -> None:
    """Steps count from the first of the schedule, also where a video starts from another one."""
    for strength, skipped in ((0.7, [6, 7, 8, 9]), (None, [5, 6, 7, 8, 9])):
        params = make_params(slg_blocks="9:start=0.25,stop=0.5", strength=strength)
        _, calls = run_loop(params)
        assert [index for index, _, blocks in calls if blocks] == skipped
    assert {branch for _, branch, blocks in calls if blocks} == {"uncond"}
    assert select_skipped_blocks(make_params(slg_blocks="9"), 2) == (9,)
    assert not select_skipped_blocks(make_params(slg_blocks="9"), 1)


def test_a_cache_reuses_nothing_of_other_blocks_or_of_velocity_zero() -> None:
    policy = make_policy(StepCache("steps:0"), PRESETS["t2v-1.3B"])
    assert policy is not None
    params = make_params(slg_blocks="9:start=0.25,stop=0.5")
    lists = policy.list_steps(params)
    assert lists is not None
    assert all(np.flatnonzero(lists[branch]).tolist() == [0, 5, 10] for branch in BRANCHES)
    lists = policy.list_steps(make_params(guider="cfg_zero:zero_init_steps=4"))
    assert lists is not None and np.flatnonzero(lists["cond"]).tolist() == [4]


def run_easy_cache(params: VideoParams, threshold: float, fixed: int) -> tuple[Any, list[int]]:
    """The rule and Euler's steps once more; returns the latents and the computed steps."""
    x, weight = (tensor.numpy().astype(np.float64) for tensor in draw(*params.latent_shape))
    first, error, k, computed, last_x, last_v, differences = x[:, :fixed].copy(), 0, 0, [], 0, 0, []
    sigmas, previous = make_noise_schedule(params).sigmas, x
    num_steps = params.sample_steps
    mean = lambda y: np.abs(y[:, fixed:]).mean()  # noqa: E731
    for step in range(num_steps):
        error += k * mean(x - previous) / mean(last_v) if k else 0
        if step < 10 or step == num_steps - 1 or error >= threshold:
            pair = [np.tanh(x * weight) + a * weight for a in (0.3, 0.1)]
            if computed:
                k = mean(pair[0] - last_v) / mean(x - last_x)
            error, last_x, last_v, differences = 0, x, pair[0], [v - x for v in pair]
            computed.append(step)
        cond, uncond = (x + difference for difference in differences)
        previous = x
        x = x + (sigmas[step + 1] - sigmas[step]) * (uncond + 5 * (cond - uncond))
        x[:, :fixed] = first
    return x, computed


@pytest.mark.parametrize("fixed", [0, 1])
@pytest.mark.parametrize(("threshold", "most"), [(0.0, 30), (0.05, 29), (0.2, 20)])
def test_easy_cache_decides_as_its_rule(threshold: float, most: int, fixed: int) -> None:
    policy = make_policy(StepCache(f"easy:threshold={threshold}"), PRESETS["t2v-1.3B"])
    assert policy is not None
    cache = policy.make_cache()
    params = make_params(sample_steps=30, sample_solver="euler")
    latents, calls = run_loop(params, cache, fixed)
    expected, steps = run_easy_cache(params, threshold, fixed)
    assert [index for index, *_ in calls] == sorted([*steps, *steps]) and len(steps) <= most
    assert cache.computed_indices == dict.fromkeys(BRANCHES, steps)
    assert_close(latents.double(), torch.from_numpy(expected))


def test_easy_cache_starts_anew_with_another_expert() -> None:
    policy = make_policy(StepCache("easy:threshold=100"), PRESETS["t2v-A14B"])
    assert policy is not None
    cache = policy.make_cache()
    values = {"prompt": "", "size": (48, 32), "frame_num": 5, "base_seed": 1, "boundary_step": 15}
    params = make_video_params(PRESETS["t2v-A14B"], values | {"sample_steps": 30})
    _, calls = run_loop(params, cache)
    assert sorted({index for index, *_ in calls}) == [*range(10), 15, 16, 29]
