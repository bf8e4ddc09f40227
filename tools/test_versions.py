"""`make test-versions`: run the default tests with the oldest and the newest allowed packages.

    python tools/test_versions.py [oldest] [newest] [--folder .venv/versions] [--processes auto]

"oldest" has each package at the lower bound of its range, "newest" at the newest release below its
upper bound: those of a run, of the service, of its store, of power and of the tests. Each has a
virtual environment, which is kept for later runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import Reader, integer
from wan.utils.files import check_output_folder, make_marked_kind, remove_output, write_output

REPO = Path(__file__).resolve().parent.parent
FILES = [REPO / f"requirements{use}.txt" for use in ("", "-serve", "-store", "-power", "-dev")]
RANGE = re.compile(r"^([\w-]+)>=([0-9.]+)[^\s#]*", re.MULTILINE)
COUNTS = ("passed", "failed", "skipped")
VERSION = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"

REQUIREMENTS = make_marked_kind("a list of test_versions.py", b"# What every run needs")
REPORT = make_marked_kind("a report of pytest", b"<testsuites")


def _parse_processes(name: str, raw: str) -> str:
    """Parses "auto" or a number of processes."""
    return raw if raw == "auto" else str(integer(1, 1000)(name, raw))


def make_requirements(which: str) -> str:
    """Returns the text of all requirements; for "oldest" with "==A" instead of ">=A,<B"."""
    text = "\n".join(file.read_text() for file in FILES)
    return RANGE.sub(r"\1==\2", text) if which == "oldest" else text


def list_packages() -> list[str]:
    """Returns the names of all packages that have a range."""
    return sorted({name for file in FILES for name, _ in RANGE.findall(file.read_text())})


def install_environment(which: str, folder: Path) -> Path:
    """Installs the packages into an environment; returns its Python."""
    kinds = {"requirements.txt": REQUIREMENTS, "tests.xml": REPORT}
    check_output_folder(folder, kinds, "--folder")
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    listed = folder / "requirements.txt"
    with write_output(listed, REQUIREMENTS) as temporary:
        temporary.write_text(make_requirements(which))
    command: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--upgrade", "-r"]
    subprocess.run([*command, listed], check=True)
    return python


def run_tests(python: Path, folder: Path, processes: str) -> dict[str, int]:
    """Runs the tests; returns the numbers of passed, failed and skipped tests."""
    report = folder / "tests.xml"
    remove_output(report, REPORT)
    options = ["-m", "not slow", "-n", processes, "--dist", "loadgroup", f"--junitxml={report}"]
    more = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    subprocess.run([python, "-m", "pytest", *options], cwd=REPO, env=os.environ | more)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest's report has its suite"
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"])
    passed = int(suite.attrib["tests"]) - failed - skipped
    return dict(zip(COUNTS, (passed, failed, skipped), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environments", nargs="*", help="oldest, newest (both)")
    parser.add_argument("--folder", type=Path, default=REPO / ".venv" / "versions")
    parser.add_argument(
        "--processes",
        type=make_argument_type(Reader(_parse_processes)),
        default="auto",
        help="of pytest (-n)",
    )
    options = parser.parse_args(argv)
    environments = options.environments or ["oldest", "newest"]
    if unknown := set(environments) - {"oldest", "newest"}:
        parser.error(f"there is no environment {', '.join(sorted(unknown))}")
    packages = list_packages()
    columns, failed = [("", *packages, *COUNTS, "seconds")], 0
    for which in environments:
        folder = options.folder / which
        python = install_environment(which, folder)
        command = [str(python), "-c", VERSION, *packages]
        versions = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split()
        started = time.monotonic()
        counts = run_tests(python, folder, options.processes)
        numbers = [str(counts[name]) for name in COUNTS]
        columns.append((which, *versions, *numbers, f"{time.monotonic() - started:.0f}"))
        failed += counts["failed"]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
