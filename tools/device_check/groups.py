"""Step 10: exchanges between ranks, in every group that a run forms, and a rank that is late.

Legend: B batch, s this rank's tokens, S the group's, N all heads, h heads of a rank, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import common
from tools.device_check.bench import HEAD, Bench, ranks_text
from tools.device_check.steps import Figure, Line, line
from wan.distributed import mesh
from wan.distributed.exchange import Group, all_gather_tokens, all_to_all_4D, group_rank, group_size
from wan.distributed.mesh import Team
from wan.distributed.ring import RING_TYPES, Ring
from wan.settings.parallel import legal

HEADS = 40
LATE = 2.0  # seconds; with --full longer than HCCL waits for a link by default
LATE_FULL = 130.0
AXES = (("ulysses",), ("ring",), ("cfg",), ("ring", "ulysses"))


def joined(bench: Bench) -> Team:
    """All ranks of a step that is carried out together."""
    assert bench.team is not None, "the step is carried out together"
    return bench.team


def groups(bench: Bench) -> Iterator[Line]:
    """All-to-all, all-gather and P2P along every axis of every topology: what arrives, how fast."""
    world = dist.get_world_size()
    joined(bench)
    for sizes in legal(world, HEADS * world):  # heads that every size divides
        team = mesh.form(bench.device, sizes)
        for axes in AXES:
            if group_size(team.group(*axes)) > 1:
                yield from _group(
                    bench, team.group(*axes), f"{ranks_text(sizes)}: {'+'.join(axes)}"
                )


def _group(bench: Bench, group: Group, what: str) -> Iterator[Line]:
    ranks, rank = group_size(group), group_rank(group)
    tokens = 75_600 // ranks if bench.large else 512 // ranks
    x_BsND = _coded(bench, rank, tokens, ranks)

    def there() -> Tensor:
        return all_to_all_4D(x_BsND, 2, 1, group)

    arrived = there()
    wanted = torch.cat([_coded(bench, r, tokens, ranks) for r in range(ranks)], 1)
    mine = slice(rank * 8, (rank + 1) * 8)
    wrong = _different(arrived, wanted[:, :, mine])
    back = _different(all_to_all_4D(arrived, 1, 2, group), x_BsND)
    sent = x_BsND.nbytes * (ranks - 1) / ranks
    yield _exchange(f"{what}, all-to-all", bench, there, sent, wrong + back)
    gathered = _different(all_gather_tokens(x_BsND, group), wanted)
    yield _exchange(
        f"{what}, all-gather",
        bench,
        lambda: all_gather_tokens(x_BsND, group),
        x_BsND.nbytes * (ranks - 1),
        gathered,
    )
    for kind in RING_TYPES:
        ring = Ring(group, kind)

        blocks = ring.blocks(x_BsND, x_BsND)
        wrong = sum(_different(k, _coded(bench, r, tokens, ranks)) for r, k, _ in blocks)
        moved = 2 * x_BsND.nbytes * len(ring.hops)
        yield _exchange(f"{what}, P2P, {kind}", bench, partial(_pass, ring, x_BsND), moved, wrong)


def _pass(ring: Ring, x_BsND: Tensor) -> None:
    for _ in ring.blocks(x_BsND, x_BsND):
        pass


def _coded(bench: Bench, rank: int, tokens: int, ranks: int) -> Tensor:
    """[1,s,N,D] bfloat16, 8 heads for each rank: values that say whose, which token and head."""
    token = torch.arange(tokens, device=bench.place, dtype=torch.float32) % 7
    head = torch.arange(8 * ranks, device=bench.place, dtype=torch.float32) % 7
    values = 64 * (rank % 4) + 8 * token[:, None] + head  # whole numbers below 256 are exact
    return values.bfloat16()[None, :, :, None].expand(-1, -1, -1, HEAD).contiguous()


def _different(found: Tensor, wanted: Tensor) -> int:
    return int((found != wanted).sum())


def _exchange(what: str, bench: Bench, run: common.Run, sent: float, wrong: int) -> Line:
    dist.barrier()
    taken = bench.seconds(run)
    return line(
        what,
        Figure("wrong values", wrong, "", 0),
        Figure("time", 1e3 * taken, "ms"),
        Figure("sent by a rank", sent / taken / 1e9, "GB/s"),
    )


def slow_rank(bench: Bench) -> Iterator[Line]:
    """The last rank comes late to the first exchange of a new group; the others must wait."""
    rank, ranks = joined(bench).rank, dist.get_world_size()
    late = LATE_FULL if bench.full else LATE
    for axis, sizes in (("ulysses", (1, 1, ranks)), ("ring", (1, ranks, 1))):
        group = mesh.form(bench.device, sizes).group(axis)
        dist.barrier()
        if rank == ranks - 1:
            time.sleep(late)
        start = time.perf_counter()
        x = _coded(bench, rank, 16, ranks)
        if axis == "ulysses":
            wrong = _different(all_to_all_4D(all_to_all_4D(x, 2, 1, group), 1, 2, group), x)
        else:
            blocks = Ring(group).blocks(x, x)
            wrong = sum(_different(k, _coded(bench, r, 16, ranks)) for r, k, _ in blocks)
        bench.device.synchronize()
        yield line(
            f"{axis}, a rank {late:g} s late",
            Figure("wrong values", wrong, "", 0),
            Figure("the first rank waited", time.perf_counter() - start, "s"),
        )
