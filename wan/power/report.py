"""`python -m wan.power report DIR [DIR ...]`: summarizes schedule traces.

For each folder of `generate.py --trace DIR` the report compares the order of exchanges and
attention in every layer of every rank with the plan, and lists the time of each part of a step.
Several folders, such as one per mode, are compared in a table. The command writes report.json into
the first folder, or into --out; ui.perfetto.dev shows the traces over time. The exit code is 1 if
an order differs from its plan.

Times are milliseconds on the clock of the trace. On an accelerator that is its compute stream, and
the time of a wait is the time for which it blocks the stream.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from wan.app.flag_parser import Parser
from wan.metering.exchange_order import OrderComparison, Trace, compare_with_plan, read_traces
from wan.settings.attention_modes import count_heads_per_chunk
from wan.settings.errors import InputError, escape_controls
from wan.utils.files import check_output, make_json_kind, write_output
from wan.utils.trace import Event

PARTS = {  # part of a step -> operations
    "attention": ("attention", "reference attention"),
    "communication": ("pack", "a2a", "a2a wait", "copy", "hop", "hop wait", "gather"),
    "rotate, quantise": ("quantise", "prepare", "mask"),
    "projections": ("project",),
    "cross-attention": ("cross-attention",),
    "feed-forward": ("feed-forward",),
}
_PART_OF_OPERATION = {name: part for part, names in PARTS.items() for name in names}
_COUNT_NAMES = {"attention": "FA", "hop": "hops", "gather": "gathers"}
_NS_PER_MS = 1e6  # nanoseconds
_REPORT_KIND = make_json_kind("a report of wan.power", "mode", "order", "plan", "ranks")


@dataclass(frozen=True)
class Gaps:
    """Gaps between consecutive attention calls, in milliseconds; 0 without gaps."""

    count: int
    median: float
    longest: float

    @classmethod
    def from_lengths(cls, lengths: Sequence[float]) -> Gaps:
        return cls(len(lengths), median(lengths or [0.0]), max(lengths, default=0.0))


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
    """

    rank: int
    order: OrderComparison
    counts: dict[str, int]
    step: float
    parts: dict[str, float]
    hidden: float
    within: Gaps
    across: Gaps

    @property
    def duty(self) -> float:
        """Share of attention in the step time."""
        return self.parts["attention"] / self.step if self.step else 0.0

    @property
    def exposed(self) -> float:
        """Communication time that is not overlapped."""
        return self.parts["communication"]


def analyze_trace(trace: Trace) -> RankReport:
    """Computes the report of one rank."""
    events = trace.events
    step = sum(event.duration for event in events if event.operation == "step") / _NS_PER_MS
    parts, part_end = dict.fromkeys(PARTS, 0.0), 0
    for event in events:  # nested events count as part of the outer one
        if event.operation in _PART_OF_OPERATION and event.begin >= part_end:
            parts[_PART_OF_OPERATION[event.operation]] += event.duration / _NS_PER_MS
            part_end = event.end
    parts["other"] = max(step - sum(parts.values()), 0.0)
    layer_counts = Counter(
        tuple(_count_layer_events(layer_events).items())
        for layer_events in _group_by_layer_call(events)
    )
    within, across = list[float](), list[float]()
    calls = [event for event in events if event.operation == "attention"]
    for previous_call, call in zip(calls, calls[1:], strict=False):
        (previous_step, *previous_place), (next_step, *next_place) = (
            [attention_call.attributes.get(name) for name in ("step", "branch", "layer")]
            for attention_call in (previous_call, call)
        )
        if previous_step == next_step:
            (within if previous_place == next_place else across).append(
                (call.begin - previous_call.end) / _NS_PER_MS
            )
    return RankReport(
        rank=trace.plan.rank,
        order=compare_with_plan(trace.plan, events),
        counts=dict(layer_counts.most_common(1)[0][0]) if layer_counts else {},
        step=step,
        parts=parts,
        hidden=_compute_hidden_time(events, calls) / _NS_PER_MS,
        within=Gaps.from_lengths(within),
        across=Gaps.from_lengths(across),
    )


def _find_async_spans(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Finds the (begin, end) of asynchronous ring hops and all-to-alls, in nanoseconds.

    They last from the end of their call to the beginning of their wait.
    """
    spans: list[tuple[int, int]] = []
    begin_times: dict[object, int] = {}
    for event in events:
        attributes = event.attributes
        key = tuple(attributes.get(name) for name in ("layer", "chunk", "what"))
        if event.operation == "hop" or (event.operation == "a2a" and attributes.get("beside")):
            begin_times[key] = event.end
        elif event.operation in ("hop wait", "a2a wait") and key in begin_times:
            spans.append((begin_times.pop(key), event.begin))
    return spans


def _group_by_layer_call(events: Iterable[Event]) -> list[list[Event]]:
    """Groups the events inside each call of a layer; events are sorted by begin."""
    layers: list[list[Event]] = []
    for event in events:
        if event.operation == "layer":
            layers.append([])
        elif layers and "layer" in event.attributes:
            layers[-1].append(event)
    return layers


def _count_layer_events(layer_events: Iterable[Event]) -> dict[str, int]:
    counts = dict.fromkeys(("A2A", "scales", "FA", "hops", "gathers"), 0)
    for event in layer_events:
        if event.operation == "a2a":
            counts["scales" if "scale" in str(event.attributes.get("what")) else "A2A"] += 1
        elif event.operation in _COUNT_NAMES:
            counts[_COUNT_NAMES[event.operation]] += 1
    return counts


def _compute_hidden_time(events: Sequence[Event], calls: Sequence[Event]) -> int:
    """Computes the nanoseconds in which an exchange and attention overlapped."""
    edges = [(x, c, 0) for a, b in _find_async_spans(events) for x, c in ((a, 1), (b, -1))]
    edges += [(x, c, 1) for call in calls for x, c in ((call.begin, 1), (call.end, -1))]
    total, num_active, previous_time = 0, [0, 0], 0
    for time, change, lane in sorted(edges):
        total += time - previous_time if all(num_active) else 0
        num_active[lane] += change
        previous_time = time
    return total


@dataclass(frozen=True)
class RunReport:
    """Traces and rank reports of a run."""

    name: str
    traces: Sequence[Trace]
    ranks: Sequence[RankReport]

    @property
    def order_summary(self) -> str:
        """The first difference from the plan, or "as planned"."""
        differences = (rank.order.difference for rank in self.ranks)
        return next((str(difference) for difference in differences if difference), "as planned")

    def format_mean(self, get_milliseconds: Callable[[RankReport], float]) -> str:
        """Formats a time per step, averaged over ranks, in milliseconds."""
        return _format_milliseconds(
            fmean(map(get_milliseconds, self.ranks)) / max(len(self.traces[0].plan.steps), 1)
        )


def main(argv: Sequence[str]) -> int:
    description = (__doc__ or "").partition("\n\n")[2]
    parser = Parser(prog="python -m wan.power report", description=description)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folder of --trace")
    parser.add_argument("--out", type=Path, help="folder for report.json")
    options = parser.parse_args(argv)
    has_equal_names = len({folder.name for folder in options.folders}) < len(options.folders)
    out_folder = options.out or options.folders[0]
    output = out_folder / "report.json"
    check_output(output, _REPORT_KIND, "--out")
    reports = []
    for folder in options.folders:
        traces = read_traces(folder)
        name = str(folder) if has_equal_names else folder.absolute().name
        reports.append(RunReport(name, traces, [analyze_trace(trace) for trace in traces]))
    print("\n\n".join(_join_lines(_format_run_report(report)) for report in reports))
    if len(reports) > 1:
        print("\n" + _join_lines(_format_run_comparison(reports)))
    try:
        with write_output(output, _REPORT_KIND) as temporary:
            content = [_make_run_record(report) for report in reports]
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        why = f"cannot be written to ({error.strerror})"
        raise InputError("The folder", out_folder, why, "name another with --out") from error
    print(f"\nWritten: {output}")
    return int(any(report.order_summary != "as planned" for report in reports))


def _format_run_report(report: RunReport) -> Iterator[str]:
    """Formats a run for the terminal: sizes, order, times and gaps."""
    trace, plan = report.traces[0], report.traces[0].plan
    cfg, ring, ulysses = plan.sizes
    chunks = count_heads_per_chunk(plan.heads, ulysses, plan.mode.chunks)
    chunk_sizes = "/".join(map(str, sorted(set(chunks), reverse=True)))
    steps = ", ".join(f"{step} ({expert})" for step, expert in plan.steps.items())
    chunks_text = f"head chunks {len(chunks)} of {chunk_sizes} per rank"
    yield f"== {report.name}: {plan.mode.name}, {chunks_text} =="
    yield (
        f"ulysses {ulysses} x ring {ring} x cfg {cfg}, {plan.tokens} tokens, "
        f"{plan.total_layers} layers, traced steps {steps}"
    )
    yield (
        f"{trace.metadata.get('kernel', 'an unknown kernel')}; {trace.metadata.get('device', '')}, "
        f"times by {trace.metadata.get('clock', '?')}"
    )
    yield ""
    yield f"Order: {report.order_summary}"
    ranks_by_counts: dict[str, list[int]] = {}
    for rank in report.ranks:
        counts_text = ", ".join(f"{name} {count}" for name, count in rank.counts.items() if count)
        ranks_by_counts.setdefault(counts_text or "nothing", []).append(rank.rank)
    for counts_text, ranks in ranks_by_counts.items():
        label = "each rank" if len(ranks_by_counts) == 1 else f"rank {', '.join(map(str, ranks))}"
        yield f"  a layer, {label}: {counts_text}"
    num_layers = sum(rank.order.layers for rank in report.ranks)
    num_skipped = sum(rank.order.skipped for rank in report.ranks)
    skipped_text = f", {num_skipped} skipped by a step cache or guidance" if num_skipped else ""
    yield f"  {num_layers} layers of {len(report.ranks)} ranks compared{skipped_text}"
    yield ""
    yield "Milliseconds of a step (duty: attention's share; hidden: overlapped communication)"
    parts = [part for part in report.ranks[0].parts if any(r.parts[part] for r in report.ranks)]
    count = max(len(plan.steps), 1)
    rows = [("rank", "step", "duty", *parts, "hidden")]
    for rank in report.ranks:
        times = (_format_milliseconds(rank.parts[part] / count) for part in parts)
        hidden = f"<= {_format_milliseconds(rank.hidden / count)}" if rank.hidden else "0"
        rows.append(
            (
                str(rank.rank),
                _format_milliseconds(rank.step / count),
                f"{rank.duty:.0%}",
                *times,
                hidden,
            )
        )
    yield from _format_table(rows)
    yield ""
    yield "Gaps between consecutive attention calls, all ranks"
    rows = [("ms", "count", "median", "longest")]
    for name, gaps in (
        ("in a layer", [rank.within for rank in report.ranks]),
        ("between layers", [rank.across for rank in report.ranks]),
    ):
        mean_median = fmean(gap.median for gap in gaps)
        longest = max(gap.longest for gap in gaps)
        num_gaps = str(sum(gap.count for gap in gaps))
        rows.append(
            (name, num_gaps, _format_milliseconds(mean_median), _format_milliseconds(longest))
        )
    yield from _format_table(rows)


def _format_run_comparison(reports: Sequence[RunReport]) -> Iterator[str]:
    yield "Side by side (exposed, hidden: communication; gap: median between calls in a layer)"
    rows = [("", "step ms", "attention", "duty", "exposed", "hidden", "gap", "order")]
    for report in reports:
        times = (
            report.format_mean(lambda rank: rank.step),
            report.format_mean(lambda rank: rank.parts["attention"]),
            f"{fmean(rank.duty for rank in report.ranks):.0%}",
            report.format_mean(lambda rank: rank.exposed),
            report.format_mean(lambda rank: rank.hidden),
            _format_milliseconds(fmean(rank.within.median for rank in report.ranks)),
        )
        order_text = report.order_summary if report.order_summary == "as planned" else "differs"
        rows.append((f"{report.name} ({report.traces[0].plan.mode.name})", *times, order_text))
    yield from _format_table(rows)


def _make_run_record(report: RunReport) -> dict[str, Any]:
    """Returns the JSON record of a run."""
    trace = report.traces[0]
    return {
        "name": report.name,
        "mode": trace.plan.mode.name,
        "order": report.order_summary,
        "plan": asdict(trace.plan),
        "about": dict(trace.metadata),
        "ranks": [
            asdict(rank) | {"duty": rank.duty, "exposed": rank.exposed} for rank in report.ranks
        ],
    }


def _format_milliseconds(value: float) -> str:
    """Formats milliseconds with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _format_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Formats rows as aligned columns, the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first_cell, *other_cells in rows:
        cells = (cell.rjust(width) for cell, width in zip(other_cells, widths[1:], strict=True))
        yield f"  {first_cell.ljust(widths[0])}  {'  '.join(cells)}".rstrip()


def _join_lines(lines: Iterable[str]) -> str:
    """Joins lines, in which names of traces cannot control the terminal."""
    return "\n".join(map(escape_controls, lines))
