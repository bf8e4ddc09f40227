"""The comparison of two versions: its cases are well formed, and it detects a single bit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.compare_versions import (
    Folders,
    export_commit,
    find_differences,
    run_base_case,
)
from tools.make_cases import Case
from tools.version_cases import CASES, FIXTURES, MAY_DIFFER
from wan.app import flag_parser
from wan.settings.errors import InputError

PATHS = defaultdict(lambda: Path("somewhere"))


def test_cases() -> None:
    """Their names become files, and their arguments are accepted."""
    names = [case.name for case in CASES]
    assert len(names) >= 110 and len(set(names)) == len(names)
    assert not any(set(name) & set("/ .") for name in names)
    assert MAY_DIFFER.keys() <= set(names)
    for case in (*FIXTURES[1], *CASES):
        script, *arguments = case.split_command(PATHS)
        if script == "generate.py":
            assert flag_parser.parse_flags(arguments), case.name
        elif script == "-c":
            compile(arguments[0], case.name, "exec")


def test_differences(tmp_path: Path) -> None:
    """Folders below the results, as of runs of many videos, are compared, too."""
    label, zeros = "latents of out/1.latents.safetensors", torch.zeros(2, 3)
    changed_type = f"{label} were torch.float32 [2, 3], are torch."
    table: dict[str, tuple[Tensor | None, list[str]]] = {
        "equal": (zeros, []),
        "a bit": (torch.tensor([[0, 0, 0], [0, 0, 2**-140]]), [f"{label} differ by up to 7.2e-43"]),
        "NaN": (torch.full((2, 3), torch.nan), [f"{label} differ by up to nan"]),
        "dtype": (zeros.double(), [f"{changed_type}float64 [2, 3]"]),
        "shape": (zeros.T.contiguous(), [f"{changed_type}float32 [3, 2]"]),
        "missing": (None, [f"{label} only in base"]),
    }
    for name, (other, differences) in table.items():
        base, present = tmp_path / name / "base", tmp_path / name / "present"
        for folder, tensor in ((base, zeros), (present, other)):
            (folder / "out").mkdir(parents=True)
            if tensor is not None:
                save_file({"latents": tensor}, folder / "out/1.latents.safetensors")
        assert list(find_differences(base, present)) == differences, name
    assert list(find_differences(tmp_path / "nothing", tmp_path / "nothing"))


def test_base_results_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command runs once on the base, also after an interrupted comparison."""
    commands: list[str] = []
    codes = iter(["it failed", "", ""])

    def play(case: Case, *_: object) -> str:
        commands.append(case.command)
        return next(codes)

    monkeypatch.setattr("tools.compare_versions.run_on_ranks", play)
    (tmp_path / "base").mkdir()
    folders = Folders(tmp_path, tmp_path)
    for command in ("a", "a", "a", "b", "b"):
        run_base_case(Case("name", command), folders, "base")
    assert commands == ["a", "a", "b"]


def test_a_folder_keeps_one_commit(tmp_path: Path) -> None:
    (tmp_path / "commit").write_text("1" * 40)
    export_commit("1" * 40, tmp_path)
    with pytest.raises(InputError, match="holds the results of 1111"):
        export_commit("2" * 40, tmp_path)
