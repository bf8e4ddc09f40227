"""Row parallelism of the VAE, for any height and number of ranks; results equal those of one rank.

Every rank runs all layers on its rows of the frames. Convolutions exchange one halo row with each
neighboring rank, attention gathers the keys and values of all rows, and the main rank (0) gathers
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

from wan.distributed.ulysses import Group, get_group_rank, to_process_group
from wan.modules.vae.rows import Rows, VaeState
from wan.settings.errors import is_out_of_memory

T = TypeVar("T")


def split_rows_evenly(height: int, num_ranks: int) -> tuple[int, ...]:
    """Returns the number of rows of each rank, as even as possible; the last may have none.

    Ranks get pairs of rows, because Winograd's tiles have two rows (`wan.modules.vae.winograd`).
    """
    num_pairs = -(-height // 2)
    pairs = [num_pairs // num_ranks + (rank < num_pairs % num_ranks) for rank in range(num_ranks)]
    ends = [min(height, 2 * end) for end in accumulate(pairs)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


class ShardedRows(Rows):
    """The rows that one rank of a group computes.

    A rank without rows calls `join_memory_agreements` instead of the network.

    Args:
        heights: Number of latent rows of each rank, from top to bottom; at least one on rank 0.
    """

    def __init__(self, group: Group, heights: Sequence[int], device: torch.device) -> None:
        self.group, self.heights, self.device = group, tuple(heights), device
        self.rank = get_group_rank(group)
        self.active_ranks = [rank for rank, height in enumerate(heights) if height]
        stop = list(accumulate(heights))[self.rank]
        self._row_range = stop - heights[self.rank], stop
        self.num_exchanges = 0  # in this latent frame

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no rows."""
        return self.rank not in self.active_ranks

    @property
    def row_fraction(self) -> float:
        """Fraction of all rows that this rank computes."""
        return self.heights[self.rank] / sum(self.heights)

    def slice_local_rows(self, x_BCFHW: Tensor, scale: int) -> Tensor:
        start, stop = (end * scale for end in self._row_range)
        # Pixel rows that do not fill a latent row belong to the last rank.
        return x_BCFHW[..., start : None if self.rank == self.active_ranks[-1] else stop, :]

    def exchange_halo(self, x_BCFHW: Tensor, num_above: int, num_below: int) -> None:
        index, height = self.active_ranks.index(self.rank), x_BCFHW.shape[3]
        rank_above = self.active_ranks[index - 1] if index else None
        rank_below = self.active_ranks[index + 1] if index + 1 < len(self.active_ranks) else None
        top, bottom = x_BCFHW[..., :num_above, :], x_BCFHW[..., height - num_below :, :]
        end = height - num_below
        to_send, receive_buffers = dict[int, Tensor](), dict[int, Tensor]()
        if rank_above is not None and num_below:
            to_send[rank_above] = x_BCFHW[..., num_above : num_above + num_below, :].contiguous()
        if rank_below is not None and num_above:
            to_send[rank_below] = x_BCFHW[..., end - num_above : end, :].contiguous()
        for peer, halo in ((rank_above, top), (rank_below, bottom)):
            if peer is None:
                halo.zero_()
            elif halo.shape[3]:
                receive_buffers[peer] = torch.empty(
                    halo.shape, dtype=halo.dtype, device=halo.device
                )
        self._exchange(to_send, receive_buffers)
        for peer, halo in ((rank_above, top), (rank_below, bottom)):
            if peer in receive_buffers:
                halo.copy_(receive_buffers[peer])

    def gather_rows(self, x_FLC: Tensor) -> Tensor:
        """Gathers the rows of one frame. F must be 1, so that each rank's rows are contiguous."""
        columns = x_FLC.shape[1] // self.heights[self.rank]
        lengths = [self.heights[rank] * columns for rank in self.active_ranks]
        all_rows = x_FLC.new_empty((1, sum(lengths), x_FLC.shape[2]))
        rows_by_rank = dict(zip(self.active_ranks, all_rows.split(lengths, dim=1), strict=True))
        local_rows = rows_by_rank.pop(self.rank)
        local_rows.copy_(x_FLC)
        self._exchange(dict.fromkeys(rows_by_rank, local_rows), rows_by_rank)
        return all_rows

    def run_network(self, network: nn.Module, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        is_first = not state.cached_frames
        self.num_exchanges = 0

        def finish_exchanges() -> None:
            cached_frames = {
                conv: deque(map(_to_meta, frames), frames.maxlen)
                for conv, frames in (() if is_first else state.cached_frames.items())
            }
            state.cached_frames.clear()
            weights = {name: _to_meta(x) for name, x in network.named_parameters()}
            failed_rank_rows = _FailedRankRows(self)
            failed_state = VaeState(failed_rank_rows, state.uses_winograd, cached_frames)
            frames = functional_call(network, weights, (_to_meta(x_BCFHW), failed_state))
            failed_rank_rows.gather_on_main(frames)

        return self.run_with_memory_agreement(
            lambda: self.gather_on_main(network(x_BCFHW, state)), finish_exchanges
        )

    def run_with_memory_agreement(
        self, make: Callable[[], T], finish_exchanges: Callable[[], None] = lambda: None
    ) -> T:
        """Calls `make` on this rank, and returns its result if no rank ran out of memory.

        Args:
            finish_exchanges: Called if `make` ran out of memory; takes part in the exchanges that
                `make` had left.

        Raises:
            MemoryError: On all ranks, if one ran out of memory.
        """
        results: list[T] = []
        try:
            results.append(make())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if not results:  # the error and the tensors in its traceback are freed
            try:
                finish_exchanges()
            except Exception as error:  # this rank exits, then the others
                why = "could not take part in the remaining exchanges"
                raise RuntimeError(f"A rank that ran out of memory {why}.") from error
        self._check_all_succeeded(bool(results))
        return results[0]

    def join_memory_agreements(self, num_agreements: int) -> Tensor:
        """Takes part in the all-reduces of as many `run_with_memory_agreement` of other ranks."""
        for _ in range(num_agreements):
            self._check_all_succeeded(True)
        return torch.empty(0)

    def gather_on_main(self, x_BCFHW: Tensor) -> Tensor:
        """Gathers all rows on the main rank; returns no rows on other ranks."""
        if self.rank:
            self._exchange({0: x_BCFHW.contiguous()}, {})
            return x_BCFHW[..., :0, :]
        b, c, frames, num_rows, columns = x_BCFHW.shape
        scale = num_rows // self.heights[0]
        rows_by_rank = {
            rank: x_BCFHW.new_empty((b, c, frames, self.heights[rank] * scale, columns))
            for rank in self.active_ranks[1:]
        }
        self._exchange({}, rows_by_rank)
        return torch.cat((x_BCFHW, *rows_by_rank.values()), dim=3) if rows_by_rank else x_BCFHW

    def _exchange(
        self, to_send: Mapping[int, Tensor], receive_buffers: Mapping[int, Tensor]
    ) -> None:
        """Sends a contiguous tensor to each peer and receives one from each; keys are ranks."""
        group = to_process_group(self.group)
        operations = [
            dist.P2POp(operation, tensor, group=group, group_peer=peer)
            for operation, tensors in ((dist.isend, to_send), (dist.irecv, receive_buffers))
            for peer, tensor in tensors.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        self.num_exchanges += 1

    def agree(self, flag: bool) -> bool:
        flags = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=to_process_group(self.group))
        return bool(flags.item())

    def _check_all_succeeded(self, succeeded: bool) -> None:
        if not self.agree(succeeded):
            raise MemoryError("A rank has run out of memory in the VAE.")


class _FailedRankRows(ShardedRows):
    """The rows of a rank that ran out of memory: sends zeros and discards received rows.

    Exchanges that had finished before the failure are skipped.
    """

    def __init__(self, rows: ShardedRows) -> None:
        super().__init__(rows.group, rows.heights, rows.device)
        self._num_to_skip = rows.num_exchanges

    def _exchange(
        self, to_send: Mapping[int, Tensor], receive_buffers: Mapping[int, Tensor]
    ) -> None:
        if self._num_to_skip:
            self._num_to_skip -= 1
            return
        super()._exchange(self._zeros(to_send), self._zeros(receive_buffers))

    def _zeros(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        device = self.device
        return {
            peer: torch.zeros(x.shape, dtype=x.dtype, device=device) for peer, x in tensors.items()
        }


def _to_meta(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")
