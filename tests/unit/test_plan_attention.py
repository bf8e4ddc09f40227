"""The plan of FP8 and block-sparse attention: by hand, and against the tensors of real calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.live_bytes import WHOLE, LiveBytes
from wan.cli import flags, planned
from wan.device import resolve
from wan.kernels.base import StepInfo
from wan.kernels.select import select
from wan.modules.attnlayer import FAPowerCapAttention
from wan.planner.chunk import Chunk
from wan.planner.forward import Forward
from wan.planner.network import Network, weights
from wan.planner.planner import Planner
from wan.planner.report import lines, topologies
from wan.planner.ways import ways
from wan.settings.attention import Attention, RainFusion
from wan.settings.parallel import Parallel

A14B = Network(5120, 13824, 40, 40, 16, 16)
TOKENS = 75600  # 21 x 45 x 80: 81 frames of 1280*720
EIGHT = Parallel(8, 1, 1, 8, comm_type=1)
FP8 = Attention(fa_quant="fp8")
SENT = Attention(fa_quant="fp8", quant_alltoall=True)
RAIN = Attention(rainfusion=RainFusion("v2", 0.64, 0))
RAIN_FP8 = Attention(fa_quant="fp8", rainfusion=RainFusion("v3", 0.64, 0))
N = TOKENS * 128  # numbers of one tensor of one head
Q_SCALES, KV_SCALES = 591 * 4, 296 * 4  # ceil(75600 / 128), ceil(75600 / 256) float32


def forward(parallel: Parallel, attention: Attention, device: str = "npu") -> Forward:
    return Forward(A14B, TOKENS, 4 * TOKENS, parallel, 2, attention=attention, device=device)


def chunk(parallel: Parallel, attention: Attention, heads: int = 1, **changes: Any) -> Chunk:
    return replace(forward(parallel, attention).chunk(heads), **changes)


def planner(*argv: str) -> Planner:
    words = ["--plan", "--task", "t2v-A14B", "--size", "1280*720", "--frame_num", "81"]
    return Planner(planned.resolve(flags.parse([*words, "--device", "npu", *argv])))


def words(*argv: str) -> str:
    return "\n".join(lines(planner(*argv)))


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(planned, "gpu_memory", lambda: None)
    monkeypatch.chdir(tmp_path)


def test_fp8_exchanges_are_half_and_carry_scales() -> None:
    f = forward(EIGHT, SENT)
    assert (f.plan.shard_len, f.chunk(1).rows) == (9472, 75776)  # a multiple of 256
    numbers, scales = 75776 * 128, (592 + 2 * 296) * 4
    assert f.chunk(1).sent == 3 * numbers + scales
    assert f.exchanged() == 5 * (3 * numbers + scales + 2 * numbers)
    assert forward(EIGHT, FP8).exchanged() == 5 * 8 * N  # nothing is quantised on the way


@pytest.mark.parametrize(
    ("attention", "ring", "shard"),
    [(FP8, 1, 9450), (FP8, 2, 9472), (SENT, 1, 9472), (RAIN, 1, 9450), (Attention(), 2, 9450)],
)
def test_shards_end_where_blocks_do(attention: Attention, ring: int, shard: int) -> None:
    assert forward(Parallel(8, 1, ring, 8 // ring), attention).plan.shard_len == shard
    assert forward(Parallel(), attention).plan.shard_len == TOKENS


@pytest.mark.parametrize(
    ("parallel", "heads", "size"),
    [
        # exchanged q, k, v; FP8 keys and values; queries: rotated, then FP8 and the result
        (EIGHT, 1, 6 * N + 2 * (N + KV_SCALES) + N + Q_SCALES + 2 * N),
        # all five heads: copied head by head on the way to FP8
        (replace(EIGHT, comm_type=0), 5, 5 * (6 * N + 2 * (N + KV_SCALES) + 2 * N + 2 * N + N)),
        # two blocks of queries: the first one's result lives, the second is half of everything
        (
            replace(EIGHT, comm_type=2),
            1,
            6 * N + 2 * (N + KV_SCALES) + N + N // 2 + Q_SCALES // 2 + N,
        ),
    ],
)
def test_fp8_on_an_npu(parallel: Parallel, heads: int, size: int) -> None:
    assert chunk(parallel, FP8, heads).at_work("fp8") == size


def test_a_ring_gathers_what_has_no_lse() -> None:
    two = Parallel(8, 1, 2, 4, comm_type=1)
    n, kv = 37888 * 128, 148 * 4
    assert chunk(two, FP8).gathers("fp8") and chunk(two, RAIN).gathers("sparse")
    assert not chunk(two, RAIN).gathers("dense")
    assert chunk(two, Attention(algorithm="laser")).gathers("dense")
    held = 3 * 2 * n + 2 * 2 * 2 * n  # own q, k, v; keys and values of both ranks
    stored, queries = 2 * (2 * n + 2 * kv), n + 296 * 4
    assert chunk(two, FP8).at_work("fp8") == held + stored + queries + 2 * n
    assert chunk(two, FP8).hop == 2 * 2 * n
    sent = Parallel(8, 1, 2, 4)
    assert chunk(sent, SENT).hop == 2 * (n + 148 * 4)


def test_quantising_before_the_exchange_can_be_the_most() -> None:
    """A padded GPU: padded q, k, v; FP8 queries; keys rotated, widened, scaled, their payload."""
    n = 75776 * 128
    assert chunk(EIGHT, SENT, device="cuda").at_work("fp8") == 6 * n + n + (2 + 4 + 4 + 1) * n


def test_laser_copies_in_float16() -> None:
    laser = Attention(algorithm="laser")
    held, copies, result = 6 * N, 2 * 3 * N, 8 * N
    found = chunk(EIGHT, laser).at_work("dense")
    assert found == held + copies + result


def test_masks_and_tables() -> None:
    assert chunk(EIGHT, RAIN).mask == 591 * 591
    assert chunk(EIGHT, RAIN, rows=130, tokens=128).mask == 1  # padding has no blocks
    assert chunk(EIGHT, RAIN_FP8, 5).mask == 5 * 591 * 296
    ring = Parallel(8, 1, 2, 4)
    assert chunk(ring, RAIN).mask == 296 * 591
    found = chunk(EIGHT, RAIN).at_work("sparse")
    assert found == 6 * N + 591 * 591 * (1 + 8) + 2 * 2 * N  # mask, int64 table, result twice
    v3 = replace(RAIN, rainfusion=RainFusion("v3", 0.64, 0))
    assert chunk(EIGHT, v3, 5).at_work("sparse") == 5 * (6 * N + 2 * 591 * 591 + 8 * N)


def test_masks_of_several_steps_are_kept() -> None:
    assert forward(EIGHT, RAIN).masks() == 0
    kept = replace(RAIN, rainfusion=RainFusion("v2", 0.64, 0, refresh=4))
    assert forward(EIGHT, kept).masks() == 40 * 5 * 591 * 591
    argv = ("--use_rainfusion", "--ulysses_size", "8", "--mask_refresh_interval", "4")
    plan = planner(*argv)
    rank = plan.rank(plan.planned.parallel)
    assert rank.masks == 2 * 40 * 5 * 591 * 591  # both guidance branches
    once = planner(*argv[:-1], "1")
    dense = once.rank(once.planned.parallel)
    assert rank.denoising - dense.denoising == rank.masks
    assert "; masks 0.14 GB" in words(*argv)


def test_the_order_of_tokens_stands() -> None:
    assert dict(forward(EIGHT, RAIN).standing())["token order"] == 16 * TOKENS
    assert "token order" not in dict(forward(EIGHT, FP8).standing())


def test_steps_that_differ() -> None:
    assert ways(Attention()) == ("dense",) and ways(FP8) == ("fp8",)
    assert ways(RAIN) == ("sparse",) and ways(RAIN_FP8) == ("sparse",)
    later = RainFusion("v3", 0.64, 10)
    assert ways(Attention(rainfusion=later)) == ("dense", "sparse")
    assert ways(Attention(fa_quant="fp8", rainfusion=later)) == ("fp8", "sparse")
    both = forward(EIGHT, replace(RAIN, rainfusion=replace(later, type="v2")))
    assert both.peak().total >= forward(EIGHT, RAIN).peak().total


KINDS = {"fp8": FP8, "sparse": RAIN, "sparse fp8": RAIN_FP8}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("grid", "heads"), [((4, 16, 16), 4), ((3, 15, 17), 4), ((4, 16, 16), 1)])
def test_the_references_hold_what_is_planned(
    kind: str, dtype: torch.dtype, grid: tuple[int, int, int], heads: int
) -> None:
    """One rank, one chunk: the most that lives beside q, k, v in the attention layer."""
    attention, tokens = KINDS[kind], grid[0] * grid[1] * grid[2]
    made = select(attention, resolve("cpu"), 64, dtype, {})
    layer = FAPowerCapAttention(Parallel(), None, kernel=made.dense, methods=made.methods)
    q, k, v = (torch.randn(1, tokens, heads, 64, dtype=dtype) for _ in range(3))
    step = StepInfo(0, 1, "cond", "dit", grid, tokens)
    live = LiveBytes(())
    live.leave_out([q, k, v])
    with torch.no_grad(), live:
        layer(q, k, v, valid_len=tokens, step=step, layer=0)
    size, e = Parallel(), dtype.itemsize
    piece = Chunk(tokens, tokens, heads, 64, e, size, attention, "cpu")
    way = kind.split()[0]
    assert piece.at_work(way) == pytest.approx(live.peak[WHOLE], rel=0.05)


def test_quantised_weights() -> None:
    shapes = {"blocks.0.ffn.0.weight": (10, 3), "blocks.0.ffn.0.bias": (10,), "a.weight": (5,)}
    int8 = {"blocks.0.ffn.0.weight": 30 + 40, "blocks.0.ffn.0.bias": 40}
    found = weights(shapes, 2, convert_all=False, ranks=1, quantised=int8)
    assert found.whole == found.share == 30 + 40 + 40 + 10


def test_what_is_said() -> None:
    text = words("--ulysses_size", "8", "--comm_type", "1", "--fa_quant", "fp8", "--quant_alltoall")
    assert "5 x 1 heads per rank, FP8, exchanged as FP8" in text
    assert "A2A: q, k, v 9.70 MB each and 4.74 kB of scales, result 19.40 MB, 35 per layer" in text
    ring = ("--ring_size", "2", "--ulysses_size", "4", "--comm_type", "1")
    assert "Ring: 38.80 MB (K and V of 2 ranks) gathered, 10 times per layer" in words(
        *ring, "--fa_quant", "fp8"
    )
    sparse = words(*ring, "--use_rainfusion", "--sample_steps", "40")
    assert "RainFusion v2 from step 10 on, sparsity 0.64, masks for 1 step" in sparse
    assert (
        "Ring: 19.40 MB (K and V) per hop and block, 10 hops per layer in dense steps; " in sparse
    )
    assert "38.80 MB (K and V of 2 ranks) gathered" in sparse
    laser = words(*ring, "--attention_algo", "laser")
    assert "heads per rank, laser" in laser and "gathered, 10 times per layer" in laser


def test_only_topologies_that_exchange_something_take_fp8_exchanges() -> None:
    plan = planner("--ulysses_size", "4", "--fa_quant", "fp8", "--quant_alltoall")
    found = list(topologies(plan, plan.planned.parallel))
    assert found and all(p.ulysses_size > 1 for p in found)


def test_the_chip_is_named() -> None:
    assert "heads per rank, on A5, FP8" in words("--chip", "A5", "--fa_quant", "fp8")
