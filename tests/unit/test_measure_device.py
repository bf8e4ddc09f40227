"""`tools/measure_device.py`: limits, skipped checks, the report and the archive to send."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.dist import REPO
from tools import measure_device
from wan.settings.errors import InputError


def test_limits_and_what_is_not_repeated(tmp_path: Path) -> None:
    """Programs are stopped after their time limit; completed checks are not run again."""
    out = tmp_path / "found"
    out.mkdir()
    (out / "state.json").write_text(json.dumps({"check": "done in 3 s"}))
    (out / "check.json").write_text("{}")
    (out / "weights").mkdir()
    (out / "weights" / "model_index.json").write_text("{}")
    command = [sys.executable, REPO / "tools" / "measure_device.py", "--minutes", 0.02]
    result = subprocess.run(
        [*map(str, command), "--out", str(out)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1, result.stderr
    state = json.loads((out / "state.json").read_text())
    assert state["check"] == "done in 3 s" and not (out / "check.txt").exists()
    assert state["compare"] == "left out: one rank has no exchanges to compare"
    assert state["against"].startswith("ended after its limit")
    report = (out / "report.md").read_text()
    assert "[check.json](check.json)" in report and "left out: one rank" in report
    with zipfile.ZipFile(out / "to_send.zip") as sent:
        names = sent.namelist()
    assert "check.json" in names and "against.txt" in names
    assert not [name for name in names if name.startswith("weights") or name.endswith(".mp4")]


@pytest.mark.parametrize("flags", [["--ranks", "0"], ["--minutes", "0"], ["--mode", "1"]])
def test_refusals(flags: list[str]) -> None:
    with pytest.raises(InputError, match=r"must be (from|above)|--mode is not a known flag"):
        measure_device.main(flags)
