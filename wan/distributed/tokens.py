"""Shards the token sequence over ranks, optionally in a permuted order.

Legend: B batch, S all tokens, L this rank's tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from wan import trace
from wan.distributed.exchange import Group, all_gather_tokens, group_rank, group_size
from wan.settings.schedule import Grid, TokenPlan


class ShardedTokens:
    """Implements `wan.modules.interfaces.SequenceShard` over a group: rank i computes the i-th shard.

    Args:
        multiple: The length of a shard is a multiple of this.
        order: order(grid) returns int64 [S], the raster index of the token at each position; None
            keeps raster order.
    """

    def __init__(
        self,
        group: Group,
        multiple: int = 1,
        order: Callable[[Grid], Tensor] | None = None,
    ) -> None:
        self.group, self.multiple, self.order = group, multiple, order
        self.ranks, self.rank = group_size(group), group_rank(group)
        self._indices: dict[tuple[Grid, torch.device], tuple[Tensor, Tensor]] = {}

    def plan(self, tokens: int) -> TokenPlan:
        return TokenPlan(tokens, self.ranks, self.multiple)

    def valid(self, tokens: int) -> int:
        """Counts this rank's tokens without padding."""
        return self.plan(tokens).valid(self.rank)

    def first(self, tokens: int) -> int:
        return self.rank * self.plan(tokens).shard_len

    def arrange(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        """Permutes the global sequence [B,S,...] from raster order to `order`."""
        return x_BSC if self.order is None else x_BSC[:, self._index(grid, x_BSC.device)[0]]

    def shard(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        """Returns this rank's shard [B,L,...] of [B,S,...], padded with zeros at the end."""
        plan = self.plan(x_BSC.shape[1])
        begin = self.rank * plan.shard_len
        end = begin + plan.valid(self.rank)
        own = x_BSC[:, begin:end]
        if self.order is not None:
            own = x_BSC[:, self._index(grid, x_BSC.device)[0][begin:end]]
        missing = plan.shard_len - own.shape[1]
        if missing:
            return F.pad(own, [0, 0] * (own.dim() - 2) + [0, missing])
        # Cloned: blocks update their input in place, and the global sequence can be freed.
        return own.clone() if self.order is None else own

    def gather(self, x_BLC: Tensor, grid: Grid) -> Tensor:
        """Gathers the shards [B,L,C] to [B,S,C] in raster order on every rank."""
        with trace.span("gather", x_BLC, what="velocity"):
            whole = all_gather_tokens(x_BLC, self.group) if self.ranks > 1 else x_BLC
        if self.order is None:
            return whole[:, : prod(grid)]
        return whole[:, self._index(grid, whole.device)[1]]

    def runs(self, lengths: Sequence[int]) -> tuple[int, ...]:
        return self.plan(sum(lengths)).runs(lengths, self.rank)

    def _index(self, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns `order` and its inverse on a device; those of the last grid are cached."""
        assert self.order is not None
        if (grid, device) not in self._indices:
            self._indices = {k: v for k, v in self._indices.items() if k[0] == grid}
            order = self.order(grid)
            self._indices[grid, device] = order.to(device), torch.argsort(order).to(device)
        return self._indices[grid, device]
