"""Every mode on every layout of ranks computes plain attention over the full sequence.

Legend: B batch, S all tokens, N heads, D head size. Padding holds NaN, so a result
computed from padding is NaN too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.dist import run_on_ranks
from tests.distributed.methods import GatheringKernel
from tests.distributed.topology import (
    ROWS,
    Topology,
    attention_layer,
    check_on_ranks,
    collect_failures,
    shard,
    topologies,
)
from wan.kernels.avx512_attention import Avx512Kernel
from wan.kernels.interfaces import Kernel
from wan.kernels.sdpa import SdpaKernel
from wan.settings.attention_modes import TokenPlan
from wan.utils.torch_private import has_avx512_bf16

pytestmark = pytest.mark.dist

Case = tuple[Topology, int, int, str]
"""(ranks, heads, tokens, dtype)."""

needs_avx512_bf16 = pytest.mark.skipif(not has_avx512_bf16(), reason="needs AVX512-BF16")
HEADS = (12, 24, 40)
TOKENS = (9, 3, 67, 264)  # 264 needs no padding; of 3, and of 9 on 8 ranks, rings hold much padding
DTYPES = ("float32", "bfloat16")
BATCH, HEAD_DIM = 2, 16


@lru_cache(4)
def make_qkv_and_reference(
    heads: int, tokens: int, dtype: str, head_dim: int = HEAD_DIM
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return (q, k, v [B,S,N,D]; attention in float32; each element's tolerance).

    bfloat16 rounds three times, each by at most 2**-8: the softmax weights, each partial result,
    and the merged result. So an element's error is at most 3 * 2**-8 of softmax weights times |v|.
    """
    generator = torch.Generator().manual_seed(heads * tokens)
    shape = (3, BATCH, tokens, heads, head_dim)
    qkv = [x.to(getattr(torch, dtype)) for x in torch.randn(shape, generator=generator)]
    q, k, v = (x.float().transpose(1, 2) for x in qkv)
    expected, sizes = (
        F.scaled_dot_product_attention(q, k, x).transpose(1, 2) for x in (v, v.abs())
    )
    exact = torch.full_like(expected, 2e-5)
    return qkv, expected, exact if dtype == "float32" else exact + 3 * 2**-8 * sizes


def compare_modes(
    case: Case, kernel: Callable[[], Kernel], same_bits: bool = True, head_dim: int = HEAD_DIM
) -> None:
    """Compare the modes on one rank.

    All modes are computed before the first assertion, so that a failure leaves no rank waiting.

    same_bits: the kernel's results do not depend on the number of heads, bit for bit.
    """
    topology, heads, tokens, dtype = case
    plan = TokenPlan(tokens, topology.world)
    global_qkv, expected, tolerance = make_qkv_and_reference(heads, tokens, dtype, head_dim)
    qkv = [shard(x, plan, torch.nan) for x in global_qkv]
    out = {mode: attention_layer(topology, mode, kernel())(*qkv, valid_len=tokens) for mode in ROWS}

    expected, tolerance = shard(expected, plan, 0), shard(tolerance, plan, 0)
    for mode, output in out.items():
        assert output.dtype == qkv[0].dtype and output.shape == qkv[0].shape
        error = (output.float() - expected).abs()
        assert (error <= tolerance).all(), f"mode {mode} is off by {error.max()} at {case}"
        assert not output[:, plan.count_valid_tokens(dist.get_rank()) :].any(), (
            f"padding of mode {mode}, {case}"
        )
    largest = out["0"].float().abs().max()
    # Two units in the last place: a bfloat16 has 7 bits after the leading one.
    limit = 1e-6 if dtype == "float32" else 2 * torch.exp2(largest.log2().floor() - 7)
    for mode, row in ROWS.items():
        error = (out[mode].float() - out["0"].float()).abs().max()
        allowed = limit if row.blocks > 1 or not same_bits else 0
        assert error <= allowed, f"mode {mode} is {error} from mode 0 at {case}"


def list_pairwise_cases() -> list[Case]:
    """List cases of up to 4 ranks in which each pair of layout, heads, tokens and dtype occurs.

    12 heads of a rank are chunks of two and of one.
    """
    return [
        (topology, (2, 3, 12)[(i + j) % 3] * topology.ulysses, tokens, DTYPES[(i + j // 2) % 2])
        for i, topology in enumerate(topologies(1, 2, 4))
        for j, tokens in enumerate(TOKENS)
    ]


def find_differences(cases: Sequence[Case], kernel: Callable[[], Kernel]) -> dict[str, str]:
    """On one rank: map each failing case to its error message."""
    return collect_failures(cases, partial(compare_modes, kernel=kernel))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_selected_combinations(world: int) -> None:
    """Every second case of each layout and length; `test_all_combinations` has all."""
    chosen = [case for case in list_pairwise_cases() if case[0].world == world]
    selected = [n for n in range(len(chosen)) if (n + n // len(TOKENS)) % 2]
    check_on_ranks(find_differences, [chosen[n] for n in selected], SdpaKernel)


@pytest.mark.slow
@pytest.mark.parametrize("topology", topologies(1, 2, 4, 8), ids=str)
def test_all_combinations(topology: Topology) -> None:
    cases = product((topology,), HEADS, TOKENS, DTYPES)
    divisible = [case for case in cases if case[1] % topology.ulysses == 0]
    check_on_ranks(find_differences, divisible, SdpaKernel)


def test_kernels_without_lse_get_all_keys_at_once() -> None:
    cases = (1, 2, 67, "float32"), (1, 2, 9, "bfloat16"), (2, 2, 9, "float32")
    for ulysses, ring, tokens, dtype in cases:
        case = Topology(ulysses, ring), 24, tokens, dtype
        check_on_ranks(find_differences, [case], GatheringKernel)


@needs_avx512_bf16
def test_the_kernel_of_amd_cpus() -> None:
    """Its results do not depend on the number of heads, bit for bit."""
    case = Topology(1, 2), 3, 67, "bfloat16"
    run_on_ranks(2, partial(compare_modes, head_dim=64), case, Avx512Kernel)


def attend_without_valid_len() -> None:
    """Without valid_len every token is valid."""
    topology, tokens = Topology(2, 2), 64
    plan = TokenPlan(tokens, topology.world)
    global_qkv, expected, _ = make_qkv_and_reference(12, tokens, "float32")
    output = attention_layer(topology, "1")(*(shard(x, plan, 0) for x in global_qkv))
    torch.testing.assert_close(output, shard(expected, plan, 0), atol=2e-5, rtol=0)


def test_the_length_may_be_left_out() -> None:
    run_on_ranks(4, attend_without_valid_len)
