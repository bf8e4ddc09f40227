"""Complete runs of generate.py with --attention_backend, in one process and on ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist import Ranks, make_rank_envs
from tests.xfuser.ranks import FLASH, flash_on_cpu, use_function
from wan.cli import main as generate

QUICK = ["--size", "64*48", "--frame_num", "5", "--sample_steps", "2", "--base_seed", "7"]
QUICK += ["--save_latents", "--device", "cpu"]
GATHERED = "; K/V are gathered over the ring for xfuser SDPA_MATH (SDPA with Math backend) (no log"


def latents(video: Path) -> torch.Tensor:
    return load_file(video.with_suffix(".latents.safetensors"))["latents"]


def run_with_lse(argv: list[str]) -> int:
    """On one rank: run generate.py with an SDPA_FLASH for CPUs that returns the log-sum-exp."""
    with use_function(FLASH, flash_on_cpu) as calls:
        code = generate.main(argv)
    print(f"{len(calls)} calls of SDPA_FLASH")
    return code


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """The arguments of a run, and its latents with PyTorch's kernel in both precisions."""
    folder, latents_by_precision = tmp_path_factory.mktemp("plain"), {}
    arguments = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK]
    for precision in ("fp32", "bf16"):
        out = folder / f"{precision}.mp4"
        argv = [*arguments, "--precision", precision, "--save_file", str(out)]
        with Ranks([{}], generate.main, argv) as process:
            assert process.wait_for_exit() == [0], process.format_outputs()
        latents_by_precision[precision] = latents(out)
    return arguments, latents_by_precision


RUNS = {  # world, flags, precision, backend, text of the log
    "alone": (1, (), "fp32", "sdpa_math", "kernel xfuser SDPA_MATH"),
    "gathering ring": (2, ("--ring_size", "2"), "fp32", "sdpa_math", GATHERED),
    "merging ring": (
        4,
        ("--ring_size", "2", "--ulysses_size", "2", "--comm_type", "1"),
        "bf16",
        "sdpa_flash",
        "kernel xfuser SDPA_FLASH (SDPA with FLASH backend); no quantisation",
    ),
    "FSDP, BlockAttn": (
        2,
        ("--dit_fsdp", "--comm_type", "2"),
        "bf16",
        "sdpa_flash",
        "BlockAttn, 10 head chunks of 2 per rank",
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run(name: str, plain, tmp_path: Path) -> None:
    world, flags, precision, backend, log_text = RUNS[name]
    arguments, expected = plain
    out = tmp_path / "v.mp4"
    argv = [*arguments, *flags, "--precision", precision, "--attention_backend", backend]
    argv += ["--save_file", str(out)]
    with Ranks(make_rank_envs(world) if world > 1 else [{}], run_with_lse, argv) as ranks:
        assert ranks.wait_for_exit(180) == [0] * world, ranks.format_outputs()
    assert log_text in ranks.texts[0]
    assert ("K/V are gathered" in ranks.texts[0]) == (log_text is GATHERED)
    limit = 1e-4 if precision == "fp32" else 0.1  # of latents around 1, after two steps in bf16
    assert (latents(out) - expected[precision]).abs().max() <= limit
    has_no_calls = {"0 calls of SDPA_FLASH" in text for text in ranks.texts}
    assert has_no_calls == {backend == "sdpa_math"}
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["settings"]["attention_backend"] == backend
    assert record["used"]["kernel"].startswith(f"xfuser {backend.upper()} (")
    assert record["versions"]["xfuser"] == "0.7.0"


def run_with_lse_on_rank_0(argv: list[str]) -> int:
    """On one rank: run generate.py; only rank 0 has a kernel that returns the log-sum-exp."""

    def return_no_lse(*args: Any) -> Any:
        return flash_on_cpu(*args)[0], None

    with use_function(FLASH, return_no_lse if os.environ["RANK"] == "1" else flash_on_cpu):
        return generate.main(argv)


@pytest.mark.dist
def test_ranks_with_different_kernels_refuse_to_start(tiny) -> None:
    argv = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK, "--precision", "bf16"]
    argv += ["--attention_backend", "sdpa_flash", "--ring_size", "2"]
    with Ranks(make_rank_envs(2), run_with_lse_on_rank_0, argv) as ranks:
        assert ranks.wait_for_exit() == [2, 2], ranks.format_outputs()
    assert "what computes attention" in ranks.format_outputs()
