"""Sequence-parallel self-attention with FA_Power_Cap: attention in pieces, communication between.

Legend: B batch, s this card's tokens, S all tokens, R ring size, P Ulysses size, N all heads,
N_c heads of a chunk, h_c = N_c / P, D head size.

The chip is to rest between pieces of attention, and the exchanges that have to happen anyway are
the rests. A mode is a row: how many chunks of heads, how many blocks of queries, which order.

| | chunks | query blocks | order |
|---|---|---|---|
| baseline (comm_type 0) | 1 | 1 | in order |
| InsertComm (1) | up to 10 | 1 | in order |
| BlockAttn (2) | up to 10 | 2 | in order |
| A2A/FA overlap | up to 10 | 1 | pipelined: the opposite aim, exchanges hidden, no rests |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wan.distributed.exchange import Group, Pending, group_size, start_all_to_all_4D
from wan.distributed.ring import Merged, Ring
from wan.kernels.base import Kernel
from wan.kernels.sdpa import SdpaKernel
from wan.modules import schedule
from wan.modules.schedule import Event, Range
from wan.modules.step import StepInfo

COMM_TYPES = (0, 1, 2)
Order = Callable[[int], Iterator[Event]]
QKV = tuple[Tensor, Tensor, Tensor]


class FAPowerCapAttention:
    """Self-attention over all tokens of the video, each card holding some of them.

    args: any object with `comm_type` (0 baseline, 1 InsertComm, 2 BlockAttn). ulysses_pg: the cards
    that exchange heads for tokens. fa_alltoall_overlap: hide exchanges under attention; comes
    before comm_type. kernel: dense attention, default the one of the tensors' device. ring: the
    cards that pass K/V round, default none. For inference: exchanges have no gradient.

    Raises ValueError for another comm_type.
    """

    def __init__(
        self,
        args: Any,
        ulysses_pg: Group,
        fa_alltoall_overlap: bool = False,
        *,
        kernel: Kernel | None = None,
        ring: Ring | None = None,
    ) -> None:
        if args.comm_type not in COMM_TYPES:
            raise ValueError(f"comm_type must be 0, 1, or 2, but got {args.comm_type}.")
        self.args, self.ulysses_pg = args, ulysses_pg
        self.fa_alltoall_overlap, self.comm_type = fa_alltoall_overlap, args.comm_type
        self.world_size = group_size(ulysses_pg)
        self.kernel: Kernel = SdpaKernel() if kernel is None else kernel
        self.ring = ring if ring is not None and ring.size > 1 else None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        valid_len: int | None = None,
        step: StepInfo | None = None,
        layer: int | None = None,
    ) -> Tensor:
        """[B,s,N,D] in and out: this card's tokens, all heads, after QK-norm and RoPE.

        valid_len: real tokens of the whole sequence; what lies behind them is never attended to,
        and its rows of the result are zeros. Raises ValueError where P does not divide N.
        """
        heads = query.shape[2]
        if heads % self.world_size:
            raise ValueError(
                f"head_count must be divisible by ulysses world size, but got "
                f"head_count={heads}, world_size={self.world_size}."
            )
        if self.fa_alltoall_overlap:
            return self._run_fa_alltoall_overlap((query, key, value), valid_len)
        if self.comm_type == 1:
            return self._run_insertcomm((query, key, value), valid_len)
        if self.comm_type == 2:
            return self._run_blockattn((query, key, value), valid_len)
        return self._run_baseline((query, key, value), valid_len)

    def _run_baseline(self, qkv: QKV, valid_len: int | None) -> Tensor:
        return self._run(qkv, valid_len, chunks=1, blocks=1, order=schedule.in_order)

    def _run_insertcomm(self, qkv: QKV, valid_len: int | None) -> Tensor:
        return self._run(qkv, valid_len, blocks=1, order=schedule.in_order)

    def _run_blockattn(self, qkv: QKV, valid_len: int | None) -> Tensor:
        return self._run(qkv, valid_len, blocks=2, order=schedule.in_order)

    def _run_fa_alltoall_overlap(self, qkv: QKV, valid_len: int | None) -> Tensor:
        return self._run(qkv, valid_len, blocks=1, order=schedule.pipelined)

    def _run(
        self,
        qkv: QKV,
        valid_len: int | None,
        *,
        blocks: int,
        order: Order,
        chunks: int = schedule.MAX_CHUNKS,
    ) -> Tensor:
        """The one loop of all modes: `order` says what happens to which chunk, one by one.

        No exchange in is started before the last chunk finished so far, also where it is compiled.
        """
        ranges = schedule.head_ranges(qkv[0].shape[2], self.world_size, chunks)
        split = self._split_qkv_by_head(qkv, ranges)
        overlap = order is schedule.pipelined
        out_BsND: Tensor | None = None  # not made before it is needed: attention is the peak
        incoming: dict[int, list[Pending]] = {}
        outgoing: dict[int, Pending] = {}
        finished: Pending | None = None
        for verb, chunk in order(len(ranges)):
            if verb == "start":
                incoming[chunk] = self._exchange_in(split[chunk], overlap, finished)
            elif verb == "attend":
                result = self._attention_forward(incoming.pop(chunk), valid_len, blocks)
                outgoing[chunk] = self._exchange_out(result, overlap)
                del result
            else:
                first, last = ranges[chunk]
                finished = outgoing.pop(chunk)
                out_BsND = torch.empty_like(qkv[0]) if out_BsND is None else out_BsND
                finished.wait(into=out_BsND[:, :, first:last])
        assert out_BsND is not None, "there is no chunk"
        return out_BsND

    def _split_qkv_by_head(self, qkv: QKV, ranges: tuple[Range, ...]) -> list[QKV]:
        """Views of the chunks' heads."""
        q, k, v = qkv
        return [(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for a, b in ranges]

    def _exchange_in(self, qkv_BsND: QKV, overlap: bool, after: Pending | None) -> list[Pending]:
        """Heads scattered, tokens gathered: three exchanges."""
        return [
            start_all_to_all_4D(x, 2, 1, self.ulysses_pg, async_op=overlap, after=after)
            for x in qkv_BsND
        ]

    def _exchange_out(self, out_BSND: Tensor, overlap: bool) -> Pending:
        return start_all_to_all_4D(out_BSND, 1, 2, self.ulysses_pg, async_op=overlap)

    def _attention_forward(
        self, incoming: list[Pending], valid_len: int | None, blocks: int
    ) -> Tensor:
        """One chunk [B,S/R,h_c,D]: queries in blocks, each against all keys; padding cut away."""
        q, k, v = (pending.wait() for pending in incoming)
        incoming.clear()
        rows = q.shape[1]
        valid = self._valid_rows(rows, valid_len)
        mine = valid[0 if self.ring is None else self.ring.rank]
        ranges = [(a, b) for a, b in schedule.q_ranges(mine, blocks) if a < b]
        attended = self._attend([q[:, a:b] for a, b in ranges], k, v, valid)
        if ranges == [(0, rows)]:
            return attended[0]
        out = torch.empty_like(q)
        for (a, b), part in zip(ranges, attended, strict=True):
            out[:, a:b] = part
        out[:, mine:] = 0
        return out

    def _valid_rows(self, rows: int, valid_len: int | None) -> list[int]:
        """Real tokens that each card of the ring holds."""
        cards = 1 if self.ring is None else self.ring.size
        total = cards * rows if valid_len is None else valid_len
        return [min(max(total - card * rows, 0), rows) for card in range(cards)]

    def _attend(
        self, q_blocks: list[Tensor], k: Tensor, v: Tensor, valid: list[int]
    ) -> list[Tensor]:
        """Each query block against the keys of all cards of the ring."""
        if self.ring is None:
            k, v = k[:, : valid[0]], v[:, : valid[0]]
            return [self.kernel(q, k, v) for q in q_blocks]
        if not self.kernel.can_return_lse:
            k, v = (x[:, : sum(valid)] for x in self.ring.gather(k, v))
            return [self.kernel(q, k, v) for q in q_blocks]
        merged = [Merged() for _ in q_blocks]
        for owner, k_block, v_block in self.ring.blocks(k, v):
            if not valid[owner]:
                continue
            for q, total in zip(q_blocks, merged, strict=True):
                total.add(
                    *self.kernel.with_lse(q, k_block[:, : valid[owner]], v_block[:, : valid[owner]])
                )
        return [total.result().to(k.dtype) for total in merged]
