"""The Ulysses exchange (arXiv:2309.14509): heads against tokens, by one all-to-all.

Legend: B batch, s this rank's tokens, S the group's tokens, N all heads, h heads of a rank,
D head size, P ranks in the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor


class Alone:
    """Stands for a group of this process only, also where torch.distributed runs for others."""


ALONE = Alone()
Group = dist.ProcessGroup | Alone | None
"""None: the default group where there is one, else this process alone."""


def group_size(group: Group) -> int:
    alone = group is ALONE or not dist.is_initialized()
    return 1 if alone else dist.get_world_size(group)  # type: ignore[arg-type]


def group_rank(group: Group) -> int:
    alone = group is ALONE or not dist.is_initialized()
    return 0 if alone else dist.get_rank(group)  # type: ignore[arg-type]


class Pending:
    """An exchange under way. What is being sent stays alive until `wait`."""

    def __init__(self, parts: Tensor, axis: int, work: Any = None, send: Tensor | None = None):
        """parts: what is received, the group's ranks in front of their tokens or heads (axis)."""
        self._parts: Tensor | None = parts
        self._axis, self._work, self._send = axis, work, send

    def wait(self, into: Tensor | None = None) -> Tensor:
        """The result; written to `into` where given, which saves a copy. Call it once."""
        assert self._parts is not None, "an exchange is waited for once"
        if self._work is not None:
            self._work.wait()
        parts, axis = self._parts, self._axis
        self._work = self._send = None  # a work may hold on to what it has sent
        if not torch.compiler.is_compiling():  # there, later exchanges may refer to it
            self._parts = None
        if into is None:
            return parts.flatten(axis, axis + 1).contiguous()
        into.unflatten(axis, (parts.shape[axis], -1)).copy_(parts)
        return into


def all_to_all_4D(x: Tensor, scatter_idx: int, gather_idx: int, group: Group) -> Tensor:
    """Exchange a [B, tokens, heads, D] tensor over `group`; every rank must call it.

    scatter_idx=2, gather_idx=1: [B,s,N,D] -> [B,S,h,D], heads are scattered, tokens gathered.
    scatter_idx=1, gather_idx=2: [B,S,h,D] -> [B,s,N,D], the way back. Any dtype; float8 travels as
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
) -> Pending:
    """`all_to_all_4D` as a handle; with async_op the transfer runs beside what follows.

    One contiguous copy per direction: going, heads are packed by rank (the tokens then arrive in
    order); coming back, each rank's heads are put between the others' (batch 1; else one more).
    after: an exchange that a compiler must not start this one before; eager calls run as they come.
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
    send_PBxxx = _pack(x.unflatten(scatter_idx, (ranks, -1)).movedim(scatter_idx, 0), after)
    received, work = _all_to_all(as_bytes(send_PBxxx), group, async_op)
    parts = received.view(x.dtype).movedim(0, gather_idx)
    return Pending(parts, gather_idx, work, send_PBxxx if async_op else None)


def _pack(x: Tensor, after: Pending | None) -> Tensor:
    """x in contiguous memory."""
    if after is None or after._parts is None or not torch.compiler.is_compiling():
        return x.contiguous()
    return _pack_after(x, after._parts)


@torch.library.custom_op("wan::pack_after", mutates_args=())
def _pack_after(x: Tensor, after: Tensor) -> Tensor:
    """`_pack` as one opaque operation that needs `after`: no compiler can move it ahead of that.

    Nothing else keeps a compiled graph from exchanging all chunks before the first is attended to.
    """
    return x.clone(memory_format=torch.contiguous_format)


@_pack_after.register_fake
def _(x: Tensor, after: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _all_to_all(send: Tensor, group: Group, async_op: bool) -> tuple[Tensor, Any]:
    """Part i of the first axis goes to rank i."""
    if torch.compiler.is_compiling():  # a functional collective stays in the graph
        return funcol.all_to_all_single(send, None, None, _resolved(group)), None
    received = torch.empty_like(send)
    return received, dist.all_to_all_single(received, send, group=group, async_op=async_op)


def as_bytes(x: Tensor) -> Tensor:
    """gloo knows no float8; one byte is as good as another."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _resolved(group: Group) -> dist.ProcessGroup:
    return dist.group.WORLD if group is None else group  # type: ignore[return-value]
