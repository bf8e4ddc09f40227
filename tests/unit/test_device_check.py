"""The device check reports every kind of failure of a step, and a wrong kernel."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import check_steps
from tests.dist import REPO, TORCHRUN
from tests.refusals import check_refusals
from tools.check_device import ENDED, main, merge_outcomes
from tools.device_check.steps import (
    ABSENT,
    OK,
    SLOW,
    STEPS,
    WRONG,
    DeviceProperties,
    Figure,
    Line,
    Outcome,
    Step,
    find_worst,
    format_row,
    make_line,
    select_steps,
)
from wan.settings.errors import InputError

CHECK = str(REPO / "tools" / "check_device.py")
CPU = DeviceProperties("cpu", "CPU", False, None, 1)


def run_check(file: Path, *argv: str, ranks: int = 1, program: str = CHECK) -> tuple[str, Any]:
    """Checks the CPU in a process, or with several under torchrun; returns output and report."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(start if ranks > 1 else []), program, "--device", "cpu"]
    process = subprocess.run(
        [*command, "--json", str(file), *argv],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **TORCHRUN},
    )
    report = json.loads(file.read_text())
    assert process.returncode == (report["verdict"] == WRONG), process.stdout + process.stderr
    return process.stdout, report


def list_verdicts(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(step["name"], step["verdict"]) for step in report["steps"]]


@pytest.mark.slow
def test_every_way_to_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each failure is reported with its kind and earlier measurements, and the next step runs."""
    file = tmp_path / "report.json"
    assert main(["--device", "cpu", "--json", str(file)], check_steps.SINGLE_RANK_STEPS) == 1
    report = json.loads(file.read_text())
    assert list_verdicts(report) == [
        ("good", OK),
        ("raises", WRONG),
        ("good", OK),
        ("hangs", WRONG),
        ("crashes", WRONG),
        ("stops", WRONG),
        ("unavailable", ABSENT),
        ("refused", ABSENT),
        ("nan", WRONG),
        ("memory", ABSENT),
        ("measurement_fails", WRONG),
        ("good", OK),
    ]
    by_name = {step["name"]: step for step in report["steps"]}
    assert by_name["raises"]["words"] == "ValueError: this is broken"
    assert by_name["raises"]["lines"][0]["figures"][0]["value"] == 7
    assert "Traceback" in by_name["raises"]["tail"]
    assert "did not end within 1.5 s" in by_name["hangs"]["words"]
    assert "in hangs" in by_name["hangs"]["tail"]
    assert "SIGSEGV" in by_name["crashes"]["words"] and "in crashes" in by_name["crashes"]["tail"]
    assert by_name["stops"]["words"].endswith("exit code 3")
    assert all(len(by_name[name]["lines"]) == 1 for name in ("hangs", "crashes", "stops"))
    assert by_name["nan"]["lines"][0]["figures"][0]["value"] == "nan"
    broken, good = by_name["measurement_fails"]["lines"]
    assert broken["words"] == "ValueError: this is broken" and good["verdict"] == OK
    output = capsys.readouterr().out
    wrong = "raises, hangs, crashes, stops, nan, measurement_fails"
    assert "is 1 GB/s" in output and f"wrong: {wrong}" in output


def test_an_interrupted_check_writes_its_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    steps = [check_steps.make_step(step) for step in (check_steps.good, check_steps.interrupts)]
    assert main(["--device", "cpu", "--json", str(file)], tuple(steps)) == 143
    assert "is 1 GB/s" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["verdict"] == "interrupted" and list_verdicts(report) == [("good", OK)]


@pytest.mark.slow
def test_wrong_kernel(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    steps = (check_steps.make_step(check_steps.wrong_kernel, 120),)
    assert main(["--device", "cpu", "--json", str(file)], steps) == 1
    (step,) = json.loads(file.read_text())["steps"]
    assert step["words"] == "" and len(step["lines"]) > 2
    by_kernel = {(line["what"].split(", ")[-1], line["verdict"]) for line in step["lines"]}
    assert by_kernel == {("fused", WRONG), ("sdpa", OK)}


def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table: dict[str, list[str]] = {
        "an unknown step": ["--only", "machine,speed"],
        "no step": ["--only", ""],
        "an unknown device": ["--device", "tpu"],
        "another kind of file": ["--json", "report.txt"],
        "a file in a file": ["--json", "/dev/null/all.json"],
        "an unknown flag": ["--fast"],
        "ranks of a check": ["--ranks", "2"],
        "a measurement of one step": ["--measure", "measured", "--only", "vae"],
        "no ranks": ["--measure", "measured", "--ranks", "0"],
        "no time": ["--measure", "measured", "--minutes", "0"],
        "a kernel that is replaced": [],
    }
    messages = {}
    for name, argv in table.items():
        with monkeypatch.context() as patch:
            if not argv:
                patch.setenv("MINDIE_SD_FA_TYPE", "1")
            assert main(argv) == 2
        captured = capsys.readouterr()
        messages[name] = captured.err
        assert not captured.out and not list(tmp_path.iterdir()), name
    check_refusals("tools: check_device.py", messages, [r"choose from [^)]*"])


def test_steps() -> None:
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    assert sorted({step.number for step in STEPS}) == list(range(1, 13))
    assert [step.number for step in STEPS] == sorted(step.number for step in STEPS)
    for step in STEPS:
        module, function = step.work.split(":")
        source = REPO / "tools/device_check" / f"{module}.py"
        assert f"\ndef {function}(bench: Bench) -> Measurements:" in source.read_text()
    assert [step.name for step in select_steps("2,vae", STEPS)] == ["attention", "lse", "vae"]
    with pytest.raises(InputError):
        select_steps("13", STEPS)


def test_why_a_step_does_not_apply() -> None:
    bare = DeviceProperties("cpu", "CPU", False, "there is no C++ compiler", 1)
    by_name = {step.name: step for step in STEPS}
    for name, device, is_full, reason in (
        ("groups", CPU, False, "torchrun"),
        ("loops", CPU, False, "--full"),
        ("loops", CPU, True, None),
        ("npu", CPU, False, "NPUs"),
        ("compiled", bare, False, "there is no C++ compiler"),
        ("compiled", CPU, False, None),
    ):
        obstacle = by_name[name].find_obstacle(device, is_full)
        assert obstacle is None if reason is None else reason in (obstacle or ""), name


def test_figures_are_judged() -> None:
    assert Figure("x", 2.0, "", 1.0).judgement == WRONG
    assert Figure("x", 1.0, "", 1.0).judgement == OK
    assert Figure("x", math.nan, "", 1.0).judgement == WRONG
    assert Figure("x", 1.0, "", 2.0, at_least=True, verdict=SLOW).judgement == SLOW
    assert Figure("x", 1e9).judgement == OK
    both = Figure("x", 2.0, "", 1.0, verdict=SLOW), Figure("y", 0.0, "", 1.0)
    assert make_line("a", *both).verdict == SLOW
    assert (
        find_worst([OK, ABSENT]) == OK
        and find_worst([SLOW, WRONG, OK]) == WRONG
        and find_worst([]) == ABSENT
    )


def test_ranks_are_joined() -> None:
    good = Outcome(OK, 1.0, (make_line("a"),))
    broken = Outcome(WRONG, 2.0, (), "ValueError: broken", "tail")
    ended = Outcome(WRONG, 3.0, (), f"{ENDED} rank 1 has")
    bad = Outcome(WRONG, 1.0, (make_line("a", Figure("x", 2.0, "", 1.0)),))
    assert merge_outcomes([good]) == good
    assert merge_outcomes([good, broken]).words == "rank 1: ValueError: broken"
    assert merge_outcomes([ended, broken, ended]).words == "rank 1: ValueError: broken"
    assert merge_outcomes([ended, broken]).seconds == 3.0
    closed = Outcome(WRONG, 1.0, (), "RuntimeError: connection closed by peer")
    assert merge_outcomes([closed, broken]).words == "rank 1: ValueError: broken"
    assert merge_outcomes([closed, closed]).words == closed.words
    assert [line.what for line in merge_outcomes([good, bad]).lines] == ["a", "rank 1: a"]
    assert merge_outcomes([ended, Outcome(ABSENT, 1.0, (), "no memory")]).verdict == ABSENT
    assert merge_outcomes([good, Outcome(ABSENT)]).verdict == OK


def test_measurements_have_limits(tmp_path: Path) -> None:
    """Each program is ended after its share of the time; a second run replaces the logs."""
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, CHECK, "--measure", str(tmp_path / "out"), "--minutes", "0.01"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 1, result.stderr
        assert result.stdout.count("ended after its limit") == 2
        assert "compare: left out: one rank has no exchanges to compare" in result.stdout
        logs = sorted(path.name for path in (tmp_path / "out").glob("*.txt"))
        assert logs == ["against.txt", "check.txt"]


def test_rows_have_figures_and_units() -> None:
    step = Step(3, "x", "a title", "m:f", 1.0)
    outcome = Outcome(
        SLOW,
        2.25,
        (
            Line("first", SLOW, (Figure("rate", 1234.5, "GB/s", 2000.0, True, SLOW),), "cold"),
            Line("second", ABSENT, (), "no such kernel"),
        ),
    )
    assert format_row(step, outcome).splitlines() == [
        f" 3  {'x':<12}{'a title':<36}{'slow':<14}2.2 s",
        "      first: SLOW  rate 1234 GB/s (>= 2000) (cold)",
        "      second: NOT AVAILABLE  no such kernel",
    ]


@pytest.mark.slow
def test_whole_check(tmp_path: Path) -> None:
    output, report = run_check(tmp_path / "report.json")
    several = {step.name for step in STEPS if step.ranks == "several"}
    absent = {name for name, verdict in list_verdicts(report) if verdict == ABSENT}
    assert absent == {*several, "loops", "npu"}
    assert report["verdict"] == OK and report["facts"]["type"] == "cpu"
    assert report["environment"]["torch"] and report["environment"]["cpu"]
    assert "TFLOP/s" in output and "4 parts merged: error" in output


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks(tmp_path: Path) -> None:
    only = "machine,groups,slow-rank,layers,ring,fsdp"
    _, report = run_check(tmp_path / "report.json", "--only", only, ranks=2)
    assert {verdict for _, verdict in list_verdicts(report)} <= {OK, SLOW}


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_fails_costs_the_others_one_step(tmp_path: Path) -> None:
    program = str(REPO / "tests" / "check_steps.py")
    _, report = run_check(tmp_path / "report.json", ranks=2, program=program)
    assert [verdict for _, verdict in list_verdicts(report)] == [OK, WRONG, WRONG, OK]
    steps = report["steps"]
    assert steps[1]["words"] == "rank 1: ValueError: the second rank is broken"
    assert "rank 1" in steps[2]["words"] and "SIGKILL" in steps[2]["words"]
    assert not any("did not end" in step["words"] for step in steps), "nobody waited for the limit"
