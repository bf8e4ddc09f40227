"""The int8 linear layer, against its definition with sums of 64-bit integers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wan.kernels.int8_linear import W8A8Linear, multiply_padded, quantize_per_token


def make_layer(
    rows: int = 24, columns: int = 40, smooth: bool = False, **options: Any
) -> W8A8Linear:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, 1, generator=generator) / 500
    bias = torch.randn(rows, generator=generator)
    factors = torch.rand(columns, generator=generator) + 0.5 if smooth else None
    return W8A8Linear(weight, scale, bias, factors, **{"dtype": torch.float32, **options})


def apply_with_numpy(linear: W8A8Linear, x: Tensor) -> np.ndarray:
    """The definition in float32, sums as 64-bit integers; smoothed in the dtype of x."""
    factors = 1 if linear.factors is None else linear.factors.to(x.dtype)
    smoothed = (x * factors).float().numpy()
    scale = np.abs(smoothed).max(-1, keepdims=True) / np.float32(127)
    payload = np.rint(smoothed / scale).astype(np.int64)
    sums = payload @ linear.weight.numpy().astype(np.int64).T
    return sums.astype(np.float32) * linear.weight_scale.numpy() * scale + linear.bias.numpy()


def test_bit_for_bit() -> None:
    for smooth in (False, True):
        linear = make_layer(smooth=smooth)
        x = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(1)) * 3
        out = linear(x)
        assert out.shape == (2, 7, 24) and out.dtype == torch.float32
        assert np.array_equal(out.numpy(), apply_with_numpy(linear, x)), smooth


def test_rounds_its_parameters_to_the_model_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        exact, linear = make_layer(), make_layer(dtype=dtype, smooth=True)
        assert torch.equal(linear.weight_scale, exact.weight_scale.to(dtype).float())
        assert torch.equal(linear.bias, exact.bias.to(dtype).float())
        x = torch.randn(9, 40, generator=torch.Generator().manual_seed(2)).to(dtype)
        expected = torch.from_numpy(apply_with_numpy(linear, x)).to(dtype)
        assert linear(x).dtype == dtype and torch.equal(linear(x), expected)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX-512"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1043, 40), (1043, 33), (2080, 64)])
def test_in_cpp_bit_for_bit(
    dtype: torch.dtype, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes, AMX, slices, zeros, halves between integers, and a layer without a bias."""
    monkeypatch.setattr("wan.kernels.int8_linear.MIN_CPP_NUMEL", 0)
    linear = make_layer(rows, columns, dtype=dtype, smooth=columns == 33)
    x = torch.randn(2055, columns, generator=torch.Generator().manual_seed(3)).mul(3).to(dtype)
    x[1] = torch.linspace(-127, 127, 2 * columns)[:columns].div(0.5).round().div(2)
    out = linear(x)
    assert torch.equal(out, torch.from_numpy(apply_with_numpy(linear, x)).to(dtype))
    if dtype == torch.bfloat16:
        expected = torch.nn.functional.gelu(out, approximate="tanh")
        assert torch.equal(linear.forward_gelu(x), expected)
    else:
        assert linear.forward_gelu(x) is None
    x[2, 5] = torch.nan
    assert linear(x)[2].isnan().all() and not linear(x)[[1, 3]].isnan().any()
    linear.bias = None
    zeros = linear(torch.zeros(3, columns))
    assert zeros.dtype == dtype and not zeros.any()


def test_sees_each_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a token are the same in any call and in any slice of one."""
    linear = make_layer()
    x = torch.randn(1, 33, 40, generator=torch.Generator().manual_seed(4))
    output = linear(x)
    for part in (slice(0, 1), slice(5, 29)):
        assert torch.equal(linear(x[:, part]), output[:, part])
    ten_rows = 24 * 10
    monkeypatch.setattr("wan.kernels.int8_linear.get_int8_slice_numel", lambda _: ten_rows)
    assert torch.equal(linear(x), output)


def test_of_zeros_gives_the_bias() -> None:
    linear = make_layer()
    out = linear(torch.zeros(2, 40))
    assert torch.equal(out, linear.bias.expand(2, -1))
    assert linear(torch.zeros(1, 0, 40)).shape == (1, 0, 24)
    payload, scale = quantize_per_token(torch.zeros(2, 40))
    assert not payload.any() and torch.equal(scale, torch.ones(2, 1))  # no division by zero


def test_nan_stays_in_all_of_a_token() -> None:
    x = torch.ones(3, 40)
    x[1, 7] = torch.nan
    assert torch.equal(make_layer()(x).isnan().any(1), torch.tensor([False, True, False]))


def test_product_within_the_limits_of_cuda() -> None:
    """17 rows or more and other sizes that divide by 8; zeros change no sum."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        assert len(a) > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
        return torch._int_mm(a, b)

    for rows, sizes in product((1, 17, 40), ((24, 40), (30, 45))):
        weight, x = make_layer(*sizes).weight, make_layer(rows, sizes[1]).weight
        out = multiply_padded(multiply, x, weight)
        exact = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
        assert np.array_equal(out, exact), (rows, sizes)
