"""The all-to-all of Ulysses sequence parallelism (arXiv:2309.14509), which trades heads for tokens.

Legend: B batch, s this rank's tokens, S the group's tokens, N all heads, h heads of a rank,
D head size, P ranks in the group.
"""

from __future__ import annotations

from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from wan import torch_private, trace
from wan.distributed import compiled


class Alone(Enum):
    """Stands for a group of this process only, also where torch.distributed runs for others."""

    ALONE = "alone"


ALONE = Alone.ALONE
Group = dist.ProcessGroup | Alone | None
"""None: the default group where there is one, else this process alone."""


def process_group(group: Group) -> dist.ProcessGroup | None:
    """Returns the group in the form that torch.distributed takes; it must have several ranks."""
    return None if group is Alone.ALONE else group


def group_size(group: Group) -> int:
    alone = group is ALONE or not dist.is_initialized()
    return 1 if alone else dist.get_world_size(process_group(group))


def group_rank(group: Group) -> int:
    alone = group is ALONE or not dist.is_initialized()
    return 0 if alone else dist.get_rank(process_group(group))


class Pending:
    """An exchange that has been started. It keeps the sent tensor alive until `wait`.

    Attributes:
        in_graph: What a compiled graph has received; a later exchange may be ordered after it.
        what: The name of the exchange in a trace; empty where nothing is sent.
    """

    def __init__(
        self,
        parts: Tensor,
        axis: int,
        work: dist.Work | None = None,
        send: Tensor | None = None,
        in_graph: Tensor | None = None,
        what: str = "",
    ) -> None:
        """Takes the received tensor: axis `axis` counts ranks, the next their tokens or heads."""
        self._parts: Tensor | None = parts
        self._axis, self._work, self._send = axis, work, send
        self.in_graph, self.what = in_graph, what

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Waits for the exchange, once; returns its result, which `into` gets without a copy."""
        with trace.span("a2a wait" if self.what else "copy", what=self.what):
            return self._wait(into)

    def _wait(self, into: Tensor | None) -> Tensor:
        assert self._parts is not None, "an exchange is waited for once"
        if self._work is not None:
            self._work.wait()
        parts, axis = self._parts, self._axis
        self._parts = self._work = self._send = None  # a work may hold on to what it has sent
        if into is None:
            return parts.flatten(axis, axis + 1).contiguous()
        into.unflatten(axis, (parts.shape[axis], -1)).copy_(parts)
        return into


def all_to_all_4D(x: Tensor, scatter_idx: int, gather_idx: int, group: Group) -> Tensor:
    """Exchanges a [B, tokens, heads, D] tensor of any dtype; every rank of the group must call it.

    With scatter_idx=2 and gather_idx=1, [B,s,N,D] becomes [B,S,h,D]: heads are scattered and tokens
    gathered. With scatter_idx=1 and gather_idx=2, [B,S,h,D] becomes [B,s,N,D] again. float8 is sent
    as bytes.

    Raises:
        ValueError: The axes are others, or the scattered axis is not a multiple of the ranks.
    """
    return start_all_to_all_4D(x, scatter_idx, gather_idx, group, async_op=False).wait()


def start_all_to_all_4D(
    x: Tensor,
    scatter_idx: int,
    gather_idx: int,
    group: Group,
    *,
    async_op: bool = True,
    after: Pending | None = None,
    what: str = "x",
) -> Pending:
    """Starts `all_to_all_4D` and returns a handle.

    Each direction makes one contiguous copy. On the way there heads are packed by rank, so that
    tokens arrive in order; on the way back each rank's heads are placed between the others' (with
    a batch above 1 that takes one more copy).

    Args:
        x: The tensor, as for `all_to_all_4D`.
        scatter_idx: The axis that is scattered.
        gather_idx: The axis that is gathered.
        group: The ranks.
        async_op: The exchange runs beside what follows.
        after: A compiler must not start this exchange before that one; eager calls keep order.
        what: The name of the exchange in a trace.
    """
    if (scatter_idx, gather_idx) not in ((2, 1), (1, 2)):
        raise ValueError(
            f"scatter_idx and gather_idx are {scatter_idx} and {gather_idx}; "
            "use 2 and 1, or 1 and 2 for the way back."
        )
    ranks = group_size(group)
    if x.shape[scatter_idx] % ranks:
        axis = {1: "tokens", 2: "heads"}[scatter_idx]
        raise ValueError(f"{x.shape[scatter_idx]} {axis} cannot be divided among {ranks} ranks.")
    if ranks == 1:
        return Pending(x.unsqueeze(gather_idx), gather_idx)
    x_PBxxx = as_bytes(x).unflatten(scatter_idx, (ranks, -1)).movedim(scatter_idx, 0)
    if torch.compiler.is_compiling():
        earlier = None if after is None else after.in_graph
        received = compiled.all_to_all(x_PBxxx, earlier, process_group(group))
        parts = received.view(x.dtype).movedim(0, gather_idx)
        return Pending(parts, gather_idx, in_graph=received)
    with trace.span("a2a", x, what=what, beside=async_op):
        send = x_PBxxx.contiguous()
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=process_group(group), async_op=async_op)
    parts = received.view(x.dtype).movedim(0, gather_idx)
    return Pending(parts, gather_idx, work, send if async_op else None, what=what)


def all_gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Gathers [B,s,...] of every rank to [B,S,...], in the order of the ranks, for any dtype."""
    out = torch.empty(group_size(group), *x.shape, dtype=x.dtype, device=x.device)
    received, send = as_bytes(out).flatten(0, 1), as_bytes(x.contiguous())
    torch_private.all_gather(received, send, process_group(group))
    return out.movedim(0, 1).flatten(1, 2)


def as_bytes(x: Tensor) -> Tensor:
    """Returns a view of bytes of tensors with one byte per element, because gloo has no float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
