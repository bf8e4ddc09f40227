"""Reads the headers of GGUF files: names, types, shapes and offsets of tensors.

The `gguf` package is the tests' oracle and is not used here: its reader creates several objects per
element of the metadata and trusts the counts in a damaged file. This reader skips metadata that is
not requested and never reads past the end of the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Collection
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from wan.checkpoint.formats.tensor_info import GGUF, MAX_AXES, TensorInfo, read_file_state
from wan.settings.errors import InputError
from wan.settings.values import format_value
from wan.utils.files import open_regular_file

_TYPE_NAMES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q5_0", "Q5_1", "Q8_0"), start=6)),
    **dict(enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), start=10)),
    20: "IQ4_NL",
    23: "IQ4_XS",
    30: "BF16",
    39: "MXFP4",
}
"""Number of a tensor type in the format -> its name."""
_FLOAT_SIZES = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)}  # (values, bytes), like `GGUF`
# Type of a metadata number -> its code in `struct`.
_STRUCT_CODES = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", start=10))
_STRING, _ARRAY = 8, 9
_ALIGNMENT_KEY = "general.alignment"
_ORIGINAL_SHAPE_PREFIX = "comfy.gguf.orig_shape."  # + tensor name: the shape before flattening
_MAX_HEADER_BYTES = 1 << 25  # bytes; a header with a tokenizer of 256 000 tokens has 10 MB
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_GET_OTHER = "get a little-endian file of version 2 or 3"
_MAX_VALUES = 1 << 20  # strings of an array; skipping so many takes half a second

T = TypeVar("T")


class _DamagedError(Exception):
    """A header is damaged; the message is the reason."""


class _HeaderReader:
    """Reads a header sequentially.

    Attributes:
        position: Offset of the next byte.
        file_size: Bytes of the file.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self.position, self.file_size = memory, 0, len(memory)
        self._end = min(self.file_size, _MAX_HEADER_BYTES)

    def skip(self, size: int) -> int:
        """Skips `size` bytes and returns the offset of the first; raises if they are missing."""
        start = self.position
        if size > self._end - start:
            is_limit = self._end == _MAX_HEADER_BYTES
            raise _DamagedError(
                f"more than {_MAX_HEADER_BYTES >> 20} MB of header" if is_limit else "truncated"
            )
        self.position = start + size
        return start

    def read_numbers(self, codes: str) -> tuple[Any, ...]:
        """Reads numbers by their codes in `struct`."""
        codes = f"<{codes}"
        return struct.unpack_from(codes, self._memory, self.skip(struct.calcsize(codes)))

    def read_number(self, code: str) -> int:
        """Reads one number."""
        return int(self.read_numbers(code)[0])

    def read_text(self) -> str:
        """Reads a string."""
        size = self.read_number("Q")
        start = self.skip(size)
        try:
            return self._memory[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise _DamagedError("a name is not valid UTF-8") from None

    def read_value(self, keep: bool) -> Any:
        """Reads the value of a key, a number, a string or a tuple; skips it if not `keep`."""
        value_type, count = self.read_number("I"), 1
        if is_array := value_type == _ARRAY:
            value_type, count = self.read_numbers("IQ")
        if count > _MAX_VALUES:
            raise _DamagedError(f"{count} values of one key")
        if value_type == _STRING:
            values: list[Any] = []
            for _ in range(count):
                if keep:
                    values.append(self.read_text())
                else:
                    self.skip(self.read_number("Q"))
        elif value_type not in _STRUCT_CODES:
            raise _DamagedError(f"metadata of the unknown type {value_type}")
        else:
            item_format, memory = struct.Struct(f"<{_STRUCT_CODES[value_type]}"), self._memory
            start = self.skip(item_format.size * count)
            data = memory[start : self.position] if keep else b""
            values = [number for (number,) in item_format.iter_unpack(data)]
        return None if not keep else tuple(values) if is_array else values[0]


def read_gguf_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a GGUF file by name.

    Raises:
        InputError: The file is incomplete, or has tensors of an unsupported type.
    """
    tensors = _parse_gguf_file(path, lambda reader: _read_tensor_section(path, reader))
    state = read_file_state(path)
    return {name: replace(info, state=state) for name, info in tensors.items()}


def read_gguf_metadata(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Returns the requested values of a GGUF file's metadata; InputError if it is incomplete."""
    return _parse_gguf_file(
        path, lambda reader: _read_metadata_section(path, reader, lambda name: name in names)[1]
    )


def _parse_gguf_file(path: Path, parse: Callable[[_HeaderReader], T]) -> T:
    with open_regular_file(path) as file:
        if path.stat().st_size < 24:  # an empty file cannot be mapped
            raise _make_gguf_error(path, "truncated")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            try:
                return parse(_HeaderReader(memory))
            except _DamagedError as error:
                raise _make_gguf_error(path, str(error)) from None


def _make_gguf_error(path: Path, reason: str) -> InputError:
    return InputError(f"{path}", None, f"is not a valid GGUF file ({reason})", "download it again")


def _read_metadata_section(
    path: Path, reader: _HeaderReader, select_key: Callable[[str], bool]
) -> tuple[int, dict[str, Any]]:
    """Reads the start of a header; returns the number of tensors and the selected metadata."""
    if reader.read_number("I") != int.from_bytes(b"GGUF", "little"):
        raise _DamagedError("it does not begin with GGUF")
    if (version := reader.read_number("I")) not in (2, 3):
        if version in (1, *(number << 24 for number in (1, 2, 3))):
            label = "a version 1" if version == 1 else "a big-endian"
            why = f"is {label} GGUF file, which is not supported"
            raise InputError(f"{path}", None, why, _GET_OTHER)
        raise _DamagedError(f"version {version}; 2 and 3 are supported")
    num_tensors, num_keys = reader.read_numbers("QQ")
    if num_keys > _MAX_KEYS:
        raise _DamagedError(f"{num_keys} keys of metadata")
    values: dict[str, Any] = {}
    for _ in range(num_keys):
        name = reader.read_text()
        is_wanted = select_key(name)
        value = reader.read_value(is_wanted)
        if is_wanted:
            values[name] = value
    return num_tensors, values


def _read_tensor_section(path: Path, reader: _HeaderReader) -> dict[str, TensorInfo]:
    num_tensors, metadata_values = _read_metadata_section(
        path,
        reader,
        lambda name: name == _ALIGNMENT_KEY or name.startswith(_ORIGINAL_SHAPE_PREFIX),
    )
    shapes = {n: x if isinstance(x, tuple) else (x,) for n, x in metadata_values.items()}
    for name, sizes in shapes.items():
        if len(sizes) > MAX_AXES or any(type(size) is not int for size in sizes):
            raise _DamagedError(f"{format_value(name, str)} is no shape or size")
    alignment = metadata_values.get(_ALIGNMENT_KEY, 32)
    if type(alignment) is not int or alignment not in (1 << bits for bits in range(3, 21)):
        raise _DamagedError(f"alignment {alignment}")
    if num_tensors > _MAX_TENSORS:
        raise _DamagedError(f"{num_tensors} tensors")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        name = reader.read_text()
        if not name:
            raise _DamagedError("a tensor has no name")
        if name in tensors:
            raise _DamagedError(f"{format_value(name, str)} occurs twice")
        shape = shapes.get(_ORIGINAL_SHAPE_PREFIX + name)
        tensors[name] = _read_tensor_info(path, reader, name, alignment, shape)
    data_start = -(-reader.position // alignment) * alignment
    for name, info in tensors.items():
        if data_start + info.data_offset + info.nbytes > reader.file_size:
            raise _DamagedError(f"{format_value(name, str)} ends after the end of the file")
        tensors[name] = replace(info, data_offset=data_start + info.data_offset)
    return tensors


def _read_tensor_info(
    path: Path, reader: _HeaderReader, name: str, alignment: int, shape: tuple[int, ...] | None
) -> TensorInfo:
    """Reads the description of a tensor after its name; its offset counts from the header's end.

    Args:
        shape: The shape before the tensor was reshaped for quantization; None: as stored.
    """
    num_dims = reader.read_number("I")
    if num_dims > MAX_AXES:
        raise _DamagedError(f"{format_value(name, str)} has {num_dims} axes")
    sizes = reader.read_numbers(f"{num_dims}Q")
    type_number, offset = reader.read_numbers("IQ")
    if offset % alignment:
        why = f"does not begin at a multiple of {alignment}"
        raise _DamagedError(f"{format_value(name, str)} {why}")
    shape = sizes[::-1] if shape is None else shape
    dtype = _TYPE_NAMES.get(type_number, f"GGUF type {type_number}")
    block_sizes = _FLOAT_SIZES | GGUF
    if dtype not in block_sizes:
        why = f"is stored as {dtype}, which is not supported"
        remedy = f"get a file of {', '.join(block_sizes)}"
        raise InputError(f"{path}: {format_value(name, str)}", None, why, remedy)
    block_values, block_bytes = block_sizes[dtype]
    num_elements = prod(sizes)
    if num_elements < 1 or (sizes[0] if sizes else 1) % block_values:
        raise _DamagedError(
            f"{format_value(name, str)} has rows that are no whole blocks of {dtype}"
        )
    if min(shape, default=1) < 1 or prod(shape) != num_elements:
        raise _DamagedError(f"{format_value(name, str)} has two shapes")
    return TensorInfo(
        path, name, dtype, shape, num_elements // block_values * block_bytes, data_offset=offset
    )
