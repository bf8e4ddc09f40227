"""Traces as files: one of each rank, in the JSON that Chrome and Perfetto show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wan.checkpoint.files import whole_file
from wan.power.order import Plan
from wan.settings.errors import InputError
from wan.trace import Event, label


@dataclass(frozen=True)
class Trace:
    """What one rank recorded.

    Attributes:
        plan: What the order in its layers follows from.
        events: In the order in which they began.
        about: The device, the clock, the kernel and what else a reader wants to know.
    """

    plan: Plan
    events: Sequence[Event]
    about: Mapping[str, str]


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def write(trace: Trace, folder: Path, zero: int) -> None:
    """The file of a rank, under a temporary name until it is whole.

    zero: the nanosecond that is time 0 on all ranks.
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
    with whole_file(file_of(folder, rank)) as temporary, temporary.open("w") as file:
        json.dump(content, file, allow_nan=False)


def read(folder: Path) -> list[Trace]:
    """The traces of all ranks of a run, by rank.

    Raises:
        InputError: The folder has none, or not all, or files that are no traces or of other runs.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; give the one that --trace named.")
    ranks = sorted(
        int(match[1]) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))
    )
    if not ranks:
        raise InputError(f"{folder} holds no rank0.json, ...; give the folder that --trace named.")
    first = _read(file_of(folder, ranks[0]))
    lacking = sorted(set(range(first.plan.world)) - set(ranks))
    if lacking:
        raise InputError(
            f"{file_of(folder, lacking[0])} is missing: the run had {first.plan.world} ranks; copy "
            "the files of all machines into one folder."
        )
    traces = [first, *(_read(file_of(folder, rank)) for rank in ranks[1:])]
    for rank, trace in zip(ranks, traces, strict=True):
        if trace.about.get("run") != first.about.get("run") or trace.plan.rank != rank:
            raise InputError(
                f"{file_of(folder, rank)} is not of the same run as {file_of(folder, ranks[0])}; "
                "trace into an empty folder."
            )
    return traces


_FILE = re.compile(r"rank(\d{1,5})\.json")


def _read(path: Path) -> Trace:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        other = content["otherData"]
        plan = {**other["plan"], "sizes": tuple(other["plan"]["sizes"])}
        plan["steps"] = {int(step): str(name) for step, name in plan["steps"].items()}
        events = [_event(row) for row in content["traceEvents"] if row["ph"] == "X"]
        trace = Trace(Plan(**plan), sorted(events, key=lambda event: event.begin), other["about"])
        _ = trace.plan.mode, trace.plan.valid  # they can be had
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path} is no whole trace of generate.py --trace ({reason}); trace the run again."
        ) from error
    return trace


def _event(row: Mapping[str, Any]) -> Event:
    """Nanoseconds again; ValueError for times that are none."""
    begin, length = float(row["ts"]), float(row["dur"])
    facts = dict(row["args"])
    issued = float(facts.pop("issued"))
    if not all(map(math.isfinite, (begin, length, issued))) or length < 0:
        raise ValueError(f"{row['name']} has no time")
    times = round(begin * 1e3), round((begin + length) * 1e3), round(issued * 1e3)
    return Event(str(row["cat"]), facts, *times)
