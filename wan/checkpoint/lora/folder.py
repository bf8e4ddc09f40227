"""LoRAs that are chosen for single videos by their name in a folder; no torch.

They are computed separately from the weights: y = W x + scale B A x. So only kinds are accepted
that are a sum of such products, on layers whose inputs and outputs the network passes on
(`wan.modules.lora_branch`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from wan.checkpoint.formats.headers import compute_file_digest
from wan.checkpoint.formats.tensor_info import SAFETENSORS_SUFFIXES, read_file_state
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.lora.deltas import StoredMatrix, WeightDelta
from wan.checkpoint.lora.reader import Lora
from wan.checkpoint.lora.resolve import resolve_loras
from wan.settings.command import Loras
from wan.settings.errors import InputError
from wan.settings.fields import build_from_values
from wan.settings.values import format_value
from wan.utils.files import check_link, has_folder
from wan.utils.log import logger

_SETTING = "`video_lora`"
_LAYER = re.compile(
    r"(vace_)?blocks\.\d+\.((self|cross)_attn\.(q|k|v|o|k_img|v_img)|ffn\.[02])"
    r"|(text|time)_embedding\.[02]|time_projection\.1|head\.head|patch_embedding"
    r"|img_emb\.proj\.[13]"
)
"""Layers with a LoRA branch."""
_MERGE_IT = "load it with the model, by --lora"
_MAX_LISTED_NAMES = 20


@dataclass(frozen=True)
class VideoLora:
    """A LoRA of a video, for one network.

    Attributes:
        name: Its name in the folder.
        scale: The factor of its deltas.
        sha256: Of the file's content.
        lora: The deltas at scale 1.
    """

    name: str
    scale: float
    sha256: str
    lora: Lora


VideoLoras = Mapping[str, tuple[VideoLora, ...]]
"""Network -> LoRAs of a video."""


@cache
def find_lora_files(folder: Path) -> dict[str, Path]:
    """Returns the LoRA files of a folder by name, as they are found in the first call.

    Raises:
        InputError: The folder cannot be read, or has no LoRA file.
    """
    subject, remedy = "`lora_folder`", "give a folder of .safetensors files"
    if not has_folder(folder):
        raise InputError(subject, folder, "is no folder", remedy)
    files, inside = dict[str, Path](), folder.resolve()
    paths = [path for suffix in SAFETENSORS_SUFFIXES for path in folder.glob(f"*{suffix}")]
    for path in sorted(paths):
        check_link(path)
        if not path.resolve().is_relative_to(inside):
            logger.warning("%s is a link out of its folder and is left out.", path)
        elif path.is_file():
            files.setdefault(path.stem, path.absolute())
    if not files:
        raise InputError(subject, folder, "has no .safetensors file", remedy)
    return files


def compute_lora_digest(path: Path) -> str:
    """Returns the SHA-256 of a LoRA file; computed once while the file does not change."""
    return _compute_digest(path, read_file_state(path))


@lru_cache(maxsize=1000)
def _compute_digest(path: Path, _: tuple[int, int]) -> str:
    return compute_file_digest(path)


def resolve_video_loras(
    chosen: Iterable[Mapping[str, Any]], folder: Path, checkpoint: Checkpoint
) -> dict[str, tuple[VideoLora, ...]]:
    """Resolves the LoRAs chosen for a video to those of each network.

    Args:
        chosen: As read by `wan.settings.values.read_video_loras`.
        folder: `lora_folder`. Only the files found in it are opened.

    Raises:
        InputError: A name is unknown, a file does not fit, or its kind needs a merge.
    """
    loras: dict[str, tuple[VideoLora, ...]] = {}
    for choice in chosen:
        name, expert = choice["name"], choice.get("expert")
        path = find_lora_files(folder).get(name)
        if path is None:
            names = [*find_lora_files(folder)]
            listing = ", ".join(names[:_MAX_LISTED_NAMES])
            remedy = f"the LoRAs are {listing}{', ...' if len(names) > _MAX_LISTED_NAMES else ''}"
            raise InputError(_SETTING, format_value(name), "is not one of the LoRAs", remedy)
        for network, lora in _read_lora(name, path, expert, checkpoint).items():
            digest = compute_lora_digest(path)
            video_lora = VideoLora(name, choice["scale"], digest, lora)
            loras[network] = (*loras.get(network, ()), video_lora)
    return loras


def _read_lora(
    name: str, path: Path, expert: str | None, checkpoint: Checkpoint
) -> dict[str, Lora]:
    """Returns the deltas of a file at scale 1, by network.

    expert: The chosen expert; None: from the file name.
    """
    flag = "lora" if expert in (None, "both") else f"lora_{expert}"
    try:
        options = build_from_values(Loras, {flag: (f"{path}=1",)})
        resolved = resolve_loras(options, checkpoint)
        loras = {network: entries[0] for network, entries in resolved.items() if entries}
        for lora in loras.values():
            _check_branches(lora)
    except InputError as error:
        why = error.why.replace(str(path), name)
        remedy = "leave expert out" if "`lora" in error.remedy else error.remedy
        raise InputError(_SETTING, format_value(name), why, remedy) from None
    tags = {lora.tag for lora in loras.values()} - {""}
    if expert == "both" and tags:
        why = f'is for one expert, because of "{tags.pop()}" in its name'
        raise InputError(_SETTING, format_value(name), why, "leave expert out")
    return loras


def _check_branches(lora: Lora) -> None:
    """Refuses a LoRA that cannot be computed separately from the weights."""
    for parameter, deltas in lora.deltas.items():
        layer, _, suffix = parameter.rpartition(".")
        for delta in deltas:
            problem = describe_kind(delta) if _needs_merge(delta, suffix) else None
            if problem is not None:
                why = f"changes {parameter} by {problem}, which is not computed for one video"
                raise InputError("LoRA", lora.path, why, _MERGE_IT)
        if not _LAYER.fullmatch(layer):
            why = f"changes {parameter}, which only a merge can change"
            raise InputError("LoRA", lora.path, why, _MERGE_IT)


def _needs_merge(delta: WeightDelta, suffix: str) -> bool:
    return delta.needs_base or (suffix != "bias" and not delta.is_separable)


def describe_kind(delta: WeightDelta) -> str:
    """Names the kind of a delta."""
    if delta.magnitude is not None:
        return "a DoRA"
    if delta.operation == "replace":
        return "a whole weight"
    if delta.operation == "multiply":
        return "a GLoRA"
    kind = {"hadamard": "LoHa", "kronecker": "LoKr"}.get(delta.operation)
    if kind is None and any(isinstance(matrix, StoredMatrix) for matrix in delta.matrices):
        return "a difference of whole weights"
    if kind is None:
        return "a LoRA"
    return f"a {kind}" if delta.is_separable else f"a {kind} of a rank as large as the weight"


def describe_lora(name: str, path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Describes a LoRA for users: networks, kind, size and content.

    "error" is why no video can use it, or None.
    """
    loras: Mapping[str, Lora] = {}
    kinds, error = set[str](), None
    try:
        num_bytes, digest = path.stat().st_size, compute_lora_digest(path)
        loras = _read_lora(name, path, None, checkpoint)
        kinds = {
            describe_kind(delta).removeprefix("a ")
            for lora in loras.values()
            for parameter, deltas in lora.deltas.items()
            for delta in deltas
            if parameter.endswith(".weight")
        }
    except InputError as reason:
        error = str(InputError(name, None, reason.why, reason.remedy))
    except OSError as reason:
        return {"name": name, "error": f"{name} cannot be read ({reason.strerror})."}
    return {
        "name": name,
        "bytes": num_bytes,
        "experts": [*loras],
        "kind": " and ".join(sorted(kinds)) or None,
        "sha256": digest,
        "error": error,
    }


def add_video_loras(
    loras: Mapping[str, tuple[Lora, ...]], video_loras: VideoLoras
) -> dict[str, tuple[Lora, ...]]:
    """Returns all LoRAs of each network, for notices and recipes."""
    added = {
        network: tuple(replace(entry.lora, strength=entry.scale) for entry in entries)
        for network, entries in video_loras.items()
    }
    networks = dict.fromkeys((*loras, *added))
    return {name: (*loras.get(name, ()), *added.get(name, ())) for name in networks}


def make_video_lora_record(loras: VideoLoras) -> list[dict[str, Any]]:
    """Returns the name, scale and content of each LoRA of a video, for its record."""
    records: dict[tuple[str, str, float], dict[str, Any]] = {}
    for network, entries in loras.items():
        for entry in entries:
            key = entry.name, entry.sha256, entry.scale
            names = {"name": entry.name, "sha256": entry.sha256, "scale": entry.scale}
            records.setdefault(key, names | {"experts": []})["experts"].append(network)
    return [*records.values()]
