"""The real mindiesd on the stand-in: its public functions against plain PyTorch.

What holds here is what our own kernels can rely on when they use mindiesd as their oracle.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mindiesd
import pytest
import torch
import torch.nn.functional as F
import torch_npu
from mindiesd.layers.flash_attn.sparse_flash_attn_rf_v3 import bsa_sparse_attention_v3
from mindiesd.layers.moe import moe_mlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

Chip = Callable[[str], None]


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(rows: int, keys: int, heads: int = 2, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """[1,S,N,D] each."""
    return tuple(made(1, s, heads, size, seed=i) for i, s in enumerate((rows, keys, keys)))  # type: ignore[return-value]


def plain(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **more).transpose(1, 2)


def off(out: Tensor, want: Tensor) -> float:
    return float((out.float() - want).abs().max())


def test_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own shape functions fit our operators; and it allows internal formats again."""
    with FakeTensorMode():
        q = torch.empty(1, 2, 256, 128, dtype=torch.float16)
        lse, out = torch.ops.mindiesd.la(q, q, q)
    assert (lse.shape, out.shape) == ((1, 2, 256), (1, 2, 256, 128))
    monkeypatch.setattr(torch_npu.npu.config, "allow_internal_format", False)
    importlib.reload(moe_mlp)
    assert torch_npu.npu.config.allow_internal_format is True


DENSE = [("fused_attn_score", layout) for layout in ("BNSD", "BSND", "BSH")]
DENSE += [("prompt_flash_attn", "BSND"), ("prompt_flash_attn", "BSH")]


@pytest.mark.parametrize("operation, layout", DENSE)
def test_attention_forward(chip: Chip, operation: str, layout: str, calls: list[Any]) -> None:
    q, k, v = qkv(300, 200)
    keep = torch.rand(300, 200, generator=torch.Generator().manual_seed(9)) < 0.7
    named = {"opt_mode": "manual", "op_type": operation, "layout": layout}
    assert off(mindiesd.attention_forward(q, k, v, **named), plain(q, k, v)) < 5e-3
    out = mindiesd.attention_forward(q, k, v, attn_mask=keep, **named)
    assert off(out, plain(q, k, v, attn_mask=keep)) < 1e-2
    first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    if layout == "BNSD":
        out = mindiesd.attention_forward(*first, head_first=True, **named)
        assert off(out.transpose(1, 2), plain(q, k, v)) < 5e-3
    assert {call.facts["layout"] for call in calls} == {layout}


def test_laser(chip: Chip, calls: list[Any]) -> None:
    q, k, v = qkv(2100, 2100)
    named = {"opt_mode": "manual", "op_type": "ascend_laser_attention", "layout": "BNSD"}
    assert off(mindiesd.attention_forward(q, k, v, **named), plain(q, k, v)) < 2e-3
    short = mindiesd.attention_forward(q[:, :2000], k, v, **named)
    assert off(short, plain(q[:, :2000], k, v)) < 2e-3
    chip("A5")
    mindiesd.attention_forward(q, k, v, **named)
    assert [call.name for call in calls] == ["mindiesd.la"] + 2 * ["npu_fusion_attention"]
    assert calls[0].shapes[0] == (1, 2, 2304, 128) and calls[0].facts["pre_tokens"] == 204


def test_varlen() -> None:
    q, k, v = (x[0] for x in qkv(50, 50))
    out = mindiesd.attention_forward_varlen(q, k, v, [0, 20, 50], [0, 20, 50], causal=True)
    for rows in (slice(0, 20), slice(20, 50)):
        want = plain(*(x[None, rows] for x in (q, k, v)), is_causal=True)
        assert off(out[None, rows], want) < 1e-2


SPARSE = [
    ("A2", "rf_v2", "bf16", 5e-3),
    ("A2", "rf_v3", "bf16", 5e-3),
    ("A3", "rf_v2", "bf16", 5e-3),
    ("A5", "rf_v2", "bf16", 5e-3),
    ("A5", "rf_v3", "bf16", 5e-3),
    ("A5", "rf_v3", "fp8", 1e-1),
    ("A5", "rf_v3", "mix", 1e-1),
]
GRIDS = [(3, 16, 16), (2, 12, 11)]


def sparse(grid: tuple[int, int, int], qkv: Any, kind: str, precision: str, **more: Any) -> Tensor:
    named: dict[str, Any] = {"head_num": 2, "sparse_type": kind, "precision": precision}
    named |= {"input_layout": "BSND", "latent_shape_q": list(grid), "latent_shape_k": list(grid)}
    return mindiesd.sparse_attention(
        *qkv, **named | {"inner_precise": 4 if kind == "rf_v3" else 0, "sparsity": 0.0} | more
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name, kind, precision, limit", SPARSE)
def test_sparse_attention_that_keeps_all_is_dense(
    chip: Chip, grid: tuple[int, int, int], name: str, kind: str, precision: str, limit: float
) -> None:
    chip(name)
    tokens = grid[0] * grid[1] * grid[2]
    q, k, v = qkv(tokens, tokens)
    assert off(sparse(grid, (q, k, v), kind, precision), plain(q, k, v)) < limit


def test_sparse_attention_leaves_blocks_out(chip: Chip, calls: list[Any]) -> None:
    grid = (5, 16, 16)
    inputs = qkv(1280, 1280)
    v2, v3 = (sparse(grid, inputs, kind, "bf16", sparsity=0.8) for kind in ("rf_v2", "rf_v3"))
    assert torch.equal(v2, v3)
    assert off(v2, plain(*inputs)) > 0.05
    heads = [
        sparse(
            grid, [x[:, :, n : n + 1] for x in inputs], "rf_v2", "bf16", sparsity=0.8, head_num=1
        )
        for n in range(2)
    ]
    assert torch.equal(torch.cat(heads, 2), v2)
    names = [call.name for call in calls]
    assert names[:2] == ["mindiesd.rainfusionattention", "mindiesd.block_sparse_attention"]
    named = {"latent_shape_q": grid, "sparsity": 0.8}
    out, mask = bsa_sparse_attention_v3(*inputs, **named)
    assert torch.equal(bsa_sparse_attention_v3(*inputs, **named, cached_mask=mask)[0], out)


class Block(nn.Module):
    """Something to quantise: one linear layer, and attention that uses what was put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 64  # by which mindiesd makes the rotation
        self.proj = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q = self.proj(x).unflatten(-1, (2, 64)).transpose(1, 2)
        return self.fa_quant(q, q, q, layout="BNSD")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()


def test_online_quantising(chip: Chip, calls: list[Any]) -> None:
    chip("A5")
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    weight, bias = model.block.proj.weight.data.float(), model.block.proj.bias.data.float()
    config = mindiesd.OnlineQuantConfig(
        quant_type="W8A8_DYNAMIC", fa_layers=["Block"], fa_quant_type="FP8_DYNAMIC"
    )
    mindiesd.quantize(model, online_config=config)
    x = made(1, 300, 128)
    with torch.no_grad():
        projected, out = model.block.proj(x), model.block(x)
    assert off(projected, F.linear(x.float(), weight, bias)) < 0.05
    q = projected.unflatten(-1, (2, 64))
    want = plain(q, q, q)
    assert (out.transpose(1, 2).float() - want).norm() < 0.06 * want.norm()
    names = [call.name for call in calls]
    assert names.count("npu_quant_matmul") == 2
    assert names[-1] == "mindiesd.fused_infer_attention_score_v2"
    assert calls[-1].dtypes == 3 * ("float8_e4m3fn",)


def test_online_microscaled_layers(chip: Chip, calls: list[Any]) -> None:
    chip("A5")
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    weight, bias = model.block.proj.weight.data.float(), model.block.proj.bias.data.float()
    mindiesd.quantize(model, online_config=mindiesd.OnlineQuantConfig(quant_type="W8A8_MXFP8"))
    x = made(1, 300, 128)
    out, want = model.block.proj(x), F.linear(x.float(), weight, bias)
    assert (out.float() - want).norm() < 0.06 * want.norm()
    assert [call.name for call in calls][-2:] == ["npu_dynamic_mx_quant", "npu_quant_matmul"]


def test_small_operations(chip: Chip) -> None:
    x, wave = made(1, 50, 4, 64, dtype=torch.float32), made(1, 50, 1, 64, seed=1).float()
    for mode in ("rotated_half", "rotated_interleaved"):
        fused, unfused = (
            mindiesd.rotary_position_embedding(x, wave, wave, mode, fused=f) for f in (True, False)
        )
        torch.testing.assert_close(fused, unfused)
    torch.testing.assert_close(mindiesd.RMSNorm(64)(x), F.rms_norm(x, (64,), None, 1e-6))
    norm, x_BSH = nn.LayerNorm(64, eps=1e-6), x[:, :, 0].contiguous()
    torch.testing.assert_close(mindiesd.fast_layernorm(norm, x_BSH), norm(x_BSH))
    for name in ("A2", "A5"):
        chip(name)
        for shape in ((1, 64), (1, 1, 64), (1, 50, 64)):
            rows = made(*shape, dtype=torch.float32)
            out = mindiesd.layernorm_scale_shift(norm, x_BSH, rows, rows)
            torch.testing.assert_close(out, norm(x_BSH) * (1 + rows) + rows)


def test_clock_and_cache(calls: list[Any]) -> None:
    mindiesd.frequency_regulator(1400)
    assert calls[-1].facts == {"freq": 1400}
    config = mindiesd.CacheConfig(
        "attention_cache", blocks_count=1, steps_count=12, step_start=3, step_interval=3, step_end=9
    )
    agent, computed = mindiesd.CacheAgent(config), []
    for step in range(12):
        agent.apply(lambda s: computed.append(s) or torch.full((1,), float(s)), step)
    assert computed == [0, 1, 2, 3, 6, 9, 10, 11]
