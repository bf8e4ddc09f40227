"""A run of generate.py up to its latents, in this process or on the ranks of a pool."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tests.npu_sim.ranks import select_chip
from wan.app import flag_parser as flags
from wan.app.resolve import ResolveContext, resolve_video
from wan.app.run import Run
from wan.distributed import mesh
from wan.pipeline import build
from wan.pipeline.pipeline import Pipeline
from wan.settings import attention_modes

SMALL = ("--size", "208*176", "--frame_num", "9")  # 3 x 11 x 13 tokens: no number of ranks fits
WIDE = ("--size", "1024*512", "--frame_num", "1")  # 2048 tokens
MODES = {str(comm_type): ("--comm_type", str(comm_type)) for comm_type in attention_modes.MODES}
MODES["overlap"] = ("--fa_alltoall_overlap",)


class Way(NamedTuple):
    """Attention flags, the chip they need, and the flags of the video size."""

    chip: str
    flags: tuple[str, ...]
    size: tuple[str, ...] = SMALL


def _rain(kind: str) -> tuple[str, ...]:
    """Return RainFusion flags: the first step is dense (or FP8), the second sparse."""
    steps = ("--sample_steps", "2", "--sparse_start_step", "1", "--sparsity", "0.5")
    return ("--use_rainfusion", "--rainfusion_type", kind, *steps)


FP8 = ("--fa_quant", "fp8")
WAYS = {
    "dense": Way("A2", ()),
    "laser": Way("A2", ("--attention_backend", "laser"), WIDE),
    "fp8": Way("A5", FP8),
    "fp8-transport": Way("A5", (*FP8, "--quant_alltoall")),
    "v2": Way("A2", _rain("v2")),
    "v3": Way("A5", _rain("v3")),
    "v3-fp8": Way("A5", (*FP8, *_rain("v3"))),
}


def make_arguments(checkpoint: object, way: Way) -> list[str]:
    common = ["--task", "t2v-A14B", "--ckpt_dir", str(checkpoint), "--device", "npu"]
    common += ["--sample_steps", "1", "--sample_guide_scale", "1", "--base_seed", "7"]
    return [*common, *way.size, *way.flags]


def make_latents(argv: Sequence[str], chip: str) -> Tensor:
    """Make the float32 latents [C,F,H,W] of a generate.py command line, on every rank."""
    run, pipeline = build_run(argv, chip)
    return pipeline.generate_latents(run.params, run.inputs)


def build_run(argv: Sequence[str], chip: str) -> tuple[Run, Pipeline]:
    """Resolve a generate.py command line and build its pipeline."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(WORLD_SIZE=world, RANK=rank, LOCAL_RANK=rank)
    run = resolve_video(ResolveContext(make_demo=refuse_demo), flags.parse_flags(argv))
    device = select_chip(chip)
    groups = (
        None if world == "1" else mesh.make_parallel_groups(device, run.setup.parallel.mesh_shape)
    )
    return run, build.build_pipeline(run.setup, device, groups)


def refuse_demo(*_: Any) -> None:
    raise AssertionError("no demo checkpoint is asked for here")
