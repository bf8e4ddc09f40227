"""The estimate of the seconds of denoising on a CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.dist import Ranks
from tests.pipelines import build_quick_pipeline, resolve_argv
from wan.cli import main as generate
from wan.kernels.amx_linear import LINEAR_AMX
from wan.pipeline import time_estimate
from wan.testing.random_checkpoint import make_checkpoint

SIZES = {"dim": 768, "ffn_dim": 3072, "num_layers": 2}
FLAGS = ["--size", "128*128", "--frame_num", "33", "--attention_backend", "sdpa"]


@pytest.mark.parametrize("task", ["t2v-1.3B", "causal-1.3B"])
def test_the_operations_are_those_that_pytorch_counts(task: str, tmp_path: Path) -> None:
    """With guidance, and block by block with kept keys."""
    folder = make_checkpoint(task, tmp_path / task, sizes=SIZES)
    run, pipeline = build_quick_pipeline(folder, "--task", task, "--sample_steps", "2", *FLAGS)

    def count_linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 2 * math.prod(x) * weight[0]

    mapping = {LINEAR_AMX.overloadpacket: count_linear}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        pipeline.generate_latents(run.params, run.inputs)
    count = time_estimate.count_denoising_operations(run.setup, run.params)
    assert count == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert time_estimate.measure_operations_per_second(torch.float32) > 1e8


def test_a_long_video_has_a_line(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Of a folder whose defaults are the published ones; none for a video of seconds."""
    folder, file = tiny("t2v-1.3B"), str(tmp_path / "v.mp4")
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", str(folder), "--prompt", "a", "--save_file", file]
    long = ["--size", "1280*720", "--frame_num", "81", "--sample_steps", "1000"]
    with Ranks([{}], generate.main, [*argv, *long, "--device", "cpu"]) as processes:
        processes.wait_for_output(0, "on this CPU: 2000 forward passes over 75600 tokens", 120)
        (line,) = [x for x in processes.texts[0].splitlines() if "forward passes" in x]
        assert re.search(r"takes \d+ h \d+ min or more", line) and "--size" in line
    run = resolve_argv([*argv, "--size", "64*64", "--frame_num", "5"])
    assert time_estimate.describe_long_run(run.setup, run.params, torch.float32) == ""
