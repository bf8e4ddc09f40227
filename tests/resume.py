"""A plugin (`-p tests.resume`): an interrupted run of all tests is resumed.

The passed tests are stored in pytest's cache under a hash of all files; after any change all tests
run.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_ResumePlugin(config))


def _hash_files(folder: Path) -> str:
    """Returns a hash of all files that are tracked by git or could be."""
    git = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, check=True).stdout.decode()
    digest = hashlib.sha256()
    for name in filter(None, listed.split("\0")):
        path = folder / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()[:16]


def _without_group(nodeid: str) -> str:
    """Strips the group, which pytest-xdist appends with `@`; parameters may contain `@`, too."""
    at = nodeid.rfind("@")
    return nodeid[:at] if at > nodeid.rfind("]") else nodeid


class _ResumePlugin:
    def __init__(self, config: pytest.Config) -> None:
        assert config.cache is not None
        self._file = config.cache.mkdir("passed") / _hash_files(config.rootpath)
        # Read once: tests that pass in this run must not change the collection of its workers.
        self._passed = {*self._file.read_text().split("\n")} if self._file.exists() else set()
        self._not_passed: set[str] = set()  # tests that failed or were skipped
        self._is_recording = not hasattr(config, "workerinput")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        remaining = [item for item in items if _without_group(item.nodeid) not in self._passed]
        if len(remaining) < len(items):
            config.hook.pytest_deselected(items=[*{*items} - {*remaining}])
        items[:] = remaining

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _without_group(report.nodeid)
        if not report.passed:
            self._not_passed.add(name)
        elif self._is_recording and report.when == "teardown" and name not in self._not_passed:
            with self._file.open("a") as file:
                file.write(f"{name}\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed:
            session.exitstatus = pytest.ExitCode.OK  # all have passed
