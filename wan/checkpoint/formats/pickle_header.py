"""Reads names, dtypes, shapes and places of the tensors in PyTorch files, without torch.

`torch.save` writes a zip archive of one pickle (`data.pkl`), which describes the tensors, and of
their values, uncompressed (`data/0`, ...). The pickle is interpreted here, opcode by opcode: its
globals are only compared with names, never imported or called.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from wan.checkpoint.formats.tensor_info import MAX_AXES, FileState, TensorInfo
from wan.settings.errors import InputError
from wan.settings.values import format_value, list_names
from wan.utils.files import open_regular_file

_MAX_PICKLE_BYTES = 16_000_000  # bytes of `data.pkl`; the largest network's has 0.5 MB
_MAX_OPCODES = 1_000_000  # about 30 for each tensor
_SECONDS_UNTIL_KEPT = 2.0  # a new file may be written again within one tick of its times
_LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name
_LOCAL_SIGNATURE = b"PK\3\4"
_UTF8_FLAG = 0x800  # the name is in UTF-8
_DTYPES = {  # PyTorch's storage class or dtype -> (safetensors' spelling, bytes of an element)
    **dict.fromkeys(("DoubleStorage", "float64"), ("F64", 8)),
    **dict.fromkeys(("FloatStorage", "float32"), ("F32", 4)),
    **dict.fromkeys(("HalfStorage", "float16"), ("F16", 2)),
    **dict.fromkeys(("BFloat16Storage", "bfloat16"), ("BF16", 2)),
    **dict.fromkeys(("LongStorage", "int64"), ("I64", 8)),
    **dict.fromkeys(("IntStorage", "int32"), ("I32", 4)),
    **dict.fromkeys(("ShortStorage", "int16"), ("I16", 2)),
    **dict.fromkeys(("CharStorage", "int8"), ("I8", 1)),
    **dict.fromkeys(("ByteStorage", "uint8"), ("U8", 1)),
    **dict.fromkeys(("BoolStorage", "bool"), ("BOOL", 1)),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
_STATE_DICT = "state_dict"
_STUDENT, _CRITIC = "generator_ema", "critic"  # of a distillation, next to the last `generator`
_ALPHA_END = ".alpha"  # of the name of a LoRA's alpha
_GIVE_PLAIN_TENSORS = "give a file of plain tensors, as safetensors"
_DOWNLOAD_AGAIN = "download it again"


class ForeignPickleError(InputError):
    """A complete PyTorch file holds something other than named tensors."""


@dataclass(frozen=True)
class _Global:
    """A class or function that a pickle names."""

    name: str


@dataclass(frozen=True)
class _Storage:
    type_name: str
    offset: int
    nbytes: int


class _DamagedPickleError(Exception):
    """A pickle cannot be interpreted; the message is the reason."""


def read_pickle_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a PyTorch file, or those of its only dictionary of tensors, by name.

    Python numbers are returned as well if their names are those of a LoRA's alphas.

    Raises:
        ForeignPickleError: The file holds something else.
        InputError: The file is damaged.
    """
    with open_regular_file(path) as file:
        status = os.fstat(file.fileno())
    state = status.st_size, status.st_mtime_ns
    if time.time() - status.st_mtime < _SECONDS_UNTIL_KEPT:
        return _read_file(path, state)
    return dict(_read_version(path, state, status.st_ino, status.st_ctime_ns))


@lru_cache(maxsize=16)  # one video reads the header of its VAE eight times
def _read_version(path: Path, state: FileState, *_: int) -> dict[str, TensorInfo]:
    return _read_file(path, state)


def _read_file(path: Path, state: FileState) -> dict[str, TensorInfo]:
    with open_regular_file(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                content = _read_archive(path, file, archive)
        except zipfile.BadZipFile:
            file.seek(0)
            why, remedy = "is no PyTorch file", _DOWNLOAD_AGAIN
            if (first_bytes := file.read(2)) in (b"PK", b""):  # its directory is at its end
                why = "is not a complete PyTorch file, but truncated or corrupt"
            elif first_bytes.startswith(b"\x80"):  # a pickle
                why = "is not a PyTorch file in the zip format"
                remedy = "save it again with a current PyTorch"
            raise InputError(f"{path}", None, why, remedy) from None
        except InputError:
            raise
        except Exception as error:  # a damaged archive or pickle: half a dozen types
            is_known = isinstance(error, _DamagedPickleError)
            reason = format_value(str(error), str) if is_known else "its content is damaged"
            why = f"cannot be read ({reason})"
            raise InputError(f"{path}", None, why, _DOWNLOAD_AGAIN) from None
    weights = _select_weights(path, content)
    return {name: replace(info, name=name, state=state) for name, info in weights.items()}


def _read_archive(path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> Any:
    """Returns the unpickled content of an archive, with a `TensorInfo` for each tensor."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if entry.filename in entries:  # which one counts depends on the program
            name = format_value(entry.filename, str)
            raise _DamagedPickleError(f"two entries of the name {name}")
        entries[entry.filename] = entry
    root = next(iter(entries), "").partition("/")[0]
    pickle_entry = entries.get(f"{root}/data.pkl")
    if pickle_entry is None:
        why = "is a zip archive, but not one of PyTorch"
        raise ForeignPickleError(f"{path}", None, why, _GIVE_PLAIN_TENSORS)
    byte_order = entries.get(f"{root}/byteorder")
    if byte_order and byte_order.file_size < 16 and _read_entry(path, file, byte_order) == b"big":
        raise InputError(f"{path}", None, "is big-endian", "save it on a little-endian machine")
    if pickle_entry.file_size > _MAX_PICKLE_BYTES:
        raise _DamagedPickleError(f"more than {_MAX_PICKLE_BYTES // 10**6} MB of names")

    def find_storage(persistent_id: Any) -> _Storage:
        _, storage_type, key, *_ = persistent_id
        entry = entries.get(f"{root}/data/{key}")
        if entry is None:
            raise _DamagedPickleError(f"{root}/data/{key} is missing")
        start = _find_entry_start(path, file, entry)
        return _Storage(storage_type.name.rpartition(" ")[2], start, entry.file_size)

    return _PickleReader(path, find_storage).read(_read_entry(path, file, pickle_entry))


def _find_entry_start(path: Path, file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Returns the first byte of an entry's content in its archive."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise InputError(f"{path}", None, "is compressed", "save it again with torch.save")
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8_FLAG else "cp437")
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack("<2H", header[26:])
    if not header.startswith(_LOCAL_SIGNATURE) or file.read(name_bytes) != name:
        raise zipfile.BadZipFile
    start = entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if start + entry.file_size > path.stat().st_size:
        raise _DamagedPickleError("truncated")
    return start


def _read_entry(path: Path, file: BinaryIO, entry: zipfile.ZipInfo) -> bytes:
    """Returns an entry's content if its CRC fits or is not stored, as PyTorch may be told to."""
    file.seek(_find_entry_start(path, file, entry))
    content = file.read(entry.file_size)
    if entry.CRC not in (0, zlib.crc32(content)):
        raise zipfile.BadZipFile
    return content


class _PickleReader:
    """Interprets the opcodes that `torch.save` writes."""

    def __init__(self, path: Path, find_storage: Callable[[Any], _Storage]) -> None:
        self.path, self.find_storage = path, find_storage
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []
        self.memo: dict[Any, Any] = {}

    def read(self, data: bytes) -> Any:
        """Returns the object that a pickle describes."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
            if count == _MAX_OPCODES:
                raise _DamagedPickleError(f"more than {_MAX_OPCODES} values")
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _ARGUMENTS:
                self.stack.append(argument)
            elif name in _TUPLE_SIZES:
                size = _TUPLE_SIZES[name]
                self.stack[-size:] = [tuple(self.stack[-size:])]
            elif name in ("BINPUT", "LONG_BINPUT"):
                self.memo[argument] = self.stack[-1]
            elif name == "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self.stack.append(self.memo[argument])
            elif name not in ("PROTO", "FRAME"):
                _HANDLERS.get(name, partial(_refuse_opcode, name))(self, argument)
        raise _DamagedPickleError("truncated")

    def mark(self, _: Any) -> None:
        self.outer_stacks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer_stacks.pop()
        return items

    def make_tuple(self, _: Any) -> None:
        items = self.pop_mark()
        self.stack.append(tuple(items))

    def append(self, _: Any) -> None:
        item = self.stack.pop()
        self.stack[-1].append(item)

    def append_all(self, _: Any) -> None:
        items = self.pop_mark()
        self.stack[-1].extend(items)

    def set_item(self, _: Any) -> None:
        key, value = self.stack[-2:]
        del self.stack[-2:]
        self.stack[-1][_make_key(key)] = value

    def set_items(self, _: Any) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_make_key(key)] = value

    def find_global(self, argument: Any) -> None:
        if argument is None:  # STACK_GLOBAL
            module, name = self.stack[-2:]
            del self.stack[-2:]
            argument = f"{module} {name}"
        if argument.split(" ")[0].split(".")[0] != "torch" and argument != _ORDERED_DICT:
            name = format_value(argument.replace(" ", "."), str)
            why = f"holds {name} and was not opened, because it could run code"
            raise ForeignPickleError(f"{self.path}", None, why, _GIVE_PLAIN_TENSORS)
        self.stack.append(_Global(argument))

    def load_persistent(self, _: Any) -> None:
        self.stack.append(self.find_storage(self.stack.pop()))

    def call(self, _: Any) -> None:
        """Replaces a call by the tensor or dictionary it makes, and others by their global."""
        function, arguments = self.stack[-2:]
        del self.stack[-2:]
        full_name = function.name if isinstance(function, _Global) else ""
        name = full_name.rpartition(" ")[2]
        result: Any = function
        if full_name == _ORDERED_DICT and not arguments:
            result = {}
        elif name.startswith("_rebuild_parameter"):
            result = arguments[0]
        elif name in _REBUILD_TENSOR:
            dtype = arguments[6].name.rpartition(" ")[2] if name == "_rebuild_tensor_v3" else None
            storage, offset, shape, strides = arguments[:4]
            result = _make_tensor(self.path, storage, offset, (shape, strides), dtype)
        self.stack.append(result)

    def build(self, _: Any) -> None:
        """Ignores an object's state, such as the versions of a network's modules."""
        self.stack.pop()


_ORDERED_DICT = "collections OrderedDict"
_REBUILD_TENSOR = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_ARGUMENTS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
)
_TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_HANDLERS: dict[str, Callable[[_PickleReader, Any], None]] = {
    "MARK": _PickleReader.mark,
    "TUPLE": _PickleReader.make_tuple,
    "APPEND": _PickleReader.append,
    "APPENDS": _PickleReader.append_all,
    "SETITEM": _PickleReader.set_item,
    "SETITEMS": _PickleReader.set_items,
    "GLOBAL": _PickleReader.find_global,
    "STACK_GLOBAL": _PickleReader.find_global,
    "BINPERSID": _PickleReader.load_persistent,
    "REDUCE": _PickleReader.call,
    "NEWOBJ": _PickleReader.call,
    "BUILD": _PickleReader.build,
}


def _refuse_opcode(name: str, reader: _PickleReader, _: Any) -> None:
    why = f"holds something other than weights (the opcode {name})"
    raise ForeignPickleError(f"{reader.path}", None, why, _GIVE_PLAIN_TENSORS)


def _make_key(key: Any) -> Any:
    """Returns a key of a dictionary; the hash of nested tuples might not end."""
    return key if isinstance(key, str | int | float | None) else type(key).__name__


def _make_tensor(
    path: Path, storage: _Storage, offset: Any, axes: tuple[Any, Any], dtype_name: str | None
) -> TensorInfo | None:
    """Returns a tensor without name; None if its storage is too small, as for one value for many.

    Args:
        axes: Its shape and its strides.
    """
    shape, strides = axes
    dtype_name = dtype_name or storage.type_name
    dtype, itemsize = _DTYPES.get(dtype_name, (f"torch.{dtype_name}", 0))
    if not all(isinstance(numbers, tuple | list) for numbers in axes) or len(shape) != len(strides):
        raise _DamagedPickleError("a tensor without a shape")
    if len(shape) > MAX_AXES:
        raise _DamagedPickleError(f"a tensor of more than {MAX_AXES} axes")
    numbers = (offset, *shape, *strides)
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise _DamagedPickleError("a tensor whose shape is not of numbers of 64 bits")
    shape, strides = tuple(shape), tuple(strides)
    info = TensorInfo(path, "", dtype, shape, prod(shape) * itemsize)
    if 0 in shape:
        return info
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if max(last + 1, prod(shape)) * itemsize > storage.nbytes:
        return None
    contiguous = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return replace(
        info,
        data_offset=storage.offset + offset * itemsize,
        strided=None if strides == contiguous else (shape, strides),
    )


def _select_weights(path: Path, content: Any) -> dict[str, TensorInfo]:
    """Returns the tensors of a dictionary, or those of its only entry that is one of tensors."""

    def is_weights(value: Any) -> bool:
        return isinstance(value, Mapping) and bool(value) and not find_foreign_names(value)

    def find_foreign_names(entries: Mapping[Any, Any]) -> list[Any]:
        return [
            name
            for name, value in entries.items()
            if not isinstance(name, str)
            or not isinstance(_convert_alpha(path, name, value), TensorInfo)
        ]

    if isinstance(content, Mapping) and isinstance(content.get(_STATE_DICT), Mapping):
        content = content[_STATE_DICT]  # training checkpoints nest the weights
    elif isinstance(content, Mapping) and len(find_foreign_names(content)) == len(content):
        sets = [name for name, value in content.items() if is_weights(value) and name != _CRITIC]
        if _STUDENT in sets:  # its name distinguishes causal students from other networks
            return {f"{_STUDENT}.{name}": x for name, x in content[_STUDENT].items()}
        if len(sets) > 1:
            why = f"holds {len(sets)} sets of weights ({list_names(map(str, sets))})"
            raise ForeignPickleError(f"{path}", None, why, "save one of them as safetensors")
        content = content[sets[0]] if sets else content
    foreign_names = (
        find_foreign_names(content) if isinstance(content, Mapping) else [type(content).__name__]
    )
    if foreign_names:
        why = f"holds something other than weights ({format_value(foreign_names[0], str)})"
        raise ForeignPickleError(f"{path}", None, why, _GIVE_PLAIN_TENSORS)
    return {name: _convert_alpha(path, name, value) for name, value in content.items()}


def _convert_alpha(path: Path, name: str, value: Any) -> Any:
    """Returns the description of a Python number that is a LoRA's alpha, and other values as is."""
    is_alpha = name.endswith(_ALPHA_END) and type(value) in (int, float)
    return TensorInfo(path, name, "F64", (), 0, number=value) if is_alpha else value
