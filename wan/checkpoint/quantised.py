"""Folders of quantised DiT weights (--quant_dit_path), as mindiesd reads them; checked unread.

A folder holds a description (JSON: the algorithm of each entry) and one safetensors file. Two
experts have one folder each, named as in an official checkpoint; a single network's files are
directly inside. What an export leaves FLOAT comes from the checkpoint.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.checkpoint.files import TensorInfo, is_folder, read_json, safetensors_header
from wan.checkpoint.layout import EXPERT_FOLDERS, Checkpoint, DitFiles
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32

FOLDERS = {**EXPERT_FOLDERS, "dit": "."}
MODE = 0o640  # mindiesd reads no file that more people may read
DESCRIPTIONS = {  # in the order of the search -> whether an NPU keeps the weights in its NZ layout
    "quant_model_description_w8a8_dynamic.json": True,
    "quant_model_description_w8a8_mxfp8.json": False,
    "quant_model_description_w4a4_mxfp4_dualscale.json": True,
}
EVERYWHERE = "W8A8_DYNAMIC"  # the algorithm that runs on every device
FP8_DYNAMIC = "FP8_DYNAMIC"
_STATIC = ("input_scale", "input_offset", "deq_scale", "quant_bias")
_LINEAR = {  # algorithm -> the tensors it needs beside "weight" (and the bias)
    EVERYWHERE: ("weight_scale",),
    "W8A8": _STATIC,
    "W8A8_TIMESTEP": ("weight_scale", *_STATIC),
    "W8A8_MXFP8": ("weight_scale",),
    "W4A4_DYNAMIC": ("weight_scale",),
    "W4A4_MXFP4": ("weight_scale",),
    "W4A4_MXFP4_DUALSCALE": ("weight_scale", "weight_dual_scale"),
    "W8A16": ("weight_scale",),
    "W4A16": ("weight_scale",),
}
_FP4 = ("F8_E4M3", "U8")  # widened, or two values in a byte
_MX = {"W8A8_MXFP8": ("F8_E4M3",), "W4A4_MXFP4": _FP4, "W4A4_MXFP4_DUALSCALE": _FP4}
_ATTENTION = (FP8_DYNAMIC, "MXFP8_DYNAMIC", "MXFP4_DYNAMIC")
_FLOAT = "FLOAT"  # excludes a layer, in this spelling only
_UNQUANTISED = ("W16A16", "NO_QUANT")  # algorithms that quantise nothing
_FLOATING = ("F32", "BF16", "F16")
# Of a layer's entries, in the order of mindiesd's search.
_SUFFIXES = (".linear.weight", ".weight", "", ".fa_q.scale", ".quant_type")


@dataclass(frozen=True)
class Layer:
    """A quantised layer. tensors: "weight", "weight_scale", ... -> where each one is."""

    algorithm: str
    tensors: dict[str, TensorInfo]


@dataclass(frozen=True)
class Export:
    """The quantised layers of one network.

    linears: by layer name ("blocks.0.ffn.2"). attentions: self-attentions with rotations "q_rot"
    and "k_rot", by block index. use_nz: see DESCRIPTIONS.
    """

    description: Path
    weights: Path
    use_nz: bool
    linears: dict[str, Layer]
    attentions: dict[int, Layer]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each linear layer as stored."""
        return {
            name: sum(info.nbytes for info in layer.tensors.values())
            for name, layer in self.linears.items()
        }


@dataclass(frozen=True)
class QuantisedDit:
    """A folder of quantised weights; experts: by the checkpoint's names of its networks."""

    folder: Path
    experts: dict[str, Export]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms of the linear layers, sorted."""
        layers = (layer for export in self.experts.values() for layer in export.linears.values())
        return tuple(sorted({layer.algorithm for layer in layers}))

    def files(self) -> list[Path]:
        """Descriptions and weights, in a fixed order."""
        exports = self.experts.values()
        return sorted(path for export in exports for path in (export.description, export.weights))


def resolve(
    folder: Path, checkpoint: Checkpoint, *, device: str, dit_fsdp: bool, fa_quant: str | None
) -> QuantisedDit:
    """What the folder brings for the checkpoint's networks.

    device: --device; "auto" leaves its rules to `check_device`. Raises InputError for a folder that
    is incomplete, of another network, or that this run cannot use; no weight is read.
    """
    if checkpoint.folder is None:
        raise InputError("`quant_dit_path` takes the rest from a checkpoint; add its `ckpt_dir`.")
    if not is_folder(folder):
        raise InputError(f"`quant_dit_path={folder}` is not a folder; give the exported folder.")
    exports = {n: _read_export(folder / FOLDERS[n], dit) for n, dit in checkpoint.experts.items()}
    quantised = QuantisedDit(folder, exports)
    if dit_fsdp:
        raise InputError(
            "`dit_fsdp` shards parameters, and quantised weights are none; drop it, or drop "
            "`quant_dit_path`."
        )
    attentions = (layer for export in exports.values() for layer in export.attentions.values())
    others = {layer.algorithm for layer in attentions} - {FP8_DYNAMIC}
    if fa_quant is not None and others:
        raise InputError(
            f"{folder} quantises attention as {min(others)}, but `fa_quant={fa_quant}` is built "
            f"for {FP8_DYNAMIC}; drop `fa_quant`, or export with {FP8_DYNAMIC}."
        )
    if device != "auto":
        check_device(quantised, device)
    return quantised


def check_device(quantised: QuantisedDit, device: str) -> None:
    """device: the type, "cpu", "cuda" or "npu". InputError where the export cannot run on it.

    Which NPU it is, is for `wan.settings.devices`.
    """
    if device == "npu":
        for path in quantised.files():
            _check_mode(path)
        return
    for algorithm in quantised.algorithms:
        if algorithm != EVERYWHERE:
            raise InputError(
                f"{quantised.folder} holds {algorithm} weights, which run on NPUs only; use "
                f"`device=npu`, or an export in {EVERYWHERE}."
            )


def _check_mode(path: Path) -> None:
    """mindiesd's rules for files it reads: no link, of the user or its group, not open to all."""
    if path.is_symlink():
        raise InputError(
            f"{path} is a symbolic link, which mindiesd does not read; put a copy there."
        )
    status = path.stat()
    if os.geteuid() not in (0, status.st_uid) and os.getgid() != status.st_gid:
        raise InputError(
            f"{path} belongs to another user and group, whose files mindiesd does not read; "
            f"run chown $(id -u) {path}."
        )
    if stat.S_IMODE(status.st_mode) & 0o777 & ~MODE:
        raise InputError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, but mindiesd reads files of mode "
            f"{MODE:04o} or stricter only; run chmod {MODE:04o} {path}."
        )


def _read_export(folder: Path, dit: DitFiles) -> Export:
    """What a folder holds for a network. InputError for all that is missing or does not fit."""
    description = _description_file(folder)
    entries = read_json(description)
    kind = entries.get("model_quant_type")
    if kind not in (*_LINEAR, *_ATTENTION, "W16A16"):
        said = "has no model_quant_type" if kind is None else f"has the model_quant_type {kind!r}"
        raise InputError(
            f"{description} {said}; known are {', '.join((*_LINEAR, *_ATTENTION))}: export again."
        )
    _check_entries(description, entries, dit)
    weights = folder / f"quant_model_weight_{kind.lower()}.safetensors"
    if not weights.is_file():
        _refuse_ranks(folder, weights.stem)
        raise InputError(f"{weights} is missing; copy or export it beside {description.name}.")
    reader = _Reader(dit, description, entries, weights, safetensors_header(weights))
    linears = {n: layer for n in _linear_layers(dit) if (layer := reader.linear(n))}
    attentions = {
        int(name.split(".")[1]): layer
        for name in _self_attentions(dit)
        if (layer := reader.attention(name))
    }
    if not linears and not attentions:
        raise InputError(f"{description} quantises no layer; drop `quant_dit_path`.")
    return Export(description, weights, DESCRIPTIONS[description.name], linears, attentions)


def _description_file(folder: Path) -> Path:
    for name in DESCRIPTIONS:
        if (folder / name).is_file():
            return folder / name
    _refuse_ranks(folder, "quant_model_description*")
    raise InputError(
        f"{folder} holds no description of quantised weights; expected {' or '.join(DESCRIPTIONS)} "
        "(two experts: in high_noise_model/ and low_noise_model/)."
    )


def _refuse_ranks(folder: Path, stem: str) -> None:
    for path in sorted(folder.glob(f"{stem}_*")):
        if re.search(r"_\d+$", path.stem):
            raise InputError(
                f"{path} is one rank's share of an export, which is not supported; export the "
                "network whole."
            )


def _linear_layers(dit: DitFiles) -> list[str]:
    return [n.removesuffix(".weight") for n, info in dit.tensors.items() if len(info.shape) == 2]


def _self_attentions(dit: DitFiles) -> list[str]:
    return [n.removesuffix(".q") for n in _linear_layers(dit) if n.endswith(".self_attn.q")]


def _check_entries(description: Path, entries: Mapping[str, Any], dit: DitFiles) -> None:
    """Entries must name a layer of this network that can be quantised, and a known algorithm."""
    parts = [name.split(".") for name in dit.tensors]
    modules = {".".join(name[:end]) for name in parts for end in range(1, len(name))}
    linears, attentions = set(_linear_layers(dit)), set(_self_attentions(dit))
    biases = {f"{name}.bias" for name in linears}  # which follow their weight
    for key, value in entries.items():
        suffix = next((s for s in _SUFFIXES if s and key.endswith(s)), "")
        name = key.removesuffix(suffix)
        algorithm = str(value).upper()
        named = suffix or name in modules or (name in dit.tensors and name not in biases)
        if algorithm in (_FLOAT, *_UNQUANTISED) or not named:
            continue  # FLOAT needs nothing; other keys describe the export or its extra tensors
        if algorithm not in (*_LINEAR, *_ATTENTION):
            raise InputError(
                f"{description} gives {key} the unknown algorithm {value!r}; known are "
                f"{', '.join((*_LINEAR, *_ATTENTION))}."
            )
        if name not in modules and name not in dit.tensors:
            raise InputError(
                f"{description} quantises {name}, which {dit.folder} does not have; the export "
                "belongs to another checkpoint."
            )
        if name not in (linears if algorithm in _LINEAR else linears | attentions):
            kind = "linear layer" if algorithm in _LINEAR else "self-attention"
            raise InputError(
                f"{description} quantises {name} as {algorithm}, but it is no {kind}; export it as "
                "FLOAT."
            )


@dataclass(frozen=True)
class _Reader:
    """Finds the layers of one network in one description and its weight file."""

    dit: DitFiles
    description: Path
    entries: Mapping[str, Any]
    weights: Path
    tensors: Mapping[str, TensorInfo]  # of the weight file

    def algorithm(self, name: str) -> str | None:
        """mindiesd's rule: FLOAT anywhere excludes a layer, else the first algorithm counts.

        Algorithms are read in any case, FLOAT is not: "float" is no statement at all.
        """
        stated = [self.entries[name + s] for s in _SUFFIXES if name + s in self.entries]
        words = [str(value).upper() for value in stated]
        known = [word for word in words if word != _FLOAT]
        if _FLOAT in stated or not known or known[0] in _UNQUANTISED:
            return None
        return known[0]

    def linear(self, name: str) -> Layer | None:
        algorithm = self.algorithm(name)
        if algorithm is None:
            return None
        if algorithm not in _LINEAR:
            raise InputError(
                f"{self.description} gives the linear layer {name} {algorithm}, an algorithm for "
                "attention; export again."
            )
        if keeps_fp32(f"{name}.weight"):
            raise InputError(
                f"{self.description} quantises {name}, which is computed in float32 here; export "
                "it as FLOAT."
            )
        # A smoothed layer keeps its tensors one level deeper, beside the inputs' factors.
        smooth = f"{name}.div.mul_scale"
        prefix = f"{name}.linear" if smooth in self.tensors else name
        parts = ("weight", *_LINEAR[algorithm])
        parts += ("bias",) if f"{name}.bias" in self.dit.tensors else ()
        tensors = {part: self.tensor(f"{prefix}.{part}") for part in parts}
        if prefix != name:
            tensors["mul_scale"] = self.tensor(smooth)
        rows, columns = self.dit.tensors[f"{name}.weight"].shape
        self.check_linear(algorithm, tensors, rows, columns)
        return Layer(algorithm, tensors)

    def check_linear(
        self, algorithm: str, tensors: Mapping[str, TensorInfo], rows: int, columns: int
    ) -> None:
        """What mindiesd takes. rows, columns: of the weight, which the checkpoint knows."""
        weight, scale = tensors["weight"], tensors.get("weight_scale")
        width = columns // 2 if weight.dtype == "U8" else columns
        self.check(algorithm, weight, _MX.get(algorithm, ("I8",)), (rows, width))
        if algorithm != EVERYWHERE:  # of the others' scales mindiesd tells no more than the dtype
            if scale is not None:
                self.check(algorithm, scale, ("U8",) if algorithm in _MX else _FLOATING)
            return
        self.check(algorithm, tensors["weight_scale"], _FLOATING, (rows,), (rows, 1))
        for part, size in (("bias", rows), ("mul_scale", columns)):
            if part in tensors:
                self.check(algorithm, tensors[part], _FLOATING, (size,))

    def attention(self, name: str) -> Layer | None:
        algorithm = self.algorithm(name)
        if algorithm not in _ATTENTION:
            return None
        size = self.dit.config["dim"] // self.dit.config["num_heads"]
        parts: tuple[str, ...] = ("q_rot", "k_rot")
        if algorithm == "MXFP4_DYNAMIC":  # the one whose rotations may be missing
            parts = tuple(part for part in parts if f"{name}.{part}" in self.tensors)
        tensors = {part: self.tensor(f"{name}.{part}") for part in parts}
        for info in tensors.values():
            self.check(algorithm, info, _FLOATING, (size, size))
        return Layer(algorithm, tensors)

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise InputError(
                f"{self.weights} lacks the tensor {name} that {self.description.name} asks for; "
                "export the weights again."
            )
        return self.tensors[name]

    def check(
        self, algorithm: str, info: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]
    ) -> None:
        if info.dtype not in dtypes or (shapes and info.shape not in shapes):
            wanted = " ".join((" or ".join(dtypes), *(str(list(shape)) for shape in shapes[:1])))
            raise InputError(
                f"{self.weights}: {info.name} is {info.dtype} {list(info.shape)}, but "
                f"{algorithm} takes {wanted} there; the export belongs to another checkpoint, or "
                "is damaged."
            )
