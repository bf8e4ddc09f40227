"""The all-to-all of Ulysses sequence parallelism (arXiv:2309.14509), which trades heads for tokens.

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
    """An exchange that has been started. It keeps what is sent alive until `wait`.

    Args:
        received: Where it arrives, or where nothing is sent the tensors themselves.
        back: Heads come back: pieces are parts of the heads, not of the tokens.
        work: What is under way; None: it has arrived.
        send: What is sent.
        what: The name of the exchange in a trace; empty where nothing is sent.

    Attributes:
        in_graph: What a compiled graph has received; a later exchange may be ordered after it.
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
        """Waits for the exchange, once; the tensors [B,S,h,D] that were sent together, as views."""
        with trace.span("a2a wait" if self.what else "copy", what=self.what):
            received = self._arrived()
            if isinstance(received, Pieces):
                return received.tensors()
            return [x.contiguous() for x in received]

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Waits for an exchange of one tensor, once; returns it, which `into` gets without a copy.

        A result without `into` is contiguous.
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
        self._received = self._work = self._send = None  # a work may hold on to what it has sent
        return received


def all_to_all_4D(
    x: Tensor, scatter_idx: int, gather_idx: int, group: Group, heads: Sequence[int] | None = None
) -> Tensor:
    """Exchanges a [B, tokens, heads, D] tensor of any dtype; every rank of the group must call it.

    With scatter_idx=2 and gather_idx=1, [B,s,N,D] becomes [B,S,h,D]: heads are scattered and tokens
    gathered. With scatter_idx=1 and gather_idx=2, [B,S,h,D] becomes [B,s,N,D] again. float8 is sent
    as bytes. heads: how many of N belong to each rank; None: all have as many.

    Raises:
        ValueError: The axes are others, or the scattered axis is not a multiple of the ranks.
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

    Each direction makes one contiguous copy. On the way there heads are packed by rank, so that
    tokens arrive in order; on the way back each rank's heads are placed between the others' (with
    a batch above 1 that takes one more copy).

    Args:
        x: The tensor, as for `all_to_all_4D`.
        scatter_idx: The axis that is scattered.
        gather_idx: The axis that is gathered.
        group: The ranks.
        heads: As for `all_to_all_4D`.
        async_op: The exchange runs beside what follows.
        after: A compiler must not start this exchange before that one; eager calls keep order.
        what: The name of the exchange in a trace.
    """
    if (scatter_idx, gather_idx) not in ((2, 1), (1, 2)):
        raise ValueError(
            f"scatter_idx and gather_idx are {scatter_idx} and {gather_idx}; "
            "use 2 and 1, or 1 and 2 for the way back."
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
    """Starts one exchange of all these tensors, [B,s,N,D] each, to [B,S,h,D].

    Args:
        tensors: What is sent; or the pieces that hold it already.
        heads: How many of N belong to each rank.
        group: The ranks.
        async_op: The exchange runs beside what follows.
        after: A compiler must not start this exchange before that one; eager calls keep order.
        what: The name of the exchange in a trace.
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
    """Starts the exchange back, [B,S,h,D] to [B,s,N,D]; arguments as `start_in`."""
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
    """arriving: heads of the piece of each rank."""
    received = Pieces(send.parts, arriving, send.memory.device)
    arrives, leaves = received.memory, send.memory
    splits: list[list[int] | None] = [received.splits, send.splits]
    if len({*send.heads, *arriving}) == 1:  # other sizes need flat memory
        arrives, leaves, splits = received.by_rank, send.by_rank, [None, None]
    if torch.compiler.is_compiling():
        in_graph = all_to_all_in_graph(leaves, splits[0], splits[1], process_group(group))
        return Pending(Pieces(send.parts, arriving, in_graph), back, what=what)
    with trace.span("a2a", leaves, what=what, beside=async_op):
        options = process_group(group), async_op
        work = dist.all_to_all_single(arrives, leaves, splits[0], splits[1], *options)
    return Pending(received, back, work, send.memory if async_op else None, what)


def all_gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Gathers [B,s,...] of every rank to [B,S,...], in the order of the ranks, for any dtype."""
    out = torch.empty(group_size(group), *x.shape, dtype=x.dtype, device=x.device)
    received, send = as_bytes(out).flatten(0, 1), as_bytes(x.contiguous())
    all_gather(received, send, process_group(group))
    return out.movedim(0, 1).flatten(1, 2)


def as_bytes(x: Tensor) -> Tensor:
    """Returns a view of bytes of tensors with one byte per element, because gloo has no float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
