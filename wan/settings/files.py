"""Looking into weight files without reading weights (and without torch)."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError

INDEX = ".safetensors.index.json"
_OTHER_PARTS = re.compile(r"-of-|^Wan2\.\d_VAE|^models_t5")  # not a lone DiT file
_SAMPLE = 1 << 16  # bytes
_MAX_HEADER = 100_000_000  # the safetensors format's own limit, bytes


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is and what it looks like; dtype as the format writes it ("BF16")."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. InputError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({_reason(error)}); check the file.") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON ({error}); repair or replace it.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, not an object; replace it.")
    return value


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes in a safetensors file, whose length must match its header.

    Format: 8 bytes little-endian header length, JSON header, tensor bytes.
    """
    remedy = "the file is truncated or corrupt: download it again"
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise InputError(f"{path} is not a safetensors file; {remedy}.")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _tensor_info(path, name, entry) for name, entry in header.items()}
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            actual = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read ({_reason(error)}); check the file.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} has an unreadable header; {remedy}.") from None
    if actual != 8 + length + end:
        raise InputError(f"{path} has {actual} bytes instead of {8 + length + end}; {remedy}.")
    return tensors


def _tensor_info(path: Path, name: str, entry: Any) -> TensorInfo:
    start, end = entry["data_offsets"]
    return TensorInfo(path, name, entry["dtype"], tuple(entry["shape"]), end - start)


def sharded_tensors(index: Path) -> dict[str, TensorInfo]:
    """All tensors that an index file names, each found in the shard it names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map; download the file again.")
    shards = {}
    for file in sorted(set(map(str, weight_map.values()))):
        shard = index.parent / file
        if not shard.is_file():
            raise InputError(f"{shard} is missing, but {index.name} names it; download the shard.")
        shards[file] = safetensors_header(shard)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise InputError(
                f"{index.parent / file} lacks the tensor {name} that {index.name} places there; "
                "the shard belongs to another download: fetch index and shards again."
            )
    return {name: shards[file][name] for name, file in weight_map.items()}


def folder_tensors(folder: Path, stem: str) -> dict[str, TensorInfo] | None:
    """Tensors of a model folder: an index with shards, `stem`.safetensors, or one lone file."""
    index = folder / (stem + INDEX)
    if index.is_file():
        return sharded_tensors(index)
    files = [folder / f"{stem}.safetensors"]
    if not files[0].is_file():
        files = [p for p in sorted(folder.glob("*.safetensors")) if not _OTHER_PARTS.search(p.name)]
    if len(files) == 1:
        return safetensors_header(files[0])
    if any(folder.glob(f"{stem}-*-of-*.safetensors")):
        raise InputError(f"{index} is missing, but its shards are there; download the index.")
    return None


def check_complete(path: Path) -> Path:
    """The path, if the file is whole. A truncated `.pth` archive has lost its directory."""
    if path.suffix == ".pth" and not zipfile.is_zipfile(path):
        raise InputError(
            f"{path} is not a complete PyTorch file; it is truncated or corrupt: download it again."
        )
    if path.suffix == ".safetensors":
        safetensors_header(path)
    return path


def safetensors_metadata(path: Path, key: str) -> Any:
    """One metadata value, itself JSON, of a file with a sound header; None where it is absent."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    try:
        return json.loads(header.get("__metadata__", {})[key])
    except (KeyError, ValueError):
        return None


def fingerprint(paths: Iterable[Path]) -> str:
    """A short name for the content of files: sizes and samples of each, not whole files."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(size - _SAMPLE, 0)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]
