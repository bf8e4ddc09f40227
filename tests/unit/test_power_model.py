"""The predictor: its governor against small time steps, its arithmetic against the real layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import power_model
from benchmarks.power_model import Constants, Workload
from tests.conftest import slow
from tests.pipelines import resolve_plan
from tests.refusals import check_refusals
from wan.app.programs import run_program
from wan.modules.blocks import BlockSizes, SharedInputs, WanAttentionBlock
from wan.modules.interfaces import ModelComponents
from wan.planner.measure import Planner
from wan.power.__main__ import main as run_power_command
from wan.settings.attention_modes import MODES, OVERLAP, TokenPlan

SIZES = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "text_len": 512}
PUBLISHED_WORK = Workload(TokenPlan(147_600, 4), SIZES, ulysses=4, ring=1, layers=160)


def integrate_by_euler(
    layers: list[tuple[str, float]], constants: Constants
) -> tuple[float, float, float]:
    """Returns seconds, energy and throttled seconds by Euler's method with steps of 20 us."""
    dt, now, average, lowered_until = 2e-5, 0.0, constants.ps, -1.0
    energy = throttled = 0.0
    activity = {"fa": 1.0, "linear": constants.a_linear, "comm": constants.a_comm, "idle": 0.0}
    for kind, remaining in layers:
        while remaining > 0:
            if now >= lowered_until and average >= 1:
                lowered_until = now + constants.hold
            clock = constants.f_low if now < lowered_until else 1.0
            power = (
                constants.ps
                + activity[kind] * (constants.pfa - constants.ps) * clock**constants.alpha
            )
            average += dt / constants.tau * (power - average)
            energy += power * dt
            throttled += dt * (clock < 1)
            remaining -= dt * (clock if kind in ("fa", "linear") else 1)
            now += dt
    return now, energy, throttled


def test_governor_against_small_steps() -> None:
    changes_by_mode = {0: {}, 1: {"pfa": 1.3}, 2: {"tau": 0.02, "hold": 0.05}}
    for comm_type, changes in changes_by_mode.items():
        constants = Constants(**changes)
        layer = PUBLISHED_WORK.list_layer_work(MODES[comm_type], MODES[comm_type].chunks, constants)
        simulated, exact = (
            power_model.simulate_layers(layer, 6, constants),
            integrate_by_euler(layer * 6, constants),
        )
        assert simulated == pytest.approx(exact, rel=0.02), (comm_type, changes)


def test_published_row() -> None:
    predictions = power_model.predict_modes(PUBLISHED_WORK, Constants())
    for row, measured in zip(predictions, power_model.PUBLISHED_SECONDS.values(), strict=False):
        assert row.seconds == pytest.approx(measured, rel=0.003)


def test_many_layers_are_extrapolated() -> None:
    layer = PUBLISHED_WORK.list_layer_work(MODES[0], 1, Constants())
    seconds = [power_model.simulate_layers(layer, count, Constants())[0] for count in (400, 4000)]
    assert seconds[1] == pytest.approx(10 * seconds[0], rel=0.02)


def test_power_below_the_limit_is_not_throttled() -> None:
    constants = Constants(pfa=0.99)
    predictions = power_model.predict_modes(PUBLISHED_WORK, constants)
    assert all(row.throttled == 0 for row in predictions)
    assert len(predictions) == len(MODES) + 1  # there is nothing to lock a clock for


def test_orders() -> None:
    constants = Constants(launch_us=0)
    kinds = {
        key: [kind for kind, _ in PUBLISHED_WORK.list_layer_work(mode, mode.chunks, constants)]
        for key, mode in MODES.items()
    }
    assert kinds[0] == ["comm", "fa", "comm", "linear"]
    assert kinds[1] == ["comm", "fa", "comm"] * 10 + ["linear"]
    assert kinds[2] == ["comm", "fa", "fa", "comm"] * 10 + ["linear"]
    in_order, hidden = (
        sum(s for kind, s in PUBLISHED_WORK.list_layer_work(mode, 10, constants) if kind == "comm")
        for mode in (MODES[1], OVERLAP)
    )
    assert hidden == pytest.approx(in_order / 10)  # the first tensors and the last result


def test_flops_against_the_block() -> None:
    """PyTorch counts the operations of the real block."""
    tokens, channels, ffn, heads, text = 96, 256, 640, 2, 24
    sizes = {"dim": channels, "ffn_dim": ffn, "num_heads": heads, "text_len": text}
    work = Workload(TokenPlan(tokens, 1), sizes, ulysses=1, ring=1, layers=1)
    constants = Constants(fa_tflops=1e-3, linear_tflops=1e-3, launch_us=0, exchange_us=0)
    block = WanAttentionBlock(BlockSizes(channels, ffn, heads), 0, ModelComponents())
    x_BLC, e0_BR6C = torch.zeros(1, tokens, channels), torch.zeros(1, 1, 6, channels)
    rope = (torch.ones(tokens, 1, channels // heads), torch.zeros(tokens, 1, channels // heads))
    kv = torch.zeros(2, 1, text, heads, channels // heads).unbind(0)
    counter = FlopCounterMode(display=False)
    context = SharedInputs((tokens,), rope, tokens)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        block(x_BLC, e0_BR6C, torch.zeros(1, text, channels), kv, context)
    seconds = sum(seconds for _, seconds in work.list_layer_work(MODES[0], 1, constants))
    assert counter.get_total_flops() == pytest.approx(seconds * 1e9)


@pytest.mark.parametrize(("ulysses", "ring", "comm_type"), [(2, 2, 1), slow(2, 2, 2)])
def test_bytes_against_the_layers(
    ulysses: int, ring: int, comm_type: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with the bytes that the real layers pass to a group without transport."""
    monkeypatch.chdir(tmp_path)
    flags = "--task t2v-1.3B --size 832*480 --frame_num 5 --device cuda --ulysses_size"
    flags += f" {ulysses} --ring_size {ring} --comm_type {comm_type * (ulysses > 1)}"
    run = resolve_plan(*flags.split())
    sent = Planner(run.setup, run.params).measure_forwards(run.setup.parallel)[0].collectives[0]
    to_all = sum(size for name, size in sent if name == "alltoall_base_")
    hops = sum(size for name, size in sent if name == "send")
    # One byte takes one second, and computing takes no time.
    constants = Constants(
        link_gbs=1e-3, fa_tflops=1e5, linear_tflops=1e5, launch_us=0, exchange_us=0
    )
    mode = run.setup.parallel.mode
    layer = Workload.from_run(run).list_layer_work(mode, mode.chunks, constants)
    waited = sum(seconds for kind, seconds in layer if kind == "comm") * 1e6
    assert waited == pytest.approx(to_all * (ulysses - 1) / ulysses + hops, rel=1e-3)


def test_a_rank_calls_each_layer_once_a_step_and_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank computes both guidance branches, one of two, or the only branch."""
    monkeypatch.chdir(tmp_path)
    for more_flags, branches in (("", 2), ("--cfg_size 2", 1), ("--sample_guide_scale 1", 1)):
        flags = f"--task t2v-1.3B --ulysses_size 2 --sample_steps 5 {more_flags}"
        assert Workload.from_run(resolve_plan(*flags.split())).layers == 30 * 5 * branches


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    power_model.main([])
    out = capsys.readouterr().out
    assert "108.18 s" in out and "fitted to the published row" in out and "108.35 s" in out
    power_model.main(["--task", "ti2v-5B", "--pfa", "1.2"])
    out = capsys.readouterr().out
    assert "108.35" not in out and "command line" in out


def test_the_command_of_earlier_versions_names_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_power_command(["predict", "--tau", "1"]) == 2
    check_refusals("power: predict", {"predict": capsys.readouterr().err})


def test_refused(capsys: pytest.CaptureFixture[str]) -> None:
    messages = {}
    for argv in (
        *("--ulysses_size 1", "--pfa 0.2", "--tau x", "--task s2v", "--nonsense 1", "--ps 1"),
        "--pfa 2 --f_low 0.9",
    ):
        assert run_program(partial(power_model.main, argv.split()), "power_model.py") == 2
        messages[argv] = capsys.readouterr().err
    check_refusals("power model", messages, hide=[r"(?<=invalid choice: ).*?\)"])
