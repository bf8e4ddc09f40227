"""What ranks tell each other through the store before any collective: the same decision for all.

A collective hangs when one rank does not come. A rank that must refuse therefore says so here, and
every rank reads what every other one said before it goes on.

Several processes under torchrun: one decision at the start, one orderly end.

Nothing here is a collective until every rank has said that it can run. On a failing path none is
called at all: the rank says what happened and ends, which ends the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import wan
from wan import device as devices
from wan.checkpoint.files import fingerprint
from wan.cli import env
from wan.cli.resolve import Run
from wan.device import Device
from wan.distributed import launch as agreement
from wan.distributed import mesh
from wan.distributed.mesh import Team
from wan.settings import devices as on_device
from wan.settings.errors import InputError


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


_START = timedelta(minutes=10)  # until the slowest rank has looked at its checkpoint
_OWN = ("ckpt_dir", "quant_dit_path", "save_file", "image", "base_seed")  # may differ


def run(resolve: Callable[[], Run], work: Callable[[Run, Team], None]) -> int:
    """Resolve, agree with the other ranks, and carry out; returns the exit code.

    Exit codes as for one process. A rank that fails does not return: it ends its process.
    """
    rank = env.rank()
    try:
        store = _open_store()
        # A connection of its own, so that no other wait gets its short timeout.
        last_words: dist.Store = store.clone()  # type: ignore[attr-defined]
        last_words.set_timeout(timedelta(seconds=5))
        request, device = _agreed(store, resolve)
    except InputError as error:
        if env.local_rank() == 0:  # one voice per machine
            _say(str(error))
        return 2
    try:
        p = request.parallel
        timeout = timedelta(minutes=p.dist_timeout)
        store.set_timeout(timeout)  # groups on accelerators meet through it when first used
        sizes = (p.cfg_size, p.ring_size, p.ulysses_size)
        work(request, mesh.join(store, device, sizes, timeout))
    except BaseException as error:
        _end(last_words, rank, error)
    return 0


def _open_store() -> dist.Store:
    try:
        return mesh.open_store(_START)
    except (RuntimeError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"The other processes cannot be reached ({reason}); start all of them with torchrun "
            "and choose a free --master_port."
        ) from error


def _agreed(store: dist.Store, resolve: Callable[[], Run]) -> tuple[Run, Device]:
    """This rank's run and device. InputError, the same everywhere, if any rank cannot.

    The main rank's seed is everybody's.
    """
    resolved: tuple[Run, Device] | None = None
    error, facts, offers = None, {}, {}
    try:
        request = resolve()
        resolved = request, _device(request)
        facts, offers = _facts(*resolved), {"seed": request.request.seed}
    except InputError as reason:
        error = str(reason)
    except Exception as reason:  # a defect of ours: the others are not left waiting for this rank
        traceback.print_exc()
        error = f"{type(reason).__name__}: {reason}."
    try:
        said = agreement.exchange(
            store, env.rank(), env.world_size(), error=error, facts=facts, offers=offers
        )
    except dist.DistStoreError as late:
        raise InputError(f"Not all processes have come in {_START}; start all of them.") from late
    refusal = agreement.verdict(said)
    if refusal is not None or resolved is None:
        raise InputError(refusal or "")
    request, device = resolved
    seed = said[0].offers["seed"]
    request = replace(
        request,
        request=replace(request.request, seed=seed),
        settings={**request.settings, "base_seed": seed},
    )
    return request, device


def _device(request: Run) -> Device:
    device = devices.resolve(request.execution.device, env.local_rank())
    on_device.check(
        request.execution,
        request.attention,
        request.quantised,
        request.checkpoint.head_dim,
        device.type,
        device.chip,
    )
    return device


def _facts(request: Run, device: Device) -> dict[str, Any]:
    """What has to be equal on all ranks, under the names a user knows."""
    settings = {f"--{k}": v for k, v in request.settings.items() if k not in _OWN}
    topology = {f"--{k}": v for k, v in asdict(request.parallel).items()}
    quantised = None if request.quantised is None else request.quantised.files()
    return {
        **settings,
        **topology,
        "--quant_alltoall": request.attention.quant_alltoall,
        "--fa_freq_cap": request.attention.freq_cap,
        "--fa_freq_restore": request.attention.freq_restore,
        "the content of --quant_dit_path": quantised and fingerprint(quantised),
        "the video's size": request.request.video_size,
        "the device": device.type,
        "the checkpoint's content": fingerprint(request.checkpoint.files()),
        "the version of wan": wan.__version__,
    }


def _end(store: dist.Store, rank: int, error: BaseException) -> None:
    """Say what happened (the rank that failed first in full, the others in a line), and end."""
    try:
        first = store.compare_set("failed", "", str(rank)).decode()
    except Exception:  # the store's machine may be the one that is gone
        first = "another"
    if isinstance(error, KeyboardInterrupt):
        if rank == 0:
            _say("interrupted; no video was written.")
    elif first != str(rank) and isinstance(error, InputError):
        pass  # most likely what the first one has said
    elif first != str(rank):
        _say(f"rank {rank} ends because rank {first} failed.")
    elif isinstance(error, InputError):
        _say(str(error))
    elif _is_lost_peer(error):
        _say(f"rank {rank} lost another rank ({str(error).strip().splitlines()[0]}).")
    else:
        traceback.print_exception(error)
        _say(f"rank {rank} failed: {type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    codes = {InputError: 2, KeyboardInterrupt: 130}
    os._exit(codes.get(type(error), 1))  # no destructors: they wait for the other ranks


def _is_lost_peer(error: BaseException) -> bool:
    words = ("Connection closed", "Connection reset", "Timed out waiting", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _say(text: str) -> None:
    print(f"generate.py: {' '.join(text.split())}", file=sys.stderr, flush=True)
