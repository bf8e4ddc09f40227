"""Sequence-parallel self-attention with FA_Power_Cap: attention in pieces, exchanges between.

Legend: B batch, s this rank's tokens, S all tokens, R ring size, P Ulysses size, N all heads,
N_c heads of a chunk, h_c = N_c / P, D head size.

The device is to rest between pieces of attention, and the exchanges that have to happen anyway are
the rests. Which pieces, and in which order, is a row of `schedule.MODES`; one loop carries out all
rows. A chunk is computed by the dense kernel or by a `Method`, in FP8 or block-sparsely. This is
the only place where exchanges and kernels meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wan import trace
from wan.distributed.exchange import Group, Pending, group_rank, group_size, start_all_to_all_4D
from wan.distributed.ring import Ring
from wan.kernels.base import QKV, AttendRows, Kernel, Method, Payload, StepInfo
from wan.kernels.sdpa import SdpaKernel
from wan.settings import schedule
from wan.settings.schedule import Range

Tensors = tuple[Tensor, Tensor, Tensor]


class Args(Protocol):
    """What the layer reads of a run's arguments."""

    @property
    def comm_type(self) -> int: ...


class _Call(NamedTuple):
    """What holds for all chunks of one call. method: None is the dense kernel."""

    dtype: torch.dtype
    valid_len: int | None
    method: Method | None
    step: StepInfo | None


class _Incoming(NamedTuple):
    """An exchange of q, k or v that has been started: of the values, and of scales if any."""

    values: Pending
    scale: Pending | None
    rows: int


class FAPowerCapAttention:
    """Self-attention of one block over all tokens of the video, of which each rank holds some.

    For inference: exchanges have no gradient.

    Args:
        args: Any object with `comm_type`.
        ulysses_pg: The ranks that exchange heads for tokens; None: the default group.
        fa_alltoall_overlap: Exchanges are hidden under attention; `comm_type` does not matter then.
        comm_type: In place of `args`. A key of `schedule.MODES`; ValueError for another value.
        layer: Index of the block, which methods may need.
        kernel: Dense attention; None: PyTorch's on the device of the tensors.
        ring: The ranks that pass K/V round.
        methods: The first one that applies to a call computes it; where none applies, `kernel`.
        clock: Entered around every call.
        chunks: Most head chunks of a call, in place of the mode's; ValueError for mode 0.
    """

    def __init__(
        self,
        args: Args | None = None,
        ulysses_pg: Group = None,
        fa_alltoall_overlap: bool = False,
        *,
        comm_type: int | None = None,
        layer: int | None = None,
        kernel: Kernel | None = None,
        ring: Ring | None = None,
        methods: Sequence[Method] = (),
        clock: AbstractContextManager[object] | None = None,
        chunks: int | None = None,
    ) -> None:
        if args is not None and comm_type is None:
            comm_type = args.comm_type
        elif args is not None or comm_type is None:
            raise ValueError("The attention layer takes either args or comm_type.")
        self.args, self.ulysses_pg, self.comm_type = args, ulysses_pg, comm_type
        self.fa_alltoall_overlap, self.layer = fa_alltoall_overlap, layer
        self.mode = schedule.mode_of(self.comm_type, fa_alltoall_overlap, chunks)
        self.overlaps = self.mode.overlaps
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
        """Attention of this rank's tokens to all tokens.

        Args:
            query: [B,s,N,D], all heads, after QK-norm and RoPE; key and value likewise.
            key: As query.
            value: As query, without norm and RoPE.
            valid_len: Real tokens of the whole sequence; what lies behind them is never attended
                to, and its rows of the result are zeros. None: all are real.
            step: Where in the run this call is, for methods.
            layer: Index of the block, where the layer was built without it.

        Returns:
            [B,s,N,D] in the dtype of query.

        Raises:
            ValueError: P does not divide N, or a method needs step and layer and does not get them.
        """
        rows, heads = query.shape[1:3]
        if heads % self.world_size:
            raise ValueError(
                f"head_count must be divisible by ulysses world size, but got "
                f"head_count={heads}, world_size={self.world_size}."
            )
        if self.methods and step is not None:
            layer = self.layer if layer is None else layer
            first_row = 0 if self.ring is None else self.ring.rank * rows * self.world_size
            step = replace(step, layer=layer, first_row=first_row)
        method = next((method for method in self.methods if method.applies(step)), None)
        with self.clock:
            return self._dispatch((query, key, value), _Call(query.dtype, valid_len, method, step))

    def _dispatch(self, qkv: Tensors, call: _Call) -> Tensor:
        """Calls the loop under the mode's published name; a mode without one calls it directly."""
        if self.fa_alltoall_overlap:
            return self._run_fa_alltoall_overlap(qkv, call)
        if self.comm_type == 1:
            return self._run_insertcomm(qkv, call)
        if self.comm_type == 2:
            return self._run_blockattn(qkv, call)
        if self.comm_type == 0:
            return self._run_baseline(qkv, call)
        return self._run(qkv, call)

    def _run_baseline(self, qkv: Tensors, call: _Call) -> Tensor:
        return self._run(qkv, call)

    def _run_insertcomm(self, qkv: Tensors, call: _Call) -> Tensor:
        return self._run(qkv, call)

    def _run_blockattn(self, qkv: Tensors, call: _Call) -> Tensor:
        return self._run(qkv, call)

    def _run_fa_alltoall_overlap(self, qkv: Tensors, call: _Call) -> Tensor:
        return self._run(qkv, call)

    def _run(self, qkv: Tensors, call: _Call) -> Tensor:
        """The one loop of all modes: the mode's order says what happens to which chunk.

        No exchange in is started before the last chunk finished so far, also where it is compiled.
        """
        ranges = schedule.head_ranges(qkv[0].shape[2], self.world_size, self.mode.chunks)
        chunks = self._split_qkv_by_head(qkv, ranges)
        out_BsND: Tensor | None = None  # not made before it is needed: attention is the peak
        incoming: dict[int, list[_Incoming]] = {}
        outgoing: dict[int, Pending] = {}
        finished: Pending | None = None
        for verb, chunk in self.mode.order(len(ranges)):
            first, last = ranges[chunk]
            of_chunk = call
            if call.method is not None and call.step is not None:
                mine = first + (last - first) // self.world_size * self.rank
                of_chunk = call._replace(step=replace(call.step, first_head=mine))
            with trace.place(chunk=chunk):
                if verb == "start":
                    packed = self._packed(chunks[chunk], of_chunk)
                    incoming[chunk] = self._exchange_in(packed, finished)
                    del packed
                elif verb == "attend":
                    result = self._attention_forward(incoming.pop(chunk), of_chunk)
                    outgoing[chunk] = self._exchange_out(result)
                    del result
                else:
                    finished = outgoing.pop(chunk)
                    out_BsND = torch.empty_like(qkv[0]) if out_BsND is None else out_BsND
                    finished.wait(into=out_BsND[:, :, first:last])
        assert out_BsND is not None, "there is no chunk"
        return out_BsND

    def _split_qkv_by_head(self, qkv: Tensors, ranges: tuple[Range, ...]) -> list[Tensors]:
        """Views of the chunks' heads."""
        q, k, v = qkv
        return [(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for a, b in ranges]

    def _packed(self, qkv_BsND: Tensors, call: _Call) -> QKV:
        """What is sent: q, k, v themselves, or what the method makes of them before."""
        if call.method is None:
            q, k, v = qkv_BsND
            return Payload(q), Payload(k), Payload(v)
        rows = valid = qkv_BsND[0].shape[1]
        if call.valid_len is not None:
            ring_rank = 0 if self.ring is None else self.ring.rank
            shard = ring_rank * self.world_size + self.rank
            valid = schedule.valid_rows(call.valid_len, shard, rows)
        return call.method.pack(*qkv_BsND, valid, call.step)

    def _exchange_in(self, packed: QKV, after: Pending | None) -> list[_Incoming]:
        """Start [B,s,N,D] -> [B,S,h,D] for q, k, v: heads scattered, tokens gathered.

        The values of all three go first, then the scales, which are small and of their own kind.
        """

        def start(x: Tensor, what: str) -> Pending:
            group, overlaps = self.ulysses_pg, self.overlaps
            return start_all_to_all_4D(x, 2, 1, group, async_op=overlaps, after=after, what=what)

        named = list(zip("qkv", packed, strict=True))
        values = [start(x.values, name) for name, x in named]
        scales = [None if x.scale is None else start(x.scale, f"{name} scale") for name, x in named]
        return [_Incoming(v, s, x.rows) for v, s, x in zip(values, scales, packed, strict=True)]

    def _exchange_out(self, out_BSND: Tensor) -> Pending:
        """Start [B,S,h,D] -> [B,s,N,D]."""
        group, overlaps = self.ulysses_pg, self.overlaps
        return start_all_to_all_4D(out_BSND, 1, 2, group, async_op=overlaps, what="out")

    def _attention_forward(self, incoming: list[_Incoming], call: _Call) -> Tensor:
        """One chunk [B,S/R,h_c,D]: queries in blocks, each against all keys; padding cut away."""
        q, k, v = _received(incoming)
        rows = q.values.shape[1]
        ring_size, ring_rank = (1, 0) if self.ring is None else (self.ring.size, self.ring.rank)
        total = ring_size * rows if call.valid_len is None else call.valid_len
        valid = [schedule.valid_rows(total, rank, rows) for rank in range(ring_size)]
        multiple = 1 if call.method is None else call.method.q_multiple
        blocks = schedule.q_ranges(valid[ring_rank], self.mode.blocks, multiple)
        ranges = [(a, b) for a, b in blocks if a < b]
        attended = self._attend(q, k, v, ranges, valid, call)
        if ranges == [(0, rows)]:
            return attended[0]
        out = torch.empty(q.values.shape, dtype=call.dtype, device=q.values.device)
        for (a, b), block in zip(ranges, attended, strict=True):
            out[:, a:b] = block
        out[:, valid[ring_rank] :] = 0
        return out

    def _attend(
        self, q: Payload, k: Payload, v: Payload, ranges: list[Range], valid: list[int], call: _Call
    ) -> list[Tensor]:
        """Each query block against the keys of all ranks of the ring."""
        if self.ring is not None:
            if call.method is None and self.kernel.can_return_lse:
                blocks = [q.values[:, a:b] for a, b in ranges]
                return self.ring.attend(self.kernel.with_lse, blocks, k.values, v.values, valid)
            with trace.span("gather", k.values, what="k"):
                k = k.map(self.ring.gather)
            with trace.span("gather", v.values, what="v"):
                v = v.map(self.ring.gather)
        k, v = k.cut(0, sum(valid)), v.cut(0, sum(valid))
        if not ranges:
            return []
        attend = self._dense(k, v)
        if call.method is not None:
            attend = call.method.prepare(q.cut(0, ranges[-1][1]), k, v, call.step)
        attended = []
        for block, (a, b) in enumerate(ranges):
            with trace.place(block=block):
                attended.append(attend(q.cut(a, b), a))
        return attended

    def _dense(self, k: Payload, v: Payload) -> AttendRows:
        """The dense kernel in the form of a method."""

        def attend(q: Payload, _: int) -> Tensor:
            with trace.span("attention", q.values, keys=k.values.shape[1], method="dense"):
                return self.kernel(q.values, k.values, v.values)

        return attend


def _received(incoming: list[_Incoming]) -> QKV:
    """q, k, v once they have arrived; the list is emptied, so that it keeps nothing alive."""
    arrived = []
    while incoming:
        values, scale, rows = incoming.pop(0)
        arrived.append(Payload(values.wait(), None if scale is None else scale.wait(), rows))
    q, k, v = arrived
    return q, k, v
