"""Reads the headers of quantized DiT exports (`quant_dit_path`) in mindiesd's format.

An export has a description (JSON: the algorithm of each entry) and one safetensors file. Two
experts have one folder each, named as in an official checkpoint; the files of a single network are
directly in the folder. Entries marked FLOAT are loaded from the checkpoint.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wan.checkpoint.files import TensorInfo, is_folder, read_json, safetensors_header
from wan.checkpoint.layout import EXPERT_FOLDERS, Checkpoint, DitFiles
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32

FOLDERS = {**EXPERT_FOLDERS, "dit": "."}
MODE = 0o640  # mindiesd rejects files with wider permissions
DESCRIPTIONS = {  # in search order -> whether an NPU uses the NZ layout
    "quant_model_description_w8a8_dynamic.json": True,
    "quant_model_description_w8a8_mxfp8.json": False,
    "quant_model_description_w4a4_mxfp4_dualscale.json": True,
}
EVERYWHERE = "W8A8_DYNAMIC"  # the only algorithm for all types of devices
FP8_DYNAMIC = "FP8_DYNAMIC"
_FLOATING = ("F32", "BF16", "F16")
_STATIC = ("input_scale", "input_offset", "deq_scale", "quant_bias")


class _Format(NamedTuple):
    """The storage format of a linear layer in an algorithm.

    Attributes:
        extra_tensors: Required in addition to "weight" and the layer's "bias".
        weight_dtypes: Of "weight"; U8 holds two values per byte.
        scale_dtypes: Of "weight_scale".
    """

    tensors: tuple[str, ...] = ("weight_scale",)
    weight: tuple[str, ...] = ("I8",)
    scale: tuple[str, ...] = _FLOATING


_LINEAR = {
    EVERYWHERE: _Format(),
    "W8A8": _Format(_STATIC),
    "W8A8_TIMESTEP": _Format(("weight_scale", *_STATIC)),
    "W8A8_MXFP8": _Format(weight=("F8_E4M3",), scale=("U8",)),
    "W4A4_DYNAMIC": _Format(),
    "W4A4_MXFP4": _Format(weight=("F8_E4M3", "U8"), scale=("U8",)),
    "W4A4_MXFP4_DUALSCALE": _Format(
        ("weight_scale", "weight_dual_scale"), ("F8_E4M3", "U8"), ("U8",)
    ),
    "W8A16": _Format(),
    "W4A16": _Format(),
}
"""Algorithm -> storage format of a linear layer."""
_ATTENTION = {  # algorithm of a self-attention -> whether rotations are required
    FP8_DYNAMIC: True,
    "MXFP8_DYNAMIC": True,
    "MXFP4_DYNAMIC": False,
}
_KNOWN = (*_LINEAR, *_ATTENTION)
_FLOAT = "FLOAT"  # excludes a layer; case-sensitive
_UNQUANTISED = ("W16A16", "NO_QUANT")  # algorithms without quantization
# Suffixes of a layer's entries, in mindiesd's search order.
_SUFFIXES = (".linear.weight", ".weight", "", ".fa_q.scale", ".quant_type")


@dataclass(frozen=True)
class Layer:
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
    linears: dict[str, Layer]
    attentions: dict[int, Layer]

    @property
    def sizes(self) -> dict[str, int]:
        """The stored bytes of each linear layer."""
        return {
            name: sum(info.nbytes for info in layer.tensors.values())
            for name, layer in self.linears.items()
        }


@dataclass(frozen=True)
class QuantisedDit:
    """A folder of quantized weights, with an export for each network of the checkpoint."""

    folder: Path
    experts: dict[str, Export]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms of the linear layers, sorted."""
        layers = (layer for export in self.experts.values() for layer in export.linears.values())
        return tuple(sorted({layer.algorithm for layer in layers}))

    def files(self) -> list[Path]:
        """Returns the descriptions and weight files, sorted."""
        exports = self.experts.values()
        return sorted(path for export in exports for path in (export.description, export.weights))


def resolve(
    folder: Path, checkpoint: Checkpoint, *, device: str, dit_fsdp: bool, fa_quant: str | None
) -> QuantisedDit:
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
    quantised = QuantisedDit(folder, exports)
    if dit_fsdp:
        why = "shards parameters, and quantised weights are buffers"
        raise InputError("`dit_fsdp`", None, why, "drop it, or drop `quant_dit_path`")
    attentions = (layer for export in exports.values() for layer in export.attentions.values())
    others = {layer.algorithm for layer in attentions} - {FP8_DYNAMIC}
    if fa_quant is not None and others:
        why = f"as {min(others)}, but `fa_quant={fa_quant}` is built for {FP8_DYNAMIC}"
        remedy = f"drop `fa_quant`, or export with {FP8_DYNAMIC}"
        raise InputError(f"{folder}", None, f"quantises attention {why}", remedy)
    if device != "auto":
        check_device(quantised, device)
    return quantised


def check_device(quantised: QuantisedDit, device: str) -> None:
    """Refuses an export that a type of device cannot run; `wan.settings.devices` checks NPU models.

    Args:
        device: "cpu", "cuda" or "npu".

    Raises:
        InputError: An algorithm runs on NPUs only, or mindiesd would reject a file.
    """
    if device == "npu":
        for path in quantised.files():
            _check_mode(path)
        return
    for algorithm in quantised.algorithms:
        if algorithm != EVERYWHERE:
            why = f"holds {algorithm} weights, which run on NPUs only"
            remedy = f"use `device=npu`, or an export in {EVERYWHERE}"
            raise InputError(f"{quantised.folder}", None, why, remedy)


def _check_mode(path: Path) -> None:
    """Applies mindiesd's rules for files: no link, owned by the user or its group, limited mode."""
    if path.is_symlink():
        why = "is a symbolic link, which mindiesd does not read"
        raise InputError(f"{path}", None, why, "put a copy there")
    status = path.stat()
    if os.geteuid() not in (0, status.st_uid) and os.getgid() != status.st_gid:
        why = "belongs to another user and group, whose files mindiesd does not read"
        raise InputError(f"{path}", None, why, f"run chown $(id -u) {path}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o777 & ~MODE:
        limit = f"mindiesd reads files of mode {MODE:04o} or stricter only"
        remedy = f"run chmod {MODE:04o} {path}"
        raise InputError(f"{path}", None, f"has mode {mode:04o}, but {limit}", remedy)


def _read_export(folder: Path, dit: DitFiles) -> Export:
    """Reads a network's export; InputError if it is incomplete or does not fit the network."""
    description = next((folder / name for name in DESCRIPTIONS if (folder / name).is_file()), None)
    if description is None:
        _refuse_ranks(folder, "quant_model_description*")
        names = (
            f"{' or '.join(DESCRIPTIONS)} (two experts: in high_noise_model/ and low_noise_model/)"
        )
        why = "holds no description of quantised weights"
        raise InputError(f"{folder}", None, why, f"expected {names}")
    entries = read_json(description)
    kind = entries.get("model_quant_type")
    if kind not in (*_KNOWN, "W16A16"):
        why = "has no model_quant_type" if kind is None else f"has the model_quant_type {kind!r}"
        remedy = f"export again as one of {', '.join(_KNOWN)}"
        raise InputError(f"{description}", None, why, remedy)
    _check_entries(description, entries, dit)
    weights = folder / f"quant_model_weight_{kind.lower()}.safetensors"
    if not weights.is_file():
        _refuse_ranks(folder, weights.stem)
        remedy = f"copy or export it into the folder of {description.name}"
        raise InputError(f"{weights}", None, "is missing", remedy)
    reader = _EntryReader(dit, description, entries, weights, safetensors_header(weights))
    linears = {n: layer for n in _linear_layers(dit) if (layer := reader.linear(n))}
    attentions = {
        int(name.split(".")[1]): layer
        for name in _self_attentions(dit)
        if (layer := reader.attention(name))
    }
    if not linears and not attentions:
        raise InputError(f"{description}", None, "quantises no layer", "drop `quant_dit_path`")
    return Export(description, weights, DESCRIPTIONS[description.name], linears, attentions)


def _refuse_ranks(folder: Path, stem: str) -> None:
    for path in sorted(folder.glob(f"{stem}_*")):
        if re.search(r"_\d+$", path.stem):
            why = "is one rank's shard of an export, which is not supported"
            raise InputError(f"{path}", None, why, "export the network unsharded")


def _linear_layers(dit: DitFiles) -> list[str]:
    return [n.removesuffix(".weight") for n, info in dit.tensors.items() if len(info.shape) == 2]


def _self_attentions(dit: DitFiles) -> list[str]:
    return [n.removesuffix(".q") for n in _linear_layers(dit) if n.endswith(".self_attn.q")]


def _check_entries(description: Path, entries: Mapping[str, Any], dit: DitFiles) -> None:
    """Refuses entries with an unknown algorithm, or for a layer that cannot have the algorithm."""
    parts = [name.split(".") for name in dit.tensors]
    modules = {".".join(name[:end]) for name in parts for end in range(1, len(name))}
    linears, attentions = set(_linear_layers(dit)), set(_self_attentions(dit))
    biases = {f"{name}.bias" for name in linears}  # quantized with their weights
    for key, value in entries.items():
        suffix = next((s for s in _SUFFIXES if s and key.endswith(s)), "")
        name = key.removesuffix(suffix)
        algorithm = str(value).upper()
        named = suffix or name in modules or (name in dit.tensors and name not in biases)
        if algorithm in (_FLOAT, *_UNQUANTISED) or not named:
            continue  # other keys describe the export or its extra tensors
        kind = "linear layer" if algorithm in _LINEAR else "self-attention"
        if algorithm not in _KNOWN:
            why = f"gives {key} the unknown algorithm {value!r}"
            remedy = f"known are {', '.join(_KNOWN)}"
        elif name not in modules and name not in dit.tensors:
            why = f"quantises {name}, which {dit.folder} does not have"
            remedy = "the export belongs to another checkpoint"
        elif name not in (linears if algorithm in _LINEAR else linears | attentions):
            why = f"quantises {name} as {algorithm}, but it is no {kind}"
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

    def algorithm(self, name: str) -> str | None:
        """Returns a layer's algorithm by mindiesd's rule: None with FLOAT, else the first one.

        Algorithms are case-insensitive, FLOAT is not: other spellings of it are ignored.
        """
        stated = [self.entries[name + s] for s in _SUFFIXES if name + s in self.entries]
        known = [word for value in stated if (word := str(value).upper()) != _FLOAT]
        if _FLOAT in stated or not known or known[0] in _UNQUANTISED:
            return None
        return known[0]

    def linear(self, name: str) -> Layer | None:
        algorithm = self.algorithm(name)
        if algorithm is None:
            return None
        if algorithm not in _LINEAR:
            why = f"gives the linear layer {name} {algorithm}, an algorithm for attention"
            raise InputError(f"{self.description}", None, why, "export again")
        if keeps_fp32(f"{name}.weight"):
            why = f"quantises {name}, which is computed in float32 here"
            raise InputError(f"{self.description}", None, why, "export it as FLOAT")
        # A smoothed layer has its tensors one level deeper, and the factors of its inputs.
        form, smooth = _LINEAR[algorithm], f"{name}.div.mul_scale"
        prefix = f"{name}.linear" if smooth in self.tensors else name
        parts = ("weight", *form.tensors)
        parts += ("bias",) if f"{name}.bias" in self.dit.tensors else ()
        tensors = {part: self.tensor(f"{prefix}.{part}") for part in parts}
        if prefix != name:
            tensors["mul_scale"] = self.tensor(smooth)
        rows, columns = self.dit.tensors[f"{name}.weight"].shape
        width = columns // 2 if tensors["weight"].dtype == "U8" else columns
        self.check(algorithm, tensors["weight"], form.weight, (rows, width))
        # mindiesd documents the shapes of scales for one algorithm, and the dtypes for all.
        known = algorithm == EVERYWHERE
        if "weight_scale" in tensors:
            shapes = ((rows,), (rows, 1)) if known else ()
            self.check(algorithm, tensors["weight_scale"], form.scale, *shapes)
        for part, size in (("bias", rows), ("mul_scale", columns)):
            if known and part in tensors:
                self.check(algorithm, tensors[part], _FLOATING, (size,))
        return Layer(algorithm, tensors)

    def attention(self, name: str) -> Layer | None:
        algorithm = self.algorithm(name)
        if algorithm not in _ATTENTION:
            return None
        size = self.dit.config["dim"] // self.dit.config["num_heads"]
        names = {part: f"{name}.{part}" for part in ("q_rot", "k_rot")}
        tensors = {
            part: self.tensor(full)
            for part, full in names.items()
            if _ATTENTION[algorithm] or full in self.tensors
        }
        for info in tensors.values():
            self.check(algorithm, info, _FLOATING, (size, size))
        return Layer(algorithm, tensors)

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            why = f"lacks the tensor {name} that {self.description.name} requires"
            raise InputError(f"{self.weights}", None, why, "export the weights again")
        return self.tensors[name]

    def check(
        self, algorithm: str, info: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]
    ) -> None:
        if info.dtype not in dtypes or (shapes and info.shape not in shapes):
            wanted = " ".join((" or ".join(dtypes), *(str(list(shape)) for shape in shapes[:1])))
            why = f"{info.dtype} {list(info.shape)}, but {algorithm} takes {wanted} there"
            remedy = "the export belongs to another checkpoint, or is damaged"
            raise InputError(f"{self.weights}: {info.name}", None, f"is {why}", remedy)
