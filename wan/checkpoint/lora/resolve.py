"""Resolves the settings of LoRAs to the weight deltas of each network.

Headers, settings of PEFT and alphas are read, no weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wan.checkpoint.formats.headers import compute_fingerprint, read_file_headers
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.lora.deltas import WeightDelta
from wan.checkpoint.lora.names import (
    HIGH_NOISE_PREFIX,
    LOW_NOISE_PREFIX,
    names_both_experts,
)
from wan.checkpoint.lora.reader import MAX_ABS, Lora, LoraFile, LoraReader
from wan.checkpoint.names.expert_names import EXPERTS, ExpertTag, detect_experts, find_expert_tags
from wan.settings.command import Loras
from wan.settings.errors import InputError
from wan.settings.values import expand_home, format_value, list_names, parse_number
from wan.utils.files import check_link, has_file

_FLAGS = {"both": "lora", "high_noise": "lora_high_noise", "low_noise": "lora_low_noise"}
_RELIGHTING_FLAG = "use_relighting_lora"
_RELIGHTING_FILES = ("relighting_lora.ckpt", "relighting_lora/adapter_model.safetensors")


def parse_lora_file(text: str) -> LoraFile:
    """Splits `FILE=STRENGTH` at the last "="; without a number after it, all of it is the file.

    Raises:
        InputError: The strength is "nan", above 1e6 in magnitude, or no number after a file that
            exists.
    """
    file, equals, tail = text.rpartition("=")
    try:
        float(tail if equals else "no number")
    except ValueError:
        path = expand_home("LoRA", text)
        if has_file(path) or not (equals and has_file(expand_home("LoRA", file))):
            return LoraFile(path)
    strength = parse_number(tail)
    if strength is None or abs(strength) > MAX_ABS:
        why = f"has the strength {format_value(tail)}"
        raise InputError("LoRA", file, why, f"give a number from -{MAX_ABS:g} to {MAX_ABS:g}")
    return LoraFile(expand_home("LoRA", file), strength)


def list_lora_files(options: Loras) -> dict[str, tuple[LoraFile, ...]]:
    """Returns the files of these settings by the network for which a flag gives them.

    Its keys are "high_noise", "low_noise", and "both" for files of all networks.

    Raises:
        InputError: A folder of `lora_dir` lacks a file, or a strength is "nan" or above 1e6 in
            magnitude.
    """
    files_by_network = {
        network: tuple(parse_lora_file(text) for text in getattr(options, flag))
        for network, flag in _FLAGS.items()
    }
    if options.lora_dir is None:
        return files_by_network
    for expert in EXPERTS:
        path = options.lora_dir / f"{expert}_model.safetensors"
        if not has_file(path):
            files = " and ".join(f"{name}_model.safetensors" for name in EXPERTS)
            remedy = f"give a folder with {files}, or `lora_high_noise` and `lora_low_noise`"
            raise InputError("`lora_dir`", path.parent, f"has no {path.name}", remedy)
        files_by_network[expert] += (LoraFile(path),)
    return files_by_network


def _locate_lora_file(lora_file: LoraFile, folder: Path) -> LoraFile:
    """Falls back to ComfyUI's folder `loras` in the checkpoint's if the file does not exist."""
    path, cwd = Path(os.path.abspath(lora_file.path)), Path.cwd()
    fallback = folder / "loras" / (path.relative_to(cwd) if path.is_relative_to(cwd) else path.name)
    check_link(lora_file.path)
    if not lora_file.path.exists() and has_file(fallback):
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
    return has_file(file) and names_both_experts(read_file_headers(file))


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
            if lora.unused_names:
                yield (
                    f"{lora.path.name}: {len(lora.unused_names)} tensors of the image input of "
                    f"other networks are not used ({list_names(lora.unused_names)})."
                )
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
    path = next((folder / name for name in _RELIGHTING_FILES if has_file(folder / name)), None)
    if path is None:
        why = f"needs {' or '.join(_RELIGHTING_FILES)}, which {folder} lacks"
        raise InputError(
            f"`{_RELIGHTING_FLAG}`", None, why, "download it, or give a file with `lora`"
        )
    return path


def resolve_loras(
    options: Loras, checkpoint: Checkpoint, is_quantized: bool = False
) -> dict[str, tuple[Lora, ...]]:
    """Resolves settings to the LoRAs of each network of a checkpoint.

    Args:
        is_quantized: Whether `quant_dit_path` replaces the weights, so that no LoRA fits them.

    Raises:
        InputError: A file does not fit the network or cannot be read, or other settings exclude
            LoRAs.
    """
    flags = [flag for flag, value in vars(options).items() if value]
    files = list_lora_files(options)
    if not flags:
        return {}
    subject = f"`{flags[0]}`"
    if checkpoint.folder is None:  # a plan from published sizes; LoRAs do not change them
        return {}
    if is_quantized:
        why = "changes weights, but those of `quant_dit_path` are already quantized"
        raise InputError(subject, None, why, "quantize them with tools/quantize_dit.py --lora")
    if options.use_relighting_lora:
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
            reader = LoraReader(lora_file, checkpoint.experts[expert].tensors, expert)
            if names_both_experts(reader.tensors):
                raise reader.make_error(
                    f"holds both experts' tensors ({HIGH_NOISE_PREFIX} and {LOW_NOISE_PREFIX}), "
                    f"but is given for the {expert} one",
                    "give it with `lora`",
                )
    return {
        expert: tuple(
            replace(
                LoraReader(lora_file, checkpoint.experts[expert].tensors, expert).read(),
                tag=tags[lora_file.path].text if lora_file.path in tags else "",
            )
            for lora_file in (*files["both"], *files.get(expert, ()))
        )
        for expert in checkpoint.experts
    }


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
