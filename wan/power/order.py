"""The order of exchanges and attention in a layer: as it is planned, and as a trace shows it.

The plan is derived from `wan.modules.schedule` and a run's sizes alone, never from what ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from wan.modules.schedule import Mode, TokenPlan, head_ranges, mode_of, q_ranges, valid_rows
from wan.settings.numerics import Q_ROWS
from wan.trace import Event

Item = tuple[int, str]
"""(head chunk, what happens), for example (0, "A2A q")."""
Forward = tuple[int, str]
"""(step, guidance branch)."""


@dataclass(frozen=True)
class Plan:
    """What the order in a rank's layers follows from. Part of every trace.

    Attributes:
        rank: Of all ranks, which are laid out as (cfg, ring, ulysses).
        comm_type: A key of MODES.
        overlap: --fa_alltoall_overlap, in place of it.
        chunks: --chunks; None: the mode's own.
        heads: Of the network.
        layers: Of the network.
        tokens: Of the video.
        multiple: A rank's tokens are padded to a multiple of this.
        sizes: (cfg, ring, ulysses).
        ring_type: "ring" or "bidirectional".
        merges: The dense kernel returns the log-sum-exp, so that a ring merges partial results.
        fp8: Attention is in FP8, where it is not sparse.
        fp8_exchange: So are its exchanges, which then have scales.
        sparse_from: The first step of RainFusion; None: never.
        steps: Those that are traced, and the expert of each.
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

    @property
    def world(self) -> int:
        cfg, ring, ulysses = self.sizes
        return cfg * ring * ulysses

    @property
    def mode(self) -> Mode:
        return mode_of(self.comm_type, self.overlap, self.chunks)

    @property
    def ring_rank(self) -> int:
        _, ring, ulysses = self.sizes
        return self.rank // ulysses % ring

    @property
    def valid(self) -> list[int]:
        """Real tokens that each rank of the ring attends from and to."""
        _, ring, ulysses = self.sizes
        rows = TokenPlan(self.tokens, ring * ulysses, self.multiple).shard_len * ulysses
        return [valid_rows(self.tokens, rank, rows) for rank in range(ring)]

    def method(self, step: int) -> str:
        """How a step attends: "rainfusion", "fp8" or "dense"."""
        if self.sparse_from is not None and step >= self.sparse_from:
            return "rainfusion"
        return "fp8" if self.fp8 else "dense"


def expected(plan: Plan, step: int) -> list[Item]:
    """What one layer does in a step, in this order."""
    chunks = head_ranges(plan.heads, plan.sizes[2], plan.mode.chunks)
    exchanges, method = plan.sizes[2] > 1, plan.method(step)
    parts = ("", " scale") if method == "fp8" and plan.fp8_exchange else ("",)
    names = {
        "start": [f"A2A {x}{part}" for part in parts for x in "qkv"],
        "attend": [f"wait {x}{part}" for x in "qkv" for part in parts],
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
    """A chunk between its exchanges: query blocks, each against the keys that there are."""
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
    """Whose keys and values a rank attends to: at first, and after each hop."""
    yield [rank]
    for hop in range(1, size):
        if ring_type == "ring":
            yield [(rank - hop) % size]
        else:
            yield [owner for owner in (rank - hop, rank + hop) if 0 <= owner < size]


_NAMES = {"a2a": "A2A {what}", "a2a wait": "wait {what}", "hop": "hop", "hop wait": "in"}


def found(events: Iterable[Event]) -> list[Item]:
    """What the events of one layer say."""
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
class Difference:
    """The first place where a rank did something else than planned."""

    rank: int
    step: int
    branch: str
    layer: int
    position: int
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, step {self.step} ({self.branch}), layer {self.layer}, position "
            f"{self.position}: expected {self.expected}, found {self.found}"
        )


@dataclass(frozen=True)
class Verdict:
    """How a rank's layers compare with the plan.

    Attributes:
        layers: How many were compared.
        skipped: How many a step cache left out, with their self-attention at least.
        difference: The first; None: as planned.
    """

    layers: int
    skipped: int
    difference: Difference | None


def by_forward(events: Iterable[Event]) -> dict[Forward, list[Event]]:
    """The events of each forward pass, in their order."""
    forwards: dict[Forward, list[Event]] = {}
    for event in events:
        step, branch = event.facts.get("step"), event.facts.get("branch")
        if isinstance(step, int) and isinstance(branch, str):
            forwards.setdefault((step, branch), []).append(event)
    return forwards


def by_layer(events: Iterable[Event]) -> dict[int, list[Event]]:
    """The events of each layer of a forward pass, in their order."""
    layers: dict[int, list[Event]] = {}
    for event in events:
        layer = event.facts.get("layer")
        if isinstance(layer, int):
            layers.setdefault(layer, []).append(event)
    return layers


def compare(plan: Plan, events: Sequence[Event]) -> Verdict:
    """The events of a rank against its plan."""
    compared, skipped, differences = 0, 0, []
    forwards = by_forward(events)
    for step in plan.steps:
        branches = [forward for forward in forwards if forward[0] == step]
        if not branches:
            differences.append(Difference(plan.rank, step, "", 0, 0, "a step", "nothing"))
        for forward in branches:
            layers = by_layer(forwards[forward])
            left_out = _left_out(forwards[forward], plan.layers)
            for layer in range(plan.layers):
                planned = [] if layer in left_out else expected(plan, step)
                differences += _difference(plan, forward, layer, planned, layers.get(layer, []))
            compared, skipped = compared + plan.layers, skipped + len(left_out)
    return Verdict(compared - skipped, skipped, differences[0] if differences else None)


def _left_out(events: Sequence[Event], layers: int) -> set[int]:
    """The layers whose self-attention a step cache skipped in a forward pass."""
    found: set[int] = set()
    for event in events:
        facts = event.facts
        if event.kind != "cache" or facts.get("decision") != "skipped":
            continue
        layer, first = facts.get("layer"), facts.get("first")
        if isinstance(layer, int):
            found.add(layer)
        elif isinstance(first, int):
            found |= set(range(first, layers))
    return found


def _difference(
    plan: Plan, forward: Forward, layer: int, planned: list[Item], events: list[Event]
) -> list[Difference]:
    for place, (a, b) in enumerate(zip_longest(planned, found(events))):
        if a != b:
            return [Difference(plan.rank, *forward, layer, place, _words(a), _words(b))]
    return []


def _words(item: Item | None) -> str:
    return "the end of the layer" if item is None else f"{item[1]} of chunk {item[0]}"


def line(events: Iterable[Event]) -> str:
    """The order in a layer, for a log: `0: A2A q k v, FA 0, A2A out | 1: ...`.

    Waits are left out where an exchange is over when it has been called.
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
