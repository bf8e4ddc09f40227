"""`python -m wan.power report DIR [DIR ...]`: summarizes schedule traces.

For each folder of `generate.py --trace DIR` the report compares the order of exchanges and
attention in every layer of every rank with the plan, and lists the time of each part of a step.
Several folders, such as one per mode, are compared in a table. The command writes report.json and
timeline.png into the first folder, or into --out. The exit code is 1 if an order differs from its
plan.

Times are milliseconds on the clock of the trace. On an accelerator that is its compute stream, and
the time of a wait is the time for which it blocks the stream.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from wan.cli.flags import Parser
from wan.evidence.order import Comparison, Trace, compare, read
from wan.output_files import check_output, json_kind, write_output
from wan.power import timeline
from wan.settings.attention_modes import count_heads_per_chunk
from wan.settings.errors import InputError
from wan.trace import Event

PARTS = {  # part of a step -> kinds of events
    "attention": ("attention",),
    "communication": ("pack", "a2a", "a2a wait", "copy", "hop", "hop wait", "gather"),
    "rotate, quantise": timeline.QUANTISES,
    "projections": ("project",),
    "cross-attention": ("cross-attention",),
    "feed-forward": ("feed-forward",),
}
EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bin edges of gap histograms; the first and the last bin are open."""
_PART = {kind: part for part, kinds in PARTS.items() for kind in kinds}
_COUNTED = {"attention": "FA", "hop": "hops", "gather": "gathers"}
_MS = 1e6  # nanoseconds
_REPORT = json_kind("a report of wan.power", "mode", "order", "plan", "ranks")


@dataclass(frozen=True)
class Gaps:
    """Statistics of the gaps between consecutive attention calls, in milliseconds.

    Attributes:
        median: 0 without gaps.
        longest: 0 without gaps.
        histogram: Number of gaps in each bin of GAP_EDGES_MS.
    """

    count: int
    median: float
    longest: float
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[float]) -> Gaps:
        counts = Counter(bisect_right(EDGES, length) for length in lengths)
        bins = tuple(counts[place] for place in range(len(EDGES) + 1))
        return cls(len(lengths), median(lengths or [0.0]), max(lengths, default=0.0), bins)


@dataclass(frozen=True)
class RankReport:
    """Times of one rank, in milliseconds, summed over its traced steps.

    Attributes:
        order: Comparison of its order with the plan.
        counts: Number of exchanges, scales, attention calls, hops and gathers per layer; the most
            frequent counts if layers differ (sparse and dense steps).
        step: Duration of the steps.
        parts: Time of each of PARTS, and "other".
        hidden: Upper bound of the communication time that overlaps attention.
        within: Gaps inside a layer.
        across: Gaps from one layer to the next.
        layers: One record per layer.
    """

    rank: int
    order: Comparison
    counts: dict[str, int]
    step: float
    parts: dict[str, float]
    hidden: float
    within: Gaps
    across: Gaps
    layers: list[dict[str, Any]] = field(repr=False)

    @property
    def duty(self) -> float:
        """Share of attention in the step time."""
        return self.parts["attention"] / self.step if self.step else 0.0

    @property
    def exposed(self) -> float:
        """Communication time that is not overlapped."""
        return self.parts["communication"]


def analyse(trace: Trace) -> RankReport:
    """Computes the report of one rank."""
    events = trace.events
    step = sum(event.length for event in events if event.kind == "step") / _MS
    parts, end = dict.fromkeys(PARTS, 0.0), 0
    for event in events:  # nested events count as part of the outer one
        if event.kind in _PART and event.begin >= end:
            parts[_PART[event.kind]] += event.length / _MS
            end = event.end
    parts["other"] = max(step - sum(parts.values()), 0.0)
    layers = timeline.by_layer(events)
    counts = Counter(tuple(_counts(inside).items()) for _, inside in layers)
    within, across = list[float](), list[float]()
    calls = [event for event in events if event.kind == "attention"]
    for last, call in zip(calls, calls[1:], strict=False):
        (before, *there), (after, *here) = (
            [one.facts.get(name) for name in ("step", "branch", "layer")] for one in (last, call)
        )
        if before == after:
            (within if there == here else across).append((call.begin - last.end) / _MS)
    return RankReport(
        rank=trace.plan.rank,
        order=compare(trace.plan, events),
        counts=dict(counts.most_common(1)[0][0]) if counts else {},
        step=step,
        parts=parts,
        hidden=_hidden(events, calls) / _MS,
        within=Gaps.of(within),
        across=Gaps.of(across),
        layers=[_layer(event, inside) for event, inside in layers],
    )


def _counts(inside: Iterable[Event]) -> dict[str, int]:
    counts = dict.fromkeys(("A2A", "scales", "FA", "hops", "gathers"), 0)
    for event in inside:
        if event.kind == "a2a":
            counts["scales" if "scale" in str(event.facts.get("what")) else "A2A"] += 1
        elif event.kind in _COUNTED:
            counts[_COUNTED[event.kind]] += 1
    return counts


def _layer(event: Event, inside: Sequence[Event]) -> dict[str, Any]:
    calls = [one.length for one in inside if one.kind == "attention"]
    return {name: event.facts.get(name) for name in ("step", "branch", "layer")} | {
        "time": event.length / _MS,
        "attention": sum(calls) / _MS,
        "calls": len(calls),
        "exchanges": sum(one.kind == "a2a" for one in inside),
    }


def _hidden(events: Sequence[Event], calls: Sequence[Event]) -> int:
    """Computes the nanoseconds in which an exchange and attention overlapped."""
    edges = [(x, c, 0) for a, b in timeline.under_way(events) for x, c in ((a, 1), (b, -1))]
    edges += [(x, c, 1) for call in calls for x, c in ((call.begin, 1), (call.end, -1))]
    total, running, last = 0, [0, 0], 0
    for time, change, kind in sorted(edges):
        total += time - last if all(running) else 0
        running[kind] += change
        last = time
    return total


@dataclass(frozen=True)
class RunReport:
    """Traces and rank reports of a run."""

    name: str
    traces: Sequence[Trace]
    ranks: Sequence[RankReport]

    @property
    def order(self) -> str:
        """The first difference from the plan, or "as planned"."""
        found = (rank.order.difference for rank in self.ranks)
        return next((str(one) for one in found if one), "as planned")

    def mean(self, figure: Callable[[RankReport], float]) -> str:
        """Formats a time per step, averaged over ranks, in milliseconds."""
        return _ms(fmean(map(figure, self.ranks)) / max(len(self.traces[0].plan.steps), 1))


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").partition("\n\n")[2]
    parser = Parser(prog="python -m wan.power report", description=about)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folder of --trace")
    parser.add_argument("--out", type=Path, help="folder for report.json and timeline.png")
    options = parser.parse_args(argv)
    same = len({folder.name for folder in options.folders}) < len(options.folders)
    out = options.out or options.folders[0]
    written = out / "report.json", out / "timeline.png"
    for path, kind in zip(written, (_REPORT, timeline.PLOT), strict=True):
        check_output(path, kind, "--out")
    reports = []
    for folder in options.folders:
        traces = read(folder)
        name = str(folder) if same else folder.absolute().name
        reports.append(RunReport(name, traces, [analyse(trace) for trace in traces]))
    print("\n\n".join("\n".join(_text(report)) for report in reports))
    if len(reports) > 1:
        print("\n" + "\n".join(_side_by_side(reports)))
    try:
        with write_output(written[0], _REPORT) as temporary:
            content = [_record(report) for report in reports]
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        timeline.draw([(report.name, report.traces[0]) for report in reports], written[1])
    except OSError as error:
        why = f"cannot be written to ({error.strerror})"
        raise InputError("The folder", out, why, "name another with --out") from error
    print(f"\nWritten: {written[0]}, {written[1]}")
    return int(any(report.order != "as planned" for report in reports))


def _text(report: RunReport) -> Iterator[str]:
    """Formats a run for the terminal: sizes, order, times and gaps."""
    trace, plan = report.traces[0], report.traces[0].plan
    cfg, ring, ulysses = plan.sizes
    chunks = count_heads_per_chunk(plan.heads, ulysses, plan.mode.chunks)
    each = "/".join(map(str, sorted(set(chunks), reverse=True)))
    steps = ", ".join(f"{step} ({expert})" for step, expert in plan.steps.items())
    yield f"== {report.name}: {plan.mode.name}, head chunks {len(chunks)} of {each} per rank =="
    yield (
        f"ulysses {ulysses} x ring {ring} x cfg {cfg}, {plan.tokens} tokens, "
        f"{plan.all_layers} layers, traced steps {steps}"
    )
    yield (
        f"{trace.about.get('kernel', 'an unknown kernel')}; {trace.about.get('device', '')}, "
        f"times by {trace.about.get('clock', '?')}"
    )
    yield f"\nOrder: {report.order}"
    alike: dict[str, list[int]] = {}
    for rank in report.ranks:
        words = ", ".join(f"{name} {count}" for name, count in rank.counts.items() if count)
        alike.setdefault(words or "nothing", []).append(rank.rank)
    for words, ranks in alike.items():
        whose = "each rank" if len(alike) == 1 else f"rank {', '.join(map(str, ranks))}"
        yield f"  a layer, {whose}: {words}"
    layers = sum(rank.order.layers for rank in report.ranks)
    skipped = sum(rank.order.skipped for rank in report.ranks)
    more = f", {skipped} skipped by a step cache" if skipped else ""
    yield f"  {layers} layers of {len(report.ranks)} ranks compared{more}"
    yield "\nMilliseconds of a step (duty: attention's share; hidden: overlapped communication)"
    parts = [part for part in report.ranks[0].parts if any(r.parts[part] for r in report.ranks)]
    count = max(len(plan.steps), 1)
    rows = [("rank", "step", "duty", *parts, "hidden")]
    for rank in report.ranks:
        times = (_ms(rank.parts[part] / count) for part in parts)
        hidden = f"<= {_ms(rank.hidden / count)}" if rank.hidden else "0"
        rows.append((str(rank.rank), _ms(rank.step / count), f"{rank.duty:.0%}", *times, hidden))
    yield from _table(rows)
    yield "\nGaps between consecutive attention calls, all ranks"
    rows = [("ms", f"< {EDGES[0]:g}", *(f"{edge:g} -" for edge in EDGES), "median", "longest")]
    for name, gaps in (
        ("in a layer", [rank.within for rank in report.ranks]),
        ("between layers", [rank.across for rank in report.ranks]),
    ):
        bins = (str(sum(column)) for column in zip(*(g.histogram for g in gaps), strict=True))
        middle, longest = fmean(gap.median for gap in gaps), max(gap.longest for gap in gaps)
        rows.append((name, *bins, _ms(middle), _ms(longest)))
    yield from _table(rows)


def _side_by_side(reports: Sequence[RunReport]) -> Iterator[str]:
    yield "Side by side (exposed, hidden: communication; gap: median between calls in a layer)"
    rows = [("", "step ms", "attention", "duty", "exposed", "hidden", "gap", "order")]
    for one in reports:
        times = (
            one.mean(lambda rank: rank.step),
            one.mean(lambda rank: rank.parts["attention"]),
            f"{fmean(rank.duty for rank in one.ranks):.0%}",
            one.mean(lambda rank: rank.exposed),
            one.mean(lambda rank: rank.hidden),
            _ms(fmean(rank.within.median for rank in one.ranks)),
        )
        order = one.order if one.order == "as planned" else "differs"
        rows.append((f"{one.name} ({one.traces[0].plan.mode.name})", *times, order))
    yield from _table(rows)


def _record(report: RunReport) -> dict[str, Any]:
    """Returns the JSON record of a run."""
    trace = report.traces[0]
    return {
        "name": report.name,
        "mode": trace.plan.mode.name,
        "order": report.order,
        "plan": asdict(trace.plan),
        "about": dict(trace.about),
        "gap_edges_ms": EDGES,
        "ranks": [
            asdict(rank) | {"duty": rank.duty, "exposed": rank.exposed} for rank in report.ranks
        ],
    }


def _ms(value: float) -> str:
    """Formats milliseconds with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Formats rows as aligned columns, the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield f"  {first.ljust(widths[0])}  {'  '.join(cells)}".rstrip()
