"""Fused small operations against plain ones in float64 and against mindiesd's public ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import mindiesd
import pytest
import torch
from torch import Tensor, nn

from tests.npu_sim.oracles import far, made
from wan.kernels.base import PLAIN_OPS, SmallOps
from wan.kernels.select import make_vendor_ops
from wan.modules import small_ops as plain
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.modules.rope import apply_rope, make_rope_table
from wan.settings.kernels import SMALL_OPS

Choose = Callable[[str], None]
NAMES = tuple(name for name, row in SMALL_OPS.items() if "npu" in row.factories)
EPS, F32 = 1e-6, torch.float32


def fused(*names: str) -> Any:
    return make_vendor_ops(names)


def same(found: Tensor, want: Tensor) -> None:
    """Check that float32 results differ only by rounding."""
    assert found.dtype == torch.float32 and found.shape == want.shape
    assert (found.double() - want.double()).abs().max() < 4e-6


# Strided slices of tokens, as in the model, and batches of one and two samples.
INPUTS = [(dtype, batch) for dtype in (F32, torch.bfloat16) for batch in (1, 2)]


def tokens(dtype: torch.dtype, batch: int) -> Tensor:
    return (made(batch, 40, 96, dtype=dtype) * 3 + 1)[:, 7:30]


def row(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return made(*shape, 96, seed=seed, dtype=dtype)


def test_rms_norm(chip: Choose, calls: list[Any]) -> None:
    for dtype, batch in INPUTS:
        x, weight = tokens(dtype, batch), row(seed=1, dtype=dtype)
        kept = x.clone()
        found = fused("rms_norm").rms_norm(x, weight, EPS)
        same(found, plain.compute_rms_norm(x.double(), weight, EPS))
        public = mindiesd.RMSNorm(96, EPS)
        public.weight.data = weight.float()
        assert torch.equal(found, public(x.float())) and torch.equal(x, kept)
    assert {call.name for call in calls} == {"npu_rms_norm"} and len(calls) == 2 * len(INPUTS)


def test_layer_norm(chip: Choose, calls: list[Any]) -> None:
    for (dtype, batch), affine in product(INPUTS, (True, False)):
        x = tokens(dtype, batch)
        public = nn.LayerNorm(96, EPS, elementwise_affine=affine)
        if affine:
            public.weight.data, public.bias.data = row(seed=1), row(seed=2)
        calls.clear()
        found = fused("layer_norm").layer_norm(x, public.weight, public.bias, EPS)
        same(found, plain.compute_layer_norm(x, public.weight, public.bias, EPS))
        assert torch.equal(found, mindiesd.fast_layernorm(public, x.float()))
        assert [call.name for call in calls] == ["mindiesd.layernorm"] * 2
        assert calls[0].shapes == calls[1].shapes and calls[0].facts == calls[1].facts


def test_modulated_norm(chip: Choose, calls: list[Any]) -> None:
    for names, name, operator in (
        (("layer_norm",), "A2", "mindiesd.layernorm"),
        (("scale_shift",), "A2", "mindiesd.adaln"),
        (("scale_shift",), "A5", "mindiesd.adaln_v2"),
        (("layer_norm", "scale_shift"), "A3", "mindiesd.adaln"),
        (("scale_shift", "layer_norm"), "A3", "mindiesd.adaln"),
    ):
        chip(name)
        for dtype, batch in INPUTS:
            x, shift, scale = tokens(dtype, batch), *(row(batch, 1, seed=i) for i in (1, 2))
            calls.clear()
            found = fused(*names).modulated_norm(x, shift, scale, EPS)
            same(found, plain.modulated_norm(x, shift, scale, EPS))
            assert [call.name for call in calls] == [operator]


def test_rope(chip: Choose, calls: list[Any]) -> None:
    cos, sin = (rows[5:40] for rows in make_rope_table((3, 4, 5), 64))
    for batch in (1, 2):
        x = made(batch, len(cos), 3, 64, dtype=F32)
        same(fused("rope").rope(x, (cos, sin)), apply_rope(x, (cos, sin)))
        assert calls[-1].name == "npu_rotary_mul" and calls[-1].facts["mode"] == "interleave"
        assert calls[-1].shapes[1] == (1, x.shape[1], 1, 64)
    assert len(calls) == 2


def test_rope_says_what_the_operator_takes(chip: Choose, calls: list[Any]) -> None:
    for batch, heads, size in ((25, 40, 8), (1, 1, 896)):
        table = make_rope_table((1, 1, 2), size)
        with pytest.raises(ValueError, match=f"not {batch * heads} and {size}"):
            fused("rope").rope(made(batch, 2, heads, size, dtype=F32), table)
    assert calls == []
    largest = ((27, 37, 8), (1, 1, 894))  # 999 groups, and the widest even head
    for batch, heads, size in largest:
        fused("rope").rope(made(batch, 2, heads, size, dtype=F32), make_rope_table((1, 1, 2), size))


def test_only_what_was_asked_for_is_replaced(chip: Choose) -> None:
    for name, fields in {
        "rope": {"rope"},
        "rms_norm": {"rms_norm"},
        "layer_norm": {"layer_norm", "modulated_norm"},
        "scale_shift": {"modulated_norm"},
    }.items():
        ops = vars(make_vendor_ops([name]))
        assert {field for field, function in ops.items() if function is not None} == fields
    assert fused() == PLAIN_OPS


def model(ops: SmallOps, dtype: torch.dtype) -> WanModel:
    torch.manual_seed(3)
    made = WanModel(
        "t2v", in_dim=4, out_dim=4, dim=48, ffn_dim=64, freq_dim=32, text_dim=24, text_len=16,
        num_heads=4, num_layers=2, components=ModelComponents(ops=plain.BlockOps(ops)),
    )  # fmt: skip
    return made.eval().to(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 1e-5), (torch.bfloat16, 2e-2)])
def test_model(dtype: torch.dtype, bound: float, chip: Choose, calls: list[Any]) -> None:
    """In the full network each norm, modulation and rotation is a fused operator."""
    x, text = made(4, 2, 4, 6, dtype=F32), made(5, 24, seed=1, dtype=F32)
    time = torch.tensor([500.0])
    with torch.no_grad():
        want = model(PLAIN_OPS, dtype)([x], time, [text], 12)[0]
        found = model(fused(*NAMES), dtype)([x], time, [text], 12)[0]
    assert far(found, want) < bound
    count = {name: sum(call.name == name for call in calls) for name in {c.name for c in calls}}
    assert count["npu_rotary_mul"] == 2 * 2  # layers x (q, k)
    assert count["npu_rms_norm"] == 2 * 4  # layers x (self, cross) x (q, k)
    assert count["mindiesd.layernorm"] == 2 and count["mindiesd.adaln"] == 2 * 2 + 1  # and the head
