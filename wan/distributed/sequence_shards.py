"""Shards the token sequence over ranks, optionally in a permuted order.

Legend: B batch, S all tokens, L this rank's tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.distributed.ulysses import Group, all_gather_tokens, get_group_rank, get_group_size
from wan.settings.attention_modes import Grid, TokenPlan
from wan.utils import trace


class _Permutation(NamedTuple):
    """A token order, int64 [S], and its inverse."""

    order: Tensor
    inverse: Tensor


class ShardedSequence:
    """Implements `wan.modules.interfaces.SequenceShard` over a group: rank i has the i-th shard.

    Args:
        group: The ranks that share the sequence.
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
        self.num_ranks, self.rank = get_group_size(group), get_group_rank(group)
        self._permutations: dict[tuple[Grid, torch.device], _Permutation] = {}

    def make_token_plan(self, num_tokens: int) -> TokenPlan:
        return TokenPlan(num_tokens, self.num_ranks, self.multiple)

    def count_valid_tokens(self, num_tokens: int) -> int:
        """Counts this rank's tokens without padding."""
        return self.make_token_plan(num_tokens).count_valid_tokens(self.rank)

    def get_local_offset(self, num_tokens: int) -> int:
        return self.rank * self.make_token_plan(num_tokens).shard_len

    def get_padded_length(self, num_tokens: int) -> int:
        return self.make_token_plan(num_tokens).padded_len

    def permute(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        """Permutes the global sequence [B,S,...] from raster order to `order`."""
        return (
            x_BSC
            if self.order is None
            else x_BSC[:, self._get_permutation(grid, x_BSC.device).order]
        )

    def shard(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        """Returns this rank's shard [B,L,...] of [B,S,...], padded with zeros at the end."""
        plan = self.make_token_plan(x_BSC.shape[1])
        begin = self.rank * plan.shard_len
        end = begin + plan.count_valid_tokens(self.rank)
        x_BLC = x_BSC[:, begin:end]
        if self.order is not None:
            x_BLC = x_BSC[:, self._get_permutation(grid, x_BSC.device).order[begin:end]]
        num_padding = plan.shard_len - x_BLC.shape[1]
        if num_padding:
            return F.pad(x_BLC, [0, 0] * (x_BLC.dim() - 2) + [0, num_padding])
        # Cloned: blocks update their input in place, and the global sequence can be freed.
        return x_BLC.clone() if self.order is None else x_BLC

    def gather(self, x_BLC: Tensor, grid: Grid) -> Tensor:
        """Gathers the shards [B,L,C] to [B,S,C] in raster order on every rank."""
        with trace.span("gather", x_BLC, what="velocity"):
            x_BSC = all_gather_tokens(x_BLC, self.group) if self.num_ranks > 1 else x_BLC
        if self.order is None:
            return x_BSC[:, : prod(grid)]
        return x_BSC[:, self._get_permutation(grid, x_BSC.device).inverse]

    def get_local_segment_lengths(self, segment_lengths: Sequence[int]) -> tuple[int, ...]:
        return self.make_token_plan(sum(segment_lengths)).shard_segments(segment_lengths, self.rank)

    def _get_permutation(self, grid: Grid, device: torch.device) -> _Permutation:
        """Returns `order` and its inverse on a device; only the most recent grid is cached."""
        assert self.order is not None
        if (grid, device) not in self._permutations:
            self._permutations = {k: v for k, v in self._permutations.items() if k[0] == grid}
            order = self.order(grid)
            inverse = torch.argsort(order)
            self._permutations[grid, device] = _Permutation(order.to(device), inverse.to(device))
        return self._permutations[grid, device]
