"""Step caches: computed steps of each policy, reuse of results, and refusals.

Legend: B batch, L tokens, C channels.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

import wan
from tests.conftest import slow
from tests.pipelines import resolve_plan
from tests.refusals import check_refusals, get_refusal
from tools import calibrate_mag
from wan.app.run import Run
from wan.cache import mag, policy
from wan.cache.mag import Mag
from wan.cache.residual import decide_locally
from wan.cache.tea import Tea, compute_embedding_changes
from wan.configs import WAN_CONFIGS
from wan.kernels.forward_context import StepInfo
from wan.modules.blocks import WanAttentionBlock
from wan.modules.lockstep import BlockIterator, run_to_end
from wan.modules.model import WanModel
from wan.pipeline.denoise import run_both_branches
from wan.settings import noise_schedule
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.settings.step_cache import POLICIES, StepCache
from wan.settings.values import parse_step_list as listed_values
from wan.utils.torch_private import StorageTracker

HIGH, LOW = "high_noise", "low_noise"
T2V = (HIGH,) * 26 + (LOW,) * 14
MAG_SKIPS = [5, 6, 8, 9, 11, 12, 14, 15, 17, 18, 20, 21, 23, 24, 29, 31, 33]
CONTRADICTIONS = {
    "word": "--step_cache second_block",
    "no list": "--step_cache steps",
    "list": "--step_cache steps:3-",
    "falling list": "--step_cache steps:5-3",
    "late": "--step_cache steps:0-40",
    "few steps": "--step_cache mag --sample_steps 4",
    "foreign parameter": "--step_cache first_block:retention=0.5",
    "no policy": "--step_cache none:threshold=0.5",
    "no parameters": "--step_cache cfg:4",
    "coefficients": "--step_cache tea:coefficients=1,x",
    "parameter of attention": "--step_cache mag --start_step 5",
    "large threshold": "--step_cache mag:threshold=200",
    "cfg on halves": "--step_cache cfg --cfg_size 2",
    "cfg unguided": "--step_cache cfg --sample_guide_scale 1",
    "easy, few steps": "--step_cache easy --sample_steps 11",
    "two policies": "--use_attentioncache --step_cache mag",
    "compiled": "--step_cache attention --compile",
    "start behind end": "--use_attentioncache --start_step 38",
    "tea": "--step_cache tea",
    "mag": "--task t2v-1.3B --step_cache mag",
    "shift": "--step_cache mag --sample_shift 5",
    "levels": "--step_cache mag --sample_solver euler --timesteps 1000,900,800,700,600,500,400,300",
}


def plan_run(flags: str) -> Run:
    return resolve_plan(*flags.split())


def list_steps(run: Run, all_branches: bool = False) -> policy.StepLists:
    assert run.setup.policy is not None
    steps = run.setup.policy.list_steps(run.params, all_branches)
    assert steps is not None
    return steps


def list_skipped_steps(computed: policy.StepMask) -> list[int]:
    return [step for step, all_ in enumerate(computed) if not all_]


def make_cache(value: str) -> Any:
    """The cache of a policy."""
    implementation = policy.make_policy(StepCache(value), PRESETS["t2v-1.3B"])
    assert implementation is not None
    return implementation.make_cache()


def test_refused() -> None:
    messages = {name: get_refusal(plan_run, flags) for name, flags in CONTRADICTIONS.items()}
    check_refusals("step caches", messages)


def test_mag_skips_what_the_published_rule_skips() -> None:
    curve = mag.load_published_curve("t2v-A14B", False)
    assert curve is not None and curve.ratios["cond"][:2] == (1.0, 1.00124)

    def rule(task: str, threshold: float, more: str = "") -> policy.StepMask:
        settings = StepCache(f"mag:threshold={threshold}{more}")
        return Mag(settings, PRESETS[task]).apply_rule(curve.ratios["cond"], T2V, "cond")

    # made by the authors' program
    assert list_skipped_steps(rule("t2v-A14B", 0.04)) == MAG_SKIPS
    assert all(rule("t2v-A14B", 0))
    # Image to video computes all steps of the high-noise expert.
    assert list_skipped_steps(rule("i2v-A14B", 1, ",max_skip=9"))[0] == 29


def test_mag_computes_the_first_steps_of_an_expert() -> None:
    """By the calls that the authors count, two a step; the last one of the second expert too."""
    settings = StepCache("mag:threshold=100,max_skip=99,retention=0.25")
    cases = {  # task -> high-noise steps, and the steps that each branch computes
        "t2v-A14B": (4, [0, 4, 5, 6], [0, 4, 5]),
        "i2v-A14B": (4, [*range(6)], [*range(6)]),
        "ti2v-5B": (0, [*range(3)], [*range(3)]),
    }
    for task, (high, *expected) in cases.items():
        rule = Mag(settings, PRESETS[task])
        experts = [HIGH] * high + [LOW] * (12 - high)
        for branch, steps in zip(("cond", "uncond"), expected, strict=True):
            mask = rule.apply_rule([1.0] * 12, experts, branch)
            assert [step for step, is_computed in enumerate(mask) if is_computed] == steps, task


def test_a_curve_is_the_growth_of_what_blocks_add(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        if isinstance(module, WanAttentionBlock):
            outputs.append(output[0].clone())

    def note_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if isinstance(module, WanAttentionBlock):
            inputs.append(args[0].clone())

    out, folder = tmp_path / "curve.json", tiny("t2v-A14B")
    argv = f"--task t2v-A14B --ckpt_dir {folder} --prompt x --device cpu --out {out}".split()
    argv += ["--size", "64*64", "--frame_num", "1", "--sample_steps", "3"]
    with (
        module_hooks.register_module_forward_pre_hook(note_input),
        module_hooks.register_module_forward_hook(note),
    ):
        calibrate_mag.main(argv)
    curve = mag.read_curve(out)
    assert (curve.task, curve.steps, curve.sample_shift) == ("t2v-A14B", 3, 12)
    pairs = zip(inputs[::2], outputs[1::2], strict=True)  # each expert has two blocks
    norms = [(last - first).norm(dim=-1) for first, last in pairs]
    for branch, branch_norms in (("cond", norms[::2]), ("uncond", norms[1::2])):
        before = [branch_norms[0], *branch_norms[:-1]]
        growth = [(b / a).mean().item() for a, b in zip(before, branch_norms, strict=True)]
        assert curve.ratios[branch] == pytest.approx(growth, rel=1e-5)
    with pytest.raises(InputError, match="both guidance branches"):
        calibrate_mag.main([*argv, "--sample_guide_scale", "1"])


def test_forced_steps_are_added_and_change_no_counter() -> None:
    steps = list_steps(plan_run("--step_cache mag --task t2v-A14B"))
    assert list_skipped_steps(steps["cond"]) == MAG_SKIPS
    with_warmup = list_steps(plan_run("--step_cache mag:warmup=9"))
    assert list_skipped_steps(with_warmup["cond"]) == [9, 11, 12, 14, 15, 17, 18, 20, 21, 23, 24]
    assert list_skipped_steps(list_steps(plan_run("--step_cache first_block"))["cond"]) == [
        step for step in range(40) if step not in (0, 25, 26, 39)
    ]
    for warmup, forced in ((0, (0, 26)), (2, (0, 1, 25, 26, 27, 39))):
        expected = tuple(step in forced for step in range(40))
        assert policy.list_forced_steps(T2V, warmup) == expected


def test_both_branches_agree_where_other_ranks_compute_each() -> None:
    run = plan_run("--step_cache mag:threshold=0.01")
    separate, combined = list_steps(run), list_steps(run, all_branches=True)
    assert separate["cond"] != separate["uncond"]
    expected = tuple(a or b for a, b in zip(separate["cond"], separate["uncond"], strict=True))
    assert combined == {"cond": expected, "uncond": expected}


def test_tea_sums_up_estimated_changes() -> None:
    # 2 change + 0.1 of each step: 0.3, 0.3, 0.3, 0.5 | 0.7
    settings = StepCache("tea:threshold=0.65,coefficients=2,0.1")
    tea = Tea(settings, PRESETS["t2v-A14B"])
    expected = (True, False, False, True, False, True)
    assert tea.apply_rule([0.0, 0.1, 0.1, 0.1, 0.2, 0.0]) == expected


def test_tea_starts_anew_with_each_video() -> None:
    """Estimates of 0.3 a step and a threshold of 0.85: both branches compute every third step."""
    flags = "--step_cache tea:coefficients=1,0,threshold=0.85"
    run = plan_run(f"--task t2v-1.3B --sample_steps 15 {flags}")
    assert run.setup.policy is not None
    expected = tuple(step % 3 == 0 or step == 14 for step in range(15))
    for _ in range(2):
        steps = run.setup.policy.list_steps(
            run.params, compute_changes=lambda _, timesteps: [0.3 * (t < 999) for t in timesteps]
        )
        assert steps == {"cond": expected, "uncond": expected}


def test_changes_of_the_time_embedding() -> None:
    layers = nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 8))
    weights = {f"time_embedding.{name}": x for name, x in layers.state_dict().items()}
    angles = torch.tensor([[900.0], [700.0]]) * 10000.0 ** -(torch.arange(8) / 8)
    before, after = layers(torch.cat((angles.cos(), angles.sin()), -1))
    first, second = compute_embedding_changes(weights, [900, 700])
    change = (after - before).abs().mean() / before.abs().mean()
    assert first == 0 and second == pytest.approx(change.item(), rel=1e-4)


def test_steps_that_published_rules_leave_out() -> None:
    """The second expert begins with step 26; cfg leaves out late steps of one branch."""
    attention = "--use_attentioncache --attentioncache_interval 4 --start_step 12"
    expected = [s for s in range(13, 38) if (s - 12) % 4 and s != 26]
    assert list_skipped_steps(list_steps(plan_run(attention))["cond"]) == expected
    steps = list_steps(plan_run("--step_cache cfg"))
    assert all(steps["cond"])
    assert list_skipped_steps(steps["uncond"]) == [27, 28, 29, 30, 32, 33, 34, 35]


def test_timesteps_are_the_solvers() -> None:
    import numpy as np

    for solver, shift in (("unipc", 12.0), ("dpm++", 5.0), ("unipc", 1.7)):
        for steps in (4, 20, 40, 50, 333):
            start = float(np.float32(0.999)) if solver == "unipc" else 1.0
            ratios = np.linspace(start, 0, steps + 1)[:-1]
            expected = shift * ratios / (1 + (shift - 1) * ratios)
            assert noise_schedule.compute_sigmas(solver, steps, shift) == expected.tolist()


def test_a_curve_travels_and_holds_for_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = mag.load_published_curve("t2v-A14B", False)
    assert published is not None
    path, ratios = tmp_path / "curve.json", published.ratios["cond"]
    published.save(path)
    loaded = mag.read_curve(path)
    assert (loaded.ratios, loaded.steps, loaded.origin) == (published.ratios, 40, str(path))
    request = plan_run("--step_cache mag").params
    assert loaded.resample(request) is loaded.ratios
    resampled = loaded.resample(replace(request, sample_steps=20))["cond"]
    assert len(resampled) == 20, "each phase begins and ends with its own"
    assert [resampled[step] for step in (0, 12, 13, 19)] == [ratios[s] for s in (0, 25, 26, 39)]
    short = loaded.resample(replace(request, sample_steps=3))["cond"]
    assert short[-1] == ratios[-1], "the only step of the low-noise expert"
    with pytest.raises(InputError, match="the boundary differs"):
        loaded.resample(replace(request, boundary=0.95))
    record = json.loads(path.read_text())
    damage = {"steps": 39}, {"ratios": {}}, {"sample_shift": "x"}, {"task": None, "steps": None}
    for change in damage:
        path.write_text(json.dumps(record | change))
        with pytest.raises(InputError, match=r"curve\.json"):
            mag.read_curve(path)
    path.write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    settings = plan_run("--step_cache mag:curve=curve.json").settings
    assert settings["step_cache"] == f"mag:curve={path}"
    with pytest.raises(InputError, match="made for t2v-A14B, not for i2v-A14B"):
        plan_run(f"--task i2v-A14B --step_cache mag:curve={path}")
    notices = plan_run("--step_cache mag --sample_steps 20").notices
    assert any("made for the official weights" in line for line in notices)
    assert any("made with 40 steps; each of the 20" in line for line in notices)


def test_another_policy_takes_back_a_records_parameters(tmp_path: Path) -> None:
    path, flags = tmp_path / "record.json", "--step_cache mag:max_skip=3,threshold=.05"
    settings = plan_run(flags).settings
    assert settings["step_cache"] == "mag:max_skip=3,threshold=0.05"
    path.write_text(json.dumps({"settings": settings}))
    assert plan_run(f"--from_json {path}").setup.cache.parameters["max_skip"] == 3
    assert plan_run(f"--from_json {path} --step_cache none").setup.cache == StepCache()
    other = plan_run(f"--from_json {path} --step_cache first_block").setup.cache
    assert other == StepCache("first_block")
    attention = plan_run("--step_cache attention --start_step 20").settings
    path.write_text(json.dumps({"settings": attention}))
    assert plan_run(f"--from_json {path} --step_cache mag").setup.cache == StepCache("mag")


def test_the_first_parameter_needs_no_name() -> None:
    for short, text in (
        ("mag:.1,warmup=3", "mag:warmup=3, threshold=0.1"),
        ("steps:0-2,5", "steps:list=0-2,5"),
    ):
        settings = [resolve_plan("--step_cache", value).setup.cache for value in (short, text)]
        assert settings[0].parameters == settings[1].parameters
    assert settings[0].parameters["list"] == (0, 1, 2, 5)


GRID = (1, 2, 3)


def step(index: int, expert: str = "dit", branch: str = "cond", grid: Any = GRID) -> StepInfo:
    return StepInfo(index, 4, branch, expert, grid, 6)


class Blocks:
    """Blocks that each add a factor times x and count their calls."""

    def __init__(self, *factors: float) -> None:
        self.factors, self.calls = factors, [0] * len(factors)

    def __call__(self, x_BLC: Tensor, first: int, last: int | None) -> Tensor:
        for index in range(first, len(self.factors) if last is None else last):
            self.calls[index] += 1
            x_BLC.add_(x_BLC, alpha=self.factors[index])
        return x_BLC


def apply_cache(cache: Any, blocks: Any, x: Tensor, info: StepInfo) -> Tensor:
    def iterate_blocks(x_BLC: Tensor, first: int, last: int | None) -> BlockIterator[Tensor]:
        yield first
        return blocks(x_BLC, first, last)

    with torch.inference_mode():
        return run_to_end(cache.iterate(x.clone(), iterate_blocks, info, 6, torch.float32))


def make_step_lists(*computed: bool) -> policy.StepLists:
    return {"cond": computed, "uncond": computed}


def test_a_skipped_step_adds_the_kept_residual() -> None:
    cache, blocks = make_cache("tea"), Blocks(0.5, 1.0)
    x = torch.randn(1, 6, 4)
    cache.start_run(make_step_lists(True, False, True, False))
    steps = ((x, 3 * x), (x + 1, x + 1 + 2 * x), (2 * x, 6 * x), (x, x + 4 * x))
    for index, (value, expected) in enumerate(steps):
        torch.testing.assert_close(apply_cache(cache, blocks, value, step(index)), expected)
    assert blocks.calls == [2, 2] and cache.computed_indices == {"cond": [0, 2]}


def test_order_one_extrapolates_the_residual() -> None:
    """R(0) = 1, R(2) = 5 per element: 2 a step, so R(3) = 7 and R(5) = 11."""
    cache = make_cache("tea:order=1")
    cache.start_run(make_step_lists(True, False, True, False, False, False))
    x = torch.zeros(1, 6, 4)

    def adds(value: float) -> Callable[[Tensor, int, int | None], Tensor]:
        return lambda x_BLC, first, last: x_BLC.add_(value)

    outputs = [
        apply_cache(cache, adds(value), x, step(i)) for i, value in enumerate((1, 0, 5, 0, 0, 0))
    ]
    assert [y.unique().tolist() for y in outputs] == [[1], [1], [5], [7], [9], [11]]
    assert cache.cached_bytes() == 2 * x.nbytes, "the residual and its change"


def test_another_expert_grid_or_video_reuses_nothing() -> None:
    x = torch.randn(1, 6, 4)
    for other in (step(1, expert=LOW), step(1, grid=(1, 3, 2))):
        cache, blocks = make_cache("tea"), Blocks(1.0)
        cache.start_run(make_step_lists(True, False, False))
        apply_cache(cache, blocks, x, step(0))
        torch.testing.assert_close(apply_cache(cache, blocks, x, other), 2 * x)
        apply_cache(cache, blocks, x, step(2))
        assert blocks.calls == [3], "what the first expert kept is gone"
    cache, blocks = make_cache("tea"), Blocks(1.0)
    for calls in (1, 2):
        cache.start_run(make_step_lists(False, False))
        assert cache.count_skipped_steps() == 0
        for index in (0, 1):
            apply_cache(cache, blocks, x, step(index))
        assert blocks.calls == [calls] and cache.count_skipped_steps() == 1


TURNS = [(branch, sample) for branch in policy.BRANCHES for sample in (0, 1)]


@pytest.mark.parametrize("name", ["tea", "attention"])
def test_each_branch_and_sample_reuses_its_own(name: str) -> None:
    """Branches and samples alternate within a step."""
    cache, added = make_cache(name), {turn: torch.randn(1, 6, 4) for turn in TURNS}
    cache.start_run(make_step_lists(True, False, True))
    for index, (branch, sample) in product((0, 1), TURNS):
        info = replace(step(index, branch=branch), sample=sample)
        value = added[branch, sample] + index
        with torch.inference_mode():
            if name == "attention":
                output = cache(lambda value=value: value, info, 0)
            else:
                blocks = lambda x, *_, value=value: x.add_(value)  # noqa: E731
                output = apply_cache(cache, blocks, torch.zeros(1, 6, 4), info)
        assert torch.equal(output, added[branch, sample]), (index, branch, sample)
    assert cache.skipped_indices == {"cond": [1], "uncond": [1]}


@pytest.mark.parametrize("name", ["tea", "attention", "cfg"])
def test_nothing_is_left_of_a_run_that_ends(name: str) -> None:
    """Also where it ends before a step that would have used it."""
    cache, live, shape = make_cache(name), StorageTracker("cpu"), (1, 6, 4)
    cache.start_run(make_step_lists(True, False))
    with torch.inference_mode(), live:
        if name == "tea":
            apply_cache(cache, Blocks(1.0), torch.ones(shape), step(0))
        elif name == "attention":
            cache(lambda: torch.ones(shape), step(0), 0)
        else:
            cache(0, run_both_branches, lambda branch: torch.ones(1, 1, 6, 4))
        assert live.live_bytes.total() >= 4 * 24, "it is kept for the next step"
        cache.clear()
        assert live.live_bytes.total() == 0


def test_threshold_zero_reuses_nothing() -> None:
    """Also where nothing has changed."""
    assert not decide_locally(torch.tensor([0.0, 1.0]), 0.0)
    assert decide_locally(torch.tensor([0.0, 1.0]), 0.1)


def test_small_changes_add_up() -> None:
    """A step is compared with the last one that was computed, not with the last one."""
    cache, x = make_cache("first_block:threshold=0.2"), torch.randn(1, 6, 4)
    cache.start_run(make_step_lists(*[False] * 4))
    for index in range(4):
        apply_cache(cache, Blocks(1.0, 1.0), 1.15**index * x, step(index))
    assert cache.computed_indices == {"cond": [0, 2]} and cache.skipped_indices == {"cond": [1, 3]}


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3])
def test_first_block_cache_compares_the_first_residual(threshold: float) -> None:
    """r = x in every step here: it changes by a fifth, and only real tokens count."""
    cache, blocks = make_cache(f"first_block:threshold={threshold}"), Blocks(1.0, 0.5)
    cache.start_run(make_step_lists(False, False, False))
    x = torch.randn(1, 6, 4)
    padded = torch.cat((x, torch.randn(1, 2, 4)), 1)
    later = torch.cat((1.2 * x, 100 * torch.randn(1, 2, 4)), 1)
    computed = Blocks(1.0, 0.5)(later.clone(), 0, None)
    apply_cache(cache, blocks, padded, step(0))
    output = apply_cache(cache, blocks, later, step(1))
    if threshold < 0.2:
        assert torch.equal(output, computed) and blocks.calls == [2, 2]
    else:
        torch.testing.assert_close(output, 2 * later + padded)
        assert blocks.calls == [2, 1] and cache.computed_indices == {"cond": [0]}


def test_attention_outputs_are_kept_for_the_next_steps_only() -> None:
    cache, computed = make_cache("attention"), []

    def attend() -> Tensor:
        computed.append(torch.randn(1, 6, 4))
        return computed[-1]

    cache.start_run(make_step_lists(True, False, False, True))
    with torch.inference_mode():
        returned = [[cache(attend, step(index), layer) for layer in (0, 1)] for index in range(4)]
    assert len(computed) == 4 and returned[3][0] is computed[2]
    assert returned[1][0] is returned[0][0] and returned[2][1] is returned[0][1]
    assert (cache.computed_indices, cache.skipped_indices) == ({"cond": [0, 3]}, {"cond": [1, 2]})
    alive = weakref.WeakSet(computed)
    computed.clear(), returned.clear()
    assert not alive, "nobody will ask for them again"


@pytest.mark.parametrize(("h", "w"), [(8, 8), (5, 7)])
def test_the_rebuilt_branch_has_the_kept_difference(h: int, w: int) -> None:
    """Low frequencies of it as they were, high ones a fifth stronger."""
    cache = make_cache("cfg")
    cache.start_run({"cond": (True, True), "uncond": (True, False)})
    slow, fast = (
        torch.cos(2 * torch.pi * periods * torch.arange(w) / w).expand(2, 3, h, w)
        for periods in (1, w // 2)
    )
    cond, later = torch.randn(2, 3, h, w), torch.randn(2, 3, h, w)
    predictions = {"cond": cond, "uncond": cond + slow + fast}
    first = cache(0, run_both_branches, predictions.__getitem__)
    assert torch.equal(first[1], predictions["uncond"])
    predictions = {"cond": later}
    branches = cache(1, run_both_branches, predictions.__getitem__)
    torch.testing.assert_close(branches[1], later + slow + 1.2 * fast)
    assert cache.computed_indices == {"cond": [0, 1], "uncond": [0]}
    assert cache.skipped_indices == {"uncond": [1]}


# Values and parameters with which a policy skips steps of a random network.
POLICY_FLAGS: dict[str, tuple[str, ...]] = {
    "first_block": ("--step_cache=first_block:threshold=0.6",),
    "tea": ("--step_cache=tea:coefficients=1,0,threshold=1",),
    "easy": ("--step_cache=easy:threshold=2",),
    "steps": ("--step_cache=steps:0-3,9,15-19",),
}


def record_forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    """Records branch, step, number of blocks and of self-attentions of every forward."""
    forward, forwards, names = WanModel.forward, list[tuple[str, int, int, int]](), list[str]()

    def note(module: nn.Module, *_: object) -> None:
        names.append(type(module).__name__)

    def record(self: WanModel, *args: Any, step: StepInfo, **more: Any) -> list[Tensor]:
        modules = [module for block in self.blocks for module in (block, block.self_attn)]
        hooks = [module.register_forward_hook(note) for module in modules]
        names.clear()
        result = forward(self, *args, step=step, **more)
        counts = (names.count(type(module).__name__) for module in modules[:2])
        forwards.append((step.branch, step.index, *counts))
        for hook in hooks:
            hook.remove()
        return result

    monkeypatch.setattr(WanModel, "forward", record)
    return forwards


@pytest.mark.parametrize("name", [slow(name) if name == "steps" else name for name in POLICIES])
@pytest.mark.usefixtures("one_thread")
def test_a_run_computes_what_its_policy_promises(
    name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the blocks that ran with the record, the list, and the text of `--plan`."""
    flags = POLICY_FLAGS.get(name, (f"--step_cache={name}",))
    size = ["--size=64*32", "--frame_num=5", "--sample_steps=20", "--sample_shift=5"]
    run = resolve_plan("--task=ti2v-5B", f"--ckpt_dir={tiny('ti2v-5B')}", *size, *flags)
    forwards, implementation = record_forwards(monkeypatch), run.setup.policy
    assert implementation is not None
    settings = {name: value for name, value in vars(run.setup.cache).items() if value is not None}
    model = wan.WanTI2V(WAN_CONFIGS["ti2v-5B"], tiny("ti2v-5B"), **settings)
    texts = {"prompt_embeds": torch.randn(5, 64), "negative_prompt_embeds": torch.randn(3, 64)}
    more = {"sampling_steps": 20, "shift": 5.0, "seed": 1, "output_type": "latent"}
    model.generate("", size=(64, 32), frame_num=5, **more, **texts)
    layers = max(blocks for _, _, blocks, _ in forwards)
    full_steps = {
        branch: [s for name, s, *ran in forwards if name == branch and ran == [layers, layers]]
        for branch in policy.BRANCHES
    }
    factor = 40 / sum(blocks == layers for *_, blocks, _ in forwards)
    assert model.step_cache == {"policy": name, "computed": full_steps}
    assert min(map(len, full_steps.values())) < 20, "it leaves nothing out"
    planned_steps = implementation.list_steps(
        run.params, compute_changes=model._pipeline.step_cache.compute_changes
    )
    assert planned_steps is not None
    for branch, row in planned_steps.items():
        row_steps = [step for step, computes in enumerate(row) if computes]
        assert {*row_steps} <= {*full_steps[branch]}
        assert implementation.decides_per_step or row_steps == full_steps[branch]
    line = implementation.describe(run.params, sync_branches=False)
    for branch, row_steps in re.findall(r"(\w+) computes \d+ of 20 steps \(([\d,-]+)\)", line):
        assert listed_values("", row_steps) == (*full_steps[branch],)
    promised = re.search(r"at most ([\d.]+) times as fast", line)
    if promised is not None:
        assert float(promised[1]) == pytest.approx(factor, abs=0.005)
    assert promised or "self-attention" in line or "decided" in line or "after loading" in line


def test_the_documents_name_each_policy() -> None:
    """They have its effect, its parameters and its threshold."""
    lines = (Path(__file__).parents[2] / "docs" / "step_caches.md").read_text().splitlines()
    for row in POLICIES.values():
        (line,) = (line for line in lines if line.startswith(f"| `{row.value}` | {row.help}"))
        for name in {*row.parameters} - {"warmup", "order", "force", "list"}:
            assert f"`{name}`" in line, row.value
        if "threshold" in row.parameters:
            assert f"`threshold` ({row.parameters['threshold'].default:g}" in line
