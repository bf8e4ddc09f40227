"""Sequence-parallel self-attention with FA_Power_Cap (docs/fa_power_cap.md).

Legend: B batch, s this rank's tokens, S tokens of this rank's Ulysses group (all tokens, if there
is no ring), P Ulysses size, N all heads, N_c heads of a chunk, h_c heads of a chunk on this rank,
D head size.

Attention is split into head chunks, and the all-to-alls of Ulysses run between them, so that the
device idles between the attention kernels of two chunks and its power stays low; mode 2 also splits
the queries of a chunk into blocks. A row of `MODES` defines how many chunks and blocks there are
and in which order they run; `OVERLAP` runs the all-to-alls during attention instead. One loop
executes every mode. A chunk is computed by the dense kernel or by an `AttentionBackend` (FP8,
block-sparse).
No other module calls both all-to-alls and attention kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Protocol

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
from wan.settings import attention_modes
from wan.settings.attention_modes import Range
from wan.settings.parallel import EXCHANGES
from wan.utils import trace

QKVTensors = tuple[Tensor, Tensor, Tensor]
Chunk = QKVTensors | PackedBuffer
"""q, k and v of a head chunk, [B,s,N_c,D] each, or the send buffer into which they were written."""


class HasCommType(Protocol):
    """Command-line arguments with the attention mode."""

    @property
    def comm_type(self) -> int: ...


class _CallSpec(NamedTuple):
    """The parameters of one call; in a chunk's copy, `step` has the chunk's first head.

    Attributes:
        shape: [B,s,N,D] of the result.
        chunk_heads: chunk_heads[c][r] is the number of heads of chunk c on rank r.
        backend: None: the dense kernel.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    chunk_heads: tuple[tuple[int, ...], ...]
    valid_len: int | None
    backend: AttentionBackend | None
    step: StepInfo | None

    @property
    def head_ranges(self) -> tuple[Range, ...]:
        """Range of global heads of each chunk."""
        ends = list(accumulate(map(sum, self.chunk_heads)))
        return tuple(zip([0, *ends], ends, strict=False))


class _IncomingChunk(NamedTuple):
    """The all-to-alls of a chunk that are in flight, and the rows per scale of q, k and v."""

    pending: list[PendingExchange]
    rows_per_scale: tuple[int, ...] = (1, 1, 1)


class _PackedCall(NamedTuple):
    """Implements `wan.modules.interfaces.PackedAttentionCall`."""

    attention: FAPowerCapAttention
    buffer: PackedBuffer

    def write(self, index: int, x_BsND: Tensor, first_token: int = 0) -> None:
        self.buffer.write(index, x_BsND, first_token)

    def finish(self, *, valid_len: int | None = None, step: StepInfo | None = None) -> Tensor:
        return self.attention.attend_packed(self.buffer, valid_len=valid_len, step=step)


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
        args: HasCommType | None = None,
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
        spec = self._make_call_spec(query.shape, query, valid_len, step, layer)
        chunks = self._split_qkv_by_head((query, key, value), spec.head_ranges)
        with self.clock:
            return self._dispatch(chunks, spec)

    def start_packed_call(
        self, x_BsC: Tensor, num_heads: int, step: StepInfo | None
    ) -> _PackedCall | None:
        """Starts a call whose q, k and v are written directly into the all-to-all send buffer.

        Args:
            x_BsC: Any tensor of this rank's tokens; only its shape, dtype and device are used.
            num_heads: N.
            step: As in `__call__`.

        Returns:
            None if q, k and v must be passed to `__call__` as tensors: with split all-to-alls, with
            a backend that quantizes before the exchange, and under autograd or torch.compile.
        """
        needs_tensors = torch.compiler.is_compiling() or torch.is_grad_enabled()
        if self.exchange != "fused" or self.ulysses_size == 1 or needs_tensors:
            return None
        batch, num_tokens, channels = x_BsC.shape
        spec = self._make_call_spec(
            (batch, num_tokens, num_heads, channels // num_heads), x_BsC, None, step
        )
        if spec.backend is not None and spec.backend.quantizes_before_exchange:
            return None
        tensor_spec = TensorSpec(batch, num_tokens, 3, channels // num_heads, x_BsC.dtype)
        heads = [count for counts in spec.chunk_heads for count in counts]
        buffer = PackedBuffer([tensor_spec], heads, x_BsC.device)
        return _PackedCall(self, buffer)

    def attend_packed(
        self, buffer: PackedBuffer, *, valid_len: int | None = None, step: StepInfo | None = None
    ) -> Tensor:
        """Computes attention of q, k and v in a send buffer; the buffer's memory is released."""
        (tensor_spec,) = buffer.specs
        shape = (tensor_spec.batch, tensor_spec.rows, sum(buffer.heads_per_slot), tensor_spec.width)
        spec = self._make_call_spec(shape, buffer.memory, valid_len, step)
        with self.clock:
            return self._dispatch(dict(enumerate(buffer.split_chunks(spec.chunk_heads))), spec)

    def _make_call_spec(
        self,
        shape: Sequence[int],
        like: Tensor,
        valid_len: int | None,
        step: StepInfo | None,
        layer: int | None = None,
    ) -> _CallSpec:
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
        chunk_heads = attention_modes.split_heads(num_heads, self.ulysses_size, self.mode.chunks)
        return _CallSpec(shape, like.dtype, like.device, chunk_heads, valid_len, backend, step)

    def _dispatch(self, chunks: dict[int, Chunk], spec: _CallSpec) -> Tensor:
        """Runs the loop in the method that FA_Power_Cap publishes for the mode, if there is one."""
        if self.fa_alltoall_overlap:
            return self._run_fa_alltoall_overlap(chunks, spec)
        if self.comm_type == 1:
            return self._run_insertcomm(chunks, spec)
        if self.comm_type == 2:
            return self._run_blockattn(chunks, spec)
        if self.comm_type == 0:
            return self._run_baseline(chunks, spec)
        return self._run_chunks(chunks, spec)

    def _run_baseline(self, chunks: dict[int, Chunk], spec: _CallSpec) -> Tensor:
        return self._run_chunks(chunks, spec)

    def _run_insertcomm(self, chunks: dict[int, Chunk], spec: _CallSpec) -> Tensor:
        return self._run_chunks(chunks, spec)

    def _run_blockattn(self, chunks: dict[int, Chunk], spec: _CallSpec) -> Tensor:
        return self._run_chunks(chunks, spec)

    def _run_fa_alltoall_overlap(self, chunks: dict[int, Chunk], spec: _CallSpec) -> Tensor:
        return self._run_chunks(chunks, spec)

    def _run_chunks(self, chunks: dict[int, Chunk], spec: _CallSpec) -> Tensor:
        """Runs the actions (start, attend, finish) on the chunks in the order of the mode.

        The all-to-alls of a chunk are issued after those of the last finished chunk; a compiled
        graph keeps this order by a data dependency.
        """
        out_BsND: Tensor | None = None  # allocated late: attention is the memory peak
        incoming: dict[int, _IncomingChunk] = {}
        outgoing: dict[int, PendingExchange] = {}
        last_finished: PendingExchange | None = None
        head_ranges = spec.head_ranges
        for action, chunk_index in self.mode.order(len(chunks)):
            (start, stop), heads_per_rank = head_ranges[chunk_index], spec.chunk_heads[chunk_index]
            chunk_spec = spec
            if spec.backend is not None and spec.step is not None:
                first_head = start + sum(heads_per_rank[: self.ulysses_rank])
                chunk_spec = spec._replace(step=replace(spec.step, first_head=first_head))
            with trace.add_context(chunk=chunk_index):
                if action == "start":
                    qkv = chunks.pop(chunk_index)
                    incoming[chunk_index] = self._exchange_in(
                        qkv, heads_per_rank, chunk_spec, last_finished
                    )
                    del qkv
                elif action == "attend":
                    result = self._attend_chunk(incoming.pop(chunk_index), chunk_spec)
                    outgoing[chunk_index] = self._exchange_out(result, heads_per_rank)
                    del result
                else:
                    last_finished = outgoing.pop(chunk_index)
                    if out_BsND is None:
                        out_BsND = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
                    last_finished.wait(out=out_BsND[:, :, start:stop])
        assert out_BsND is not None, "no chunk was computed"
        return out_BsND

    def _split_qkv_by_head(
        self, qkv: QKVTensors, head_ranges: tuple[Range, ...]
    ) -> dict[int, Chunk]:
        """Slices q, k and v into views of the heads of each chunk."""
        q, k, v = qkv
        return {
            chunk_index: (q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop])
            for chunk_index, (start, stop) in enumerate(head_ranges)
        }

    def _prepare_for_exchange(self, qkv_BsND: QKVTensors, spec: _CallSpec) -> QKV:
        """Converts q, k and v to the tensors that are sent; only some backends quantize here."""
        if spec.backend is None:
            q, k, v = qkv_BsND
            return AttentionInput(q), AttentionInput(k), AttentionInput(v)
        num_tokens = num_valid = qkv_BsND[0].shape[1]
        if spec.valid_len is not None:
            ring_rank = 0 if self.ring is None else self.ring.rank
            shard = ring_rank * self.ulysses_size + self.ulysses_rank
            num_valid = attention_modes.count_valid_rows(spec.valid_len, shard, num_tokens)
        return spec.backend.quantize(*qkv_BsND, num_valid, spec.step)

    def _exchange_in(
        self,
        chunk: Chunk,
        heads_per_rank: tuple[int, ...],
        spec: _CallSpec,
        after: PendingExchange | None,
    ) -> _IncomingChunk:
        """Starts the all-to-alls [B,s,N_c,D] -> [B,S,h_c,D] of q, k and v.

        Heads are scattered and tokens gathered. The values of q, k and v are sent first, then the
        small scales; a fused exchange sends all of them in one all-to-all.
        """

        def start_exchange(tensors: Sequence[Tensor] | PackedBuffer, label: str) -> PendingExchange:
            group, overlaps = self.ulysses_pg, self.overlaps
            return start_scatter_heads(
                tensors, heads_per_rank, group, async_op=overlaps, after=after, name=label
            )

        if isinstance(chunk, PackedBuffer):
            return _IncomingChunk([start_exchange(chunk, "qkv")])
        qkv = self._prepare_for_exchange(chunk, spec)
        rows_per_scale = tuple(x.rows_per_scale for x in qkv)
        named_tensors = {name: x.values for name, x in zip("qkv", qkv, strict=True)}
        for name, x in zip("qkv", qkv, strict=True):
            named_tensors |= {} if x.scale is None else {f"{name} scale": x.scale}
        if self.exchange == "fused" and self.ulysses_size > 1:
            return _IncomingChunk(
                [start_exchange(list(named_tensors.values()), "qkv")], rows_per_scale
            )
        return _IncomingChunk(
            [start_exchange([x], name) for name, x in named_tensors.items()], rows_per_scale
        )

    def _exchange_out(self, out_BShD: Tensor, heads_per_rank: tuple[int, ...]) -> PendingExchange:
        """Starts the all-to-all [B,S,h_c,D] -> [B,s,N_c,D] of a chunk's result."""
        return start_gather_heads(out_BShD, heads_per_rank, self.ulysses_pg, async_op=self.overlaps)

    def _attend_chunk(self, incoming: _IncomingChunk, spec: _CallSpec) -> Tensor:
        """Computes one chunk [B,S,h_c,D], a query block at a time; padded rows are zeros."""
        q, k, v = _wait_for_qkv(incoming)
        if self.contiguous:
            q, k, v = (x.map(_make_contiguous) for x in (q, k, v))
        num_tokens = q.values.shape[1]
        ring_size, ring_rank = (1, 0) if self.ring is None else (self.ring.size, self.ring.rank)
        total_valid = ring_size * num_tokens if spec.valid_len is None else spec.valid_len
        valid_per_rank = [
            attention_modes.count_valid_rows(total_valid, rank, num_tokens)
            for rank in range(ring_size)
        ]
        row_multiple = 1 if spec.backend is None else spec.backend.q_multiple
        ranges = attention_modes.q_ranges(valid_per_rank[ring_rank], self.mode.blocks, row_multiple)
        query_blocks = [(start, stop) for start, stop in ranges if start < stop]
        block_outputs = self._attend_query_blocks(q, k, v, query_blocks, valid_per_rank, spec)
        if query_blocks == [(0, num_tokens)]:
            return block_outputs[0]
        out = torch.empty(q.values.shape, dtype=spec.dtype, device=q.values.device)
        for (start, stop), block_output in zip(query_blocks, block_outputs, strict=True):
            out[:, start:stop] = block_output
        out[:, valid_per_rank[ring_rank] :] = 0
        return out

    def _attend_query_blocks(
        self,
        q: AttentionInput,
        k: AttentionInput,
        v: AttentionInput,
        query_blocks: list[Range],
        valid_per_rank: list[int],
        spec: _CallSpec,
    ) -> list[Tensor]:
        """Computes attention of each query block to the keys of all ring ranks."""
        if self.ring is not None:
            if spec.backend is None and self.kernel.can_return_lse:
                queries = [q.values[:, start:stop] for start, stop in query_blocks]
                return self.ring.attend(
                    self.kernel.with_lse, queries, k.values, v.values, valid_per_rank
                )
            with trace.span("gather", k.values, what="k"):
                k = k.map(self.ring.gather)
            with trace.span("gather", v.values, what="v"):
                v = v.map(self.ring.gather)
        k, v = k.slice_rows(0, sum(valid_per_rank)), v.slice_rows(0, sum(valid_per_rank))
        if not query_blocks:
            return []
        attend = self._make_dense_attend(k, v)
        if spec.backend is not None:
            attend = spec.backend.prepare_kv(q.slice_rows(0, query_blocks[-1][1]), k, v, spec.step)
        outputs = []
        for block, (start, stop) in enumerate(query_blocks):
            with trace.add_context(block=block):
                outputs.append(attend(q.slice_rows(start, stop), start))
        return outputs

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
