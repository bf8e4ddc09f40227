"""Sequence-parallel self-attention with FA_Power_Cap (docs/fa_power_cap.md).

Legend: B batch, s this rank's tokens, S tokens of this rank's Ulysses group (all tokens, if there
is no ring), P Ulysses size, N all heads, N_c heads of a chunk, h_c heads of a chunk on this rank,
D head size.

Attention is split into head chunks, and the all-to-alls of Ulysses run between them, so that the
device idles between the attention kernels of two chunks and its power stays low; mode 2 also splits
the queries of a chunk into blocks. A2A/FA overlap runs the all-to-alls during attention instead.
Each of these ways is a method, `_run_...`, over the same four steps. The row of the mode in `MODES`
(or `OVERLAP`) sets the numbers of chunks and blocks, and describes the order of the steps for
planner and traces. A chunk is computed by the dense kernel or by an `AttentionBackend` (FP8,
block-sparse).
No other module joins all-to-alls and the attention kernels of `wan.kernels`, but for measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan.distributed.packed_buffer import PackedBuffer, TensorSpec
from wan.distributed.ring import Ring
from wan.distributed.ulysses import (
    Group,
    PendingExchange,
    get_group_rank,
    get_group_size,
    start_gather_heads,
    start_scatter_heads,
)
from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import QKV, AttendRows, AttentionBackend, AttentionInput, Kernel
from wan.kernels.sdpa import SdpaKernel
from wan.modules.interfaces import LayerKeys
from wan.settings import attention_modes
from wan.settings.attention_modes import Range
from wan.settings.parallel import EXCHANGES
from wan.utils import trace

QKVTensors = tuple[Tensor, Tensor, Tensor]
ChunkQKV = QKVTensors | PackedBuffer
"""q, k and v of a head chunk, [B,s,N_c,D] each, or the send buffer into which they were written."""


@dataclass(frozen=True)
class _HeadChunk:
    """A head chunk of a call.

    Attributes:
        heads: Range of global heads.
        heads_per_rank: Number of heads on each rank.
        step: Sampling step, for the attention backend; it has the chunk's first head on this rank.
    """

    index: int
    heads: Range
    heads_per_rank: tuple[int, ...]
    step: StepInfo | None


class _IncomingChunk(NamedTuple):
    """The all-to-alls of a chunk that are in flight, and the rows per scale of q, k and v."""

    pending: list[PendingExchange]
    rows_per_scale: tuple[int, ...] = (1, 1, 1)


@dataclass(eq=False)
class _Call:
    """Implements `wan.modules.interfaces.AttentionCall`, and has the state of the running call.

    Attributes:
        shape: [B,s,N,D] of the result.
        backend: None: the dense kernel.
        further_keys: Keys of a reference video or of earlier frames.
        buffer: Send buffer into which q, k and v are written; None: they are kept as tensors.
        unsent: q, k and v of the chunks that have not been sent.
        last_result: All-to-all of the last chunk whose result has been written.
        out: The result; allocated late, because attention is the memory peak.
    """

    attention: FAPowerCapAttention
    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    chunks: list[_HeadChunk]
    valid_len: int | None
    backend: AttentionBackend | None
    further_keys: LayerKeys | None = None
    buffer: PackedBuffer | None = None
    qkv: dict[int, Tensor] = field(default_factory=dict)
    unsent: dict[int, ChunkQKV] = field(default_factory=dict)
    last_result: PendingExchange | None = None
    out: Tensor | None = None

    @property
    def takes_slices(self) -> bool:
        return self.buffer is not None

    def write(self, index: int, x_BsND: Tensor, first_token: int = 0) -> None:
        if self.buffer is not None:
            self.buffer.write(index, x_BsND, first_token)
        else:
            self.qkv[index] = x_BsND

    def finish(self) -> Tensor:
        return self.attention._run_call(self)


class FAPowerCapAttention:
    """Self-attention of one block over a video's tokens, which are sharded over the ranks.

    Inference only: the all-to-alls have no backward pass.

    Args:
        args: Any object with `comm_type`.
        ulysses_pg: Process group of the all-to-alls; None: the default group.
        fa_alltoall_overlap: Overlap the all-to-alls with attention; `comm_type` is then ignored.
        comm_type: Key of `MODES`; exactly one of `args` and `comm_type` must be given. ValueError
            otherwise, and for an unknown key.
        layer: Index of the block, for the attention backends.
        kernel: Dense attention; None: PyTorch's SDPA.
        ring: Ring attention over groups of Ulysses ranks; None: no ring.
        methods: Attention backends; the first that applies to a call computes it, else `kernel`.
        clock: Context manager that is entered in every call; on NPUs it can cap the clock.
        chunks: Maximum number of head chunks; None: that of the mode. ValueError for mode 0.
        exchange: "split": one all-to-all each for q, k and v of a chunk; "fused": a single one with
            bit-identical results. ValueError for another value.
        contiguous: Copy q, k and v of a fused all-to-all for kernels that cannot read strides.
    """

    def __init__(
        self,
        args: Any = None,
        ulysses_pg: Group = None,
        fa_alltoall_overlap: bool = False,
        *,
        comm_type: int | None = None,
        layer: int | None = None,
        kernel: Kernel | None = None,
        ring: Ring | None = None,
        methods: Sequence[AttentionBackend] = (),
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
        self.mode = attention_modes.select_attention_mode(
            self.comm_type, fa_alltoall_overlap, chunks
        )
        self.overlaps = self.mode.overlaps
        self.ulysses_size = get_group_size(ulysses_pg)
        self.ulysses_rank = get_group_rank(ulysses_pg)
        self.kernel: Kernel = SdpaKernel() if kernel is None else kernel
        self.ring = ring if ring is not None and ring.size > 1 else None
        self.backends, self.exchange = tuple(methods), exchange
        self.contiguous = contiguous or self.ring is not None  # for the ring's P2P transfers
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
            layer: Index of the block, if the constructor did not get it.

        Returns:
            [B,s,N,D] in the dtype of query.

        Raises:
            ValueError: N < P, or a backend needs `step` or `layer` and it is None.
        """
        call = self._make_call(query.shape, query, valid_len, step, layer)
        for index, x in enumerate((query, key, value)):
            call.write(index, x)
        return call.finish()

    def start(
        self,
        x_BsC: Tensor,
        num_heads: int,
        *,
        valid_len: int | None = None,
        step: StepInfo | None = None,
        further_keys: LayerKeys | None = None,
    ) -> _Call:
        """Starts a call whose q, k and v are written one after the other.

        They are written directly into the all-to-all send buffer, unless all-to-alls are split, a
        backend quantizes before the exchange, or autograd or torch.compile is active.

        Args:
            x_BsC: Any tensor of this rank's tokens; only its shape, dtype and device are used.
            num_heads: N.
            valid_len: As in `__call__`.
            step: As in `__call__`.
            further_keys: Also attended to; ValueError if a backend applies to the call, or they
                need the log-sum-exp and the kernel does not return it.
        """
        batch, num_tokens, channels = x_BsC.shape
        width = channels // num_heads
        call = self._make_call((batch, num_tokens, num_heads, width), x_BsC, valid_len, step)
        call.further_keys = further_keys
        is_complete = self.kernel.can_return_lse or not (further_keys and further_keys.needs_lse)
        if further_keys is not None and (call.backend or not is_complete):
            name = (call.backend or self.kernel).name
            raise ValueError(f"{name} cannot attend to further keys (no log-sum-exp).")
        quantizes = call.backend is not None and call.backend.quantizes_before_exchange
        needs_tensors = quantizes or torch.compiler.is_compiling() or torch.is_grad_enabled()
        if self.exchange == "fused" and self.ulysses_size > 1 and not needs_tensors:
            tensor_spec = TensorSpec(batch, num_tokens, 3, width, x_BsC.dtype)
            heads = [count for chunk in call.chunks for count in chunk.heads_per_rank]
            call.buffer = PackedBuffer([tensor_spec], heads, x_BsC.device)
        return call

    def _make_call(
        self,
        shape: Sequence[int],
        like: Tensor,
        valid_len: int | None,
        step: StepInfo | None,
        layer: int | None = None,
    ) -> _Call:
        num_tokens, num_heads = shape[1:3]
        if num_heads < self.ulysses_size:
            raise ValueError(
                f"head_count must be at least ulysses world size, but got "
                f"head_count={num_heads}, world_size={self.ulysses_size}."
            )
        if self.backends and step is not None:
            layer = self.layer if layer is None else layer
            first_row = 0 if self.ring is None else self.ring.rank * num_tokens * self.ulysses_size
            step = replace(step, layer=layer, first_row=first_row)
        backend = next((backend for backend in self.backends if backend.applies_to(step)), None)
        chunks: list[_HeadChunk] = []
        stop, chunk_step = 0, step
        for heads_per_rank in attention_modes.split_heads(
            num_heads, self.ulysses_size, self.mode.chunks
        ):
            start, stop = stop, stop + sum(heads_per_rank)
            if backend is not None and step is not None:
                first_head = start + sum(heads_per_rank[: self.ulysses_rank])
                chunk_step = replace(step, first_head=first_head)
            chunks.append(_HeadChunk(len(chunks), (start, stop), heads_per_rank, chunk_step))
        return _Call(self, shape, like.dtype, like.device, chunks, valid_len, backend)

    def _run_call(self, call: _Call) -> Tensor:
        """Computes a call in which q, k and v have been written."""
        if call.buffer is not None:
            parts = call.buffer.split_chunks([chunk.heads_per_rank for chunk in call.chunks])
            call.unsent = dict(enumerate(parts))
            del parts
        else:
            call.unsent = self._split_qkv_by_head(call.qkv, call.chunks)
        with self.clock:
            return self._dispatch(call)

    def _dispatch(self, call: _Call) -> Tensor:
        """Runs the mode's method; a mode that the guide does not have runs in its row's order."""
        if self.fa_alltoall_overlap:
            return self._run_fa_alltoall_overlap(call)
        if self.comm_type == 1:
            return self._run_insertcomm(call)
        if self.comm_type == 2:
            return self._run_blockattn(call)
        if self.comm_type == 0:
            return self._run_baseline(call)
        return self._run_in_order(call)

    def _run_baseline(self, call: _Call) -> Tensor:
        """All heads are exchanged, attended to and exchanged back at once."""
        (chunk,) = call.chunks
        incoming = self._exchange_in(call, chunk)
        outgoing = self._exchange_out(chunk, self._attend(call, chunk, incoming))
        return self._write_result(call, chunk, outgoing)

    def _run_insertcomm(self, call: _Call) -> Tensor:
        """The all-to-alls of each head chunk lie between two attention kernels."""
        for chunk in call.chunks:
            incoming = self._exchange_in(call, chunk)
            outgoing = self._exchange_out(chunk, self._attend(call, chunk, incoming))
            out_BsND = self._write_result(call, chunk, outgoing)
        return out_BsND

    def _run_blockattn(self, call: _Call) -> Tensor:
        """As `_run_insertcomm`; one attention kernel for each query block of a head chunk."""
        blocks = self.mode.blocks
        for chunk in call.chunks:
            incoming = self._exchange_in(call, chunk)
            outgoing = self._exchange_out(chunk, self._attend(call, chunk, incoming, blocks))
            out_BsND = self._write_result(call, chunk, outgoing)
        return out_BsND

    def _run_fa_alltoall_overlap(self, call: _Call) -> Tensor:
        """The next chunk arrives and the previous result returns while a chunk is attended to."""
        chunks, outgoing = call.chunks, list[PendingExchange]()
        incoming = [self._exchange_in(call, chunks[0])]
        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                incoming.append(self._exchange_in(call, chunks[index + 1]))
            result = self._attend(call, chunk, incoming[index])
            outgoing.append(self._exchange_out(chunk, result))
            del result
            if index:
                self._write_result(call, chunks[index - 1], outgoing[index - 1])
        return self._write_result(call, chunks[-1], outgoing[-1])

    def _run_in_order(self, call: _Call) -> Tensor:
        """Runs the actions of the mode's row."""
        incoming: dict[int, _IncomingChunk] = {}
        outgoing: dict[int, PendingExchange] = {}
        for action, index in self.mode.order(len(call.chunks)):
            chunk = call.chunks[index]
            if action == "start":
                incoming[index] = self._exchange_in(call, chunk)
            elif action == "attend":
                result = self._attend(call, chunk, incoming.pop(index), self.mode.blocks)
                outgoing[index] = self._exchange_out(chunk, result)
                del result
            else:
                out_BsND = self._write_result(call, chunk, outgoing.pop(index))
        return out_BsND

    def _split_qkv_by_head(
        self, qkv: dict[int, Tensor], chunks: Sequence[_HeadChunk]
    ) -> dict[int, ChunkQKV]:
        """Replaces q, k and v by views of the heads of each chunk."""
        q, k, v = (qkv.pop(index) for index in range(3))
        slices = (slice(*chunk.heads) for chunk in chunks)
        return {i: (q[:, :, s], k[:, :, s], v[:, :, s]) for i, s in enumerate(slices)}

    def _quantize_qkv(self, qkv_BsND: QKVTensors, call: _Call, chunk: _HeadChunk) -> QKV:
        """Converts q, k and v to the tensors that are sent; only some backends quantize here."""
        if call.backend is None:
            q, k, v = qkv_BsND
            return AttentionInput(q), AttentionInput(k), AttentionInput(v)
        num_tokens = num_valid = qkv_BsND[0].shape[1]
        if call.valid_len is not None:
            ring_rank = 0 if self.ring is None else self.ring.rank
            shard = ring_rank * self.ulysses_size + self.ulysses_rank
            num_valid = attention_modes.count_valid_rows(call.valid_len, shard, num_tokens)
        return call.backend.quantize(*qkv_BsND, num_valid, chunk.step)

    def _exchange_in(self, call: _Call, chunk: _HeadChunk) -> _IncomingChunk:
        """Starts the all-to-alls [B,s,N_c,D] -> [B,S,h_c,D] of q, k and v, and drops q, k and v.

        Heads are scattered and tokens gathered. The values of q, k and v are sent first, then the
        small scales; a fused exchange sends all of them in one all-to-all. They are issued after
        those of the last written result; a compiled graph keeps this order by a data dependency.
        """

        def start_exchange(tensors: Sequence[Tensor] | PackedBuffer, label: str) -> PendingExchange:
            heads, group, after = chunk.heads_per_rank, self.ulysses_pg, call.last_result
            return start_scatter_heads(
                tensors, heads, group, async_op=self.overlaps, after=after, name=label
            )

        unsent = call.unsent.pop(chunk.index)
        with trace.add_context(chunk=chunk.index):
            if isinstance(unsent, PackedBuffer):
                return _IncomingChunk([start_exchange(unsent, "qkv")])
            qkv = self._quantize_qkv(unsent, call, chunk)
            rows_per_scale = tuple(x.rows_per_scale for x in qkv)
            named_tensors = {name: x.values for name, x in zip("qkv", qkv, strict=True)}
            for name, x in zip("qkv", qkv, strict=True):
                named_tensors |= {} if x.scale is None else {f"{name} scale": x.scale}
            del unsent, qkv, x  # so that each tensor is freed when it has been sent
            if self.exchange == "fused" and self.ulysses_size > 1:
                fused = start_exchange(list(named_tensors.values()), "qkv")
                return _IncomingChunk([fused], rows_per_scale)
            names = list(named_tensors)
            pending = [start_exchange([named_tensors.pop(name)], name) for name in names]
            return _IncomingChunk(pending, rows_per_scale)

    def _attend(
        self, call: _Call, chunk: _HeadChunk, incoming: _IncomingChunk, blocks: int = 1
    ) -> Tensor:
        """Computes one chunk [B,S,h_c,D] in `blocks` query blocks; padded rows are zeros."""
        with trace.add_context(chunk=chunk.index):
            q, k, v = _wait_for_qkv(incoming)
            if self.contiguous:
                q, k, v = (x.map(_make_contiguous) for x in (q, k, v))
            num_tokens = q.values.shape[1]
            ring_size, ring_rank = (1, 0) if self.ring is None else (self.ring.size, self.ring.rank)
            total_valid = ring_size * num_tokens if call.valid_len is None else call.valid_len
            valid_rows = [
                attention_modes.count_valid_rows(total_valid, rank, num_tokens)
                for rank in range(ring_size)
            ]
            row_multiple = 1 if call.backend is None else call.backend.q_multiple
            ranges = attention_modes.q_ranges(valid_rows[ring_rank], blocks, row_multiple)
            query_blocks = [(start, stop) for start, stop in ranges if start < stop]
            if call.further_keys is None:
                block_outputs = self._attention_forward(
                    q, k, v, query_blocks, valid_rows, call.backend, chunk.step
                )
            else:
                block_outputs = self._attend_with_further_keys(
                    call.further_keys, chunk, (q, k, v), query_blocks, valid_rows
                )
            if query_blocks == [(0, num_tokens)]:
                return block_outputs[0]
            out = torch.empty(q.values.shape, dtype=call.dtype, device=q.values.device)
            for (start, stop), block_output in zip(query_blocks, block_outputs, strict=True):
                out[:, start:stop] = block_output
            out[:, valid_rows[ring_rank] :] = 0
            return out

    def _exchange_out(self, chunk: _HeadChunk, out_BShD: Tensor) -> PendingExchange:
        """Starts the all-to-all [B,S,h_c,D] -> [B,s,N_c,D] of a chunk's result."""
        with trace.add_context(chunk=chunk.index):
            return start_gather_heads(
                out_BShD, chunk.heads_per_rank, self.ulysses_pg, async_op=self.overlaps
            )

    def _write_result(self, call: _Call, chunk: _HeadChunk, outgoing: PendingExchange) -> Tensor:
        """Waits for a chunk's result, writes it into the call's result and returns the latter."""
        if call.out is None:
            call.out = torch.empty(call.shape, dtype=call.dtype, device=call.device)
        with trace.add_context(chunk=chunk.index):
            outgoing.wait(out=call.out[:, :, slice(*chunk.heads)])
        call.last_result = outgoing
        return call.out

    def _attention_forward(
        self,
        q: AttentionInput,
        k: AttentionInput,
        v: AttentionInput,
        query_blocks: list[Range],
        valid_rows: list[int],
        backend: AttentionBackend | None,
        step: StepInfo | None,
    ) -> list[Tensor]:
        """Computes attention of each query block to the keys of all ring ranks."""
        if self.ring is not None:
            if backend is None and self.kernel.can_return_lse:
                queries = [q.values[:, start:stop] for start, stop in query_blocks]
                return self.ring.attend(
                    self.kernel.with_lse, queries, k.values, v.values, valid_rows
                )
            with trace.span("gather", k.values, what="k"):
                k = k.map(self.ring.gather)
            with trace.span("gather", v.values, what="v"):
                v = v.map(self.ring.gather)
        k, v = k.slice_rows(0, sum(valid_rows)), v.slice_rows(0, sum(valid_rows))
        if not query_blocks:
            return []
        attend = self._make_dense_attend(k, v)
        if backend is not None:
            attend = backend.prepare_kv(q.slice_rows(0, query_blocks[-1][1]), k, v, step)
        outputs = []
        for block, (start, stop) in enumerate(query_blocks):
            with trace.add_context(block=block):
                outputs.append(attend(q.slice_rows(start, stop), start))
        return outputs

    def _attend_with_further_keys(
        self,
        further_keys: LayerKeys,
        chunk: _HeadChunk,
        qkv: QKV,
        query_blocks: list[Range],
        valid_rows: list[int],
    ) -> list[Tensor]:
        """As `_attention_forward`; records the call's keys, or attends to further ones as well."""
        ring, (q, k, v) = self.ring, qkv
        rank, size = (0, 1) if ring is None else (ring.rank, ring.size)
        device_type = None if ring is None else ring.device_type
        if further_keys.is_recording:
            total = sum(valid_rows)
            keys, values = (x.values if ring is None else ring.gather(x.values) for x in (k, v))
            further_keys.record(chunk.index, keys[:, :total], values[:, :total], (rank, size))
            return self._attention_forward(*qkv, query_blocks, valid_rows, None, chunk.step)
        first_row = rank * q.values.shape[1]
        queries = [(first_row + start, q.values[:, start:stop]) for start, stop in query_blocks]
        own_block = [(rank, k.values, v.values)]
        kv_blocks = own_block if ring is None else ring.exchange_blocks(k.values, v.values)
        return further_keys.attend(
            self.kernel, queries, kv_blocks, valid_rows, chunk.index, device_type
        )

    def _make_dense_attend(self, k: AttentionInput, v: AttentionInput) -> AttendRows:
        """Wraps the dense kernel as the function that a backend's `prepare_kv` returns."""

        def attend(q: AttentionInput, _: int) -> Tensor:
            with trace.span("attention", q.values, keys=k.values.shape[1], method="dense"):
                return self.kernel(q.values, k.values, v.values)

        return attend


def _make_contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    with trace.span("copy", x):
        return x.contiguous()


def _wait_for_qkv(incoming: _IncomingChunk) -> QKV:
    """Waits for the all-to-alls of a chunk; returns q, k and v, which nothing else references."""
    tensors = [x for pending in incoming.pending for x in pending.wait_tensors()]
    scales: Sequence[Tensor | None] = tensors[3:] or [None] * 3
    q, k, v = map(AttentionInput, tensors[:3], scales, incoming.rows_per_scale)
    return q, k, v
