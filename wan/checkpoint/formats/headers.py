"""Reads headers, metadata and JSON of checkpoint files, without weights and without torch."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wan.checkpoint.formats import gguf
from wan.checkpoint.formats.pickle_header import read_pickle_header
from wan.checkpoint.formats.safetensors_header import read_safetensors_header
from wan.checkpoint.formats.tensor_info import (
    PICKLE_SUFFIXES,
    SAFETENSORS_SUFFIXES,
    WEIGHT_FILES,
    TensorInfo,
    read_file_state,
)
from wan.settings.errors import FileChangedError, InputError
from wan.settings.json_text import parse_json
from wan.settings.values import describe_json_error, format_value
from wan.utils.files import has_file, has_folder, open_regular_file

_INDEX_SUFFIX = ".safetensors.index.json"
# Weight file names of diffusers and transformers.
_WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
_PICKLE_STEMS = (*_WEIGHT_STEMS, "pytorch_model")
# The suffix may begin with a variant: `-bf16.safetensors`, `.fp16.safetensors`.
_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{3,})-of-(?P<count>\d{3,})(?P<suffix>([-.]\w+)?\.\w+)"
)
OTHER_COMPONENTS = re.compile(r"-of-|^Wan2\.\d_VAE|^models_(t5|clip)|(?i:umt5)")  # not a lone DiT
_STRUCT_CODES = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i"}
_SAMPLE_BYTES = 1 << 16  # bytes
_MAX_FULL_DIGEST = 32 << 20  # bytes; larger files are fingerprinted by samples
_DOWNLOAD_AGAIN = "download it again"
_MAX_SHARDS = 1000
_MAX_JSON_BYTES = 16_000_000  # bytes; an index of the largest checkpoint has 0.2 MB


def is_folder(path: Path) -> bool:
    """Returns whether a path is a folder; InputError if the system rejects the path itself."""
    try:
        return has_folder(path)
    except OSError as error:  # too long, no permission, ...
        why = f"cannot be used ({error.strerror or error})"
        raise InputError(format_value(path, str), None, why, "give another one") from None


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; InputError for anything else, and for more than 16 MB."""
    with open_regular_file(path) as file:
        content = file.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        why = f"has more than {_MAX_JSON_BYTES // 10**6} MB"
        raise InputError(f"{path}", None, why, "give the right file")
    try:
        value = parse_json(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{path}", None, "is no UTF-8 text", "check the file") from None
    except (ValueError, RecursionError) as error:  # also too long a number, too many brackets
        why = f"is not valid JSON ({describe_json_error(error)})"
        raise InputError(f"{path}", None, why, "repair or replace it") from None
    if not isinstance(value, dict):
        why = f"holds a JSON {type(value).__name__}, not an object"
        raise InputError(f"{path}", None, why, "replace it")
    return value


def read_file_headers(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a weight file by name; for a shard, of all its shards.

    Raises:
        InputError: A file is incomplete, or a shard of the network is missing.
    """
    tensors: dict[str, TensorInfo] = {}
    for shard in list_shards(path):
        for name, info in _read_header(shard).items():
            first_info = tensors.setdefault(name, info)
            if first_info is not info:
                why = f"repeats {name} of {first_info.file.name}"
                raise InputError(f"{shard}", None, why, "give the shards of one network")
    return tensors


def read_weight_headers(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a weight file or of a folder of weights by name; {} if none."""
    return (read_file_headers(path) if has_file(path) else read_folder_headers(path)) or {}


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of one weight file by name."""
    if path.suffix in PICKLE_SUFFIXES:
        return read_pickle_header(path)
    return gguf.read_gguf_header(path) if path.suffix == ".gguf" else read_safetensors_header(path)


def list_shards(path: Path) -> list[Path]:
    """Returns all shards of the network if the file's name is that of a shard, else the file.

    Raises:
        InputError: A shard is missing.
    """
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    shards = [
        path.with_name(
            f"{match['stem']}-{i:0{len(match['number'])}}-of-{match['count']}{match['suffix']}"
        )
        for i in range(1, min(count, _MAX_SHARDS) + 1)
    ]
    if not 1 <= number <= count <= _MAX_SHARDS:
        why = f"has the name of shard {number} of {count}"
        raise InputError(f"{path}", None, why, "give it the name that it was published with")
    missing = [shard.name for shard in shards if not has_file(shard)]
    if missing and path.is_file():
        why = f"is shard {number} of {count}, and {', '.join(missing[:3])} is missing beside it"
        raise InputError(f"{path}", None, why, "download all shards into one folder")
    return shards if path.is_file() else [path]


def is_further_shard(path: Path) -> bool:
    """Returns whether a file is a shard, by its name, and its folder has an earlier one."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return False
    width, name_end = len(match["number"]), f"-of-{match['count']}{match['suffix']}"
    numbers = range(1, min(int(match["number"]), _MAX_SHARDS))
    return any(path.with_name(f"{match['stem']}-{i:0{width}}{name_end}").is_file() for i in numbers)


def read_scalars(path: Path, infos: Iterable[TensorInfo]) -> dict[str, float]:
    """Returns the first number of each tensor of a safetensors or PyTorch file, by name.

    Raises:
        InputError: A dtype is not a float or an integer.
    """
    wanted, scalars = [*infos], {}
    if not wanted:
        return {}
    with open_regular_file(path) as file:  # safetensors would need numpy, which has no bfloat16
        for info in wanted:
            file.seek(info.data_offset)
            if info.number is not None:
                scalars[info.name] = info.number
            elif info.dtype == "BF16":
                scalars[info.name] = struct.unpack("<f", b"\0\0" + file.read(2))[0]
            elif info.dtype in _STRUCT_CODES:
                code = f"<{_STRUCT_CODES[info.dtype]}"
                scalars[info.name] = struct.unpack(code, file.read(struct.calcsize(code)))[0]
            else:
                why = f"is stored as {info.dtype}"
                raise InputError(f"{path}: {info.name}", None, why, "give it as F32")
    return scalars


def read_folder_headers(folder: Path) -> dict[str, TensorInfo] | None:
    """Returns the tensors of a folder of weights; None if it holds none.

    The folder may hold shards with an index, one file with a library's name, or a single file of
    any name.
    """
    for stem in _WEIGHT_STEMS:
        index, file = folder / (stem + _INDEX_SUFFIX), folder / f"{stem}.safetensors"
        if has_file(index):
            return _read_sharded_headers(index)
        if has_file(file):
            return read_safetensors_header(file)
        if _has_plain_shards(folder, stem):
            why = "is missing, but its shards exist"
            raise InputError(f"{index}", None, why, "download the index")
    for suffixes in (SAFETENSORS_SUFFIXES, (".gguf",), PICKLE_SUFFIXES):
        files = [file for suffix in suffixes for file in folder.glob(f"*{suffix}")]
        shards = [file for file in files if not is_further_shard(file)]
        single_files = [
            file for file in shards if not OTHER_COMPONENTS.search(_SHARD.sub(r"\1", file.name))
        ]
        named_files = [file for file in single_files if file.name.startswith(_PICKLE_STEMS)]
        if suffixes == PICKLE_SUFFIXES and named_files:  # next to a trainer's other files
            single_files = named_files
        if len(single_files) > 1 and all(
            file.name.startswith(_PICKLE_STEMS) for file in single_files
        ):  # variants of one network
            names = ", ".join(sorted(file.name for file in single_files)[:3])
            why = f"holds {len(single_files)} files of one network ({names})"
            raise InputError(f"{folder}", None, why, "keep one of them there")
        if single_files:
            return read_file_headers(single_files[0]) if len(single_files) == 1 else None
    return None


def has_diffusers_weights(folder: Path) -> bool:
    """Returns whether the folder holds weights under a name of diffusers or transformers."""
    names = [
        f"{stem}{suffix}" for stem in _WEIGHT_STEMS for suffix in (_INDEX_SUFFIX, ".safetensors")
    ]
    has_shards = any(_has_plain_shards(folder, stem) for stem in _WEIGHT_STEMS)
    return any(has_file(folder / name) for name in names) or has_shards


def _has_plain_shards(folder: Path, stem: str) -> bool:
    """Returns whether a folder has shards of a stem that are no variant."""
    paths = folder.glob(f"{stem}-*-of-*.safetensors")
    return any(re.fullmatch(r"-\d+-of-\d+", path.stem.removeprefix(stem)) for path in paths)


def _read_sharded_headers(index: Path) -> dict[str, TensorInfo]:
    """Reads the headers of the shards that an index file lists, which are in its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}", None, "has no weight_map", _DOWNLOAD_AGAIN)
    shards: dict[str, dict[str, TensorInfo]] = {}
    for name, file in weight_map.items():
        is_file_name = isinstance(file, str) and Path(file).name == file
        if not is_file_name or not file.endswith(".safetensors"):
            entry = f"places {format_value(name, str)} in {format_value(file)}"
            why = f"{entry}, which is no weight file in its folder"
            raise InputError(f"{index}", None, why, "download the index again")
        shard = index.parent / file
        if not has_file(shard):
            shard = _find_variant(shard) or shard
        if not shard.is_file():
            why = f"is missing, but {index.name} names it"
            raise InputError(f"{shard}", None, why, "download the shard")
        if file not in shards:
            shards[file] = read_safetensors_header(shard)
        if name not in shards[file]:
            why = f"lacks the tensor {name} that {index.name} places there"
            remedy = "the shard belongs to another download: fetch index and shards again"
            raise InputError(f"{shard}", None, why, remedy)
    return {name: shards[file][name] for name, file in weight_map.items()}


def _find_variant(path: Path) -> Path | None:
    """Returns the only variant of a missing file: `x.bf16.safetensors` of `x.safetensors`."""
    match = _SHARD.fullmatch(path.name)
    stem, shard = (
        (path.stem, "") if match is None else (match["stem"], path.stem[len(match["stem"]) :])
    )
    variant = r"([-.]\w+)?"
    pattern = re.escape(stem) + variant + re.escape(shard) + variant + re.escape(path.suffix)
    variants = [file for file in path.parent.iterdir() if re.fullmatch(pattern, file.name)]
    return variants[0] if len(variants) == 1 else None


def check_file_complete(path: Path) -> Path:
    """Returns the path of a file; InputError if the file is missing or incomplete."""
    if not has_file(path):
        raise InputError(f"{path}", None, "does not exist or is no file", "give another one")
    if path.suffix in WEIGHT_FILES:
        read_file_headers(path)
    return path


def compute_file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular_file(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def make_file_gone_error(path: Path, error: OSError) -> FileChangedError:
    """Returns the error for a file that was checked and cannot be read any more."""
    reason = error.strerror or error
    return FileChangedError(
        f"{path} cannot be read any more ({reason}); put it back and start again."
    )


def compute_fingerprint(paths: Iterable[Path]) -> str:
    """Returns a short hash of the files' content; of large files the size and three samples.

    Raises:
        FileChangedError: A file cannot be read any more.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                size, _ = read_file_state(file.fileno())
                digest.update(str(size).encode())
                samples = (
                    (0, size // 2, size - _SAMPLE_BYTES)
                    if size > _MAX_FULL_DIGEST
                    else range(0, size, _SAMPLE_BYTES)
                )
                for offset in samples:
                    file.seek(offset)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise make_file_gone_error(path, error) from None
    return digest.hexdigest()[:16]
