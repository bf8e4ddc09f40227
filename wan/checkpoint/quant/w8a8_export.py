"""Reads the headers of quantized DiT exports (`quant_dit_path`) in mindiesd's format.

An export has a description (JSON: the algorithm of each entry) and one safetensors file. Two
experts have one folder each, named as in an official checkpoint; the files of a single network are
directly in the folder. Entries marked FLOAT are loaded from the checkpoint.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wan.checkpoint.formats.headers import is_folder, read_json
from wan.checkpoint.formats.safetensors_header import read_safetensors_header
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.checkpoint.layout import EXPERT_FOLDERS, Checkpoint, DitFiles
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32
from wan.utils.files import has_file

FOLDERS = {**EXPERT_FOLDERS, "dit": "."}
MAX_FILE_MODE = 0o640  # mindiesd rejects files with wider permissions
DESCRIPTION_FILES = {  # in search order -> whether an NPU uses the NZ layout
    "quant_model_description_w8a8_dynamic.json": True,
    "quant_model_description_w8a8_mxfp8.json": False,
    "quant_model_description_w4a4_mxfp4_dualscale.json": True,
}
W8A8_DYNAMIC = "W8A8_DYNAMIC"  # the only algorithm for all types of devices
FP8_DYNAMIC = "FP8_DYNAMIC"
_FLOAT_DTYPES = ("F32", "BF16", "F16")
_STATIC_TENSORS = ("input_scale", "input_offset", "deq_scale", "quant_bias")


class _LinearFormat(NamedTuple):
    """The storage format of a linear layer in an algorithm.

    Attributes:
        extra_tensors: Required in addition to "weight" and the layer's "bias".
        weight_dtypes: Of "weight"; U8 holds two values per byte.
        scale_dtypes: Of "weight_scale".
    """

    extra_tensors: tuple[str, ...] = ("weight_scale",)
    weight_dtypes: tuple[str, ...] = ("I8",)
    scale_dtypes: tuple[str, ...] = _FLOAT_DTYPES


_LINEAR_FORMATS = {
    W8A8_DYNAMIC: _LinearFormat(),
    "W8A8": _LinearFormat(_STATIC_TENSORS),
    "W8A8_TIMESTEP": _LinearFormat(("weight_scale", *_STATIC_TENSORS)),
    "W8A8_MXFP8": _LinearFormat(weight_dtypes=("F8_E4M3",), scale_dtypes=("U8",)),
    "W4A4_DYNAMIC": _LinearFormat(),
    "W4A4_MXFP4": _LinearFormat(weight_dtypes=("F8_E4M3", "U8"), scale_dtypes=("U8",)),
    "W4A4_MXFP4_DUALSCALE": _LinearFormat(
        ("weight_scale", "weight_dual_scale"), ("F8_E4M3", "U8"), ("U8",)
    ),
    "W8A16": _LinearFormat(),
    "W4A16": _LinearFormat(),
}
"""Algorithm -> storage format of a linear layer."""
_ATTENTION_ALGORITHMS = {  # algorithm of a self-attention -> whether rotations are required
    FP8_DYNAMIC: True,
    "MXFP8_DYNAMIC": True,
    "MXFP4_DYNAMIC": False,
}
_ALGORITHMS = (*_LINEAR_FORMATS, *_ATTENTION_ALGORITHMS)
_FLOAT = "FLOAT"  # excludes a layer; case-sensitive
_NO_QUANTIZATION = ("W16A16", "NO_QUANT")  # algorithms without quantization
# Suffixes of a layer's entries, in mindiesd's search order.
_SUFFIXES = (".linear.weight", ".weight", "", ".fa_q.scale", ".quant_type")


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantized layer.

    Attributes:
        algorithm: Such as "W8A8_DYNAMIC".
        tensors: By name in the layer: "weight", "weight_scale", ...
    """

    algorithm: str
    tensors: dict[str, TensorInfo]


@dataclass(frozen=True)
class Export:
    """The quantized layers of one network.

    Attributes:
        description: The JSON file.
        weights: The safetensors file.
        use_nz: NPUs store the weights in the NZ layout.
        linears: Linear layers by name ("blocks.0.ffn.2").
        attentions: Self-attentions by block index, with tensors "q_rot" and "k_rot".
    """

    description: Path
    weights: Path
    use_nz: bool
    linears: dict[str, QuantizedLayer]
    attentions: dict[int, QuantizedLayer]

    @property
    def linear_bytes(self) -> dict[str, int]:
        """The stored bytes of each linear layer."""
        return {
            name: sum(info.nbytes for info in layer.tensors.values())
            for name, layer in self.linears.items()
        }


@dataclass(frozen=True)
class QuantizedDit:
    """A folder of quantized weights, with an export for each network of the checkpoint."""

    folder: Path
    experts: dict[str, Export]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms of the linear layers, sorted."""
        layers = (layer for export in self.experts.values() for layer in export.linears.values())
        return tuple(sorted({layer.algorithm for layer in layers}))

    def list_files(self) -> list[Path]:
        """Returns the descriptions and weight files, sorted."""
        exports = self.experts.values()
        return sorted(path for export in exports for path in (export.description, export.weights))


def read_quantized_dit(
    folder: Path, checkpoint: Checkpoint, *, device: str, fa_quant: str | None
) -> QuantizedDit:
    """Reads the exports for a checkpoint's networks and checks them against the settings.

    Args:
        folder: The exported folder.
        checkpoint: Has the layers that the export marks FLOAT.
        device: If "auto", the caller calls `check_export_device` once the device is known.

    Raises:
        InputError: The folder is incomplete, of another network, or excluded by a setting.
    """
    if checkpoint.folder is None:
        why = "needs the other weights from a checkpoint"
        raise InputError("`quant_dit_path`", None, why, "add its `ckpt_dir`")
    if not is_folder(folder):
        raise InputError("`quant_dit_path`", folder, "is not a folder", "give the exported folder")
    exports = {n: _read_export(folder / FOLDERS[n], dit) for n, dit in checkpoint.experts.items()}
    quantized_dit = QuantizedDit(folder, exports)
    attentions = (layer for export in exports.values() for layer in export.attentions.values())
    unsupported = {layer.algorithm for layer in attentions} - {FP8_DYNAMIC}
    if fa_quant is not None and unsupported:
        why = f"as {min(unsupported)}, but `fa_quant={fa_quant}` is built for {FP8_DYNAMIC}"
        remedy = f"drop `fa_quant`, or export with {FP8_DYNAMIC}"
        raise InputError(f"{folder}", None, f"quantises attention {why}", remedy)
    if device != "auto":
        check_export_device(quantized_dit, device)
    return quantized_dit


def check_export_device(quantized_dit: QuantizedDit, device: str) -> None:
    """Refuses an export that a type of device cannot run; `wan.settings.devices` checks NPU models.

    Args:
        device: "cpu", "cuda" or "npu".

    Raises:
        InputError: An algorithm runs on NPUs only, or mindiesd would reject a file.
    """
    if device == "npu":
        for path in quantized_dit.list_files():
            _check_file_mode(path)
        return
    for algorithm in quantized_dit.algorithms:
        if algorithm != W8A8_DYNAMIC:
            why = f"holds {algorithm} weights, which run on NPUs only"
            remedy = f"use `device=npu`, or an export in {W8A8_DYNAMIC}"
            raise InputError(f"{quantized_dit.folder}", None, why, remedy)


def _check_file_mode(path: Path) -> None:
    """Applies mindiesd's rules for files: no link, owned by the user or its group, limited mode."""
    if path.is_symlink():
        why = "is a symbolic link, which mindiesd does not read"
        raise InputError(f"{path}", None, why, "put a copy there")
    status = path.stat()
    if os.geteuid() not in (0, status.st_uid) and os.getgid() != status.st_gid:
        why = "belongs to another user and group, whose files mindiesd does not read"
        raise InputError(f"{path}", None, why, f"run chown $(id -u) {path}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o777 & ~MAX_FILE_MODE:
        limit = f"mindiesd reads files of mode {MAX_FILE_MODE:04o} or stricter only"
        remedy = f"run chmod {MAX_FILE_MODE:04o} {path}"
        raise InputError(f"{path}", None, f"has mode {mode:04o}, but {limit}", remedy)


def _read_export(folder: Path, dit: DitFiles) -> Export:
    """Reads a network's export; InputError if it is incomplete or does not fit the network."""
    listing = next((folder / name for name in DESCRIPTION_FILES if has_file(folder / name)), None)
    if listing is None:
        names, why = " or ".join(DESCRIPTION_FILES), "holds no description of quantised weights"
        remedy = f"expected {names} (two experts: in high_noise_model/ and low_noise_model/)"
        raise InputError(f"{folder}", None, why, remedy)
    entries = read_json(listing)
    quant_type = entries.get("model_quant_type")
    if quant_type not in (*_ALGORITHMS, "W16A16"):
        why = f"has the model_quant_type {quant_type!r}"
        why = "has no model_quant_type" if quant_type is None else why
        remedy = f"export again as one of {', '.join(_ALGORITHMS)}"
        raise InputError(f"{listing}", None, why, remedy)
    _check_export_entries(listing, entries, dit)
    weights = folder / f"quant_model_weight_{quant_type.lower()}.safetensors"
    if not has_file(weights):
        remedy = f"copy or export it unsharded into the folder of {listing.name}"
        raise InputError(f"{weights}", None, "is missing", remedy)
    reader = _EntryReader(dit, listing, entries, weights, read_safetensors_header(weights))
    linears = {n: layer for n in _list_linear_layers(dit) if (layer := reader.read_linear(n))}
    attentions = {
        int(name.split(".")[1]): layer
        for name in _list_self_attentions(dit)
        if (layer := reader.read_attention(name))
    }
    if not linears and not attentions:
        raise InputError(f"{listing}", None, "quantises no layer", "drop `quant_dit_path`")
    return Export(listing, weights, DESCRIPTION_FILES[listing.name], linears, attentions)


def _list_linear_layers(dit: DitFiles) -> list[str]:
    return [n.removesuffix(".weight") for n, info in dit.tensors.items() if len(info.shape) == 2]


def _list_self_attentions(dit: DitFiles) -> list[str]:
    return [n.removesuffix(".q") for n in _list_linear_layers(dit) if n.endswith(".self_attn.q")]


def _check_export_entries(description: Path, entries: Mapping[str, Any], dit: DitFiles) -> None:
    """Refuses entries with an unknown algorithm, or for a layer that cannot have the algorithm."""
    name_parts = [name.split(".") for name in dit.tensors]
    modules = {".".join(name[:end]) for name in name_parts for end in range(1, len(name))}
    linears, attentions = set(_list_linear_layers(dit)), set(_list_self_attentions(dit))
    biases = {f"{name}.bias" for name in linears}  # quantized with their weights
    for key, value in entries.items():
        suffix = next((s for s in _SUFFIXES if s and key.endswith(s)), "")
        name = key.removesuffix(suffix)
        algorithm = str(value).upper()
        is_layer = suffix or name in modules or (name in dit.tensors and name not in biases)
        if algorithm in (_FLOAT, *_NO_QUANTIZATION) or not is_layer:
            continue  # other keys describe the export or its extra tensors
        layer_type = "linear layer" if algorithm in _LINEAR_FORMATS else "self-attention"
        if algorithm not in _ALGORITHMS:
            why = f"gives {key} the unknown algorithm {value!r}"
            remedy = f"known are {', '.join(_ALGORITHMS)}"
        elif name not in modules and name not in dit.tensors:
            why = f"quantises {name}, which {dit.folder} does not have"
            remedy = "the export belongs to another checkpoint"
        elif name not in (linears if algorithm in _LINEAR_FORMATS else linears | attentions):
            why = f"quantises {name} as {algorithm}, but it is no {layer_type}"
            remedy = "export it as FLOAT"
        else:
            continue
        raise InputError(f"{description}", None, why, remedy)


@dataclass(frozen=True)
class _EntryReader:
    """Reads the layers of one network from an export."""

    dit: DitFiles
    description: Path
    entries: Mapping[str, Any]
    weights: Path
    tensors: Mapping[str, TensorInfo]  # of the weight file

    def get_algorithm(self, name: str) -> str | None:
        """Returns a layer's algorithm by mindiesd's rule: None with FLOAT, else the first one.

        Algorithms are case-insensitive, FLOAT is not: other spellings of it are ignored.
        """
        values = [self.entries[name + s] for s in _SUFFIXES if name + s in self.entries]
        algorithms = [upper for value in values if (upper := str(value).upper()) != _FLOAT]
        if _FLOAT in values or not algorithms or algorithms[0] in _NO_QUANTIZATION:
            return None
        return algorithms[0]

    def read_linear(self, name: str) -> QuantizedLayer | None:
        algorithm = self.get_algorithm(name)
        if algorithm is None:
            return None
        if algorithm not in _LINEAR_FORMATS:
            why = f"gives the linear layer {name} {algorithm}, an algorithm for attention"
            raise InputError(f"{self.description}", None, why, "export again")
        if keeps_fp32(f"{name}.weight"):
            why = f"quantises {name}, which is computed in float32 here"
            raise InputError(f"{self.description}", None, why, "export it as FLOAT")
        # A smoothed layer has its tensors one level deeper, and the factors of its inputs.
        spec, smooth_key = _LINEAR_FORMATS[algorithm], f"{name}.div.mul_scale"
        prefix = f"{name}.linear" if smooth_key in self.tensors else name
        suffixes = ("weight", *spec.extra_tensors)
        suffixes += ("bias",) if f"{name}.bias" in self.dit.tensors else ()
        tensors = {suffix: self.get_tensor(f"{prefix}.{suffix}") for suffix in suffixes}
        if prefix != name:
            tensors["mul_scale"] = self.get_tensor(smooth_key)
        num_rows, num_columns = self.dit.tensors[f"{name}.weight"].shape
        width = num_columns // 2 if tensors["weight"].dtype == "U8" else num_columns
        self.check_tensor(algorithm, tensors["weight"], spec.weight_dtypes, (num_rows, width))
        # mindiesd documents the shapes of scales for one algorithm, and the dtypes for all.
        has_known_shapes = algorithm == W8A8_DYNAMIC
        if "weight_scale" in tensors:
            shapes = ((num_rows,), (num_rows, 1)) if has_known_shapes else ()
            self.check_tensor(algorithm, tensors["weight_scale"], spec.scale_dtypes, *shapes)
        for suffix, size in (("bias", num_rows), ("mul_scale", num_columns)):
            if has_known_shapes and suffix in tensors:
                self.check_tensor(algorithm, tensors[suffix], _FLOAT_DTYPES, (size,))
        return QuantizedLayer(algorithm, tensors)

    def read_attention(self, name: str) -> QuantizedLayer | None:
        algorithm = self.get_algorithm(name)
        if algorithm not in _ATTENTION_ALGORITHMS:
            return None
        size = self.dit.config["dim"] // self.dit.config["num_heads"]
        names = {suffix: f"{name}.{suffix}" for suffix in ("q_rot", "k_rot")}
        tensors = {
            suffix: self.get_tensor(full_name)
            for suffix, full_name in names.items()
            if _ATTENTION_ALGORITHMS[algorithm] or full_name in self.tensors
        }
        for info in tensors.values():
            self.check_tensor(algorithm, info, _FLOAT_DTYPES, (size, size))
        return QuantizedLayer(algorithm, tensors)

    def get_tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            why = f"lacks the tensor {name} that {self.description.name} requires"
            raise InputError(f"{self.weights}", None, why, "export the weights again")
        return self.tensors[name]

    def check_tensor(
        self, algorithm: str, info: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]
    ) -> None:
        if info.dtype not in dtypes or (shapes and info.shape not in shapes):
            expected = " ".join((" or ".join(dtypes), *(str(list(shape)) for shape in shapes[:1])))
            why = f"{info.dtype} {list(info.shape)}, but {algorithm} takes {expected} there"
            remedy = "the export belongs to another checkpoint, or is damaged"
            raise InputError(f"{self.weights}: {info.name}", None, f"is {why}", remedy)
