"""generate.py --plan: an answer at once, on any machine, alone or under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist import torchrun

REPO = Path(__file__).parents[2]
REAL = ["--plan", "--task", "t2v-A14B", "--size", "1280*720", "--frame_num", "81"]
EIGHT = ["--ulysses_size", "8", "--comm_type", "1"]


def plan(*argv: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """generate.py in an empty home, which must stay empty."""
    home = cwd / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-B", str(REPO / "generate.py"), *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "XDG_CACHE_HOME": str(home), **env},
    )
    assert list(cwd.rglob("*")) == [home], "something was written"
    return done


def test_the_real_model_on_a_laptop(tmp_path: Path) -> None:
    done = plan(*REAL, *EIGHT, "--device_memory", 64, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 8 ranks: cfg 1 x ring 1 x ulysses 8, InsertComm; sizes as published" in done.stdout
    assert "Fits: 30.71 GB of 64.00 GB per rank." in done.stdout


def test_what_does_not_fit_is_refused_after_the_plan(tmp_path: Path) -> None:
    keep = ["--offload_model", "false"]
    done = plan(*REAL, *EIGHT, *keep, "--device_memory", 64, cwd=tmp_path)
    assert done.returncode == 2
    assert "Memory of the fullest rank: 71.87 GB" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("generate.py: The run needs 71.87 GB") and "--offload_model true" in line


def test_a_checkpoints_own_sizes(tiny, tmp_path: Path) -> None:
    folder = tiny("t2v-A14B")
    size = ["--size", "128*96", "--frame_num", "5"]
    done = plan("--plan", "--ckpt_dir", folder, *size, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"sizes of {folder}" in done.stdout
    assert "Tokens: 96 + 0 padding, 96 per rank" in done.stdout


@pytest.mark.parametrize("task", ["i2v-A14B", "ti2v-5B", "t2v-1.3B", "t2v-14B", "i2v-14B"])
def test_every_task_without_a_checkpoint_or_picture(task: str, tmp_path: Path) -> None:
    done = plan("--plan", "--task", task, "--ulysses_size", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 4 ranks" in done.stdout and "sizes as published" in done.stdout


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--ulysses_size", "16"], "does not divide the model's 40 heads"),
        (["--ring_size", "2", "--ulysses_size", "1", "--comm_type", "1"], "ulysses_size > 1"),
        (["--ulysses_size", "4096", "--ring_size", "2"], "at most 4096 are planned"),
        (["--decode_latents", "x.safetensors"], "drop one"),
        (["--device_memory", "0"], "must be above 0"),
        (["--ckpt_dir", "nowhere"], "does not exist"),
        (["--size", "100*100"], "multiples of 16"),
        (["--image", "x.png"], "takes no --image"),
        (["--chip", "A2", "--fa_quant", "fp8"], "--fa_quant fp8 needs an A5; this is an A2"),
        (["--chip", "A3", *EIGHT, "--fa_quant", "fp8", "--quant_alltoall"], "this is an A3"),
        (["--chip", "A5", "--attention_algo", "laser"], "--attention_algo laser needs an A2 or A3"),
        (["--chip", "A5", "--use_rainfusion"], "use --rainfusion_type v3"),
        (["--chip", "Duo"], "A Duo computes in float16 only"),
        (["--chip", "A2", "--device", "cuda"], "drop one of them"),
    ],
)
def test_refusals(argv: list[str], sentence: str, tmp_path: Path) -> None:
    done = plan(*REAL, *argv, cwd=tmp_path)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_fp8_attention_on_eight_a5(tmp_path: Path) -> None:
    fp8 = ["--chip", "A5", "--fa_quant", "fp8", "--device_memory", "128"]
    done = plan(*REAL, *EIGHT, *fp8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 x 1 heads per rank, on A5, FP8" in done.stdout
    assert "Fits: 30.74 GB of 128.00 GB per rank." in done.stdout


def test_device_memory_needs_a_plan(tmp_path: Path) -> None:
    done = plan("--device_memory", "64", cwd=tmp_path)
    assert done.returncode == 2 and "add --plan" in done.stderr


def test_it_is_quick_and_does_without_torch() -> None:
    script = (
        "import sys, generate; code = generate.main(sys.argv[1:]); "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    best = 99.0
    for _ in range(3):
        start = time.perf_counter()
        argv = [sys.executable, "-c", script, *REAL, *EIGHT]
        done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=60)
        best = min(best, time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    assert best < 3  # 0.2 s where nobody else computes


@pytest.mark.dist
def test_under_torchrun_one_rank_speaks(tmp_path: Path) -> None:
    done = torchrun(2, *REAL, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Plan: ") == 1 and "on 2 ranks" in done.stdout
    refused = torchrun(2, *REAL, "--device_memory", "20", XDG_CACHE_HOME=str(tmp_path))
    assert refused.returncode != 0 and refused.stderr.count("generate.py: The run needs") == 1
    wrong = torchrun(2, *REAL, "--ulysses_size", "3", XDG_CACHE_HOME=str(tmp_path))
    assert wrong.returncode != 0 and wrong.stderr.count("generate.py: --") == 1
    assert not list(tmp_path.iterdir())
