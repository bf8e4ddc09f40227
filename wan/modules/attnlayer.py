"""Sequence-parallel self-attention with FA_Power_Cap: head chunks separated by all-to-alls.

Legend: B batch, s this rank's tokens, S all tokens, R ring size, P Ulysses size, N all heads,
N_c heads of a chunk, h_c heads of a chunk on this rank, D head size.

Attention is split into head chunks and query blocks, and the all-to-alls of Ulysses run between
them, so that the device idles between two attention kernels and its power stays low. A row of
`MODES` defines how many chunks and blocks there are and in which order they run; one loop executes
every mode. A chunk is computed by the dense kernel or by an `AttentionBackend` (FP8, block-sparse).
All-to-alls and attention kernels are called together in this module only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wan import trace
from wan.distributed.exchange import Group, Pending, group_rank, group_size, start_in, start_out
from wan.distributed.pieces import Part, Pieces
from wan.distributed.ring import Ring
from wan.kernels.base import QKV, AttendRows, Kernel, Method, Payload, StepInfo
from wan.kernels.sdpa import SdpaKernel
from wan.settings import schedule
from wan.settings.parallel import EXCHANGES
from wan.settings.schedule import Range

Tensors = tuple[Tensor, Tensor, Tensor]
Chunk = Tensors | Pieces
"""q, k and v of a head chunk, [B,s,N_c,D] each, or the send buffer into which they were written."""


class Args(Protocol):
    """Command-line arguments with the attention mode."""

    @property
    def comm_type(self) -> int: ...


class _Call(NamedTuple):
    """The parameters that all chunks of one call share.

    Attributes:
        shape: [B,s,N,D] of the result.
        chunk_heads: chunk_heads[c][r] is the number of heads of chunk c on rank r.
        backend: None: the dense kernel.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    shares: tuple[tuple[int, ...], ...]
    valid_len: int | None
    method: Method | None
    step: StepInfo | None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Range of global heads of each chunk."""
        ends = list(accumulate(map(sum, self.shares)))
        return tuple(zip([0, *ends], ends, strict=False))


class _Incoming(NamedTuple):
    """The all-to-alls of a chunk that are in flight, and the rows per scale of q, k and v."""

    pending: list[Pending]
    rows: tuple[int, ...] = (1, 1, 1)


class _Written(NamedTuple):
    """Implements `wan.modules.interfaces.PackedAttentionCall`."""

    layer: FAPowerCapAttention
    pieces: Pieces

    def put(self, place: int, x_BsND: Tensor, first: int = 0) -> None:
        self.pieces.put(place, x_BsND, first)

    def attend(self, *, valid_len: int | None = None, step: StepInfo | None = None) -> Tensor:
        return self.layer.attend(self.pieces, valid_len=valid_len, step=step)


class FAPowerCapAttention:
    """Self-attention of one block over a video's tokens, which are sharded over the ranks.

    Inference only: the all-to-alls have no backward pass.

    Args:
        args: Any object with `comm_type`.
        ulysses_pg: Process group of the all-to-alls; None: the default group.
        fa_alltoall_overlap: Overlap the all-to-alls with attention; `comm_type` is then ignored.
        comm_type: Key of `MODES`, an alternative to `args`. ValueError for another value.
        layer: Index of the block, for the attention backends.
        kernel: Dense attention; None: PyTorch's SDPA.
        ring: Ring attention over groups of Ulysses ranks; None: no ring.
        backends: The first backend that applies to a call computes it, otherwise `kernel`.
        clock: Context manager that is entered in every call.
        chunks: Maximum number of head chunks; None: that of the mode. ValueError for mode 0.
        exchange: "split": one all-to-all each for q, k and v of a chunk; "fused": a single one with
            bit-identical results. ValueError for another value.
        contiguous: Copy q, k and v of a fused all-to-all for kernels that cannot read strides.
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
        exchange: str = "split",
        contiguous: bool = False,
    ) -> None:
        if exchange not in EXCHANGES:
            raise ValueError(f"exchange must be split or fused, but got {exchange!r}.")
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
        self.methods, self.exchange = tuple(methods), exchange
        self.contiguous = contiguous or self.ring is not None  # a ring sends k and v
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
        """Computes attention of this rank's queries to the keys of all ranks.

        Args:
            query: [B,s,N,D], all heads, after QK-norm and RoPE.
            key: [B,s,N,D], after QK-norm and RoPE.
            value: [B,s,N,D].
            valid_len: Number of real tokens in the global sequence; the padding after them is never
                attended to, and its rows of the result are zeros. None: there is no padding.
            step: Sampling step, expert and branch, for the attention backends.
            layer: Index of the block, if the layer was built without it.

        Returns:
            [B,s,N,D] in the dtype of query.

        Raises:
            ValueError: N < P, or a backend needs `step` or `layer` and it is None.
        """
        call = self._call(query.shape, query, valid_len, step, layer)
        chunks = self._split_qkv_by_head((query, key, value), call.ranges)
        with self.clock:
            return self._dispatch(chunks, call)

    def begin(self, x_BsC: Tensor, heads: int, step: StepInfo | None) -> _Written | None:
        """Starts a call whose q, k and v are written directly into the all-to-all send buffer.

        Args:
            x_BsC: Any tensor of this rank's tokens; only its shape, dtype and device are used.
            num_heads: N.
            step: As in `__call__`.

        Returns:
            None if q, k and v must be passed to `__call__` as tensors: with split all-to-alls, with
            a backend that quantizes before the exchange, and under autograd or torch.compile.
        """
        compiled = torch.compiler.is_compiling() or torch.is_grad_enabled()
        if self.exchange != "fused" or self.world_size == 1 or compiled:
            return None
        batch, rows, channels = x_BsC.shape
        call = self._call((batch, rows, heads, channels // heads), x_BsC, None, step)
        if call.method is not None and call.method.packs:
            return None
        part = Part(batch, rows, 3, channels // heads, x_BsC.dtype)
        pieces = Pieces([part], [heads for share in call.shares for heads in share], x_BsC.device)
        return _Written(self, pieces)

    def attend(
        self, pieces: Pieces, *, valid_len: int | None = None, step: StepInfo | None = None
    ) -> Tensor:
        """Computes attention of q, k and v in a send buffer; the buffer's memory is released."""
        (part,) = pieces.parts
        shape = (part.batch, part.rows, sum(pieces.heads), part.width)
        call = self._call(shape, pieces.memory, valid_len, step)
        with self.clock:
            return self._dispatch(dict(enumerate(pieces.chunks(call.shares))), call)

    def _call(
        self,
        shape: Sequence[int],
        like: Tensor,
        valid_len: int | None,
        step: StepInfo | None,
        layer: int | None = None,
    ) -> _Call:
        rows, heads = shape[1:3]
        if heads < self.world_size:
            raise ValueError(
                f"head_count must be at least ulysses world size, but got "
                f"head_count={heads}, world_size={self.world_size}."
            )
        if self.methods and step is not None:
            layer = self.layer if layer is None else layer
            first_row = 0 if self.ring is None else self.ring.rank * rows * self.world_size
            step = replace(step, layer=layer, first_row=first_row)
        method = next((method for method in self.methods if method.applies(step)), None)
        shares = schedule.head_split(heads, self.world_size, self.mode.chunks)
        return _Call(shape, like.dtype, like.device, shares, valid_len, method, step)

    def _dispatch(self, chunks: dict[int, Chunk], call: _Call) -> Tensor:
        """Runs the loop under the published method name of the mode, if it has one."""
        if self.fa_alltoall_overlap:
            return self._run_fa_alltoall_overlap(chunks, call)
        if self.comm_type == 1:
            return self._run_insertcomm(chunks, call)
        if self.comm_type == 2:
            return self._run_blockattn(chunks, call)
        if self.comm_type == 0:
            return self._run_baseline(chunks, call)
        return self._run(chunks, call)

    def _run_baseline(self, chunks: dict[int, Chunk], call: _Call) -> Tensor:
        return self._run(chunks, call)

    def _run_insertcomm(self, chunks: dict[int, Chunk], call: _Call) -> Tensor:
        return self._run(chunks, call)

    def _run_blockattn(self, chunks: dict[int, Chunk], call: _Call) -> Tensor:
        return self._run(chunks, call)

    def _run_fa_alltoall_overlap(self, chunks: dict[int, Chunk], call: _Call) -> Tensor:
        return self._run(chunks, call)

    def _run(self, chunks: dict[int, Chunk], call: _Call) -> Tensor:
        """Runs the actions (start, attend, finish) on the chunks in the order of the mode.

        The all-to-alls of a chunk are issued after those of the last finished chunk; a compiled
        graph keeps this order by a data dependency.
        """
        out_BsND: Tensor | None = None  # allocated late: attention is the memory peak
        incoming: dict[int, _Incoming] = {}
        outgoing: dict[int, Pending] = {}
        finished: Pending | None = None
        ranges = call.ranges
        for verb, chunk in self.mode.order(len(chunks)):
            (first, last), share = ranges[chunk], call.shares[chunk]
            of_chunk = call
            if call.method is not None and call.step is not None:
                mine = first + sum(share[: self.rank])
                of_chunk = call._replace(step=replace(call.step, first_head=mine))
            with trace.place(chunk=chunk):
                if verb == "start":
                    packed = chunks.pop(chunk)
                    incoming[chunk] = self._exchange_in(packed, share, of_chunk, finished)
                    del packed
                elif verb == "attend":
                    result = self._attention_forward(incoming.pop(chunk), of_chunk)
                    outgoing[chunk] = self._exchange_out(result, share)
                    del result
                else:
                    finished = outgoing.pop(chunk)
                    if out_BsND is None:
                        out_BsND = torch.empty(call.shape, dtype=call.dtype, device=call.device)
                    finished.wait(into=out_BsND[:, :, first:last])
        assert out_BsND is not None, "there is no chunk"
        return out_BsND

    def _split_qkv_by_head(self, qkv: Tensors, ranges: tuple[Range, ...]) -> dict[int, Chunk]:
        """Slices q, k and v into views of the heads of each chunk."""
        q, k, v = qkv
        return {i: (q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for i, (a, b) in enumerate(ranges)}

    def _packed(self, qkv_BsND: Tensors, call: _Call) -> QKV:
        """Converts q, k and v to the tensors that are sent; only some backends quantize here."""
        if call.method is None:
            q, k, v = qkv_BsND
            return Payload(q), Payload(k), Payload(v)
        rows = valid = qkv_BsND[0].shape[1]
        if call.valid_len is not None:
            ring_rank = 0 if self.ring is None else self.ring.rank
            shard = ring_rank * self.world_size + self.rank
            valid = schedule.valid_rows(call.valid_len, shard, rows)
        return call.method.pack(*qkv_BsND, valid, call.step)

    def _exchange_in(
        self, chunk: Tensors | Pieces, share: tuple[int, ...], call: _Call, after: Pending | None
    ) -> _Incoming:
        """Starts the all-to-alls [B,s,N_c,D] -> [B,S,h_c,D] of q, k and v.

        Heads are scattered and tokens gathered. The values of q, k and v are sent first, then the
        small scales; a fused exchange sends all of them in one all-to-all.
        """

        def start(tensors: Sequence[Tensor] | Pieces, what: str) -> Pending:
            group, overlaps = self.ulysses_pg, self.overlaps
            return start_in(tensors, share, group, async_op=overlaps, after=after, what=what)

        if isinstance(chunk, Pieces):
            return _Incoming([start(chunk, "qkv")])
        packed = self._packed(chunk, call)
        rows = tuple(payload.rows for payload in packed)
        named = {name: x.values for name, x in zip("qkv", packed, strict=True)}
        for name, x in zip("qkv", packed, strict=True):
            named |= {} if x.scale is None else {f"{name} scale": x.scale}
        if self.exchange == "fused" and self.world_size > 1:
            return _Incoming([start(list(named.values()), "qkv")], rows)
        return _Incoming([start([x], name) for name, x in named.items()], rows)

    def _exchange_out(self, out_BShD: Tensor, share: tuple[int, ...]) -> Pending:
        """Starts the all-to-all [B,S,h_c,D] -> [B,s,N_c,D] of a chunk's result."""
        return start_out(out_BShD, share, self.ulysses_pg, async_op=self.overlaps)

    def _attention_forward(self, incoming: _Incoming, call: _Call) -> Tensor:
        """Computes one chunk [B,S/R,h_c,D], a query block at a time; padded rows are zeros."""
        q, k, v = _received(incoming)
        if self.contiguous:
            q, k, v = (x.map(_contiguous) for x in (q, k, v))
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
        """Computes attention of each query block to the keys of all ring ranks."""
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
        """Wraps the dense kernel as the function that a backend's `prepare_kv` returns."""

        def attend(q: Payload, _: int) -> Tensor:
            with trace.span("attention", q.values, keys=k.values.shape[1], method="dense"):
                return self.kernel(q.values, k.values, v.values)

        return attend


def _contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    with trace.span("copy", x):
        return x.contiguous()


def _received(incoming: _Incoming) -> QKV:
    """Waits for the all-to-alls of a chunk and returns q, k and v, their only references."""
    arrived = [x for pending in incoming.pending for x in pending.tensors()]
    scales: Sequence[Tensor | None] = arrived[3:] or [None] * 3
    q, k, v = map(Payload, arrived[:3], scales, incoming.rows)
    return q, k, v
