"""The table of steps, the lines and outcomes of a step, and the report as text and JSON.

This module does not import torch, because the process that supervises the steps must not.

A step is a generator function `work(bench)`. It yields a finished `Line`, or a name and a function
that measures the figures: the worker calls that function, so that an error in one measurement does
not end the step. A measurement that is not possible here raises InputError with the reason. Each
line is reported at once, so that the lines of a step that hangs or crashes later are not lost.
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

from wan.settings.errors import InputError
from wan.utils.files import make_json_kind, write_output

REPORT = make_json_kind("a report of check_device.py", "verdict", "facts", "environment", "steps")
OK, SLOW, ABSENT, WRONG = "ok", "slow", "not available", "wrong"
_FROM_GOOD_TO_BAD = (ABSENT, OK, SLOW, WRONG)


def find_worst(verdicts: Iterable[str]) -> str:
    """Returns the worst verdict; "not available" without verdicts."""
    return max(verdicts, key=_FROM_GOOD_TO_BAD.index, default=ABSENT)


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        limit: Limit of a number; None: the number is not judged.
        at_least: The limit is a minimum, not a maximum.
        verdict: Verdict on a number beyond its limit, WRONG or SLOW.
    """

    name: str
    value: float | str
    unit: str = ""
    limit: float | None = None
    at_least: bool = False
    verdict: str = WRONG

    @property
    def judgement(self) -> str:
        """OK, or `verdict` if the limit is exceeded. NaN exceeds every limit."""
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


def make_error(value: float, limit: float, name: str = "error") -> Figure:
    """Makes the figure of a distance from a reference; beyond its limit it is WRONG."""
    return Figure(name, value, "", limit)


def make_share(name: str, value: float, least: float | None = None) -> Figure:
    """Makes the figure of a ratio in percent; below `least` it is SLOW."""
    limit = None if least is None else 100 * least
    return Figure(name, 100 * value, "%", limit, at_least=True, verdict=SLOW)


def make_time(seconds: float, name: str = "time") -> Figure:
    return Figure(name, 1e3 * seconds, "ms")


def make_memory(name: str, count: float | None) -> Figure:
    """Makes the figure of a number of bytes; None: the device does not count them."""
    return Figure(name, "not counted") if count is None else Figure(name, count / 1e9, "GB")


@dataclass(frozen=True)
class Line:
    """One line of a step's report.

    Attributes:
        what: The measurement.
        words: Reason of the verdict, or a note.
    """

    what: str
    verdict: str
    figures: tuple[Figure, ...] = ()
    words: str = ""


def make_line(label: str, *figures: Figure, reason: str = "") -> Line:
    """Makes a line with the worst verdict of its figures."""
    return Line(label, find_worst([OK, *(figure.judgement for figure in figures)]), figures, reason)


def make_absent(label: str, reason: str) -> Line:
    """Makes a line for a measurement that is not available."""
    return Line(label, ABSENT, (), reason)


Measurements = Iterator[Line | tuple[str, Callable[[], Iterable[Figure]]]]
"""Items of a step: a finished line, or a label and a function that measures the figures."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step, on one rank or on all.

    Attributes:
        verdict: Worst verdict of its lines, or WRONG if the step did not end.
        words: Why the step is not available, or how its process ended.
        tail: End of the output of a failed step.
    """

    verdict: str
    seconds: float = 0.0
    lines: tuple[Line, ...] = ()
    words: str = ""
    tail: str = ""


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of a device that decide which steps apply.

    Attributes:
        type: "cpu", "cuda" or "npu".
        large: Tensors are on an accelerator, so sizes are those of a real video. The tensors of a
            simulated NPU are on the CPU.
        compile: Why blocks cannot be compiled here; None if they can.
        world: Number of ranks.
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
        number: Number of the subject, 1 to 12.
        name: Name for --only.
        title: Title in the table.
        work: "module:function" of the generator; a module of this package needs no prefix.
        limit: Seconds after which the step counts as hanging.
        ranks: "one": each device alone; "several": collective, not available for one process;
            "any": collective if there are several ranks.
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

    def find_obstacle(self, properties: DeviceProperties, full: bool) -> str | None:
        """Returns why the step does not apply here; None if it does."""
        if self.ranks == "several" and properties.world == 1:
            return "one process; start it with torchrun --nproc_per_node=2 or more"
        if self.only_full and not full:
            return "takes minutes; add --full"
        if self.needs == "npu" and properties.type != "npu":
            return f"only for NPUs; the device is {properties.type}"
        return properties.compile if self.needs == "compile" else None

    def is_collective(self, properties: DeviceProperties) -> bool:
        """Returns whether all ranks run the step as one group."""
        return properties.world > 1 and self.ranks != "one"


@dataclass(frozen=True)
class Job:
    """A step for a worker. is_collective: it runs together with the workers of all ranks."""

    step: Step
    index: int
    full: bool
    folder: Path
    is_collective: bool


STEPS = (
    Step(1, "machine", "versions, memory, matrix products", "machine:check_machine", 180),
    Step(2, "attention", "dense attention", "attention:check_dense", 400),
    Step(2, "lse", "attention with its log-sum-exp", "attention:check_lse", 300),
    Step(3, "merge", "memory of the log-sum-exp, merging", "attention:check_merge", 300),
    Step(4, "forward", "two DiT layers of real width", "network:check_forward", 400),
    Step(5, "compiled", "the same, compiled", "network:check_compiled", 600, needs="compile"),
    Step(6, "modes", "modes 0, 1, 2 and overlap alone", "attention:check_modes", 300),
    Step(7, "methods", "FP8, RainFusion", "attention:check_backends", 400),
    Step(7, "int8", "int8 weights", "attention:check_int8", 200),
    Step(8, "vae", "VAE, encoding and decoding", "autoencoder:check_vae", 600),
    Step(9, "loading", "weights from files", "files:check_loading", 400),
    Step(9, "readahead", "weights read ahead", "files:check_readahead", 200),
    Step(9, "experts", "experts switched", "files:check_experts", 300),
    Step(10, "groups", "exchanges between ranks", "exchange:check_groups", 400, "several"),
    Step(10, "slow-rank", "one rank is late", "exchange:check_slow_rank", 400, "several"),
    Step(11, "layers", "layers in every mode", "network:check_layers", 600, "several"),
    Step(11, "ring", "memory of a ring", "network:check_ring", 300, "several"),
    Step(11, "loops", "a minute of each mode", "network:check_loops", 500, "any", only_full=True),
    Step(12, "fsdp", "sharded weights", "network:check_fsdp", 300, "several"),
    Step(12, "npu", "what differs on NPUs", "npu:check_npu", 300, needs="npu"),
)


def select_steps(only: str | None, steps: tuple[Step, ...]) -> list[Step]:
    """Returns the steps selected by --only, or all. Raises InputError for an unknown name."""
    if only is None:
        return list(steps)
    wanted = [name.strip() for name in only.split(",")]
    for name in wanted:
        if not any(name in (step.name, str(step.number)) for step in steps):
            names = ", ".join(step.name for step in steps)
            raise InputError(f"--only {name!r} is no step; the steps are {names}.")
    return [step for step in steps if step.name in wanted or str(step.number) in wanted]


StepResult = tuple[Step, Outcome, list[Outcome]]
"""A step, its merged outcome, and the outcomes by rank."""


def format_row(step: Step, outcome: Outcome) -> str:
    """Formats a line for a step, followed by a line for each of its measurements."""
    seconds = f"{outcome.seconds:.1f} s" if outcome.seconds else ""
    rows = [f"{step.number:>2}  {step.name:<12}{step.title:<36}{outcome.verdict:<14}{seconds}"]
    rows += [outcome.words] if outcome.words else []
    for line in outcome.lines:
        verdict = "" if line.verdict == OK else f"{line.verdict.upper()}  "
        figures = ", ".join(map(str, line.figures))
        reason = f"({line.words})" if line.words and figures else line.words
        rows.append(f"{line.what}: {verdict}{' '.join(filter(None, (figures, reason)))}")
    return "\n      ".join(rows).rstrip()


def format_summary(results: Sequence[StepResult]) -> str:
    """Formats the number of steps with each verdict, and the names of wrong steps."""
    counts = Counter(outcome.verdict for _, outcome, _ in results)
    wrong = [step.name for step, outcome, _ in results if outcome.verdict == WRONG]
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{len(results)} steps: {text}" + (f"; wrong: {', '.join(wrong)}" if wrong else "")


def write_json_report(path: Path, results: Sequence[StepResult], about: dict[str, Any]) -> None:
    """Writes the JSON report. about: further entries: device, environment, verdict, seconds."""
    steps = [
        {"number": step.number, "name": step.name, "title": step.title, **asdict(outcome)}
        | {"ranks": [asdict(rank_outcome) for rank_outcome in ranks] if len(ranks) > 1 else []}
        for step, outcome, ranks in results
    ]
    record = _make_json_safe({"command": shlex.join(sys.argv), **about, "steps": steps})
    with write_output(path, REPORT) as unfinished:
        unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _make_json_safe(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by text."""
    if isinstance(value, dict):
        return {key: _make_json_safe(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_json_safe(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
