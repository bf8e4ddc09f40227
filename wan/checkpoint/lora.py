"""Maps the tensors of LoRA and difference files to a network's parameters, from headers alone.

A file holds low-rank pairs (W + strength * alpha / rank * up @ down), full weight differences, or
both, in any of the NAMINGS. A file with a tensor that fits no parameter is refused: ignoring the
tensor would silently change the video.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from wan.checkpoint.expert_names import EXPERTS, ExpertMark, find_experts, find_marks
from wan.checkpoint.files import (
    FLOATS,
    TensorInfo,
    fingerprint,
    list_shards,
    safetensors_header,
    safetensors_scalars,
)
from wan.checkpoint.keymaps import dit_diffusers_name
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.peft_settings import read_peft_settings
from wan.settings.command import Loras
from wan.settings.errors import InputError
from wan.settings.fields import options
from wan.settings.values import shown


class Naming(NamedTuple):
    """A program's names for the LoRA tensors of a layer.

    Attributes:
        program: The programs that write such files.
        prefix: Precedes the layer's name.
        down: Suffix of the factor [rank, columns].
        up: Suffix of the factor [rows, rank].
        bias: Suffix of a bias that is scaled like the pair; None if there is none.
    """

    program: str
    prefix: str
    down: str
    up: str
    bias: str | None = None


_A_B = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")
_DOWN_UP = (".lora_down.weight", ".lora_up.weight", ".lora_up.bias")
_FIRST, _SECOND = "transformer.", "transformer_2."  # diffusers' names of the experts
NAMINGS = (
    Naming("LightX2V, ComfyUI", "diffusion_model.", *_DOWN_UP),
    Naming("ComfyUI, with the whole model's prefix", "model.", *_DOWN_UP),
    Naming("musubi-tuner, kohya", "lora_unet_", *_DOWN_UP),
    Naming("diffusers", _FIRST, *_A_B),
    Naming("diffusers, the low-noise expert", _SECOND, *_A_B),
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
"""Prefixes may be repeated, and occur with the suffixes of any row. A layer has its official or its
diffusers name, with dots or underscores."""
DIFFERENCES = {
    ".diff": "weight",
    ".w_norm": "weight",
    ".diff_b": "bias",
    ".b_norm": "bias",
    ".diff_m": "modulation",
}
"""Suffix of a full difference -> the parameter to which it is added."""
_PREFIXES = [row.prefix for row in NAMINGS if row.prefix]
_ENDS = {  # suffix -> kind of tensor
    **{row.down: "down" for row in NAMINGS},
    **{row.up: "up" for row in NAMINGS},
    **{end: f"difference of the {part}" for end, part in DIFFERENCES.items()},
    **{row.bias: "bias" for row in NAMINGS if row.bias is not None},
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
_TEXT = ("text_encoder.", "lora_te", "conditioner.", "cond_stage_model.")
_FLAGS = {"both": "lora", "high_noise": "lora_high_noise", "low_noise": "lora_low_noise"}
_RELIGHTING = "use_relighting_lora"
_RELIGHTING_FILES = ("relighting_lora.ckpt", "relighting_lora/adapter_model.safetensors")
_MOST = 1e6  # of a strength or an alpha; larger ones may overflow


@dataclass(frozen=True)
class Change:
    """A weight delta of one parameter: factor * up @ down, or factor * full."""

    factor: float
    up: TensorInfo | None = None
    down: TensorInfo | None = None
    full: TensorInfo | None = None

    @property
    def rank(self) -> int:
        """The rank of up @ down; 0 for a full difference."""
        return 0 if self.down is None else self.down.shape[0]


@dataclass(frozen=True)
class Lora:
    """A file and its weight deltas for one network.

    Attributes:
        deltas: By parameter name.
        tag: The expert tag in the file's name that selected the network; "" if a flag did.
    """

    file: Path
    strength: float
    changes: dict[str, tuple[Change, ...]]
    mark: str = ""


@dataclass(frozen=True)
class Named:
    """A LoRA file and its strength, given as `FILE=STRENGTH`."""

    file: Path
    strength: float = 1.0


def named(text: str) -> Named:
    """Splits `FILE=STRENGTH` at the last "="; without a number after it, all of it is the file.

    Raises:
        InputError: The strength is "nan", infinite or absurdly large.
    """
    file, equals, tail = text.rpartition("=")
    try:
        strength = float(tail) if equals else None
    except ValueError:
        strength = None
    if strength is None:
        return Named(Path(os.path.expanduser(text)))
    if not abs(strength) <= _MOST:
        why = f"has the strength {shown(tail)}"
        raise InputError("LoRA", file, why, f"give a number from -{_MOST:g} to {_MOST:g}")
    return Named(Path(os.path.expanduser(file)), strength)


def named_files(values: Mapping[str, Any]) -> dict[str, tuple[Named, ...]]:
    """Returns the files of the settings `Loras` by network; "both" are for all networks.

    Raises:
        InputError: A folder of `lora_dir` lacks a file, or a strength is not finite.
    """
    found = {
        network: tuple(named(text) for text in values.get(flag, ()))
        for network, flag in _FLAGS.items()
    }
    for expert in EXPERTS if "lora_dir" in values else ():
        path = values["lora_dir"] / f"{expert}_model.safetensors"
        if not path.is_file():
            files = " and ".join(f"{name}_model.safetensors" for name in EXPERTS)
            remedy = f"give a folder with {files}, or `lora_high_noise` and `lora_low_noise`"
            raise InputError("`lora_dir`", path.parent, f"has no {path.name}", remedy)
        found[expert] += (Named(path),)
    return found


def _in_folder(one: Named, folder: Path) -> Named:
    """Looks up a file that does not exist as given in ComfyUI's folder `loras`."""
    file, here = Path(os.path.abspath(one.file)), Path.cwd()
    there = folder / "loras" / (file.relative_to(here) if file.is_relative_to(here) else file.name)
    return Named(there, one.strength) if not one.file.exists() and there.is_file() else one


def _place_by_name(
    files: Mapping[str, tuple[Named, ...]],
) -> tuple[dict[str, tuple[Named, ...]], dict[Path, ExpertMark]]:
    """Assigns files whose names have an expert tag, as in published pairs, to that expert only.

    Returns:
        The files of each network, and the tags of the files that were moved out of "both".

    Raises:
        InputError: A name contradicts the flag, or only one file of a pair has an expert tag.
    """
    marks = find_experts({one.file for ones in files.values() for one in ones})
    placed: dict[str, tuple[Named, ...]] = dict.fromkeys(files, ())
    counted: dict[Path, ExpertMark] = {}
    for network, ones in files.items():
        for one in ones:
            mark = marks[one.file]
            if mark is None or (network == "both" and _holds_both_experts(one.file)):
                placed[network] += (one,)
            elif network == "both":
                counted[one.file] = mark
                placed[mark.expert] += (one,)
            else:
                if network != mark.expert and (mark.in_name or mark.noise):
                    remedy = f"give it with `{_FLAGS[mark.expert]}`, or rename it"
                    why = f"is named as the {mark.expert} expert"
                    raise InputError(f"`{_FLAGS[network]}`", one.file, why, remedy)
                placed[network] += (one,)
    for one in placed["both"]:
        _check_twin(one.file, counted)
    return placed, counted


def _holds_both_experts(file: Path) -> bool:
    """Returns whether a file has tensors of both experts."""
    if not file.is_file() or file.suffix != ".safetensors":
        return False
    return len({name.startswith(_SECOND) for name in safetensors_header(file)}) == 2


def _check_twin(file: Path, counted: Mapping[Path, ExpertMark]) -> None:
    """Refuses a file for both experts whose name equals an expert's file name without its tag."""

    def squeeze(name: str) -> str:
        return re.sub(r"[\W_]+", "", name.lower())

    halves = {
        mark.expert: other
        for other, mark in counted.items()
        if mark.in_name and squeeze(other.stem.replace(mark.text, "", 1)) == squeeze(file.stem)
    }
    if len(halves) == 1:
        (expert, other) = next(iter(halves.items()))
        why = f"has no expert in its name, and {other.name} is named as the {expert} expert"
        remedy = "give each with `lora_high_noise` or `lora_low_noise`"
        raise InputError("`lora`", file, why, remedy)


def notices(loras: Mapping[str, Sequence[Lora]], kind: str, distilled: bool) -> Iterator[str]:
    """Yields log lines: the LoRAs of each network, and probable mistakes.

    Args:
        loras: By network.
        kind: The task's, such as "t2v".
        distilled: A recipe is used whose LoRAs are published for each expert.
    """
    for network, ones in loras.items():
        for one in ones:
            layers = len({name.rpartition(".")[0] for name in one.changes})
            yield f"LoRA of {network}: {one.file}, strength {one.strength:g}, {layers} layers."
    if len(loras) == len(EXPERTS):
        yield from _notices_of_names(loras)
    for file in dict.fromkeys(one.file for ones in loras.values() for one in ones):
        said = re.findall(r"(?<![a-z])(?:ti2v|t2v|i2v|flf2v)(?![a-z])", file.stem.lower())
        kinds = {kind, {"i2v": "flf2v", "vace": "t2v"}.get(kind, kind)}
        if said and not kinds & {*said}:
            yield f"{file} has {said[0]} in its name, but the task is a {kind} one."
    without = [network for network, ones in loras.items() if not ones]
    if distilled and without and len(without) < len(loras):
        yield (
            f"The {without[0]} expert has no LoRA, but the recipe has a pair; give its file with "
            f"`lora_{without[0]}`."
        )


def _notices_of_names(loras: Mapping[str, Sequence[Lora]]) -> Iterator[str]:
    """Yields log lines on files assigned to one expert by name, and on ambiguous names."""
    files = {network: {one.file for one in ones} for network, ones in loras.items()}
    shared = files["high_noise"] & files["low_noise"]
    for network, other in (EXPERTS, EXPERTS[::-1]):
        if files[other] <= shared:  # otherwise a pair was given
            for one in loras[network]:
                if one.mark:
                    yield (
                        f'{one.file.name} goes into the {network} expert only, because of "'
                        f'{one.mark}" in its name; give the file of the other expert too, or '
                        "rename it if it is for both."
                    )
    for file in dict.fromkeys(one.file for one in loras["high_noise"] if one.file in shared):
        mark = next((mark for mark in find_marks(file.stem) if mark.doubtful), None)
        if mark is not None:
            yield (
                f'{file.name} goes into both experts; if "{mark.text}" in its name means the '
                f"{mark.expert} one, give it with `{_FLAGS[mark.expert]}`."
            )


def _relighting(folder: Path) -> Path:
    """Returns the relighting LoRA of an Animate checkpoint."""
    found = next((folder / name for name in _RELIGHTING_FILES if (folder / name).is_file()), None)
    if found is None:
        why = f"needs {' or '.join(_RELIGHTING_FILES)}, which {folder} lacks"
        raise InputError(f"`{_RELIGHTING}`", None, why, "download it, or give a file with `lora`")
    return found


def resolve(values: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, tuple[Lora, ...]]:
    """Reads the headers of the files of the settings `Loras` for each network of a checkpoint.

    Raises:
        InputError: A file does not fit the network or cannot be read, or other settings exclude
            LoRAs.
    """
    given = [flag for flag in options(Loras) if values.get(flag)]
    files = named_files(values)
    if not given:
        return {}
    what = f"`{given[0]}`"
    if checkpoint.folder is None:  # a plan from published sizes; LoRAs do not change them
        return {}
    if values.get("quant_dit_path") is not None:
        why = "changes weights, but those of `quant_dit_path` are already quantised"
        raise InputError(what, None, why, "quantise them with tools/quantize_dit.py --lora")
    if values.get(_RELIGHTING):
        files["both"] += (Named(_relighting(checkpoint.folder)),)
    if "dit" in checkpoint.experts and not {*given} <= {"lora", _RELIGHTING}:
        flag = next(flag for flag in given if flag not in ("lora", _RELIGHTING))
        why = "is for two experts, but this checkpoint has one network"
        raise InputError(f"`{flag}`", None, why, "use `lora`")
    files = {
        network: tuple(_in_folder(one, checkpoint.folder) for one in ones)
        for network, ones in files.items()
    }
    marks: dict[Path, ExpertMark] = {}
    if "dit" not in checkpoint.experts:
        files, marks = _place_by_name(files)
    for expert in EXPERTS:
        for one in files[expert]:
            reader = _FactorReader(one, checkpoint, expert)
            if len({name.startswith(_SECOND) for name in reader.header}) == 2:
                raise reader.refusal(
                    f"holds both experts' tensors ({_FIRST} and {_SECOND}), but is given for the "
                    f"{expert} one",
                    "give it with `lora`",
                )
    return {
        expert: tuple(
            replace(
                _FactorReader(one, checkpoint, expert).read(),
                mark=marks[one.file].text if one.file in marks else "",
            )
            for one in (*files["both"], *files.get(expert, ()))
        )
        for expert in checkpoint.experts
    }


class _FactorReader:
    """Reads the header of one LoRA file, for one network of a checkpoint."""

    def __init__(self, given: Named, checkpoint: Checkpoint, expert: str) -> None:
        self.path, self.strength, self.expert = given.file, given.strength, expert
        if not self.path.is_file():
            raise self.refusal("does not exist or is no file", "give a .safetensors file")
        if self.path.suffix not in (".safetensors", ".ckpt"):
            raise self.refusal("is no .safetensors file", "convert it")
        if len(list_shards(self.path)) > 1:
            raise self.refusal("is one of several shards", "give a LoRA in one file")
        self.header = _header(self.path)
        tensors = checkpoint.experts[expert].tensors
        self.parameters = {name: info.shape for name, info in tensors.items()}

    def refusal(self, why: str, remedy: str = "it was made for another model") -> InputError:
        return InputError("LoRA", self.path, why, remedy)

    def read(self) -> Lora:
        """Returns the file's weight deltas for the network."""
        layers = self.layers()
        alphas = {layer: kinds["alpha"] for layer, kinds in layers.items() if "alpha" in kinds}
        for info in alphas.values():
            if prod(info.shape) != 1:
                raise self.refusal(f"holds {info.name}, which is no single number", "it is damaged")
        if alphas and self.path.suffix == ".ckpt":
            raise self.refusal("holds alphas, which are read from .safetensors only", "convert it")
        scalars = safetensors_scalars(self.path, [info.name for info in alphas.values()])
        # PEFT's scale settings apply only to files without alphas.
        for_two = any(name.startswith(_SECOND) for name in self.header)
        prefix = _SECOND if for_two and self.expert == "low_noise" else _FIRST
        stated = read_peft_settings(self.path, prefix)
        peft = {} if alphas else stated
        changes: dict[str, list[Change]] = {}
        for layer, tensors in layers.items():
            own = scalars[alphas[layer].name] if layer in alphas else peft.get("lora_alpha")
            for name, change in self.changes(layer, tensors, own, bool(peft.get("use_rslora"))):
                changes.setdefault(name, []).append(change)
        return Lora(self.path, self.strength, {name: tuple(c) for name, c in changes.items()})

    def layers(self) -> dict[str, dict[str, TensorInfo]]:
        """Groups the file's tensors by official layer name, then by kind (`_SUFFIX_KINDS`)."""
        for_two = any(name.startswith(_SECOND) for name in self.header)
        if for_two and self.expert == "dit":
            remedy = "this checkpoint has one network"
            raise self.refusal(f"is for two experts ({_SECOND}...)", remedy)
        spellings = _spellings(self.parameters)
        found: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.header.items():
            for pattern, form in _UNSUPPORTED.items():
                if re.search(pattern, name):
                    remedy = "merge it into the checkpoint with the program it was made with"
                    raise self.refusal(f"holds {name} ({form}), which is not supported", remedy)
            if name.startswith(_TEXT):
                remedy = "only those of the video network are supported"
                raise self.refusal(f"holds {name}, which changes a text encoder", remedy)
            of_second = name.startswith(_SECOND)
            if for_two and of_second != (self.expert == "low_noise"):
                continue
            end = next((end for end in _ENDS if name.endswith(end)), None)
            if end is None and name.endswith((".weight", ".bias", ".modulation")):
                why = f"holds {name}: full weights, not differences"
                raise self.refusal(why, "give such a file as a checkpoint (`ckpt_dir`)")
            if end is None:
                why = f"holds {name}, which is not a known LoRA tensor"
                raise self.refusal(why, "convert it to one of the namings of docs/few_step.md")
            stem = name.removesuffix(end).replace(".processor.", ".")
            while prefix := next((p for p in _PREFIXES if stem.startswith(p)), None):
                stem = stem.removeprefix(prefix)
            if stem not in spellings:
                whose = f"the {self.expert} network of this checkpoint"
                raise self.refusal(f"changes {stem or name}, which {whose} does not have")
            layer = spellings[stem]
            twin = found.setdefault(layer, {}).setdefault(_ENDS[end], info)
            if twin is not info:
                raise self.refusal(f"changes {layer} twice ({twin.name} and {name})", "remove one")
        if not found:
            raise self.refusal(f"holds nothing for the {self.expert} network", "give another one")
        return found

    def changes(
        self, layer: str, tensors: Mapping[str, TensorInfo], alpha: Any, stabilised: bool
    ) -> Iterator[tuple[str, Change]]:
        """Yields (parameter name, weight delta) for a layer.

        Args:
            layer: Official name.
            tensors: The layer's tensors by kind (`_SUFFIX_KINDS`).
            alpha: The pair is scaled by alpha / rank; None: by 1.
            use_rslora: Scale by alpha / sqrt(rank) instead.
        """
        for kind, info in tensors.items():
            if info.dtype not in FLOATS and kind != "alpha":
                remedy = f"give it in one of {', '.join(FLOATS)}"
                raise self.refusal(f"holds {info.name}, which is stored as {info.dtype}", remedy)
        up, down, scale = tensors.get("up"), tensors.get("down"), 1.0
        if up is not None and down is not None:
            self.check_pair(up, down, f"{layer}.weight")
            rank = down.shape[0]
            alpha = rank if alpha is None else alpha
            number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
            if not number or not abs(alpha) <= _MOST:
                why = f"has an alpha of {layer} that is {shown(alpha)}"
                raise self.refusal(why, "it is damaged")
            scale = alpha / (math.sqrt(rank) if stabilised else rank)
            yield f"{layer}.weight", Change(scale * self.strength, up=up, down=down)
        elif half := up or down:
            raise self.refusal(f"has {half.name}, but not the other factor", "it is damaged")
        elif "bias" in tensors or tensors.keys() == {"alpha"}:
            lone = tensors.get("bias") or tensors["alpha"]
            raise self.refusal(f"has {lone.name}, but no LoRA for this layer", "it is damaged")
        whole = {f"difference of the {part}": part for part in DIFFERENCES.values()}
        for kind, part in {**whole, "bias": "bias"}.items():
            if kind in tensors:
                info, name = tensors[kind], f"{layer}.{part}"
                shape = self.parameters.get(name)
                if info.shape != shape:
                    size = "absent in this network" if shape is None else list(shape)
                    why = (
                        f"holds {info.name} {list(info.shape)}, which does not fit {name} ({size})"
                    )
                    raise self.refusal(why, "it was made for another model, or is damaged")
                factor = scale if kind == "bias" else 1.0
                yield name, Change(factor * self.strength, full=info)

    def check_pair(self, up: TensorInfo, down: TensorInfo, name: str) -> None:
        """Refuses a pair that does not fit the parameter.

        `up` is [rows, rank, 1, ...], `down` is [rank, columns...].
        """
        shape = self.parameters.get(name, ())
        fits = bool(shape) and len(up.shape) >= 2 and len(down.shape) >= 2 and prod(down.shape) > 0
        fits = fits and up.shape[1] == down.shape[0] and prod(up.shape[2:]) == 1
        if not fits or (up.shape[0], prod(down.shape[1:])) != (shape[0], prod(shape[1:])):
            pair = f"{up.name} {list(up.shape)} and {down.name} {list(down.shape)}"
            why = f"holds {pair}, which do not fit {name} {list(shape)}"
            raise self.refusal(why, "it was made for another model, or is damaged")


def _header(path: Path) -> dict[str, TensorInfo]:
    if path.suffix == ".safetensors":
        return safetensors_header(path)
    from wan.checkpoint.load import stored  # imports torch and, circularly, this module

    return stored(path, str)


def _spellings(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns all spellings of layer names, without prefixes -> the official name."""
    found: dict[str, str] = {}
    for name in parameters:
        official, _, end = name.rpartition(".")
        theirs = dit_diffusers_name(name)
        names = [official, theirs.removesuffix(f".{end}") if end != "modulation" else official]
        if names[1].endswith(".to_out.0"):  # diffusers' attention processors have to_out_lora
            names.append(names[1].removesuffix(".0"))
        for spelling in names:
            found[spelling] = found[spelling.replace(".", "_")] = official
    return found


def changes_of(loras: Sequence[Lora]) -> dict[str, list[Change]]:
    """Returns the weight deltas of all LoRAs of a network by parameter name."""
    changes: dict[str, list[Change]] = {}
    for lora in loras:
        for name, added in lora.changes.items():
            changes.setdefault(name, []).extend(added)
    return changes


def record(loras: Mapping[str, Sequence[Lora]]) -> dict[str, Any]:
    """Returns the files, strengths and fingerprints of each network, for the JSON record."""
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
