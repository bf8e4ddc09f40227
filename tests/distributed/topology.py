"""Process groups of a Ulysses x ring layout for tests, and the list of possible layouts.

Rank = ring rank * P + Ulysses rank, so rank i has shard i of the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist import run_on_ranks
from wan.distributed.ring import RING_TYPES, Ring
from wan.distributed.ulysses import Group
from wan.kernels.interfaces import AttentionBackend, Kernel
from wan.modules.attnlayer import FAPowerCapAttention
from wan.settings.attention_modes import MODES, OVERLAP, Mode, TokenPlan

ROWS: dict[str, Mode] = {str(comm_type): row for comm_type, row in MODES.items()}
ROWS["overlap"] = OVERLAP


class Topology(NamedTuple):
    """P x R ranks of one sequence."""

    ulysses: int
    ring: int
    ring_type: str = "ring"

    @property
    def world(self) -> int:
        return self.ulysses * self.ring


def topologies(*worlds: int) -> list[Topology]:
    """List all layouts of these numbers of ranks; a ring of one rank has no type."""
    return [
        Topology(world // ring, ring, ring_type)
        for world in worlds
        for ring in range(1, world + 1)
        if world % ring == 0
        for ring_type in RING_TYPES[: 1 if ring == 1 else None]
    ]


def collect_failures(cases: Sequence[Any], check: Callable[[Any], None]) -> dict[str, str]:
    """Map each case that fails to its error message."""
    failures = {}
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failures[str(case)] = str(error)
    return failures


def check_on_ranks(work: Callable[..., dict[str, str]], cases: Sequence[Any], *args: Any) -> None:
    """Call work(cases, *args), which returns failures, on the ranks of the first case's layout."""
    results = run_on_ranks(cases[0][0].world, work, cases, *args, timeout=600)
    assert not {rank: failures for rank, failures in enumerate(results) if failures}


def shard(x_BSND: Tensor, plan: TokenPlan, fill: float) -> Tensor:
    """Return this rank's tokens, padded with `fill`."""
    first, valid = dist.get_rank() * plan.shard_len, plan.count_valid_tokens(dist.get_rank())
    missing = plan.shard_len - valid
    return F.pad(x_BSND[:, first : first + valid], [0, 0, 0, 0, 0, missing], value=fill)


def groups(ulysses: int, ring: int) -> tuple[Group, Group]:
    """Return this rank's Ulysses and ring group; all ranks of a pool make them once."""
    return _groups(ulysses, ring, dist.group.WORLD)


@lru_cache(4)
def _groups(ulysses: int, ring: int, _: Group) -> tuple[Group, Group]:
    rows = [[r * ulysses + u for u in range(ulysses)] for r in range(ring)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    limit = timedelta(seconds=60)  # new groups do not inherit the timeout of the default group
    return tuple(dist.new_subgroups_by_enumeration(ranks, limit)[0] for ranks in (rows, columns))


def attention_layer(
    topology: Topology,
    mode: str,
    kernel: Kernel | None = None,
    methods: Sequence[AttentionBackend] = (),
    exchange: str = "split",
    chunks: int | None = None,
) -> FAPowerCapAttention:
    """Make an attention layer. mode: a key of ROWS."""
    ulysses_group, ring_group = groups(topology.ulysses, topology.ring)
    args = SimpleNamespace(comm_type=int(mode) if mode.isdigit() else 0)
    return FAPowerCapAttention(
        args,
        ulysses_group,
        mode == "overlap",
        kernel=kernel,
        ring=Ring(ring_group, topology.ring_type),
        methods=methods,
        exchange=exchange,
        chunks=chunks,
    )


def make_block_attention(layer: FAPowerCapAttention) -> Callable[[int], FAPowerCapAttention]:
    """Return a function that makes each block's attention: a copy with the block's index."""

    def make(index: int) -> FAPowerCapAttention:
        block_layer = copy(layer)
        block_layer.layer = index
        return block_layer

    return make


class Collectives(TorchDispatchMode):
    """Counts the operations between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))
