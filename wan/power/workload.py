"""One rank's work in one layer, from the model's arithmetic: operations, bytes, and their order.

Legend: S all tokens, L tokens of a rank, C channels, D channels of a head, P ranks that exchange
heads (Ulysses), R ranks of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from wan.modules.schedule import Mode, TokenPlan, heads_per_chunk, q_ranges
from wan.power.assumptions import Assumptions
from wan.power.governor import Segment
from wan.run import Run

EXCHANGED = 4  # tensors of a layer that are exchanged: q, k, v, and the result


@dataclass(frozen=True)
class Workload:
    """What a run computes and sends, on the rank that has the most.

    Attributes:
        plan: How the ranks share the tokens.
        channels: C.
        ffn: Channels of the feed-forward.
        heads: In all.
        text: Tokens of the prompt, which cross-attention looks at.
        ulysses: P.
        ring: R.
        layers: Layer calls of a rank: layers x steps x guidance branches that it computes.
    """

    plan: TokenPlan
    channels: int
    ffn: int
    heads: int
    text: int
    ulysses: int
    ring: int
    layers: int

    @property
    def local_heads(self) -> int:
        """Heads that a rank attends with: the most chunks that there can be."""
        return self.heads // self.ulysses

    @property
    def rows(self) -> int:
        """Queries of a rank's attention: the tokens of its Ulysses group."""
        return min(self.plan.tokens, self.plan.shard_len * self.ulysses)

    def attention_flops(self, heads: int, rows: int, keys: int) -> int:
        """Two products, a multiply-add counting two."""
        return 4 * rows * keys * heads * self.channels // self.heads

    @property
    def linear_flops(self) -> int:
        """Of a layer but for its self-attention: q, k, v and o, cross-attention's q and o and its
        two products (the text's keys and values are kept), the feed-forward.
        """
        c = self.channels
        per_token = 2 * 6 * c * c + 4 * self.text * c + 2 * 2 * c * self.ffn
        return self.plan.shard_len * per_token

    def exchange_bytes(self, heads: int, element: float) -> float:
        """What a rank sends of one tensor with as many of its heads; its own share stays."""
        elements = self.plan.shard_len * heads * self.channels // self.heads
        return elements * (self.ulysses - 1) * element

    def hop_bytes(self, heads: int, element: float) -> float:
        """Keys and values that a rank passes on to the next of the ring."""
        rows = self.plan.shard_len * self.ulysses
        return 2 * rows * heads * self.channels // self.heads * element


def workload(run: Run) -> Workload:
    """Of a planned run."""
    parallel, config, request = run.setup.parallel, run.setup.checkpoint.config, run.request
    ranks = parallel.sequence_size
    multiple = run.setup.attention.row_multiple(parallel.ring_size)
    branches = 2 if request.guided and parallel.cfg_size == 1 else 1
    return Workload(
        TokenPlan(prod(request.grid), ranks, multiple),
        channels=config["dim"],
        ffn=config["ffn_dim"],
        heads=config["num_heads"],
        text=config["text_len"],
        ulysses=parallel.ulysses_size,
        ring=parallel.ring_size,
        layers=config["num_layers"] * request.sample_steps * branches,
    )


def layer(work: Workload, mode: Mode, chunks: int, by: Assumptions) -> tuple[Segment, ...]:
    """A layer in a mode's order: attention, and what the device waits for between its calls.

    Two lanes, one that computes and one that sends, each in the order of `mode.order`; what the
    second one does while the first one computes costs no time.

    Args:
        work: The rank's.
        mode: Its order and query blocks.
        chunks: Head chunks, instead of the mode's.
        by: Rates.
    """
    found, now, lane = list[Segment](), 0.0, 0.0
    sizes = heads_per_chunk(work.heads, work.ulysses, chunks)
    arrived, returned = dict[int, float](), dict[int, float]()

    def spend(kind: str, seconds: float) -> None:
        nonlocal now
        if seconds <= 0:
            return
        now += seconds
        if found and found[-1][0] == kind == "comm":
            seconds += found.pop()[1]
        found.append((kind, seconds))

    for verb, chunk in mode.order(len(sizes)):
        size = work.exchange_bytes(sizes[chunk], by.element_bytes)
        one = size / (by.link_gbs * 1e9) + by.exchange_us / 1e6
        if verb == "start":
            arrived[chunk] = lane = max(lane, now) + (EXCHANGED - 1) * one
        elif verb == "attend":
            spend("comm", arrived[chunk] - now)
            for kind, seconds in _attention(work, mode, sizes[chunk], by):
                spend(kind, seconds)
            returned[chunk] = lane = max(lane, now) + one
        else:
            spend("comm", returned[chunk] - now)
    spend("linear", work.linear_flops / (by.linear_tflops * 1e12))
    return tuple(found)


def _attention(work: Workload, mode: Mode, heads: int, by: Assumptions) -> list[Segment]:
    """One chunk's calls; in a ring the next keys and values come while these are attended to."""
    found = list[Segment]()
    hop = work.hop_bytes(heads, by.element_bytes) / (by.link_gbs * 1e9) + by.exchange_us / 1e6
    blocks = q_ranges(work.rows, mode.blocks)
    borders = [work.plan.tokens * i // work.ring for i in range(work.ring + 1)]
    for index, (first, end) in enumerate(pairwise(borders)):
        taken = 0.0
        for begin, stop in blocks:
            flops = work.attention_flops(heads, stop - begin, end - first)
            seconds = flops / (by.fa_tflops * 1e12)
            found += [("idle", by.launch_us / 1e6), ("fa", seconds)]
            taken += seconds + by.launch_us / 1e6
        if index + 1 < work.ring:
            found.append(("comm", max(hop - taken, 0.0)))
    return found
