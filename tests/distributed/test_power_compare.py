"""`python -m wan.power compare`: its control layer, its refusals, and a whole comparison."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.conftest import slow
from tests.dist import REPO, Ranks, make_rank_envs, run_on_ranks
from tests.distributed.topology import Topology, attention_layer
from tests.pipelines import resolve_argv
from tests.refusals import check_refusals
from wan.kernels.forward_context import StepInfo
from wan.pipeline import memory_estimate
from wan.power.__main__ import main
from wan.power.rounds import IdleGapAttention, SwitchableAttention, make_variant_layer
from wan.power.variants import Variant
from wan.utils import system

pytestmark = pytest.mark.dist


def run_control(topology: Topology, tokens: int) -> tuple[bool, int]:
    """Return whether the control has the baseline's bits, and its number of idle gaps."""
    base_layer = attention_layer(topology, "1", exchange="fused")
    gaps: list[float] = []
    idle_layer = IdleGapAttention(base_layer, 10, lambda: gaps.append(0.0))
    baseline = make_variant_layer(Variant("baseline", 0), base_layer)
    rows = -(-tokens // topology.world)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    qkv = [torch.randn(1, rows, 12, 16, generator=generator) for _ in range(3)]
    step = StepInfo(0, 4, "cond", "dit", (1, 1, tokens), tokens)
    selected = ["rests"]
    switchable_layer = SwitchableAttention(
        {"rests": idle_layer, "baseline": baseline}, lambda: selected[-1]
    )

    def attend() -> torch.Tensor:
        keywords = {"valid_len": tokens, "step": step, "further_keys": None}  # those of a block
        call = switchable_layer.start(qkv[0].flatten(2), 12, **keywords)
        for index, x in enumerate(qkv):
            call.write(index, x)
        return call.finish()

    output = attend()
    selected.append("baseline")
    with torch.no_grad():
        call = switchable_layer.start(qkv[0].flatten(2), 12)
        assert call.takes_slices, "q, k and v are written into the baseline's send buffer"
    return torch.equal(output, attend()), len(gaps)


def test_the_control_is_the_baseline_with_rests() -> None:
    for layout in (Topology(2, 1), Topology(2, 2), Topology(4, 1)):
        num_gaps = min(10, 12 // layout.ulysses) - 1
        assert (
            run_on_ranks(layout.world, run_control, layout, 37) == [(True, num_gaps)] * layout.world
        )


REFUSED_ARGUMENTS = (
    "",
    "--out x --repeats 3",
    "--out x --repeats many",
    "--out x --modes 0,99",
    "--out x --chunks 0",
    "--out x --preset huge",
    "--out x --plan few",
    "--out x --preset published --plan 20",
    "--out x --preset published",
    "--out x -- --comm_type 1",
    "--out x -- --trace y",
    "--out x -- --compile",
    "--out x -- --frame_num 8",
    "--out x",
)


def test_refusals(capfd: pytest.CaptureFixture[str]) -> None:
    messages = {}
    for arguments in REFUSED_ARGUMENTS:
        assert main(["compare", *arguments.split()]) == 2
        messages[arguments or "nothing"] = capfd.readouterr().err
    check_refusals("power compare", messages, [r"(?<=\().*'published'.*(?=\))"])


def test_two_ranks_refuse_once() -> None:
    """The second rank waits until torchrun ends it; with --plan it has nothing to do."""
    plan = ["compare", "--plan", "64", "--out", "x", "--preset", "published"]
    with (
        Ranks(make_rank_envs(2), main, plan) as planning,
        Ranks(make_rank_envs(2), main, ["compare", "--out", "x", "--modes", "0,99"]) as refused,
    ):
        refused.processes[0].join(60)
        refused.processes[1].terminate()
        codes = refused.wait_for_exit()
        assert codes in ([2, 143], [2, -15]), refused.format_outputs()
        assert planning.wait_for_exit() == [2, 0], planning.format_outputs()
    for ranks in (planning, refused):
        assert len(ranks.lines("wan.power: ")) == 1, ranks.format_outputs()


def test_a_plan_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan needs neither ranks nor a checkpoint."""
    arguments = ["compare", "--out", "x", "--preset", "published", "--plan", "64"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Comparison: t2v-A14B, 1280*720, 161 frames, 4 steps, 4 ranks"
    both_experts, one_expert = (re.search(r": ([\d.]+) GB \(", line) for line in lines[1:3])
    assert both_experts is not None and one_expert is not None
    assert float(both_experts[1]) - float(one_expert[1]) > 25 and "fits 64 GB" in lines[2]
    assert not Path("x").exists()


def check_comparison(out: Path, ranks: int, names: list[str]) -> None:
    comparison = json.loads((out / "comparison.json").read_text())
    assert list(comparison["variants"]) == names and comparison["machine"]["ranks"] == ranks
    for name, variant in comparison["variants"].items():
        assert len(variant["seconds"]) == 5 and all(len(steps) == 4 for steps in variant["steps"])
        for steps, total in zip(variant["steps"], variant["seconds"], strict=True):
            assert 0 < sum(steps) <= 1.05 * total
        assert variant["largest_difference"] <= (1 if name == "BlockAttn" else 0)
        planned = not name.startswith("control")
        assert variant["schedule"].startswith("as planned") is planned
        assert planned or "no rests" not in variant["schedule"]
    differences = [variant["latents_apart"] for variant in comparison["variants"].values()]
    assert len(list(out.glob("*.mp4"))) == 1 + sum(bool(variant) for variant in differences)
    assert (out / "gain.png").read_bytes().startswith(b"\x89PNG")
    report = (out / "report.md").read_text()
    assert all(f"| {name} |" in report for name in names) and "Recommended: `--comm_type" in report


@pytest.mark.parametrize(
    ("ranks", "compare_flags", "flags"),
    [
        slow(2, ["--chunks", "3"], []),
        slow(4, [], ["--cfg_size", "2", "--dit_fsdp"]),
        slow(2, [], ["--fa_quant", "fp8", "--quant_alltoall"]),
    ],
)
def test_a_whole_comparison(
    ranks: int, compare_flags: list[str], flags: list[str], tiny: Any, tmp_path: Path
) -> None:
    out = tmp_path / "found"
    folder = tiny("t2v-A14B")
    if "--fa_quant" in flags:  # it needs head sizes that are a power of two
        folder = REPO / "examples" / "demo" / "t2v-A14B"
        flags = [*flags, "--sample_steps", "4"]
    arguments = ["compare", "--out", str(out), *compare_flags, "--", "--ckpt_dir", str(folder)]
    arguments += ["--size", "64*48", "--frame_num", "5", "--base_seed", "1", *flags]
    with Ranks(make_rank_envs(ranks), main, arguments) as processes:
        assert not any(processes.wait_for_exit(240)), processes.format_outputs()
    names = ["baseline", "InsertComm", "BlockAttn"]
    names += ["InsertComm, 3 chunks"] if compare_flags[:1] == ["--chunks"] else []
    names += [] if "--quant_alltoall" in flags else ["control: rests without exchanges"]
    check_comparison(out, ranks, names)


@pytest.mark.slow
def test_finished_rounds_outlive_a_kill(tiny: Any, tmp_path: Path) -> None:
    arguments = ["compare", "--out", str(tmp_path), "--modes", "0", "--"]
    arguments += ["--ckpt_dir", str(tiny("t2v-A14B")), "--size", "64*48", "--frame_num", "5"]
    with Ranks(make_rank_envs(2), main, arguments) as processes:
        processes.wait_for_output(0, "Round 2 of 5", 240)
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert 1 <= len(comparison["variants"]["baseline"]["seconds"]) < 5
    assert "rounds in random order" in (tmp_path / "report.md").read_text()


def run_with_memory(argv: list[str], size: int) -> int:
    """Run `main` as on a machine with `size` bytes of available memory."""
    with patch.object(system, "read_available_memory", lambda: size):
        return main(argv)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "cfg"])
def test_one_expert_at_a_time(cache: str, tiny: Any, tmp_path: Path) -> None:
    """Memory is enough for one expert only; a step cache needs both and is refused."""
    video = ["--ckpt_dir", str(tiny("t2v-A14B")), "--size", "64*48", "--frame_num", "5"]
    video += ["--sample_steps", "8", "--ulysses_size", "2", "--step_cache", cache]
    result = resolve_argv([*video, "--offload_model", "true"], plan=True)
    both_experts_bytes, one_expert_bytes = (
        memory_estimate.find_fullest_stage(
            result.setup, result.params, device="cpu", offload_model=way
        )[1]
        for way in (False, True)
    )
    assert one_expert_bytes < both_experts_bytes
    arguments = ["compare", "--out", str(tmp_path), "--quick", "--modes", "0", "--", *video]
    with Ranks(make_rank_envs(2), run_with_memory, arguments, one_expert_bytes) as processes:
        exit_codes = processes.wait_for_exit(240)
        output = processes.format_outputs()
    if cache == "cfg":
        assert exit_codes == [2, 2] and "--quick takes single steps" in output
        return
    assert exit_codes == [0, 0], output
    assert "one network at a time" in output and re.search(r"\d+ runs of about \S+ s", output)
    variants = json.loads((tmp_path / "comparison.json").read_text())["variants"]
    assert all(result["largest_difference"] in (0, None) for result in variants.values())
    assert not list(tmp_path.glob("*.mp4"))
    assert "from some steps of each expert" in (tmp_path / "report.md").read_text()
