"""Headers of checkpoint files, read without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.formats.headers import (
    compute_fingerprint,
    is_further_shard,
    list_shards,
)
from wan.checkpoint.formats.safetensors_header import read_safetensors_header
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.settings.errors import InputError

Header = dict[str, Any]
DAMAGE: dict[str, Callable[[Header], object]] = {
    "another shape": lambda h: h["a"].update(shape=[2, 2]),
    "negative sizes": lambda h: h["a"].update(shape=[-2, -3]),
    "unknown dtype": lambda h: h["a"].update(dtype="F8E4"),
    "bytes of another": lambda h: h.update(c={**h["b"]}),
    "beyond the file": lambda h: h["b"].update(data_offsets=[28, 32]),
    "bytes of none": lambda h: h.pop("b"),
    "metadata not text": lambda h: h.update(__metadata__={"format": 5}),
    "half a surrogate pair": lambda h: h.update({"\ud800": h.pop("a")}),
    "nine axes": lambda h: h["a"].update(shape=[1, 1, 1, 1, 1, 1, 1, 2, 3]),
    "no mapping": lambda h: h.update(a=[]),
}


def small_file(path: Path, change: Callable[[Header], object] = len, data: int = 28) -> Path:
    header: Header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [24, 27]},
        "c": {"dtype": "F4", "shape": [2], "data_offsets": [27, 28]},
        "empty": {"dtype": "BOOL", "shape": [3, 0], "data_offsets": [28, 28]},
    }
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


def test_a_header(tmp_path: Path) -> None:
    path = small_file(tmp_path / "x.safetensors")
    start = path.stat().st_size - 28
    assert read_safetensors_header(path) == {
        "a": TensorInfo(path, "a", "F32", (2, 3), 24, data_offset=start),
        "b": TensorInfo(path, "b", "F8_E4M3", (3,), 3, data_offset=start + 24),
        "c": TensorInfo(path, "c", "F4", (2,), 1, data_offset=start + 27),
        "empty": TensorInfo(path, "empty", "BOOL", (3, 0), 0, data_offset=start + 28),
    }


def test_damaged_headers(tmp_path: Path) -> None:
    path, messages = tmp_path / "x.safetensors", {}
    for case in (*DAMAGE, "truncated", "longer"):
        size = {"truncated": 27, "longer": 29}.get(case, 28)
        messages[case] = get_refusal(
            read_safetensors_header, small_file(path, DAMAGE.get(case, len), size)
        )
    brackets = (10**5).to_bytes(8, "little") + b"[" * 10**5
    for case, content in (("empty", b""), ("brackets", brackets)):
        path.write_bytes(content)
        messages[case] = get_refusal(read_safetensors_header, path)
    assert max(map(len, messages.values())) < 400
    check_refusals("files: headers", messages, [r"(?<=file \().*(?=\); )"])


def test_files_that_differ_in_a_byte(tmp_path: Path) -> None:
    """In large files at the beginning, in the middle, at the end; in others, anywhere."""
    path, sizes = tmp_path / "x.safetensors", {40_000_000: (0, 20_000_000, 39_999_999)}
    for size, offsets in (sizes | {1_000_000: range(0, 1_000_000, 99_999)}).items():
        fingerprints = set[str]()
        for offset in (None, *offsets):
            with path.open("wb") as file:
                file.truncate(size)
                if offset is not None:
                    file.seek(offset)
                    file.write(b"x")
            fingerprints.add(compute_fingerprint([path]))
        assert len(fingerprints) == 1 + len(offsets)


def test_shards_are_numbered_with_as_many_digits_as_they_were(tmp_path: Path) -> None:
    for width in (3, 5):
        paths = [tmp_path / f"x-{n:0{width}}-of-{2:0{width}}.safetensors" for n in (1, 2)]
        for path in paths:
            small_file(path)
        assert list_shards(paths[0]) == list_shards(paths[1]) == paths
        assert [is_further_shard(path) for path in paths] == [False, True]
        paths[1].unlink()
        with pytest.raises(InputError, match=rf"{paths[1].name} is missing beside it"):
            list_shards(paths[0])
