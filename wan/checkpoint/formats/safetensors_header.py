"""Reads the headers and the metadata of safetensors files, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from wan.checkpoint.formats.tensor_info import (
    GET_READ_FORMAT,
    MAX_AXES,
    TensorInfo,
    read_file_state,
)
from wan.settings.errors import InputError
from wan.settings.json_text import DuplicateNameError, parse_json
from wan.settings.values import format_value
from wan.utils.files import open_regular_file

_MAX_HEADER_BYTES = 100_000_000  # as in the library
_DOWNLOAD_AGAIN = "download it again"


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a safetensors file by name; InputError if it is incomplete."""
    tensors = {}
    with _open_safetensors(path) as handle:
        state = read_file_state(path)
        offsets = _read_offsets(path)
        for name in handle.keys():  # noqa: SIM118
            dtype, shape = offsets[name][0], tuple(offsets[name][1])
            if len(shape) > MAX_AXES:
                why = f"has a tensor of {len(shape)} axes, and {MAX_AXES} are supported"
                raise InputError(f"{path}", None, why, "give the weights of a network")
            digits = re.search(r"\d+", dtype)  # bits of an element: BF16, F8_E4M3; not of BOOL
            bits = int(digits[0]) if digits else 8
            size = prod(shape) * bits // 8
            tensors[name] = TensorInfo(
                path, name, dtype, shape, size, data_offset=offsets[name][2], state=state
            )
    return tensors


def read_safetensors_metadata(path: Path, key: str) -> Any:
    """Returns a value of the metadata, decoded from JSON; None if it is absent or no JSON."""
    with _open_safetensors(path) as handle:
        text = (handle.metadata() or {}).get(key, "")
    try:
        return parse_json(text)
    except DuplicateNameError as error:
        why = f"has metadata {key!r} that is not valid JSON ({error})"
        raise InputError(f"{path}", None, why, "repair or replace it") from None
    except (ValueError, RecursionError):
        return None


def _read_offsets(path: Path) -> dict[str, tuple[str, list[int], int]]:
    """Returns dtype, shape and first byte of each tensor; the header must have been checked."""
    with open_regular_file(path) as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            is_possible = size <= min(path.stat().st_size, _MAX_HEADER_BYTES)
            header = parse_json(file.read(size if is_possible else 0))
            header.pop("__metadata__", None)
            return {
                name: (info["dtype"], info["shape"], 8 + size + info["data_offsets"][0])
                for name, info in header.items()
            }
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            why = "is not a valid safetensors file (its header is damaged)"
            raise InputError(f"{path}", None, why, _DOWNLOAD_AGAIN) from None


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a file with `safetensors`, which checks the header against the file's size."""
    with open_regular_file(path):
        try:
            with safe_open(path, framework="np") as handle:
                yield handle
        except SafetensorError as error:
            reason = format_value(
                str(error).removeprefix("Error while deserializing header: "), str
            )
            _check_known_dtypes(path, str(error))
            why = f"is not a valid safetensors file ({reason})"
            raise InputError(f"{path}", None, why, _DOWNLOAD_AGAIN) from None


def _check_known_dtypes(path: Path, reason: str) -> None:
    """Refuses a file by its first tensor of a dtype that `safetensors` does not know."""
    match = re.search(r"unknown variant `(\w+)`", reason)
    for name, (dtype, _, _) in (_read_offsets(path) if match else {}).items():
        if match and dtype == match[1]:
            why = f"is stored as {dtype}, which is not supported"
            subject = f"{path}: {format_value(name, str)}"
            raise InputError(subject, None, why, GET_READ_FORMAT)
