"""Estimates how long denoising takes on a CPU, from the matrix products and the attention."""

from __future__ import annotations

import time
from math import prod

import torch

from wan.kernels.linear import multiply
from wan.pipeline.setup import Setup
from wan.tasks.base import VideoParams
from wan.utils.log import format_duration

_QUICK_OPERATIONS = 1e13  # below them a video takes at most minutes on any CPU: nothing is measured
_LONG_SECONDS = 600.0
_SIDE = 1024  # of the matrices that are measured


def count_denoising_operations(setup: Setup, params: VideoParams) -> float:
    """Returns the multiplications and additions of all forward passes of a video's DiTs.

    Counted are the products with weights and the attention of the blocks.
    """
    config, tokens = setup.checkpoint.config, params.max_clip_tokens
    dim = config["dim"]
    num_keys = tokens + params.task.count_kept_latents(params) * prod(params.grid[1:])
    weights = 6 * dim * dim + 2 * dim * config["ffn_dim"]  # q, k, v, o; cross-attention's q, o; ffn
    operations = config["num_layers"] * tokens * (2 * weights + 4 * dim * num_keys)
    return float(operations * count_forward_passes(params))


def count_forward_passes(params: VideoParams) -> int:
    """Returns the forward passes of all clips or blocks of a video; a block has a clean one."""
    branches = 2 if params.uses_guidance else 1
    num_steps = len(params.step_range) * branches * (params.num_clip or 1)
    return num_steps * params.num_blocks + params.num_blocks - 1


def measure_operations_per_second(dtype: torch.dtype) -> float:
    """Returns the multiplications and additions of a linear layer per second on this CPU."""
    a, b = (torch.full((_SIDE, _SIDE), 1 / 3, dtype=dtype) for _ in range(2))
    seconds = list[float]()
    for _ in range(3):
        start = time.perf_counter()
        with torch.no_grad():
            multiply(a, b, None)
        seconds.append(time.perf_counter() - start)
    return 2 * _SIDE**3 / min(seconds)


def describe_long_run(setup: Setup, params: VideoParams, dtype: torch.dtype) -> str:
    """Returns a notice about a video that takes more than ten minutes on a CPU; "" for others.

    dtype: That of the products.
    """
    operations = count_denoising_operations(setup, params) / setup.parallel.world_size
    if operations <= _QUICK_OPERATIONS:
        return ""
    seconds = operations / measure_operations_per_second(dtype)
    if seconds <= _LONG_SECONDS:
        return ""
    return (
        f"Denoising takes {format_duration(seconds)} or more on this CPU: "
        f"{count_forward_passes(params)} forward passes over {params.max_clip_tokens} tokens. A "
        "smaller `size`, or fewer `frame_num` or `sample_steps`, take less."
    )
