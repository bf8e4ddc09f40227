"""How a device's power governor slows a run down: a model of power, clock and time.

Powers are shares of the device's limit (its TDP), clocks are shares of the rated clock. A device
draws P(kind, f) = ps + activity[kind] (pfa - ps) f^alpha. Computing takes 1/f of its time at the
rated clock; exchanging and idling do not depend on the clock.

Between two events power is constant, so that its moving average is an exponential in closed form:
simulations go from event to event and have no time step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import NamedTuple, Protocol

Segment = tuple[str, float]
"""(kind of work, seconds that it takes at the rated clock)."""

KINDS = ("fa", "linear", "comm", "idle")
"""Attention, all other work of a layer, exchanges, nothing."""
COMPUTES = ("fa", "linear")
"""Kinds whose time depends on the clock."""

_DIGITS = 9  # to which a state is the same
_BLOCK, _SAME = 100, 1e-4  # repeats that are compared; relative difference that is none


@dataclass(frozen=True)
class Device:
    """What a device draws.

    Attributes:
        ps: Static power, share of the limit.
        pfa: Power of attention at the rated clock, share of the limit.
        alpha: Exponent of the clock in dynamic power.
        activity: By kind of work: its dynamic power as a share of attention's.
    """

    ps: float
    pfa: float
    alpha: float
    activity: Mapping[str, float]

    def power(self, kind: str, clock: float) -> float:
        return self.ps + self.activity[kind] * (self.pfa - self.ps) * clock**self.alpha

    def clock_within(self, power: float, kind: str = "fa") -> float:
        """The highest clock, at most the rated one, at which `kind` draws at most `power` > ps."""
        dynamic = self.activity[kind] * (self.pfa - self.ps)
        if self.ps + dynamic <= power:
            return 1.0
        return float(((power - self.ps) / dynamic) ** (1 / self.alpha))


class State(NamedTuple):
    """Of a governor.

    Attributes:
        average: Moving average of power, share of the limit.
        clock: What an averaging controller has set.
        left: Seconds until a controller's next step, or until the clock is released; 0: neither.
        trips: How often the clock was dropped until now.
    """

    average: float
    clock: float = 1.0
    left: float = 0.0
    trips: int = 0


class Governor(Protocol):
    """Lowers the clock of a device that draws more than its limit."""

    def clock(self, device: Device, kind: str, state: State) -> float:
        """The clock at which a device works on `kind`."""

    def until(self, state: State, power: float) -> float:
        """Seconds to the governor's next action while this power is drawn."""

    def after(self, state: State, power: float, seconds: float, acts: bool) -> State:
        """The state after seconds at this power; acts: they end with the governor's action."""


def decayed(average: float, power: float, seconds: float, tau: float) -> float:
    """A moving average with time constant tau after seconds of constant power."""
    return power + (average - power) * math.exp(-seconds / tau)


def trip_time(average: float, power: float, tau: float) -> float:
    """Seconds until a moving average below the limit reaches it."""
    if power <= 1:
        return math.inf
    return tau * math.log((power - average) / (power - 1)) if average < 1 else 0.0


def stays_within(device: Device, tau: float, burst: float, gap: float) -> bool:
    """Whether bursts of attention with gaps of exchange never take the average to the limit."""
    low, high = device.power("comm", 1), device.power("fa", 1)
    share = math.expm1(-burst / tau) / math.expm1(-(burst + gap) / tau)
    return low + (high - low) * share < 1


@dataclass(frozen=True)
class Clamp:
    """Acts at once: no power above the limit is ever drawn."""

    def clock(self, device: Device, kind: str, state: State) -> float:
        return device.clock_within(1.0, kind)

    def until(self, state: State, power: float) -> float:
        return math.inf

    def after(self, state: State, power: float, seconds: float, acts: bool) -> State:
        return state


@dataclass(frozen=True)
class Averaging:
    """An integral controller of the moving average.

    Attributes:
        tau: Time constant of the average, s.
        rate: How fast the clock changes: 1/s per share of the limit.
        tick: Seconds between two steps of the controller.
        lowest: Clock that it never goes below.
    """

    tau: float
    rate: float
    tick: float
    lowest: float

    def clock(self, device: Device, kind: str, state: State) -> float:
        return state.clock

    def until(self, state: State, power: float) -> float:
        return state.left or self.tick

    def after(self, state: State, power: float, seconds: float, acts: bool) -> State:
        average = decayed(state.average, power, seconds, self.tau)
        if not acts:
            return state._replace(average=average, left=self.until(state, power) - seconds)
        wanted = state.clock + self.rate * self.tick * (1 - average)
        return State(average, min(max(wanted, self.lowest), 1.0), self.tick)


@dataclass(frozen=True)
class Hysteresis:
    """Drops the clock for some time when the moving average crosses the limit: a trip.

    An average that is still at the limit when the clock is released trips again at once.

    Attributes:
        tau: Time constant of the average, s.
        f_low: The dropped clock.
        hold: Seconds of it.
    """

    tau: float
    f_low: float
    hold: float

    def clock(self, device: Device, kind: str, state: State) -> float:
        return self.f_low if state.left else 1.0

    def until(self, state: State, power: float) -> float:
        return state.left or trip_time(state.average, power, self.tau)

    def after(self, state: State, power: float, seconds: float, acts: bool) -> State:
        average, _, left, trips = state
        if acts and not left:  # exactly: rounding could leave it below the limit
            return State(1.0, left=self.hold, trips=trips + 1)
        average = decayed(average, power, seconds, self.tau)
        if not acts:
            return State(average, left=max(left - seconds, 0.0), trips=trips)
        if average >= 1:
            return State(average, left=self.hold, trips=trips + 1)
        return State(average, trips=trips)


@dataclass(frozen=True)
class Totals:
    """Of a simulated run.

    Attributes:
        seconds: That it takes.
        energy: Share of the limit x seconds.
        clocked: Clock x seconds.
        throttled: Seconds below the rated clock.
        trips: Times that a hysteresis governor dropped the clock.
    """

    seconds: float = 0.0
    energy: float = 0.0
    clocked: float = 0.0
    throttled: float = 0.0
    trips: float = 0.0

    @property
    def mean_power(self) -> float:
        return self.energy / self.seconds

    @property
    def mean_clock(self) -> float:
        return self.clocked / self.seconds

    def plus(self, other: Totals, times: float = 1.0) -> Totals:
        """These and some times the others."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Totals(*(mine + times * theirs for mine, theirs in pairs))


class Piece(NamedTuple):
    """Some seconds of constant clock and power."""

    seconds: float
    clock: float
    power: float


def pieces(
    device: Device, governor: Governor, state: State, segment: Segment, by_clock: bool = True
) -> Iterator[tuple[Piece, State]]:
    """One segment, from event to event; each piece with the state at its end.

    by_clock: seconds are at the rated clock; else as they were really taken.
    """
    kind, work = segment
    stretches = by_clock and kind in COMPUTES
    while work > 0:
        clock = governor.clock(device, kind, state)
        power, speed = device.power(kind, clock), clock if stretches else 1.0
        until = governor.until(state, power)
        acts = until <= work / speed
        seconds = until if acts else work / speed
        work = work - seconds * speed if acts else 0.0
        state = governor.after(state, power, seconds, acts)
        yield Piece(seconds, clock, power), state


def _once(
    device: Device, governor: Governor, state: State, layer: Sequence[Segment]
) -> tuple[Totals, State]:
    before, seconds, energy, clocked, throttled = state.trips, 0.0, 0.0, 0.0, 0.0
    for segment in layer:
        for piece, after in pieces(device, governor, state, segment):
            state = after
            seconds += piece.seconds
            energy += piece.seconds * piece.power
            clocked += piece.seconds * piece.clock
            throttled += piece.seconds * (piece.clock < 1)
    return Totals(seconds, energy, clocked, throttled, state.trips - before), state


def simulate(
    device: Device, governor: Governor, layer: Sequence[Segment], count: int = 1
) -> Totals:
    """Work that is repeated, from a device that has been idle.

    Once a repeat begins in the same state as an earlier one, all that follows is known. Where a
    hundred repeats take as long as the hundred before them, from the same averages of power, they
    stand for what follows.

    Args:
        device: Its powers.
        governor: Of its clock.
        layer: What is repeated.
        count: How often, at least once.
    """
    state, seen, done = State(device.ps), dict[tuple[float, ...], int](), list[Totals]()
    averages, first = list[float](), None
    while len(done) < count and first is None:
        key = tuple(round(value, _DIGITS) for value in state[:3])
        first = seen.get(key, _settled(averages, done))
        if first is None:
            seen[key] = len(done)
            averages.append(state.average)
            totals, state = _once(device, governor, state, layer)
            done.append(totals)
    again = done[first:]
    whole, rest = divmod(count - len(done), len(again))
    found = Totals()
    for totals in (*done, *again[:rest]):
        found = found.plus(totals)
    for totals in again if whole else ():
        found = found.plus(totals, whole)
    return found


def _settled(averages: Sequence[float], done: Sequence[Totals]) -> int | None:
    """Where the last hundred repeats begin, if they are like the hundred before them."""
    if len(done) % _BLOCK or len(done) < 2 * _BLOCK:
        return None
    seconds = [totals.seconds for totals in done]
    for values in (averages, seconds):
        before, last = fmean(values[-2 * _BLOCK : -_BLOCK]), fmean(values[-_BLOCK:])
        if abs(last - before) > _SAME * last:
            return None
    return len(done) - _BLOCK
