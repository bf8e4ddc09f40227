"""RainFusion on NPUs: our order, masks and kernels against mindiesd's public sparse_attention.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu_sim.ranks import attend, target
from wan.kernels.base import Payload, StepInfo
from wan.kernels.fp8 import Fp8Quantiser, Rotations, sylvester
from wan.kernels.npu import block_sparse as npu_sparse
from wan.kernels.npu import fp8 as npu_quant
from wan.kernels.rainfusion import RainFusionAttention
from wan.kernels.rainfusion_masks import window_order

Choose = Callable[[str], None]
Grid = tuple[int, int, int]
# Windows that fill frames; rows left over; columns left over; both; many blocks kept, few, all.
CASES = [((4, 16, 16), 0.64), ((3, 12, 16), 0.9), ((3, 8, 21), 0.5), ((4, 13, 11), 0.8)]
CASES += [((4, 13, 11), 0.0)]


def qkv(
    grid: Grid, size: int = 64, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens [B,S,2,D] in raster order, with a trend that makes blocks differ."""
    generator = torch.Generator().manual_seed(grid[1] * 100 + grid[2])
    tokens = grid[0] * grid[1] * grid[2]
    trend = torch.randn(batch, tokens // 40 + 1, 2, size, generator=generator)
    trend = trend.repeat_interleave(40, 1)[:, :tokens]
    return tuple(  # type: ignore[return-value]
        (trend + torch.randn(batch, tokens, 2, size, generator=generator)).to(dtype)
        for _ in range(3)
    )


def method(kind: str, name: str, sparsity: float, size: int | None = None) -> RainFusionAttention:
    """Ours, as selected for a chip; size: of heads, for FP8."""
    kernel = npu_sparse.RainKernelV2 if kind == "v2" else npu_sparse.RainKernelV3
    quantiser = None
    if size is not None:
        rotations = Rotations(size, sylvester)
        quantiser = Fp8Quantiser(rotations, npu_quant.NpuBlockQuantise(target(name)), "npu")
    return RainFusionAttention(kind, sparsity, 0, kernel=kernel(target(name)), quantiser=quantiser)


def call(grid: Grid) -> StepInfo:
    return StepInfo(0, 1, "cond", "low", grid, grid[0] * grid[1] * grid[2], layer=0)


def ours(way: RainFusionAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    order = window_order(grid)
    q, k, v = (x[:, order] for x in (q, k, v))
    return attend(way, q, k, v, call(grid))[:, order.argsort()]


def theirs(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, sparsity: float, kind: str, **more: Any
) -> Tensor:
    import mindiesd

    return mindiesd.sparse_attention(
        q, k, v, head_num=2, input_layout="BSND", sparse_type=f"rf_{kind}", sparsity=sparsity,
        latent_shape_q=list(grid), latent_shape_k=list(grid), **more,
    )  # fmt: skip


@pytest.mark.parametrize(("grid", "sparsity"), CASES)
@pytest.mark.parametrize(("kind", "name"), [("v2", "A2"), ("v3", "A3"), ("v3", "A5")])
def test_bits_of_mindiesd(
    kind: str, name: str, grid: Grid, sparsity: float, chip: Choose, calls: list[Any]
) -> None:
    chip(name)
    q, k, v = qkv(grid)
    more = {"inner_precise": 4} if name == "A5" else {}
    want = theirs(q, k, v, grid, sparsity, kind, **more)
    out = ours(method(kind, name, sparsity), q, k, v, grid)
    assert torch.equal(out, want)
    operator = {"v2": "mindiesd.rainfusionattention", "v3": "mindiesd.block_sparse_attention"}[kind]
    first, second = calls
    assert first.name == second.name == operator
    assert first.shapes[:3] == second.shapes[:3] and first.dtypes == second.dtypes


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float16), (128, torch.bfloat16)])
@pytest.mark.parametrize(("grid", "sparsity"), CASES)
def test_fp8_bits_of_mindiesd(
    grid: Grid, sparsity: float, size: int, dtype: torch.dtype, chip: Choose, calls: list[Any]
) -> None:
    chip("A5")
    q, k, v = qkv(grid, size, dtype=dtype)
    want = theirs(q, k, v, grid, sparsity, "v3", precision="fp8", inner_precise=4)
    theirs_called = len(calls)
    out = ours(method("v3", "A5", sparsity, size), q, k, v, grid)
    assert out.dtype == dtype and torch.equal(out, want.to(dtype))
    assert calls[-1].facts["block_shape"] == [128, 256] and len(calls) == 2 * theirs_called


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "name", "size", "bound"),
    [("v2", "A2", None, 3e-3), ("v3", "A5", None, 3e-3), ("v3", "A5", 64, 6e-2)],
)
def test_nothing_left_out_is_dense(
    kind: str, name: str, size: int | None, bound: float, chip: Choose
) -> None:
    """bound: root mean square of the error over that of the result."""
    chip(name)
    q, k, v = qkv((3, 8, 21))
    want = dense(q, k, v)
    error = ours(method(kind, name, 0.0, size), q, k, v, (3, 8, 21)).double() - want
    assert bound / 3 < error.square().mean().sqrt() / want.square().mean().sqrt() < bound


@pytest.mark.parametrize(
    ("kind", "name", "size"), [("v2", "A2", None), ("v3", "A3", None), ("v3", "A5", 64)]
)
def test_each_sample_and_each_block_by_itself(
    kind: str, name: str, size: int | None, chip: Choose
) -> None:
    """mindiesd's v2 takes the first sample's mask for all; ours has a mask for each."""
    chip(name)
    grid = (3, 13, 16)
    q, k, v = (x[:, window_order(grid)] for x in qkv(grid, batch=2))
    way = method(kind, name, 0.8, size)
    whole = attend(way, q, k, v, call(grid))
    for b in range(2):
        one = slice(b, b + 1)
        alone = attend(way, q[one], k[one], v[one], call(grid))
        assert torch.equal(whole[one], alone)
    by_blocks = way.prepare(Payload(q), Payload(k), Payload(v), call(grid))
    cuts = ((0, 256), (256, 384), (384, q.shape[1]))
    parts = [by_blocks(Payload(q[:, a:b]), a) for a, b in cuts]
    assert torch.equal(torch.cat(parts, 1), whole)
    head = (slice(None), slice(None), slice(1, 2))
    assert torch.equal(attend(way, q[head], k[head], v[head], call(grid)), whole[head])


@pytest.mark.parametrize(
    ("kernel", "name", "words"),
    [
        (npu_sparse.RainKernelV2, "A5", "A5 has no rf_v2 kernel"),
        (npu_sparse.RainKernelV2, "Duo", "Duo has no rf_v2 kernel"),
        (npu_sparse.RainKernelV3, "Duo", "Duo has no block-sparse attention"),
    ],
)
def test_what_a_chip_does_not_have_is_not_made(
    kernel: type, name: str, words: str, chip: Choose
) -> None:
    """Settings refuse it before."""
    chip(name)
    with pytest.raises(AssertionError, match=words):
        kernel(target(name))


def test_v2_takes_no_wide_blocks(chip: Choose) -> None:
    q = Payload(torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16))
    mask = torch.ones(1, 2, 2, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="blocks of 128 keys, not 256; use v3"):
        npu_sparse.RainKernelV2(target("A2"))(q, q, q, mask, 256)
