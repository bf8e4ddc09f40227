"""Samplers and noise tables against diffusers' classes, quadrature and exactly known flows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pipelines import make_layer
from tests.refusals import check_refusals, get_refusal
from wan.app import flag_parser
from wan.app.resolve import ResolveContext, make_line_resolver, resolve_video
from wan.cache.policy import make_policy
from wan.cli.main import main
from wan.kernels.forward_context import StepInfo
from wan.metering.recording import make_exchange_plan
from wan.pipeline.denoise import DenoisingLoop
from wan.pipeline.pipeline import make_base_inputs
from wan.pipeline.scheduler import make_solver
from wan.serve.jobs.records import read_finished_job
from wan.settings.noise_schedule import compute_sigmas, count_noise_samples, make_noise_schedule
from wan.settings.noise_tables import NOISE_TABLES, compute_beta_quantile
from wan.settings.presets import PRESETS
from wan.settings.solvers import SOLVERS
from wan.settings.step_cache import StepCache
from wan.tasks.base import VideoParams, make_video_params

TABLES = ("official", *NOISE_TABLES)
Velocity = Callable[[Tensor, float], Tensor]


def make_params(solver: str, steps: int, table: str = "official", **values: Any) -> VideoParams:
    values = {"sample_solver": solver, "sample_steps": steps, "sigmas": table, **values}
    sizes = {"prompt": "", "size": (32, 32), "frame_num": 1}
    return make_video_params(PRESETS["t2v-A14B"], sizes | values)


def plan_run(flags: str) -> Any:
    settings = flag_parser.parse_flags(["--plan", *flags.split()])
    return resolve_video(ResolveContext(plan=True, make_demo=lambda *_: None), settings)


def follow_flow(params: VideoParams, x: Tensor, velocity: Velocity, draw: Any) -> Iterator[Tensor]:
    """Yields the latents at the sigmas of a solver's steps, the first ones included."""
    schedule = make_noise_schedule(params)
    solver, _ = make_solver(params, schedule, draw)
    yield x
    for sigma in schedule.sigmas[:-1]:
        x = solver.step(x, velocity(x, sigma))
        yield x


# ------------------------------------------------------------------ diffusers and quadrature


def follow_diffusers(
    scheduler: Any, sigmas: tuple[float, ...], x: Tensor, velocity: Velocity, **options: Any
) -> Iterator[Tensor]:
    for index, timestep in enumerate(scheduler.timesteps[: len(sigmas) - 1]):
        output = velocity(x, sigmas[index])
        (x,) = scheduler.step(output, timestep, x, return_dict=False, **options)[:1]
        yield x


def curved_velocity(x: Tensor, sigma: float) -> Tensor:
    return torch.sin(3 * x + sigma) - 0.3 * x


_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 1.0}
SCHEDULERS = {  # whose results have the same bits
    "unipc": partial(diffusers.UniPCMultistepScheduler, **_FLOW),
    "dpm++": partial(diffusers.DPMSolverMultistepScheduler, **_FLOW),
    "euler": diffusers.FlowMatchEulerDiscreteScheduler,
    "dpm++_sde": partial(
        diffusers.DPMSolverMultistepScheduler, **_FLOW, algorithm_type="sde-dpmsolver++"
    ),
}


@pytest.mark.parametrize("solver", SCHEDULERS)
def test_solvers_have_the_bits_of_diffusers(solver: str) -> None:
    start = torch.randn(4, 2, 5, 6, generator=torch.Generator().manual_seed(1))
    for steps, shift in product((1, 2, 3, 4, 15, 50), (1.0, 12.0)):
        params = make_params(solver, steps, sample_shift=shift)
        schedule, scheduler = make_noise_schedule(params), SCHEDULERS[solver]()
        ours, theirs = (torch.Generator().manual_seed(2) for _ in range(2))
        _, timesteps = make_solver(params, schedule)
        scheduler.set_timesteps(steps)
        scheduler.sigmas, scheduler.timesteps = torch.tensor(schedule.sigmas), timesteps.float()
        scheduler.set_begin_index(0)  # large numbers of steps have equal timesteps
        options = {"generator": theirs} if solver == "dpm++_sde" else {}
        noise = partial(torch.randn, start.shape, generator=ours)
        _, *latents = follow_flow(params, start, curved_velocity, noise)
        expected = follow_diffusers(scheduler, schedule.sigmas, start, curved_velocity, **options)
        for x, wanted in zip(latents, expected, strict=True):
            assert torch.equal(x, wanted), (steps, shift)


@pytest.mark.parametrize("solver", ["euler_ancestral", "lcm"])
def test_stochastic_solvers_are_diffusers(solver: str) -> None:
    params = make_params(solver, 8, sample_shift=5.0)
    sigmas = make_noise_schedule(params).sigmas
    start = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.Generator().manual_seed(2) for _ in range(2))
    if solver == "lcm":
        scheduler: Any = diffusers.FlowMatchLCMScheduler()
        scheduler.set_timesteps(sigmas=list(sigmas[:-1]))
    else:
        scheduler = diffusers.LTXEulerAncestralRFScheduler(eta=1, s_noise=1)
        scheduler.set_timesteps(sigmas=list(sigmas))

    def draw() -> Tensor:
        return torch.randn(4, 5, generator=ours)

    _, *latents = follow_flow(params, start, curved_velocity, draw)
    expected = follow_diffusers(scheduler, sigmas, start, curved_velocity, generator=theirs)
    for x, wanted in zip(latents, expected, strict=True):
        torch.testing.assert_close(x, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", ["dmd", "rcm", "lcm"])
def test_stochastic_steps_are_rounded_once(solver: str) -> None:
    """Each step in float64; its result has the dtype of the latents."""
    params = make_params(solver, 4)
    sigmas = make_noise_schedule(params).sigmas
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        start, *noise = torch.randn(4, 3, 50, generator=generator).to(dtype)
        samples, expected = iter(noise), start
        latents = [*follow_flow(params, start, curved_velocity, samples.__next__)]
        for index, x in enumerate(latents[1:]):
            velocity = curved_velocity(latents[index], sigmas[index]).double()
            clean = latents[index].double() - sigmas[index] * velocity
            next_sigma = sigmas[index + 1]
            if next_sigma:
                clean = (1 - next_sigma) * clean + next_sigma * noise[index].double()
            expected = clean.to(dtype)
            assert x.dtype == dtype and torch.equal(x, expected), (dtype, index)


@pytest.mark.parametrize("solver", [*SOLVERS, "rcm, ode"])
def test_noise_samples_are_counted(solver: str) -> None:
    """Those of the first latents, and those that the solver draws; clips are resumed by it."""
    name, _, ode = solver.partition(", ")
    for steps in (1, 4):
        params = make_params(name, steps, **({"ode": True} if ode else {}))
        draws = list[int]()

        def draw(draws: list[int] = draws) -> Tensor:
            draws.append(1)
            return torch.zeros(3)

        assert len([*follow_flow(params, torch.ones(3), curved_velocity, draw)]) > steps
        assert count_noise_samples(params) == 1 + len(draws), steps


def integrate_line(
    x: float, s: float, next_s: float, first: tuple[float, float], second: tuple[float, float]
) -> float:
    """Integrates dx/dlambda = D - x with D on the line through two points (lambda, D)."""
    begin, end = -math.log(s), -math.log(next_s)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    at = (end + begin) / 2 + (end - begin) / 2 * nodes
    line = first[1] + (second[1] - first[1]) * (at - first[0]) / (second[0] - first[0])
    integral = float((weights * np.exp(at - end) * line).sum()) * (end - begin) / 2
    return math.exp(begin - end) * x + integral


@pytest.mark.parametrize("solver", ["res_multistep", "res_2s"])
def test_res_steps_integrate_a_line_through_two_predictions(solver: str) -> None:
    params = make_params(solver, 6)
    sigmas, predictions = make_noise_schedule(params).sigmas, list[float]()
    forwards = SOLVERS[solver].forwards_per_step
    assert len(sigmas) == 1 + (11 if forwards == 2 else 6)

    def velocity(x: Tensor, sigma: float) -> Tensor:
        predictions.append(math.cos(5 * sigma) + 0.4 * x.item())
        return (x - predictions[-1]) / sigma

    start = torch.tensor(0.7, dtype=torch.float64)
    xs = [x.item() for x in follow_flow(params, start, velocity, None)]
    points = [(-math.log(s), d) for s, d in zip(sigmas, predictions, strict=False)]
    for index in range(forwards, len(sigmas) - 2, forwards):
        if solver == "res_2s":
            middle = math.sqrt(sigmas[index] * sigmas[index + 2])
            assert sigmas[index + 1] == pytest.approx(middle, abs=1e-15)
            pair = points[index], points[index + 1]
        else:
            pair = points[index - 1], points[index]
        step = sigmas[index], sigmas[index + forwards]
        assert xs[index + forwards] == pytest.approx(integrate_line(xs[index], *step, *pair))
    assert xs[-1] == pytest.approx(predictions[-1], abs=1e-12)


# ------------------------------------------------------------------ exactly known flows


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_straight_flow_ends_exactly(solver: str) -> None:
    """All noise flows to one video, for every table and number of steps."""
    generator = torch.Generator().manual_seed(0)
    video, start = torch.randn(2, 1, 1, 64, dtype=torch.float64, generator=generator)
    for table, steps in product(TABLES, (1, 2, 4, 9)):
        if solver == "rcm" and (table != "official" or steps > 4):
            continue
        params = make_params(solver, steps, table)

        def draw() -> Tensor:
            return torch.randn(1, 1, 64, dtype=torch.float64, generator=generator)

        *_, end = follow_flow(params, start, lambda x, s: (x - video) / s, draw)
        torch.testing.assert_close(end, video, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ noise tables


def integrate_beta_density(a: float, b: float, x: float) -> float:
    """Integrates the density of Beta(a, b) up to x; t = u^(1/a) removes its pole at 0."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    u = x**a * (nodes + 1) / 2
    integral = float((weights * (1 - u ** (1 / a)) ** (b - 1)).sum()) * x**a / 2 / a
    return integral * math.gamma(a + b) / math.gamma(a) / math.gamma(b)


def test_beta_quantiles() -> None:
    for p in (0.001, 0.1, 0.5, 0.77, 0.999):
        assert compute_beta_quantile(0.5, 0.5, p) == pytest.approx(math.sin(math.pi * p / 2) ** 2)
        assert compute_beta_quantile(1, 3, p) == pytest.approx(1 - (1 - p) ** (1 / 3))
        assert compute_beta_quantile(3, 1, p) == pytest.approx(p ** (1 / 3))
        for a, b in ((0.6, 0.6), (0.5, 0.7), (0.7, 0.5)):
            quantile = compute_beta_quantile(a, b, p)
            assert quantile == pytest.approx(1 - compute_beta_quantile(b, a, 1 - p), rel=1e-9)
            if quantile < 0.9:
                assert integrate_beta_density(a, b, quantile) == pytest.approx(p, rel=1e-6)


def test_noise_tables() -> None:
    assert compute_sigmas("euler", 4, 1.0, "simple") == [1.0, 0.75, 0.5, 0.25]
    assert compute_sigmas("euler", 3, 5.0, "simple") == pytest.approx(
        [1.0, 5 * 0.667 / (1 + 4 * 0.667), 5 * 0.334 / (1 + 4 * 0.334)]
    )
    first, second, *_ = compute_sigmas("unipc", 1000, 1.0, "simple")
    assert first - second > 1e-3, "0.999 is this solver's first level, rounded"
    for table in ("beta", "beta57"):
        levels = NOISE_TABLES[table](20)
        gaps = [a - b for a, b in zip(levels, levels[1:], strict=False)]
        assert len(levels) == 20 and levels[0] == 1000 and max(gaps[0], gaps[-1]) < max(gaps) / 2
        many = NOISE_TABLES[table](500)
        assert len(many) < 500 and list(many) == sorted(set(many), reverse=True)
    symmetric = NOISE_TABLES["beta"](19)
    assert [1001 - level for level in symmetric[:0:-1]] == list(symmetric[1:])


@pytest.mark.parametrize("table", NOISE_TABLES)
def test_solvers_begin_where_they_can(table: str) -> None:
    """UniPC and the SDE solver have no step from sigma 1; two-forward steps have midpoints.

    The official sigmas are evenly spaced from the first one to 0, before the shift.
    """
    for solver in SOLVERS:
        if solver == "rcm":
            continue
        schedule = make_noise_schedule(make_params(solver, 10, table, sample_shift=5.0))
        start = 0.999 if solver in ("unipc", "dpm++_sde") else 1.0
        if table == "beta":
            for steps, shift in product((1, 7), (1.0, 3.0, 12.0)):
                levels = np.linspace(start, 0, steps + 1)[:-1]
                expected = shift * levels / (1 + (shift - 1) * levels)
                assert compute_sigmas(solver, steps, shift) == pytest.approx(expected, rel=1e-7)
        assert schedule.sigmas[0] == pytest.approx(5 * start / (1 + 4 * start))
        assert list(schedule.sigmas) == sorted(set(schedule.sigmas), reverse=True)
        assert len(schedule.experts) == (19 if solver == "res_2s" else 10)
        truncated = all(isinstance(t, int) for t in schedule.timesteps)
        assert truncated == (solver in ("unipc", "dpm++"))
        for timestep, sigma in zip(schedule.timesteps, schedule.sigmas, strict=False):
            exact = 1000 * sigma
            assert timestep == (math.floor(exact) if truncated else pytest.approx(exact))


def test_the_boundary_itself_is_of_the_high_noise_expert() -> None:
    for boundary, timesteps, high in ((0.875, (900, 875, 874.9), 2), (0.9, (900, 899.99), 1)):
        params = make_params("euler", len(timesteps), timesteps=timesteps, boundary=boundary)
        schedule = make_noise_schedule(params)
        assert schedule.high_noise_steps == high and schedule.timesteps == timesteps


# ------------------------------------------------------------------ steps of two forward passes


class CountingNetwork:
    """Both experts; stores (expert, step, number of steps, timestep) of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, float]] = []

    def get(self, name: str) -> Any:
        def forward(x: list[Tensor], t: Tensor, *_: Any, step: StepInfo, **__: Any) -> list[Tensor]:
            assert step.expert == name
            self.calls.append((name, step.index, step.count, t.item()))
            return [0.1 * x[0]]

        return forward

    def prefetch(self, name: str) -> None: ...


@pytest.mark.parametrize(("values", "steps"), [({}, range(19)), ({"strength": 0.3}, range(14, 19))])
def test_forward_passes_are_counted(values: dict[str, Any], steps: range) -> None:
    """The second pass of a step has its expert, even where its timestep is the other's."""
    params = make_params("res_2s", 10, sample_shift=12.0, sample_guide_scale=(1.0, 1.0), **values)
    assert (params.step_range, params.num_forwards) == (steps, 19)
    network, text = CountingNetwork(), torch.zeros(1, 4)
    done: list[int] = []
    DenoisingLoop(
        params,
        make_base_inputs(params, (text, text), torch.device("cpu")),
        lambda index, _: done.append(index),
    ).advance(network)
    assert done == [*range(1, len(steps) + 1)]
    assert [call[1:3] for call in network.calls] == [(index, 19) for index in steps]
    experts = [call[0] for call in network.calls]
    assert experts[-1] == "low_noise" and experts[:-1:2] == experts[1::2]
    times = [call[3] for call in network.calls]
    for first, middle, last in zip(times[::2], times[1::2], times[2::2], strict=False):
        assert middle == pytest.approx(math.sqrt(first * last))
    if not values:
        boundary = experts.index("low_noise")
        assert boundary % 2 == 0 and times[boundary - 1] < 875 <= times[boundary - 2]


def test_sparse_steps_are_forward_passes() -> None:
    run = plan_run("--use_rainfusion --sample_solver res_2s --sample_steps 8")
    exchange_plan = make_exchange_plan(run.setup, run.params, (), False, "cpu")
    assert exchange_plan.sparse_from == 4  # a quarter of 15


def test_step_caches_list_forward_passes() -> None:
    params = make_params("res_2s", 5)
    preset = params.preset
    for cache in ("steps:0,3,8", "attention", "cfg", "first_block"):
        policy = make_policy(StepCache(cache, start_step=2), preset)
        assert policy is not None
        policy.check_params(params)
        lists = policy.list_steps(params)
        assert lists is not None and all(len(mask) == 9 for mask in lists.values()), cache


# ------------------------------------------------------------------ front ends


def test_settings_are_replayed_or_replaced(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    run = plan_run("--sample_solver res_2s --sigmas beta57 --sample_steps 5")
    assert run.params.num_forwards == 9 and any("9 forward passes" in n for n in run.notices)
    record.write_text(json.dumps({"settings": run.settings}))
    assert plan_run(f"--from_json {record}").params == run.params
    for flags, table in (
        ("--timesteps 900,300", "official"),
        ("--sample_solver rcm --sample_steps 4", "official"),
        ("--recipe lightning-4step", "official"),
        ("--sample_solver lcm", "beta57"),
        ("--sigmas simple", "simple"),
    ):
        assert plan_run(f"--from_json {record} {flags}").params.sigmas == table, flags
    recipe = plan_run("--task ti2v-5B --recipe fastwan-3step --sigmas simple").params
    assert recipe.timesteps is None and recipe.sigmas == "simple"
    resolve_line = make_line_resolver(make_layer({"sigmas": "beta", "sample_solver": "euler"}))
    line = resolve_line(make_layer({"prompt": "a cat", "timesteps": "900,300"}))
    assert (line.params.sigmas, line.params.num_forwards) == ("official", 2)
    dense = plan_run("--sigmas beta --sample_steps 400 --sample_solver euler")
    assert dense.params.num_forwards < 400 and any("different sigmas" in n for n in dense.notices)


def test_refusals() -> None:
    eight = "--sample_steps 8 --sample_solver"
    table = {
        "unknown table": "--sigmas karras",
        "empty table": "--sigmas=",
        "numbers": "--sigmas 1.0,0.7,0.3",
        "upper case": "--sigmas BETA",
        "timesteps beside": "--sigmas beta --timesteps 1000,500 --sample_solver euler",
        "rcm": "--sigmas beta --sample_solver rcm --sample_steps 4",
        "rcm's recipe": "--sigmas beta --recipe rcm-4step",
        "unknown sampler": "--sample_solver res_2m",
        "ComfyUI's name": "--sample_solver euler_a",
        "sde with timesteps": "--sample_solver dpm++_sde --timesteps 1000,500",
        "no steps": "--sample_solver res_2s --sample_steps 0",
        "too many steps": "--sample_solver res_multistep --sample_steps 1001",
        "late boundary": f"{eight} res_2s --boundary_step 9",
        "mag, table": f"--sigmas beta --step_cache mag {eight} unipc",
        "mag, two forward passes": f"--step_cache mag {eight} res_2s",
        "cache of few passes": "--step_cache first_block --sample_solver res_2s --sample_steps 4",
        "listed pass": "--step_cache steps:0,9 --sample_solver res_2s --sample_steps 5",
        "traced pass": f"--trace t --trace_steps 15 {eight} res_2s",
        "ode": "--ode --sample_solver euler_ancestral",
        "sigma_max": "--sigma_max 80 --sample_solver lcm",
        "sparse from": f"--use_rainfusion --sparse_start_step 15 {eight} res_2s",
    }
    messages = {name: get_refusal(plan_run, flags) for name, flags in table.items()}
    check_refusals("samplers", messages)


def test_the_forward_passes_of_a_video_are_recorded(tiny: Any, tmp_path: Path) -> None:
    """The service reads them back."""
    job = tmp_path / "job"
    job.mkdir()
    flags = "--task t2v-1.3B --size 32*32 --frame_num 1 --base_seed 3 --sample_guide_scale 1"
    flags += " --prompt cat --sample_solver res_2s --sigmas beta57 --sample_steps 3"
    paths = f"--ckpt_dir {tiny('t2v-1.3B')} --save_file {job / 'video.mp4'}"
    assert main([*flags.split(), *paths.split()]) == 0
    assert json.loads((job / "video.json").read_text())["forwards"] == 5
    restored = read_finished_job(job)
    assert restored is not None and (restored.done, restored.total) == (5, 5)
