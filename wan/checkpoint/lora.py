"""Maps the tensors of LoRA files to a network's parameters, reading headers and alphas only.

A file holds low-rank pairs (W + strength * alpha / rank * up @ down), full weight deltas (.diff),
or both, in any of the NAMINGS. A file with a tensor that fits no parameter is refused: ignoring the
tensor would silently change the video.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from wan.checkpoint.expert_names import EXPERTS, ExpertTag, detect_experts, find_expert_tags
from wan.checkpoint.headers import (
    compute_fingerprint,
    list_shards,
    read_safetensors_header,
    read_safetensors_scalars,
)
from wan.checkpoint.keymaps import rename_dit_to_diffusers
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.peft_settings import read_peft_settings
from wan.checkpoint.tensor_info import FLOATS, TensorInfo
from wan.settings.command import Loras
from wan.settings.errors import InputError
from wan.settings.fields import list_options
from wan.settings.values import format_value


class Naming(NamedTuple):
    """A program's names for the LoRA tensors of a layer.

    Attributes:
        program: The programs that write such files.
        prefix: Precedes the layer's name.
        down: Suffix of the matrix [rank, columns].
        up: Suffix of the matrix [rows, rank].
        bias: Suffix of a bias that is scaled like the pair; None if there is none.
    """

    program: str
    prefix: str
    down: str
    up: str
    bias: str | None = None


_A_B = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")
_DOWN_UP = (".lora_down.weight", ".lora_up.weight", ".lora_up.bias")
_HIGH_NOISE_PREFIX, _LOW_NOISE_PREFIX = "transformer.", "transformer_2."  # of diffusers
NAMINGS = (
    Naming("LightX2V, ComfyUI", "diffusion_model.", *_DOWN_UP),
    Naming("ComfyUI, with the whole model's prefix", "model.", *_DOWN_UP),
    Naming("musubi-tuner, kohya", "lora_unet_", *_DOWN_UP),
    Naming("diffusers", _HIGH_NOISE_PREFIX, *_A_B),
    Naming("diffusers, the low-noise expert", _LOW_NOISE_PREFIX, *_A_B),
    Naming(
        "PEFT",
        "base_model.model.",
        ".lora_A.default.weight",
        ".lora_B.default.weight",
        ".lora_B.default.bias",
    ),
    Naming("diffusers' attention processors", "", "_lora.down.weight", "_lora.up.weight"),
    Naming("LoRA modules in a network", "", ".lora.down.weight", ".lora.up.weight"),
    Naming("parameters without a module", "", ".lora_A", ".lora_B"),
    Naming("parameters without a module", "", ".lora_down", ".lora_up"),
)
"""One row for each program, for the documentation. In a file, a prefix may be repeated, and be
combined with the suffixes of any row. A layer has its official or its diffusers name, with dots or
underscores."""
DIFFERENCES = {
    ".diff": "weight",
    ".w_norm": "weight",
    ".diff_b": "bias",
    ".b_norm": "bias",
    ".diff_m": "modulation",
}
"""Suffix of a full weight delta -> the parameter to which it is added."""
_PREFIXES = [naming.prefix for naming in NAMINGS if naming.prefix]
_SUFFIX_ROLES = {  # suffix -> role of the tensor
    **{naming.down: "down" for naming in NAMINGS},
    **{naming.up: "up" for naming in NAMINGS},
    **{suffix: f"difference of the {parameter}" for suffix, parameter in DIFFERENCES.items()},
    **{naming.bias: "bias" for naming in NAMINGS if naming.bias is not None},
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
_TEXT_ENCODER_PREFIXES = ("text_encoder.", "lora_te", "conditioner.", "cond_stage_model.")
_FLAGS = {"both": "lora", "high_noise": "lora_high_noise", "low_noise": "lora_low_noise"}
_RELIGHTING_FLAG = "use_relighting_lora"
_RELIGHTING_FILES = ("relighting_lora.ckpt", "relighting_lora/adapter_model.safetensors")
_MAX_ABS = 1e6  # of a strength or an alpha; larger ones may overflow


@dataclass(frozen=True)
class WeightDelta:
    """A weight delta of one parameter: scale * up @ down, or scale * full."""

    scale: float
    up: TensorInfo | None = None
    down: TensorInfo | None = None
    full: TensorInfo | None = None

    @property
    def rank(self) -> int:
        """The rank of up @ down; 0 for a full delta."""
        return 0 if self.down is None else self.down.shape[0]


@dataclass(frozen=True)
class Lora:
    """A file and its weight deltas for one network.

    Attributes:
        deltas: By parameter name.
        tag: The expert tag in the file's name that selected the network; "" if a flag did.
    """

    path: Path
    strength: float
    deltas: dict[str, tuple[WeightDelta, ...]]
    tag: str = ""


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file and its strength, given as `FILE=STRENGTH`."""

    path: Path
    strength: float = 1.0


def parse_lora_file(text: str) -> LoraFile:
    """Splits `FILE=STRENGTH` at the last "="; without a number after it, all of it is the file.

    Raises:
        InputError: The strength is "nan", or above 1e6 in magnitude.
    """
    file, equals, tail = text.rpartition("=")
    try:
        strength = float(tail) if equals else None
    except ValueError:
        strength = None
    if strength is None:
        return LoraFile(Path(os.path.expanduser(text)))
    if not abs(strength) <= _MAX_ABS:
        why = f"has the strength {format_value(tail)}"
        raise InputError("LoRA", file, why, f"give a number from -{_MAX_ABS:g} to {_MAX_ABS:g}")
    return LoraFile(Path(os.path.expanduser(file)), strength)


def list_lora_files(values: Mapping[str, Any]) -> dict[str, tuple[LoraFile, ...]]:
    """Returns the files of the settings `Loras` by the network for which a flag gives them.

    Its keys are "high_noise", "low_noise", and "both" for files of all networks.

    Raises:
        InputError: A folder of `lora_dir` lacks a file, or a strength is "nan" or above 1e6 in
            magnitude.
    """
    files_by_network = {
        network: tuple(parse_lora_file(text) for text in values.get(flag, ()))
        for network, flag in _FLAGS.items()
    }
    for expert in EXPERTS if "lora_dir" in values else ():
        path = values["lora_dir"] / f"{expert}_model.safetensors"
        if not path.is_file():
            files = " and ".join(f"{name}_model.safetensors" for name in EXPERTS)
            remedy = f"give a folder with {files}, or `lora_high_noise` and `lora_low_noise`"
            raise InputError("`lora_dir`", path.parent, f"has no {path.name}", remedy)
        files_by_network[expert] += (LoraFile(path),)
    return files_by_network


def _locate_lora_file(lora_file: LoraFile, folder: Path) -> LoraFile:
    """Falls back to ComfyUI's folder `loras` in the checkpoint's if the file does not exist."""
    path, cwd = Path(os.path.abspath(lora_file.path)), Path.cwd()
    fallback = folder / "loras" / (path.relative_to(cwd) if path.is_relative_to(cwd) else path.name)
    if not lora_file.path.exists() and fallback.is_file():
        return LoraFile(fallback, lora_file.strength)
    return lora_file


def _assign_by_name(
    files: Mapping[str, tuple[LoraFile, ...]],
) -> tuple[dict[str, tuple[LoraFile, ...]], dict[Path, ExpertTag]]:
    """Assigns files whose names have an expert tag, as in published pairs, to that expert only.

    Returns:
        The files of each network, and the tags of the files that were moved out of "both".

    Raises:
        InputError: A name contradicts the flag, or only one file of a pair has an expert tag.
    """
    tags = detect_experts(
        {lora_file.path for lora_files in files.values() for lora_file in lora_files}
    )
    files_by_network: dict[str, tuple[LoraFile, ...]] = dict.fromkeys(files, ())
    applied_tags: dict[Path, ExpertTag] = {}
    for network, lora_files in files.items():
        for lora_file in lora_files:
            tag = tags[lora_file.path]
            if tag is None or (network == "both" and _holds_both_experts(lora_file.path)):
                files_by_network[network] += (lora_file,)
            elif network == "both":
                applied_tags[lora_file.path] = tag
                files_by_network[tag.expert] += (lora_file,)
            else:
                if network != tag.expert and (tag.in_file_name or tag.has_noise):
                    remedy = f"give it with `{_FLAGS[tag.expert]}`, or rename it"
                    why = f"is named as the {tag.expert} expert"
                    raise InputError(f"`{_FLAGS[network]}`", lora_file.path, why, remedy)
                files_by_network[network] += (lora_file,)
    for lora_file in files_by_network["both"]:
        _check_untagged_pair(lora_file.path, applied_tags)
    return files_by_network, applied_tags


def _holds_both_experts(file: Path) -> bool:
    """Returns whether a file has tensors of both experts."""
    if not file.is_file() or file.suffix != ".safetensors":
        return False
    return _names_both_experts(read_safetensors_header(file))


def _names_both_experts(names: Iterable[str]) -> bool:
    """Whether some tensors have diffusers' prefix of the low-noise expert, and others do not."""
    return len({name.startswith(_LOW_NOISE_PREFIX) for name in names}) == 2


def _check_untagged_pair(file: Path, applied_tags: Mapping[Path, ExpertTag]) -> None:
    """Refuses `style.safetensors` for both experts next to `style_high.safetensors` for one.

    The name of the low-noise expert's file probably lacks its tag.
    """

    def squeeze(name: str) -> str:
        return re.sub(r"[\W_]+", "", name.lower())

    matches = {
        tag.expert: other
        for other, tag in applied_tags.items()
        if tag.in_file_name and squeeze(other.stem.replace(tag.text, "", 1)) == squeeze(file.stem)
    }
    if len(matches) == 1:
        (expert, other) = next(iter(matches.items()))
        why = f"has no expert in its name, and {other.name} is named as the {expert} expert"
        remedy = "give each with `lora_high_noise` or `lora_low_noise`"
        raise InputError("`lora`", file, why, remedy)


def iter_lora_notices(
    loras: Mapping[str, Sequence[Lora]], task_kind: str, recipe_has_pair: bool
) -> Iterator[str]:
    """Yields log lines: the LoRAs of each network, and probable mistakes.

    Args:
        loras: By network.
        task_kind: Kind of the task, such as "t2v".
        recipe_has_pair: Whether a recipe is used whose LoRAs are published as one for each expert.
    """
    for network, group in loras.items():
        for lora in group:
            layers = len({name.rpartition(".")[0] for name in lora.deltas})
            yield f"LoRA of {network}: {lora.path}, strength {lora.strength:g}, {layers} layers."
    if len(loras) == len(EXPERTS):
        yield from _iter_name_notices(loras)
    for file in dict.fromkeys(lora.path for group in loras.values() for lora in group):
        named_kinds = re.findall(r"(?<![a-z])(?:ti2v|t2v|i2v|flf2v)(?![a-z])", file.stem.lower())
        allowed_kinds = {task_kind, {"i2v": "flf2v", "vace": "t2v"}.get(task_kind, task_kind)}
        if named_kinds and not allowed_kinds & {*named_kinds}:
            yield f"{file} has {named_kinds[0]} in its name, but the task is a {task_kind} one."
    empty_networks = [network for network, group in loras.items() if not group]
    if recipe_has_pair and empty_networks and len(empty_networks) < len(loras):
        yield (
            f"The {empty_networks[0]} expert has no LoRA, but the recipe has a pair; give its file "
            f"with `lora_{empty_networks[0]}`."
        )


def _iter_name_notices(loras: Mapping[str, Sequence[Lora]]) -> Iterator[str]:
    """Yields log lines on files assigned to one expert by name, and on ambiguous names."""
    files = {network: {lora.path for lora in group} for network, group in loras.items()}
    shared = files["high_noise"] & files["low_noise"]
    for network, other in (EXPERTS, EXPERTS[::-1]):
        if files[other] <= shared:  # otherwise each expert has a file
            for lora in loras[network]:
                if lora.tag:
                    yield (
                        f'{lora.path.name} goes into the {network} expert only, because of "'
                        f'{lora.tag}" in its name; give the file of the other expert too, or '
                        "rename it if it is for both."
                    )
    for file in dict.fromkeys(lora.path for lora in loras["high_noise"] if lora.path in shared):
        tag = next((tag for tag in find_expert_tags(file.stem) if tag.is_ambiguous), None)
        if tag is not None:
            yield (
                f'{file.name} goes into both experts; if "{tag.text}" in its name means the '
                f"{tag.expert} one, give it with `{_FLAGS[tag.expert]}`."
            )


def _find_relighting_lora(folder: Path) -> Path:
    """Returns the relighting LoRA of an Animate checkpoint."""
    path = next((folder / name for name in _RELIGHTING_FILES if (folder / name).is_file()), None)
    if path is None:
        why = f"needs {' or '.join(_RELIGHTING_FILES)}, which {folder} lacks"
        raise InputError(
            f"`{_RELIGHTING_FLAG}`", None, why, "download it, or give a file with `lora`"
        )
    return path


def resolve_loras(values: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, tuple[Lora, ...]]:
    """Resolves the settings `Loras` to the LoRAs of each network of a checkpoint.

    Raises:
        InputError: A file does not fit the network or cannot be read, or other settings exclude
            LoRAs.
    """
    flags = [flag for flag in list_options(Loras) if values.get(flag)]
    files = list_lora_files(values)
    if not flags:
        return {}
    subject = f"`{flags[0]}`"
    if checkpoint.folder is None:  # a plan from published sizes; LoRAs do not change them
        return {}
    if values.get("quant_dit_path") is not None:
        why = "changes weights, but those of `quant_dit_path` are already quantized"
        raise InputError(subject, None, why, "quantize them with tools/quantize_dit.py --lora")
    if values.get(_RELIGHTING_FLAG):
        files["both"] += (LoraFile(_find_relighting_lora(checkpoint.folder)),)
    if "dit" in checkpoint.experts and not {*flags} <= {"lora", _RELIGHTING_FLAG}:
        flag = next(flag for flag in flags if flag not in ("lora", _RELIGHTING_FLAG))
        why = "is for two experts, but this checkpoint has one network"
        raise InputError(f"`{flag}`", None, why, "use `lora`")
    files = {
        network: tuple(_locate_lora_file(lora_file, checkpoint.folder) for lora_file in lora_files)
        for network, lora_files in files.items()
    }
    tags: dict[Path, ExpertTag] = {}
    if "dit" not in checkpoint.experts:
        files, tags = _assign_by_name(files)
    for expert in EXPERTS:
        for lora_file in files[expert]:
            reader = _LoraReader(lora_file, checkpoint, expert)
            if _names_both_experts(reader.tensors):
                raise reader.make_error(
                    f"holds both experts' tensors ({_HIGH_NOISE_PREFIX} and {_LOW_NOISE_PREFIX}), "
                    f"but is given for the {expert} one",
                    "give it with `lora`",
                )
    return {
        expert: tuple(
            replace(
                _LoraReader(lora_file, checkpoint, expert).read(),
                tag=tags[lora_file.path].text if lora_file.path in tags else "",
            )
            for lora_file in (*files["both"], *files.get(expert, ()))
        )
        for expert in checkpoint.experts
    }


class _LoraReader:
    """Reads the header of one LoRA file, for one network of a checkpoint."""

    def __init__(self, lora_file: LoraFile, checkpoint: Checkpoint, expert: str) -> None:
        self.path, self.strength, self.expert = lora_file.path, lora_file.strength, expert
        if not self.path.is_file():
            raise self.make_error("does not exist or is no file", "give a .safetensors file")
        if self.path.suffix not in (".safetensors", ".ckpt"):
            raise self.make_error("is no .safetensors file", "convert it")
        if len(list_shards(self.path)) > 1:
            raise self.make_error("is one of several shards", "give a LoRA in one file")
        self.tensors = _read_lora_header(self.path)
        tensors = checkpoint.experts[expert].tensors
        self.parameter_shapes = {name: info.shape for name, info in tensors.items()}

    @property
    def has_low_noise_tensors(self) -> bool:
        """Whether tensors have diffusers' prefix of the low-noise expert."""
        return any(name.startswith(_LOW_NOISE_PREFIX) for name in self.tensors)

    def make_error(self, why: str, remedy: str = "it was made for another model") -> InputError:
        return InputError("LoRA", self.path, why, remedy)

    def read(self) -> Lora:
        """Returns the file's weight deltas for the network."""
        layers = self.group_by_layer()
        alphas = {
            layer: layer_tensors["alpha"]
            for layer, layer_tensors in layers.items()
            if "alpha" in layer_tensors
        }
        for info in alphas.values():
            if prod(info.shape) != 1:
                raise self.make_error(
                    f"holds {info.name}, which is no single number", "it is damaged"
                )
        if alphas and self.path.suffix == ".ckpt":
            raise self.make_error(
                "holds alphas, which are read from .safetensors only", "convert it"
            )
        scalars = read_safetensors_scalars(self.path, [info.name for info in alphas.values()])
        # PEFT's scale settings apply only to files without alphas.
        is_low_noise = self.has_low_noise_tensors and self.expert == "low_noise"
        prefix = _LOW_NOISE_PREFIX if is_low_noise else _HIGH_NOISE_PREFIX
        peft_settings = read_peft_settings(self.path, prefix)
        scaling = {} if alphas else peft_settings
        deltas: dict[str, list[WeightDelta]] = {}
        for layer, tensors in layers.items():
            alpha = scalars[alphas[layer].name] if layer in alphas else scaling.get("lora_alpha")
            for name, delta in self.iter_deltas(
                layer, tensors, alpha, bool(scaling.get("use_rslora"))
            ):
                deltas.setdefault(name, []).append(delta)
        return Lora(
            self.path,
            self.strength,
            {name: tuple(deltas_of_name) for name, deltas_of_name in deltas.items()},
        )

    def group_by_layer(self) -> dict[str, dict[str, TensorInfo]]:
        """Groups the file's tensors by official layer name, then by role (`_SUFFIX_ROLES`)."""
        if self.has_low_noise_tensors and self.expert == "dit":
            remedy = "this checkpoint has one network"
            raise self.make_error(f"is for two experts ({_LOW_NOISE_PREFIX}...)", remedy)
        spellings = _map_layer_spellings(self.parameter_shapes)
        layers: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.tensors.items():
            for pattern, adapter_type in _UNSUPPORTED.items():
                if re.search(pattern, name):
                    remedy = "merge it into the checkpoint with the program it was made with"
                    raise self.make_error(
                        f"holds {name} ({adapter_type}), which is not supported", remedy
                    )
            if name.startswith(_TEXT_ENCODER_PREFIXES):
                remedy = "only those of the video network are supported"
                raise self.make_error(f"holds {name}, which changes a text encoder", remedy)
            is_low_noise = name.startswith(_LOW_NOISE_PREFIX)
            if self.has_low_noise_tensors and is_low_noise != (self.expert == "low_noise"):
                continue
            suffix = next((suffix for suffix in _SUFFIX_ROLES if name.endswith(suffix)), None)
            if suffix is None and name.endswith((".weight", ".bias", ".modulation")):
                why = f"holds {name}: full weights, not differences"
                raise self.make_error(why, "give such a file as a checkpoint (`ckpt_dir`)")
            if suffix is None:
                why = f"holds {name}, which is not a known LoRA tensor"
                raise self.make_error(why, "convert it to one of the namings of docs/few_step.md")
            stem = name.removesuffix(suffix).replace(".processor.", ".")
            while prefix := next((p for p in _PREFIXES if stem.startswith(p)), None):
                stem = stem.removeprefix(prefix)
            if stem not in spellings:
                network = f"the {self.expert} network of this checkpoint"
                raise self.make_error(f"changes {stem or name}, which {network} does not have")
            layer = spellings[stem]
            first_info = layers.setdefault(layer, {}).setdefault(_SUFFIX_ROLES[suffix], info)
            if first_info is not info:
                raise self.make_error(
                    f"changes {layer} twice ({first_info.name} and {name})", "remove one"
                )
        if not layers:
            raise self.make_error(
                f"holds nothing for the {self.expert} network", "give another one"
            )
        return layers

    def iter_deltas(
        self, layer: str, tensors: Mapping[str, TensorInfo], alpha: Any, use_rslora: bool
    ) -> Iterator[tuple[str, WeightDelta]]:
        """Yields (parameter name, weight delta) for a layer.

        Args:
            layer: Official name.
            tensors: The layer's tensors by role (`_SUFFIX_ROLES`).
            alpha: The pair is scaled by alpha / rank; None: by 1.
            use_rslora: Scale by alpha / sqrt(rank) instead.
        """
        for role, info in tensors.items():
            if info.dtype not in FLOATS and role != "alpha":
                remedy = f"give it in one of {', '.join(FLOATS)}"
                raise self.make_error(f"holds {info.name}, which is stored as {info.dtype}", remedy)
        up, down, scale = tensors.get("up"), tensors.get("down"), 1.0
        if up is not None and down is not None:
            self.check_pair(up, down, f"{layer}.weight")
            rank = down.shape[0]
            alpha = rank if alpha is None else alpha
            is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
            if not is_number or not abs(alpha) <= _MAX_ABS:
                why = f"has alpha {format_value(alpha)} for {layer}"
                raise self.make_error(why, "it is damaged")
            scale = alpha / (math.sqrt(rank) if use_rslora else rank)
            yield f"{layer}.weight", WeightDelta(scale * self.strength, up=up, down=down)
        elif unpaired := up or down:
            raise self.make_error(f"has {unpaired.name}, but not the other factor", "it is damaged")
        elif "bias" in tensors or tensors.keys() == {"alpha"}:
            orphan = tensors.get("bias") or tensors["alpha"]
            raise self.make_error(f"has {orphan.name}, but no LoRA for this layer", "it is damaged")
        parameters_by_role = {
            f"difference of the {parameter}": parameter for parameter in DIFFERENCES.values()
        }
        for role, parameter in {**parameters_by_role, "bias": "bias"}.items():
            if role in tensors:
                info, name = tensors[role], f"{layer}.{parameter}"
                shape = self.parameter_shapes.get(name)
                if info.shape != shape:
                    expected = "absent in this network" if shape is None else list(shape)
                    why = f"holds {info.name} {list(info.shape)}, which does not fit {name}"
                    why = f"{why} ({expected})"
                    raise self.make_error(why, "it was made for another model, or is damaged")
                full_scale = scale if role == "bias" else 1.0
                yield name, WeightDelta(full_scale * self.strength, full=info)

    def check_pair(self, up: TensorInfo, down: TensorInfo, name: str) -> None:
        """Refuses a pair that does not fit the parameter.

        `up` is [rows, rank, 1, ...], `down` is [rank, columns...].
        """
        shape = self.parameter_shapes.get(name, ())
        fits = bool(shape) and len(up.shape) >= 2 and len(down.shape) >= 2 and prod(down.shape) > 0
        fits = fits and up.shape[1] == down.shape[0] and prod(up.shape[2:]) == 1
        if not fits or (up.shape[0], prod(down.shape[1:])) != (shape[0], prod(shape[1:])):
            pair = f"{up.name} {list(up.shape)} and {down.name} {list(down.shape)}"
            why = f"holds {pair}, which do not fit {name} {list(shape)}"
            raise self.make_error(why, "it was made for another model, or is damaged")


def _read_lora_header(path: Path) -> dict[str, TensorInfo]:
    if path.suffix == ".safetensors":
        return read_safetensors_header(path)
    from wan.checkpoint.load import read_headers  # imports torch

    return read_headers(path, str)


def _map_layer_spellings(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Maps every spelling of a layer's name, without a prefix, to its official name."""
    spellings: dict[str, str] = {}
    for name in parameters:
        official, _, parameter = name.rpartition(".")
        diffusers_name = rename_dit_to_diffusers(name)
        names = [
            official,
            diffusers_name.removesuffix(f".{parameter}") if parameter != "modulation" else official,
        ]
        if names[1].endswith(".to_out.0"):  # diffusers' attention processors have to_out_lora
            names.append(names[1].removesuffix(".0"))
        for spelling in names:
            spellings[spelling] = spellings[spelling.replace(".", "_")] = official
    return spellings


def collect_deltas(loras: Sequence[Lora]) -> dict[str, list[WeightDelta]]:
    """Returns the weight deltas of all LoRAs of a network by parameter name."""
    deltas: dict[str, list[WeightDelta]] = {}
    for lora in loras:
        for name, lora_deltas in lora.deltas.items():
            deltas.setdefault(name, []).extend(lora_deltas)
    return deltas


def make_lora_record(loras: Mapping[str, Sequence[Lora]]) -> dict[str, Any]:
    """Returns the files, strengths and fingerprints of each network, for the JSON record."""
    return {
        network: [
            {
                "file": str(lora.path.absolute()),
                "strength": lora.strength,
                "fingerprint": compute_fingerprint([lora.path]),
            }
            for lora in network_loras
        ]
        for network, network_loras in loras.items()
        if network_loras
    }
