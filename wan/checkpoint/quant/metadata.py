"""Reads the scales and format metadata of quantized weights in safetensors files.

- ComfyUI writes a layer's format as JSON in the bytes of a tensor `X.comfy_quant`, or all formats
  in the file's metadata (`_quantization_metadata`; see its QUANTIZATION.md). Older files have only
  scales (`X.scale_weight`), or FP8 values without scales.
- NVIDIA's ModelOpt writes only scales (`X.weight_scale`), others the scales of blocks
  (`X.weight_scale_inv`, by which values are multiplied, too).

Static scales of a layer's input are ignored: FP8 matrix products use dynamic scales per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint.formats.safetensors_header import read_safetensors_metadata
from wan.checkpoint.formats.tensor_info import (
    E4M3,
    E5M2,
    FLOATS,
    FP8,
    GET_READ_FORMAT,
    GGUF,
    NVFP4,
    SAFETENSORS_SUFFIXES,
    TensorInfo,
)
from wan.checkpoint.names.network_names import (
    add_once,
    check_format,
    has_scaled_int8,
    select_network,
)
from wan.settings.errors import InputError
from wan.settings.json_text import parse_json
from wan.settings.values import format_value
from wan.utils.files import open_regular_file

_FORMAT_DTYPES = {
    "float8_e4m3fn": E4M3,
    "float8_e5m2": E5M2,
    "int8_tensorwise": "I8",
    "nvfp4": "U8",
}
"""ComfyUI's format -> the dtype of the stored tensor."""
_COMFY_QUANT_SUFFIX, _METADATA_KEY = ".comfy_quant", "_quantization_metadata"
_MAX_METADATA_BYTES = 1 << 12  # bytes of a layer's format
_SCALE_SUFFIXES = (".scale_weight", ".weight_scale", ".weight_scale_inv")
_IGNORED_SUFFIXES = (
    "scaled_fp8",
    ".scale_input",
    ".input_scale",
    ".output_scale",
    _COMFY_QUANT_SUFFIX,
    "spiece_model",
)
_GET_ANOTHER = "get another file"


def collect_network_tensors(
    tensors: Mapping[str, TensorInfo],
    rename: Callable[[str], str],
    component: str | None = None,
    expert: str | None = None,
) -> dict[str, TensorInfo]:
    """Attaches scales to quantized weights and renames the tensors of one network.

    Args:
        tensors: By stored name.
        rename: Maps a stored name without prefix to the network's name.
        component: A key of `COMPONENTS`; None: all tensors by their stored names.
        expert: One of the two DiTs of a file (`NetworkNames.expert`).

    Raises:
        InputError: A tensor has an unsupported format, or two tensors get the same name.
    """
    check_format(tensors)
    renamed: dict[str, TensorInfo] = {}
    tensors = tensors if component is None else select_network(tensors, component, expert)
    for name, info in _attach_scales(tensors).items():
        is_scaled_int8 = info.dtype == "I8" and info.scale is not None
        if info.dtype not in (*FLOATS, *FP8, *GGUF, NVFP4) and not is_scaled_int8:
            why = f"is stored as {info.dtype}, which is not supported"
            raise InputError(f"{info.file}: {name}", None, why, GET_READ_FORMAT)
        add_once(renamed, rename(name), info)
    return renamed


def _attach_scales(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Attaches scales to their weights, and drops ignored tensors."""
    infos = {name: i for name, i in tensors.items() if not name.endswith(_IGNORED_SUFFIXES)}
    layer_formats = _read_layer_formats(tensors)
    for layer, layer_format in layer_formats.items():
        weight = infos.get(f"{layer}.weight")
        if weight is None:
            continue  # the file's metadata may name layers differently
        _check_layer_format(layer, weight, layer_format)
        if layer_format["format"] == "nvfp4":
            infos[f"{layer}.weight"] = _attach_nvfp4_scales(infos, layer, weight)
        elif layer_format.get("full_precision_matrix_mult"):
            infos[f"{layer}.weight"] = replace(weight, full_precision=True)
    for name in [name for name in infos if name.endswith(_SCALE_SUFFIXES)]:
        layer = name.rpartition(".")[0]
        weight = infos.get(f"{layer}.weight")
        if weight is None or weight.scale is not None:
            continue  # the caller refuses the unknown tensor
        is_int8 = weight.dtype == "I8" and (layer in layer_formats or has_scaled_int8(weight))
        if is_int8 or weight.dtype in FP8:
            infos[f"{layer}.weight"] = _attach_scale(layer, weight, infos.pop(name))
    return infos


def _check_layer_format(layer: str, weight: TensorInfo, layer_format: Mapping[str, Any]) -> None:
    """Refuses a format that is not supported, or in which the weight is not stored."""
    name = layer_format.get("format")
    dtype = _FORMAT_DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or layer_format.get("convrot"):
        label = "int8 of rotated weights" if dtype else format_value(name)
        why = f"is marked as {label}, which is not supported"
        remedy = f"get a file of {', '.join(_FORMAT_DTYPES)}"
        raise InputError(f"{weight.file}: {layer}", None, why, remedy)
    if weight.dtype != dtype:
        why = f"is marked as {name}, and stored as {weight.dtype}"
        raise InputError(f"{weight.file}: {weight.name}", None, why, _GET_ANOTHER)


def _attach_scale(layer: str, weight: TensorInfo, scale: TensorInfo) -> TensorInfo:
    """Attaches a scale of the tensor, or scales of its rows or blocks."""
    rows, columns = (*weight.shape, 1)[0], prod(weight.shape[1:])
    if scale.dtype in FLOATS:
        # One for each of as many columns as rows would be [1, columns], too.
        is_of_rows = scale.shape[:1] == (rows,) or (scale.shape[:1] == (1,) and rows != columns)
        if prod(scale.shape) == 1 or (is_of_rows and prod(scale.shape) == rows):
            return replace(weight, scale=scale)
        if block := _find_scale_block(rows, columns, scale.shape):
            return replace(weight, scale=scale, scale_block=block, full_precision=True)
    label = f"{scale.file}: {scale.name} {list(scale.shape)} {scale.dtype}"
    why = f"is no scale of {layer}.weight {list(weight.shape)}"
    raise InputError(label, None, why, "get a file with a scale per tensor, row or block")


def _find_scale_block(rows: int, columns: int, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns rows and columns of the blocks that have one scale each; None if the shape fits none.

    Blocks are of one row (`[rows, blocks]` or `[rows, blocks, 1]`), or have as many rows as
    columns, a power of two: 128 in most files (`[blocks, blocks]`). The last block of an axis may
    be smaller. Other sizes must fill the weight: in [rows, 2] for 96 columns they have 48.
    """
    if len(shape) == 4 and shape[1] == shape[3] == 1:  # ModelOpt's
        shape = shape[::2]
    elif len(shape) == 3 and shape[2] == 1:
        shape = shape[:2]
    if len(shape) != 2 or 0 in shape:
        return None
    is_of_row = shape[0] == rows
    if not is_of_row or columns % shape[1]:
        for size in (1 << exponent for exponent in range(1, max(rows, columns).bit_length() + 1)):
            block = (1 if is_of_row else size), size
            if (-(-rows // block[0]), -(-columns // size)) == shape:
                return block
    block = rows // shape[0], columns // shape[1]
    fills = not (rows % shape[0] or columns % shape[1])
    return block if fills and (is_of_row or block[0] == block[1]) else None


def _attach_nvfp4_scales(
    infos: dict[str, TensorInfo], layer: str, weight: TensorInfo
) -> TensorInfo:
    """Attaches the FP8 scale per 16 values and the scale of the tensor to an NVFP4 weight."""
    scales, scale = (infos.pop(f"{layer}.{n}", None) for n in ("weight_scale", "weight_scale_2"))
    num_rows, columns = (*weight.shape, 1)[0], 2 * prod(weight.shape[1:])
    count = -(-num_rows // 128) * 128 * -(-(columns // 16) // 4) * 4
    has_block_scales = scales is not None and scales.dtype == E4M3 and prod(scales.shape) == count
    has_tensor_scale = scale is not None and scale.dtype in FLOATS and prod(scale.shape) == 1
    if len(weight.shape) != 2 or columns % 16 or not has_block_scales or not has_tensor_scale:
        description = f"{weight.file}: {weight.name} {list(weight.shape)}"
        raise InputError(description, None, "has no scales that fit NVFP4", _GET_ANOTHER)
    return replace(weight, dtype=NVFP4, shape=(num_rows, columns), scale=scale, block_scales=scales)


def _read_layer_formats(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """Returns the formats that files state for their layers: layer -> JSON object."""
    layer_formats: dict[str, dict[str, Any]] = {}
    by_file: dict[Path, list[str]] = {}
    for name, info in tensors.items():
        by_file.setdefault(info.file, [])
        if name.endswith(_COMFY_QUANT_SUFFIX):
            by_file[info.file].append(name)
    for file, names in by_file.items():
        if file.suffix not in SAFETENSORS_SUFFIXES:
            continue
        metadata = read_safetensors_metadata(file, _METADATA_KEY)
        layers = metadata.get("layers") if isinstance(metadata, dict) else None
        if isinstance(layers, dict):
            stored_names = {i.name: name for name, i in tensors.items() if i.file == file}
            layer_formats |= {
                stored_names.get(f"{layer}.weight", f"{layer}.weight").removesuffix(".weight"): e
                for layer, e in layers.items()
                if isinstance(e, dict)
            }
        with open_regular_file(file) as handle:
            for name in names:
                info = tensors[name]
                handle.seek(info.data_offset)
                text = handle.read(min(info.nbytes, _MAX_METADATA_BYTES))
                layer = name.removesuffix(_COMFY_QUANT_SUFFIX)
                layer_formats[layer] = _parse_layer_format(f"{file}: {name}", info.dtype, text)
    return layer_formats


def _parse_layer_format(subject: str, dtype: str, text: bytes) -> dict[str, Any]:
    try:
        layer_format = parse_json(text) if dtype == "U8" else None
    except (ValueError, RecursionError):
        layer_format = None
    if not isinstance(layer_format, dict):
        why = f"is no JSON object ({format_value(text[:40])})"
        raise InputError(subject, None, why, _GET_ANOTHER)
    return layer_format
