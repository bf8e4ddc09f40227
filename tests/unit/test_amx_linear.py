"""Products in float32 and int8 on CPUs with AMX: errors, and bits of rows."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from wan.kernels.amx_linear import can_multiply_int8, multiply_int8_with_amx, uses_amx
from wan.kernels.linear import multiply
from wan.utils.torch_private import has_amx

pytestmark = pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")


@pytest.mark.parametrize("inputs", [1024, 1568])  # whole blocks of 512 channels, or not
def test_float32_products(inputs: int) -> None:
    """Nearer to float64 than PyTorch's; a row's bits depend on no other row, nor on threads."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, bias = draw(2, 1100, inputs), draw(1056, inputs), draw(1056)
    one_part = weight.bfloat16().float()  # of which the kernel multiplies one part only
    even_parts, odd_parts = one_part.clone(), one_part.clone()  # more in one of two channels
    even_parts[:, ::2], odd_parts[:, 1::2] = weight[:, ::2], weight[:, 1::2]
    x[0, 3, 5] = math.nan
    x[1, :, ::3] *= 1e-12
    threads = torch.get_num_threads()
    with torch.no_grad():
        weights = (weight, bias), (one_part, None), (even_parts, bias), (odd_parts, bias)
        for w, b in weights:
            assert uses_amx(x, w, b)
            y, plain = multiply(x, w, b), F.linear(x, w, b)
            exact = F.linear(x.double(), w.double(), None if b is None else b.double())
            assert torch.equal(y.isnan(), plain.isnan()) and y.isnan().any(-1).sum() == 1
            error, plain_error = ((z - exact).nan_to_num().norm() for z in (y, plain))
            assert error < plain_error < 1e-6 * exact.nan_to_num().norm()
            assert torch.equal(multiply(x[1, 7:40], w, b), y[1, 7:40])
            assert torch.equal(multiply(x[1, :65].T.contiguous().T, w, b), y[1, :65])
            torch.set_num_threads(3)
            in_threads = multiply(x[1], w, b)
            torch.set_num_threads(threads)
            assert torch.equal(in_threads, y[1])


def test_rows_beyond_the_packed_ones() -> None:
    """2 048 rows are packed at a time."""
    x, weight = torch.randn(2100, 1024), torch.randn(1024, 1024)
    with torch.no_grad():
        y = multiply(x, weight, None)
        assert torch.equal(y[2000:], multiply(x[2000:], weight, None))
        assert_close(y.double(), F.linear(x.double(), weight.double()), rtol=0, atol=5e-4)


def test_what_pytorch_multiplies() -> None:
    """Few rows, none, odd sizes, other dtypes, small layers, gradients."""
    x, weight, bias = torch.randn(64, 1024), torch.randn(1024, 1024), torch.randn(1024)
    cases = [
        (x[:15], weight, bias),
        (x[:0], weight, bias),
        (x, weight[:-1], None),
        (x, weight[:512], None),
        (x.double(), weight.double(), None),
        (x.bfloat16(), weight.bfloat16(), bias.bfloat16()),
    ]
    with torch.no_grad():
        for tensors in cases:
            assert not uses_amx(*tensors)
            assert torch.equal(multiply(*tensors), F.linear(*tensors))
    assert uses_amx(x, weight, bias) is False
    assert multiply(x.requires_grad_(), weight, bias).requires_grad


@pytest.mark.parametrize(("rows", "inputs", "columns"), [(1, 64, 32), (2083, 3136, 544)])
def test_int8_products_are_exact(rows: int, inputs: int, columns: int) -> None:
    """Also of -128, and of more inputs than a block has."""
    assert can_multiply_int8(inputs, columns)
    assert not can_multiply_int8(inputs - 32, columns) and not can_multiply_int8(
        inputs, columns - 16
    )
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-128, 128, (n, inputs), dtype=torch.int8, generator=generator)
        for n in (rows, columns)
    )
    out = torch.full((rows, columns), -1, dtype=torch.int32)
    multiply_int8_with_amx(a, b.T.contiguous().T, out)
    assert torch.equal(out, (a.double() @ b.double().T).int())
