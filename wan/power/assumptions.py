"""What the prediction assumes: every number of it that the model's arithmetic does not give.

The defaults are the set that reproduces the published row of FA_Power_Cap; a flag of the same name
replaces each of them, and a calibration replaces what a measured series shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from wan.power.governor import Averaging, Clamp, Device, Governor, Hysteresis
from wan.settings.errors import InputError
from wan.settings.values import Reader, choice, real

GOVERNORS = ("hysteresis", "average", "clamp")
ASSUMED, GIVEN, MEASURED = "assumed", "command line", "measured"
FITTED = "assumed, to fit the published row"


def _one(default: float, unit: str, meaning: str, low: float, high: float, **more: Any) -> float:
    """A field.

    more: source, if it is not just assumed; of: the governors that it matters to, if not to all;
    above, below: as of `real`.
    """
    facts = {"source": ASSUMED, "of": GOVERNORS, "unit": unit, "meaning": meaning} | more
    edges = {name: facts.pop(name) for name in ("above", "below") if name in facts}
    facts["read"] = real(low, high, **edges)
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class Assumptions:
    """The set; `meaning` of each field's metadata says what it is, `unit` in what.

    "TDP" as a unit: a share of the limit that the governor keeps, whatever its watts.
    """

    governor: str = field(
        default="hysteresis",
        metadata={
            "read": choice(*GOVERNORS),
            "unit": "",
            "meaning": "how the device keeps its limit: " + ", ".join(GOVERNORS),
            "source": FITTED,
            "of": GOVERNORS,
        },
    )
    tau: float = _one(
        *(0.06, "s", "time constant of the governor's power average"),
        *(1e-3, 1e3),
        of=("hysteresis", "average"),
        source=FITTED,
    )
    f_low: float = _one(
        *(0.55, "", "dropped clock / rated clock (average: lowest)"),
        *(0.05, 1),
        below=True,
        of=("hysteresis", "average"),
        source=FITTED,
    )
    hold: float = _one(
        *(0.25, "s", "how long the dropped clock stays"),
        *(1e-3, 1e3),
        of=("hysteresis",),
        source=FITTED,
    )
    rate: float = _one(
        *(10, "1/s", "how fast the clock follows, per share of the limit"),
        *(1e-3, 1e3),
        of=("average",),
    )
    tick: float = _one(
        *(0.01, "s", "between two steps of the controller"), *(1e-4, 10), of=("average",)
    )
    pfa: float = _one(1.05, "TDP", "power of attention at the rated clock", 0.01, 10, source=FITTED)
    ps: float = _one(0.3, "TDP", "static power", 0, 1, below=True)
    alpha: float = _one(3, "", "dynamic power grows with clock ** alpha", 1, 4)
    a_linear: float = _one(0.75, "", "dynamic power of other work / of attention", 0, 2)
    a_comm: float = _one(0.12, "", "dynamic power of exchanges / of attention", 0, 2)
    fa_tflops: float = _one(310, "TFLOP/s", "attention at the rated clock", 1e-3, 1e5)
    linear_tflops: float = _one(320, "TFLOP/s", "all other work of a layer", 1e-3, 1e5)
    link_gbs: float = _one(20, "GB/s", "what a rank sends while all ranks do", 1e-3, 1e5)
    exchange_us: float = _one(30, "us", "of each exchange, whatever its size", 0, 1e6)
    launch_us: float = _one(10, "us", "without work before each attention call", 0, 1e6)
    element_bytes: float = _one(2, "bytes", "of an element that is exchanged", 0.5, 4)
    fixed: float = _one(12.3, "s", "everything but denoising, not throttled", 0, 1e5, source=FITTED)

    def __post_init__(self) -> None:
        if self.ps >= 1:
            raise InputError(
                f"Static power (ps) is {self.ps:.2f} of the limit, which no clock could keep; give "
                "a larger --tdp, or a smaller --ps."
            )
        if self.pfa <= self.ps:
            raise InputError(
                f"--pfa {self.pfa:g} is not above --ps {self.ps:g}: attention draws more than a "
                "device at rest; give a larger --pfa or a smaller --ps."
            )

    def device(self) -> Device:
        activity = {"fa": 1.0, "linear": self.a_linear, "comm": self.a_comm, "idle": 0.0}
        return Device(self.ps, self.pfa, self.alpha, activity)

    def locked(self) -> tuple[Assumptions, float]:
        """With the clock locked where attention just keeps the limit; and that clock."""
        clock = self.device().clock_within(1.0)
        if clock == 1:
            return self, clock
        fa, linear = self.fa_tflops * clock, self.linear_tflops * clock
        return replace(self, pfa=1.0, fa_tflops=fa, linear_tflops=linear), clock

    def model(self) -> Governor:
        """The governor."""
        if self.governor == "clamp":
            return Clamp()
        if self.governor == "average":
            return Averaging(self.tau, self.rate, self.tick, self.f_low)
        return Hysteresis(self.tau, self.f_low, self.hold)


@dataclass(frozen=True)
class Fact:
    """What is known of a field of Assumptions."""

    name: str
    read: Reader
    unit: str
    meaning: str
    source: str
    of: tuple[str, ...]
    default: Any


FACTS = {
    one.name: Fact(name=one.name, default=one.default, **one.metadata)
    for one in fields(Assumptions)
}


def decide(
    given: Mapping[str, Any], measured: Mapping[str, float]
) -> tuple[Assumptions, dict[str, str]]:
    """The assumptions, and where each comes from.

    Args:
        given: Checked values from the command line; other flags' are ignored.
        measured: From a calibration; what is given wins.

    Raises:
        InputError: For values that have no effect, or contradict.
    """
    asked = {name: value for name, value in given.items() if name in FACTS}
    found = Assumptions(**{**measured, **asked})
    for name in asked:
        if found.governor not in FACTS[name].of:
            raise InputError(
                f"--{name} has no effect on --governor {found.governor}; drop one of them."
            )
    sources = {name: fact.source for name, fact in FACTS.items()}
    sources |= dict.fromkeys(measured, MEASURED) | dict.fromkeys(asked, GIVEN)
    return found, sources


def listed(assumptions: Assumptions, sources: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What matters to this governor, a record each."""
    for name, fact in FACTS.items():
        if assumptions.governor in fact.of:
            yield {
                "name": name,
                "value": getattr(assumptions, name),
                "unit": fact.unit,
                "source": sources[name],
                "meaning": fact.meaning,
            }
