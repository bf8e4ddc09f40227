"""Fused small operations against plain ones in float64 and against mindiesd's public ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import mindiesd
import pytest
import torch
from torch import Tensor, nn

from tests.npu_sim.oracles import make_random, relative_rms_error
from wan.kernels.interfaces import PLAIN_OPS, SmallOps
from wan.kernels.registry import make_vendor_ops
from wan.modules import fused_ops as plain
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.modules.rope import apply_rope, make_rope_table
from wan.settings.kernels import SMALL_OPS

Choose = Callable[[str], None]
NAMES = tuple(name for name, make_row in SMALL_OPS.items() if "npu" in make_row.factories)
EPS, F32 = 1e-6, torch.float32


def make_fused_ops(*names: str) -> Any:
    return make_vendor_ops(names)


def check_same(actual: Tensor, expected: Tensor) -> None:
    """Check that float32 results differ only by rounding."""
    assert actual.dtype == torch.float32 and actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() < 4e-6


# Strided slices of tokens, as in the model, and batches of one and two samples.
INPUTS = [(dtype, batch) for dtype in (F32, torch.bfloat16) for batch in (1, 2)]


def make_tokens(dtype: torch.dtype, batch: int) -> Tensor:
    return (make_random(batch, 40, 96, dtype=dtype) * 3 + 1)[:, 7:30]


def make_row(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return make_random(*shape, 96, seed=seed, dtype=dtype)


def test_rms_norm(chip: Choose, calls: list[Any]) -> None:
    for dtype, batch in INPUTS:
        x, weight = make_tokens(dtype, batch), make_row(seed=1, dtype=dtype)
        x_before = x.clone()
        actual = make_fused_ops("rms_norm").rms_norm(x, weight, EPS)
        check_same(actual, plain.compute_rms_norm(x.double(), weight, EPS))
        public = mindiesd.RMSNorm(96, EPS)
        public.weight.data = weight.float()
        assert torch.equal(actual, public(x.float())) and torch.equal(x, x_before)
    assert {call.name for call in calls} == {"npu_rms_norm"} and len(calls) == 2 * len(INPUTS)


def test_layer_norm(chip: Choose, calls: list[Any]) -> None:
    for (dtype, batch), affine in product(INPUTS, (True, False)):
        x = make_tokens(dtype, batch)
        public = nn.LayerNorm(96, EPS, elementwise_affine=affine)
        if affine:
            public.weight.data, public.bias.data = make_row(seed=1), make_row(seed=2)
        calls.clear()
        actual = make_fused_ops("layer_norm").layer_norm(x, public.weight, public.bias, EPS)
        check_same(actual, plain.compute_layer_norm(x, public.weight, public.bias, EPS))
        assert torch.equal(actual, mindiesd.fast_layernorm(public, x.float()))
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
            x, shift, scale = (
                make_tokens(dtype, batch),
                *(make_row(batch, 1, seed=i) for i in (1, 2)),
            )
            calls.clear()
            actual = make_fused_ops(*names).modulated_norm(x, shift, scale, EPS)
            check_same(actual, plain.modulated_norm(x, shift, scale, EPS))
            assert [call.name for call in calls] == [operator]


def test_rope(chip: Choose, calls: list[Any]) -> None:
    cos, sin = (rows[5:40] for rows in make_rope_table((3, 4, 5), 64))
    for batch in (1, 2):
        x = make_random(batch, len(cos), 3, 64, dtype=F32)
        check_same(make_fused_ops("rope").rope(x, (cos, sin)), apply_rope(x, (cos, sin)))
        assert calls[-1].name == "npu_rotary_mul" and calls[-1].facts["mode"] == "interleave"
        assert calls[-1].shapes[1] == (1, x.shape[1], 1, 64)
    assert len(calls) == 2


def test_rope_says_what_the_operator_takes(chip: Choose, calls: list[Any]) -> None:
    for batch, heads, size in ((25, 40, 8), (1, 1, 896)):
        table = make_rope_table((1, 1, 2), size)
        with pytest.raises(ValueError, match=f"not {batch * heads} and {size}"):
            make_fused_ops("rope").rope(make_random(batch, 2, heads, size, dtype=F32), table)
    assert calls == []
    largest = ((27, 37, 8), (1, 1, 894))  # 999 groups, and the widest even head
    for batch, heads, size in largest:
        make_fused_ops("rope").rope(
            make_random(batch, 2, heads, size, dtype=F32), make_rope_table((1, 1, 2), size)
        )


def make_model(ops: SmallOps, dtype: torch.dtype) -> WanModel:
    torch.manual_seed(3)
    network = WanModel(
        "t2v", in_dim=4, out_dim=4, dim=48, ffn_dim=64, freq_dim=32, text_dim=24, text_len=16,
        num_heads=4, num_layers=2, components=ModelComponents(ops=plain.BlockOps(ops)),
    )  # fmt: skip
    return network.eval().to(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 1e-5), (torch.bfloat16, 2e-2)])
def test_model(dtype: torch.dtype, bound: float, chip: Choose, calls: list[Any]) -> None:
    """In the full network each norm, modulation and rotation is a fused operator."""
    x, text = make_random(4, 2, 4, 6, dtype=F32), make_random(5, 24, seed=1, dtype=F32)
    time = torch.tensor([500.0])
    with torch.no_grad():
        expected = make_model(PLAIN_OPS, dtype)([x], time, [text], 12)[0]
        actual = make_model(make_fused_ops(*NAMES), dtype)([x], time, [text], 12)[0]
    assert relative_rms_error(actual, expected) < bound
    count = {name: sum(call.name == name for call in calls) for name in {c.name for c in calls}}
    assert count["npu_rotary_mul"] == 2 * 2  # layers x (q, k)
    assert count["npu_rms_norm"] == 2 * 4  # layers x (self, cross) x (q, k)
    assert count["mindiesd.layernorm"] == 2 and count["mindiesd.adaln"] == 2 * 2 + 1  # and the head
