"""q, k, v on their way between ranks: tensors, or FP8 numbers together with their scales.

Legend: B batch, s this rank's tokens, S the group's, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from wan.distributed.exchange import Group, Pending, start_all_to_all_4D
from wan.distributed.ring import Ring
from wan.kernels.fp8 import Quantised

Outgoing = Pending
Incoming = list[tuple[list[Pending], int]]
"""For each of q, k, v: the exchanges under way, and the rows of a scale (0: a plain tensor)."""


def send(
    packed_BsND: Sequence[Any], group: Group, async_op: bool, after: Pending | None
) -> Incoming:
    """Start [B,s,N,D] -> [B,S,h,D] for each: heads scattered, tokens gathered.

    Payloads go first, all of them, then the scales: these are small and of a kind of their own.
    """

    def start(x: Tensor) -> Pending:
        return start_all_to_all_4D(x, 2, 1, group, async_op=async_op, after=after)

    quantised = [isinstance(x, Quantised) for x in packed_BsND]
    found = [
        ([start(x.payload if is_pair else x)], x.rows if is_pair else 0)
        for x, is_pair in zip(packed_BsND, quantised, strict=True)
    ]
    for x, is_pair, (pending, _) in zip(packed_BsND, quantised, found, strict=True):
        if is_pair:
            pending.append(start(x.scale))
    return found


def receive(incoming: Incoming) -> list[Any]:
    """What `send` sent, once it has arrived; the list is emptied, so that nothing is kept alive."""
    arrived = []
    while incoming:
        pending, rows = incoming.pop(0)
        payload, *scale = (exchange.wait() for exchange in pending)
        arrived.append(Quantised(payload, scale[0], rows) if rows else payload)
    return arrived


def send_back(out_BSND: Tensor, group: Group, async_op: bool) -> Outgoing:
    """Start [B,S,h,D] -> [B,s,N,D]."""
    return start_all_to_all_4D(out_BSND, 1, 2, group, async_op=async_op)


def gathered(ring: Ring, x: Any) -> Any:
    """All ranks' K or V at once, [B,R*S,N,D], for kernels whose results cannot be merged."""
    if isinstance(x, Quantised):
        return Quantised(ring.gather(x.payload), ring.gather(x.scale), x.rows)
    return ring.gather(x)


def cut(x: Any, first: int, last: int) -> Any:
    """Rows of q, k or v. Of FP8 numbers `first` is where a scale begins."""
    return x.cut(first, last) if isinstance(x, Quantised) else x[:, first:last]
