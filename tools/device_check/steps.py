"""The steps in their order, and what a step says. No torch: the process that lists them needs none.

A step is a function `work(bench)` that yields a `Line` as soon as it is known, so that a step which
hangs or crashes later has said what it had found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wan.settings.errors import InputError

OK, SLOW, ABSENT, WRONG = "ok", "slow", "not available", "wrong"
_FROM_GOOD_TO_BAD = (ABSENT, OK, SLOW, WRONG)
NAMES = f"{__package__}."


class UnavailableError(Exception):
    """Why something cannot be measured here, as a phrase. It is no failure of the device."""


def worst(verdicts: Iterable[str]) -> str:
    """The worst; of none, "not available"."""
    return max(verdicts, key=_FROM_GOOD_TO_BAD.index, default=ABSENT)


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: What it is.
        value: A number, or words.
        unit: Of a number.
        limit: What the number is judged by; None: it is there to be read.
        at_least: The limit is the least, not the most.
        verdict: Of a number beyond its limit, WRONG or SLOW.
    """

    name: str
    value: float | str
    unit: str = ""
    limit: float | None = None
    at_least: bool = False
    verdict: str = WRONG

    @property
    def judged(self) -> str:
        """OK, or `verdict` where the limit is not held; no number holds where NaN stands."""
        if self.limit is None or isinstance(self.value, str):
            return OK
        held = self.value >= self.limit if self.at_least else self.value <= self.limit
        return OK if held else self.verdict


def error(value: float, limit: float, name: str = "error") -> Figure:
    """A distance from a reference; beyond its limit the device computes wrongly."""
    return Figure(name, value, "", limit)


def share(name: str, value: float, least: float | None = None) -> Figure:
    """A ratio of two figures of this run, in percent; below `least` it is slow."""
    limit = None if least is None else 100 * least
    return Figure(name, 100 * value, "%", limit, at_least=True, verdict=SLOW)


@dataclass(frozen=True)
class Line:
    """One line of a step's part of the table.

    Attributes:
        what: What was measured.
        verdict: OK, SLOW, ABSENT or WRONG.
        figures: What was found.
        words: Why, where it is not OK.
    """

    what: str
    verdict: str
    figures: tuple[Figure, ...] = ()
    words: str = ""


def line(what: str, *figures: Figure, words: str = "") -> Line:
    """A line whose verdict is the worst of its figures'."""
    return Line(what, worst([OK, *(figure.judged for figure in figures)]), figures, words)


def absent(what: str, words: str) -> Line:
    """A line for what cannot be measured."""
    return Line(what, ABSENT, (), words)


@dataclass(frozen=True)
class Facts:
    """What decides whether a step applies, found out by the process that has the device.

    Attributes:
        type: "cpu", "cuda" or "npu".
        name: The device's.
        large: Tensors really lie on an accelerator, so sizes are those of a real video. A
            simulated NPU's lie on the CPU.
        compile: Why blocks cannot be compiled here; None if they can.
        world: Ranks in all.
    """

    type: str
    name: str
    large: bool
    compile: str | None
    world: int


Needs = Callable[[Facts], str | None]
"""Why a step does not apply; None if it does."""


@dataclass(frozen=True)
class Step:
    """A step of the check.

    Attributes:
        number: Of the twelve subjects.
        name: For --only.
        title: For the table.
        work: "module:function" of what carries it out.
        limit: Seconds after which it counts as hanging.
        ranks: "one": each device by itself; "several": all together, not available for one
            process; "any": together where there are several.
        needs: Why it does not apply.
        only_full: Whether it needs --full.
    """

    number: int
    name: str
    title: str
    work: str
    limit: float
    ranks: str = "one"
    needs: Needs = lambda _: None
    only_full: bool = False

    def missing(self, facts: Facts, full: bool) -> str | None:
        """Why it does not apply here; None if it does."""
        if self.ranks == "several" and facts.world == 1:
            return "one process; start it with torchrun --nproc_per_node=2 or more"
        if self.only_full and not full:
            return "takes minutes; add --full"
        return self.needs(facts)

    def together(self, facts: Facts) -> bool:
        """Whether all ranks carry it out as one group."""
        return facts.world > 1 and self.ranks != "one"


def _on_npus(facts: Facts) -> str | None:
    return None if facts.type == "npu" else f"about NPUs, and the device is {facts.type}"


STEPS = (
    Step(1, "machine", "versions, memory, matrix products", f"{NAMES}machine:machine", 180),
    Step(2, "attention", "dense attention", f"{NAMES}attention:dense", 400),
    Step(2, "lse", "attention with its log-sum-exp", f"{NAMES}attention:lse", 300),
    Step(3, "merge", "memory of the log-sum-exp, merging", f"{NAMES}attention:merge", 300),
    Step(4, "forward", "two DiT layers of real width", f"{NAMES}network:forward", 400),
    Step(
        5,
        "compiled",
        "the same, compiled",
        f"{NAMES}network:compiled",
        600,
        needs=lambda facts: facts.compile,
    ),
    Step(6, "modes", "modes 0, 1, 2 and overlap alone", f"{NAMES}attention:modes", 300),
    Step(7, "methods", "FP8, RainFusion", f"{NAMES}methods:methods", 400),
    Step(7, "int8", "int8 weights", f"{NAMES}methods:int8", 200),
    Step(8, "vae", "VAE, encoding and decoding", f"{NAMES}autoencoder:vae", 600),
    Step(9, "loading", "weights from files", f"{NAMES}files:loading", 400),
    Step(9, "readahead", "weights read ahead", f"{NAMES}files:readahead", 200),
    Step(9, "experts", "experts switched", f"{NAMES}files:experts", 300),
    Step(10, "groups", "exchanges between ranks", f"{NAMES}groups:groups", 400, "several"),
    Step(10, "slow-rank", "one rank is late", f"{NAMES}groups:slow_rank", 400, "several"),
    Step(11, "layers", "layers in every mode", f"{NAMES}layers:layers", 600, "several"),
    Step(11, "ring", "memory of a ring", f"{NAMES}layers:ring", 300, "several"),
    Step(11, "loops", "a minute of each mode", f"{NAMES}layers:loops", 500, "any", only_full=True),
    Step(12, "fsdp", "sharded weights", f"{NAMES}layers:fsdp", 300, "several"),
    Step(12, "npu", "what differs on NPUs", f"{NAMES}npu:npu", 300, needs=_on_npus),
)


def chosen(only: str | None, steps: tuple[Step, ...]) -> list[Step]:
    """The steps that --only names, or all. InputError for a name that is none."""
    if only is None:
        return list(steps)
    wanted = [name.strip() for name in only.split(",")]
    known = {step.name for step in steps} | {str(step.number) for step in steps}
    for name in wanted:
        if name not in known:
            names = ", ".join(step.name for step in steps)
            raise InputError(f"--only {name!r} is no step; the steps are {names}.")
    return [step for step in steps if step.name in wanted or str(step.number) in wanted]


@dataclass(frozen=True)
class Outcome:
    """What came of a step, on one rank or on all.

    Attributes:
        verdict: The worst of its lines', or WRONG where it did not end.
        seconds: How long it took.
        lines: What it said.
        words: Why it is not available, or how it ended.
        tail: Of a step that did not end: the last of what it wrote.
    """

    verdict: str
    seconds: float = 0.0
    lines: tuple[Line, ...] = ()
    words: str = ""
    tail: str = ""


def line_from(stored: Mapping[str, Any]) -> Line:
    """A line that was sent as JSON."""
    figures = tuple(Figure(**{**f, "value": _number(f["value"])}) for f in stored["figures"])
    return Line(**{**stored, "figures": figures})


def outcome_from(stored: Mapping[str, Any]) -> Outcome:
    """An outcome that was sent as JSON."""
    return Outcome(**{**stored, "lines": tuple(map(line_from, stored["lines"]))})


def _number(value: float | str) -> float | str:
    return float(value) if value in ("nan", "inf", "-inf") else value


def plain(value: Any) -> Any:
    """For JSON, which has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
