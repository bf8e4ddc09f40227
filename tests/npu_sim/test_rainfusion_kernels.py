"""RainFusion on NPUs: token order, masks and kernels against mindiesd's sparse_attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu_sim import oracles
from tests.npu_sim.ranks import KINDS, Grid, Kind, make_raster_qkv, make_target, run_backend
from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import AttentionInput
from wan.kernels.npu import block_sparse
from wan.kernels.rainfusion import RainFusionAttention
from wan.kernels.rainfusion_masks import make_window_order
from wan.kernels.registry import select_kernels

Choose = Callable[[str], None]
# Windows that fill frames; rows left over; columns left over; both; many blocks kept, few, all.
CASES = [((4, 16, 16), 0.64), ((3, 12, 16), 0.9), ((3, 8, 21), 0.5), ((4, 13, 11), 0.8)]
CASES += [((4, 13, 11), 0.0)]
WAYS = [KINDS["v2"], KINDS["v3"]._replace(chip="A3"), KINDS["v3-A5"], KINDS["v3-fp8"]]


def make_backend(kind: Kind, sparsity: float, size: int = 64) -> RainFusionAttention:
    """Make the backend selected for a chip. size: of heads."""
    attention_settings = replace(kind.attention, sparsity=sparsity, sparse_start_step=0)
    method = select_kernels(attention_settings, make_target(kind.chip, size), {}).backends[0]
    assert isinstance(method, RainFusionAttention)
    return method


def make_step_info(grid: Grid) -> StepInfo:
    return StepInfo(0, 1, "cond", "low", grid, grid[0] * grid[1] * grid[2], layer=0)


def run_in_window_order(
    backend: RainFusionAttention, qkv: tuple[Tensor, Tensor, Tensor], grid: Grid
) -> Tensor:
    """Attend to tokens in raster order by reordering them to windows and back."""
    order = make_window_order(grid)
    q, k, v = (x[:, order] for x in qkv)
    return run_backend(backend, q, k, v, make_step_info(grid))[:, order.argsort()]


@pytest.mark.parametrize("kind", WAYS, ids=lambda kind: f"{kind.way}-{kind.chip}")
def test_bits_of_mindiesd(kind: Kind, chip: Choose, calls: list[Any]) -> None:
    """Bit-equal results by the same operator calls, for FP8 with other head sizes and dtypes."""
    chip(kind.chip)
    operator = {"v2": "mindiesd.rainfusionattention"}.get(
        kind.way, "mindiesd.block_sparse_attention"
    )
    forms = [(64, torch.bfloat16)]
    if kind.way == "v3-fp8":
        forms = [(64, torch.float16), (128, torch.bfloat16)]
    for grid, sparsity in CASES:
        for size, dtype in forms:
            qkv = make_raster_qkv(2, grid, size, dtype)
            calls.clear()
            expected = oracles.compute_rainfusion(kind, *qkv, grid, sparsity).to(dtype)
            vendor_calls = [*calls]
            calls.clear()
            out = run_in_window_order(make_backend(kind, sparsity, size), qkv, grid)
            assert out.dtype == dtype and torch.equal(out, expected), (grid, sparsity, size)
            assert calls[-1].name == operator and len(calls) == len(vendor_calls)
            assert (calls[-1].shapes[:3], calls[-1].dtypes, calls[-1].facts) == (
                vendor_calls[-1].shapes[:3], vendor_calls[-1].dtypes, vendor_calls[-1].facts,
            )  # fmt: skip


@pytest.mark.parametrize("kind", WAYS, ids=lambda kind: f"{kind.way}-{kind.chip}")
def test_each_sample_and_each_block_by_itself(kind: Kind, chip: Choose) -> None:
    """mindiesd's v2 uses the first sample's mask for all; `wan` has one for each sample."""
    chip(kind.chip)
    grid = (4, 13, 16)  # and the masks of the samples differ
    q, k, v = (x[:, make_window_order(grid)] for x in make_raster_qkv(2, grid, batch=2))
    backend = make_backend(kind, 0.64)
    full_output = run_backend(backend, q, k, v, make_step_info(grid))
    for b in range(2):
        sample = slice(b, b + 1)
        assert torch.equal(
            full_output[sample],
            run_backend(backend, q[sample], k[sample], v[sample], make_step_info(grid)),
        )
    by_blocks = backend.prepare_kv(
        AttentionInput(q), AttentionInput(k), AttentionInput(v), make_step_info(grid)
    )
    cuts = ((0, 256), (256, 384), (384, q.shape[1]))
    parts = [by_blocks(AttentionInput(q[:, a:b]), a) for a, b in cuts]
    assert torch.equal(torch.cat(parts, 1), full_output)
    head = (slice(None), slice(None), slice(1, 2))
    assert torch.equal(
        run_backend(backend, q[head], k[head], v[head], make_step_info(grid)), full_output[head]
    )


def test_v2_takes_no_wide_blocks(chip: Choose) -> None:
    q = AttentionInput(torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16))
    mask = torch.ones(1, 2, 2, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="blocks of 128 keys, not 256"):
        block_sparse.RainKernelV2(make_target("A2"))(q, q, q, mask, 256)
