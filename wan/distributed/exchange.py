"""The all-to-all of Ulysses sequence parallelism (arXiv:2309.14509): heads against tokens.

Legend: B batch, s this rank's tokens, S the group's tokens, N all heads, h heads of a rank,
D head size, P ranks in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from wan import trace
from wan.distributed import compiled
from wan.distributed.pieces import Part, Pieces, packed
from wan.torch_private import all_gather, all_to_all_in_graph


class Alone(Enum):
    """A group of this process only, also where torch.distributed is initialized."""

    ALONE = "alone"


ALONE = Alone.ALONE
Group = dist.ProcessGroup | Alone | None
"""None: the default group if torch.distributed is initialized, else this process only."""


def process_group(group: Group) -> dist.ProcessGroup | None:
    """Converts a group of several ranks to the argument that torch.distributed takes."""
    return None if group is Alone.ALONE else group


def group_size(group: Group) -> int:
    alone = group is ALONE or not dist.is_initialized()
    return 1 if alone else dist.get_world_size(process_group(group))


def group_rank(group: Group) -> int:
    alone = group is ALONE or not dist.is_initialized()
    return 0 if alone else dist.get_rank(process_group(group))


class Pending:
    """A started all-to-all. It keeps the send buffer alive until the result is waited for.

    Args:
        received: The receive buffer; on a single rank the tensors themselves.
        gathers_heads: The exchange gathers heads and scatters tokens.
        work: None: the exchange has finished.
        name: Of the exchange in a trace; empty on a single rank.

    Attributes:
        graph_output: The received tensor in a compiled graph; orders a later exchange after it.
    """

    def __init__(
        self,
        received: Pieces | Sequence[Tensor],
        back: bool = False,
        work: dist.Work | None = None,
        send: Tensor | None = None,
        what: str = "",
    ) -> None:
        self._received: Pieces | Sequence[Tensor] | None = received
        self._back, self._work, self._send, self.what = back, work, send, what
        self.in_graph: Tensor | None = None
        if torch.compiler.is_compiling() and isinstance(received, Pieces):
            self.in_graph = received.memory

    def tensors(self) -> list[Tensor]:
        """Waits for the exchange and returns views [B,S,h,D] of all its tensors; call it once."""
        with trace.span("a2a wait" if self.what else "copy", what=self.what):
            received = self._arrived()
            if isinstance(received, Pieces):
                return received.tensors()
            return [x.contiguous() for x in received]

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Waits for an exchange of one tensor and returns it; call it once.

        With `out` the result is written into it; without, the result is contiguous.
        """
        if not self._back:
            (x,) = self.tensors()
            return x.contiguous() if into is None else into.copy_(x)
        with trace.span("a2a wait" if self.what else "copy", what=self.what):
            received = self._arrived()
            if not isinstance(received, Pieces):
                return received[0].contiguous() if into is None else into.copy_(received[0])
            part, heads = received.parts[0], sum(received.heads)
            if into is None:
                shape = (part.batch, part.rows, heads, part.width)
                into = torch.empty(shape, dtype=part.dtype, device=received.memory.device)
            for (first, last), run in received.runs(0):
                x_BsmhD = run[..., 0, :].movedim(0, 2)
                into[:, :, first:last].unflatten(2, x_BsmhD.shape[2:4]).copy_(x_BsmhD)
            return into

    def _arrived(self) -> Pieces | Sequence[Tensor]:
        received = self._received
        assert received is not None, "an exchange is waited for once"
        if self._work is not None:
            self._work.wait()
        self._received = self._work = self._send = None  # a Work may reference the send buffer
        return received


def all_to_all_4D(
    x: Tensor, scatter_idx: int, gather_idx: int, group: Group, heads: Sequence[int] | None = None
) -> Tensor:
    """Exchanges a [B, tokens, heads, D] tensor of any dtype; every rank of the group must call it.

    With scatter_idx=2 and gather_idx=1, [B,s,N,D] becomes [B,S,h,D]: heads are scattered and tokens
    gathered. With scatter_idx=1 and gather_idx=2, [B,S,h,D] becomes [B,s,N,D] again. float8 is sent
    as bytes. heads: heads of each rank; None: the same number on every rank.

    Raises:
        ValueError: The two axes are not (2, 1) or (1, 2), or the scattered axis cannot be divided
            by the ranks.
    """
    axes = scatter_idx, gather_idx
    return start_all_to_all_4D(x, *axes, group, heads=heads, async_op=False).wait()


def start_all_to_all_4D(
    x: Tensor,
    scatter_idx: int,
    gather_idx: int,
    group: Group,
    *,
    heads: Sequence[int] | None = None,
    async_op: bool = True,
    after: Pending | None = None,
    what: str = "x",
) -> Pending:
    """Starts `all_to_all_4D` and returns a handle.

    Each direction makes one contiguous copy. Scattering packs the heads by rank, so that the
    received tokens are in order; gathering interleaves the heads of all ranks (with a batch above
    1 this takes one more copy).

    Args:
        async_op: Returns before the exchange has finished.
        after: In a compiled graph this exchange is ordered after that one; eager calls keep order.
        name: Of the exchange in a trace.
    """
    if (scatter_idx, gather_idx) not in ((2, 1), (1, 2)):
        raise ValueError(
            f"scatter_idx and gather_idx are {scatter_idx} and {gather_idx}; "
            "use 2 and 1 to scatter heads, or 1 and 2 to gather them."
        )
    ranks, size = group_size(group), x.shape[scatter_idx]
    if size % ranks and (scatter_idx == 1 or heads is None):
        axis = {1: "tokens", 2: "heads"}[scatter_idx]
        raise ValueError(f"{size} {axis} cannot be divided among {ranks} ranks.")
    if scatter_idx == 2:
        heads = (size // ranks,) * ranks if heads is None else heads
        return start_in([x], heads, group, async_op=async_op, after=after, what=what)
    heads = (x.shape[2],) * ranks if heads is None else heads
    return start_out(x, heads, group, async_op=async_op, what=what)


def start_in(
    tensors: Sequence[Tensor] | Pieces,
    heads: Sequence[int],
    group: Group,
    *,
    async_op: bool = True,
    after: Pending | None = None,
    what: str = "x",
) -> Pending:
    """Starts one all-to-all of several tensors, [B,s,N,D] each, to [B,S,h,D].

    Args:
        tensors: The tensors, or a send buffer that holds them.
        heads: Heads of each rank.
        async_op: Returns before the exchange has finished.
        after: In a compiled graph this exchange is ordered after that one; eager calls keep order.
        name: Of the exchange in a trace.
    """
    if len(heads) == 1:
        return Pending(tensors.tensors() if isinstance(tensors, Pieces) else tensors)
    if isinstance(tensors, Pieces):
        send = tensors
    elif torch.compiler.is_compiling():
        send = compiled.packed(tensors, heads, None if after is None else after.in_graph)
    else:
        with trace.span("pack", what=what):
            send = packed(tensors, heads)
    arriving = (heads[group_rank(group)],) * len(heads)
    return _started(send, arriving, group, async_op, False, what)


def start_out(
    x_BShD: Tensor, heads: Sequence[int], group: Group, *, async_op: bool = True, what: str = "out"
) -> Pending:
    """Starts the all-to-all [B,S,h,D] -> [B,s,N,D]; arguments as for `start_scatter_heads`."""
    ranks = len(heads)
    if ranks == 1:
        return Pending([x_BShD], back=True)
    batch, rows, mine, width = x_BShD.shape
    part = Part(batch, rows // ranks, 1, width, x_BShD.dtype)
    pieces = as_bytes(x_BShD).unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
    send = Pieces([part], (mine,) * ranks, pieces)
    return _started(send, heads, group, async_op, True, what)


def _started(
    send: Pieces, arriving: Sequence[int], group: Group, async_op: bool, back: bool, what: str
) -> Pending:
    """Starts the all-to-all of a send buffer. received_heads: heads received from each rank."""
    received = Pieces(send.parts, arriving, send.memory.device)
    arrives, leaves = received.memory, send.memory
    splits: list[list[int] | None] = [received.splits, send.splits]
    if len({*send.heads, *arriving}) == 1:  # unequal sizes need flat memory
        arrives, leaves, splits = received.by_rank, send.by_rank, [None, None]
    if torch.compiler.is_compiling():
        in_graph = all_to_all_in_graph(leaves, splits[0], splits[1], process_group(group))
        return Pending(Pieces(send.parts, arriving, in_graph), back, what=what)
    with trace.span("a2a", leaves, what=what, beside=async_op):
        options = process_group(group), async_op
        work = dist.all_to_all_single(arrives, leaves, splits[0], splits[1], *options)
    return Pending(received, back, work, send.memory if async_op else None, what)


def all_gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Gathers [B,s,...] of every rank to [B,S,...] in rank order, for any dtype."""
    out = torch.empty(group_size(group), *x.shape, dtype=x.dtype, device=x.device)
    received, send = as_bytes(out).flatten(0, 1), as_bytes(x.contiguous())
    all_gather(received, send, process_group(group))
    return out.movedim(0, 1).flatten(1, 2)


def as_bytes(x: Tensor) -> Tensor:
    """Views a tensor with one byte per element as uint8, because gloo has no float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
