"""generate.py --plan: a report within seconds on any machine, alone or under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Refusals, slow
from tests.dist import GENERATE, torchrun
from wan.cli import main as generate

HD = ["--size", "1280*720", "--frame_num", "81"]
REAL = ["--plan", "--task", "t2v-A14B", *HD]
EIGHT = ["--ulysses_size", "8", "--comm_type", "1"]
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> Plan:
    """plan(*argv): exit code, stdout and stderr in an empty folder, which stays empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*argv: object) -> tuple[int, str, str]:
        code = generate.main([str(argument) for argument in argv])
        captured = capfd.readouterr()
        assert not list(tmp_path.iterdir()), "something was written"
        return code, captured.out, captured.err

    return run


def test_the_real_model_on_a_laptop(plan: Plan) -> None:
    code, out, _ = plan(*REAL, *EIGHT, "--device", "cuda", "--device_memory", 64)
    assert code == 0
    assert out.startswith("Plan: t2v-A14B, 1280*720, 81 frames, bf16, 8 ranks (CUDA GPU); sizes as")
    assert "Attention: InsertComm, 5 head chunks of 1 per rank; ulysses 8 x ring 1 x cfg 1" in out
    assert out.endswith("\nFits: 30.70 GB of 64.00 GB per rank.\n")


@pytest.mark.parametrize(("frames", "needed"), [(5, "83.56"), slow(81, "84.50")])
def test_a_plan_larger_than_memory_is_refused(frames: int, needed: str, plan: Plan) -> None:
    more = ["--offload_model", "false", "--device", "cuda", "--device_memory", 64]
    code, out, err = plan(*REAL, *EIGHT, *more, "--frame_num", frames)
    (line,) = err.splitlines()
    assert code == 2 and line.startswith(
        f"generate.py: The run needs {needed} GB on its fullest rank"
    )
    assert f"Memory of the fullest rank: {needed} GB" in out and "--offload_model true" in line


def test_a_checkpoints_own_sizes(tiny, plan: Plan) -> None:
    folder = tiny("t2v-A14B")
    code, out, _ = plan("--plan", "--ckpt_dir", folder, "--size", "128*96", "--frame_num", "5")
    assert code == 0 and f"sizes of {folder}" in out
    assert "Tokens: 96 + 0 padding, 96 per rank" in out


@pytest.mark.parametrize(
    "task", [*map(slow, ("ti2v-5B", "t2v-14B", "t2v-1.3B", "i2v-A14B", "i2v-14B"))]
)
def test_every_task_without_a_checkpoint_or_image(task: str, plan: Plan) -> None:
    code, out, _ = plan("--plan", "--task", task, "--ulysses_size", 4)
    assert code == 0 and f"Plan: {task}, " in out
    assert ", 4 ranks (" in out and "sizes as published" in out


BAD = {
    "ranks beyond the heads": ["--ulysses_size", "64"],
    "exchanges of a ring": ["--ring_size", "2", "--ulysses_size", "1", "--comm_type", "1"],
    "too many ranks": ["--ulysses_size", "4096", "--ring_size", "2"],
    "decoding": ["--decode_latents", "x.safetensors"],
    "no memory": ["--device_memory", "0"],
    "no folder": ["--ckpt_dir", "nowhere"],
    "size": ["--size", "100*100"],
    "an image": ["--image", "x.png"],
    "FP8 of another chip": ["--chip", "A3", *EIGHT, "--fa_quant", "fp8", "--quant_alltoall"],
}


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals) -> None:
    monkeypatch.chdir(tmp_path)
    refusals("plans", {case: [*REAL, *argv] for case, argv in BAD.items()})


@pytest.mark.slow
def test_fp8_attention_on_eight_a5(plan: Plan) -> None:
    fp8 = ["--chip", "A5", "--fa_quant", "fp8", "--device_memory", "128"]
    code, out, _ = plan(*REAL, *EIGHT, *fp8)
    assert code == 0
    assert "8 ranks (A5)" in out and "5 head chunks of 1 per rank" in out
    assert "fp8 attention," in out and "Fits: 30.73 GB of 128.00 GB per rank." in out


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """As with `| head -1`: no traceback, also not at the exit of the interpreter."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        result = subprocess.run(
            [sys.executable, GENERATE, *REAL, *EIGHT],
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=60,
            cwd=tmp_path,
        )
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.dist
@pytest.mark.slow
def test_under_torchrun_one_rank_prints(tmp_path: Path) -> None:
    result = torchrun(2, *REAL, "--device", "cuda", XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Plan: ") == 1 and ", 2 ranks (CUDA GPU)" in result.stdout
    wrong = torchrun(2, *REAL, "--ulysses_size", "3", XDG_CACHE_HOME=str(tmp_path))
    assert wrong.returncode != 0 and wrong.stderr.count("generate.py: --") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.dist
def test_a_memory_refusal_is_printed_once_under_torchrun(tmp_path: Path) -> None:
    refused = torchrun(2, *REAL, "--device_memory", "20", XDG_CACHE_HOME=str(tmp_path))
    assert refused.returncode != 0 and refused.stderr.count("generate.py: The run needs") == 1
    assert refused.stdout.count("Plan: ") == 1


@pytest.mark.parametrize(
    ("size", "count", "calls"),
    [("832*480", 40, ", once for both guidance branches"), ("1280*720", 80, " in 2 forwards")],
)
def test_copied_bytes_of_streamed_blocks(
    size: str, count: int, calls: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 blocks of 8 C^2 + 2 C F values in bfloat16, once a step or for each branch."""
    argv = ["--plan", "--task", "t2v-A14B", "--size", size, "--frame_num", "81"]
    argv += ["--device", "cuda"]
    argv += ["--offload_model", "block", "--resident_blocks", "0", "--host_gbs", "25"]
    assert generate.main([*argv, "--device_memory", "80"]) == 0
    output = capsys.readouterr().out
    expected = count * 2 * (8 * 5120**2 + 2 * 5120 * 13824)
    match = re.search(rf"Copied per step: (\S+) GB, 40 blocks{calls}, (\S+) s at 25 GB/s", output)
    assert match is not None
    assert float(match[1]) * 1e9 == pytest.approx(expected, rel=0.01)
    assert float(match[2]) == pytest.approx(expected / 25e9, rel=0.01)
    assert generate.main(["--plan", "--task", "t2v-A14B", "--host_gbs", "25"]) == 2
    assert "--host_gbs has no effect" in capsys.readouterr().err
