"""Sequence-parallel self-attention with FA_Power_Cap: attention in pieces, communication between.

Legend: B batch, s this rank's tokens, S all tokens, R ring size, P Ulysses size, N all heads,
N_c heads of a chunk, h_c = N_c / P, D head size.

The chip is to rest between pieces of attention, and the exchanges that have to happen anyway are
the rests. A mode is a row: how many chunks of heads, how many blocks of queries, which order.

| | chunks | query blocks | order |
|---|---|---|---|
| baseline (comm_type 0) | 1 | 1 | in order |
| InsertComm (1) | up to 10 | 1 | in order |
| BlockAttn (2) | up to 10 | 2 | in order |
| A2A/FA overlap | up to 10 | 1 | pipelined: the opposite aim, exchanges hidden, no rests |

How a chunk is attended to is another matter (`Method`): densely, with FP8 numbers, block-sparsely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan.distributed.exchange import Group, group_rank, group_size
from wan.distributed.ring import Ring
from wan.kernels.base import Call, Kernel, Method, StepInfo
from wan.kernels.sdpa import SdpaKernel
from wan.modules import schedule
from wan.modules.schedule import Event, Range
from wan.modules.transport import Incoming, Outgoing, cut, gathered, receive, send, send_back

COMM_TYPES = (0, 1, 2)
Order = Callable[[int], Iterator[Event]]
QKV = tuple[Tensor, Tensor, Tensor]


class _Job(NamedTuple):
    """What holds for all chunks of one call. method: None is the dense kernel."""

    dtype: torch.dtype
    valid_len: int | None
    method: Method | None
    call: Call | None


class FAPowerCapAttention:
    """Self-attention over all tokens of the video, each rank holding some of them.

    args: any object with `comm_type` (0 baseline, 1 InsertComm, 2 BlockAttn). ulysses_pg: the ranks
    that exchange heads for tokens. fa_alltoall_overlap: hide exchanges under attention; comes
    before comm_type. kernel: dense attention, default the one of the tensors' device. ring: the
    ranks that pass K/V round, default none. methods: other ways of attending, of which the first
    that applies is taken; the dense kernel where none does. clock: entered around every call.
    For inference: exchanges have no gradient.

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
        methods: Sequence[Method] = (),
        clock: AbstractContextManager[Any] | None = None,
    ) -> None:
        if args.comm_type not in COMM_TYPES:
            raise ValueError(f"comm_type must be 0, 1, or 2, but got {args.comm_type}.")
        self.args, self.ulysses_pg = args, ulysses_pg
        self.fa_alltoall_overlap, self.comm_type = fa_alltoall_overlap, args.comm_type
        self.world_size, self.rank = group_size(ulysses_pg), group_rank(ulysses_pg)
        self.kernel: Kernel = SdpaKernel() if kernel is None else kernel
        self.ring = ring if ring is not None and ring.size > 1 else None
        self.methods = tuple(methods)
        self.clock = nullcontext() if clock is None else clock

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
        """[B,s,N,D] in and out: this rank's tokens, all heads, after QK-norm and RoPE.

        valid_len: real tokens of the whole sequence; what lies behind them is never attended to,
        and its rows of the result are zeros. Raises ValueError where P does not divide N.
        """
        heads = query.shape[2]
        if heads % self.world_size:
            raise ValueError(
                f"head_count must be divisible by ulysses world size, but got "
                f"head_count={heads}, world_size={self.world_size}."
            )
        call = self._call(query.shape[1], step, layer)
        method = next((method for method in self.methods if method.applies(call)), None)
        job = _Job(query.dtype, valid_len, method, call)
        with self.clock:
            if self.fa_alltoall_overlap:
                return self._run_fa_alltoall_overlap((query, key, value), job)
            if self.comm_type == 1:
                return self._run_insertcomm((query, key, value), job)
            if self.comm_type == 2:
                return self._run_blockattn((query, key, value), job)
            return self._run_baseline((query, key, value), job)

    def _call(self, rows: int, step: StepInfo | None, layer: int | None) -> Call | None:
        """Which call this is, as far as the caller says; first_head is that of a first chunk."""
        if not self.methods or step is None or layer is None:
            return None
        first_row = 0 if self.ring is None else self.ring.rank * rows * self.world_size
        moment = (step.index, step.count, step.expert, step.branch, step.sample)
        return Call(*moment, layer, 0, first_row, step.grid)

    def _run_baseline(self, qkv: QKV, job: _Job) -> Tensor:
        return self._run(qkv, job, chunks=1, blocks=1, order=schedule.in_order)

    def _run_insertcomm(self, qkv: QKV, job: _Job) -> Tensor:
        return self._run(qkv, job, blocks=1, order=schedule.in_order)

    def _run_blockattn(self, qkv: QKV, job: _Job) -> Tensor:
        return self._run(qkv, job, blocks=2, order=schedule.in_order)

    def _run_fa_alltoall_overlap(self, qkv: QKV, job: _Job) -> Tensor:
        return self._run(qkv, job, blocks=1, order=schedule.pipelined)

    def _run(
        self,
        qkv: QKV,
        job: _Job,
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
        incoming: dict[int, Incoming] = {}
        outgoing: dict[int, Outgoing] = {}
        finished: Outgoing | None = None
        for verb, chunk in order(len(ranges)):
            of_chunk = self._of_chunk(job, ranges[chunk])
            if verb == "start":
                packed = self._packed(split[chunk], of_chunk)
                incoming[chunk] = send(packed, self.ulysses_pg, overlap, finished)
                del packed
            elif verb == "attend":
                result = self._attention_forward(incoming.pop(chunk), of_chunk, blocks)
                outgoing[chunk] = send_back(result, self.ulysses_pg, overlap)
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

    def _of_chunk(self, job: _Job, heads: Range) -> _Job:
        """The job, knowing which head is the first that this rank attends with."""
        if job.call is None:
            return job
        first, last = heads
        first_head = first + (last - first) // self.world_size * self.rank
        return job._replace(call=replace(job.call, first_head=first_head))

    def _packed(self, qkv_BsND: QKV, job: _Job) -> Sequence[Any]:
        """What travels: q, k, v themselves, or what the method makes of them before."""
        if job.method is None:
            return qkv_BsND
        rows = qkv_BsND[0].shape[1]
        place = self.rank if self.ring is None else self.ring.rank * self.world_size + self.rank
        valid = rows if job.valid_len is None else _share(job.valid_len, place, rows)
        return job.method.pack(*qkv_BsND, valid, job.call)

    def _attention_forward(self, incoming: Incoming, job: _Job, blocks: int) -> Tensor:
        """One chunk [B,S/R,h_c,D]: queries in blocks, each against all keys; padding cut away."""
        q, k, v = receive(incoming)
        rows = q.shape[1]
        valid = self._valid_rows(rows, job.valid_len)
        mine = valid[0 if self.ring is None else self.ring.rank]
        multiple = 1 if job.method is None else job.method.q_multiple
        ranges = [(a, b) for a, b in schedule.q_ranges(mine, blocks, multiple) if a < b]
        attended = self._attend(q, k, v, ranges, valid, job)
        if ranges == [(0, rows)]:
            return attended[0]
        out = torch.empty(q.shape, dtype=job.dtype, device=q.device)
        for (a, b), part in zip(ranges, attended, strict=True):
            out[:, a:b] = part
        out[:, mine:] = 0
        return out

    def _valid_rows(self, rows: int, valid_len: int | None) -> list[int]:
        """Real tokens that each rank of the ring holds."""
        ranks = 1 if self.ring is None else self.ring.size
        total = ranks * rows if valid_len is None else valid_len
        return [_share(total, rank, rows) for rank in range(ranks)]

    def _attend(
        self, q: Any, k: Any, v: Any, ranges: list[Range], valid: list[int], job: _Job
    ) -> list[Tensor]:
        """Each query block against the keys of all ranks of the ring."""
        if self.ring is not None:
            if job.method is None and self.kernel.can_return_lse:
                blocks = [q[:, a:b] for a, b in ranges]
                return self.ring.attend(self.kernel.with_lse, blocks, k, v, valid)
            k, v = gathered(self.ring, k), gathered(self.ring, v)
        k, v = (cut(x, 0, sum(valid)) for x in (k, v))
        if job.method is None:
            return [self.kernel(q[:, a:b], k, v) for a, b in ranges]
        if not ranges:
            return []
        attend = job.method.prepare(cut(q, 0, ranges[-1][1]), k, v, job.call)
        return [attend(cut(q, a, b), a) for a, b in ranges]


def _share(total: int, rank: int, rows: int) -> int:
    """How many of `total` tokens lie on a rank, where each one in turn takes `rows`."""
    return min(max(total - rank * rows, 0), rows)
