"""Statements of the documents about the repository, compared with its files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from wan.settings.attention_modes import MODES
from wan.settings.guidance import GUIDERS
from wan.settings.kernels import DENSE_KERNELS
from wan.settings.noise_tables import NOISE_TABLES
from wan.settings.presets import PRESETS
from wan.settings.recipes import RECIPES
from wan.settings.solvers import SOLVERS
from wan.settings.step_cache import POLICY_VALUES

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


def _read_table(page: str, head: str) -> list[str]:
    """The first cells of the table of a page whose head begins with these cells."""
    text = (REPO / page).read_text()
    tables = re.findall(r"^((?:\|.*\n)+)", text, re.M)
    (table,) = [table for table in tables if table.startswith(f"| {head} |")]
    return [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()[2:]]


_OFFICIAL_SOLVERS = {"unipc", "dpm++"}  # diffusers documents them
ROWS = {  # registry -> page, head of its table, and what the first cells of its rows contain
    "solvers": ("docs/sampling.md", "Sampler | Step", SOLVERS.keys() - _OFFICIAL_SOLVERS),
    "noise tables": ("docs/sampling.md", "`--sigmas`", NOISE_TABLES),
    "guiders": ("docs/sampling.md", "Setting | Velocity", [f"--guider {name}" for name in GUIDERS]),
    "step caches": ("docs/step_caches.md", "`--step_cache`", POLICY_VALUES[1:]),
    "recipes": ("docs/few_step.md", "`--recipe`", RECIPES),
    "tasks": ("README.md", "Task", PRESETS),
    "modes": (
        "docs/fa_power_cap.md",
        "`--comm_type`",
        [f"{n} {row.name}" for n, row in MODES.items()],
    ),
}


def test_each_row_of_a_registry_has_its_row_in_a_page() -> None:
    missing = {
        (registry, name)
        for registry, (page, head, names) in ROWS.items()
        for name in names
        if not any(
            re.search(rf"(?<![\w+-]){re.escape(name)}(?![\w+-])", cell.replace("`", ""))
            for cell in _read_table(page, head)
        )
    }
    assert not missing


def test_pages_name_every_mode_kernel_and_task() -> None:
    readme = (REPO / "README.md").read_text()
    for mode, row in MODES.items():
        for name in ("docs/fa_power_cap.md", "README.md", "infer_t2v.sh", "infer_i2v.sh"):
            assert f"{mode} {row.name}" in (REPO / name).read_text(), (mode, name)
        assert f"\n| {mode} | " in (REPO / "README.zh.md").read_text(), mode
    assert f"`--comm_type {{{','.join(map(str, MODES))}}}`" in readme
    kernels = (REPO / "docs" / "attention_backends.md").read_text()
    ours = [name for name, row in DENSE_KERNELS.items() if row.xfuser_member is None]
    assert not [name for name in ours if f"\n- `{name}`: " not in kernels]
    rows = [line for line in readme.splitlines() if line[:1] == "|"]
    for task, preset in PRESETS.items():
        assert any(f"`{task}`" in row and f"/{preset.folder}`" in row for row in rows), task


@pytest.mark.slow
def test_type_checkers_accept_the_python_of_the_documents(tmp_path: Path) -> None:
    """All blocks of a page, one after the other."""
    for page in [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("examples/**/*.md")]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
        if blocks:
            (tmp_path / f"page_{page.stem.replace('.', '_')}.py").write_text("\n".join(blocks))
    files = sorted(tmp_path.iterdir())
    assert len(files) >= 4
    command = [sys.executable, "-m", "mypy", "--config-file", str(REPO / "pyproject.toml")]
    process = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), *map(str, files)],
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout
