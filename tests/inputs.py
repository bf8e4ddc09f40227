"""Checks which differences between input files the ranks of a run detect."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from wan.cli import main as generate

_FREE_ATOM = b"\0\0\0\x0cfreemore"  # ignored at the end of images, audio files and videos


def changed_file(source: Path, copy: Path, inner: str = "") -> Path:
    """Copies a folder or file, and appends 12 bytes to the file `inner` of the folder."""
    copy.parent.mkdir(exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    if inner:
        with (copy / inner).open("ab") as file:
            file.write(_FREE_ATOM)
    return copy


def changed_contents(argv: Sequence[str], flag: str, tmp_path: Path, inner: str = "") -> set[str]:
    """Returns the rank invariants that change when 12 bytes are appended to an input file.

    The files are copied first, which checks that their path does not matter.

    Args:
        argv: The command line of the run.
        flag: Names the input file, or a folder.
        tmp_path: For the copies.
        inner: The changed file of the folder.
    """
    place = [*argv].index(flag) + 1
    source = Path(argv[place])
    copy = changed_file(source, tmp_path / "copy" / source.name)
    moved = [*argv[:place], str(copy), *argv[place + 1 :]]
    before = generate.resolve_argv([str(one) for one in argv]).collect_rank_invariants("cpu")
    assert generate.resolve_argv(moved).collect_rank_invariants("cpu") == before
    with (copy / inner).open("ab") if inner else copy.open("ab") as file:
        file.write(_FREE_ATOM)
    after = generate.resolve_argv(moved).collect_rank_invariants("cpu")
    return {name for name in before if before[name] != after[name]}
