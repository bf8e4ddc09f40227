"""MLPerf's load generator runs the demo on two ranks and over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio
import pytest

from benchmarks.mlperf import rules
from benchmarks.mlperf.__main__ import run_workload
from tests.dist import REPO, TORCHRUN
from tests.refusals import check_refusals
from wan.settings.errors import InputError


def run_benchmark(out: Path, *options: object) -> dict[str, Any]:
    """Runs the program as a user does; returns the results by scenario."""
    command = [sys.executable, "-m", "benchmarks.mlperf", "--small", "--out", out, *options]
    environment = TORCHRUN | {"PATH": "/usr/bin:/bin", "HOME": str(out.parent)}
    result = subprocess.run([*map(str, command)], cwd=REPO, env=environment, timeout=400)
    assert result.returncode == 0
    assert "not a submission" in (out / "report.md").read_text()
    rows = json.loads((out / "report.json").read_text())["rows"]
    return {row["scenario"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.xdist_group("serve")
def test_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "found"
    results = run_benchmark(out, "--ranks", 2, "--modes", 1, "--tests", "performance", "accuracy")
    assert results["SingleStream"]["latency_s"] > 0 and results["Offline"]["samples_per_s"] > 0
    assert all(row["mode"] == 1 and row["videos"] >= 6 for row in results.values())
    assert results["Offline"]["validity"] == "VALID"
    folder = out / "mode1" / "Offline" / "accuracy"
    entries = json.loads((folder / "vbench_full_info.json").read_text())
    assert len(entries) == 6 and all(
        {*item["dimension"]} <= {*rules.DIMENSIONS} for item in entries
    )
    for entry in entries:
        (file,) = entry["video_list"]
        assert Path(file).name == f"{entry['prompt_en']}-0.mp4"
        assert imageio.v3.imread(file).shape == (9, 64, 64, 3)
        settings = json.loads(Path(file).with_suffix(".json").read_text())["settings"]
        assert settings["prompt"] == entry["prompt_en"] and settings["base_seed"] == 42
        assert settings["negative_prompt"] == rules.NEGATIVE_PROMPT
    log_entries = json.loads((folder / "mlperf_log_accuracy.json").read_text())
    assert sorted(item["qsl_idx"] for item in log_entries) == [*range(6)]
    names = {bytes.fromhex(item["data"]).decode() for item in log_entries}
    assert names == {Path(entry["video_list"][0]).name for entry in entries}


def test_flags_that_the_closed_division_forbids(tmp_path: Path) -> None:
    out = tmp_path / "found"
    messages = {}
    for flags in ("--step_cache cfg", "--use_attentioncache", "--use_rainfusion"):
        with pytest.raises(InputError) as refusal:
            run_workload(["--small", "--out", str(out), "--", *flags.split()])
        messages[flags] = str(refusal.value)
    assert not out.exists()
    check_refusals("benchmarks: mlperf", messages)


def test_the_score_is_the_mean_of_six_dimensions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    values = dict(zip(rules.DIMENSIONS, (0.9, 0.9, 0.98, 0.5, 0.2, 0.748), strict=True))
    file.write_text(json.dumps({name: [value, []] for name, value in values.items()}))
    assert run_workload(["--score", str(file)]) == 0
    assert capsys.readouterr().out.startswith("70.4667: enough (at least 69.7752")


def test_the_prompts_are_the_248_of_six_dimensions() -> None:
    workload = rules.load_workload(small=False)
    assert (
        len(workload.entries) == 248
        and len({entry["prompt_en"] for entry in workload.entries}) == 248
    )
    assert (workload.size, workload.frames, workload.steps) == ((1280, 720), 81, 20)
    small = rules.load_workload(small=True)
    dimensions = {name for entry in small.entries for name in entry["dimension"]}
    assert len(dimensions & {*rules.DIMENSIONS}) >= 4
