"""A W8A8_MXFP8 export in msmodelslim's format on the simulated A5."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mindiesd.quantization.layer import W8A8MXFP8QuantLinear
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.npu_sim.latents import Way, make_arguments
from tests.npu_sim.oracles import make_random, relative_rms_error
from tests.pipelines import fail_on_demo
from wan import device
from wan.app import flag_parser
from wan.app.resolve import ResolveContext, resolve_video
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import ModelSpec, make_dit_dtype_rule, open_sources
from wan.checkpoint.quant.w8a8_export import read_quantized_dit
from wan.modules.model import WanModel
from wan.pipeline import build, weight_transforms
from wan.settings.errors import InputError

GROUP, LARGEST = 32, 8  # values under one power of two; the exponent of E4M3's largest value


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 values and the exponents of their groups (OCP MX 1.0, section 6.3)."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    exponents = torch.where(largest > 0, largest.log2().floor() - LARGEST, -127.0)
    payload = (groups / 2**exponents).clamp(-448, 448).to(torch.float8_e4m3fn)
    return payload.flatten(-2)[..., : x.shape[-1]], exponents[..., 0]


def round_to_mxfp8(x: Tensor) -> Tensor:
    payload, exponents = quantize_mxfp8(x)
    return payload.float() * (2**exponents).repeat_interleave(GROUP, -1)[..., : x.shape[-1]]


def write_export(checkpoint: Path, out: Path) -> Path:
    """Write an export of all linear layers of the blocks of both experts."""
    for expert, dit in inspect_checkpoint(checkpoint).experts.items():
        folder = out / f"{expert}_model"
        folder.mkdir(parents=True)
        tensors: dict[str, Tensor] = {}
        sources = open_sources(dit.tensors)
        entries = {"model_quant_type": "W8A8_MXFP8", **dict.fromkeys(dit.tensors, "FLOAT")}
        for name, info in dit.tensors.items():
            if len(info.shape) != 2 or not name.startswith("blocks."):
                continue
            layer = name.removesuffix(".weight")
            payload, exponents = quantize_mxfp8(sources[name].read(slice(None)))
            tensors[name] = payload
            tensors[f"{name}_scale"] = (exponents + 127).to(torch.uint8)
            tensors[f"{layer}.bias"] = sources[f"{layer}.bias"].read(slice(None)).float()
            entries |= dict.fromkeys((name, f"{name}_scale", f"{layer}.bias"), "W8A8_MXFP8")
        save_file(tensors, folder / "quant_model_weight_w8a8_mxfp8.safetensors")
        description = folder / "quant_model_description_w8a8_mxfp8.json"
        description.write_text(json.dumps(entries))
        for path in folder.iterdir():
            path.chmod(0o640)
    return out


class Reference(nn.Module):
    """A reference of the layer: weights and inputs are rounded in groups, sums are float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert linear.bias is not None
        self.weight, self.bias = round_to_mxfp8(linear.weight), linear.bias.float()

    def forward(self, x: Tensor) -> Tensor:
        return (round_to_mxfp8(x.bfloat16()) @ self.weight.T + self.bias).bfloat16()


def test_networks_are_those_of_the_format(
    rig: Path, tmp_path: Path, chip: Callable[[str], None]
) -> None:
    chip("A5")
    checkpoint, npu_device = inspect_checkpoint(rig), device.select_device("npu")
    quantized_dit = read_quantized_dit(
        write_export(rig, tmp_path / "q"), checkpoint, device="npu", fa_quant=None
    )
    assert quantized_dit.algorithms == ("W8A8_MXFP8",)
    for expert, dit in checkpoint.experts.items():
        model_spec = ModelSpec("DiT", lambda dit=dit: WanModel(**dit.config), dit.tensors, rig)
        npu = model_spec.load(
            device=npu_device.torch_device,
            dtype_of=make_dit_dtype_rule(torch.bfloat16, False),
            transform=weight_transforms.make_quantized_transform(
                quantized_dit.experts[expert], npu_device, torch.bfloat16
            ),
        )
        plain = model_spec.load(
            device=torch.device("cpu"), dtype_of=make_dit_dtype_rule(torch.bfloat16, False)
        )
        # Values are those of the file; the network's own parameters are rounded to bfloat16.
        floats = open_sources(dit.tensors)
        layers = {n for n, module in npu.named_modules() if type(module) is W8A8MXFP8QuantLinear}
        assert layers == quantized_dit.experts[expert].linears.keys() != set()
        for name in layers:
            linear = nn.Linear(1, 1)
            for part in ("weight", "bias"):
                value = floats[f"{name}.{part}"].read(slice(None)).float()
                setattr(linear, part, nn.Parameter(value.clone(), requires_grad=False))
            plain.set_submodule(name, Reference(linear))
        x = make_random(npu.in_dim, 2, 8, 8, dtype=torch.float32)
        text = make_random(9, npu.text_dim, seed=1, dtype=torch.float32)
        with torch.inference_mode():
            actual, expected = (m([x], torch.tensor([700.0]), [text], 32)[0] for m in (npu, plain))
        assert torch.equal(actual, expected)


def make_latents(argv: list[str]) -> Tensor:
    run_settings = resolve_video(
        ResolveContext(make_demo=fail_on_demo), flag_parser.parse_flags(argv)
    )
    return build.build_pipeline(run_settings.setup, device.select_device("npu")).generate_latents(
        run_settings.params
    )


def test_a_whole_run(rig: Path, tmp_path: Path, chip: Callable[[str], None]) -> None:
    """Latents are close to the float weights'; chips without the format refuse it."""
    export_flags = ["--quant_dit_path", str(write_export(rig, tmp_path / "q"))]
    chip("A5")
    actual, floats = (
        make_latents(make_arguments(rig, Way("A5", extra_flags)))
        for extra_flags in (tuple(export_flags), ())
    )
    assert 0 < relative_rms_error(actual, floats) < 0.1
    chip("A2")
    with pytest.raises(InputError, match="W8A8_MXFP8 weights needs an A5"):
        make_latents([*make_arguments(rig, Way("A2", ())), *export_flags])
