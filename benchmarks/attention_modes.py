"""FA_Power_Cap's attention layer on several ranks of this machine: time, memory, overlap, ring.

    python -m benchmarks.attention_modes --json results/attention.json
    python -m benchmarks.attention_modes --only modes overlap --ranks 2 --tokens 2048

Every part starts gloo ranks of one thread each. The variants of a part run in turn, all in every
round. A round's time is that of its slowest rank, and ratios are taken inside a round. With more
ranks than cores, only the ratios are meaningful. The program prints medians with extremes, and
whether they meet their targets; the JSON file has every round.

modes    compares the three modes: time, and a call's memory beyond its inputs (in units of one
         rank's Q)
overlap  slows the link down and measures the share of its time that A2A/FA overlap hides
exchange compares one exchange of q, k and v with three, in self-attention with its projections
ring     runs all ranks as one ring, one way and bidirectional, and with gathered keys and values
block    compares a block on two ranks with one rank
compile  compiles the block with Inductor and reads the order of exchanges and attention in its code
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import attention_runs, common
from benchmarks.attention_runs import Size
from benchmarks.common import run_on_ranks, take_slowest_rank
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.attention_modes import MODES
from wan.settings.values import integer
from wan.testing.measuring import CPU

Record = dict[str, Any]
Figures = Mapping[str, float]
SLOW_LINK = 0.5  # delay of all exchanges, as a share of the call's time without the delay
RINGS = (2, 3, 4)


def make_check(
    name: str, figure: Figures | float | bool, target: float | None = None, sign: str = "<="
) -> Record:
    """Makes a line of the report: a figure or a median with extremes, compared with its target."""
    if isinstance(figure, bool):
        return {"name": name, "met": figure}
    figures = dict(figure) if isinstance(figure, Mapping) else {"median": figure}
    if target is None:
        return {"name": name, **figures}
    met = figures["median"] <= target if sign == "<=" else figures["median"] >= target
    return {"name": name, **figures, "target": f"{sign} {target}", "met": met}


def measure_part(part: str, ranks: int, work: Callable[..., Any], size: Size, *args: Any) -> Record:
    """Runs one part on gloo ranks; seconds and memory are those of the worst rank."""
    print(
        f"\n{part}: {ranks} ranks, {size.tokens} tokens, {size.heads}x{size.head_dim}", flush=True
    )
    results_by_rank = run_on_ranks(ranks, work, size, *args)
    record = {"part": part, "ranks": ranks, "size": vars(size), **results_by_rank[0]}
    record["seconds"] = take_slowest_rank([f["seconds"] for f in results_by_rank])
    if "added" in record:
        record["added"] = {
            name: max(f["added"][name] for f in results_by_rank) for name in record["added"]
        }
    if "orders" in record:
        record["same_on_all"] = all(f["orders"] == record["orders"] for f in results_by_rank)
    return record


def check_ratio(record: Record, numerator: str, denominator: str, *target: Any) -> Record:
    seconds = record["seconds"]
    return make_check(
        f"{numerator} / {denominator}",
        common.compute_ratios(seconds[numerator], seconds[denominator]),
        *target,
    )


def measure_modes(options: argparse.Namespace) -> Iterator[Record]:
    for ranks in options.ranks:
        record = measure_part("modes", ranks, attention_runs.run_modes, options.size)
        limits = {"mode 0": 4.1, "check: an exchange alone": 1.0}
        limits |= {"mode 1": 1.6} if record["chunks"] == 10 else {}
        record["checks"] = [
            check_ratio(record, "mode 1", "mode 0", 1.0),
            check_ratio(record, "mode 2", "mode 0", 1.02),
            *(make_check(f"memory, {k}", v, limits.get(k)) for k, v in record["added"].items()),
        ]
        yield record


def measure_overlap(options: argparse.Namespace) -> Iterator[Record]:
    size = replace(options.size, heads=options.size.heads // 2)
    record = measure_part("overlap", 2, attention_runs.run_overlap, size, SLOW_LINK)
    names = ("in order", "in order, slow link", "overlap, slow link")
    rounds = zip(*(record["seconds"][name] for name in names), strict=True)
    hidden = common.compute_spread([(slow - piped) / (slow - fast) for fast, slow, piped in rounds])
    record["checks"] = [
        make_check("share of the slow link's time hidden", hidden, 0.7, ">="),
        check_ratio(record, "in order, slow link", "in order"),
        check_ratio(record, "overlap, slow link", "in order"),
        check_ratio(record, "overlap", "in order"),
    ]
    yield record


def measure_exchanges(options: argparse.Namespace) -> Iterator[Record]:
    for ranks in options.ranks:
        record = measure_part("exchange", ranks, attention_runs.run_exchanges, options.block)
        names = (f"mode {mode}" for mode in MODES)
        record["checks"] = [check_ratio(record, f"{n}, fused", f"{n}, split", 1.0) for n in names]
        yield record


def measure_rings(options: argparse.Namespace) -> Iterator[Record]:
    previous: Record | None = None
    for ranks in RINGS:
        size = replace(options.block, tokens=options.block.tokens // max(RINGS) * ranks)
        record = measure_part("ring", ranks, attention_runs.run_ring, size)
        added = record["added"]
        record["checks"] = [
            check_ratio(record, "ring", "gather"),
            check_ratio(record, "bidirectional", "gather"),
            *(make_check(f"memory, {name}", held) for name, held in added.items()),
        ]
        if previous is not None and previous["ranks"] > 2:  # rings pass blocks on from 3 ranks on
            grown = added["ring"] / previous["added"]["ring"]
            record["checks"].append(
                make_check(f"memory of the ring, {ranks} / 3 ranks", grown, 1.0)
            )
        previous = record
        yield record


def measure_block(options: argparse.Namespace) -> Iterator[Record]:
    record = measure_part("block", 2, attention_runs.run_scaling, options.block)
    record["checks"] = [
        check_ratio(record, "one rank", "mode 0", 1.8, ">="),
        check_ratio(record, "one rank", "mode 1", 1.8, ">="),
    ]
    yield record


def measure_compiled_block(options: argparse.Namespace) -> Iterator[Record]:
    record = measure_part("compile", 2, attention_runs.run_compiled_block, options.block)
    record["checks"] = [make_check("the same order on all ranks", record["same_on_all"])]
    for mode, expected in record["expected"].items():
        record["checks"] += [
            check_ratio(record, f"{mode}, compiled", mode),
            make_check(
                f"{mode}: distance from eager, share of its size", record["distance"][mode], 1e-5
            ),
            *(
                make_check(f"{label}: order {expected}", order == expected)
                for label, order in record["orders"].items()
                if label.startswith(mode)
            ),
        ]
    yield record


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Record]]] = {
    "modes": measure_modes,
    "overlap": measure_overlap,
    "exchange": measure_exchanges,
    "ring": measure_rings,
    "block": measure_block,
    "compile": measure_compiled_block,
}


def print_record(record: Record) -> None:
    """Prints the seconds and checks of a part."""
    for name, values in record["seconds"].items():
        summary = common.compute_spread(values)
        low, high = summary["min"], summary["max"]
        print(f"  {name:40}{summary['median']:10.3f} s  ({low:.3f} to {high:.3f})")
    for line in record["checks"]:
        verdict = {True: "met", False: "MISSED", None: ""}[line.get("met")]
        figure = f"{line['median']:10.3g}" if "median" in line else " " * 10
        extremes = f"  ({line['min']:.3f} to {line['max']:.3f})" if "min" in line else ""
        target = f"  target {line['target']}" if "target" in line else ""
        print(f"  {line['name']:40}{figure}{extremes}{target}  {verdict}", flush=True)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options; adds `size` (layer parts) and `block` (block, ring and compile parts)."""
    parser = Parser(description="Measure time and memory of the attention layer on several ranks.")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--ranks",
        type=make_argument_type(integer(1, 64)),
        nargs="+",
        default=[2, 4],
        help="numbers of ranks of the parts modes and exchange",
    )
    parser.add_argument(
        "--heads",
        type=make_argument_type(integer(1, 1000)),
        default=40,
        help="attention heads; part overlap uses half",
    )
    parser.add_argument(
        "--block_heads",
        type=make_argument_type(integer(1, 1000)),
        default=12,
        help="heads of the parts exchange, ring, block and compile",
    )
    parser.add_argument("--head_dim", type=make_argument_type(integer(1, 1024)), default=128)
    parser.add_argument(
        "--tokens",
        type=make_argument_type(integer(1, 1_000_000)),
        default=4096,
        help="tokens; the parts exchange, ring, block and compile use half",
    )
    parser.add_argument(
        "--repeats", type=make_argument_type(integer(1, 10_000)), default=5, help="timed rounds"
    )
    common.add_json_option(parser)
    options = parser.parse_args(argv)
    options.size = Size(options.heads, options.head_dim, options.tokens, options.repeats)
    options.block = replace(options.size, heads=options.block_heads, tokens=options.tokens // 2)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    records: list[Record] = []
    for part in options.only:
        for record in PARTS[part](options):
            print_record(record)
            records.append(record)
    common.write_json(options.json, CPU, records)
    missed = [
        f"{r['part']}: {c['name']}" for r in records for c in r["checks"] if not c.get("met", 1)
    ]
    print("\nmissed: " + ("; ".join(missed) or "nothing"))


if __name__ == "__main__":
    sys.exit(run_program(main))
