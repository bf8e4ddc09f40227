"""The planned and the recorded order of all-to-alls and attention in a layer, and their comparison.

The plan depends only on `wan.settings.attention_modes` and the sizes of a run, never on recorded
events. A trace is one rank's file with its plan and events, in the JSON format of Chrome and
Perfetto.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from wan.output_files import json_kind, write_output
from wan.settings.attention_modes import (
    Mode,
    TokenPlan,
    count_valid_rows,
    list_head_ranges,
    q_ranges,
    select_attention_mode,
)
from wan.settings.errors import InputError
from wan.settings.numerics import Q_ROWS
from wan.trace import PLACES, Event, label

Item = tuple[int, str]
"""(head chunk, operation), for example (0, "A2A q")."""
_KINDS = {"int": (int,), "bool": (bool,), "str": (str,), "int | None": (int, type(None))}
_LIMITS = {"layers": 10_000, "heads": 100_000, "chunks": 100_000, "multiple": 1 << 20}


def _in_range(name: str, value: int | None) -> bool:
    low = 1 if name in _LIMITS else 0
    return value is None or low <= value <= _LIMITS.get(name, 1 << 40)


@dataclass(frozen=True)
class Plan:
    """Settings and sizes that determine the order in a rank's layers; stored in every trace.

    Attributes:
        rank: Global rank; the mesh is (cfg, ring, ulysses).
        comm_type: A key of MODES.
        overlap: --fa_alltoall_overlap, which replaces `comm_type`.
        chunks: --chunks; None for the mode's number of head chunks.
        heads: Heads of the network.
        layers: Layers of the network, without VACE control blocks.
        tokens: Tokens of the video.
        multiple: A rank's tokens are padded to a multiple of this.
        sizes: (cfg, ring, ulysses).
        ring_type: "ring" or "bidirectional".
        merges: The dense kernel returns the log-sum-exp, so that ring attention can merge blocks.
        fp8: Attention runs in FP8 unless it is sparse.
        fp8_exchange: All-to-alls send FP8 values and scales.
        sparse_from: First step of RainFusion; None without RainFusion.
        steps: Traced step -> its expert.
        fused: One all-to-all sends q, k, v and scales of a head chunk.
        control: Layers with a VACE control block; control blocks are numbered after all layers.
    """

    rank: int
    comm_type: int
    overlap: bool
    chunks: int | None
    heads: int
    layers: int
    tokens: int
    multiple: int
    sizes: tuple[int, int, int]
    ring_type: str
    merges: bool
    fp8: bool
    fp8_exchange: bool
    sparse_from: int | None
    steps: Mapping[int, str]
    fused: bool = False
    control: tuple[int, ...] = ()

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Plan:
        """Parses a plan from JSON; raises ValueError, TypeError or KeyError if it is invalid."""
        steps = {int(step): str(expert) for step, expert in raw["steps"].items()}
        control = tuple(raw.get("control", ()))
        plan = cls(**{**raw, "sizes": tuple(raw["sizes"]), "steps": steps, "control": control})
        for one in fields(cls):
            value = getattr(plan, one.name)
            kinds = _KINDS.get(str(one.type), (type(value),))
            if type(value) not in kinds or (int in kinds and not _in_range(one.name, value)):
                raise ValueError(f"{one.name} is {str(value)[:40]}")
        if len(plan.sizes) != 3 or not all(type(size) is int and size > 0 for size in plan.sizes):
            raise ValueError(f"sizes is {str(plan.sizes)[:40]}")
        fits = all(type(layer) is int and 0 <= layer < plan.layers for layer in plan.control)
        if not fits or len({*plan.control}) < len(plan.control):
            raise ValueError(f"control is {str(plan.control)[:40]}")
        if plan.world > 1 << 16 or plan.rank >= plan.world or plan.heads < plan.sizes[2]:
            raise ValueError("sizes do not fit together in its plan")
        _ = plan.mode, plan.valid
        return plan

    @property
    def world(self) -> int:
        cfg, ring, ulysses = self.sizes
        return cfg * ring * ulysses

    @property
    def all_layers(self) -> int:
        return self.layers + len(self.control)

    @property
    def mode(self) -> Mode:
        return select_attention_mode(self.comm_type, self.overlap, self.chunks)

    @property
    def ring_rank(self) -> int:
        _, ring, ulysses = self.sizes
        return self.rank // ulysses % ring

    @property
    def valid(self) -> list[int]:
        """Tokens without padding of each ring rank."""
        _, ring, ulysses = self.sizes
        rows = TokenPlan(self.tokens, ring * ulysses, self.multiple).shard_len * ulysses
        return [count_valid_rows(self.tokens, rank, rows) for rank in range(ring)]

    def method(self, step: int) -> str:
        """Returns the attention backend of a step: "rainfusion", "fp8" or "dense"."""
        if self.sparse_from is not None and step >= self.sparse_from:
            return "rainfusion"
        return "fp8" if self.fp8 else "dense"


def expected(plan: Plan, step: int) -> list[Item]:
    """Lists the planned operations of one layer in a step, in order."""
    chunks = list_head_ranges(plan.heads, plan.sizes[2], plan.mode.chunks)
    exchanges, method = plan.sizes[2] > 1, plan.method(step)
    parts = ("", " scale") if method == "fp8" and plan.fp8_exchange else ("",)
    sent = ["qkv"] if plan.fused else [f"{x}{part}" for part in parts for x in "qkv"]
    names = {
        "start": [f"A2A {what}" for what in sent],
        "attend": [f"wait {what}" for what in sent],
        "finish": ["wait out"],
    }
    found: list[Item] = []
    for verb, chunk in plan.mode.order(len(chunks)):
        found += [(chunk, name) for name in names[verb] if exchanges]
        if verb == "attend":
            found += [(chunk, name) for name in _attention(plan, method)]
            found += [(chunk, "A2A out")] if exchanges else []
    return found


def _attention(plan: Plan, method: str) -> Iterator[str]:
    """Lists the operations of a head chunk between its all-to-alls, in order."""
    ring, valid = plan.sizes[1], plan.valid
    multiple = 1 if method == "dense" else Q_ROWS
    ranges = q_ranges(valid[plan.ring_rank], plan.mode.blocks, multiple)
    blocks = range(sum(a < b for a, b in ranges))
    if ring == 1 or method != "dense" or not plan.merges:
        yield from ("gather k", "gather v") if ring > 1 else ()
        yield from (f"FA {block}" for block in blocks)
        return
    for hop, owners in enumerate(_at_hand(plan.ring_type, plan.ring_rank, ring)):
        if hop < ring - 1:
            yield "hop"
        for owner in owners:
            if valid[owner]:
                yield from (f"FA {block} of {owner}" for block in blocks)
        if hop < ring - 1:
            yield "in"


def _at_hand(ring_type: str, rank: int, size: int) -> Iterator[list[int]]:
    """Yields the ranks whose keys and values are local, at first and after each ring hop."""
    yield [rank]
    for hop in range(1, size):
        if ring_type == "ring":
            yield [(rank - hop) % size]
        else:
            yield [owner for owner in (rank - hop, rank + hop) if 0 <= owner < size]


_NAMES = {"a2a": "A2A {what}", "a2a wait": "wait {what}", "hop": "hop", "hop wait": "in"}


def found(events: Iterable[Event]) -> list[Item]:
    """Converts the recorded events of one layer to order items."""
    items = []
    for event in events:
        facts = event.facts
        if event.kind == "attention":
            owner = f" of {facts['owner']}" if "owner" in facts else ""
            items.append((_chunk(facts), f"FA {facts.get('block')}{owner}"))
        elif event.kind == "gather":
            items.append((_chunk(facts), f"gather {facts.get('what')}"))
        elif event.kind in _NAMES:
            items.append((_chunk(facts), _NAMES[event.kind].format(what=facts.get("what"))))
    return items


def _chunk(facts: Mapping[str, object]) -> int:
    chunk = facts.get("chunk")
    return chunk if isinstance(chunk, int) else -1


@dataclass(frozen=True)
class Comparison:
    """Result of comparing a rank's layers with its plan.

    Attributes:
        layers: Number of compared layers.
        skipped: Number of layers whose self-attention a step cache skipped.
        difference: The first deviation from the plan; None if there is none.
    """

    layers: int
    skipped: int
    difference: str | None


def by_forward(events: Iterable[Event]) -> dict[tuple[int, str], list[Event]]:
    """Groups events by forward pass: (step, guidance branch), keeping their order."""
    forwards: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        step, branch = event.facts.get("step"), event.facts.get("branch")
        if isinstance(step, int) and isinstance(branch, str):
            forwards.setdefault((step, branch), []).append(event)
    return forwards


def by_layer(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Groups the events of a forward pass by layer, keeping their order."""
    layers: dict[int, list[Event]] = {}
    for event in events:
        layer = event.facts.get("layer")
        if isinstance(layer, int):
            layers.setdefault(layer, []).append(event)
    return layers


def compare(plan: Plan, events: Sequence[Event]) -> Comparison:
    """Compares the recorded events of a rank with its plan."""
    layers, skipped, difference = 0, 0, None
    forwards = by_forward(events)
    for step in plan.steps:
        branches = [branch for at, branch in forwards if at == step]
        if not branches and difference is None:
            difference = f"rank {plan.rank}, step {step}: expected a step, found nothing"
        for branch in branches:
            recorded = by_layer(forwards[step, branch])
            left_out = _left_out(forwards[step, branch], plan)
            layers, skipped = layers + plan.all_layers, skipped + len(left_out)
            for layer in range(plan.all_layers) if difference is None else ():
                planned = [] if layer in left_out else expected(plan, step)
                pairs = zip_longest(planned, found(recorded.get(layer, [])))
                wrong = ((at, a, b) for at, (a, b) in enumerate(pairs) if a != b)
                for at, a, b in wrong:
                    difference = (
                        f"rank {plan.rank}, step {step} ({branch}), layer {layer}, position {at}: "
                        f"expected {_words(a)}, found {_words(b)}"
                    )
                    break
                if difference is not None:
                    break
    return Comparison(layers - skipped, skipped, difference)


def _left_out(events: Sequence[Event], plan: Plan) -> set[int]:
    """Finds the layers whose self-attention a step cache skipped in a forward pass."""
    found: set[int] = set()
    for event in events:
        facts = event.facts
        if event.kind != "cache" or facts.get("decision") != "skipped":
            continue
        layer, first = facts.get("layer"), facts.get("first")
        if isinstance(layer, int):
            found.add(layer)
        elif isinstance(first, int):
            found |= set(range(first, plan.layers))
            behind = enumerate(plan.control, plan.layers)
            found |= {place for place, layer in behind if layer >= first}
    return found


def _words(item: Item | None) -> str:
    return "the end of the layer" if item is None else f"{item[1]} of chunk {item[0]}"


def line(events: Iterable[Event]) -> str:
    """Formats the order in a layer for the log: `0: A2A q k v, FA 0, A2A out | 1: ...`.

    Waits are omitted if all exchanges are synchronous.
    """
    events = list(events)
    beside = any(event.facts.get("beside") for event in events)
    items = [(chunk, name) for chunk, name in found(events) if beside or name.split()[0] != "wait"]
    parts = []
    for chunk, group in groupby(items, key=lambda item: item[0]):
        verbs = []
        for verb, same in groupby((name.partition(" ") for _, name in group), lambda x: x[0]):
            verbs.append(" ".join([verb, *(rest for *_, rest in same if rest)]))
        parts.append(f"{chunk}: {', '.join(verbs)}")
    return " | ".join(parts) or "no exchange and no attention"


@dataclass(frozen=True)
class Trace:
    """The recorded events of one rank.

    Attributes:
        plan: The planned order.
        events: Events sorted by begin.
        metadata: Device, clock, kernel and ID of the run.
    """

    plan: Plan
    events: Sequence[Event]
    about: Mapping[str, str]


_DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_LATEST = 1e15  # microseconds
TRACE = json_kind("a trace of generate.py --trace", "traceEvents", "otherData")
_FILE = re.compile(r"rank(\d{1,5})\.json")


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def write(trace: Trace, folder: Path, zero: int) -> None:
    """Writes the trace file of a rank, under a temporary name until it is complete.

    Args:
        origin_ns: `perf_counter_ns` at time 0 of the trace, the same instant on all ranks.
    """
    rank = trace.plan.rank
    lane = {"pid": rank, "tid": 0}
    named = [
        {"ph": "M", "name": "process_name", **lane, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", **lane, "args": {"name": trace.about["clock"]}},
    ]
    ranges = [
        {
            "ph": "X",
            "name": label(event.kind, event.facts),
            "cat": event.kind,
            **lane,
            "ts": (event.begin - zero) / 1e3,
            "dur": event.length / 1e3,
            "args": {**event.facts, "issued": (event.issued - zero) / 1e3},
        }
        for event in trace.events
    ]
    content = {
        "traceEvents": [*named, *ranges],
        "displayTimeUnit": "ms",
        "otherData": {"plan": asdict(trace.plan), "about": dict(trace.about)},
    }
    with write_output(file_of(folder, rank), TRACE) as temporary, temporary.open("w") as file:
        json.dump(content, file, allow_nan=False)


def read(folder: Path) -> list[Trace]:
    """Reads the traces of all ranks of a run, sorted by rank.

    Raises:
        InputError: The folder has no traces, lacks a rank, or has invalid files or other runs.
    """
    if not folder.is_dir():
        raise InputError(str(folder), None, "is not a folder", "give the folder of `trace`")
    ranks = sorted(
        int(match[1]) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))
    )
    if not ranks:
        raise InputError(str(folder), None, "has no rank0.json", "give the folder of `trace`")
    first = _read(file_of(folder, ranks[0]))
    lacking = sorted(set(range(first.plan.world)) - set(ranks))
    if lacking:
        why = f"is missing: the run had {first.plan.world} ranks"
        remedy = "copy the files of all machines into one folder"
        raise InputError(str(file_of(folder, lacking[0])), None, why, remedy)
    traces = [first, *(_read(file_of(folder, rank)) for rank in ranks[1:])]
    for rank, trace in zip(ranks, traces, strict=True):
        if trace.about.get("run") != first.about.get("run") or trace.plan.rank != rank:
            why = f"is not of the same run as {file_of(folder, ranks[0])}"
            raise InputError(str(file_of(folder, rank)), None, why, "trace into an empty folder")
    return traces


def _read(path: Path) -> Trace:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        other = content["otherData"]
        plan, about = Plan.read(other["plan"]), {k: str(v) for k, v in other["about"].items()}
        events = [_event(row) for row in content["traceEvents"] if row["ph"] == "X"]
        return Trace(plan, sorted(events, key=lambda event: event.begin), about)
    except OSError as error:
        raise InputError(str(path), None, f"cannot be read ({error.strerror})") from error
    except _DAMAGED as error:
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        why = f"is not a complete trace of generate.py --trace ({reason})"
        raise InputError(str(path), None, why, "trace the run again") from error


def _event(row: Mapping[str, Any]) -> Event:
    """Parses an event, converting microseconds to nanoseconds; ValueError for invalid times."""
    begin, length = float(row["ts"]), float(row["dur"])
    facts = dict(row["args"])
    issued = float(facts.pop("issued"))
    if not (0 <= length < _LATEST and abs(begin) < _LATEST and math.isfinite(issued)):
        raise ValueError(f"{str(row['name'])[:40]} has no time")
    for name in (*PLACES, "what", "decision", "first", "owner"):
        if not isinstance(facts.get(name), str | int | None):
            raise TypeError(f"{name} is {str(facts[name])[:40]}")
    times = round(begin * 1e3), round((begin + length) * 1e3), round(issued * 1e3)
    return Event(str(row["cat"]), facts, *times)
