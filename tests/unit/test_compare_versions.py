"""The comparison of two versions: its cases are well formed, and it sees a single bit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.compare_versions import differences
from tools.version_cases import CASES, FIXTURES, MAY_DIFFER
from wan.cli import flags

PATHS = defaultdict(lambda: Path("somewhere"))


def test_names() -> None:
    names = [case.name for case in CASES]
    assert len(names) >= 40
    assert len(set(names)) == len(names)
    assert not any(set(name) & set("/ .") for name in names), "a name becomes a file's"
    assert MAY_DIFFER.keys() <= set(names)


def test_arguments_are_accepted() -> None:
    for case in (*FIXTURES[1], *CASES):
        script, *arguments = case.words(PATHS)
        if script == "generate.py":
            assert flags.parse(arguments), case.name
        elif script == "-c":
            compile(arguments[0], case.name, "exec")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.zeros(2, 3), []),
        (torch.tensor([[0, 0, 0], [0, 0, 2**-140]]), ["latents differ by up to 7.2e-43"]),
        (torch.full((2, 3), torch.nan), ["latents differ by up to nan"]),
        (
            torch.zeros(2, 3).double(),
            ["latents were torch.float32 [2, 3], are torch.float64 [2, 3]"],
        ),
        (torch.zeros(3, 2), ["latents were torch.float32 [2, 3], are torch.float32 [3, 2]"]),
        (None, ["latents only in base"]),
    ],
)
def test_differences(other: Tensor | None, says: list[str], tmp_path: Path) -> None:
    base, present = tmp_path / "base", tmp_path / "present"
    save_file({"latents": torch.zeros(2, 3)}, f"{base}.latents.safetensors")
    if other is not None:
        save_file({"latents": other}, f"{present}.latents.safetensors")
    assert list(differences(base, present)) == says


def test_nothing_is_not_equal(tmp_path: Path) -> None:
    assert list(differences(tmp_path / "base", tmp_path / "present"))
