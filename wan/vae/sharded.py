"""Row parallelism of the autoencoder; results are exact for any height and number of ranks.

Every rank runs all layers on its rows of the frames. Convolutions exchange one halo row with each
neighbouring rank, attention gathers the keys and values of all rows, and the main rank (0) gathers
the output frames.

A rank that runs out of memory must not block the others in an exchange: it runs the remaining
layers of the latent frame on meta tensors and sends zeros. An all-reduce then raises MemoryError on
all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from wan.distributed.exchange import Group, group_rank, process_group
from wan.settings.errors import is_out_of_memory
from wan.vae.rows import Rows, State

T = TypeVar("T")


def even(height: int, ranks: int) -> tuple[int, ...]:
    """Splits rows over ranks as evenly as possible; the last ranks may have none."""
    return tuple(height // ranks + (rank < height % ranks) for rank in range(ranks))


class ShardedRows(Rows):
    """The rows that one rank of a group computes.

    heights: Rows of latents of each rank, from top to bottom; at least one on the main rank. A rank
    without rows calls `wait_for_steps` instead of the network.
    """

    def __init__(self, group: Group, heights: Sequence[int], device: torch.device) -> None:
        self.group, self.heights, self.device = group, tuple(heights), device
        self.rank = group_rank(group)
        self.ranks = [rank for rank, height in enumerate(heights) if height]
        stop = list(accumulate(heights))[self.rank]
        self._rows = stop - heights[self.rank], stop
        self.exchanges = 0  # in this latent frame

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no rows."""
        return self.rank not in self.ranks

    @property
    def share(self) -> float:
        """Fraction of all rows that this rank computes."""
        return self.heights[self.rank] / sum(self.heights)

    def own(self, x_BCFHW: Tensor, scale: int) -> Tensor:
        start, stop = (end * scale for end in self._rows)
        # Remaining rows, fewer than a row of latents has, belong to the last rank.
        return x_BCFHW[..., start : None if self.rank == self.ranks[-1] else stop, :]

    def halo(self, x_BCFHW: Tensor, above: int, below: int) -> None:
        place, height = self.ranks.index(self.rank), x_BCFHW.shape[3]
        before = self.ranks[place - 1] if place else None
        after = self.ranks[place + 1] if place + 1 < len(self.ranks) else None
        top, bottom = x_BCFHW[..., :above, :], x_BCFHW[..., height - below :, :]
        end = height - below
        sent, received = dict[int, Tensor](), dict[int, Tensor]()
        if before is not None and below:
            sent[before] = x_BCFHW[..., above : above + below, :].contiguous()
        if after is not None and above:
            sent[after] = x_BCFHW[..., end - above : end, :].contiguous()
        for peer, rows in ((before, top), (after, bottom)):
            if peer is None:
                rows.zero_()
            elif rows.shape[3]:
                received[peer] = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._exchange(sent, received)
        for peer, rows in ((before, top), (after, bottom)):
            if peer in received:
                rows.copy_(received[peer])

    def gather(self, x_FLC: Tensor) -> Tensor:
        """Gathers the rows of one frame; with one frame the rows of each rank are contiguous."""
        columns = x_FLC.shape[1] // self.heights[self.rank]
        lengths = [self.heights[rank] * columns for rank in self.ranks]
        whole = x_FLC.new_empty((1, sum(lengths), x_FLC.shape[2]))
        parts = dict(zip(self.ranks, whole.split(lengths, dim=1), strict=True))
        own = parts.pop(self.rank)
        own.copy_(x_FLC)
        self._exchange(dict.fromkeys(parts, own), parts)
        return whole

    def step(self, half: nn.Module, x_BCFHW: Tensor, state: State) -> Tensor:
        is_first = not state.past
        self.exchanges = 0

        def follow() -> None:
            past = {
                conv: deque(map(_without_data, frames), frames.maxlen)
                for conv, frames in (() if is_first else state.past.items())
            }
            state.past.clear()
            weights = {name: _without_data(x) for name, x in half.named_parameters()}
            rows = _Following(self)
            frames = functional_call(half, weights, (_without_data(x_BCFHW), State(rows, past)))
            rows.collect(frames)

        return self.together(lambda: self.collect(half(x_BCFHW, state)), follow)

    def together(self, make: Callable[[], T], follow: Callable[[], None] = lambda: None) -> T:
        """Returns make(), called on every rank that has rows.

        finish_exchanges: Called if make() ran out of memory; takes part in its remaining exchanges.

        Raises:
            MemoryError: On all ranks, if one ran out of memory.
        """
        found: list[T] = []
        try:
            found.append(make())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if not found:  # the error and the tensors in its traceback are freed
            try:
                follow()
            except Exception as error:  # this rank exits, then the others
                raise RuntimeError("A rank without memory could not join the exchanges.") from error
        self._agree(bool(found))
        return found[0]

    def wait(self, steps: int) -> Tensor:
        """Takes part in the all-reduces of `num_steps` calls of `run_together`, without rows."""
        for _ in range(steps):
            self._agree(True)
        return torch.empty(0)

    def collect(self, x_BCFHW: Tensor) -> Tensor:
        """Gathers all rows on the main rank; returns no rows on other ranks."""
        if self.rank:
            self._exchange({0: x_BCFHW.contiguous()}, {})
            return x_BCFHW[..., :0, :]
        b, c, frames, rows, columns = x_BCFHW.shape
        scale = rows // self.heights[0]
        parts = {
            rank: x_BCFHW.new_empty((b, c, frames, self.heights[rank] * scale, columns))
            for rank in self.ranks[1:]
        }
        self._exchange({}, parts)
        return torch.cat((x_BCFHW, *parts.values()), dim=3) if parts else x_BCFHW

    def _exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends a contiguous tensor to each peer and receives one from each; keys are ranks."""
        group = process_group(self.group)
        operations = [
            dist.P2POp(verb, tensor, group=group, group_peer=peer)
            for verb, tensors in ((dist.isend, sent), (dist.irecv, received))
            for peer, tensor in tensors.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        self.exchanges += 1

    def _agree(self, succeeded: bool) -> None:
        all_did = torch.tensor([succeeded], dtype=torch.int32, device=self.device)
        dist.all_reduce(all_did, dist.ReduceOp.MIN, group=process_group(self.group))
        if not all_did.item():
            raise MemoryError("A rank has run out of memory in the autoencoder.")


class _Following(ShardedRows):
    """The rows of a rank that ran out of memory: sends zeros and discards received rows.

    Exchanges that had finished before the failure are skipped.
    """

    def __init__(self, rows: ShardedRows) -> None:
        super().__init__(rows.group, rows.heights, rows.device)
        self._over = rows.exchanges

    def _exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        if self._over:
            self._over -= 1
            return
        super()._exchange(self._zeros(sent), self._zeros(received))

    def _zeros(self, of: Mapping[int, Tensor]) -> dict[int, Tensor]:
        device = self.device
        return {peer: torch.zeros(x.shape, dtype=x.dtype, device=device) for peer, x in of.items()}


def _without_data(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")
