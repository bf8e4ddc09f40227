"""The all-to-all of Ulysses sequence parallelism (arXiv:2309.14509): heads against tokens.

Legend: B batch, s this rank's tokens, S the group's tokens, N all heads, h heads of a rank,
m ranks with equal numbers of heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wan.distributed import compiled
from wan.distributed.packed_buffer import PackedBuffer, TensorSpec, pack_tensors
from wan.utils import trace
from wan.utils.torch_private import all_gather, all_to_all_in_graph


class SingleRank(Enum):
    """A group of this process only, also where torch.distributed is initialized."""

    SINGLE_RANK = "alone"


SINGLE_RANK = SingleRank.SINGLE_RANK
Group = dist.ProcessGroup | SingleRank | None
"""None: the default group if torch.distributed is initialized, else this process only."""


def to_process_group(group: Group) -> dist.ProcessGroup | None:
    """Converts a group of several ranks to the argument that torch.distributed takes.

    Not for collectives of a single rank: PyTorch takes None for the default group.
    """
    return None if group is SingleRank.SINGLE_RANK else group


def get_group_size(group: Group) -> int:
    is_single = group is SINGLE_RANK or not dist.is_initialized()
    return 1 if is_single else dist.get_world_size(to_process_group(group))


def get_group_rank(group: Group) -> int:
    is_single = group is SINGLE_RANK or not dist.is_initialized()
    return 0 if is_single else dist.get_rank(to_process_group(group))


class PendingExchange:
    """A started all-to-all. It keeps the send buffer alive until the result is waited for.

    Args:
        received: Receive buffer; on a single rank, the tensors of the caller.
        gathers_heads: Whether heads are gathered and tokens scattered, instead of the reverse.
        work: None: the exchange has finished.
        name: Label of the exchange in traces; empty on a single rank, where nothing is sent.

    Attributes:
        graph_output: The received tensor in a compiled graph; orders a later exchange after it.
    """

    def __init__(
        self,
        received: PackedBuffer | Sequence[Tensor],
        gathers_heads: bool = False,
        work: dist.Work | None = None,
        send_buffer: Tensor | None = None,
        name: str = "",
    ) -> None:
        self._received: PackedBuffer | Sequence[Tensor] | None = received
        self._gathers_heads, self._work, self._send_buffer = gathers_heads, work, send_buffer
        self.name = name
        self.graph_output: Tensor | None = None
        if torch.compiler.is_compiling() and isinstance(received, PackedBuffer):
            self.graph_output = received.memory

    def wait_tensors(self) -> list[Tensor]:
        """Waits for the exchange and returns views [B,S,h,D] of all its tensors; call it once."""
        with trace.span("a2a wait" if self.name else "copy", what=self.name):
            received = self._take_received()
            if isinstance(received, PackedBuffer):
                return received.unpack()
            return [x.contiguous() for x in received]

    def wait(self, out: Tensor | None = None) -> Tensor:
        """Waits for an exchange of one tensor and returns it; call it once.

        With `out`, the result is copied into it and `out` is returned; otherwise it is contiguous.
        """
        if not self._gathers_heads:
            (x,) = self.wait_tensors()
            return x.contiguous() if out is None else out.copy_(x)
        with trace.span("a2a wait" if self.name else "copy", what=self.name):
            received = self._take_received()
            if not isinstance(received, PackedBuffer):
                return received[0].contiguous() if out is None else out.copy_(received[0])
            spec, num_heads = received.specs[0], sum(received.heads_per_slot)
            if out is None:
                shape = (spec.batch, spec.rows, num_heads, spec.width)
                out = torch.empty(shape, dtype=spec.dtype, device=received.memory.device)
            for (start, stop), view in received.iter_views(0):
                x_BsmhD = view[..., 0, :].movedim(0, 2)
                out[:, :, start:stop].unflatten(2, x_BsmhD.shape[2:4]).copy_(x_BsmhD)
            return out

    def _take_received(self) -> PackedBuffer | Sequence[Tensor]:
        received = self._received
        assert received is not None, "the exchange was already waited for"
        if self._work is not None:
            self._work.wait()
        # The work is dropped too, because it may reference the send buffer.
        self._received = self._work = self._send_buffer = None
        return received


def all_to_all_4D(
    x: Tensor,
    scatter_idx: int,
    gather_idx: int,
    group: Group,
    heads_per_rank: Sequence[int] | None = None,
) -> Tensor:
    """Exchanges a [B, tokens, heads, D] tensor of any dtype; every rank of the group must call it.

    With scatter_idx=2 and gather_idx=1, [B,s,N,D] becomes [B,S,h,D]: heads are scattered and tokens
    gathered. With scatter_idx=1 and gather_idx=2, [B,S,h,D] becomes [B,s,N,D] again. float8 is sent
    as bytes. heads_per_rank: number of heads of each rank, in total N; None: equal numbers.

    Raises:
        ValueError: The two axes are not (2, 1) or (1, 2), or the number of ranks does not divide
            the scattered tokens or, without `heads_per_rank`, the scattered heads.
    """
    axes = scatter_idx, gather_idx
    return start_all_to_all_4D(
        x, *axes, group, heads_per_rank=heads_per_rank, async_op=False
    ).wait()


def start_all_to_all_4D(
    x: Tensor,
    scatter_idx: int,
    gather_idx: int,
    group: Group,
    *,
    heads_per_rank: Sequence[int] | None = None,
    async_op: bool = True,
    after: PendingExchange | None = None,
    name: str = "x",
) -> PendingExchange:
    """Starts `all_to_all_4D` and returns a handle.

    Scattering copies once, before the exchange: it packs the heads by rank, so that the received
    tokens are in order. Gathering copies once, after it: it interleaves the heads of all ranks. A
    batch above 1 takes one more copy in either direction.

    Args:
        async_op: Returns before the exchange has finished.
        after: In a compiled graph this exchange is ordered after that one; eager calls keep order.
        name: Label of the exchange in traces.
    """
    if (scatter_idx, gather_idx) not in ((2, 1), (1, 2)):
        raise ValueError(
            f"scatter_idx and gather_idx are {scatter_idx} and {gather_idx}; "
            "use 2 and 1 to scatter heads, or 1 and 2 to gather them."
        )
    num_ranks, axis_size = get_group_size(group), x.shape[scatter_idx]
    if axis_size % num_ranks and (scatter_idx == 1 or heads_per_rank is None):
        axis = {1: "tokens", 2: "heads"}[scatter_idx]
        raise ValueError(f"{axis_size} {axis} cannot be divided among {num_ranks} ranks.")
    if scatter_idx == 2:
        heads_per_rank = (
            (axis_size // num_ranks,) * num_ranks if heads_per_rank is None else heads_per_rank
        )
        return start_scatter_heads(
            [x], heads_per_rank, group, async_op=async_op, after=after, name=name
        )
    heads_per_rank = (x.shape[2],) * num_ranks if heads_per_rank is None else heads_per_rank
    return start_gather_heads(x, heads_per_rank, group, async_op=async_op, name=name)


def start_scatter_heads(
    tensors: Sequence[Tensor] | PackedBuffer,
    heads_per_rank: Sequence[int],
    group: Group,
    *,
    async_op: bool = True,
    after: PendingExchange | None = None,
    name: str = "x",
) -> PendingExchange:
    """Starts one all-to-all of several tensors, [B,s,N,D] each, to [B,S,h,D].

    Args:
        tensors: The tensors, or a send buffer that holds them.
        heads_per_rank: Number of heads of each rank.
        async_op: Returns before the exchange has finished.
        after: In a compiled graph this exchange is ordered after that one; eager calls keep order.
        name: Label of the exchange in traces.
    """
    if len(heads_per_rank) == 1:
        return PendingExchange(tensors.unpack() if isinstance(tensors, PackedBuffer) else tensors)
    if isinstance(tensors, PackedBuffer):
        send_buffer = tensors
    elif torch.compiler.is_compiling():
        send_buffer = compiled.pack_in_graph(
            tensors, heads_per_rank, None if after is None else after.graph_output
        )
    else:
        with trace.span("pack", what=name):
            send_buffer = pack_tensors(tensors, heads_per_rank)
    received_heads = (heads_per_rank[get_group_rank(group)],) * len(heads_per_rank)
    return _start_exchange(send_buffer, received_heads, group, async_op, False, name)


def start_gather_heads(
    x_BShD: Tensor,
    heads_per_rank: Sequence[int],
    group: Group,
    *,
    async_op: bool = True,
    name: str = "out",
) -> PendingExchange:
    """Starts the all-to-all [B,S,h,D] -> [B,s,N,D]; see `start_scatter_heads`."""
    num_ranks = len(heads_per_rank)
    if num_ranks == 1:
        return PendingExchange([x_BShD], gathers_heads=True)
    batch, num_tokens, num_local_heads, width = x_BShD.shape
    spec = TensorSpec(batch, num_tokens // num_ranks, 1, width, x_BShD.dtype)
    memory = view_bytes_as_uint8(x_BShD).unflatten(1, (num_ranks, -1)).movedim(1, 0).contiguous()
    send_buffer = PackedBuffer([spec], (num_local_heads,) * num_ranks, memory)
    return _start_exchange(send_buffer, heads_per_rank, group, async_op, True, name)


def _start_exchange(
    send_buffer: PackedBuffer,
    received_heads: Sequence[int],
    group: Group,
    async_op: bool,
    gathers_heads: bool,
    name: str,
) -> PendingExchange:
    """Starts the all-to-all of a send buffer. received_heads: number of heads from each rank."""
    received = PackedBuffer(send_buffer.specs, received_heads, send_buffer.memory.device)
    recv_tensor, send_tensor = received.memory, send_buffer.memory
    splits: list[list[int] | None] = [received.splits, send_buffer.splits]
    if len({*send_buffer.heads_per_slot, *received_heads}) == 1:  # unequal sizes need flat memory
        recv_tensor, send_tensor, splits = received.by_rank, send_buffer.by_rank, [None, None]
    if torch.compiler.is_compiling():
        graph_output = all_to_all_in_graph(
            send_tensor, splits[0], splits[1], to_process_group(group)
        )
        return PendingExchange(
            PackedBuffer(send_buffer.specs, received_heads, graph_output), gathers_heads, name=name
        )
    with trace.span("a2a", send_tensor, what=name, beside=async_op):
        options = to_process_group(group), async_op
        work = dist.all_to_all_single(recv_tensor, send_tensor, splits[0], splits[1], *options)
    return PendingExchange(
        received, gathers_heads, work, send_buffer.memory if async_op else None, name
    )


def distributed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attends over the tokens of all ranks of the default group, like the official function.

    `wan.modules.attnlayer.FAPowerCapAttention` is the layer of this package, with modes, kernels
    and head counts that the ranks do not divide.

    Args:
        q, k, v: This rank's tokens [B,s,N,D] of all heads.
        seq_lens: Valid tokens of each sample over all ranks, [B]; they precede the others.

    Returns:
        [B,s,N,D] in the dtype of q; computed in bfloat16 unless v has 16 bits.

    Raises:
        NotImplementedError: There is a window.
    """
    if tuple(window_size) != (-1, -1):
        raise NotImplementedError(f"window_size is {window_size}; only (-1, -1) is supported.")
    dtype = v.dtype if v.dtype.itemsize == 2 else torch.bfloat16
    q_BNSD, k_BNSD, v_BNSD = (
        all_to_all_4D(x.to(dtype), 2, 1, None).transpose(1, 2) for x in (q, k, v)
    )
    out_BNSD = torch.cat(
        [
            F.scaled_dot_product_attention(
                q_BNSD[b : b + 1], k_BNSD[b : b + 1, :, :valid], v_BNSD[b : b + 1, :, :valid]
            )
            for b, valid in enumerate(seq_lens.tolist())
        ]
    )
    return all_to_all_4D(out_BNSD.transpose(1, 2).to(q.dtype), 1, 2, None)


def all_gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Gathers [B,s,...] of every rank to [B,S,...] in rank order, for any dtype."""
    out = torch.empty(get_group_size(group), *x.shape, dtype=x.dtype, device=x.device)
    recv_bytes = view_bytes_as_uint8(out).flatten(0, 1)
    send_bytes = view_bytes_as_uint8(x.contiguous())
    all_gather(recv_bytes, send_bytes, to_process_group(group))
    return out.movedim(0, 1).flatten(1, 2)


def view_bytes_as_uint8(x: Tensor) -> Tensor:
    """Views a tensor of any one-byte dtype as uint8, because gloo has no float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
