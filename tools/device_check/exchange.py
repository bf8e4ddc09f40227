"""Step 10: exchanges between ranks, and a rank that is late to the first exchange.

Legend: s this rank's tokens, N all heads, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tools.device_check.bench import HEAD, Bench, format_ranks
from tools.device_check.steps import Figure, Line, Measurements, make_line, make_time
from wan.distributed import mesh
from wan.distributed.ring import RING_TYPES, Ring
from wan.distributed.ulysses import (
    Group,
    all_gather_tokens,
    all_to_all_4D,
    get_group_rank,
    get_group_size,
)
from wan.settings.parallel import enumerate_topologies
from wan.testing import measuring

HEADS = 40
LATE = 2.0  # seconds; with --full longer than HCCL's default timeout of a link
LATE_FULL = 130.0
AXES = (("ulysses",), ("ring",), ("cfg",), ("ring", "ulysses"))


def check_groups(bench: Bench) -> Measurements:
    """Checks all-to-all, all-gather and P2P along every axis of every topology; measures rates."""
    world = dist.get_world_size()
    for sizes in enumerate_topologies(world, HEADS * world):  # divisible by every size
        team = mesh.make_parallel_groups(bench.device, sizes)
        for axes in AXES:
            group = team.group(*axes)
            if get_group_size(group) > 1:
                yield from _check_group(bench, group, f"{format_ranks(sizes)}: {'+'.join(axes)}")


def _check_group(bench: Bench, group: Group, label: str) -> Iterator[Line]:
    ranks, rank = get_group_size(group), get_group_rank(group)
    tokens = 75_600 // ranks if bench.large else 512 // ranks
    x_BsND = _make_coded(bench, rank, tokens, ranks)
    wanted = torch.cat([_make_coded(bench, r, tokens, ranks) for r in range(ranks)], 1)

    def measure_exchange(name: str, run: measuring.Work, sent: float, wrong: int) -> Line:
        dist.barrier()
        seconds = bench.measure_seconds(run)
        return make_line(
            f"{label}, {name}",
            Figure("wrong values", wrong, "", 0),
            make_time(seconds),
            Figure("sent by a rank", sent / seconds / 1e9, "GB/s"),
        )

    def exchange_heads() -> Tensor:
        return all_to_all_4D(x_BsND, 2, 1, group)

    arrived, bytes_of_others = exchange_heads(), x_BsND.nbytes * (ranks - 1)
    wrong = _count_different(arrived, wanted[:, :, rank * 8 : (rank + 1) * 8])
    wrong += _count_different(all_to_all_4D(arrived, 1, 2, group), x_BsND)
    yield measure_exchange("all-to-all", exchange_heads, bytes_of_others / ranks, wrong)
    wrong = _count_different(all_gather_tokens(x_BsND, group), wanted)
    yield measure_exchange(
        "all-gather", lambda: all_gather_tokens(x_BsND, group), bytes_of_others, wrong
    )
    for kind in RING_TYPES:
        ring = Ring(group, kind)
        blocks = ring.exchange_blocks(x_BsND, x_BsND)
        wrong = sum(_count_different(k, _make_coded(bench, r, tokens, ranks)) for r, k, _ in blocks)
        bytes_sent = 2 * x_BsND.nbytes * len(ring.hops)
        yield measure_exchange(
            f"P2P, {kind}", partial(_pass_blocks, ring, x_BsND), bytes_sent, wrong
        )


def _pass_blocks(ring: Ring, x_BsND: Tensor) -> None:
    for _ in ring.exchange_blocks(x_BsND, x_BsND):
        pass


def _make_coded(bench: Bench, rank: int, tokens: int, ranks: int) -> Tensor:
    """Makes [1,s,N,D] bfloat16, 8 heads per rank; the values encode rank, token and head."""
    token = torch.arange(tokens, device=bench.torch_device, dtype=torch.float32) % 7
    head = torch.arange(8 * ranks, device=bench.torch_device, dtype=torch.float32) % 7
    values = 64 * (rank % 4) + 8 * token[:, None] + head  # integers below 256 are exact
    return values.bfloat16()[None, :, :, None].expand(-1, -1, -1, HEAD).contiguous()


def _count_different(values: Tensor, wanted: Tensor) -> int:
    return int((values != wanted).sum())


def check_slow_rank(bench: Bench) -> Measurements:
    """Checks that ranks wait for a last rank that is late to the first exchange of a new group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    late = LATE_FULL if bench.full else LATE
    for axis, sizes in (("ulysses", (1, 1, ranks)), ("ring", (1, ranks, 1))):
        group = mesh.make_parallel_groups(bench.device, sizes).group(axis)
        dist.barrier()
        if rank == ranks - 1:
            time.sleep(late)
        start = time.perf_counter()
        x = _make_coded(bench, rank, 16, ranks)
        if axis == "ulysses":
            wrong = _count_different(all_to_all_4D(all_to_all_4D(x, 2, 1, group), 1, 2, group), x)
        else:
            blocks = Ring(group).exchange_blocks(x, x)
            wrong = sum(_count_different(k, _make_coded(bench, r, 16, ranks)) for r, k, _ in blocks)
        bench.device.synchronize()
        yield make_line(
            f"{axis}, a rank {late:g} s late",
            Figure("wrong values", wrong, "", 0),
            Figure("the first rank waited", time.perf_counter() - start, "s"),
        )
