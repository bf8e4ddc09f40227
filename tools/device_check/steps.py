"""The table of steps, what a step reports, and the report for people and for a file.

This module needs no torch: the process that supervises the steps does not import it.

A step is a generator function `work(bench)`. It yields a `Line` that is ready, or a name and a
function that measures its figures: the worker calls that function, so an error in one measurement
leaves the others of the step standing. Each line is reported as soon as it is known. A step that
hangs or crashes has therefore reported what it measured before.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wan.output_files import json_kind, write_output
from wan.settings.errors import InputError

REPORT = json_kind("a report of check_device.py", "verdict", "facts", "environment", "steps")
OK, SLOW, ABSENT, WRONG = "ok", "slow", "not available", "wrong"
_FROM_GOOD_TO_BAD = (ABSENT, OK, SLOW, WRONG)


class UnavailableError(Exception):
    """Why something cannot be measured here, as a phrase. The device has not failed."""


def worst(verdicts: Iterable[str]) -> str:
    """The worst of some verdicts; "not available" if there is none."""
    return max(verdicts, key=_FROM_GOOD_TO_BAD.index, default=ABSENT)


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: The name of the value.
        value: A number, or text.
        unit: The unit of a number.
        limit: The number is judged by this limit; None means that it is only shown.
        at_least: The limit is a minimum, not a maximum.
        verdict: The verdict on a number beyond its limit, WRONG or SLOW.
    """

    name: str
    value: float | str
    unit: str = ""
    limit: float | None = None
    at_least: bool = False
    verdict: str = WRONG

    @property
    def judged(self) -> str:
        """OK, or `verdict` where the limit is exceeded. NaN exceeds every limit."""
        if self.limit is None or isinstance(self.value, str):
            return OK
        held = self.value >= self.limit if self.at_least else self.value <= self.limit
        return OK if held else self.verdict

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return f"{self.name} {self.value}"
        value = f"{self.value:.3g}" if abs(self.value) < 1000 else f"{self.value:.0f}"
        text = f"{self.name} {value}{' ' * bool(self.unit)}{self.unit}"
        if self.limit is None:
            return text
        return f"{text} ({'>=' if self.at_least else '<='} {self.limit:g})"


def error(value: float, limit: float, name: str = "error") -> Figure:
    """A distance from a reference. Beyond its limit the device computes wrongly."""
    return Figure(name, value, "", limit)


def share(name: str, value: float, least: float | None = None) -> Figure:
    """A ratio of two figures of this run, in percent. Below `least` the device is slow."""
    limit = None if least is None else 100 * least
    return Figure(name, 100 * value, "%", limit, at_least=True, verdict=SLOW)


def milliseconds(seconds: float, name: str = "time") -> Figure:
    return Figure(name, 1e3 * seconds, "ms")


def gigabytes(name: str, count: float | None) -> Figure:
    """A number of bytes; None where the device does not count them."""
    return Figure(name, "not counted") if count is None else Figure(name, count / 1e9, "GB")


@dataclass(frozen=True)
class Line:
    """One line of a step's report: what was measured, its verdict, its figures, and a reason."""

    what: str
    verdict: str
    figures: tuple[Figure, ...] = ()
    words: str = ""


def line(what: str, *figures: Figure, words: str = "") -> Line:
    """A line with the worst verdict of its figures."""
    return Line(what, worst([OK, *(figure.judged for figure in figures)]), figures, words)


def absent(what: str, words: str) -> Line:
    """A line for something that cannot be measured."""
    return Line(what, ABSENT, (), words)


Measured = Iterator[Line | tuple[str, Callable[[], Iterable[Figure]]]]
"""What a step yields."""


@dataclass(frozen=True)
class Outcome:
    """The result of a step, on one rank or on all.

    Attributes:
        verdict: The worst verdict of its lines, or WRONG where the step did not end.
        seconds: The duration.
        lines: The lines that were reported.
        words: Why the step is not available, or how its process ended.
        tail: The end of the output of a step that did not end well.
    """

    verdict: str
    seconds: float = 0.0
    lines: tuple[Line, ...] = ()
    words: str = ""
    tail: str = ""


@dataclass(frozen=True)
class Facts:
    """The properties of a device that decide which steps apply.

    Attributes:
        type: "cpu", "cuda" or "npu".
        name: The name of the device.
        large: Tensors lie on an accelerator, so sizes are those of a real video. The tensors of a
            simulated NPU lie on the CPU.
        compile: Why blocks cannot be compiled here; None if they can.
        world: The number of ranks.
    """

    type: str
    name: str
    large: bool
    compile: str | None
    world: int


@dataclass(frozen=True)
class Step:
    """A step of the check.

    Attributes:
        number: The subject, 1 to 12.
        name: The name for --only.
        title: The title in the table.
        work: "module:function" of the generator; a module of this package needs no prefix.
        limit: The seconds after which the step counts as hanging.
        ranks: "one": each device alone; "several": all ranks together, not available for one
            process; "any": together where there are several ranks.
        needs: "compile": a device on which blocks can be compiled; "npu": an NPU; "": any device.
        only_full: Whether the step needs --full.
    """

    number: int
    name: str
    title: str
    work: str
    limit: float
    ranks: str = "one"
    needs: str = ""
    only_full: bool = False

    def missing(self, facts: Facts, full: bool) -> str | None:
        """Why the step does not apply here; None if it does."""
        if self.ranks == "several" and facts.world == 1:
            return "one process; start it with torchrun --nproc_per_node=2 or more"
        if self.only_full and not full:
            return "takes minutes; add --full"
        if self.needs == "npu" and facts.type != "npu":
            return f"about NPUs, and the device is {facts.type}"
        return facts.compile if self.needs == "compile" else None

    def together(self, facts: Facts) -> bool:
        """Whether all ranks carry out the step as one group."""
        return facts.world > 1 and self.ranks != "one"


STEPS = (
    Step(1, "machine", "versions, memory, matrix products", "machine:machine", 180),
    Step(2, "attention", "dense attention", "attention:dense", 400),
    Step(2, "lse", "attention with its log-sum-exp", "attention:lse", 300),
    Step(3, "merge", "memory of the log-sum-exp, merging", "attention:merge", 300),
    Step(4, "forward", "two DiT layers of real width", "network:forward", 400),
    Step(5, "compiled", "the same, compiled", "network:compiled", 600, needs="compile"),
    Step(6, "modes", "modes 0, 1, 2 and overlap alone", "attention:modes", 300),
    Step(7, "methods", "FP8, RainFusion", "attention:methods", 400),
    Step(7, "int8", "int8 weights", "attention:int8", 200),
    Step(8, "vae", "VAE, encoding and decoding", "autoencoder:vae", 600),
    Step(9, "loading", "weights from files", "files:loading", 400),
    Step(9, "readahead", "weights read ahead", "files:readahead", 200),
    Step(9, "experts", "experts switched", "files:experts", 300),
    Step(10, "groups", "exchanges between ranks", "exchange:groups", 400, "several"),
    Step(10, "slow-rank", "one rank is late", "exchange:slow_rank", 400, "several"),
    Step(11, "layers", "layers in every mode", "network:layers", 600, "several"),
    Step(11, "ring", "memory of a ring", "network:ring", 300, "several"),
    Step(11, "loops", "a minute of each mode", "network:loops", 500, "any", only_full=True),
    Step(12, "fsdp", "sharded weights", "network:fsdp", 300, "several"),
    Step(12, "npu", "what differs on NPUs", "npu:npu", 300, needs="npu"),
)


def chosen(only: str | None, steps: tuple[Step, ...]) -> list[Step]:
    """The steps that --only names, or all. Raises InputError for an unknown name."""
    if only is None:
        return list(steps)
    wanted = [name.strip() for name in only.split(",")]
    for name in wanted:
        if not any(name in (step.name, str(step.number)) for step in steps):
            names = ", ".join(step.name for step in steps)
            raise InputError(f"--only {name!r} is no step; the steps are {names}.")
    return [step for step in steps if step.name in wanted or str(step.number) in wanted]


Done = tuple[Step, Outcome, list[Outcome]]
"""A step, its outcome, and the outcome of every rank."""


def row(step: Step, outcome: Outcome) -> str:
    """One line for a step that has just ended."""
    return f"{step.name:<12}{outcome.verdict:<14}{_time(outcome)}".rstrip()


def table(done: Sequence[Done]) -> str:
    """A row for each step, followed by a row for each of its measurements."""
    rows = []
    for step, outcome, _ in done:
        rows.append(f"{step.number:>2}  {step.title:<40}{outcome.verdict:<14}{_time(outcome)}")
        rows += [f"      {outcome.words}"] if outcome.words else []
        for line in outcome.lines:
            verdict = "" if line.verdict == OK else f"{line.verdict.upper()}  "
            found = ", ".join(map(str, line.figures))
            words = f"({line.words})" if line.words and found else line.words
            rows.append(f"      {line.what}: {verdict}{' '.join(filter(None, (found, words)))}")
    return "\n".join(rows)


def _time(outcome: Outcome) -> str:
    return f"{outcome.seconds:.1f} s" if outcome.seconds else ""


def summary(done: Sequence[Done]) -> str:
    """The number of steps with each verdict, and the names of the wrong ones."""
    counts = Counter(outcome.verdict for _, outcome, _ in done)
    wrong = [step.name for step, outcome, _ in done if outcome.verdict == WRONG]
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{len(done)} steps: {text}" + (f"; wrong: {', '.join(wrong)}" if wrong else "")


def write(path: Path, done: Sequence[Done], about: dict[str, Any]) -> None:
    """Write everything as JSON. about: the options, the device and its environment."""
    steps = [
        {"number": step.number, "name": step.name, "title": step.title, **asdict(outcome)}
        | {"ranks": [asdict(one) for one in ranks] if len(ranks) > 1 else []}
        for step, outcome, ranks in done
    ]
    record = _plain({"command": shlex.join(sys.argv), **about, "steps": steps})
    with write_output(path, REPORT) as unfinished:
        unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """For JSON, which has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
