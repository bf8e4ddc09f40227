"""Fused small operations: against the plain twins in float64 and against mindiesd's public ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wan.kernels.base import PLAIN, SmallOps
from wan.kernels.select import vendor_ops
from wan.modules import small_ops as plain
from wan.modules.interfaces import Collaborators
from wan.modules.model import WanModel
from wan.modules.rope import apply_rope, rope_table
from wan.settings.kernels import SMALL_OPS

Choose = Callable[[str], None]
NAMES = tuple(name for name, row in SMALL_OPS.items() if "npu" in row.make)
EPS = 1e-6


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(*names: str) -> SmallOps:
    return vendor_ops(names)


def same(found: Tensor, want: Tensor) -> None:
    """Float32 results that differ by its rounding alone."""
    assert found.dtype == torch.float32 and found.shape == want.shape
    assert (found.double() - want.double()).abs().max() < 4e-6


# A slice of tokens with a stride, as the model hands it over, and the batch of two samples.
INPUTS = [(dtype, batch) for dtype in (torch.float32, torch.bfloat16) for batch in (1, 2)]


def tokens(dtype: torch.dtype, batch: int) -> Tensor:
    return (random(batch, 40, 96, dtype=dtype) * 3 + 1)[:, 7:30]


@pytest.mark.parametrize(("dtype", "batch"), INPUTS)
def test_rms_norm(dtype: torch.dtype, batch: int, chip: Choose, calls: list[Any]) -> None:
    import mindiesd

    x, weight = tokens(dtype, batch), random(96, seed=1, dtype=dtype)
    kept = x.clone()
    found = fused("rms_norm").rms_norm(x, weight, EPS)
    same(found, plain.rms_norm(x.double(), weight, EPS))
    public = mindiesd.RMSNorm(96, EPS)
    public.weight.data = weight.float()
    assert torch.equal(found, public(x.float())) and torch.equal(x, kept)
    assert [call.name for call in calls] == ["npu_rms_norm"] * 2


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("dtype", "batch"), INPUTS)
def test_layer_norm(
    dtype: torch.dtype, batch: int, affine: bool, chip: Choose, calls: list[Any]
) -> None:
    import mindiesd

    x = tokens(dtype, batch)
    public = nn.LayerNorm(96, EPS, elementwise_affine=affine)
    if affine:
        public.weight.data, public.bias.data = random(96, seed=1), random(96, seed=2)
    found = fused("layer_norm").layer_norm(x, public.weight, public.bias, EPS)
    same(found, plain.layer_norm(x, public.weight, public.bias, EPS))
    assert torch.equal(found, mindiesd.fast_layernorm(public, x.float()))
    assert [call.name for call in calls] == ["mindiesd.layernorm"] * 2
    assert calls[0].shapes == calls[1].shapes and calls[0].facts == calls[1].facts


@pytest.mark.parametrize(
    ("names", "name", "operator"),
    [
        (("layer_norm",), "A2", "mindiesd.layernorm"),
        (("scale_shift",), "A2", "mindiesd.adaln"),
        (("scale_shift",), "A5", "mindiesd.adaln_v2"),
        (("layer_norm", "scale_shift"), "A3", "mindiesd.adaln"),
        (("scale_shift", "layer_norm"), "A3", "mindiesd.adaln"),
    ],
)
@pytest.mark.parametrize(("dtype", "batch"), INPUTS)
def test_modulated_norm(
    dtype: torch.dtype,
    batch: int,
    names: tuple[str, ...],
    name: str,
    operator: str,
    chip: Choose,
    calls: list[Any],
) -> None:
    chip(name)
    x = tokens(dtype, batch)
    shift, scale = random(batch, 1, 96, seed=1), random(batch, 1, 96, seed=2)
    found = fused(*names).modulated_norm(x, shift, scale, EPS)
    same(found, plain.modulated_norm(x, shift, scale, EPS))
    assert [call.name for call in calls] == [operator]


@pytest.mark.parametrize("batch", [1, 2])
def test_rope(batch: int, chip: Choose, calls: list[Any]) -> None:
    table = tuple(rows[5:40] for rows in rope_table((3, 4, 5), 64))
    x = random(batch, table[0].shape[0], 3, 64)
    found = fused("rope").rope(x, table)  # type: ignore[arg-type]
    same(found, apply_rope(x, table))  # type: ignore[arg-type]
    (call,) = calls
    assert call.name == "npu_rotary_mul" and call.facts["mode"] == "interleave"
    assert call.shapes[1] == (1, x.shape[1], 1, 64)


@pytest.mark.parametrize(("batch", "heads", "size"), [(25, 40, 8), (1, 1, 896)])
def test_rope_says_what_the_operator_takes(
    batch: int, heads: int, size: int, chip: Choose, calls: list[Any]
) -> None:
    table = rope_table((1, 1, 2), size)
    with pytest.raises(ValueError, match=f"not {batch * heads} and {size}; leave rope out"):
        fused("rope").rope(random(batch, 2, heads, size), table)
    assert calls == []


def test_only_what_was_asked_for_is_replaced(chip: Choose) -> None:
    for name, fields in {
        "rope": {"rope"},
        "rms_norm": {"rms_norm"},
        "layer_norm": {"layer_norm", "modulated_norm"},
        "scale_shift": {"modulated_norm"},
    }.items():
        ops = vars(vendor_ops([name]))
        assert {field for field, function in ops.items() if function is not None} == fields
    assert fused() == PLAIN


def model(ops: SmallOps, dtype: torch.dtype) -> WanModel:
    torch.manual_seed(3)
    made = WanModel(
        "t2v", in_dim=4, out_dim=4, dim=48, ffn_dim=64, freq_dim=32, text_dim=24, text_len=16,
        num_heads=4, num_layers=2, collaborators=Collaborators(ops=plain.BlockOps(ops)),
    )  # fmt: skip
    return made.eval().to(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_model(dtype: torch.dtype, bound: float, chip: Choose, calls: list[Any]) -> None:
    """The whole network: each norm, modulation and rotation is a kernel's; the same result."""
    x, text = random(4, 2, 4, 6), random(5, 24, seed=1)
    time = torch.tensor([500.0])
    with torch.no_grad():
        want = model(PLAIN, dtype)([x], time, [text], 12)[0]
        found = model(fused(*NAMES), dtype)([x], time, [text], 12)[0]
    assert (
        found - want
    ).double().square().mean().sqrt() < bound * want.double().square().mean().sqrt()
    count = {name: sum(call.name == name for call in calls) for name in {c.name for c in calls}}
    assert count["npu_rotary_mul"] == 2 * 2  # layers x (q, k)
    assert count["npu_rms_norm"] == 2 * 4  # layers x (self, cross) x (q, k)
    assert count["mindiesd.layernorm"] == 2 and count["mindiesd.adaln"] == 2 * 2 + 1  # and the head
