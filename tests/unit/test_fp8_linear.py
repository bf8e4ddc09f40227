"""Products of FP8 weights in FP8, against sums in float64."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.pipelines import build_quick_pipeline, generate_quick_latents
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_marks import encode_quant_metadata, quantise_state
from wan.checkpoint.formats.tensor_info import FP8
from wan.checkpoint.quant.dequantise import convert_e4m3
from wan.kernels.compiled_dequantise import CompiledDequantizer
from wan.kernels.weight_only_linear import FP8Linear, WeightOnlyLinear, check_fp8_capability

E4M3 = torch.float8_e4m3fn


def layer(rows: int, columns: int, scale: Tensor | None, lora: int = 0) -> FP8Linear:
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(rows, columns, generator=generator) * 50).to(E4M3)
    bias = nn.Parameter(torch.randn(rows, generator=generator), requires_grad=False)
    lora_factors = None
    if lora:
        shapes = {"lora_up": (rows, lora), "lora_down": (lora, columns)}
        lora_factors = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    arguments = (weight, lambda x: x.float(), bias)
    return FP8Linear(*arguments, in_features=columns, scale=scale, lora=lora_factors)  # type: ignore[arg-type]


def compute_expected(linear: FP8Linear, x: Tensor) -> Tensor:
    """The product by its definition, in float64, token by token."""
    weight = linear.weight.double()
    if linear.weight_scale is not None:
        weight = weight * linear.weight_scale.double().reshape(-1, 1)
    token_outputs = []
    for token in x.reshape(-1, x.shape[-1]):
        scale = token.float().abs().max() / 448
        scale = scale if scale > 0 else torch.tensor(1.0)
        rounded = (token.float() / scale).to(E4M3).double() * scale.double()
        token_outputs.append(weight @ rounded + linear.bias.double())
    out = torch.stack(token_outputs).view(*x.shape[:-1], -1)
    if linear.lora_up is not None and linear.lora_down is not None:
        out += x.double() @ linear.lora_down.double().T @ linear.lora_up.double().T
    return out


@pytest.mark.parametrize("sliced", [False, True])
def test_a_layer(sliced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a scale, with one scale, and with one per row; each also with a LoRA.

    Tokens and rows of the weight are multiplied in slices, the last ones of fewer.
    """
    if sliced:
        module = "wan.kernels.weight_only_linear"
        monkeypatch.setattr(f"{module}.get_int8_slice_numel", lambda _: 72 * 10)
        monkeypatch.setattr(f"{module}._SLICE_ELEMENTS", 40 * 11)
    x = torch.randn(2, 33, 40, generator=torch.Generator().manual_seed(1))
    x[0, 3], x[1, 5] = 0, x[1, 5] * 1e4
    for scale, lora in product((None, torch.tensor([0.013]), torch.rand(72, 1) + 0.1), (0, 3)):
        linear = layer(72, 40, scale, lora)
        output, reference = linear(x), compute_expected(linear, x)
        assert output.dtype == torch.float32 and output.shape == (2, 33, 72)
        assert (output - reference).abs().max() <= 1e-6 * reference.abs().max(), (scale, lora)
        assert linear(x[:, :0]).shape == (2, 0, 72)


def test_bfloat16_is_rounded_once() -> None:
    linear = layer(72, 40, torch.tensor([0.013]))
    x = torch.randn(33, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    output = linear(x)
    assert output.dtype == torch.bfloat16
    assert (output.double() - compute_expected(linear, x)).abs().max() <= 2**-8 * output.abs().max()


def test_several_kronecker_products_are_added() -> None:
    """Those of two LoKrs and a LoRA, to a weight that stays FP8."""
    weight = layer(24, 40, None).weight
    factors = {"lora_up": torch.randn(24, 3), "lora_down": torch.randn(3, 40)}
    factors |= {"lora_left_0": torch.randn(4, 5), "lora_right_0": torch.randn(6, 8)}
    factors |= {"lora_left_1": torch.randn(3, 8), "lora_right_1": torch.randn(8, 5)}
    linear = WeightOnlyLinear(weight, Tensor.float, None, in_features=40, lora=factors)
    expected = weight.float() + factors["lora_up"] @ factors["lora_down"]
    for i in range(2):
        expected += torch.kron(factors[f"lora_left_{i}"], factors[f"lora_right_{i}"])
    torch.testing.assert_close(linear(torch.eye(40)).T, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_a_slice_have_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is upcast seven rows at a time: one scale, one per row, and one per block."""
    monkeypatch.setattr("wan.kernels.weight_only_linear.get_slice_numel", lambda _: 40 * 7)
    weight = (torch.randn(18, 40, generator=torch.Generator().manual_seed(1)) * 50).to(E4M3)
    of_rows, of_blocks = torch.rand(18, 1), torch.rand(5, 3) + 0.5
    rows, columns = torch.arange(18) // 4, torch.arange(40) // 16
    for scale, block, factors in (
        (None, None, torch.ones(1, 1)),
        (torch.tensor([0.3]), None, torch.tensor([0.3])),
        (of_rows, None, of_rows),
        (of_blocks, (4, 16), of_blocks[rows][:, columns]),
    ):
        linear = WeightOnlyLinear(
            *(weight, Tensor.float, None), in_features=40, scale=scale, scale_block=block
        )
        torch.testing.assert_close(linear(torch.eye(40)).T, weight.float() * factors)


def test_a_run(tiny: Any, tmp_path: Path, one_thread: None) -> None:
    """Close to the run with upcast weights; a layer marked for full precision stays upcast."""
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "t2v-1.3B"))
    path = folder / "diffusion_pytorch_model.safetensors"
    stored, _ = quantise_state(load_file(path), "float8")
    exact = "blocks.0.ffn.0"
    comfy_quant = encode_quant_metadata(format="float8_e4m3fn", full_precision_matrix_mult=True)
    save_file(stored | {f"{exact}.comfy_quant": comfy_quant}, path)
    flags = ["--sample_steps", "1", "--sample_guide_scale", "1", "--precision", "fp32"]
    flags += ["--stored_weights"]
    run, pipeline = build_quick_pipeline(folder, *flags, "multiply", "--offload_model", "false")
    latents = pipeline.generate_latents(run.params)
    upcast_latents = generate_quick_latents(folder, *flags, "keep")
    assert 1e-4 < (latents - upcast_latents).norm() / upcast_latents.norm() < 0.1
    streamed = generate_quick_latents(folder, *flags, "multiply", "--offload_model", "block")
    assert torch.equal(streamed, latents)
    network = pipeline.experts.get("dit")
    kinds = {name: type(module) for name, module in network.named_modules()}
    assert kinds.pop(exact) is WeightOnlyLinear
    assert [*kinds.values()].count(FP8Linear) == 10 * len(network.blocks) - 1


def test_weights_and_devices_that_are_refused(tiny: Any) -> None:
    flags = "--task", "t2v-1.3B", "--stored_weights", "multiply"
    messages = {
        "other weights": get_refusal(build_quick_pipeline, tiny("t2v-1.3B"), *flags),
        "an NPU": get_refusal(build_quick_pipeline, tiny("t2v-1.3B"), *flags, "--device", "npu"),
        "an older GPU": get_refusal(check_fp8_capability, (8, 6)),
    }
    check_refusals("fp8 weights", messages)
    check_fp8_capability((8, 9))


def test_all_codes_of_e4m3() -> None:
    """With and without NaN, in a slice of rows, and none at all."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(E4M3)
    for values in (codes, codes[1:7], codes[8:15, :15], codes[:0]):
        expected = values.double().float().view(torch.int32)
        assert torch.equal(convert_e4m3(values).view(torch.int32), expected)


def test_compiled_values_of_all_codes() -> None:
    """With scales for which values are subnormal, infinite or NaN, and with factors per row."""
    codes = torch.randint(256, (45 * 300,), generator=torch.Generator().manual_seed(0)).byte()
    codes[:256] = torch.arange(256)
    scales = (None, 1.0, 0.0213, -3.7, 1e-38, 1e-40, 3e38, float("nan"))
    dequantizer = CompiledDequantizer(min_values=0)
    for dtype, stored_dtype in zip(FP8, (E4M3, torch.float8_e5m2), strict=True):
        for columns, scale in product((300, 14), scales):
            weight = codes.view(stored_dtype).view(45, 300)[:, :columns].contiguous()
            factor = None if scale is None else torch.tensor([scale])
            expected = weight.double().float() * (1 if factor is None else factor)
            values = torch.empty(expected.shape).bfloat16()
            with torch.inference_mode():
                assert dequantizer.fill(dtype, weight, factor, values)
            expected, is_nan = expected.bfloat16(), expected.isnan()
            assert torch.equal(values.isnan(), is_nan), (dtype, scale)
            same_bits = values.view(torch.int16) == expected.view(torch.int16)
            assert torch.all(same_bits | is_nan), (dtype, scale)
        for some in (codes[:255].view(stored_dtype), codes[1:257].view(stored_dtype)):
            assert not dequantizer.fill(dtype, some, None, torch.empty(some.shape).bfloat16())
        assert not dequantizer.fill(dtype, weight, torch.ones(45, 1), values)
