"""The Ulysses exchange (arXiv:2309.14509): heads against tokens, by one all-to-all.

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
    """The group as torch.distributed takes it, where it is known to have several ranks."""
    return None if group is Alone.ALONE else group


def group_size(group: Group) -> int:
    alone = group is ALONE or not dist.is_initialized()
    return 1 if alone else dist.get_world_size(process_group(group))


def group_rank(group: Group) -> int:
    alone = group is ALONE or not dist.is_initialized()
    return 0 if alone else dist.get_rank(process_group(group))


class Pending:
    """An exchange under way. What is being sent stays alive until `wait`.

    in_graph: what a compiled graph has received; a later exchange may be told to come after it.
    what: its name in a trace; empty where nothing is sent.
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
        """parts: what is received, the group's ranks in front of their tokens or heads (axis)."""
        self._parts: Tensor | None = parts
        self._axis, self._work, self._send = axis, work, send
        self.in_graph, self.what = in_graph, what

    def wait(self, into: Tensor | None = None) -> Tensor:
        """The result; written to `into` where given, which saves a copy. Call it once."""
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
    """Exchange a [B, tokens, heads, D] tensor over `group`; every rank must call it.

    scatter_idx=2, gather_idx=1: [B,s,N,D] -> [B,S,h,D], heads are scattered, tokens gathered.
    scatter_idx=1, gather_idx=2: [B,S,h,D] -> [B,s,N,D], the way back. Any dtype; float8 is sent as
    bytes. Raises ValueError for other axes and sizes that do not divide.
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
    """`all_to_all_4D` as a handle.

    One contiguous copy per direction: going, heads are packed by rank (the tokens then arrive in
    order); coming back, each rank's heads are put between the others' (batch 1; else one more).

    async_op: it runs beside what follows. after: an exchange that a compiler must not start this
    one before; eager calls run as they come. what: its name in a trace.
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
    """[B,s,...] of every rank -> [B,S,...], in the order of the ranks. Any dtype."""
    out = torch.empty(group_size(group), *x.shape, dtype=x.dtype, device=x.device)
    received, send = as_bytes(out).flatten(0, 1), as_bytes(x.contiguous())
    torch_private.all_gather(received, send, process_group(group))
    return out.movedim(0, 1).flatten(1, 2)


def as_bytes(x: Tensor) -> Tensor:
    """gloo knows no float8; one byte is as good as another."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
