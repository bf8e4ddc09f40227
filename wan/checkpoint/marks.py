"""Reads the scales and format metadata of quantized weights in safetensors files.

- ComfyUI writes a layer's format as JSON in the bytes of a tensor `X.comfy_quant`, or all formats
  in the file's metadata (`_quantization_metadata`; see its QUANTIZATION.md). Older files have only
  scales (`X.scale_weight`), or FP8 values without scales.
- NVIDIA's ModelOpt writes only scales (`X.weight_scale`).

Static scales of a layer's input are ignored: FP8 matrix products use dynamic scales per token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint.files import (
    FLOATS,
    FP8,
    GGUF,
    NVFP4,
    TensorInfo,
    opened,
    safetensors_metadata,
    safetensors_places,
)
from wan.settings.errors import InputError
from wan.settings.values import shown

_FORMATS = {"float8_e4m3fn": "F8_E4M3", "int8_tensorwise": "I8", "nvfp4": "U8"}
"""ComfyUI's format -> the dtype of the stored tensor."""
_MARK, _ALL = ".comfy_quant", "_quantization_metadata"
_LONGEST = 1 << 12  # bytes of a layer's format
_SCALES = (".scale_weight", ".weight_scale")
_PASSED_OVER = ("scaled_fp8", ".scale_input", ".input_scale", _MARK, "spiece_model")
_AGAIN = "download it again"


def network_tensors(
    tensors: Mapping[str, TensorInfo], rename: Callable[[str], str]
) -> dict[str, TensorInfo]:
    """Attaches scales to quantized weights and renames the tensors of one network.

    Args:
        tensors: By stored name.
        rename: Maps a stored name to the network's name.

    Raises:
        InputError: A tensor has an unsupported format, or two tensors get the same name.
    """
    renamed: dict[str, TensorInfo] = {}
    for name, info in _with_scales(tensors).items():
        scaled = info.dtype == "I8" and info.scale is not None
        if info.dtype not in (*FLOATS, *FP8, *GGUF, NVFP4) and not scaled:
            why = f"is stored as {info.dtype}, which is not supported for this weight"
            remedy = f"give weights in one of {', '.join(FLOATS)}"
            raise InputError(f"{info.file}: {name}", None, why, remedy)
        twin = renamed.setdefault(rename(name), info)
        if twin is not info:
            why = f"has both {name} and {twin.name}, which are the same tensor"
            raise InputError(f"{info.file}", None, why, _AGAIN)
    return renamed


def _with_scales(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Attaches scales to their weights, and drops ignored tensors."""
    found = {name: i for name, i in tensors.items() if not name.endswith(_PASSED_OVER)}
    marks = _marks(tensors)
    for layer, mark in marks.items():
        own = found.get(f"{layer}.weight")
        if own is None:
            continue  # the file's metadata may name layers differently
        form = mark.get("format")
        if not isinstance(form, str) or form not in _FORMATS or mark.get("convrot"):
            what = "int8 of rotated weights" if form in [*_FORMATS] else shown(form)
            why = f"is marked as {what}, which is not supported"
            remedy = f"get a file of {', '.join(_FORMATS)}"
            raise InputError(f"{own.file}: {layer}", None, why, remedy)
        if own.dtype != _FORMATS[form]:
            why = f"is marked as {form}, and stored as {own.dtype}"
            raise InputError(f"{own.file}: {own.name}", None, why, _AGAIN)
        if form == "nvfp4":
            found[f"{layer}.weight"] = _nvfp4(found, layer, own)
        elif mark.get("full_precision_matrix_mult"):
            found[f"{layer}.weight"] = replace(own, full_precision=True)
    for name in [name for name in found if name.endswith(_SCALES)]:
        layer = name.rpartition(".")[0]
        own = found.get(f"{layer}.weight")
        known = own is not None and (own.dtype in FP8 or (own.dtype == "I8" and layer in marks))
        if own is None or own.scale is not None or not known:
            continue  # the caller refuses the unknown tensor
        info = found.pop(name)
        if prod(info.shape) not in (1, *own.shape[:1]) or info.dtype not in FLOATS:
            what = f"{info.file}: {name} {list(info.shape)} {info.dtype}"
            why = f"is no scale of {layer}.weight {list(own.shape)}"
            raise InputError(what, None, why, _AGAIN)
        found[f"{layer}.weight"] = replace(own, scale=info)
    return found


def _nvfp4(found: dict[str, TensorInfo], layer: str, own: TensorInfo) -> TensorInfo:
    """Attaches the FP8 scale per 16 values and the scale of the tensor to an NVFP4 weight."""
    each, whole = (found.pop(f"{layer}.{n}", None) for n in ("weight_scale", "weight_scale_2"))
    rows, columns = (*own.shape, 1)[0], 2 * prod(own.shape[1:])
    tiles = -(-rows // 128) * 128 * -(-(columns // 16) // 4) * 4
    fits = each is not None and each.dtype in FP8 and prod(each.shape) == tiles
    one = whole is not None and whole.dtype in FLOATS and prod(whole.shape) == 1
    if len(own.shape) != 2 or columns % 16 or not fits or not one:
        what = f"{own.file}: {own.name} {list(own.shape)}"
        raise InputError(what, None, "has no scales that fit NVFP4", _AGAIN)
    return replace(own, dtype=NVFP4, shape=(rows, columns), scale=whole, blocks=each)


def _marks(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """Returns the formats that files state for their layers: layer -> JSON object."""
    found: dict[str, dict[str, Any]] = {}
    by_file: dict[Path, list[str]] = {}
    for name, info in tensors.items():
        by_file.setdefault(info.file, [])
        if name.endswith(_MARK):
            by_file[info.file].append(name)
    for file, names in by_file.items():
        if file.suffix != ".safetensors":
            continue
        said = safetensors_metadata(file, _ALL)
        layers = said.get("layers") if isinstance(said, dict) else None
        if isinstance(layers, dict):
            found |= {layer: mark for layer, mark in layers.items() if isinstance(mark, dict)}
        places = safetensors_places(file) if names else {}
        with opened(file) as data:
            for name in names:
                dtype, shape, start = places[tensors[name].name]
                data.seek(start)
                found[name.removesuffix(_MARK)] = _mark(
                    f"{file}: {name}", dtype, data.read(min(prod(shape), _LONGEST))
                )
    return found


def _mark(what: str, dtype: str, text: bytes) -> dict[str, Any]:
    try:
        mark = json.loads(text) if dtype == "U8" else None
    except (ValueError, RecursionError):
        mark = None
    if not isinstance(mark, dict):
        raise InputError(what, None, f"is no JSON object ({shown(text[:40])})", _AGAIN)
    return mark
