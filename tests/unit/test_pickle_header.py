"""PyTorch files, read without torch: `torch.load(weights_only=True)` is the oracle."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.formats.headers import read_file_headers
from wan.checkpoint.load import DTYPES, open_sources
from wan.settings.errors import InputError

BASE = torch.arange(24.0)
CONTENTS: dict[str, Any] = {
    **{name: {"x": BASE[:8].to(dtype)} for name, dtype in DTYPES.items()},
    "views": {"a": BASE[2:14].view(3, 4), "b": BASE.view(4, 6).t(), "c": BASE[::3], "d": BASE},
    "scalars": {"alpha": torch.tensor(4.0), "empty": torch.empty(0, 3)},
    "parameters": {"x": nn.Parameter(BASE.bfloat16())},
    "a network": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict(),
    "an ordered dictionary": OrderedDict(x=BASE),
    "a training state": {"state_dict": {"x": BASE}, "epoch": 3, "optimizer": {"state": [BASE]}},
    "one nested set": {"generator": {"x": BASE}, "step": 7, "betas": (0.9, 0.99)},
}


def select_tensors(content: Any) -> dict[str, Tensor]:
    """Returns the tensors of `CONTENTS`."""
    nested = next((content[key] for key in ("state_dict", "generator") if key in content), content)
    return dict(nested)


@pytest.mark.parametrize("case", CONTENTS)
def test_tensors_are_those_of_torch(case: str, tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    torch.save(CONTENTS[case], file)
    expected = select_tensors(torch.load(file, weights_only=True))
    headers = read_file_headers(file)
    sources = open_sources(headers)
    assert headers.keys() == expected.keys()
    for name, tensor in expected.items():
        info = headers[name]
        assert (info.shape, info.nbytes) == (tuple(tensor.shape), tensor.nbytes), name
        assert DTYPES[info.dtype] == tensor.dtype, name
        values = sources[name].read(slice(None)).reshape(tensor.shape)
        assert (
            torch.equal(values.view(torch.uint8), tensor.view(torch.uint8))
            if (tensor.itemsize == 1)
            else torch.equal(values, tensor)
        ), name


def test_tensors_outside_their_storage_are_refused(tmp_path: Path) -> None:
    """Four of eight values from the third or fifth on fit, and from the sixth on do not."""
    source, path = tmp_path / "x.pt", tmp_path / "edited.pt"
    torch.save({"x": BASE[:8].clone()[3:7]}, source)
    for offset in (3, 4, 5):
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
            for entry in old.namelist():
                content = old.read(entry)
                if entry.endswith("data.pkl"):
                    assert content.count(b"K\x03K\x04\x85") == 1  # the offset and the shape
                    content = content.replace(b"K\x03K\x04", bytes([75, offset, 75, 4]))
                new.writestr(entry, content)
        if offset < 5:
            values = open_sources(read_file_headers(path))["x"].read(slice(None))
            assert torch.equal(values, BASE[offset : offset + 4])
        else:
            assert "something other than weights" in get_refusal(read_file_headers, path)
    torch.save({"x": torch.ones(1).expand(4)}, path)  # one value for many
    assert "something other than weights" in get_refusal(read_file_headers, path)


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    """Also one with as many bytes: an old file is read once, a new one each time."""
    path = tmp_path / "x.pt"
    for name, age in (("a", 100), ("b", 50), ("c", 0), ("d", 0)):
        torch.save({name: BASE}, path)
        if age:
            os.utime(path, (time.time() - age,) * 2)
        for _ in range(2):
            headers = read_file_headers(path)
            assert [*headers] == [name]
            headers.clear()  # a caller's own


def damage(data: bytes, rng: random.Random) -> bytes:
    """Changes, removes or inserts a few bytes."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        first = rng.randrange(len(damaged))
        damaged[first : first + rng.choice((0, 1, 1, 1, 3))] = rng.randbytes(rng.choice((0, 1, 1)))
    return bytes(damaged)


def save_damaged(path: Path, content: Any, part: str, rng: random.Random) -> None:
    """Saves a file whose pickle is damaged under a right CRC, or its values or directory."""
    torch.save(content, path)
    data = path.read_bytes()
    directory = data.index(b"PK\1\2")
    if part == "values":
        path.write_bytes(damage(data[:directory], rng) + data[directory:])
    elif part == "directory":
        path.write_bytes(data[:directory] + damage(data[directory:], rng))
    else:
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                is_pickle = name.endswith(".pkl")
                new.writestr(name, damage(old.read(name), rng) if is_pickle else old.read(name))


@pytest.mark.parametrize("part", ["pickle", "values", "directory"])
def test_damaged_files_are_refused_or_read_as_torch_reads_them(part: str, tmp_path: Path) -> None:
    """`torch.load` does not read entries marked as folders: their tensors are not initialised."""
    path, rng, num_read = tmp_path / "x.pt", random.Random(part), 0
    cases = [case for case in CONTENTS if case not in ("a training state", "one nested set")]
    for _ in range(200 if part == "pickle" else 100):
        save_damaged(path, CONTENTS[rng.choice(cases)], part, rng)
        try:
            headers = read_file_headers(path)
            actual = {name: x.read(slice(None)) for name, x in open_sources(headers).items()}
        except InputError:
            continue
        except KeyError as error:  # the networks' readers refuse other dtypes by their names
            assert "torch." in str(error)
            continue
        with zipfile.ZipFile(path) as archive:
            folders = [entry for entry in archive.infolist() if entry.external_attr & 0x10]
        try:
            expected = select_tensors(torch.load(path, weights_only=True)) if not folders else {}
        except Exception:  # torch refuses more
            continue
        num_read += 1
        for name, tensor in expected.items():
            assert headers[name].shape == tensor.shape
            values, tensor = (x.detach().flatten().clone() for x in (actual[name], tensor))
            assert torch.equal(values.view(torch.uint8), tensor.view(torch.uint8))
    assert num_read >= 5


def test_entries_marked_as_folders_and_without_crc(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": BASE}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    data = bytearray(path.read_bytes())
    name = data.rindex(b"x/data/0")
    data[name - 8] |= 0x10  # the attributes in the archive's directory
    path.write_bytes(data)
    assert torch.equal(open_sources(read_file_headers(path))["x"].read(slice(None)), BASE)
    data[name - 26 : name - 18] = (10**6).to_bytes(4, "little") * 2  # its sizes in the archive
    path.write_bytes(data)
    assert "truncated" in get_refusal(read_file_headers, path), "it ends after the file"


def write_archive(
    path: Path, pickle: bytes, compression: int = zipfile.ZIP_STORED, again: bool = False
) -> Path:
    with (
        warnings.catch_warnings(action="ignore"),
        zipfile.ZipFile(path, "w", compression) as archive,
    ):
        for _ in range(1 + again):
            archive.writestr("x/data.pkl", pickle)
        archive.writestr("x/data/0", bytes(96))
    return path


def make_nested_key() -> bytes:
    """A dictionary whose key is a tuple of 2 ** 60 leaves: its hash would take for ever."""
    return b"\x80\x02}(K\x01" + b"q\x00h\x00\x86" * 60 + b"K\x01u."


NUMBER, ONE = b"\x8a\xfe" + b"\xff" * 253 + b"\x7f", b"K\x01"  # 2 ** 2031 - 1, and 1


def make_tensor_pickle(
    shape: bytes, strides: bytes, offset: bytes = b"K\x00", count: int = 1
) -> bytes:
    """A pickle of tensors of one shape; the arguments are opcodes of numbers."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x18tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset
    tensor += b"(" + shape + b"t(" + strides + b"t\x89NtR"
    names = (b"X\x08\0\0\0%08d" % index for index in range(count))
    return b"\x80\x02}(" + b"".join(name + tensor for name in names) + b"u."


def read_saved_pickle(path: Path, content: Any) -> bytes:
    torch.save(content, path)
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"{path.stem}/data.pkl")


def test_hostile_and_foreign_files(tmp_path: Path) -> None:
    pickle = read_saved_pickle(tmp_path / "a.pt", {"x": BASE})
    whole = (tmp_path / "a.pt").read_bytes()
    writers: dict[str, Callable[[Path], Any]] = {
        "two sets": lambda path: torch.save({"ema": {"x": BASE}, "generator": {"x": BASE}}, path),
        "a compressed archive": lambda path: write_archive(path, pickle, zipfile.ZIP_DEFLATED),
        "another archive": lambda path: zipfile.ZipFile(path, "w").writestr("a", b"b"),
        "a nested key": lambda path: write_archive(path, make_nested_key()),
        "a huge memo": lambda path: write_archive(path, b"\x80\x02]r\xff\xff\xff\x7f."),
        "many values": lambda path: write_archive(path, b"\x80\x02" + b"N" * 1_000_001),
        "a large pickle": lambda path: write_archive(path, bytes(16_000_001)),
        "no end": lambda path: write_archive(path, pickle[:-1]),
        "an unknown opcode": lambda path: write_archive(path, b"\x80\x02\x8f."),
        "a page": lambda path: path.write_text("<html>not found</html>"),
        "missing values": lambda path: write_archive(
            path, pickle.replace(b"\x01\x00\x00\x000", b"\x01\x00\x00\x009")
        ),
        "damaged names": lambda path: path.write_bytes(whole.replace(b"\0\0\0xq", b"\0\0\0yq")),
        "a damaged entry": lambda path: path.write_bytes(
            whole.replace(b"a/data/0", b"a/data/1", 1)
        ),
        "many axes": lambda path: write_archive(
            path, make_tensor_pickle(NUMBER * 20_000, ONE * 20_000)
        ),
        "many tensors of many axes": lambda path: write_archive(
            path, make_tensor_pickle(NUMBER * 99, NUMBER * 99, NUMBER, 200)
        ),
        "a large size": lambda path: write_archive(path, make_tensor_pickle(NUMBER, ONE)),
        "a large stride": lambda path: write_archive(path, make_tensor_pickle(ONE, NUMBER)),
        "a large offset": lambda path: write_archive(path, make_tensor_pickle(ONE, ONE, NUMBER)),
        "no sizes": lambda path: write_archive(
            path, make_tensor_pickle(ONE, ONE).replace(b"(" + ONE + b"t", ONE)
        ),
        "two entries of one name": lambda path: write_archive(path, pickle, again=True),
        "a tensor past its end": lambda path: write_archive(
            path, pickle.replace(b"K\x18\x85", b"K\x19\x85")
        ),
    }
    messages = {}
    for case, write in writers.items():
        path = tmp_path / "x.pt"
        write(path)
        messages[case] = get_refusal(read_file_headers, path)
    check_refusals("weights: PyTorch files without torch", messages)


def test_no_torch_is_imported(tmp_path: Path) -> None:
    torch.save({"x": BASE}, tmp_path / "x.pt")
    code = (
        "import sys; from pathlib import Path; from wan.checkpoint.formats import headers;"
        "print(*headers.read_file_headers(Path(sys.argv[1])), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["x", "False"]
