"""Reads the variables of torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass

from wan.settings.errors import InputError


@dataclass(frozen=True)
class RankEnv:
    """The environment variables of torchrun or another launcher."""

    rank: int
    world_size: int  # the number of ranks
    local_rank: int  # among the ranks of this node
    node: str  # number of torchrun's agent
    address: str  # of the machine of rank 0, where the store is
    port: int  # of the store
    torchrun: bool  # torchrun's agent is the parent process
    holds_store: bool  # this rank opens the store; under torchrun its agent does
    attempt: str  # torchrun's restart count; its store keeps the keys of earlier attempts


def read_rank_env() -> RankEnv:
    """Reads the launcher's variables; `wan.utils.env` has validated ranks and world sizes.

    Raises:
        InputError: MASTER_ADDR or MASTER_PORT is missing or malformed.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address:
        raise InputError("MASTER_ADDR", None, "is not set, but WORLD_SIZE is", "use torchrun")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InputError("MASTER_PORT", repr(port), "is not a port (1 to 65535)", "use torchrun")
    rank, agent = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    return RankEnv(
        rank,
        int(os.environ["WORLD_SIZE"]),
        int(os.environ["LOCAL_RANK"]),
        os.environ.get("GROUP_RANK", ""),
        address,
        int(port),
        torchrun="TORCHELASTIC_RUN_ID" in os.environ,
        holds_store=rank == 0 and agent != "True",
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
