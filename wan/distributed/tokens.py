"""Which tokens each card computes.

Legend: B batch, S all tokens, L this card's tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wan.distributed.exchange import Group, group_rank, group_size
from wan.distributed.tokenplan import TokenPlan


class ShardedTokens:
    """Implements `wan.modules.local.TokenShard` over a group: card i computes the i-th shard."""

    def __init__(self, group: Group, multiple: int = 1) -> None:
        self.group, self.multiple = group, multiple
        self.cards, self.rank = group_size(group), group_rank(group)

    def plan(self, tokens: int) -> TokenPlan:
        return TokenPlan(tokens, self.cards, self.multiple)

    def shard(self, x_BSC: Tensor) -> Tensor:
        """[B,S,...] -> [B,L,...], zero-padded where the sequence has ended."""
        plan = self.plan(x_BSC.shape[1])
        begin = self.rank * plan.shard_len
        own = x_BSC[:, begin : begin + plan.valid(self.rank)]
        missing = plan.shard_len - own.shape[1]
        # Cloned: the block updates its input in place, and the whole sequence can be freed.
        return F.pad(own, [0, 0] * (own.dim() - 2) + [0, missing]) if missing else own.clone()

    def gather(self, x_BLC: Tensor, tokens: int) -> Tensor:
        """[B,L,C] -> [B,tokens,C] on every card."""
        x_BLC = x_BLC.contiguous()
        out = torch.empty(self.cards, *x_BLC.shape, dtype=x_BLC.dtype, device=x_BLC.device)
        dist.all_gather_single(out.flatten(0, 1), x_BLC, self.group)
        return out.movedim(0, 1).flatten(1, 2)[:, :tokens]

    def runs(self, lengths: Sequence[int]) -> tuple[int, ...]:
        return self.plan(sum(lengths)).runs(lengths, self.rank)
