"""FP8 attention: values, scales and rotations against naive ones, and bits that no cut changes.

Oracles: E4M3 from its definition, blocks quantised one by one in numpy, attention in float64.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.kernels.fp8 import (
    Fp8Attention,
    Fp8Quantizer,
    Rotations,
    attend_dequantized,
    make_hadamard_rotation,
    make_sylvester_rotation,
    quantize_blocks,
    rotate_heads,
)
from wan.kernels.interfaces import AttentionInput
from wan.kernels.reference import attend_in_tiles

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = [torch.float32, torch.bfloat16]
CALM = settings(deadline=None, max_examples=10)  # the machine may be busy
ROWS, HEADS, TILES = 525, 3, 5
# Rows of the random rotation of mindiesd 3.1.0 that are not flipped, first row first.
VENDOR_SIGNS = {64: 0xD1F200B251DABD64, 128: 0xD1F200B251DABD64E3FAA01D35A307AA}


def make_random_tensors(
    shape: tuple[int, ...], count: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def make_method(head: int, dtype: torch.dtype, before_exchange: bool = False) -> Fp8Attention:
    quantiser = Fp8Quantizer(Rotations(head))
    return Fp8Attention(quantiser, dtype, quantize_before_exchange=before_exchange)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """From the definition, in float64; [B,S,N,D]. mask: bool [B,N,Sq,Sk]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2)


def run_attention(fp8: Fp8Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The method on whole tensors."""
    return fp8.prepare_kv(AttentionInput(q), AttentionInput(k), AttentionInput(v), None)(
        AttentionInput(q), 0
    )


def have_equal_bits(a: AttentionInput, b: AttentionInput) -> bool:
    bits = [[part.view(torch.uint8) for part in x.tensors] for x in (a, b)]
    return a.rows_per_scale == b.rows_per_scale and all(
        torch.equal(*pair) for pair in zip(*bits, strict=True)
    )


def e4m3_values() -> np.ndarray:
    """The values of codes 0 to 126 (127 is nan): 4 bits of exponent, bias 7, 3 of mantissa."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest E4M3 value; halfway, the one of even code; above 448, 448."""
    values, size = e4m3_values(), np.abs(x.astype(np.float64))
    index = np.searchsorted(values, size).clip(1, 126)
    low, high = values[index - 1], values[index]
    up = (size - low > high - size) | ((size - low == high - size) & (index % 2 == 0))
    return np.copysign(np.where(up, high, low), x)


def quantise_naively(x_BSND: Tensor, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales), block by block."""
    x = x_BSND.float().numpy()
    batch, tokens, heads, _ = x.shape
    payload, scale = np.zeros_like(x), np.zeros((batch, -(-tokens // rows), heads, 1), np.float32)
    for b, n, k in np.ndindex(batch, heads, scale.shape[1]):
        block = slice(k * rows, (k + 1) * rows)
        largest = np.abs(x[b, block, n]).max() / np.float32(448)
        scale[b, k, n, 0] = largest if largest > 0 else 1
        payload[b, block, n] = round_to_e4m3(x[b, block, n] / scale[b, k, n, 0])
    return payload, scale


def test_blocks_are_quantised_as_the_definition_says() -> None:
    wrong = []
    for (tokens, rows), dtype in product([(1, 128), (127, 128), (513, 256), (600, 128)], DTYPES):
        x = make_random_tensors((2, tokens, 3, 64), 1, dtype, seed=tokens)[0]
        x[1, :rows, 2] = 0  # a block of zeros
        x[0, :, 1] *= 300
        quantised = quantize_blocks(x, rows)
        payload, scale = quantise_naively(x, rows)
        assert quantised.values.dtype == torch.float8_e4m3fn and quantised.rows_per_scale == rows
        assert quantised.values.shape == x.shape
        same_values = np.array_equal(quantised.values.float().numpy(), payload)
        if not same_values or not np.array_equal(quantised.scale.numpy(), scale):
            wrong.append((tokens, rows, dtype))
    assert not wrong


def test_rounding_is_half_to_even_and_the_largest_value_is_448() -> None:
    values = np.concatenate([e4m3_values(), np.array([448.0])])
    x = np.concatenate([(values[:-1] + values[1:]) / 2, values]).astype(np.float32)
    quantised = quantize_blocks(torch.from_numpy(x).view(1, 1, 1, -1), 128)  # its scale is 1
    assert quantised.scale.item() == 1
    assert np.array_equal(quantised.values.float().numpy().ravel(), round_to_e4m3(x))
    assert quantised.values.float().max() == 448


def test_values_near_the_smallest_ones_stay_finite() -> None:
    for units in (1, 100, 300, 600, 700, 5000):
        x = torch.full((1, 3, 1, 2), units * 2.0**-149)
        quantised = quantize_blocks(x, 128)
        assert np.array_equal(quantised.values.float().numpy(), quantise_naively(x, 128)[0]), units
        assert not quantised.dequantize(torch.float32).isnan().any(), units


def test_a_payload_is_cut_and_dequantised_with_any_strides() -> None:
    x = make_random_tensors((2, 3, 700, 16), 1, torch.float32)[0].transpose(1, 2)
    for rows in (128, 256):
        quantised = quantize_blocks(x, rows)
        strided = quantised.map(lambda part: part.transpose(1, 2).contiguous().transpose(1, 2))
        payload, scale = quantise_naively(x, rows)
        expected = payload * scale.repeat(rows, axis=1)[:, :700]
        for first, last in [(0, 700), (256, 700), (256, 512), (512, 600)]:
            part = strided.slice_rows(first, last)
            values = part.dequantize(torch.float32).numpy()
            assert np.array_equal(values, expected[:, first:last]), (rows, first, last)
            assert part.scale.shape == (2, -(-last // rows) - first // rows, 3, 1)
            assert part.dequantize(torch.bfloat16).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=f"multiple of {rows} rows, not at 200"):
            quantised.slice_rows(200, 700)


def test_sylvester() -> None:
    for size in (1, 2, 64, 128):
        signs = [[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
        expected = torch.tensor(signs, dtype=torch.float32) / torch.tensor(float(size)).sqrt()
        assert torch.equal(make_sylvester_rotation(size), expected), size
        assert torch.equal(make_sylvester_rotation(size, torch.bfloat16), expected.bfloat16()), size


def test_hadamard_is_the_vendors() -> None:
    for size, bits in VENDOR_SIGNS.items():
        signs = torch.tensor([2.0 * int(bit) - 1 for bit in f"{bits:0{size}b}"])
        expected = signs[:, None] * make_sylvester_rotation(size)
        assert torch.equal(make_hadamard_rotation(size), expected), size
        assert torch.equal(make_hadamard_rotation(size, torch.bfloat16), expected.bfloat16()), size
        matrix = make_hadamard_rotation(size).double()
        assert (matrix @ matrix.mT - torch.eye(size)).abs().max() < 1e-6


def test_a_rotation_needs_a_power_of_two() -> None:
    for size, make in product(
        (-4, 0, 3, 96, 129), (make_sylvester_rotation, make_hadamard_rotation, Rotations)
    ):
        with pytest.raises(ValueError, match=rf"power of two as head size, not {size}$"):
            make(size)


CUTS = st.tuples(st.integers(0, TILES - 1), st.integers(1, TILES)).map(
    lambda c: (c[0] * 128, min((c[0] + c[1]) * 128, ROWS))
)
HEAD_RANGES = st.tuples(st.integers(0, HEADS - 1), st.integers(1, HEADS)).map(
    lambda c: (c[0], min(sum(c), HEADS))
)


@pytest.mark.parametrize(
    ("head", "dtype", "masked"), [(16, torch.float32, True), (128, torch.bfloat16, False)]
)
def test_tiles(head: int, dtype: torch.dtype, masked: bool) -> None:
    """Each cut, choice of heads and number of threads gives the same, correct bits."""
    q, k, v = make_random_tensors((1, 700, HEADS, head), 3, dtype, seed=head)
    q, blocks, mask = q[:, :ROWS], None, None
    if masked:
        blocks = torch.rand(1, HEADS, TILES, 3, generator=torch.Generator().manual_seed(1)) < 0.5
        blocks[..., 2] |= ~blocks.any(-1)
        mask = torch.kron(blocks, torch.ones(128, 256, dtype=torch.bool))[..., :ROWS, :700]
    output = attend_in_tiles(q, k, v, blocks, 256)
    exact = attention(q, k, v, mask)
    once_rounded = 2e-6 + torch.finfo(dtype).eps / 2 * exact.abs()
    assert output.dtype == dtype and ((output - exact).abs() <= once_rounded).all()
    shorter = attend_in_tiles(q[:, :513], k, v, blocks, 256)
    assert torch.equal(shorter, output[:, :513]), "also a last tile of one row"
    torch.set_num_threads(2)
    assert torch.equal(attend_in_tiles(q, k, v, blocks, 256), output)

    @CALM
    @given(CUTS, HEAD_RANGES)
    def check(cut: tuple[int, int], heads: tuple[int, int]) -> None:
        (a, b), (first, last) = cut, heads
        of_head = [x[:, :, first:last] for x in (q, k, v)]
        head_blocks = None if blocks is None else blocks[:, first:last, a // 128 : -(-b // 128)]
        part = attend_in_tiles(of_head[0][:, a:b], *of_head[1:], head_blocks, 256)
        assert torch.equal(part, output[:, a:b, first:last])

    check()


def test_a_mask_must_fit() -> None:
    q, k, v = make_random_tensors((1, 300, 1, 16), 3, torch.float32)
    for mask in (torch.ones(1, 1, 3, 2).bool(), torch.ones(1, 1, 3, 3)):
        with pytest.raises(ValueError, match=r"bool and end with \[3, 3\]"):
            attend_in_tiles(q, k, v, mask)


HEADS_AND_DTYPES = pytest.mark.parametrize(
    ("head", "dtype"), [(64, torch.float32), (128, torch.bfloat16)]
)


@HEADS_AND_DTYPES
def test_the_error_of_fp8_attention(head: int, dtype: torch.dtype) -> None:
    """Compares with exact attention, and with attention on the dequantised values."""
    q, k, v = make_random_tensors((1, 1000, 1, head), 3, dtype, seed=head)
    output = run_attention(make_method(head, dtype), q, k, v).double()
    exact = attention(q, k, v)
    error = output - exact
    relative = (error.square().mean() / exact.square().mean()).sqrt()
    assert error.abs().max() < 0.03 and relative < 0.05

    def dequantise_naively(x: Tensor, rows: int) -> Tensor:
        payload, scale = quantise_naively(x, rows)
        return torch.from_numpy(payload * scale.repeat(rows, axis=1)[:, : x.shape[1]])

    rotation = make_hadamard_rotation(head, dtype)
    rotated = dequantise_naively(q @ rotation, 128), dequantise_naively(k @ rotation, 256)
    expected = attention(*rotated, dequantise_naively(v, 256))
    # a product of another shape may round a rotated number, and with it a payload, differently
    assert (output - expected).abs().max() < (2e-4 if dtype == torch.float32 else 2e-3)


@HEADS_AND_DTYPES
def test_fp8_attention_does_not_depend_on_the_cut(head: int, dtype: torch.dtype) -> None:
    q, k, v = make_random_tensors((1, ROWS, HEADS, head), 3, dtype, seed=head)
    fp8 = make_method(head, dtype)
    output = run_attention(fp8, q, k, v)
    assert output.dtype == dtype and fp8.q_multiple == 128

    @CALM
    @given(HEAD_RANGES, st.lists(st.integers(1, TILES - 1), unique=True, max_size=3))
    def check(heads: tuple[int, int], inner: list[int]) -> None:
        a, b = heads
        head_parts = [AttentionInput(x[:, :, a:b]) for x in (q, k, v)]
        attend = fp8.prepare_kv(*head_parts, None)
        borders = [0, *(128 * i for i in sorted(inner)), ROWS]
        parts = [
            attend(head_parts[0].slice_rows(first, last), first)
            for first, last in zip(borders, borders[1:], strict=False)
        ]
        assert torch.equal(torch.cat(parts, dim=1), output[:, :, a:b])

    check()


@pytest.mark.parametrize(
    ("shard", "ranks", "tokens", "dtype"),
    [(256, 3, 525, torch.bfloat16), (512, 2, 525, torch.float32), (256, 3, 256, torch.float32)],
)
def test_quantised_before_the_exchange_is_quantised_later(
    shard: int, ranks: int, tokens: int, dtype: torch.dtype
) -> None:
    """The content of padding does not matter, also on ranks that hold only padding."""
    qkv = make_random_tensors((1, shard * ranks, 3, 64), 3, dtype)
    for x in qkv:
        x[:, tokens:] = 1e4
    after_exchange = make_method(64, dtype)
    before_exchange = make_method(64, dtype, before_exchange=True)
    packed = []
    for rank in range(ranks):
        valid = min(max(tokens - rank * shard, 0), shard)
        local = [x[:, rank * shard : (rank + 1) * shard] for x in qkv]
        packed.append(before_exchange.quantize(*local, valid, None))
        for x, passed in zip(local, after_exchange.quantize(*local, valid, None), strict=True):
            assert passed.values is x and passed.scale is None
    joined = [
        AttentionInput(
            torch.cat([x.values.view(torch.uint8) for x in parts], 1).view(torch.float8_e4m3fn),
            torch.cat([x.scale for x in parts], 1),
            parts[0].rows_per_scale,
        ).slice_rows(0, tokens)
        for parts in zip(*packed, strict=True)
    ]
    q, k, v = (x[:, :tokens] for x in qkv)
    quantiser = Fp8Quantizer(Rotations(64))
    later = quantiser.quantize_q(q, None), quantiser.quantize_k(k, None), quantiser.quantize_v(v)
    assert all(map(have_equal_bits, joined, later))
    expected = run_attention(after_exchange, q, k, v)
    actual = before_exchange.prepare_kv(*joined, None)(joined[0], 0)
    assert actual.dtype == dtype and torch.equal(actual, expected)


def test_shards_that_end_within_a_block_are_refused() -> None:
    q, k, v = make_random_tensors((1, 384, 1, 64), 3, torch.float32)
    with pytest.raises(ValueError, match="multiple of 256 tokens on each rank, but here are 384"):
        make_method(64, torch.float32, before_exchange=True).quantize(q, k, v, 384, None)


def test_keys_and_values_are_quantised_once() -> None:
    calls = []

    def recording(x_BSND: Tensor, rows: int) -> AttentionInput:
        calls.append((x_BSND.shape[1], rows))
        return quantize_blocks(x_BSND, rows)

    q, k, v = map(AttentionInput, make_random_tensors((1, ROWS, 1, 64), 3, torch.float32))
    fp8 = Fp8Attention(Fp8Quantizer(Rotations(64), recording), torch.float32)
    assert fp8.applies_to(None)
    attend = fp8.prepare_kv(q, k, v, None)
    attend(q.slice_rows(0, 384), 0)
    attend(q.slice_rows(384, ROWS), 384)
    assert calls == [(ROWS, 256), (ROWS, 256), (384, 128), (141, 128)]


def test_a_layer_may_bring_its_own_rotations() -> None:
    generator = torch.Generator().manual_seed(3)
    matrices = [torch.linalg.qr(torch.randn(64, 64, generator=generator))[0] for _ in range(2)]
    rotations = Rotations(64, exported={("high", 7): (matrices[0], matrices[1])})
    x = make_random_tensors((1, 256, 2, 64), 1, torch.bfloat16)[0]

    def call(expert: str, layer: int | None) -> StepInfo:
        return StepInfo(0, 1, "cond", expert, (1, 16, 16), 256, layer=layer)

    step = call("high", 7)
    exported = rotations.get_pair(x, step)
    for rotation, matrix in zip(exported, matrices, strict=True):
        assert torch.equal(rotation, matrix.bfloat16())
    default = make_hadamard_rotation(64, x.dtype)
    for other in (None, call("high", None), call("low", 7), call("high", 6)):
        assert all(torch.equal(rotation, default) for rotation in rotations.get_pair(x, other))
    assert rotations.get_pair(x, step) is exported, "moved once"
    quantiser = Fp8Quantizer(rotations)
    q, k = (rotate_heads(x, rotation) for rotation in exported)
    assert have_equal_bits(quantiser.quantize_q(x, step), quantize_blocks(q, 128))
    assert have_equal_bits(quantiser.quantize_k(x, step), quantize_blocks(k, 256))
    assert have_equal_bits(quantiser.quantize_v(x), quantize_blocks(x, 256))


def test_attention_on_other_devices() -> None:
    q, k, v = (
        quantize_blocks(x, 256) for x in make_random_tensors((1, 300, 2, 64), 3, torch.float32)
    )
    exact = attention(*(x.dequantize(torch.float32) for x in (q, k, v)))
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        assert (attend_dequantized(q, k, v, dtype) - exact).abs().max() < limit, dtype


def test_no_value_is_read_on_the_host() -> None:
    """Tensors of the meta device have none, and go the way of GPUs."""
    x = torch.empty(1, 512, 2, 64, dtype=torch.bfloat16, device="meta")
    for before_exchange in (False, True):
        fp8 = make_method(64, torch.bfloat16, before_exchange)
        q, k, v = fp8.quantize(x, x, x, 400, None)
        output = fp8.prepare_kv(q, k, v, None)(q, 0)
        assert output.shape == x.shape and output.dtype == x.dtype and output.device == x.device
