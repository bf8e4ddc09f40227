"""LoRA and difference files: which tensors change which parameter, found without reading weights.

A file holds low-rank pairs (W + strength * alpha / rank * up @ down) or whole differences under the
names of any of the families below. Every tensor finds its parameter, or the file is refused: what
is dropped silently is a video that is quietly wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint.files import (
    FLOATS,
    TensorInfo,
    fingerprint,
    safetensors_header,
    safetensors_metadata,
    safetensors_scalars,
)
from wan.checkpoint.keymaps import dit_diffusers_name
from wan.checkpoint.layout import Checkpoint
from wan.settings.errors import InputError

# The end of a tensor's name -> what it is. "down" and "up" are the factors, "bias" is added as the
# pair is, the others are differences of a layer's weight, bias or modulation.
ENDS = {
    **dict.fromkeys((".lora_down.weight", ".lora_A.weight", ".lora_A.default.weight"), "down"),
    **dict.fromkeys((".lora_up.weight", ".lora_B.weight", ".lora_B.default.weight"), "up"),
    **dict.fromkeys(("_lora.down.weight", ".lora.down.weight", ".lora_A", ".lora_down"), "down"),
    **dict.fromkeys(("_lora.up.weight", ".lora.up.weight", ".lora_B", ".lora_up"), "up"),
    **dict.fromkeys((".lora_up.bias", ".lora_B.bias", ".lora_B.default.bias"), "bias"),
    **dict.fromkeys((".diff", ".w_norm"), "diff"),
    **dict.fromkeys((".diff_b", ".b_norm"), "diff_b"),
    ".diff_m": "diff_m",
    ".alpha": "alpha",
}
_UNSUPPORTED = {
    r"\.(dora_scale|lora_magnitude_vector.*)$": "DoRA",
    r"\.hada_(w|t)\w+$": "LoHa",
    r"\.lokr_\w+$": "LoKr",
    r"\.(oft_\w+|a_\d+_\d+|rescale)$": "OFT",
    r"\.lora_mid\.weight$": "LoCon with a core",
    r"\.(on_input|ia3_\w+)$": "IA3",
    r"\.(vera_\w+|lora_embedding_\w+|reshape_weight|set_weight)$": "not a plain LoRA",
}
PREFIXES = ("base_model.model.", "diffusion_model.", "model.", "transformer.", "lora_unet_")
_FIRST, _SECOND = "transformer.", "transformer_2."  # diffusers' names of the experts
_TEXT = ("text_encoder.", "lora_te", "conditioner.", "cond_stage_model.")


FLAGS = {
    "lora": "both",
    "lora_high_noise": "high_noise",
    "lora_low_noise": "low_noise",
    "lora_dir": "each",
}
"""Flag -> the network that its files change."""


@dataclass(frozen=True)
class Change:
    """What a file adds to one parameter: factor * up @ down, or factor * full."""

    factor: float
    up: TensorInfo | None = None
    down: TensorInfo | None = None
    full: TensorInfo | None = None


@dataclass(frozen=True)
class Lora:
    """A file and what it adds to one network. changes: parameter's name -> all that is added."""

    file: Path
    strength: float
    changes: dict[str, tuple[Change, ...]]


@dataclass(frozen=True)
class Named:
    """A file and its strength, as `FILE=STRENGTH`."""

    file: Path
    strength: float = 1.0


def named(text: str) -> Named:
    """Split at the last "=" where a number follows it."""
    file, equals, tail = text.rpartition("=")
    try:
        strength = float(tail) if equals else math.nan
    except ValueError:
        return Named(Path(text).expanduser())
    if not equals:
        return Named(Path(text).expanduser())
    if not math.isfinite(strength):
        raise InputError(f"The strength of the LoRA {file} is {tail}; it must be a finite number.")
    return Named(Path(file).expanduser(), strength)


def in_folder(folder: Path) -> dict[str, Named]:
    """The experts' files of a --lora_dir."""
    found = {}
    for expert in ("high_noise", "low_noise"):
        path = folder / f"{expert}_model.safetensors"
        if not path.is_file():
            raise InputError(
                f"`lora_dir={folder}` has no {path.name}; give a folder with high_noise_model."
                "safetensors and low_noise_model.safetensors, or `lora_high_noise` and "
                "`lora_low_noise`."
            )
        found[expert] = Named(path)
    return found


def named_files(values: Mapping[str, Any]) -> dict[str, tuple[Named, ...]]:
    """The files of settings under the names FLAGS, by network; "both": of every network."""
    found = {
        network: tuple(named(text) for text in values.get(flag, ()))
        for flag, network in FLAGS.items()
        if flag != "lora_dir"
    }
    if "lora_dir" in values:
        for expert, one in in_folder(values["lora_dir"]).items():
            found[expert] += (one,)
    return found


def resolve(values: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, tuple[Lora, ...]]:
    """What is added to each network. InputError for files that do not fit them."""
    files, given = named_files(values), [flag for flag in FLAGS if values.get(flag)]
    if not given:
        return {}
    if checkpoint.folder is None:
        raise InputError(f"`{given[0]}` changes the weights of a checkpoint; add its `ckpt_dir`.")
    if values.get("quant_dit_path") is not None:
        raise InputError(
            f"`{given[0]}` changes weights, but those of `quant_dit_path` are quantised already; "
            "quantise them with tools/quantize_dit.py --lora."
        )
    if "dit" in checkpoint.experts and given != ["lora"]:
        flag = next(flag for flag in given if flag != "lora")
        raise InputError(f"`{flag}` is for two experts; this checkpoint has one network: `lora`.")
    for expert in ("high_noise", "low_noise"):
        for one in files[expert]:
            _check_single(one.file, expert)
    return {
        expert: tuple(
            _read(one, checkpoint, expert) for one in (*files["both"], *files.get(expert, ()))
        )
        for expert in checkpoint.experts
    }


def _check_single(path: Path, expert: str) -> None:
    """A file that is given for one expert must not hold both experts'."""
    if path.suffix == ".safetensors" and path.is_file():
        names = safetensors_header(path)
        if len({name.startswith(_SECOND) for name in names}) == 2:
            raise InputError(
                f"LoRA {path} holds both experts' tensors ({_FIRST} and {_SECOND}), but is given "
                f"for the {expert} one; give it with `lora`."
            )


def _read(given: Named, checkpoint: Checkpoint, expert: str) -> Lora:
    path = given.file
    if path.suffix != ".safetensors" and path.is_file():
        raise InputError(f"LoRA {path} is no .safetensors file; convert it.")
    if not path.is_file():
        raise InputError(f"LoRA {path} does not exist or is no file; give a .safetensors file.")
    header = safetensors_header(path)
    parameters = {name: info.shape for name, info in checkpoint.experts[expert].tensors.items()}
    parts = _sorted(path, header, expert, _layers(parameters))
    two = any(name.startswith(_SECOND) for name in header)
    alphas = _Alphas(path, header, parts, _SECOND if two and expert == "low_noise" else _FIRST)
    changes: dict[str, list[Change]] = {}
    for layer, kinds in parts.items():
        for name, change in _changes(path, layer, kinds, parameters, alphas):
            factor = change.factor * given.strength
            changes.setdefault(name, []).append(Change(factor, change.up, change.down, change.full))
    return Lora(path, given.strength, {name: tuple(found) for name, found in changes.items()})


def _layers(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Every name of a layer, in all families -> the official one."""
    found: dict[str, str] = {}
    for name in parameters:
        official, _, end = name.rpartition(".")
        theirs = dit_diffusers_name(name)
        theirs = theirs.removesuffix(f".{end}") if end != "modulation" else official
        if theirs.endswith(".to_out.0"):  # to_out_lora of old
            found[theirs[:-2]] = found[theirs[:-2].replace(".", "_")] = official
        for spelling in (official, theirs):
            found[spelling] = found[spelling.replace(".", "_")] = official
    return found


def _sorted(
    path: Path, header: Mapping[str, TensorInfo], expert: str, layers: Mapping[str, str]
) -> dict[str, dict[str, TensorInfo]]:
    """Official layer -> kind -> tensor. InputError for a tensor that finds no place."""
    two = any(name.startswith(_SECOND) for name in header)
    if two and expert == "dit":
        raise InputError(
            f"LoRA {path} is for two experts ({_SECOND}...); this checkpoint has one network."
        )
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in header.items():
        for pattern, form in _UNSUPPORTED.items():
            if re.search(pattern, name):
                raise InputError(
                    f"LoRA {path} holds {name} ({form}), which is not supported; merge it into the "
                    "checkpoint with the program it was made with."
                )
        if name.startswith(_TEXT):
            raise InputError(
                f"LoRA {path} holds {name}, which changes a text encoder; only the video network's "
                "are supported."
            )
        if two and expert != ("low_noise" if name.startswith(_SECOND) else "high_noise"):
            continue
        stem, kind = _kind(path, name)
        layer = layers.get(_bare(stem))
        if layer is None:
            raise InputError(
                f"LoRA {path} changes {_bare(stem) or name}, which the {expert} network of this "
                "checkpoint does not have; it was made for another model."
            )
        twin = found.setdefault(layer, {}).setdefault(kind, info)
        if twin is not info:
            raise InputError(f"LoRA {path} changes {layer} twice ({twin.name} and {name}).")
    if not found:
        raise InputError(f"LoRA {path} holds nothing for the {expert} network.")
    return found


def _kind(path: Path, name: str) -> tuple[str, str]:
    """A tensor's layer, as the file calls it, and its kind."""
    for end, kind in ENDS.items():
        if name.endswith(end):
            return name.removesuffix(end), kind
    if name.endswith((".weight", ".bias", ".modulation")):
        raise InputError(
            f"LoRA {path} holds {name}: whole weights, not differences; give such a file as a "
            "checkpoint (`ckpt_dir`)."
        )
    raise InputError(f"LoRA {path} holds {name}, which is no part of a LoRA that is known.")


def _bare(stem: str) -> str:
    """A layer without what families put before it."""
    stem = stem.replace(".processor.", ".")
    while prefix := next((p for p in (*PREFIXES, _SECOND) if stem.startswith(p)), None):
        stem = stem.removeprefix(prefix)
    return stem


class _Alphas:
    """alpha / rank of each layer: a tensor of the file, its PEFT metadata, or 1."""

    def __init__(
        self,
        path: Path,
        header: Mapping[str, TensorInfo],
        parts: Mapping[str, Mapping[str, TensorInfo]],
        prefix: str,
    ) -> None:
        """prefix: Of the network in PEFT's metadata."""
        self._path = path
        tensors = {layer: kinds["alpha"] for layer, kinds in parts.items() if "alpha" in kinds}
        for info in tensors.values():
            if prod(info.shape) != 1:
                raise InputError(f"LoRA {path}: {info.name} is no single number; it is damaged.")
        scalars = safetensors_scalars(path, [info.name for info in tensors.values()])
        self._given = {layer: scalars[info.name] for layer, info in tensors.items()}
        self._told = {} if tensors else _metadata(path, prefix)

    def scale(self, layer: str, rank: int) -> float:
        alpha = self._given.get(layer)
        if alpha is None:
            alpha = self._told.get("lora_alpha", rank)
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise InputError(f"LoRA {self._path}: alpha of {layer} is {alpha}; it is damaged.")
        return alpha / (math.sqrt(rank) if self._told.get("use_rslora") else rank)


def _metadata(path: Path, prefix: str) -> dict[str, Any]:
    """What PEFT says of an adapter, as diffusers stores it, of one network."""
    raw = safetensors_metadata(path, "lora_adapter_metadata")
    if not isinstance(raw, dict):
        return {}
    told = {
        key.removeprefix(prefix): value
        for key, value in raw.items()
        if key.startswith(prefix) or "." not in key
    }
    for key in ("use_dora", "alpha_pattern"):
        if told.get(key):
            raise InputError(f"LoRA {path}: its metadata sets {key}, which is not supported.")
    return told


def _changes(
    path: Path,
    layer: str,
    kinds: Mapping[str, TensorInfo],
    parameters: Mapping[str, tuple[int, ...]],
    alphas: _Alphas,
) -> list[tuple[str, Change]]:
    """Of one layer: parameter's name and what is added."""
    found = []
    for info in kinds.values():
        if info.dtype not in FLOATS and not info.name.endswith(".alpha"):
            raise InputError(
                f"LoRA {path}: {info.name} is stored as {info.dtype}; give it in one of "
                f"{', '.join(FLOATS)}."
            )
    weight, factor = f"{layer}.weight", 1.0
    if "down" in kinds or "up" in kinds:
        for kind, other in (("down", "up"), ("up", "down")):
            if kind not in kinds:
                raise InputError(f"LoRA {path} has {kinds[other].name}, but not its other half.")
        up, down = kinds["up"], kinds["down"]
        _check_pair(path, up, down, weight, parameters)
        factor = alphas.scale(layer, down.shape[0])
        found.append((weight, Change(factor, up=up, down=down)))
    elif "bias" in kinds or ("alpha" in kinds and len(kinds) == 1):
        lone = kinds.get("bias") or kinds["alpha"]
        raise InputError(f"LoRA {path} has {lone.name}, but nothing that it belongs to.")
    names = {"diff": weight, "diff_b": f"{layer}.bias", "diff_m": f"{layer}.modulation"}
    for kind, name in {**names, "bias": f"{layer}.bias"}.items():
        if kind in kinds:
            _check_whole(path, kinds[kind], name, parameters)
            found.append((name, Change(factor if kind == "bias" else 1.0, full=kinds[kind])))
    return found


def _check_pair(
    path: Path,
    up: TensorInfo,
    down: TensorInfo,
    name: str,
    parameters: Mapping[str, tuple[int, ...]],
) -> None:
    """Rows of `up` by columns of `down`, over a shared rank; further axes of `up` are 1."""
    shape = parameters.get(name, ())
    fits = bool(shape) and len(up.shape) >= 2 and len(down.shape) >= 2 and prod(down.shape) > 0
    fits = fits and up.shape[1] == down.shape[0] and prod(up.shape[2:]) == 1
    if not fits or (up.shape[0], prod(down.shape[1:])) != (shape[0], prod(shape[1:])):
        raise InputError(
            f"LoRA {path}: {up.name} {list(up.shape)} and {down.name} {list(down.shape)} do not "
            f"fit {name} {list(shape)}; it was made for another model, or is damaged."
        )


def _check_whole(
    path: Path, info: TensorInfo, name: str, parameters: Mapping[str, tuple[int, ...]]
) -> None:
    if info.shape != parameters.get(name):
        theirs = list(parameters[name]) if name in parameters else "absent in this network"
        raise InputError(
            f"LoRA {path}: {info.name} {list(info.shape)} does not fit {name} ({theirs}); it was "
            "made for another model, or is damaged."
        )


def record(loras: Mapping[str, Sequence[Lora]]) -> dict[str, Any]:
    """For the JSON record: each network's files, strengths and fingerprints."""
    return {
        network: [
            {
                "file": str(one.file.absolute()),
                "strength": one.strength,
                "fingerprint": fingerprint([one.file]),
            }
            for one in ones
        ]
        for network, ones in loras.items()
        if ones
    }
