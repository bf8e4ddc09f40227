"""What ranks tell each other through the store before any collective: the same decision for all.

A collective hangs when one rank does not come. A rank that must refuse therefore says so here, and
every rank reads what every other one said before it goes on.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Statement:
    """One rank at the start. error: why it cannot run. facts: what must be equal everywhere.

    offers: what is only said, such as the seed that others take from the main rank.
    """

    host: str
    error: str | None
    facts: Mapping[str, Any]
    offers: Mapping[str, Any]


def exchange(
    store: dist.Store,
    rank: int,
    world: int,
    *,
    error: str | None,
    facts: Mapping[str, Any],
    offers: Mapping[str, Any],
) -> list[Statement]:
    """Every rank's statement, by rank; returns when all have made theirs.

    Raises torch.distributed.DistStoreError when the store's timeout passes first.
    """
    own = Statement(socket.gethostname(), error, facts, offers)
    store.set(f"statement/{rank}", json.dumps(asdict(own)))
    store.wait([f"statement/{other}" for other in range(world)])
    found = [Statement(**json.loads(store.get(f"statement/{other}"))) for other in range(world)]
    if store.add("statements/read", 1) == world:
        store.set("statements/done", "")
    if rank == 0:  # it may be the one that holds the store
        store.wait(["statements/done"])
    return found


def verdict(statements: Sequence[Statement]) -> str | None:
    """Why the run cannot start, in one sentence that is the same on every rank; None if it can."""
    for rank, statement in enumerate(statements):
        if statement.error is not None:
            alone = any(other.error != statement.error for other in statements)
            return _who(rank, statement) + statement.error if alone else statement.error
    main = statements[0]
    for rank, statement in enumerate(statements):
        for name in sorted(main.facts.keys() | statement.facts.keys()):
            ours, theirs = (s.facts.get(name, "not given") for s in (main, statement))
            if ours != theirs:
                return (
                    f"{_who(rank, statement)}{name} is {theirs}, but {ours} on rank 0; "
                    "start all ranks alike."
                )
    return None


def _who(rank: int, statement: Statement) -> str:
    return f"rank {rank} on {statement.host}: "
