"""What a trace says of time: attention, the gaps between its calls, communication, the rest.

Times are milliseconds on the trace's clock. On an accelerator that is its compute stream: a wait is
then as long as that stream stood still.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from wan.power.order import Verdict, compare
from wan.power.traces import Trace
from wan.trace import Event

PARTS = {  # part of a step -> kinds of ranges
    "attention": ("attention",),
    "communication": ("a2a", "a2a wait", "hop", "hop wait", "gather"),
    "rotate, quantise": ("quantise", "prepare", "mask"),
    "projections": ("project",),
    "cross-attention": ("cross-attention",),
    "feed-forward": ("feed-forward",),
}
_PART = {kind: part for part, kinds in PARTS.items() for kind in kinds}
EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Milliseconds: borders of a histogram's bins; the last bin is open."""
_MS = 1e6  # nanoseconds
Interval = tuple[int, int]


@dataclass(frozen=True)
class Gaps:
    """From the end of an attention call to the beginning of the next one.

    Attributes:
        count: How many there are.
        median: Milliseconds; 0 where there is none.
        longest: Likewise.
        histogram: How many lie below the first of EDGES, between each two, and from the last on.
    """

    count: int
    median: float
    longest: float
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer of one forward pass. Times in milliseconds."""

    step: int
    branch: str
    layer: int
    time: float
    attention: float
    calls: int
    exchanges: int


@dataclass(frozen=True)
class Rank:
    """What one rank did in its traced steps. Times are sums over these steps, in milliseconds.

    Attributes:
        rank: Of all ranks.
        verdict: Its order against the plan.
        counts: Exchanges, scales, attention calls, hops and gathers of a layer; of several kinds
            of layers (sparse and dense steps) the most frequent.
        step: The steps themselves.
        parts: Keys of PARTS and "other": where that time went.
        hidden: Exchanges and hops under way while attention was computed; an upper bound, as
            nobody asks when they ended.
        within: Gaps inside a layer.
        across: Gaps from one layer to the next.
        layers: Each one.
    """

    rank: int
    verdict: Verdict
    counts: dict[str, int]
    step: float
    parts: dict[str, float]
    hidden: float
    within: Gaps
    across: Gaps
    layers: list[Layer] = field(repr=False)

    @property
    def duty(self) -> float:
        """Attention's share of the step."""
        return self.parts["attention"] / self.step if self.step else 0.0

    @property
    def exposed(self) -> float:
        """Communication that the step waits for."""
        return self.parts["communication"]


def analyse(trace: Trace) -> Rank:
    """The figures of one rank."""
    events = trace.events
    step = sum(event.length for event in events if event.kind == "step")
    parts = dict.fromkeys(PARTS, 0.0)
    for part, length in _outermost(events):
        parts[part] += length / _MS
    parts["other"] = max(step / _MS - sum(parts.values()), 0.0)
    layers = list(_layers(events))
    counts = Counter(_counts(inside) for _, inside in layers)
    usual = counts.most_common(1)[0][0] if counts else ()
    within, across = _gaps(events)
    return Rank(
        rank=trace.plan.rank,
        verdict=compare(trace.plan, events),
        counts=dict(usual),
        step=step / _MS,
        parts=parts,
        hidden=_hidden(events) / _MS,
        within=within,
        across=across,
        layers=[_layer(event, inside) for event, inside in layers],
    )


def _outermost(events: Iterable[Event]) -> Iterator[tuple[str, int]]:
    """(part, nanoseconds) of ranges that lie in no range of another part."""
    end = 0
    for event in events:
        part = _PART.get(event.kind)
        if part is not None and event.begin >= end:
            yield part, event.length
            end = event.end


def _layers(events: Sequence[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Each layer's own range, and what is recorded of it."""
    inside: list[Event] = []
    for event in events:
        if event.kind == "layer":
            inside = []
            yield event, inside  # it is filled until the next one is asked for
        elif "layer" in event.facts:
            inside.append(event)


def _counts(inside: Iterable[Event]) -> tuple[tuple[str, int], ...]:
    counts = dict.fromkeys(("A2A", "scales", "FA", "hops", "gathers"), 0)
    for event in inside:
        if event.kind == "a2a":
            counts["scales" if "scale" in str(event.facts.get("what")) else "A2A"] += 1
        elif event.kind in ("attention", "hop", "gather"):
            counts[{"attention": "FA", "hop": "hops", "gather": "gathers"}[event.kind]] += 1
    return tuple(counts.items())


def _layer(event: Event, inside: Sequence[Event]) -> Layer:
    calls = [one for one in inside if one.kind == "attention"]
    facts = event.facts
    return Layer(
        step=int(str(facts.get("step", -1))),
        branch=str(facts.get("branch", "")),
        layer=int(str(facts.get("layer", -1))),
        time=event.length / _MS,
        attention=sum(one.length for one in calls) / _MS,
        calls=len(calls),
        exchanges=sum(one.kind == "a2a" for one in inside),
    )


def _gaps(events: Iterable[Event]) -> tuple[Gaps, Gaps]:
    """Inside layers, and from one to the next of the same step."""
    within: list[float] = []
    across: list[float] = []
    last: Event | None = None
    for event in events:
        if event.kind != "attention":
            continue
        if last is not None and last.facts.get("step") == event.facts.get("step"):
            where = [(one.facts.get("branch"), one.facts.get("layer")) for one in (last, event)]
            (within if where[0] == where[1] else across).append((event.begin - last.end) / _MS)
        last = event
    return _summary(within), _summary(across)


def _summary(gaps: Sequence[float]) -> Gaps:
    bins = [0] * (len(EDGES) + 1)
    for gap in gaps:
        bins[bisect_right(EDGES, gap)] += 1
    return Gaps(len(gaps), median(gaps or [0.0]), max(gaps, default=0.0), tuple(bins))


def under_way(events: Iterable[Event]) -> list[Interval]:
    """From the call of an exchange that runs beside others, or of a hop, to where it is waited for.

    In the order in which they are waited for.
    """
    found: list[Interval] = []
    begun: dict[object, int] = {}
    for event in events:
        facts = event.facts
        key = (*(facts.get(name) for name in ("layer", "chunk")), facts.get("what"))
        if event.kind == "hop" or (event.kind == "a2a" and facts.get("beside")):
            begun[key] = event.end
        elif event.kind in ("hop wait", "a2a wait") and key in begun:
            found.append((begun.pop(key), event.begin))
    return found


def _hidden(events: Sequence[Event]) -> int:
    """Nanoseconds in which something was under way and attention was computed."""
    edges = [(time, change, 0) for a, b in under_way(events) for time, change in ((a, 1), (b, -1))]
    calls = [event for event in events if event.kind == "attention"]
    edges += [(x, c, 1) for call in calls for x, c in ((call.begin, 1), (call.end, -1))]
    total, open_, last = 0, [0, 0], 0
    for time, change, kind in sorted(edges):
        if all(open_):
            total += time - last
        open_[kind] += change
        last = time
    return total


def merged(gaps: Sequence[Gaps]) -> list[int]:
    """The histograms of several ranks together."""
    return [sum(counts) for counts in zip(*(one.histogram for one in gaps), strict=True)]
