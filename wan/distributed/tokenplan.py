"""Which tokens each card computes, as integers (no torch, so that it can be planned anywhere)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenPlan:
    """Equal, consecutive shards of a sequence; what is missing at its end is padding (integers).

    tokens: real tokens. cards: how many share them. multiple: a shard's length is a multiple of
    this (the row blocks of quantised exchanges and sparse masks).
    """

    tokens: int
    cards: int
    multiple: int = 1

    @property
    def shard_len(self) -> int:
        per_card = -(-self.tokens // self.cards)
        return -(-per_card // self.multiple) * self.multiple

    @property
    def padded(self) -> int:
        """Length of the whole sequence with padding."""
        return self.shard_len * self.cards

    def valid(self, rank: int) -> int:
        """Real tokens of a card; they come before its padding."""
        return min(max(self.tokens - rank * self.shard_len, 0), self.shard_len)

    def runs(self, lengths: Sequence[int], rank: int) -> tuple[int, ...]:
        """Lengths, within a card's shard, of runs given by their whole lengths.

        Padding belongs to the last run. Runs that the shard does not touch have length 0.
        """
        begin, end = rank * self.shard_len, (rank + 1) * self.shard_len
        borders = [sum(lengths[:i]) for i in range(len(lengths))] + [self.padded]
        clipped = [min(max(b, begin), end) for b in borders]
        return tuple(b - a for a, b in zip(clipped, clipped[1:], strict=False))
