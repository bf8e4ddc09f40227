"""Quantized weights with the real mindiesd: int8 reference, exports and loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import mindiesd
import pytest
import torch
import torch_npu
from mindiesd.quantization.layer import FP8RotateQuantFA, W8A8OnlineQuantLinear, W8A8QuantLinear
from mindiesd.quantization.utils import create_online_hadamard_rot
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.npu_sim.oracles import make_random
from tests.refusals import check_refusals
from tools.quantize_dit import quantize_checkpoint
from wan import device
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import ModelSpec, load_rotations, make_dit_dtype_rule
from wan.checkpoint.quant.w8a8_export import QuantizedDit, read_quantized_dit
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.npu import linear
from wan.modules.model import WanModel
from wan.pipeline import weight_transforms
from wan.planner import operators
from wan.settings.errors import InputError
from wan.testing.random_checkpoint import make_checkpoint

Choose = Callable[[str], None]
Folders = dict[str, tuple[Path, Path]]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Task -> (tiny checkpoint, its export); that of t2v-1.3B has FP8 attention."""
    root = tmp_path_factory.mktemp("quantised")
    paths_by_task = {}
    for task, fa in (("t2v-A14B", None), ("t2v-1.3B", "fp8")):
        checkpoint = make_checkpoint(task, root / task)
        paths_by_task[task] = checkpoint, quantize_checkpoint(checkpoint, root / f"{task}-q", fa=fa)
    return paths_by_task


def read_export(pair: tuple[Path, Path], device_type: str = "npu") -> QuantizedDit:
    return read_quantized_dit(
        pair[1], inspect_checkpoint(pair[0]), device=device_type, fa_quant=None
    )


def make_stored_layer(
    rows: int, columns: int, smooth: bool, prefix: str = "layer"
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    deep = f"{prefix}.linear" if smooth else prefix
    tensors = {
        f"{deep}.weight": torch.randint(-127, 128, (rows, columns), generator=generator).char(),
        f"{deep}.weight_scale": torch.rand(rows, 1, generator=generator) / 300,
        f"{deep}.bias": torch.randn(rows, generator=generator),
    }
    if smooth:
        tensors[f"{prefix}.div.mul_scale"] = torch.rand(columns, generator=generator) + 0.5
    return tensors


def test_layer_has_the_bits_of_mindiesd(tmp_path: Path, chip: Choose, calls: list[Any]) -> None:
    description = tmp_path / "quant_model_description_w8a8_dynamic.json"
    weights = tmp_path / "quant_model_weight_w8a8_dynamic.safetensors"
    entries = {"model_quant_type": "W8A8_DYNAMIC", "layer.weight": "W8A8_DYNAMIC"}
    for dtype, smooth, use_nz in product(DTYPES, (False, True), (False, True)):
        tensors = make_stored_layer(72, 96, smooth)
        description.write_text(json.dumps(entries))
        save_file(tensors, weights)
        description.chmod(0o640)
        weights.chmod(0o640)
        network = nn.ModuleDict({"layer": nn.Linear(96, 72, device="meta")})
        mindiesd.quantize(network, quant_des_path=str(description), use_nz=use_nz, dtype=dtype)
        assert type(network["layer"]) is W8A8QuantLinear
        layer = W8A8Linear(*tensors.values(), dtype=dtype)
        x = make_random(2, 50, 96, dtype=dtype)
        x[0, 3] = 0
        calls.clear()
        expected = network["layer"](x)
        assert [call.name for call in calls] == ["npu_dynamic_quant", "npu_quant_matmul"]
        assert expected.dtype == dtype and torch.equal(layer(x), expected), (smooth, use_nz)


def test_tool_rounds_as_mindiesd_does_online(folders: Folders, chip: Choose) -> None:
    """mindiesd's online quantization gives the tool's int8 values and scales."""
    checkpoint, folder = folders["t2v-1.3B"]
    floats = load_file(checkpoint / "diffusion_pytorch_model.safetensors")
    tensors = load_file(folder / "quant_model_weight_w8a8_dynamic.safetensors")
    for name in ("blocks.0.self_attn.q", "blocks.1.ffn.2"):
        weight = floats[f"{name}.weight"].bfloat16()
        layer = nn.Linear(*weight.T.shape, bias=False)
        layer.weight.data = weight
        vendor_layer = W8A8OnlineQuantLinear(layer, dtype=torch.bfloat16)
        assert torch.equal(vendor_layer.weight.T, tensors[f"{name}.weight"])
        assert torch.equal(
            vendor_layer.weight_scale, tensors[f"{name}.weight_scale"][:, 0].bfloat16()
        )


def load_network(pair: tuple[Path, Path], target_device: device.Device, name: str) -> WanModel:
    """Load an expert with the quantized layers of a device."""
    files, export = inspect_checkpoint(pair[0]).experts[name], read_export(pair).experts[name]
    return ModelSpec("DiT", lambda: WanModel(**files.config), files.tensors, pair[0]).load(
        device=target_device.torch_device,
        dtype_of=make_dit_dtype_rule(torch.bfloat16, False),
        transform=weight_transforms.make_quantized_transform(export, target_device, torch.bfloat16),
    )


def meta_dit(config: dict[str, Any]) -> WanModel:
    with torch.device("meta"):
        return WanModel(**config)


def velocity(model: WanModel) -> Tensor:
    x = make_random(model.in_dim, 2, 8, 8, dtype=torch.float32)
    text = make_random(9, model.text_dim, seed=1, dtype=torch.float32)
    with torch.inference_mode():
        return model([x], torch.tensor([700.0]), [text], 32)[0]


@pytest.mark.parametrize(("task", "name"), [("t2v-A14B", "low_noise"), ("t2v-1.3B", "dit")])
def test_network_on_the_npu_has_the_bits_of_the_cpu(
    task: str, name: str, folders: Folders, chip: Choose, calls: list[Any]
) -> None:
    """mindiesd loads the quantized layers, `wan` the rest; FP8 entries change nothing."""
    model = load_network(folders[task], device.select_device("npu"), name)
    assert torch_npu.npu.config.allow_internal_format is False
    quantized_layers = {n: m for n, m in model.named_modules() if type(m) is W8A8QuantLinear}
    export = read_export(folders[task]).experts[name]
    assert quantized_layers.keys() == export.linears.keys() and len(quantized_layers) == 10 * len(
        model.blocks
    )
    assert [call.name for call in calls] == ["npu_format_cast"] * len(quantized_layers)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    calls.clear()
    out = velocity(model)
    assert len([call for call in calls if call.name == "npu_quant_matmul"]) == len(quantized_layers)
    assert torch.equal(
        out, velocity(load_network(folders[task], device.select_device("cpu"), name))
    )
    planned = meta_dit(inspect_checkpoint(folders[task][0]).experts[name].config)
    operators.insert_quantized_linears(planned, export.linear_bytes)
    for layer, module in quantized_layers.items():
        planned_layer, x = planned.get_submodule(layer), make_random(1, 7, module.weight.shape[0])
        actual, expected = planned_layer(x.to("meta")), module(x)
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), layer
        layer_bytes = [
            sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for m in (planned_layer, module)
        ]
        assert layer_bytes[1] <= layer_bytes[0] < 1.05 * layer_bytes[1], (
            layer
        )  # some stored numbers are rounded


def test_layers_are_moved_to_the_device(folders: Folders, chip: Choose) -> None:
    """mindiesd leaves them on the CPU; the test uses meta, since the simulated NPU is the CPU."""
    model = meta_dit(inspect_checkpoint(folders["t2v-1.3B"][0]).config)
    export = read_export(folders["t2v-1.3B"]).experts["dit"]
    quantize_kwargs = {"use_nz": True, "dtype": torch.bfloat16, "device": torch.device("meta")}
    linear.quantize_npu_linears(model, export.description, export.linears, **quantize_kwargs)
    for layer in map(model.get_submodule, export.linears):
        assert type(layer) is W8A8QuantLinear
        assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))


def test_fp8_entries_are_read_by_mindiesd(folders: Folders, chip: Choose) -> None:
    model = meta_dit(inspect_checkpoint(folders["t2v-1.3B"][0]).config)
    export = read_export(folders["t2v-1.3B"]).experts["dit"]
    mindiesd.quantize(model, quant_des_path=str(export.description), dtype=torch.bfloat16)
    rotations = load_rotations(read_export(folders["t2v-1.3B"]))
    online = create_online_hadamard_rot(8, dtype=torch.bfloat16)
    for index, block in enumerate(model.blocks):
        vendor_attention = block.self_attn.fa_quant
        assert type(vendor_attention) is FP8RotateQuantFA
        for rotation, matrix in zip(
            rotations["dit", index], (vendor_attention.q_rot, vendor_attention.k_rot), strict=True
        ):
            assert torch.equal(rotation, matrix) and torch.equal(rotation, online)


def test_file_modes(folders: Folders, chip: Choose) -> None:
    """File modes that mindiesd refuses are refused before, with the command to fix them."""
    export = read_export(folders["t2v-1.3B"]).experts["dit"]
    model = meta_dit(inspect_checkpoint(folders["t2v-1.3B"][0]).config)
    sentences = {}
    for path in (export.description, export.weights):
        for mode in (0o644, 0o660, 0o740):
            path.chmod(mode)
            with pytest.raises(PermissionError):
                mindiesd.quantize(model, quant_des_path=str(export.description))
            with pytest.raises(InputError) as refused:
                read_export(folders["t2v-1.3B"])
        sentences[path.suffix] = str(refused.value)
        path.chmod(0o640)
    check_refusals("npu: modes of files", sentences, hide=[r"quantised\d+"])
