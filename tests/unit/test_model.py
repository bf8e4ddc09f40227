"""WanModel: tensor names, batches, refusals, runs of timesteps, text cache, small operations."""

from __future__ import annotations

import weakref
from collections import Counter
from copy import deepcopy
from dataclasses import fields
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.numerics.recorded import STEP, SampleRecorder
from tests.refusals import check_refusals, get_refusal
from wan.kernels.interfaces import SmallOps
from wan.kernels.linear import Linear, multiply
from wan.kernels.sdpa import SdpaKernel
from wan.kernels.weight_only_linear import WeightOnlyLinear
from wan.modules.blocks import FeedForward
from wan.modules.fused_ops import BlockOps, compute_layer_norm, compute_rms_norm, modulated_norm
from wan.modules.interfaces import ModelComponents, SingleDeviceAttention
from wan.modules.model import WanModel, find_timestep_segments
from wan.modules.rope import (
    RopeCache,
    apply_rope,
    compute_rope_angles,
    make_rope_table,
)
from wan.modules.text_kv_cache import InputCache
from wan.settings.numerics import keeps_fp32
from wan.testing.measuring import measure_peak_bytes
from wan.utils.torch_private import has_onednn_bf16

CACHED = ModelComponents(text_kv_cache=True)
TINY = {"dim": 48, "ffn_dim": 64, "num_heads": 4, "num_layers": 2, "text_dim": 16, "text_len": 8}


def model(**changes: object) -> WanModel:
    torch.manual_seed(0)
    return WanModel(**{**TINY, **changes}).eval().requires_grad_(False)


def inputs(seed: int = 0, grid: tuple[int, int, int] = (3, 4, 6)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, *grid, generator=generator), torch.randn(5, 16, generator=generator)


def test_fp32_parameters() -> None:
    kept = ("blocks.0.modulation", "head.head.weight", "time_embedding.0.weight")
    kept += ("blocks.0.cross_attn.norm_k.weight", "time_projection.1.weight")
    rounded = ("blocks.0.ffn.0.weight", "patch_embedding.weight", "text_embedding.0.weight")
    table = dict.fromkeys(kept, True) | dict.fromkeys(rounded, False)
    assert table.keys() <= model().state_dict().keys()
    assert {name: keeps_fp32(name) for name in table} == table


@torch.no_grad()
def test_samples_of_different_sizes() -> None:
    samples = SampleRecorder()
    x, context = [list(side) for side in zip(inputs(0), inputs(1, (2, 2, 4)), strict=True)]
    net, t = model(components=ModelComponents(samples)), torch.tensor([500, 999])
    both = net(x, t, context, 18, step=STEP)
    assert samples.samples == [0, 0, 1, 1]
    net = model()
    for i in range(2):
        single = net([x[i]], t[i : i + 1], [context[i]], 18)[0]
        torch.testing.assert_close(both[i], single, atol=2e-5, rtol=0)
    same = net(x, t[:1], context, 18)
    assert torch.equal(same[1], net([x[1]], t[:1], [context[1]], 18)[0])


@torch.no_grad()
def test_uniform_per_token_timesteps_equal_the_scalar() -> None:
    net, (x, context) = model(), inputs()
    scalar = net([x], torch.tensor([700]), [context], 18)[0]
    assert torch.equal(scalar, net([x], torch.full((1, 20), 700), [context], 20)[0])
    values, lengths = find_timestep_segments(torch.tensor([[0, 0, 7, 7, 7, 9, 9]]), 5)
    assert values.tolist() == [[0, 7]] and lengths == (2, 3)


@pytest.mark.parametrize("grad", [False, True])
def test_modulation_by_runs_equals_expansion_per_token(grad: bool) -> None:
    ops, runs, eps, dtype = BlockOps(), (3, 4), 1e-6, torch.float32
    x, y = torch.randn(1, 7, 12), torch.randn(1, 7, 12)
    rows = shift, scale, gate = [torch.randn(1, 2, 12) for _ in range(3)]
    wide_shift, wide_scale, wide_gate = (
        row.repeat_interleave(torch.tensor(runs), dim=1) for row in rows
    )

    def modulated(x: Tensor) -> Tensor:
        normed = torch.nn.functional.layer_norm(x, (12,), eps=eps)
        return normed * (1 + wide_scale) + wide_shift

    affine = torch.nn.LayerNorm(12, eps)
    torch.nn.init.normal_(affine.weight)
    sums, close = (x + y * wide_gate, x + y), torch.testing.assert_close
    with torch.set_grad_enabled(grad):
        close(ops.modulated_norm(x, shift, scale, runs, eps, dtype), modulated(x))
        close(ops.gated_add(x.clone(), y, gate, runs), sums[0])
        output = ops.gated_add_norm(x.clone(), y, gate, runs, affine, dtype)
        close(output, (sums[0], affine(sums[0])))
        output = ops.add_modulated_norm(x.clone(), y, shift, scale, runs, eps, dtype)
        close(output, (sums[1], modulated(sums[1])))


@torch.no_grad()
@pytest.mark.parametrize("overwrite", [False, True])
def test_slices_of_tokens_cover_every_token(overwrite: bool) -> None:
    """There is more than one slice, and the last slice is shorter."""
    x, rows = torch.randn(1, 40_001, 64), torch.randn(40_001, 64)
    expected = x * 2 + rows
    output = BlockOps().apply_in_slices(
        lambda x, rows: x * 2 + rows, x, torch.float32, rows, overwrite=overwrite
    )
    assert torch.equal(output, expected)
    assert (output.data_ptr() == x.data_ptr()) == overwrite


@torch.no_grad()
def test_text_cache_is_exact_and_computes_once() -> None:
    """Until a context is changed in place or the network is moved: its weights may be others."""
    cached, plain, calls = model(components=CACHED), model(), []
    for block in cached.blocks:
        block.cross_attn.k.register_forward_hook(lambda *_: calls.append(1))
    (x, cond), (_, uncond) = inputs(0), inputs(1)

    def check(t: int, context: Tensor) -> None:
        a, b = (net([x], torch.tensor([t]), [context], 18)[0] for net in (cached, plain))
        assert torch.equal(a, b)

    for t, context in product((900, 500, 100), (cond, uncond)):
        check(t, context)
    assert len(calls) == 2 * 2
    assert torch.equal(x, inputs(0)[0]) and torch.equal(cond, inputs(0)[1]), "as they were"
    cond.add_(1)
    check(7, cond)
    assert len(calls) == 3 * 2
    cached.float()
    check(7, cond)
    assert len(calls) == 4 * 2


@torch.no_grad()
def test_another_image_with_the_same_text_is_computed() -> None:
    (x, text), image = inputs(), torch.randn(1, 5, 10)
    cached, plain = (model(image_dim=10, components=c) for c in (CACHED, ModelComponents()))
    velocities = [
        net([x], torch.tensor([7]), [text], 18, clip_fea=clip)[0]
        for clip in (image, image + 1)
        for net in (cached, plain)
    ]
    assert torch.equal(*velocities[:2]) and torch.equal(*velocities[2:])
    assert not torch.equal(velocities[0], velocities[2])


def test_training_uses_nothing_that_is_kept() -> None:
    """Each forward with gradients builds a new graph, also after a forward without gradients."""
    net, (x, context) = model(components=CACHED).requires_grad_(True), inputs()
    with torch.no_grad():
        net([x], torch.tensor([7]), [context], 18)
    for _ in range(2):
        net.zero_grad()
        net([x], torch.tensor([7]), [context], 18)[0].square().mean().backward()
        assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


def test_padded_keys_are_not_attended_to() -> None:
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    padded = [torch.cat((x, torch.full((1, 2, 2, 8), 1e3)), dim=1) for x in (k, v)]
    layer = SingleDeviceAttention(SdpaKernel())
    assert torch.equal(layer(q, *padded, valid_len=6), layer(q, k, v))


def test_rope_tables_are_built_once_per_grid() -> None:
    tables = RopeCache(24)

    def all_rows(x: Tensor, grid: tuple[int, int, int]) -> Tensor:
        return x

    for grid in ((2, 3, 4), (2, 4, 3), (1, 3, 4)):
        first, second = (tables.get(grid, torch.device("cpu"), all_rows) for _ in range(2))
        assert first is second
        for table, expected in zip(first, make_rope_table(grid, 24), strict=True):
            assert torch.equal(table, expected)
    half = tables.get((1, 3, 4), torch.device("cpu"), lambda x, _: x[:, 6:])
    for table, expected in zip(half, make_rope_table((1, 3, 4), 24), strict=True):
        assert torch.equal(table, expected[6:]), "another device's rows"


def test_networks_and_calls_that_do_not_fit() -> None:
    x, context = inputs()
    t, net = torch.tensor([5]), model()
    image = model(model_type="i2v", in_dim=36)
    calls: dict[str, tuple[Any, ...]] = {
        "heads": (lambda: model(num_heads=5),),
        "odd heads": (lambda: model(num_heads=16),),
        "window": (lambda: model(window_size=(8, 8)),),
        "type": (lambda: model(model_type="vase"),),
        "channels": (net, [x[:3]], t, [context], 18),
        "patches": (net, [x[..., :5]], t, [context], 18),
        "tokens": (net, [x], t, [context], 17),
        "timesteps": (net, [x], torch.zeros(1, 17), [context], 18),
        "text": (net, [x], t, [torch.randn(9, 16)], 18),
        "texts": (net, [x, x], t, [context], 18),
        "no image": (image, [x], t, [context], 18),
    }
    messages = {name: get_refusal(*call, kind=ValueError) for name, call in calls.items()}
    check_refusals(
        "networks", {name: f"{message.rstrip('.')}." for name, message in messages.items()}
    )


# Text cache


def test_the_least_recently_used_entry_is_forgotten() -> None:
    """The second branch's input is the same in every clip, the first one's is not."""
    cache, always, computed = InputCache[str](capacity=2), torch.zeros(1), []
    with torch.no_grad():
        for name in "abc":
            clip = torch.zeros(1)
            for tensor, label in ((clip, name), (always, "always")) * 2:  # two steps
                cache.get_or_compute([tensor], lambda label=label: computed.append(label) or label)
    assert computed == ["a", "always", "b", "c"]


def test_inputs_are_not_kept_alive() -> None:
    cache, tensor = InputCache[str](), torch.zeros(1)
    with torch.no_grad():
        for value, label, expected in ((0, "x", "x"), (0, "y", "x"), (1, "z", "z")):
            assert cache.get_or_compute([tensor, value], lambda label=label: label) == expected
        alive = weakref.ref(tensor)
        del tensor
        assert alive() is None and cache.get_or_compute([torch.zeros(1), 0], lambda: "w") == "w"


def test_nothing_is_cached_with_gradients_or_if_the_cache_is_off() -> None:
    for cache, has_gradients in ((InputCache[str](), True), (InputCache[str](False), False)):
        with torch.set_grad_enabled(has_gradients):
            results = [cache.get_or_compute([0], lambda label=label: label) for label in "ab"]
        assert results == ["a", "b"]


# Small operations

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


def compute_velocity(**ops: Any) -> Tensor:
    net, (x, context) = model(components=ModelComponents(ops=BlockOps(SmallOps(**ops)))), inputs()
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

    assert {field.name for field in fields(SmallOps)} == PLAIN.keys()
    assert torch.equal(compute_velocity(**{n: count_calls(n) for n in PLAIN}), compute_velocity())
    assert calls == {"rms_norm": 2 * 4, "layer_norm": 2, "modulated_norm": 2 * 2 + 1, "rope": 2 * 2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layer_has_the_bits_of_pytorch(dtype: torch.dtype) -> None:
    """Strided and empty inputs, no bias, and gradients."""
    generator = torch.Generator().manual_seed(0)
    for tokens, sizes in product((1, 300), ((48, 64), (1536, 96))):
        linear = Linear(*sizes).to(dtype)
        reference = torch.nn.Linear(*sizes).to(dtype)
        reference.load_state_dict(linear.state_dict())
        x = torch.randn(2, sizes[0], tokens, generator=generator).to(dtype).transpose(1, 2)
        for values in (x, x[0], x.contiguous(), x[:, :0]):
            with torch.no_grad():
                assert torch.equal(linear(values), reference(values))
        assert linear(x).requires_grad
        assert torch.equal(multiply(x, linear.weight, None), F.linear(x, linear.weight))


@pytest.mark.skipif(not has_onednn_bf16(), reason="this CPU has no bfloat16 products")
def test_fused_product_and_gelu() -> None:
    """It rounds once; an upcast weight gives the same bits; hooks such as a LoRA's are called."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 37, 48, generator=generator).bfloat16()
    linear = Linear(48, 64).bfloat16().requires_grad_(False)
    upcast = WeightOnlyLinear(linear.weight.data, Tensor.float, linear.bias, in_features=48)
    exact_linear = deepcopy(linear).double()
    plain_ops, ops = BlockOps(), BlockOps(fuses_gelu=True)

    def apply_exactly() -> Tensor:
        return F.gelu(exact_linear(x.double()), approximate="tanh")

    with torch.no_grad():
        exact, fused = apply_exactly(), ops.linear_gelu(linear, x)
        separate_error = (plain_ops.linear_gelu(linear, x) - exact).abs().mean()
        rounding = (exact.bfloat16() - exact).abs().mean()
        assert (fused - exact).abs().mean() < 1.02 * rounding < 0.9 * separate_error
        assert torch.equal(ops.linear_gelu(upcast, x), fused)
        linear.register_forward_hook(lambda _, args, y: y + 1)
        exact_linear.bias += 1
        assert (ops.linear_gelu(linear, x) - apply_exactly()).abs().max() < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_feed_forward_is_one_graph(dtype: torch.dtype) -> None:
    feed_forward = FeedForward(48, 64, BlockOps(fuses_gelu=True)).to(dtype)
    compiled = torch.compile(feed_forward, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 5, 48).to(dtype)
    with torch.no_grad():
        assert_close(compiled(x), feed_forward(x), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(("gated", "dtype"), [*product((True, False), DTYPES)])
def test_the_residual_stream_takes_any_dtype(dtype: torch.dtype, gated: bool, monkeypatch) -> None:
    """Several slices give the same bits as one operation, without a full float32 copy."""
    x, y, row = torch.randn(1, 64, 48), torch.randn(1, 64, 48).to(dtype), torch.randn(1, 1, 48)
    expected = torch.addcmul(x, y.float(), row) if gated else x + y
    monkeypatch.setattr("wan.modules.fused_ops.get_slice_numel", lambda _: 48 * 10)
    ops, result = BlockOps(), 0 if gated else 64 * 48 * 2
    add: Any = partial(ops.gated_add, x, y, row, [64])
    if not gated:
        add = partial(ops.add_modulated_norm, x, y, row, row, [64], 1e-6, torch.bfloat16)
    with torch.no_grad():  # also what PyTorch itself converts
        peak_bytes = measure_peak_bytes(add, torch.device("cpu"))
    assert torch.equal(x, expected)
    assert peak_bytes <= result + 3 * 48 * 10 * 4  # this slice and the next
