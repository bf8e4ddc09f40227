"""Ring attention (arXiv:2310.01889): ranks pass on K/V blocks and merge results by log-sum-exp.

Legend: B batch, S tokens of a ring rank, N heads, D head size, R ranks in the ring.

Each rank starts with the K/V block of its tokens. A hop starts before the rank attends to the
blocks of the previous hop, so communication and attention overlap. A rank holds its local block and
the blocks of two hops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wan.distributed.ulysses import (
    Group,
    all_gather_tokens,
    get_group_rank,
    get_group_size,
    to_process_group,
    view_bytes_as_uint8,
)
from wan.settings.parallel import RING_TYPES
from wan.utils import trace
from wan.utils.partial_attention import KvBlock, LseMerger, attend_to_blocks


@dataclass(frozen=True)
class Hop:
    """The sends and receives of one rank in one hop: pairs (peer, owner's rank of the block)."""

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


def plan_hops(ring_type: str, rank: int, size: int) -> tuple[Hop, ...]:
    """Returns the R - 1 hops of a rank, in which it receives the block of each other rank once.

    "ring" sends every block in one direction. "bidirectional" sends blocks in both directions along
    the line 0..R-1 and does not use the link between the last and the first rank.
    """
    if ring_type not in RING_TYPES:
        raise ValueError(f"ring_type is {ring_type!r}; use one of {', '.join(RING_TYPES)}.")
    plan = []
    for hop in range(1, size):
        if ring_type == "ring":
            next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
            plan.append(
                Hop(
                    ((next_rank, (rank - hop + 1) % size),), ((previous_rank, (rank - hop) % size),)
                )
            )
            continue
        sends = [(rank + 1, rank - hop + 1), (rank - 1, rank + hop - 1)]
        receives = [(rank - 1, rank - hop), (rank + 1, rank + hop)]
        plan.append(
            Hop(
                tuple(
                    (peer, owner) for peer, owner in sends if 0 <= peer < size and 0 <= owner < size
                ),
                tuple((peer, owner) for peer, owner in receives if 0 <= owner < size),
            )
        )
    return tuple(plan)


class Ring:
    """Ring attention over the ranks that share a sequence.

    Args:
        ring_type: One of RING_TYPES; ValueError for another one.
        device_type: Type of the device whose kernels compute; None: that of the tensors.
    """

    def __init__(
        self, group: Group, ring_type: str = "ring", device_type: str | None = None
    ) -> None:
        self.group, self.ring_type, self.device_type = group, ring_type, device_type
        self.size, self.rank = get_group_size(group), get_group_rank(group)
        self.hops = plan_hops(ring_type, self.rank, self.size)

    def exchange_blocks(self, k: Tensor, v: Tensor) -> Iterator[KvBlock]:
        """Yields the blocks of all ranks, the local one first; every rank must consume them all."""
        ready: dict[int, tuple[Tensor, Tensor]] = {self.rank: (k, v)}
        group = to_process_group(self.group)
        for hop in self.hops:
            arriving = {
                owner: (torch.empty_like(k), torch.empty_like(v)) for _, owner in hop.receives
            }
            operations = [
                dist.P2POp(p2p_op, view_bytes_as_uint8(tensor), group=group, group_peer=peer)
                for p2p_op, pairs, blocks in (
                    (dist.isend, hop.sends, ready),
                    (dist.irecv, hop.receives, arriving),
                )
                for peer, owner in pairs
                for tensor in blocks[owner]
            ]
            sent_bytes = sum(x.nbytes for _, owner in hop.sends for x in ready[owner])
            with trace.span("hop", bytes=sent_bytes):
                works = dist.batch_isend_irecv(operations) if operations else []
            yield from ((owner, *kv) for owner, kv in ready.items())
            with trace.span("hop wait"):
                for work in works:
                    work.wait()
            ready = arriving
        yield from ((owner, *kv) for owner, kv in ready.items())

    def attend(
        self,
        attend_with_lse: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        q_blocks: Sequence[Tensor],
        k: Tensor,
        v: Tensor,
        valid_rows: Sequence[int],
    ) -> list[Tensor]:
        """Computes attention of each query block to the keys of all ranks.

        Rank i has `valid_rows[i]` rows without padding. Partial results are merged by their
        log-sum-exp.
        """
        mergers = [LseMerger(self.device_type) for _ in q_blocks]
        attend_to_blocks(attend_with_lse, q_blocks, self.exchange_blocks(k, v), valid_rows, mergers)
        return [merger.result().to(k.dtype) for merger in mergers]

    def gather(self, x: Tensor) -> Tensor:
        """Gathers K or V of all ranks, [B,R*S,N,D], for kernels that return no log-sum-exp."""
        return all_gather_tokens(x, self.group)
