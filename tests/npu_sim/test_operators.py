"""The stand-in's quantising and small operators against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

ops = torch.ops.mindiesd


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_block_quantiser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "260")
    x = made(2, 300, 64)
    x[1, 128:256] = 0
    payload, scale = torch_npu.npu_dynamic_block_quant(
        x, dst_type=torch.float8_e4m3fn, row_block_size=128
    )
    assert (payload.dtype, tuple(scale.shape), scale.dtype) == (
        torch.float8_e4m3fn,
        (2, 3, 1),
        torch.float32,
    )
    for block, rows in enumerate((slice(0, 128), slice(128, 256), slice(256, 300))):
        largest = x[:, rows].float().abs().amax((1, 2))
        torch.testing.assert_close(scale[:, block, 0], largest / 448)
        back = payload[:, rows].float() * scale[:, block, None]
        error = (back - x[:, rows].float()).abs()
        limit = torch.maximum(x[:, rows].float().abs() / 16, largest[:, None, None] / 448 / 1024)
        assert (error <= limit * 1.001).all()
    assert (payload[1, 128:256].float() == 0).all()


def test_integer_product() -> None:
    weight, x = made(48, 64), made(5, 64, seed=1)
    bias = made(48, seed=2)
    payload, scale = torch_npu.npu_dynamic_quant(weight)
    x8, rows = torch_npu.npu_dynamic_quant(x)
    assert payload.dtype == x8.dtype == torch.int8 and tuple(rows.shape) == (5,)
    named = {"pertoken_scale": rows, "output_dtype": torch.bfloat16}
    out = torch_npu.npu_quant_matmul(x8, payload.T, scale, bias=bias, **named)
    exact = (x8.long() @ payload.T.long()).double() * rows[:, None].double() * scale.double()
    torch.testing.assert_close(out, (exact + bias.double()).bfloat16())
    error = (out.float() - F.linear(x.float(), weight.float(), bias.float())).abs()
    assert error.max() < 0.02 * out.float().abs().max()


def test_static_quantising() -> None:
    x = made(5, 64)
    steps, zero = torch.full((64,), 0.05, dtype=torch.bfloat16), torch.full((64,), 3).bfloat16()
    x8 = torch_npu.npu_quantize(x, steps, zero, torch.qint8, -1)
    want = torch.round(x.double() / steps.double() + 3).clamp(-128, 127)
    assert (x8.double() - want).abs().max() <= 1  # a value between two steps falls either way
    assert (x8.double() == want).double().mean() > 0.95
    weight, _ = torch_npu.npu_dynamic_quant(made(48, 64, seed=1))
    scale = torch.full((48,), 0.01)
    packed = scale.view(torch.int32).to(torch.int64)
    bias = torch.arange(48, dtype=torch.int32)
    named = {"bias": bias, "output_dtype": torch.float16}
    out = torch_npu.npu_quant_matmul(x8, weight.T, packed, **named)
    want = (x8.long() @ weight.T.long() + bias) * scale.double()
    torch.testing.assert_close(out, want.half())


def test_weights_only() -> None:
    weight, scale = torch_npu.npu_dynamic_quant(made(48, 64))
    x, bias, scale = made(5, 64, seed=1), made(48, seed=2).float(), scale.bfloat16()
    out = torch_npu.npu_weight_quant_batchmatmul(x, weight.T, scale[None], bias=bias)
    want = F.linear(x.double(), weight.double() * scale.double()[:, None], bias.double())
    torch.testing.assert_close(out, want.bfloat16())


def test_microscaled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "260")
    weight, x, bias = made(48, 96), made(5, 96, seed=1), made(48, seed=2).float()
    x[0, :32], x[1, 3] = 0, 448 * 2.0**5
    (w8, w_scale), (x8, x_scale) = (
        torch_npu.npu_dynamic_mx_quant(t, dst_type=torch.float8_e4m3fn) for t in (weight, x)
    )
    assert tuple(x_scale.shape) == (5, 2, 2) and x_scale.dtype == torch.uint8
    powers = x_scale.view(torch.float8_e8m0fnu).float().flatten(1).repeat_interleave(32, 1)
    largest = x.float().unflatten(1, (-1, 32)).abs().amax(-1)
    assert (largest <= 512 * powers[:, :96:32]).all()  # else the payload would be cut off
    assert (2 * largest[1:] > 512 * powers[1:, :96:32]).all()  # and the power is the least one
    back = x8.float() * powers[:, :96]
    limit = torch.maximum(x.float().abs() / 8, powers[:, :96] / 1024)
    assert ((back - x.float()).abs() <= limit).all() and back[1, 3] == 448 * 2.0**5
    e8m0 = torch.float8_e8m0fnu
    named = {"scale_dtype": e8m0, "pertoken_scale_dtype": e8m0, "group_sizes": [1, 1, 32]}
    named |= {"pertoken_scale": x_scale, "bias": bias, "output_dtype": torch.bfloat16}
    out = torch_npu.npu_quant_matmul(x8, w8.T, w_scale.transpose(0, 1), **named)
    spread = w_scale.view(e8m0).float().flatten(1).repeat_interleave(32, 1)[:, :96]
    want = F.linear(back.double(), (w8.float() * spread).double(), bias.double())
    torch.testing.assert_close(out, want.bfloat16())


def test_small_operations() -> None:
    x, weight = made(2, 5, 4, 64, dtype=torch.float32), made(64, seed=1, dtype=torch.float32)
    y, _ = torch_npu.npu_rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(y, F.rms_norm(x, (64,), weight, 1e-5))
    torch.testing.assert_close(
        ops.layernorm(x, [64], weight, None, 1e-5)[0], F.layer_norm(x, (64,), weight, None, 1e-5)
    )
    scale, shift, x_BSH = (
        made(2, 64, dtype=torch.float32),
        made(2, 1, 64, dtype=torch.float32),
        x[:, :, 0],
    )
    want = F.layer_norm(x_BSH, (64,)) * (1 + scale[:, None]) + shift
    torch.testing.assert_close(ops.adaln(x_BSH, scale, shift), want)
    angle = made(1, 5, 1, 32, dtype=torch.float32)
    cos, sin = (f(angle).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(()), angle)
    want = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(torch_npu.npu_rotary_mul(x, cos, sin, "interleave"), want)
