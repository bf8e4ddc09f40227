"""Checks which differences between input files the ranks of a run detect."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.pipelines import resolve_argv

_FREE_ATOM = b"\0\0\0\x0cfreemore"  # ignored at the end of images, audio files and videos


def find_changed_invariants(
    argv: Sequence[str], flag: str, tmp_path: Path, inner: str = ""
) -> set[str]:
    """Returns the rank invariants that change when 12 bytes are appended to an input file.

    The files are copied first, which checks that their path does not matter.

    Args:
        argv: The command line of the run.
        flag: Names the input file, or a folder.
        tmp_path: For the copies.
        inner: The changed file of the folder.
    """
    index = [*argv].index(flag) + 1
    source = Path(argv[index])
    copy = tmp_path / source.name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    copy_argv = [*argv[:index], str(copy), *argv[index + 1 :]]
    invariants = resolve_argv(argv).collect_rank_invariants("cpu")
    assert resolve_argv(copy_argv).collect_rank_invariants("cpu") == invariants
    with (copy / inner).open("ab") if inner else copy.open("ab") as file:
        file.write(_FREE_ATOM)
    changed_invariants = resolve_argv(copy_argv).collect_rank_invariants("cpu")
    return {name for name in invariants if invariants[name] != changed_invariants[name]}
