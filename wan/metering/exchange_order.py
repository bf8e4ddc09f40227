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

from wan.settings.attention_modes import (
    Mode,
    TokenPlan,
    count_valid_rows,
    list_head_ranges,
    q_ranges,
    select_attention_mode,
)
from wan.settings.errors import InputError
from wan.settings.json_text import parse_json
from wan.settings.numerics import Q_ROWS
from wan.utils.files import make_json_kind, write_output
from wan.utils.trace import CONTEXT_KEYS, Event, format_label

OrderItem = tuple[int, str]
"""(head chunk, operation), for example (0, "A2A q")."""
_FIELD_TYPES = {"int": (int,), "bool": (bool,), "str": (str,), "int | None": (int, type(None))}
_FIELD_RANGES = {
    "layers": (1, 10_000),
    "heads": (1, 100_000),
    "chunks": (1, 100_000),
    "multiple": (1, 1 << 20),
}


def _is_in_range(name: str, value: int | None) -> bool:
    low, high = _FIELD_RANGES.get(name, (0, 1 << 40))
    return value is None or low <= value <= high


@dataclass(frozen=True)
class ExchangePlan:
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
    def from_record(cls, raw: Mapping[str, Any]) -> ExchangePlan:
        """Parses a plan from JSON; raises one of `_PARSE_ERRORS` if it is invalid."""
        steps = {int(step): str(expert) for step, expert in raw["steps"].items()}
        control = tuple(raw.get("control", ()))
        plan = cls(**{**raw, "sizes": tuple(raw["sizes"]), "steps": steps, "control": control})
        for info in fields(cls):
            value = getattr(plan, info.name)
            types = _FIELD_TYPES.get(str(info.type), (type(value),))
            if type(value) not in types or (int in types and not _is_in_range(info.name, value)):
                raise ValueError(f"{info.name} is {str(value)[:40]}")
        if len(plan.sizes) != 3 or not all(type(size) is int and size > 0 for size in plan.sizes):
            raise ValueError(f"sizes is {str(plan.sizes)[:40]}")
        is_valid = all(type(layer) is int and 0 <= layer < plan.layers for layer in plan.control)
        if not is_valid or len({*plan.control}) < len(plan.control):
            raise ValueError(f"control is {str(plan.control)[:40]}")
        if plan.world_size > 1 << 16 or plan.rank >= plan.world_size or plan.heads < plan.sizes[2]:
            raise ValueError("sizes do not fit together in its plan")
        _ = plan.mode, plan.valid_tokens_per_ring_rank  # raise ValueError for invalid settings
        return plan

    @property
    def world_size(self) -> int:
        cfg, ring, ulysses = self.sizes
        return cfg * ring * ulysses

    @property
    def total_layers(self) -> int:
        return self.layers + len(self.control)

    @property
    def mode(self) -> Mode:
        return select_attention_mode(self.comm_type, self.overlap, self.chunks)

    @property
    def ring_rank(self) -> int:
        _, ring, ulysses = self.sizes
        return self.rank // ulysses % ring

    @property
    def valid_tokens_per_ring_rank(self) -> list[int]:
        """Tokens without padding of each ring rank."""
        _, ring, ulysses = self.sizes
        tokens_per_rank = TokenPlan(self.tokens, ring * ulysses, self.multiple).shard_len * ulysses
        return [count_valid_rows(self.tokens, rank, tokens_per_rank) for rank in range(ring)]

    def select_backend(self, step: int) -> str:
        """Returns the attention backend of a step: "rainfusion", "fp8" or "dense"."""
        if self.sparse_from is not None and step >= self.sparse_from:
            return "rainfusion"
        return "fp8" if self.fp8 else "dense"


def list_planned_items(plan: ExchangePlan, step: int) -> list[OrderItem]:
    """Lists the planned operations of one layer in a step, in order."""
    chunks = list_head_ranges(plan.heads, plan.sizes[2], plan.mode.chunks)
    has_exchanges, backend = plan.sizes[2] > 1, plan.select_backend(step)
    suffixes = ("", " scale") if backend == "fp8" and plan.fp8_exchange else ("",)
    tensor_names = ["qkv"] if plan.fused else [f"{x}{suffix}" for suffix in suffixes for x in "qkv"]
    names_by_action = {
        "start": [f"A2A {tensor_name}" for tensor_name in tensor_names],
        "attend": [f"wait {tensor_name}" for tensor_name in tensor_names],
        "finish": ["wait out"],
    }
    items: list[OrderItem] = []
    for action, chunk in plan.mode.order(len(chunks)):
        items += [(chunk, name) for name in names_by_action[action] if has_exchanges]
        if action == "attend":
            items += [(chunk, name) for name in _iter_chunk_operations(plan, backend)]
            items += [(chunk, "A2A out")] if has_exchanges else []
    return items


def _iter_chunk_operations(plan: ExchangePlan, backend: str) -> Iterator[str]:
    """Yields the operations of a head chunk between its all-to-alls, in order.

    "hop" starts a transfer of K and V in the ring, and "in" waits for it.
    """
    ring_size, valid_per_rank = plan.sizes[1], plan.valid_tokens_per_ring_rank
    multiple = 1 if backend == "dense" else Q_ROWS
    ranges = q_ranges(valid_per_rank[plan.ring_rank], plan.mode.blocks, multiple)
    block_indices = range(sum(a < b for a, b in ranges))
    if ring_size == 1 or backend != "dense" or not plan.merges:
        yield from ("gather k", "gather v") if ring_size > 1 else ()
        yield from (f"FA {block}" for block in block_indices)
        return
    for hop, owners in enumerate(_list_kv_owners(plan.ring_type, plan.ring_rank, ring_size)):
        if hop < ring_size - 1:
            yield "hop"
        for owner in owners:
            if valid_per_rank[owner]:
                yield from (f"FA {block} of {owner}" for block in block_indices)
        if hop < ring_size - 1:
            yield "in"


def _list_kv_owners(ring_type: str, rank: int, size: int) -> Iterator[list[int]]:
    """Yields the ranks whose keys and values are local, at first and after each ring hop."""
    yield [rank]
    for hop in range(1, size):
        if ring_type == "ring":
            yield [(rank - hop) % size]
        else:
            yield [owner for owner in (rank - hop, rank + hop) if 0 <= owner < size]


_ITEM_FORMATS = {"a2a": "A2A {what}", "a2a wait": "wait {what}", "hop": "hop", "hop wait": "in"}


def list_recorded_items(events: Iterable[Event]) -> list[OrderItem]:
    """Converts the recorded events of one layer to order items."""
    items = []
    for event in events:
        attrs = event.attributes
        if event.operation == "attention":
            owner = f" of {attrs['owner']}" if "owner" in attrs else ""
            items.append((_get_head_chunk(attrs), f"FA {attrs.get('block')}{owner}"))
        elif event.operation == "gather":
            items.append((_get_head_chunk(attrs), f"gather {attrs.get('what')}"))
        elif event.operation in _ITEM_FORMATS:
            text = _ITEM_FORMATS[event.operation].format(what=attrs.get("what"))
            items.append((_get_head_chunk(attrs), text))
    return items


def _get_head_chunk(attributes: Mapping[str, object]) -> int:
    chunk = attributes.get("chunk")
    return chunk if isinstance(chunk, int) else -1


@dataclass(frozen=True)
class OrderComparison:
    """Result of comparing a rank's layers with its plan.

    Attributes:
        layers: Number of layers up to the first deviation, without skipped ones.
        skipped: Number of layers up to the first deviation whose self-attention a step cache
            skipped.
        difference: The first deviation from the plan; None if there is none.
    """

    layers: int
    skipped: int
    difference: str | None


def group_by_forward(events: Iterable[Event]) -> dict[tuple[int, str], list[Event]]:
    """Groups events by forward pass: (step, guidance branch), keeping their order."""
    forwards: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        step, branch = event.attributes.get("step"), event.attributes.get("branch")
        if isinstance(step, int) and isinstance(branch, str):
            forwards.setdefault((step, branch), []).append(event)
    return forwards


def group_by_layer(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Groups the events of a forward pass by layer, keeping their order."""
    layers: dict[int, list[Event]] = {}
    for event in events:
        layer = event.attributes.get("layer")
        if isinstance(layer, int):
            layers.setdefault(layer, []).append(event)
    return layers


def compare_with_plan(plan: ExchangePlan, events: Sequence[Event]) -> OrderComparison:
    """Compares the recorded events of a rank with its plan, up to the first deviation."""
    num_compared, num_skipped = 0, 0
    forwards = group_by_forward(events)
    for step in plan.steps:
        branches = [branch for index, branch in forwards if index == step]
        if not branches:
            difference = f"rank {plan.rank}, step {step}: expected a step, found nothing"
            return OrderComparison(num_compared, num_skipped, difference)
        for branch in branches:
            events_by_layer = group_by_layer(forwards[step, branch])
            skipped_layers = _find_skipped_layers(forwards[step, branch], plan)
            for layer in range(plan.total_layers):
                is_skipped = layer in skipped_layers
                num_compared += not is_skipped
                num_skipped += is_skipped
                plan_items = [] if is_skipped else list_planned_items(plan, step)
                pairs = zip_longest(plan_items, list_recorded_items(events_by_layer.get(layer, [])))
                for index, (planned_item, recorded_item) in enumerate(pairs):
                    if planned_item != recorded_item:
                        location = f"rank {plan.rank}, step {step} ({branch}), layer {layer}"
                        expected, actual = map(_describe_item, (planned_item, recorded_item))
                        return OrderComparison(
                            num_compared,
                            num_skipped,
                            f"{location}, position {index}: expected {expected}, found {actual}",
                        )
    return OrderComparison(num_compared, num_skipped, None)


def _find_skipped_layers(events: Sequence[Event], plan: ExchangePlan) -> set[int]:
    """Finds the layers whose self-attention a forward pass skipped, by a step cache or at all."""
    skipped_layers: set[int] = set()
    for event in events:
        attributes = event.attributes
        is_cached = event.operation == "cache" and attributes.get("decision") == "skipped"
        if not is_cached and event.operation != "skip":
            continue
        layer, first_layer = attributes.get("layer"), attributes.get("first")
        if isinstance(layer, int):
            skipped_layers.add(layer)
        elif isinstance(first_layer, int):
            skipped_layers |= set(range(first_layer, plan.layers))
            control_layers = enumerate(plan.control, plan.layers)
            skipped_layers |= {index for index, layer in control_layers if layer >= first_layer}
    return skipped_layers


def _describe_item(item: OrderItem | None) -> str:
    return "the end of the layer" if item is None else f"{item[1]} of chunk {item[0]}"


def format_layer_order(events: Iterable[Event]) -> str:
    """Formats the order in a layer for the log: `0: A2A q k v, FA 0, A2A out | 1: ...`.

    Waits are omitted if all exchanges are synchronous.
    """
    events = list(events)
    has_waits = any(event.attributes.get("beside") for event in events)
    items = [
        (chunk, name)
        for chunk, name in list_recorded_items(events)
        if has_waits or name.split()[0] != "wait"
    ]
    chunk_texts = []
    for chunk, group in groupby(items, key=lambda item: item[0]):
        entries = []
        for operation, operation_names in groupby(
            (name.partition(" ") for _, name in group), lambda name_parts: name_parts[0]
        ):
            entries.append(
                " ".join([operation, *(suffix for *_, suffix in operation_names if suffix)])
            )
        chunk_texts.append(f"{chunk}: {', '.join(entries)}")
    return " | ".join(chunk_texts) or "no exchange and no attention"


@dataclass(frozen=True)
class Trace:
    """The recorded events of one rank.

    Attributes:
        plan: The planned order.
        events: Events sorted by begin.
        metadata: Device, clock, kernel and ID of the run.
    """

    plan: ExchangePlan
    events: Sequence[Event]
    metadata: Mapping[str, str]


_PARSE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_MAX_TIME_US = 1e15  # microseconds
TRACE_KIND = make_json_kind("a trace of generate.py --trace", "traceEvents", "otherData")
_FILE_NAME_PATTERN = re.compile(r"rank(\d{1,5})\.json")


def make_trace_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def write_trace(trace: Trace, folder: Path, origin_ns: int) -> None:
    """Writes the trace file of a rank, under a temporary name until it is complete.

    Args:
        origin_ns: `perf_counter_ns` at time 0 of the trace, the same instant on all ranks.
    """
    rank = trace.plan.rank
    track = {"pid": rank, "tid": 0}
    name_events = [
        {"ph": "M", "name": "process_name", **track, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", **track, "args": {"name": trace.metadata["clock"]}},
    ]
    span_events = [
        {
            "ph": "X",
            "name": format_label(event.operation, event.attributes),
            "cat": event.operation,
            **track,
            "ts": (event.begin - origin_ns) / 1e3,
            "dur": event.duration / 1e3,
            "args": {**event.attributes, "issued": (event.issued - origin_ns) / 1e3},
        }
        for event in trace.events
    ]
    content = {
        "traceEvents": [*name_events, *span_events],
        "displayTimeUnit": "ms",
        "otherData": {"plan": asdict(trace.plan), "about": dict(trace.metadata)},
    }
    with (
        write_output(make_trace_path(folder, rank), TRACE_KIND) as temporary,
        temporary.open("w") as file,
    ):
        json.dump(content, file, allow_nan=False)


def read_traces(folder: Path) -> list[Trace]:
    """Reads the traces of all ranks of a run, sorted by rank.

    Raises:
        InputError: The folder has no traces, lacks a rank, or has invalid files or other runs.
    """
    if not folder.is_dir():
        raise InputError(str(folder), None, "is not a folder", "give the folder of `trace`")
    ranks = sorted(
        int(match[1])
        for path in folder.iterdir()
        if (match := _FILE_NAME_PATTERN.fullmatch(path.name))
    )
    if not ranks:
        raise InputError(str(folder), None, "has no rank0.json", "give the folder of `trace`")
    first_trace = _read_trace_file(make_trace_path(folder, ranks[0]))
    missing_ranks = sorted(set(range(first_trace.plan.world_size)) - set(ranks))
    if missing_ranks:
        why = f"is missing: the run had {first_trace.plan.world_size} ranks"
        remedy = "copy the files of all machines into one folder"
        raise InputError(str(make_trace_path(folder, missing_ranks[0])), None, why, remedy)
    traces = [first_trace, *(_read_trace_file(make_trace_path(folder, rank)) for rank in ranks[1:])]
    for rank, trace in zip(ranks, traces, strict=True):
        if trace.metadata.get("run") != first_trace.metadata.get("run") or trace.plan.rank != rank:
            why = f"is not of the same run as {make_trace_path(folder, ranks[0])}"
            raise InputError(
                str(make_trace_path(folder, rank)), None, why, "trace into an empty folder"
            )
    return traces


def _read_trace_file(path: Path) -> Trace:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        other_data = content["otherData"]
        plan = ExchangePlan.from_record(other_data["plan"])
        metadata = {k: str(v) for k, v in other_data["about"].items()}
        events = [_parse_trace_event(row) for row in content["traceEvents"] if row["ph"] == "X"]
        return Trace(plan, sorted(events, key=lambda event: event.begin), metadata)
    except OSError as error:
        raise InputError(str(path), None, f"cannot be read ({error.strerror})") from error
    except _PARSE_ERRORS as error:
        why = "is not a complete trace of generate.py --trace"
        raise InputError(str(path), None, why, "trace the run again") from error


def _parse_trace_event(row: Mapping[str, Any]) -> Event:
    """Parses an event, converting microseconds to nanoseconds; ValueError for invalid times."""
    begin, length = float(row["ts"]), float(row["dur"])
    attributes = dict(row["args"])
    issued = float(attributes.pop("issued"))
    if not (0 <= length < _MAX_TIME_US and abs(begin) < _MAX_TIME_US and math.isfinite(issued)):
        raise ValueError(f"{str(row['name'])[:40]} has no time")
    for name in (*CONTEXT_KEYS, "what", "decision", "first", "owner"):
        if not isinstance(attributes.get(name), str | int | None):
            raise TypeError(f"{name} is {str(attributes[name])[:40]}")
    times = round(begin * 1e3), round((begin + length) * 1e3), round(issued * 1e3)
    return Event(str(row["cat"]), attributes, *times)
