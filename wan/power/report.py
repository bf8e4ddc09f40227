"""`python -m wan.power report DIR [DIR ...]`: what schedule traces show.

For each folder of `generate.py --trace DIR`: whether every layer of every rank exchanged and
attended in the planned order, and where the time went. Several folders, one for each mode, are set
side by side. Writes report.json and timeline.png into the first folder, or into --out. Exit code 1
where an order is not the planned one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from wan.checkpoint.files import whole_file
from wan.cli.flags import Parser
from wan.modules.schedule import heads_per_chunk
from wan.power import timeline, traces
from wan.power.analysis import EDGES, Gaps, Rank, analyse, merged
from wan.power.traces import Trace
from wan.settings.errors import InputError


@dataclass(frozen=True)
class Report:
    """A run's traces and their figures, by rank."""

    name: str
    traces: Sequence[Trace]
    ranks: Sequence[Rank]

    @property
    def verdict(self) -> str:
        """ "as planned", or the first difference."""
        found = [rank.verdict.difference for rank in self.ranks if rank.verdict.difference]
        return str(found[0]) if found else "as planned"

    @property
    def steps(self) -> int:
        """How many steps were traced."""
        return max(len(self.traces[0].plan.steps), 1)

    def mean(self, figure: Callable[[Rank], float]) -> float:
        """Of all ranks."""
        return fmean(figure(rank) for rank in self.ranks)


def of(name: str, run: Sequence[Trace]) -> Report:
    """The report of one run. run: the trace of each rank. name: for tables and plots."""
    return Report(name, run, [analyse(trace) for trace in run])


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").partition("\n\n")[2]
    parser = Parser(prog="python -m wan.power report", description=about)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of --trace")
    parser.add_argument("--out", type=Path, help="folder for report.json and timeline.png")
    options = parser.parse_args(argv)
    same = len({folder.name for folder in options.folders}) < len(options.folders)
    reports = [
        of(str(folder) if same else folder.absolute().name, traces.read(folder))
        for folder in options.folders
    ]
    out = options.out or options.folders[0]
    print("\n\n".join(text(report) for report in reports))
    if len(reports) > 1:
        print(f"\n{side_by_side(reports)}")
    written = out / "report.json", out / "timeline.png"
    try:
        with whole_file(written[0]) as temporary:
            temporary.write_text(json.dumps(record(reports), indent=1), encoding="utf-8")
        timeline.draw([(report.name, report.traces[0]) for report in reports], written[1])
    except OSError as error:
        raise InputError(
            f"The report cannot be written to {out} ({error.strerror}); name a folder with --out."
        ) from error
    print(f"\nWritten: {written[0]}, {written[1]}")
    return int(any(report.verdict != "as planned" for report in reports))


def text(report: Report) -> str:
    """One run, for a terminal."""
    lines = [*_about(report), "", *_order(report), "", *_times(report), "", *_gaps(report)]
    return "\n".join(lines)


def _about(report: Report) -> list[str]:
    trace, plan = report.traces[0], report.traces[0].plan
    cfg, ring, ulysses = plan.sizes
    chunks = heads_per_chunk(plan.heads, ulysses, plan.mode.chunks)
    each = "/".join(str(size) for size in sorted(set(chunks), reverse=True))
    steps = ", ".join(f"{step} ({expert})" for step, expert in plan.steps.items())
    return [
        f"== {report.name}: {plan.mode.name}, head chunks {len(chunks)} of {each} per rank ==",
        f"ulysses {ulysses} x ring {ring} x cfg {cfg}, {plan.tokens} tokens, {plan.layers} layers, "
        f"traced steps {steps}",
        f"{trace.about.get('kernel', 'an unknown kernel')}; {trace.about.get('device', '')}, "
        f"times by {trace.about.get('clock', '?')}",
    ]


def _order(report: Report) -> list[str]:
    """Counts per layer, and the verdict."""
    alike: dict[str, list[int]] = {}
    for rank in report.ranks:
        words = ", ".join(f"{name} {count}" for name, count in rank.counts.items() if count)
        alike.setdefault(words or "nothing", []).append(rank.rank)
    lines = [f"Order: {report.verdict}"]
    for words, ranks in alike.items():
        whose = "each rank" if len(alike) == 1 else f"rank {', '.join(map(str, ranks))}"
        lines.append(f"  a layer, {whose}: {words}")
    layers = sum(rank.verdict.layers for rank in report.ranks)
    skipped = sum(rank.verdict.skipped for rank in report.ranks)
    lines.append(
        f"  {layers} layers of {len(report.ranks)} ranks compared"
        + (f", {skipped} skipped by a step cache" if skipped else "")
    )
    return lines


def _times(report: Report) -> list[str]:
    """Where a step's time goes, rank by rank."""
    parts = [p for p in report.ranks[0].parts if any(rank.parts[p] for rank in report.ranks)]
    head = ("rank", "step", "duty", *parts, "hidden")
    rows = [
        (
            str(rank.rank),
            _ms(rank.step / report.steps),
            f"{rank.duty:.0%}",
            *(_ms(rank.parts[part] / report.steps) for part in parts),
            f"<= {_ms(rank.hidden / report.steps)}" if rank.hidden else "0",
        )
        for rank in report.ranks
    ]
    title = "Milliseconds of a step (duty: attention's share; hidden: communication under it)"
    return [title, *_table([head, *rows])]


def _gaps(report: Report) -> list[str]:
    head = ("ms", f"< {EDGES[0]:g}", *(f"{edge:g} -" for edge in EDGES), "median", "longest")
    kinds: dict[str, list[Gaps]] = {
        "in a layer": [rank.within for rank in report.ranks],
        "between layers": [rank.across for rank in report.ranks],
    }
    rows = [
        (
            name,
            *map(str, merged(gaps)),
            _ms(fmean(gap.median for gap in gaps)),
            _ms(max(gap.longest for gap in gaps)),
        )
        for name, gaps in kinds.items()
    ]
    return ["Gaps between consecutive attention calls, all ranks", *_table([head, *rows])]


def side_by_side(reports: Sequence[Report]) -> str:
    """The runs in one table; figures are means of the ranks, for a step."""
    head = ("", "step ms", "attention", "duty", "exposed", "hidden", "gap", "order")
    rows = [
        (
            f"{one.name} ({one.traces[0].plan.mode.name})",
            _ms(one.mean(lambda rank: rank.step) / one.steps),
            _ms(one.mean(lambda rank: rank.parts["attention"]) / one.steps),
            f"{one.mean(lambda rank: rank.duty):.0%}",
            _ms(one.mean(lambda rank: rank.exposed) / one.steps),
            _ms(one.mean(lambda rank: rank.hidden) / one.steps),
            _ms(one.mean(lambda rank: rank.within.median)),
            "as planned" if one.verdict == "as planned" else "differs",
        )
        for one in reports
    ]
    title = "Side by side (exposed, hidden: communication; gap: median between calls in a layer)"
    return "\n".join([title, *_table([head, *rows])])


def record(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """All figures, for JSON; times in milliseconds, summed over the traced steps."""
    return [
        {
            "name": report.name,
            "mode": report.traces[0].plan.mode.name,
            "verdict": report.verdict,
            "plan": asdict(report.traces[0].plan),
            "about": dict(report.traces[0].about),
            "gap_edges_ms": EDGES,
            "ranks": [
                asdict(rank) | {"duty": rank.duty, "exposed": rank.exposed} for rank in report.ranks
            ],
        }
        for report in reports
    ]


def _ms(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
