"""RainFusion: order, masks, refresh and results, against loops that spell out the rules."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.refusals import check_refusals, get_refusal
from wan.device import Device
from wan.kernels.flex import FlexBlocks, compile_per_shape, make_flex_mask
from wan.kernels.forward_context import StepInfo
from wan.kernels.fp8 import Fp8Quantizer, Rotations, make_sylvester_rotation
from wan.kernels.interfaces import AttendRows, AttentionInput, Target
from wan.kernels.rainfusion import MaskCache, RainFusionAttention
from wan.kernels.rainfusion_masks import (
    make_block_mask,
    make_rainfusion_mask,
    make_select_table,
    make_window_order,
)
from wan.settings.devices import get_capabilities

CPU = Target(Device(torch.device("cpu"), get_capabilities("cpu")), 64, torch.float32)
GRIDS = [(5, 8, 16), (3, 10, 20), (2, 13, 24), (1, 20, 20), (9, 5, 12), (4, 8, 7)]


def qkv(grid: tuple[int, int, int], heads: int = 3, head: int = 64, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(math.prod(grid))
    shape = (batch, math.prod(grid), heads, head)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def make_step(grid: tuple[int, int, int], **changes: object) -> StepInfo:
    defaults = {"index": 0, "count": 99, "expert": "high", "branch": "cond", "layer": 0}
    return StepInfo(**{**defaults, "grid": grid, "valid_len": math.prod(grid), **changes})


def run_attention(
    method: RainFusionAttention, q: Tensor, k: Tensor, v: Tensor, step: StepInfo
) -> Tensor:
    """The method on whole tensors."""
    return prepare_rows(method, q, k, v, step)(AttentionInput(q), 0)


def prepare_rows(
    method: RainFusionAttention, q: Tensor, k: Tensor, v: Tensor, step: StepInfo
) -> AttendRows:
    return method.prepare_kv(AttentionInput(q), AttentionInput(k), AttentionInput(v), step)


def naive_order(grid: tuple[int, int, int]) -> list[int]:
    frames, height, width = grid
    tiled_rows, tiled_columns = height // 8 * 8, width // 8 * 8
    order = []
    for f in range(frames):
        positions = list(product(range(height), range(width)))
        if f or (tiled_rows, tiled_columns) == (height, width):

            def key(position: tuple[int, int]) -> tuple[int, ...]:
                y, x = position
                if y >= tiled_rows:
                    return (1, y, x)
                return (2, y, x) if x >= tiled_columns else (0, y // 8, x // 8, y % 8, x % 8)

            positions.sort(key=key)
        order += [f * height * width + y * width + x for y, x in positions]
    return order


def naive_mask(q: Tensor, k: Tensor, grid: tuple, sparsity: float, k_rows: int) -> Tensor:
    """The rule block by block, in the dtype of q and k, which is float64 below."""
    batch, rows, heads, head = q.shape
    nq, nk = math.ceil(rows / 128), math.ceil(rows / k_rows)
    frame = grid[1] * grid[2]
    mask = torch.zeros(batch, heads, nq, nk, dtype=torch.bool)
    for b, n, i in product(range(batch), range(heads), range(nq)):
        mean = q[b, i * 128 : (i + 1) * 128, n].mean(0)
        keys = [k[b, j * k_rows : (j + 1) * k_rows, n].mean(0) for j in range(nk)]
        scores = torch.stack([mean @ key for key in keys]) / head**0.5
        threshold = scores.sort(descending=True).values[math.ceil(nk * (1 - sparsity)) - 1]
        for j in range(nk):
            sink = i * 128 < frame or j * k_rows < frame
            mask[b, n, i, j] = bool(scores[j] >= threshold) or sink
    return mask


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, k_rows: int) -> Tensor:
    """Attention by a token mask, in float64."""
    i, j = torch.arange(q.shape[1]) // 128, torch.arange(k.shape[1]) // k_rows
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    token_mask = mask[:, :, i][..., j]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=token_mask).transpose(1, 2)


def fp8(head: int = 64) -> Fp8Quantizer:
    return Fp8Quantizer(Rotations(head, make_sylvester_rotation))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 26), st.integers(1, 26))
def test_order(frames: int, height: int, width: int) -> None:
    order = make_window_order((frames, height, width))
    assert order.dtype == torch.int64
    assert order.sort().values.tolist() == list(range(frames * height * width))
    assert order.tolist() == naive_order((frames, height, width))


def test_mask() -> None:
    wrong = []
    for grid in GRIDS:
        q, k, _ = (x.double() for x in qkv(grid, heads=2, head=16, batch=2))
        for k_rows, sparsity in ((128, 0.0), (128, 0.64), (256, 0.0), (256, 0.3), (256, 0.95)):
            mask = make_rainfusion_mask(q, k, grid, sparsity, 0, k_rows)
            right = torch.equal(mask, naive_mask(q, k, grid, sparsity, k_rows))
            if not right or (not sparsity and not mask.all()):
                wrong.append((grid, k_rows, sparsity))
    assert not wrong


# 10 * (1 - 0.7) is 3.0000000000000004 in floats, 10 * (1 - 0.9) is 0.9999999999999998.
EXPECTED_COUNTS = {
    (10, 0.7): 4,
    (10, 0.9): 1,
    (10, 0.8): 2,
    (20, 0.7): 7,
    (591, 0.64): 213,
    (5, 0.999): 1,
}


def test_kept_blocks() -> None:
    """The blocks with the best scores are selected, in the expected number."""
    counts = {}
    for blocks, sparsity in EXPECTED_COUNTS:
        k_pool = torch.randperm(blocks).double().view(1, blocks, 1, 1) / blocks
        mask = make_block_mask(torch.ones(1, 1, 1, 1).double(), k_pool, sparsity, 1.0)[0, 0, 0]
        count = counts[blocks, sparsity] = int(mask.sum())
        assert mask.tolist() == (k_pool.flatten() >= (blocks - count) / blocks).tolist()
    assert counts == EXPECTED_COUNTS


def test_ties_are_kept() -> None:
    """This includes ties from rounding: 1 and 1 + 2^-10 are equal in bfloat16."""
    q_pool = torch.ones(1, 1, 1, 1)
    k_pool = torch.tensor([1 + 2**-10, 0.0, 1.0, 1.0, -1.0, -2.0]).view(1, 6, 1, 1)
    mask = make_block_mask(q_pool, k_pool, 5 / 6, 1.0).flatten()
    assert mask.tolist() == [True, False, False, False, False, False]
    mask = make_block_mask(q_pool, k_pool, 4 / 6, 1.0).flatten()
    assert mask.tolist() == [True, False, True, True, False, False]
    mask = make_block_mask(q_pool.bfloat16(), k_pool.bfloat16(), 5 / 6, 1.0).flatten()
    assert mask.tolist() == [True, False, True, True, False, False]


def test_scores_are_rounded_to_the_inputs_dtype() -> None:
    """Products, scaled products and shares, each to bfloat16; the products are exact before."""
    generator = torch.Generator().manual_seed(5)
    q_pool, k_pool = (
        torch.randint(-15, 16, (1, rows, 2, 48), generator=generator) / 8 for rows in (40, 60)
    )
    scale = 48**-0.5
    mask = make_block_mask(q_pool.bfloat16(), k_pool.bfloat16(), 0.64, scale)

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    products = q_pool.double().transpose(1, 2) @ k_pool.double().permute(0, 2, 3, 1)
    exponentials = rounded(rounded(products) * scale).exp()
    shares = rounded(exponentials / exponentials.sum(-1, keepdim=True))
    expected = shares >= shares.sort(descending=True).values[..., 21:22]
    assert torch.equal(mask, expected)
    assert not torch.equal(mask, make_block_mask(q_pool, k_pool, 0.64, scale))


def test_select_table() -> None:
    for nq, nk in ((1, 1), (3, 7), (7, 3)):
        mask = torch.rand(2, nq, nk, generator=torch.Generator().manual_seed(nk)) < 0.5
        mask[0, 0] = False
        mask[1, 0] = True
        blocks, counts = make_select_table(mask)
        assert blocks.dtype == counts.dtype == torch.int64
        for n, i in product(range(2), range(nq)):
            columns = [j for j in range(nk) if mask[n, i, j]]
            assert blocks[i, n].tolist() == columns + [-1] * (nk - len(columns))
            assert counts[i, n] == len(columns)


# start_step 3, refresh 4; (step, other changes, whether a mask is made), in turn.
SCHEDULES: dict[str, list[tuple[int, dict[str, object], bool]]] = {
    "plain": [(s, {}, s in (3, 7, 11)) for s in range(3, 14)],
    "another expert": [(3, {}, True), (5, {"expert": "low"}, True), (6, {"expert": "low"}, False)],
    "back again": [(4, {}, True), (5, {"expert": "low"}, True), (6, {}, True)],
    "skipped refresh": [(5, {}, True), (8, {}, True), (9, {}, False)],
    "the sampling ends": [(4, {}, True), (5, {"count": 6}, False), (6, {}, True)],
    "same step of the next video": [(3, {}, True), (3, {}, True)],
    "next video, after one that failed": [(4, {}, True), (4, {}, True), (5, {}, False)],
    "next video": [(5, {}, True), (6, {}, False), (4, {}, True), (5, {}, False)],
}


def test_refresh() -> None:
    wrong = []
    for name, turns in SCHEDULES.items():
        cache = MaskCache(lambda steps: 3, refresh=4)
        for step, other, is_new in turns:
            step_info = make_step((1, 1, 1), index=step, **other)
            mask = cache.take(step_info, (1, 1, 2, 2))
            if (mask is None) != is_new:
                wrong.append((name, step, other))
            if mask is None:
                cache.store(step_info, torch.full((1, 1, 2, 2), step % 2 == 1))
        assert cache.take(step_info, (1, 1, 2, 3)) is None, "a mask of another shape"
    assert not wrong


def test_each_call_of_a_step_has_a_mask_of_its_own() -> None:
    """Samples, branches, layers and parts of the heads take turns, step by step."""
    cache, masks = MaskCache(lambda steps: 3, refresh=4), dict[object, torch.Tensor]()
    turns = [*product((0, 1), ("cond", "uncond"), (0, 1), (0, 2))]
    for index, turn in product((3, 4, 5), turns):
        names = ("sample", "branch", "layer", "first_head")
        step_info = make_step((1, 1, 1), index=index, **dict(zip(names, turn, strict=True)))
        mask = cache.take(step_info, (1, 1, 2, 2))
        assert mask is masks.get(turn), (index, turn)
        if mask is None:
            masks[turn] = torch.ones(1, 1, 2, 2, dtype=torch.bool)
            cache.store(step_info, masks[turn])


def test_masks_in_memory() -> None:
    """Only masks of one expert are stored, and none after their last use."""
    for refresh, alive in ((2, [False] * 3 + [True] * 3), (1, [False] * 6)):
        cache, references = MaskCache(lambda steps: 0, refresh), []
        for expert, layer in product(("high", "low"), range(3)):
            step_info = make_step((1, 1, 1), expert=expert, layer=layer)
            assert cache.take(step_info, (1, 2, 5, 7)) is None
            mask = torch.ones(1, 2, 5, 7, dtype=torch.bool)
            cache.store(step_info, mask)
            references.append(weakref.ref(mask))
            del mask
        assert [ref() is not None for ref in references] == alive
        for layer in range(3):
            cache.take(make_step((1, 1, 1), index=1, expert="low", layer=layer), (1, 2, 5, 7))
        assert not any(ref() is not None for ref in references)


def test_attention() -> None:
    """From raster order and back, against a token mask laid out in raster order."""
    errors = {}
    for grid, sparsity in product(GRIDS, (0.0, 0.6)):
        q, k, v = qkv(grid, heads=2, head=16)
        order = make_window_order(grid)
        inverse = order.argsort()
        ordered = [x[:, order] for x in (q, k, v)]
        method = RainFusionAttention("v2", sparsity, 0)
        output = run_attention(method, *ordered, make_step(grid))[:, inverse]
        mask = naive_mask(ordered[0].double(), ordered[1].double(), grid, sparsity, 128)
        token_mask = mask[:, :, inverse // 128][..., inverse // 128]
        q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
        expected = F.scaled_dot_product_attention(q, k, v, token_mask).transpose(1, 2)
        errors[grid, sparsity] = (output - expected).abs().max().item()
    assert not {case: error for case, error in errors.items() if not error <= 2e-6}


def test_fp8() -> None:
    """Compares with quantised values to rounding, and with exact ones within FP8's error."""
    for grid in ((3, 10, 20), (2, 16, 16), (5, 13, 14)):
        q, k, v = qkv(grid)
        mask = naive_mask(q.double(), k.double(), grid, 0.6, 256)
        method = RainFusionAttention("v3", 0.6, 0, quantizer=fp8())
        output = run_attention(method, q, k, v, make_step(grid))
        quantised = (fp8().quantize_q(q, None), fp8().quantize_k(k, None), fp8().quantize_v(v))
        exact = attend_masked(*(x.dequantize(torch.float64) for x in quantised), mask, 256)
        assert (output - exact).abs().max() <= 2e-6, grid
        error = output - attend_masked(q, k, v, mask, 256)
        assert 1e-4 < error.square().mean().sqrt() < 0.06 * output.square().mean().sqrt(), grid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantised", [False, True])
def test_every_cut_gives_the_same_bits(quantised: bool, dtype: torch.dtype) -> None:
    """Of queries, as blocks and ring ranks have them, and of heads, as chunks have them.

    Key blocks have 128 rows, and 256 with FP8.
    """
    grid = (3, 13, 14)
    q, k, v = (x.to(dtype) for x in qkv(grid, heads=5))
    version, quantiser = ("v3", fp8()) if quantised else ("v2", None)
    method = RainFusionAttention(version, 0.6, 0, quantizer=quantiser)
    attend = prepare_rows(method, q, k, v, make_step(grid))
    output = attend(AttentionInput(q), 0)
    assert output.dtype == dtype and output.shape == q.shape
    blocks = [attend(AttentionInput(q[:, a:b]), a) for a, b in ((0, 128), (128, 384), (384, 546))]
    assert torch.equal(torch.cat(blocks, 1), output)
    for a, b in ((0, 1), (1, 3), (2, 5)):
        heads = [x[:, :, a:b] for x in (q, k, v)]
        assert torch.equal(run_attention(method, *heads, make_step(grid)), output[:, :, a:b])
    for a, b in ((0, 256), (256, 546)):
        rank = prepare_rows(method, q[:, a:b], k, v, make_step(grid, first_row=a))
        assert torch.equal(rank(AttentionInput(q[:, a + 128 : b]), 128), output[:, a + 128 : b])


def test_mask_is_used_again() -> None:
    grid = (3, 10, 20)
    (q, k, v), (_, other, _) = qkv(grid), qkv((3, 20, 10), batch=2)
    method = RainFusionAttention("v2", 0.6, 4, refresh=3)
    assert [method.applies_to(make_step(grid, index=s)) for s in (3, 4, 9)] == [False, True, True]
    run_attention(method, q, k, v, make_step(grid, index=4))
    later = run_attention(method, q, other[1:], v, make_step(grid, index=5))
    mask = naive_mask(q.double(), k.double(), grid, 0.6, 128)
    assert not torch.equal(mask, naive_mask(q.double(), other[1:].double(), grid, 0.6, 128))
    assert (later - attend_masked(q, other[1:], v, mask, 128)).abs().max() <= 2e-6


def test_refusals() -> None:
    x, calls = AttentionInput(torch.ones(1, 600, 1, 8)), dict[str, Callable[[], object]]()
    for rows, keys, first in ((600, 599, 0), (100, 600, 64), (128, 600, 512), (0, 600, 512)):
        q, k = torch.ones(1, rows, 1, 8), torch.ones(1, keys, 1, 8)
        make_mask = partial(make_rainfusion_mask, q, k, (3, 10, 20), 0.5, first, 128)
        calls[f"{rows} queries of {keys} from {first}"] = make_mask
    method = RainFusionAttention("v2", 0.5, 0)
    for name, step in (("step", None), ("layer", make_step((3, 10, 20), layer=None))):
        calls[f"no {name}"] = partial(method.applies_to, step)
        calls[f"no {name}, prepared"] = partial(method.prepare_kv, x, x, x, step)
    messages = {name: f"{get_refusal(call, kind=ValueError)}." for name, call in calls.items()}
    check_refusals("RainFusion", messages)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex() -> None:
    """The compiled kernel takes heads of 16 channels or more; on an H100, 8 were refused."""

    def compiled(q: Tensor, *tensors: Tensor, **options: object) -> Tensor:
        assert q.shape[-1] >= 16
        return flex_attention(q, *tensors, **options)

    for queries, keys, k_rows, head in (
        (300, 200, 128, 8),
        (130, 256, 256, 16),
        (130, 384, 256, 16),  # half of the last key block
        (130, 40, 128, 8),
    ):
        generator = torch.Generator().manual_seed(keys)
        q, k, v = (torch.randn(1, n, 2, head, generator=generator) for n in (queries, keys, keys))
        shape = (1, 2, math.ceil(queries / 128), math.ceil(keys / k_rows))
        mask = torch.rand(shape, generator=generator) < 0.5
        mask[..., -1] |= ~mask.any(-1)
        blocks = make_flex_mask(mask, queries, keys, k_rows)
        assert torch.equal(blocks.to_dense().bool(), mask)
        first, padding = torch.tensor(0), torch.arange(keys, shape[-1] * k_rows)
        assert not blocks.mask_mod(first, first, first, padding).any()
        full_blocks = mask[..., : keys // k_rows].sum(-1, dtype=torch.int32)
        assert torch.equal(blocks.full_kv_num_blocks, full_blocks)
        output = FlexBlocks(CPU, compiled)(*map(AttentionInput, (q, k, v)), mask, k_rows)
        assert (output - attend_masked(q, k, v, mask, k_rows)).abs().max() <= 2e-6, (queries, keys)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_as_the_kernel_of_fp8() -> None:
    grid = (2, 10, 13)
    q, k, v = qkv(grid, heads=1)
    last, outputs = AttentionInput(q[:, 256:]), []
    for options in ({"kernel": FlexBlocks(CPU)}, {}):
        method = RainFusionAttention("v3", 0.6, 0, quantizer=fp8(), **options)
        outputs.append(prepare_rows(method, q, k, v, make_step(grid))(last, 256))
    assert (outputs[0] - outputs[1]).abs().max() <= 2e-6


def test_no_shape_falls_back_to_the_eager_kernel() -> None:
    """PyTorch's default limit is eight."""
    compiled: list[bool] = []

    def attend(x: Tensor) -> Tensor:
        compiled.append(torch.compiler.is_compiling())
        return x + 1

    call = compile_per_shape(attend, backend="eager", dynamic=False)
    for length in range(1, 11):
        assert torch.equal(call(torch.zeros(length)), torch.ones(length))
    assert compiled == [True] * 10
