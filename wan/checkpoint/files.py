"""Files: looked into without reading weights (and without torch), written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from wan.settings.errors import InputError
from wan.settings.values import shown

FLOATS = ("F32", "BF16", "F16", "F64")  # dtypes of weights that are not quantised
FP8 = ("F8_E4M3",)
_INDEX = ".safetensors.index.json"
_STEMS = ("diffusion_pytorch_model", "model")  # what diffusers and transformers call weight files
OTHER_PARTS = re.compile(r"-of-|^Wan2\.\d_VAE|^models_(t5|clip)")  # not a lone weight file
_FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i"}  # dtype -> struct's code
_SAMPLE = 1 << 16  # bytes
_MAX_JSON = 16_000_000  # bytes; an index of the largest checkpoint has 0.2 MB


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is and what it looks like; dtype as safetensors writes it ("BF16").

    scale: what FP8 values are multiplied by, one number or one for each row.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    scale: TensorInfo | None = None


def is_folder(path: Path) -> bool:
    """InputError where the system refuses the path itself: too long, no permission, ..."""
    try:
        return path.is_dir()
    except OSError as error:
        name = shown(path, str)
        raise InputError(f"{name} cannot be used ({_reason(error)}); give another one.") from None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file; devices and pipes may have no end, or keep their reader waiting."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path} is not a regular file; give another one.")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"{path} cannot be read ({_reason(error)}); check the file.") from None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. InputError for anything else, and for more than 16 MB."""
    with opened(path) as file:
        content = file.read(_MAX_JSON + 1)
    if len(content) > _MAX_JSON:
        raise InputError(f"{path} has more than {_MAX_JSON // 10**6} MB; give the right file.")
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read ({error}); check the file.") from None
    except (ValueError, RecursionError) as error:  # also too long a number, too many brackets
        reason = str(error).split(";")[0]
        raise InputError(f"{path} is not valid JSON ({reason}); repair or replace it.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, not an object; replace it.")
    return value


def safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes in a safetensors file. InputError for one that is not whole."""
    with _safetensors(path) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {
            name: _tensor_info(path, name, part.get_dtype(), tuple(part.get_shape()))
            for name, part in slices.items()
        }


def _tensor_info(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    digits = re.search(r"\d+", dtype)  # bits of an element: BF16, F8_E4M3; but for BOOL
    return TensorInfo(path, name, dtype, shape, prod(shape) * int(digits[0] if digits else 8) // 8)


def safetensors_metadata(path: Path, key: str) -> Any:
    """One metadata value, itself JSON; None where it is absent."""
    with _safetensors(path) as handle:
        text = (handle.metadata() or {}).get(key, "")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def safetensors_places(path: Path) -> dict[str, tuple[str, int]]:
    """The dtype of each tensor and where its bytes begin, in a file whose header was checked."""
    with opened(path) as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {n: (info["dtype"], 8 + size + info["data_offsets"][0]) for n, info in header.items()}


def safetensors_scalars(path: Path, names: Iterable[str]) -> dict[str, float]:
    """The first number of tensors, of any float or integer dtype."""
    wanted, found = set(names), {}
    if not wanted:
        return {}
    places = safetensors_places(path)
    with opened(path) as file:  # numpy, which safetensors would need, has no bfloat16
        for name in wanted:
            form, start = places[name]
            file.seek(start)
            if form == "BF16":
                found[name] = struct.unpack("<f", b"\0\0" + file.read(2))[0]
            elif form in _FORMATS:
                layout = f"<{_FORMATS[form]}"
                found[name] = struct.unpack(layout, file.read(struct.calcsize(layout)))[0]
            else:
                raise InputError(f"{path}: {name} is stored as {form}; give it as F32.")
    return found


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    """Opened by the format's own library, which checks the header against the size of the file."""
    with opened(path):
        try:
            with safe_open(path, framework="np") as handle:
                yield handle
        except SafetensorError as error:
            reason = shown(str(error).removeprefix("Error while deserializing header: "), str)
            raise InputError(
                f"{path} is no whole safetensors file ({reason}); download it again."
            ) from None


def folder_tensors(folder: Path) -> dict[str, TensorInfo] | None:
    """Tensors of a folder of weights; None where it holds none.

    They are in shards with an index, in one file with a library's name, or in a lone file.
    """
    for stem in _STEMS:
        index, file = folder / (stem + _INDEX), folder / f"{stem}.safetensors"
        if index.is_file():
            return _sharded_tensors(index)
        if file.is_file():
            return safetensors_header(file)
        if any(folder.glob(f"{stem}-*-of-*.safetensors")):
            raise InputError(f"{index} is missing, but its shards are there; download the index.")
    lone = [path for path in folder.glob("*.safetensors") if not OTHER_PARTS.search(path.name)]
    return safetensors_header(lone[0]) if len(lone) == 1 else None


def _sharded_tensors(index: Path) -> dict[str, TensorInfo]:
    """All tensors that an index file names, each found in the shard it names, beside the index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map; download the file again.")
    shards: dict[str, dict[str, TensorInfo]] = {}
    for name, file in weight_map.items():
        plain = isinstance(file, str) and Path(file).name == file
        if not plain or not file.endswith(".safetensors"):
            raise InputError(
                f"{index} places {shown(name, str)} in {shown(file)}, which is no weight file "
                "beside it; download the index again."
            )
        shard = index.parent / file
        if not shard.is_file():
            raise InputError(f"{shard} is missing, but {index.name} names it; download the shard.")
        if file not in shards:
            shards[file] = safetensors_header(shard)
        if name not in shards[file]:
            raise InputError(
                f"{shard} lacks the tensor {name} that {index.name} places there; "
                "the shard belongs to another download: fetch index and shards again."
            )
    return {name: shards[file][name] for name, file in weight_map.items()}


def network_tensors(
    tensors: Mapping[str, TensorInfo], rename: Callable[[str], str]
) -> dict[str, TensorInfo]:
    """The tensors of one network under other names. InputError unless all are floating point.

    FP8 weights have their scale beside them, if they have one.
    """
    renamed: dict[str, TensorInfo] = {}
    for name, info in _with_scales(tensors).items():
        if info.dtype not in (*FLOATS, *FP8):
            raise InputError(
                f"{info.file}: {name} is stored as {info.dtype}; quantised weights are not "
                f"supported there: give weights in one of {', '.join(FLOATS)}."
            )
        twin = renamed.setdefault(rename(name), info)
        if twin is not info:
            raise InputError(
                f"{info.file} has {name} again, which is {twin.name} there; download it again."
            )
    return renamed


def _with_scales(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """ComfyUI's scaled files: `X.scale_weight` beside `X.weight`, and marks without an effect."""
    found = dict(tensors)
    for name, info in tensors.items():
        if name.endswith(("scaled_fp8", ".scale_input")):  # a mark; for products in FP8
            del found[name]
        if not name.endswith((".scale_weight", ".weight_scale")):
            continue
        weight = f"{name.rpartition('.')[0]}.weight"
        own = found.get(weight)
        if own is None or own.dtype not in FP8 or own.scale is not None:
            continue  # refused under its own name
        if prod(info.shape) not in (1, own.shape[0]) or info.dtype not in FLOATS:
            raise InputError(
                f"{info.file}: {name} {list(info.shape)} {info.dtype} is no scale of {weight} "
                f"{list(own.shape)}; download it again."
            )
        found[weight] = replace(own, scale=info)
        del found[name]
    return found


def check_complete(path: Path) -> Path:
    """The path, if the file is whole. A truncated `.pth` archive has lost its directory."""
    if path.suffix == ".pth" and not zipfile.is_zipfile(path):
        raise InputError(
            f"{path} is not a complete PyTorch file; it is truncated or corrupt: download it again."
        )
    if path.suffix == ".safetensors":
        safetensors_header(path)
    return path


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


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file name beside `path` that becomes `path` when the block ends without an error.

    The name is absolute, hidden and ends as `path` does; missing folders are made. Whatever ends
    the block otherwise, Ctrl-C included: no file stays behind, and what `path` was before it still
    is.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """As `whole_file`, for a folder; the temporary one exists. InputError where `path` is taken."""
    if path.is_symlink():
        raise InputError(f"{path} is a symbolic link; name a new folder.")
    if path.exists() and path.samefile(Path.cwd()):  # it would be replaced under its user's feet
        raise InputError(f"{path} is the current folder; name a new one.")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists and is not empty; name another folder or remove it.")
    path = path.absolute()
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:  # also Ctrl-C
        shutil.rmtree(temporary)
        raise
