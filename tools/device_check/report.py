"""The outcome for people, as a table, and for a report, as a JSON file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.device_check.steps import OK, WRONG, Figure, Outcome, Step, plain
from wan.checkpoint.files import whole_file

Done = tuple[Step, Outcome, list[Outcome]]
"""A step, what came of it, and the same of every rank."""


def table(done: Sequence[Done]) -> str:
    """A row for each step and, under it, one for each thing it measured."""
    rows = []
    for step, outcome, _ in done:
        rows.append(f"{step.number:>2}  {step.title:<40}{outcome.verdict:<14}{_time(outcome)}")
        if outcome.words:
            rows.append(f"      {outcome.words}")
        for line in outcome.lines:
            verdict = "" if line.verdict == OK else f"{line.verdict.upper()}  "
            found = ", ".join(map(_shown, line.figures))
            words = f"({line.words})" if line.words and found else line.words
            rows.append(f"      {line.what}: {verdict}{' '.join(filter(None, (found, words)))}")
    return "\n".join(rows)


def row(step: Step, outcome: Outcome) -> str:
    """One step, as soon as it has ended."""
    return f"{step.name:<12}{outcome.verdict:<14}{_time(outcome)}".rstrip()


def _time(outcome: Outcome) -> str:
    return f"{outcome.seconds:.1f} s" if outcome.seconds else ""


def _shown(figure: Figure) -> str:
    if isinstance(figure.value, str):
        return f"{figure.name} {figure.value}"
    value = f"{figure.value:.3g}" if abs(figure.value) < 1000 else f"{figure.value:.0f}"
    text = f"{figure.name} {value}{' ' * bool(figure.unit)}{figure.unit}"
    if figure.limit is None:
        return text
    return f"{text} ({'>=' if figure.at_least else '<='} {figure.limit:g})"


def write(path: Path, done: Sequence[Done], about: dict[str, Any]) -> None:
    """Everything as JSON. about: what was run, and where."""
    steps = [
        {
            "number": step.number,
            "name": step.name,
            "title": step.title,
            **asdict(outcome),
            "ranks": [asdict(one) for one in ranks] if len(ranks) > 1 else [],
        }
        for step, outcome, ranks in done
    ]
    record = {"command": shlex.join(sys.argv), **about, "steps": steps}
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(plain(record), indent=1) + "\n", encoding="utf-8")


def summary(done: Sequence[Done]) -> str:
    """How many steps came out how, and the names of those that are wrong."""
    counts: dict[str, int] = {}
    for _, outcome, _ in done:
        counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
    wrong = [step.name for step, outcome, _ in done if outcome.verdict == WRONG]
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{len(done)} steps: {text}" + (f"; wrong: {', '.join(wrong)}" if wrong else "")
