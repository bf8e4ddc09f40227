"""all_to_all_4D exchanges heads and tokens between ranks: results are slices of one tensor."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist import run_on_ranks
from tests.refusals import check_refusals
from wan.distributed.ulysses import all_to_all_4D, start_all_to_all_4D
from wan.utils.torch_private import StorageTracker

pytestmark = pytest.mark.dist

WORLDS = (1, 2, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
TOKENS, HEADS, HEAD_DIM = 3, 2, 5  # of one rank


def make_global_tensor(world: int, batch: int, dtype: torch.dtype) -> Tensor:
    """Return [B,S,N,D], the same on every rank, with hardly any repeated values."""
    shape = (batch, TOKENS * world, HEADS * world, HEAD_DIM)
    values = torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(0))
    return (values.view(shape) % 251 - 125).to(dtype)


def select_local_shards(x_BSND: Tensor) -> tuple[Tensor, Tensor]:
    """Return (this rank's tokens of all heads, all tokens of this rank's heads)."""
    rank = dist.get_rank()
    tokens = slice(rank * TOKENS, (rank + 1) * TOKENS)
    heads = slice(rank * HEADS, (rank + 1) * HEADS)
    return x_BSND[:, tokens], x_BSND[:, :, heads]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.float(), expected.float())  # torch.equal does not take float8


def exchange_both_ways() -> None:
    """Alone, and with six pending exchanges whose inputs stay alive without a reference."""
    for dtype, batch in product(DTYPES, (1, 2)):
        x = make_global_tensor(dist.get_world_size(), batch, dtype)
        by_tokens, by_heads = select_local_shards(x)
        to_heads = all_to_all_4D(by_tokens, 2, 1, None)
        to_tokens = all_to_all_4D(by_heads, 1, 2, None)
        assert to_heads.is_contiguous() and to_tokens.is_contiguous()
        pending = [start_all_to_all_4D(by_tokens.clone(), 2, 1, None) for _ in range(3)]
        pending_back = [start_all_to_all_4D(by_heads.clone(), 1, 2, None) for _ in range(3)]
        for actual in (to_heads, *(exchange.wait() for exchange in pending)):
            assert_same(actual, by_heads)
        for actual in (to_tokens, *(exchange.wait() for exchange in pending_back)):
            assert_same(actual, by_tokens)


def exchange_into() -> None:
    """The result can be written into a slice of a larger tensor without changing the rest."""
    for async_op, batch in product((False, True), (1, 2)):
        by_tokens, by_heads = select_local_shards(
            make_global_tensor(dist.get_world_size(), batch, torch.float32)
        )
        for x, expected, axes in ((by_tokens, by_heads, (2, 1)), (by_heads, by_tokens, (1, 2))):
            heads = expected.shape[2]
            larger = torch.full((*expected.shape[:2], heads + 2, HEAD_DIM), torch.nan)
            target = larger[:, :, 1:-1]
            pending = start_all_to_all_4D(x, *axes, None, async_op=async_op)
            assert pending.wait(out=target) is target
            assert_same(target, expected)
            assert larger[:, :, [0, -1]].isnan().all()


def exchange_a_view() -> None:
    """A chunk of heads is a view with gaps."""
    by_tokens, _ = select_local_shards(make_global_tensor(dist.get_world_size(), 2, torch.float32))
    wide = torch.cat((by_tokens, by_tokens + 1), dim=2)
    chunk = wide[:, :, by_tokens.shape[2] :]
    assert_same(all_to_all_4D(chunk, 2, 1, None), all_to_all_4D(by_tokens + 1, 2, 1, None))


def exchange_in_all_ways() -> None:
    exchange_both_ways()
    exchange_into()
    exchange_a_view()


def test_slices_of_the_whole() -> None:
    for world in WORLDS:
        run_on_ranks(world, exchange_in_all_ways)


def count_kept_bytes() -> list[int]:
    """Return the bytes that a handle keeps after its exchange, for either direction."""
    kept = []
    for axes in ((2, 1), (1, 2)):
        with StorageTracker("cpu") as tracker:
            pending = start_all_to_all_4D(torch.zeros(1, 4, 4, 1000), *axes, None)
            result = pending.wait()
        deadline = time.monotonic() + 5  # gloo's thread frees its own references a little later
        while tracker.live_bytes.total() > result.nbytes and time.monotonic() < deadline:
            time.sleep(0.001)
        kept.append(tracker.live_bytes.total() - result.nbytes)
        assert pending.name == "x"  # it still exists
    return kept


def test_a_handle_keeps_no_memory() -> None:
    """A call with overlap has the handles of all chunks."""
    assert run_on_ranks(2, count_kept_bytes) == [[0, 0]] * 2


def collect_exchange_refusals() -> dict[str, str]:
    x, messages = torch.zeros(1, 3, 4, 2), {}
    cases = [(1, 1), (2, 2), (0, 1), (2, 3), (-2, 1), (1, 2)]
    for name, operand, axes in [
        *((f"{c}", x, c) for c in cases),
        ("heads", x.transpose(1, 2), (2, 1)),
    ]:
        with pytest.raises(ValueError) as refusal:
            all_to_all_4D(operand, *axes, None)
        messages[name] = str(refusal.value)
    with pytest.raises(ValueError) as refusal:  # also where ranks have different numbers of heads
        all_to_all_4D(x, 1, 2, None, (1, 3))
    messages["tokens beside heads"] = str(refusal.value)
    return messages


def test_refusals() -> None:
    first, second = run_on_ranks(2, collect_exchange_refusals)
    check_refusals("ranks: exchanges", first)
    assert first == second


def test_a_single_process_needs_no_group() -> None:
    """No process group has to be initialized, and nothing is copied."""
    x = torch.randn(2, 3, 4, 5)
    for axes in ((2, 1), (1, 2)):
        output = all_to_all_4D(x, *axes, None)
        assert torch.equal(output, x) and output.data_ptr() == x.data_ptr()
