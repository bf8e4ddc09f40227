"""C++ functions: compiled once, kept, rounded one by one; one warning without a compiler."""

from __future__ import annotations

import ctypes
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from wan.utils.cpp_library import CppLibrary

SOURCE = 'extern "C" double subtract(double a, double b, double c) { return a * b - c; }\n'


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a line for each call, and a folder for its results."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho >> {tmp_path}/calls\nexec g++ "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    return compiler


def count_calls(compiler: Path) -> int:
    calls = compiler.with_name("calls")
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def make_library(source: Path, text: str = SOURCE) -> CppLibrary:
    source.write_text(text)

    def declare(library: ctypes.CDLL) -> None:
        library.subtract.argtypes = [ctypes.c_double] * 3
        library.subtract.restype = ctypes.c_double

    return CppLibrary(source, declare, "It is slow, because the functions do not compile")


def test_compiled_once_for_ranks_and_later_processes(compiler: Path, tmp_path: Path) -> None:
    """And again after a change of the source; a product is rounded before the difference."""
    libraries = [make_library(tmp_path / "source.cpp") for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(CppLibrary.is_available, libraries))
    assert count_calls(compiler) == 1
    third = 1 / 3
    for library in libraries:
        assert library.load().subtract(third, third, third * third) == 0
    changed = make_library(tmp_path / "source.cpp", SOURCE.replace("- c", "+ c"))
    assert changed.load().subtract(2, 3, 4) == 10
    assert count_calls(compiler) == 2
    assert {path.suffix for path in (tmp_path / "compiled").iterdir()} == {".so", ".lock"}


def test_others_cannot_write_its_files(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        assert make_library(tmp_path / "source.cpp").is_available()
    finally:
        os.umask(umask)
    assert not any(path.stat().st_mode & 0o022 for path in (tmp_path / "compiled").iterdir())


@pytest.mark.parametrize("missing", ["compiler", "private folder", "function"])
def test_one_warning(
    missing: str, compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "double subtract(;" if missing == "function" else SOURCE
    if missing == "compiler":
        compiler.unlink()
    elif missing == "private folder":
        (tmp_path / "compiled").mkdir()
        (tmp_path / "compiled").chmod(0o777)
    library = make_library(tmp_path / "source.cpp", text)
    with caplog.at_level(logging.WARNING):
        assert not library.is_available() and not library.is_available()
    (notice,) = caplog.messages
    assert notice.startswith("It is slow, because the functions do not compile: ")
    assert "\n" not in notice and str(tmp_path) in notice


def test_nothing_is_compiled_for_other_cpus(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not make_library(tmp_path / "source.cpp").is_available()
    assert count_calls(compiler) == 0
