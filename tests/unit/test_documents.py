"""Statements of the documents about the repository, compared with its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wan.settings.attention_modes import MODES
from wan.settings.kernels import DENSE_KERNELS, list_dense_kernels
from wan.settings.presets import PRESETS
from wan.settings.solvers import SOLVERS

REPO = Path(__file__).parents[2]
EXTENDING = (REPO / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n(]+)[^\n]*\n(.*?)(?=^## |\Z)", EXTENDING, re.M | re.S))


@pytest.mark.parametrize("section", SECTIONS)
def test_files_and_names_of_a_checklist_exist(section: str) -> None:
    """The files of a checklist exist, and its names occur in one of them."""
    quoted = re.findall(r"`([^`\n]+)`", SECTIONS[section])
    paths = [REPO / name for name in quoted if re.fullmatch(r"[\w/]+(/|\.(py|md|sh))", name)]
    missing = [str(path) for path in paths if not path.exists()]
    assert len(paths) >= 2 and not missing
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    text = "\n".join(file.read_text() for file in {*files})
    names = [name for name in quoted if re.fullmatch(r"_?[A-Za-z]\w*(\.\w+)?", name)]
    code_names = [name for name in names if not (REPO / name).exists()]
    assert not [n for n in code_names if not re.search(rf"\b{n.rpartition('.')[2]}\b", text)]


def test_solvers_have_their_formulas() -> None:
    """All solvers but the two official ones, which diffusers documents."""
    text = (REPO / "docs" / "sampling.md").read_text()
    solvers = SOLVERS.keys() - {"unipc", "dpm++"}
    assert not [name for name in solvers if f"\n| `{name}` |" not in text]


def test_the_documents_name_every_mode() -> None:
    readme = (REPO / "README.md").read_text()
    for mode, row in MODES.items():
        for name in ("docs/fa_power_cap.md", "README.md", "infer_t2v.sh", "infer_i2v.sh"):
            assert f"{mode} {row.name}" in (REPO / name).read_text(), (mode, name)
        assert f"\n| {mode} | " in (REPO / "README.zh.md").read_text(), mode
    assert f"`--comm_type {{{','.join(map(str, MODES))}}}`" in readme


def test_a_page_describes_the_kernels_without_xfuser() -> None:
    text = (REPO / "docs" / "attention_backends.md").read_text()
    names = list_dense_kernels("attention_backend")
    ours = [name for name in names if DENSE_KERNELS[name].xfuser_member is None]
    assert not [name for name in ours if f"\n- `{name}`: " not in text]


def test_the_readme_names_every_task() -> None:
    """With the folder of its weights."""
    rows = [line for line in (REPO / "README.md").read_text().splitlines() if line[:1] == "|"]
    for task, preset in PRESETS.items():
        assert any(f"`{task}`" in row and f"/{preset.folder}`" in row for row in rows), task
