"""generate.py --plan: a report within seconds on any machine, alone or under torchrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Refusals, Tiny
from tests.dist import GENERATE, torchrun
from tests.tasks.tasks import TASKS
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


def test_a_plan_larger_than_memory_is_refused(tiny, plan: Plan) -> None:
    argv = ["--plan", "--ckpt_dir", tiny("t2v-A14B"), "--size", "128*96", "--frame_num", "5"]
    argv += ["--chip", "A2", "--offload_model", "false"]  # which has 64 GB
    _, out, _ = plan(*argv, "--device_memory", 65)
    (need,) = re.findall(r"Memory of the fullest rank: (\S+) MB", out)
    assert out.endswith(f"Fits: {need} MB of 65.00 GB per rank.\n")
    code, out, err = plan(*argv, "--device_memory", float(need) / 1000 - 0.001)
    (line,) = err.splitlines()
    assert code == 2 and "--offload_model true" in line and "Plan: " in out
    assert line.startswith(f"generate.py: The run needs {need} MB on its fullest rank")


def test_a_checkpoints_own_sizes(tiny, plan: Plan) -> None:
    folder = tiny("t2v-A14B")
    code, out, _ = plan("--plan", "--ckpt_dir", folder, "--size", "128*96", "--frame_num", "5")
    assert code == 0 and f"sizes of {folder}" in " ".join(out.split())
    assert "Tokens: 96 + 0 padding, 96 per rank" in out


def test_lines_fit_100_columns(plan: Plan) -> None:
    _, out, _ = plan(*REAL, *EIGHT, "--device_memory", 64)
    assert "75600 + 0 padding" in out and max(map(len, out.splitlines())) <= 100


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


OWN_NETWORKS = {"VAE": "*[vV][aA][eE]*", "CLIP": "models_clip*", "audio encoder": "wav2vec2*"}
"""Networks that differ between tasks, and the names of their files or folders."""


def test_a_plan_refuses_what_a_run_refuses(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    """Each kind of task without one of its networks, and files that no run could use."""
    monkeypatch.chdir(tmp_path)
    cases: dict[str, list[object]] = {}
    for name in ("i2v", "ti2v", "first and last", "vace", "s2v", "animate", "animate2"):
        column, checkpoint = TASKS[name], tiny(TASKS[name].checkpoint)
        (tmp_path / name).mkdir()
        inputs = [word for pair in column.inputs(tmp_path / name).items() for word in pair]
        for network, pattern in OWN_NETWORKS.items():
            for path in checkpoint.rglob(pattern):
                folder = f"{name} without {network}"
                ignore = shutil.ignore_patterns(path.name)
                shutil.copytree(checkpoint, folder, ignore=ignore, copy_function=os.symlink)
                flags = ["--task", column.checkpoint, *column.flags, *inputs]
                cases[folder] = [*flags, "--ckpt_dir", folder]
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("no weights")
    good = ["--ckpt_dir", tiny("t2v-A14B")]
    refusals(
        "runs and their plans",
        cases
        | {
            "empty folder": ["--ckpt_dir", "empty"],
            "folder of another task": ["--ckpt_dir", tiny("ti2v-5B")],
            "LoRA missing": [*good, "--lora_high_noise", "absent.safetensors"],
            "LoRA that is none": [*good, "--lora_low_noise", "text.safetensors"],
            "VAE missing": [*good, "--vae", "absent.safetensors"],
            "VAE of another family": [*good, "--vae", tiny("ti2v-5B") / "Wan2.2_VAE.pth"],
            "VAE without a folder": ["--vae", "absent.safetensors"],
            "text encoder without a folder": ["--text_encoder", "text.safetensors"],
        },
        plans=True,
    )


@pytest.mark.dist
@pytest.mark.slow
def test_under_torchrun_one_rank_prints(tmp_path: Path) -> None:
    result = torchrun(2, *REAL, "--device", "cuda", XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Plan: ") == 1 and ", 2 ranks (CUDA GPU)" in result.stdout
    for flags, begin in (("--ulysses_size 3", "--"), ("--device_memory 20", "The run needs")):
        refused = torchrun(2, *REAL, *flags.split(), XDG_CACHE_HOME=str(tmp_path))
        assert refused.returncode != 0 and refused.stderr.count(f"generate.py: {begin}") == 1
    assert not list(tmp_path.iterdir())


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
