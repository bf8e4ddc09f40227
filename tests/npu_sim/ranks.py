"""Helpers of ranks on simulated NPUs: chips, and the kernels and backends selected for them.

Legend: B batch, S all tokens, N heads, D head size. Tokens are random, with a trend that makes
blocks differ, in the order that the backend needs.
"""

from __future__ import annotations

import os
from functools import cache
from math import prod
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor

from tests.distributed.topology import Topology, attention_layer
from wan import device as devices
from wan.device import Device
from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import AttentionBackend, AttentionInput, Load, Target
from wan.kernels.registry import SelectedKernels, select_kernels
from wan.modules.attnlayer import FAPowerCapAttention
from wan.settings.attention import Attention
from wan.settings.devices import DEVICES

HEAD_DIM = 64
SPARSITY = 0.5
SOC = {"Duo": "200", "A2": "220", "A3": "250", "A5": "260"}

Grid = tuple[int, int, int]


class Kind(NamedTuple):
    """Attention settings of a run, the chip, and the sampling step of the call.

    way: the kernel that is then selected: dense, laser, fp8, v2, v3 or v3-fp8.
    """

    name: str
    way: str
    chip: str
    attention: Attention
    step: int = 3


def _rain(kind: str, fa_quant: str = "none", start: int = 1) -> Attention:
    return Attention(
        fa_quant=fa_quant,
        use_rainfusion=True,
        rainfusion_type=kind,
        sparsity=SPARSITY,
        sparse_start_step=start,
    )


KINDS = {
    kind.name: kind
    for kind in (
        Kind("dense", "dense", "A2", Attention()),
        Kind("laser", "laser", "A2", Attention(attention_backend="laser")),
        Kind("fp8", "fp8", "A5", Attention(fa_quant="fp8")),
        Kind("fp8-transport", "fp8", "A5", Attention(fa_quant="fp8", quant_alltoall=True)),
        Kind("v2", "v2", "A2", _rain("v2")),
        Kind("v3", "v3", "A2", _rain("v3")),
        Kind("v3-A5", "v3", "A5", _rain("v3")),
        Kind("v3-fp8", "v3-fp8", "A5", _rain("v3", "fp8")),
        Kind("v2-before", "dense", "A2", _rain("v2", start=4)),
        Kind("v3-before", "dense", "A5", _rain("v3", start=4)),
        Kind("v3-fp8-before", "fp8", "A5", _rain("v3", "fp8", start=4)),
    )
}


def select_chip(name: str) -> Device:
    """Select the simulated chip of this process and return its device."""
    os.environ["NPU_SIM_SOC"] = SOC[name]
    device = devices.select_device("npu", 0)
    import mindiesd.layers.adalayernorm as remembers
    from mindiesd.utils import get_platform

    get_platform.PLATFORM = None  # mindiesd caches the last chip
    remembers.npu_device = get_platform.get_npu_device()
    return device


def make_target(chip: str, head_dim: int = HEAD_DIM, load: Load = resolve_name) -> Target:
    """Make the target of kernels for a chip."""
    return Target(Device(torch.device("cpu"), DEVICES[chip]), head_dim, torch.bfloat16, load)


def select_kernels_for(kind: Kind) -> SelectedKernels:
    """Select new kernels and backends with empty caches."""
    return select_kernels(
        kind.attention, Target(select_chip(kind.chip), HEAD_DIM, torch.bfloat16), {}
    )


def make_layer(
    topology: Topology, mode: str, kernels: SelectedKernels, exchange: str = "split"
) -> FAPowerCapAttention:
    """Make the attention layer as a run on an NPU does."""
    layer = attention_layer(topology, mode, kernels.dense_kernel, kernels.backends, exchange)
    layer.contiguous = True
    return layer


@cache
def make_raster_qkv(
    heads: int,
    grid: Grid,
    size: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make q, k, v [B,S,N,D] of tokens in raster order."""
    generator, tokens = torch.Generator().manual_seed(heads * prod(grid)), prod(grid)
    trend = torch.randn(batch, tokens // 40 + 1, heads, size, generator=generator)
    trend = trend.repeat_interleave(40, 1)[:, :tokens]
    return tuple(  # type: ignore[return-value]
        (trend + torch.randn(batch, tokens, heads, size, generator=generator)).to(dtype)
        for _ in range(3)
    )


def make_ordered_qkv(
    kernels: SelectedKernels, heads: int, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = make_raster_qkv(heads, grid)
    if kernels.token_order is None:
        return q, k, v
    order = kernels.token_order(grid)
    return q[:, order], k[:, order], v[:, order]


def make_step_info(kind: Kind, grid: Grid) -> StepInfo:
    return StepInfo(kind.step, 8, "cond", "dit", grid, prod(grid))


def run_backend(
    method: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, step: StepInfo | None
) -> Tensor:
    """Run the backend on unsharded tensors."""
    return method.prepare_kv(AttentionInput(q), AttentionInput(k), AttentionInput(v), step)(
        AttentionInput(q), 0
    )
