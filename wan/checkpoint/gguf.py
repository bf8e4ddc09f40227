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

from wan.checkpoint.files import GGUF, TensorInfo, file_state, opened
from wan.settings.errors import InputError
from wan.settings.values import shown

_KINDS = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q5_0", "Q5_1", "Q8_0", "Q8_1"), start=6)),
    **dict(enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"), start=10)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S"), start=16)),
    **dict(enumerate(("IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64"), start=22)),
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
"""Number of a tensor type in the format -> its name, including unsupported types."""
_PLAIN = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)}  # (values, bytes), like `GGUF`
# Type of a metadata number -> its code in `struct`.
_NUMBERS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", start=10))
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
_ORIGINAL = "comfy.gguf.orig_shape."  # + tensor name: the shape before flattening
_LONGEST = 1 << 25  # bytes; a header with a tokenizer of 256 000 tokens has 10 MB
_MOST_AXES = 8
_MOST_KEYS = 1 << 16
_MOST_VALUES = 1 << 20  # strings of an array; skipping so many takes half a second

T = TypeVar("T")


class _DamagedError(Exception):
    """A header is damaged; the message is the reason."""


class _Header:
    """Reads a header sequentially.

    Attributes:
        position: Offset of the next byte.
        file_size: Bytes of the file.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self.at, self.size = memory, 0, len(memory)
        self._end = min(self.size, _LONGEST)

    def skip(self, size: int) -> int:
        """Skips `size` bytes and returns the offset of the first; raises if they are missing."""
        start = self.at
        if size > self._end - start:
            long = self._end == _LONGEST
            raise _DamagedError(f"more than {_LONGEST >> 20} MB of header" if long else "truncated")
        self.at = start + size
        return start

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Reads numbers by their codes in `struct`."""
        form = f"<{form}"
        return struct.unpack_from(form, self._memory, self.skip(struct.calcsize(form)))

    def number(self, form: str) -> int:
        """Reads one number."""
        return int(self.numbers(form)[0])

    def text(self) -> str:
        """Reads a string."""
        size = self.number("Q")
        start = self.skip(size)
        try:
            return self._memory[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise _DamagedError("a name is not valid UTF-8") from None

    def value(self, wanted: bool) -> Any:
        """Reads the value of a key, a number, a string or a tuple; skips it if not `keep`."""
        kind, count = self.number("I"), 1
        if is_array := kind == _ARRAY:
            kind, count = self.numbers("IQ")
        if count > _MOST_VALUES:
            raise _DamagedError(f"{count} values of one key")
        if kind == _STRING:
            found: list[Any] = []
            for _ in range(count):
                if wanted:
                    found.append(self.text())
                else:
                    self.skip(self.number("Q"))
        elif kind not in _NUMBERS:
            raise _DamagedError(f"metadata of the unknown type {kind}")
        else:
            form, memory = struct.Struct(f"<{_NUMBERS[kind]}"), self._memory
            start = self.skip(form.size * count)
            bytes_ = memory[start : self.at] if wanted else b""
            found = [number for (number,) in form.iter_unpack(bytes_)]
        return None if not wanted else tuple(found) if is_array else found[0]


def header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a GGUF file by name.

    Raises:
        InputError: The file is incomplete, or has tensors of an unsupported type.
    """
    tensors = _read(path, lambda read: _tensors(path, read))
    state = file_state(path)
    return {name: replace(info, state=state) for name, info in tensors.items()}


def metadata(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Returns the requested values of a GGUF file's metadata; InputError if it is incomplete."""
    return _read(path, lambda read: _values(read, lambda name: name in names)[1])


def _read(path: Path, work: Callable[[_Header], T]) -> T:
    with opened(path) as file:
        if path.stat().st_size < 24:  # an empty file cannot be mapped
            raise _not_whole(path, "truncated")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            try:
                return work(_Header(memory))
            except _DamagedError as error:
                raise _not_whole(path, str(error)) from None


def _not_whole(path: Path, reason: str) -> InputError:
    return InputError(f"{path}", None, f"is not a valid GGUF file ({reason})", "download it again")


def _values(read: _Header, wanted: Callable[[str], bool]) -> tuple[int, dict[str, Any]]:
    """Reads the start of a header; returns the number of tensors and the selected metadata."""
    if read.number("I") != int.from_bytes(b"GGUF", "little"):
        raise _DamagedError("it does not begin with GGUF")
    if (version := read.number("I")) not in (2, 3):
        raise _DamagedError(f"version {version}; 2 and 3 are supported")
    count, keys = read.numbers("QQ")
    if keys > _MOST_KEYS:
        raise _DamagedError(f"{keys} keys of metadata")
    found: dict[str, Any] = {}
    for _ in range(keys):
        name = read.text()
        is_wanted = wanted(name)
        value = read.value(is_wanted)
        if is_wanted:
            found[name] = value
    return count, found


def _tensors(path: Path, read: _Header) -> dict[str, TensorInfo]:
    count, said = _values(read, lambda name: name == _ALIGNMENT or name.startswith(_ORIGINAL))
    for name, value in said.items():
        sizes = value if isinstance(value, tuple) else (value,)
        if len(sizes) > _MOST_AXES or any(type(size) is not int for size in sizes):
            raise _DamagedError(f"{shown(name, str)} is no shape or size")
    alignment = said.get(_ALIGNMENT, 32)
    if type(alignment) is not int or alignment not in (1 << bits for bits in range(3, 21)):
        raise _DamagedError(f"alignment {alignment}")
    found: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = read.text()
        axes = read.number("I")
        if axes > _MOST_AXES:
            raise _DamagedError(f"{shown(name, str)} has {axes} axes")
        sizes = read.numbers(f"{axes}Q")
        kind, start = read.numbers("IQ")
        if name in found:
            raise _DamagedError(f"{shown(name, str)} occurs twice")
        if start % alignment:
            raise _DamagedError(f"{shown(name, str)} does not begin at a multiple of {alignment}")
        shape = said.get(_ORIGINAL + name, sizes[::-1])
        shape = shape if isinstance(shape, tuple) else (shape,)
        found[name] = _info(path, name, kind, sizes, shape, start)
    data = -(-read.at // alignment) * alignment
    for name, info in found.items():
        if data + info.start + info.nbytes > read.size:
            raise _DamagedError(f"{shown(name, str)} ends after the end of the file")
        found[name] = replace(info, start=data + info.start)
    return found


def _info(
    path: Path,
    name: str,
    kind: int,
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    start: int,
) -> TensorInfo:
    """Describes a tensor; `offset` is its first byte after the header."""
    dtype = _KINDS.get(kind, f"kind {kind}")
    known = _PLAIN | GGUF
    if dtype not in known:
        why = f"is stored as {dtype}, which is not supported"
        remedy = f"get a file of {', '.join(known)}"
        raise InputError(f"{path}: {shown(name, str)}", None, why, remedy)
    values, nbytes = known[dtype]
    count = prod(sizes)
    if count < 1 or (sizes[0] if sizes else 1) % values:
        raise _DamagedError(f"{shown(name, str)} has rows that are no whole blocks of {dtype}")
    if min(shape, default=1) < 1 or prod(shape) != count:
        raise _DamagedError(f"{shown(name, str)} has two shapes")
    return TensorInfo(path, name, dtype, shape, count // values * nbytes, start=start)
