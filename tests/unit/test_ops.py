"""The small operations: results of the plain versions, and calls by the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks.common import measure_peak_bytes
from wan.kernels.interfaces import SmallOps
from wan.modules.fused_ops import BlockOps, compute_layer_norm, compute_rms_norm, modulated_norm
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.modules.rope import apply_rope, compute_rope_angles, make_rope_table

DTYPES = (torch.float32, torch.bfloat16)
PLAIN = {
    "rms_norm": compute_rms_norm,
    "layer_norm": compute_layer_norm,
    "modulated_norm": modulated_norm,
    "rope": apply_rope,
}


def normalised(x: Tensor, eps: float) -> Tensor:
    """Layer norm by its definition, float64."""
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_float32(dtype: torch.dtype) -> None:
    """Inputs of any dtype; nothing but the inputs is rounded to 16 bits."""
    x, weight, bias = torch.randn(2, 5, 48).to(dtype) * 3, torch.randn(48), torch.randn(48)
    original = x.clone()
    rms = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    output = compute_rms_norm(x, weight, 0.1)
    assert output.dtype == torch.float32
    assert_close(output.double(), rms, rtol=2e-6, atol=2e-6)
    for w, b in ((weight, bias), (None, None)):
        output = compute_layer_norm(x, w, b, 0.1)
        expected = normalised(x, 0.1) * (1 if w is None else w) + (0 if b is None else b)
        assert output.dtype == torch.float32
        assert_close(output.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(x, original)


def test_modulated_norm_is_float32() -> None:
    for batch, dtype in product((1, 2), DTYPES):
        x = torch.randn(batch, 5, 48).to(dtype)
        shift, scale = torch.randn(batch, 1, 48), torch.randn(batch, 1, 48)
        output = modulated_norm(x, shift, scale, 1e-3)
        expected = normalised(x, 1e-3) * (1 + scale.double()) + shift
        assert output.dtype == torch.float32
        assert_close(output.double(), expected, rtol=2e-6, atol=2e-6)


def test_rope_is_a_complex_product() -> None:
    grid, x = (2, 3, 2), torch.randn(2, 12, 3, 16)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    turned = torch.polar(torch.ones(12, 8, dtype=torch.float64), compute_rope_angles(grid, 16))
    expected = torch.view_as_real(pairs * turned[:, None]).flatten(-2)
    assert_close(apply_rope(x, make_rope_table(grid, 16)).double(), expected, rtol=1e-6, atol=1e-6)


def model(**ops: Any) -> WanModel:
    torch.manual_seed(0)
    sizes = {"dim": 48, "ffn_dim": 64, "num_heads": 4, "num_layers": 2}
    components = ModelComponents(ops=BlockOps(SmallOps(**ops)))
    return WanModel(**sizes, text_dim=16, text_len=8, components=components).requires_grad_(False)


def compute_velocity(net: WanModel) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, 4, 6, generator=generator)
    context = torch.randn(5, 16, generator=generator)
    with torch.no_grad():
        return net([x], torch.tensor([500.0]), [context], 18)[0]


def test_every_norm_and_rotation_uses_the_operations_passed_in() -> None:
    """Two layers: q, k norms of both attentions, norm3, two modulated norms and the head's."""
    calls: Counter[str] = Counter()

    def count_calls(name: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Tensor:
            calls[name] += 1
            return PLAIN[name](*args, **keywords)

        return call

    net = model(**{name: count_calls(name) for name in PLAIN})
    output = compute_velocity(net)
    assert calls == {"rms_norm": 2 * 4, "layer_norm": 2, "modulated_norm": 2 * 2 + 1, "rope": 2 * 2}
    assert torch.equal(output, compute_velocity(model()))
    assert net.state_dict().keys() == model().state_dict().keys()


def test_each_operation_decides_the_result() -> None:
    assert {field.name for field in fields(SmallOps)} == PLAIN.keys()
    plain = compute_velocity(model())
    for name, op in PLAIN.items():
        changed = compute_velocity(
            model(**{name: lambda *args, op=op, **kw: op(*args, **kw) * 1.5 + 0.25})
        )
        assert not torch.allclose(changed, plain, atol=1e-4), name


@pytest.mark.parametrize(("gated", "dtype"), [*product((True, False), DTYPES)])
def test_the_residual_stream_takes_any_dtype(dtype: torch.dtype, gated: bool, monkeypatch) -> None:
    """Several slices give the same bits as one operation, without a full float32 copy."""
    x, y, row = torch.randn(1, 64, 48), torch.randn(1, 64, 48).to(dtype), torch.randn(1, 1, 48)
    expected = torch.addcmul(x, y.float(), row) if gated else x + y
    monkeypatch.setattr("wan.modules.fused_ops.get_slice_numel", lambda _: 48 * 10)
    ops, result = BlockOps(), 0 if gated else 64 * 48 * 2
    with torch.no_grad():
        add: Any = partial(ops.gated_add, x, y, row, [64])
        if not gated:
            add = partial(ops.add_modulated_norm, x, y, row, row, [64], 1e-6, torch.bfloat16)
        peak_bytes = measure_peak_bytes(
            add, torch.device("cpu")
        )  # also what PyTorch itself converts
    assert (
        torch.equal(x, expected) and peak_bytes <= result + 3 * 48 * 10 * 4
    )  # this slice and the next
