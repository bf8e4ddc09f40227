"""Sharding of tokens, the order of sent K/V blocks, and merged parts of a softmax."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from wan.distributed.ring import RING_TYPES, KvBlock, LseMerger, Ring, plan_hops
from wan.distributed.sequence_shards import ShardedSequence
from wan.distributed.ulysses import SINGLE_RANK
from wan.kernels.sdpa import SdpaKernel
from wan.settings.attention_modes import TokenPlan

CALM = settings(deadline=None)  # the machine may be busy
PLANS = st.builds(
    TokenPlan, st.integers(1, 3000), st.integers(1, 16), st.sampled_from([1, 2, 128, 256])
)
SIZES = range(2, 9)


@CALM
@given(PLANS)
def test_shards_are_equal_and_hold_every_token_once(plan: TokenPlan) -> None:
    counts = [plan.count_valid_tokens(rank) for rank in range(plan.ranks)]
    held = [rank * plan.shard_len + i for rank, count in enumerate(counts) for i in range(count)]
    assert held == list(range(plan.tokens))
    assert all(0 <= count <= plan.shard_len for count in counts)
    assert plan.shard_len % plan.multiple == 0
    assert plan.padded_len == plan.ranks * plan.shard_len
    assert plan.padded_len - plan.tokens < plan.ranks * plan.multiple, "no more padding than needed"


@CALM
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    ranks=st.integers(1, 9),
    multiple=st.sampled_from([1, 4, 128]),
)
def test_runs_follow_their_tokens(lengths: list[int], ranks: int, multiple: int) -> None:
    """Every token keeps its run; padding has that of the last token."""
    plan = TokenPlan(sum(lengths), ranks, multiple)
    run_of = [run for run, length in enumerate(lengths) for _ in range(length)]
    run_of += [len(lengths) - 1] * (plan.padded_len - plan.tokens)
    for rank in range(ranks):
        mine = run_of[rank * plan.shard_len : (rank + 1) * plan.shard_len]
        counts = plan.shard_segments(lengths, rank)
        assert list(counts) == [mine.count(run) for run in range(len(lengths))]
        assert sum(counts) == plan.shard_len


@pytest.mark.parametrize("ordered", [False, True])
def test_a_shard_has_memory_of_its_own(ordered: bool) -> None:
    """Blocks update it in place, and the whole sequence may be used again."""
    indices = torch.tensor([3, 0, 5, 1, 2, 4])
    order = (lambda _: indices) if ordered else None
    sequence = torch.arange(1.0, 13).view(1, 6, 2)
    arranged, original = sequence[:, indices] if ordered else sequence.clone(), sequence.clone()
    whole = ShardedSequence(SINGLE_RANK, 4, order)
    assert torch.equal(whole.permute(sequence, (1, 2, 3)), arranged)
    assert torch.equal(whole.gather(whole.shard(sequence, (1, 2, 3)), (1, 2, 3)), sequence)
    for ranks, multiple in product((1, 2, 3), (1, 4)):
        tokens, shards = ShardedSequence(SINGLE_RANK, multiple, order), []
        for rank in range(ranks):
            tokens.num_ranks, tokens.rank = ranks, rank
            shards.append(tokens.shard(sequence, (1, 2, 3)))
            so_far = arranged[:, : len(shards[0][0]) * (rank + 1)]
            assert torch.equal(torch.cat(shards, dim=1)[:, :6], so_far), (ranks, multiple)
            shard = shards[-1].clone()
            shards[-1].zero_()
            assert torch.equal(sequence, original), (ranks, multiple)
            assert shards[-1].untyped_storage().nbytes() == shards[-1].nbytes, (
                "nothing else is held"
            )
            shards[-1] = shard


def test_the_order_of_another_grid_is_forgotten() -> None:
    """A service makes videos of many sizes, and an order has a number for each token."""
    orders: list[weakref.ref[torch.Tensor]] = []

    def reverse(grid: tuple[int, int, int]) -> torch.Tensor:
        order = torch.arange(grid[0] - 1, -1, -1)
        orders.append(weakref.ref(order))
        return order

    tokens = ShardedSequence(SINGLE_RANK, 1, reverse)
    for length in (3, 3, 4):
        sequence = torch.arange(float(length)).view(1, length, 1)
        assert torch.equal(tokens.shard(sequence, (length, 1, 1)), sequence.flip(1))
    assert [order() is None for order in orders] == [True, False]


class RepeatedBlocks(Ring):
    """A ring of two ranks with equal keys and values, in one process."""

    def exchange_blocks(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[KvBlock]:
        yield from ((0, k, v), (1, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_returns_the_dtype_of_its_inputs(dtype: torch.dtype) -> None:
    """Although it merges in float32: results are sent to other ranks. Equal keys change nothing."""
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    (out,) = RepeatedBlocks(SINGLE_RANK).attend(SdpaKernel().with_lse, [x], x, x, (5, 5))
    heads = x.double().transpose(1, 2)
    expected = scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
    assert out.dtype == dtype
    assert (out - expected).abs().max() <= {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("ring_type", RING_TYPES)
def test_blocks_go_round_the_ring(ring_type: str) -> None:
    """Each rank receives every other block once, in a hop in which that block is sent to it.

    A rank passes on only what it has just received: two blocks per direction are enough memory.
    No two blocks use a link at the same time, because messages carry no tag.
    """
    for size in SIZES:
        plans = [plan_hops(ring_type, rank, size) for rank in range(size)]
        assert {len(plan) for plan in plans} == {size - 1}, "all ranks step together"
        for rank, hops in enumerate(plans):
            received = [block for hop in hops for _, block in hop.receives]
            assert sorted([rank, *received]) == list(range(size)), (rank, size)
            held = {rank}
            for hop in hops:
                assert {block for _, block in hop.sends} <= held, (rank, size)
                held = {block for _, block in hop.receives}
        for hops in zip(*plans, strict=True):
            sent = [(me, to, b) for me, hop in enumerate(hops) for to, b in hop.sends]
            got = [(frm, me, b) for me, hop in enumerate(hops) for frm, b in hop.receives]
            assert sorted(sent) == sorted(got), size
            assert len({(frm, to) for frm, to, _ in sent}) == len(sent), size


def test_links_in_use() -> None:
    """One way round, or between neighbours without the link that closes the circle."""
    for size, rank in ((n, rank) for n in SIZES for rank in range(n)):
        for hop in plan_hops("ring", rank, size):
            assert [to for to, _ in hop.sends] == [(rank + 1) % size]
        for hop in plan_hops("bidirectional", rank, size):
            assert all(abs(peer - rank) == 1 for peer, _ in hop.sends + hop.receives)
    with pytest.raises(ValueError, match="ring_type is 'star'; use one of ring, bidirectional"):
        plan_hops("star", 0, 2)


def parts_of_softmax(
    logits_BNSK: torch.Tensor, v_BKND: torch.Tensor, borders: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(normalised result [B,S,N,D], log-sum-exp [B,N,S]) of each range of keys, in float32."""
    parts = []
    for a, b in pairwise(borders):
        logits = logits_BNSK[..., a:b]
        out = torch.einsum("bnsk,bknd->bsnd", logits.softmax(-1), v_BKND[:, a:b])
        parts.append((out.float(), logits.logsumexp(-1).float()))
    return parts


@CALM
@given(
    cuts=st.sets(st.integers(1, 23), max_size=7),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    offset=st.sampled_from([-3e38, -1e5, 0.0, 1e5, 3e38]),
    seed=st.integers(0, 2**31),
)
def test_merged_parts_are_the_whole(cuts: set[int], scale: float, offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, 3, 5, 24, generator=generator, dtype=torch.float64) + offset
    v = torch.randn(2, 24, 3, 4, generator=generator, dtype=torch.float64)
    total = LseMerger()
    for part in parts_of_softmax(logits, v, [0, *sorted(cuts), 24]):
        total.add(*part)
    [(expected, _)] = parts_of_softmax(logits, v, [0, 24])
    # A part's weight is as exact as the rounding of its float32 log-sum-exp allows, at most 1.
    rounding = min(1.0, 2**-23 * logits.abs().max().item())
    spread = (v.max() - v.min()).item()
    assert total.result().isfinite().all()
    difference = (total.result() - expected).abs().max().item()
    assert difference <= 1e-6 + len(cuts) * rounding * spread


@CALM
@given(seed=st.integers(0, 2**31), heads=st.integers(2, 9), rows=st.integers(1, 20))
def test_bits_do_not_depend_on_how_many_heads_are_merged(seed: int, heads: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    joint, single = LseMerger(), [LseMerger() for _ in range(heads)]
    for _ in range(3):
        out = torch.randn(1, rows, heads, 4, generator=generator)
        lse = torch.randn(1, heads, rows, generator=generator)
        for n, merger in enumerate(single):
            merger.add(out[:, :, n : n + 1].clone(), lse[:, n : n + 1].clone())
        joint.add(out.clone(), lse)
    assert torch.equal(joint.result(), torch.cat([merger.result() for merger in single], dim=2))


def test_16_bit_parts_are_summed_in_float32() -> None:
    """A single part, where other ranks hold only padding, costs no conversion."""
    parts = [(torch.randn(1, 4, 2, 8).bfloat16(), torch.randn(1, 2, 4)) for _ in range(4)]
    total, exact = LseMerger(), LseMerger()
    total.add(*parts[0])
    assert total.result() is parts[0][0]
    for out, lse in parts[1:]:
        total.add(out, lse)
    for out, lse in parts:
        exact.add(out.float(), lse)
    assert total.result().dtype == torch.float32
    assert torch.equal(total.result(), exact.result())
