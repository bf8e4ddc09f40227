"""Quantised safetensors files of ComfyUI and ModelOpt: their values, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import slow
from tests.pipelines import build_quick_pipeline, generate_quick_latents
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.formats.safetensors_header import read_safetensors_header
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.names.keymaps import rename_t5_to_transformers
from wan.checkpoint.quant.metadata import collect_network_tensors
from wan.modules import t5
from wan.settings.errors import InputError

Stored = tuple[dict[str, Tensor], Tensor]
"""A layer's stored tensors by name suffix, and the dequantised weight."""
FLAGS = ("--sample_steps", "2")


def encode_quant_metadata(**fields: Any) -> Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def float8(weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Stored:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(dtype)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def int8(weight: Tensor, by_row: bool = False) -> Stored:
    scale = (weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def float8_blocks(
    weight: Tensor, block: tuple[int, int], name: str = "weight_scale_inv", **options: Any
) -> Stored:
    """Quantises with a scale for each block, of which the last ones may be smaller."""
    rows, columns = (torch.arange(n) // size for n, size in zip(weight.shape, block, strict=True))
    scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i, j in product(*map(range, scale.shape)):
        scale[i, j] = weight[rows == i][:, columns == j].abs().max() / 448
    scale = scale.to(options.get("scale_dtype", torch.float32))
    by_value = scale.float()[rows][:, columns]
    values = (weight / by_value).to(options.get("dtype", torch.float8_e4m3fn))
    stored = scale.unsqueeze(-1) if options.get("has_third_axis") else scale
    return {"weight": values, name: stored}, values.float() * by_value


def nvfp4(weight: Tensor) -> Stored:
    """Quantises to NVFP4, with the block scales in cuBLAS's layout, element by element."""
    rows, columns = weight.shape
    tensor_scale = weight.abs().max() / (448 * 6)
    blocks = weight.view(rows, -1, 16)
    block_scales = (blocks.abs().amax(2) / 6 / tensor_scale).to(torch.float8_e4m3fn)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = blocks / (tensor_scale * block_scales.float()).unsqueeze(-1)
    bits = (scaled.abs().unsqueeze(-1) - levels).abs().argmin(-1)
    dequantised = levels[bits] * torch.where(scaled < 0, -1.0, 1.0)
    dequantised = (dequantised * (tensor_scale * block_scales.float()).unsqueeze(-1)).view(
        rows, columns
    )
    bits = (bits + 8 * (scaled < 0)).view(rows, columns).to(torch.uint8)
    tile_rows, tile_columns = -(-rows // 128), -(-block_scales.shape[1] // 4)
    tiled = torch.zeros(tile_rows * tile_columns * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(block_scales.shape[1]):
            tile = row // 128 * tile_columns + column // 4
            offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            tiled[offset] = block_scales.view(torch.uint8)[row, column]
    scales = tiled.view(torch.float8_e4m3fn).view(128 * tile_rows, 4 * tile_columns)
    packed = bits[:, 0::2] << 4 | bits[:, 1::2]
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": tensor_scale}, dequantised


FORMATS: dict[str, tuple[str, Callable[[Tensor], Stored]]] = {
    "float8": ("float8_e4m3fn", float8),
    "float8 e5m2": ("float8_e5m2", partial(float8, dtype=torch.float8_e5m2)),
    "int8": ("int8_tensorwise", int8),
    "int8 by row": ("int8_tensorwise", lambda weight: int8(weight, by_row=True)),
    "nvfp4": ("nvfp4", nvfp4),
    "row blocks": ("float8_e4m3fn", partial(float8_blocks, block=(1, 16), has_third_axis=True)),
    "row blocks of 24, two axes": (
        "float8_e4m3fn",
        partial(float8_blocks, block=(1, 24), name="scale_weight", scale_dtype=torch.bfloat16),
    ),
    "row blocks of 32, e5m2": (
        "float8_e5m2",
        partial(float8_blocks, block=(1, 32), dtype=torch.float8_e5m2, scale_dtype=torch.float16),
    ),
    "blocks of 128": ("float8_e4m3fn", partial(float8_blocks, block=(128, 128))),
    "blocks of 32": ("float8_e4m3fn", partial(float8_blocks, block=(32, 32))),
}


def quantise_state(
    state: Mapping[str, Tensor], form: str, prefix: str = "", **fields: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the tensors of a file with quantised blocks, and the dequantised tensors."""
    name, quantise = FORMATS[form]
    stored, dequantised = {}, {}
    for key, tensor in state.items():
        layer = f"{prefix}{key.removesuffix('.weight')}"
        if not ("blocks." in key or "block." in key) or tensor.dim() != 2 or layer == prefix + key:
            stored[prefix + key] = dequantised[key] = tensor.float()
            continue
        parts, dequantised[key] = quantise(tensor.float())
        stored |= {f"{layer}.{part}": x.contiguous() for part, x in parts.items()}
        stored[f"{layer}.comfy_quant"] = encode_quant_metadata(format=name, **fields)
        stored[f"{layer}.input_scale"] = torch.ones(())
    return stored, dequantised


def write_quantised_checkpoint(source: Path, out: Path, form: str = "float8") -> Path:
    """Copies a checkpoint of one network, with the weights of its blocks quantised."""
    file = Path(shutil.copytree(source, out)) / "diffusion_pytorch_model.safetensors"
    save_file(quantise_state(load_file(file), form)[0], file)
    return out


def save_and_collect(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> dict[str, Any]:
    """Saves the tensors and returns the network tensors that the loader finds in the file."""
    save_file(dict(tensors), path, metadata)
    return collect_network_tensors(read_safetensors_header(path), str)


def test_values(tmp_path: Path) -> None:
    for form, shape in product(FORMATS, ((96, 192), (256, 64), (300, 48))):
        if ("24" in form and shape[1] % 24) or ("32" in form and shape[1] % 32):
            continue  # blocks of a row fill it
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        stored, dequantised = quantise_state({"blocks.0.q.weight": weight}, form)
        tensors = save_and_collect(tmp_path / "x.safetensors", stored)
        assert tensors.keys() == dequantised.keys()
        source = open_sources(tensors)["blocks.0.q.weight"]
        assert source.shape == shape
        for rows in (slice(None), slice(5, 6), slice(40, 96)):
            values = source.read(rows)
            assert torch.equal(values, dequantised["blocks.0.q.weight"][rows]), (form, shape, rows)


@pytest.mark.parametrize("form", ["row blocks of 32, e5m2", slow("nvfp4")])
def test_a_run_is_that_of_the_values(
    form: str, tiny: Any, tmp_path: Path, one_thread: None
) -> None:
    source, file = tiny("t2v-1.3B"), "diffusion_pytorch_model.safetensors"
    quantised, plain = (Path(shutil.copytree(source, tmp_path / n / "t2v-1.3B")) for n in "ab")
    fields = {"full_precision_matrix_mult": True}
    stored, dequantised = quantise_state(
        load_file(source / file), form, "model.diffusion_model.", **fields
    )
    (quantised / file).unlink()
    save_file(stored, quantised / f"wan2.1_t2v_1.3B_{form.replace(' ', '_')}.safetensors")
    save_file(dequantised, plain / file)
    expected = generate_quick_latents(plain, *FLAGS)
    assert torch.equal(generate_quick_latents(quantised, *FLAGS), expected)
    is_fp8 = FORMATS[form][0].startswith("float8")
    way = ("--stored_weights", "keep") if is_fp8 else ("--offload_model", "block")
    assert torch.equal(generate_quick_latents(quantised, *FLAGS, *way), expected)


@pytest.mark.parametrize("metadata_prefix", ["", "model.diffusion_model."])
def test_formats_in_the_metadata_of_a_file_with_a_prefix(
    metadata_prefix: str, tiny: Any, tmp_path: Path
) -> None:
    """Layers have their names with or without the prefix of the tensors."""
    state = load_file(tiny("t2v-1.3B") / "diffusion_pytorch_model.safetensors")
    stored, dequantised = quantise_state(state, "int8", "model.diffusion_model.")
    marked = [name for name in stored if name.endswith(".comfy_quant")]
    layers = {
        metadata_prefix
        + name.removeprefix("model.diffusion_model.").removesuffix(".comfy_quant"): {
            "format": "int8_tensorwise"
        }
        for name in marked
    }
    stored = {name: x for name, x in stored.items() if name not in marked}
    path, metadata = tmp_path / "x.safetensors", json.dumps({"layers": layers})
    save_file(stored, path, {"_quantization_metadata": metadata})
    tensors = collect_network_tensors(read_safetensors_header(path), str, "dit")
    sources = open_sources(tensors)
    assert sources.keys() == dequantised.keys()
    assert all(torch.equal(sources[n].read(slice(None)), x) for n, x in dequantised.items())


def test_products_in_fp8_need_e4m3(tiny: Any, tmp_path: Path) -> None:
    folder = write_quantised_checkpoint(tiny("t2v-1.3B"), tmp_path / "x", "float8 e5m2")
    flags = "--task", "t2v-1.3B", "--stored_weights", "multiply"
    message = get_refusal(build_quick_pipeline, folder, *flags)
    check_refusals("marks: E5M2", {"multiply": message})


@pytest.mark.slow
def test_a_folder_of_modelopt(tiny: Any, tmp_path: Path, one_thread: None) -> None:
    """The folder has diffusers' layout, scales of weights and inputs, and quantization_config."""
    source = tiny("t2v-1.3B", "diffusers")
    quantised, plain = (Path(shutil.copytree(source, tmp_path / n / "t2v-1.3B")) for n in "ab")
    file = Path("transformer", "diffusion_pytorch_model.safetensors")
    stored, dequantised = quantise_state(load_file(source / file), "float8")
    stored = {name: x for name, x in stored.items() if not name.endswith("comfy_quant")}
    save_file(stored, quantised / file)
    save_file(dequantised, plain / file)
    path = quantised / "transformer" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    path.write_text(json.dumps(config))
    for mode in ("keep", "upcast"):
        result = generate_quick_latents(quantised, *FLAGS, "--stored_weights", mode)
        assert torch.equal(result, generate_quick_latents(plain, *FLAGS))


def test_the_text_encoder_in_one_file(tiny: Any, tmp_path: Path) -> None:
    """The file has transformers' tensor names, FP8 weights with scales, and the tokenizer."""
    state = torch.load(tiny("t2v-1.3B") / "models_t5_umt5-xxl-enc-bf16.pth")
    stored, dequantised = quantise_state(
        {rename_t5_to_transformers(k): x for k, x in state.items()}, "float8"
    )
    stored = {n.replace("weight_scale", "scale_weight"): x for n, x in stored.items()}
    stored = {name: x for name, x in stored.items() if "comfy_quant" not in name}
    stored["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    stored["spiece_model"] = torch.zeros(100, dtype=torch.uint8)
    path = tmp_path / "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    save_file(stored, path)
    dtypes = t5.choose_text_encoder_dtypes(torch.float32)
    network = t5.read_text_encoder_spec(path).load(device=torch.device("cpu"), dtype_of=dtypes)
    parameters = dict(network.named_parameters())
    assert parameters.keys() == dequantised.keys()
    assert all(torch.equal(parameters[name].float(), x) for name, x in dequantised.items())


def set_quant_metadata(stored: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({"blocks.0.q.comfy_quant": stored})


WRONG: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "unknown format": set_quant_metadata(encode_quant_metadata(format="mxfp8")),
    "no format": set_quant_metadata(encode_quant_metadata()),
    "rotated": set_quant_metadata(encode_quant_metadata(format="int8_tensorwise", convrot=True)),
    "not JSON": set_quant_metadata(torch.zeros(9, dtype=torch.uint8)),
    "too long": set_quant_metadata(torch.full((1 << 20,), 32).byte()),
    "another dtype": set_quant_metadata(encode_quant_metadata(format="int8_tensorwise")),
    "no scale": lambda t: t.pop("blocks.0.q.weight_scale"),
    "no second scale": lambda t: t.pop("blocks.0.q.weight_scale_2"),
    "a small scale": lambda t: t.update(
        {"blocks.0.q.weight_scale": t["blocks.0.q.weight_scale"][:, :4].clone()}
    ),
    "a second scale for each row": lambda t: t.update(
        {"blocks.0.q.weight_scale_2": t["blocks.0.q.weight_scale_2"].repeat(64, 1)}
    ),
    "no mark": lambda t: t.pop("blocks.0.q.comfy_quant"),
}


def test_refused_files(tmp_path: Path) -> None:
    path, messages = tmp_path / "x.safetensors", {}
    for name, change in WRONG.items():
        tensors, _ = quantise_state({"blocks.0.q.weight": torch.randn(64, 96)}, "nvfp4")
        change(tensors)
        messages[name] = get_refusal(save_and_collect, path, tensors)
    for form, dtype in (
        ("int8_tensorwise", torch.int8),
        ("nvfp4", torch.uint8),
        ("float8_e4m3fn", torch.float8_e4m3fn),
    ):
        scalar = {
            "a.weight": torch.zeros(()).to(dtype),
            "a.comfy_quant": encode_quant_metadata(format=form),
        }
        scalar["a.weight_scale"] = torch.ones(7)
        messages[f"a number as {form}"] = get_refusal(save_and_collect, path, scalar)
    for form in ("float8", "int8"):
        tensors, _ = quantise_state({"blocks.0.q.weight": torch.randn(64, 96)}, form)
        tensors["blocks.0.q.weight_scale"] = torch.ones(1, 96)
        messages[f"{form} with a scale for each column"] = get_refusal(
            save_and_collect, path, tensors
        )
    check_refusals("marks", messages)


def test_scales_that_fit_no_blocks_are_refused(tmp_path: Path) -> None:
    """Also those of which nobody can tell whether they are of rows or of columns."""
    path, messages = tmp_path / "x.safetensors", {}
    for shape, scale_shape in (
        ((96, 96), (1, 96)),
        ((96, 96), (96,) * 3),
        ((96, 96), (2, 3, 4)),
        ((96, 100), (5, 7)),
        ((96, 100), (95, 1)),
        ((96, 96), (96, 0)),
    ):
        tensors = {"a.weight": torch.zeros(shape).to(torch.float8_e4m3fn)}
        tensors["a.scale_weight"] = torch.ones(scale_shape)
        messages[f"{shape} {scale_shape}"] = get_refusal(save_and_collect, path, tensors)
    check_refusals("marks: shapes of scales", messages)


def test_scales_of_a_convolution_and_of_slices(tmp_path: Path) -> None:
    """A slice that begins within a block, as a CLIP's, and a weight of five axes."""
    for stored, weight in (
        float8_blocks(torch.randn(24, 40), (16, 16)),
        int8(torch.randn(24, 40), by_row=True),
    ):
        tensors = {f"a.{name}": x for name, x in stored.items()}
        if stored["weight"].dtype == torch.int8:
            tensors["a.comfy_quant"] = encode_quant_metadata(format="int8_tensorwise")
        info = save_and_collect(tmp_path / "x.safetensors", tensors)["a.weight"]
        source = open_sources({"x": replace(info, shape=(8, 40), first_row=12)})["x"]
        assert torch.equal(source.read(slice(2, 7)), weight[14:19])
    values = torch.randn(8, 4, 1, 2, 2).to(torch.float8_e4m3fn)
    scale = torch.rand(8, 1)
    tensors = {"a.weight": values, "a.weight_scale": scale}
    source = open_sources(save_and_collect(tmp_path / "x.safetensors", tensors))["a.weight"]
    expected = values.float() * scale.view(8, 1, 1, 1, 1)
    assert torch.equal(source.read(slice(3, 8)), expected[3:])


JSON: list[Any] = [None, True, 5, 1.5, "", "x", [], [1], {}, {"x": []}]


def test_marks_of_any_value(tmp_path: Path) -> None:
    """Any JSON value in the tensor or the metadata is accepted or refused in one sentence."""
    path, failures = tmp_path / "x.safetensors", {}
    plain = {"a.weight": torch.zeros(8, 8, dtype=torch.int8)}
    for value in JSON:
        encoded = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        files: dict[str, tuple[dict[str, Tensor], Any]] = {
            "format": ({**plain, "a.comfy_quant": encode_quant_metadata(format=value)}, None),
            "mark": ({**plain, "a.comfy_quant": encoded}, None),
            "metadata": (plain, value),
            "layers": (plain, {"layers": value}),
            "layer": (plain, {"layers": {"a": value}}),
            "format of a layer": (plain, {"layers": {"a": {"format": value}}}),
        }
        for case, (tensors, metadata) in files.items():
            header_fields = {"_quantization_metadata": json.dumps(metadata)}
            sentence = get_refusal(
                lambda t=tensors, m=header_fields: save_and_collect(path, t, **m)
            )
            if not sentence or "\n" in sentence:
                failures[case, str(value)] = sentence
    assert not failures


def test_int8_without_a_mark_is_refused(tiny: Any, tmp_path: Path) -> None:
    """Such a file may be rotated, or be an export for `--quant_dit_path`."""
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "t2v-1.3B"))
    file = folder / "diffusion_pytorch_model.safetensors"
    stored, _ = quantise_state(load_file(file), "int8")
    save_file({name: x for name, x in stored.items() if "comfy_quant" not in name}, file)
    with pytest.raises(InputError, match="is stored as I8"):
        inspect_checkpoint(folder)
