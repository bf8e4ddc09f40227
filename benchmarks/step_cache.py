"""Measures First Block Cache's overhead in forwards that compute all blocks, and its memory.

    python benchmarks/step_cache.py --ranks 4 --json results/step_cache.json

A DiT runs on gloo ranks of one thread each, in one Ulysses group. "plain" has no cache. "cached"
compares in every step (two sums over the tokens, an all-reduce, a decision, one host read) and
computes all blocks, because its threshold is 0. "decision" is the comparison alone. A round's time
is that of its slowest rank, and ratios are taken inside a round. The program prints medians, the
ratio of cached to plain, and the bytes of the cached tensors over those of two tensors of this
rank's tokens by channels; the JSON file has every round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import CPU, run_on_ranks, take_slowest_rank, time_interleaved
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.cache import policy
from wan.cache.residual import measure_change
from wan.device import select_device
from wan.distributed.mesh import make_parallel_groups
from wan.distributed.sequence_shards import ShardedSequence
from wan.kernels.forward_context import StepInfo
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.settings.presets import PRESETS
from wan.settings.step_cache import StepCache
from wan.settings.values import integer
from wan.utils import system

HEADS, HEAD_DIM, LAYERS, TEXT = 12, 128, 4, 64
STEPS = 1000


def run_rank(ranks: int, grid: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Measures plain and cached forwards and the decision on one rank."""
    team = make_parallel_groups(select_device("cpu"), (1, 1, ranks))
    never = StepCache("first_block:threshold=0")
    cache_policy = policy.make_policy(never, PRESETS["t2v-1.3B"])
    assert cache_policy is not None
    cache, tokens = cache_policy.make_cache(all_agree=team.all_agree), prod(grid)
    cache.start_run({"cond": (True, *(False,) * STEPS)})

    def make_model(step_cache: Any) -> WanModel:
        torch.manual_seed(0)
        layer = FAPowerCapAttention(SimpleNamespace(comm_type=1), team.group("ulysses"))
        shard = ShardedSequence(team.group("ring", "ulysses"))
        return WanModel(
            dim=HEADS * HEAD_DIM,
            ffn_dim=4 * HEADS * HEAD_DIM,
            num_heads=HEADS,
            num_layers=LAYERS,
            text_dim=TEXT,
            text_len=TEXT,
            components=ModelComponents(
                lambda _: layer, sequence_shard=shard, step_cache=step_cache
            ),
        )

    plain, cached = make_model(None), make_model(cache)
    latents = torch.randn(16, grid[0], 2 * grid[1], 2 * grid[2])
    context, t, count = [torch.randn(TEXT, TEXT)], torch.tensor([500.0]), 0

    def run_forward(net: WanModel) -> None:
        nonlocal count
        step = StepInfo(min(count, STEPS), STEPS, "cond", "dit", grid, tokens)
        net([latents], t, context, tokens, step=step)
        count += net is cached

    num_local_tokens, width = -(-tokens // ranks), HEADS * HEAD_DIM
    x_before, x_after = torch.randn(2, 1, num_local_tokens, width)

    def decide() -> None:
        team.all_agree(measure_change(x_after, x_before, num_local_tokens), 0.0)

    runs = {
        "plain": lambda: run_forward(plain),
        "cached": lambda: run_forward(cached),
        "decision": decide,
    }
    times = time_interleaved(runs, rounds)
    expected_bytes = 2 * num_local_tokens * width * 4
    return {"seconds": times, "kept": cache.cached_bytes(), "expected": expected_bytes}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=make_argument_type(integer(1, 64)), default=4)
    parser.add_argument(
        "--grid", type=common.parse_token_grid, default=(5, 26, 30), metavar="F,H,W"
    )
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=10)
    parser.add_argument("--json", type=common.results_file)
    options = parser.parse_args(argv)
    results_by_rank = run_on_ranks(
        options.ranks, run_rank, options.ranks, options.grid, options.rounds
    )
    seconds = take_slowest_rank([rank_result["seconds"] for rank_result in results_by_rank])
    ratio = common.compute_ratios(seconds["cached"], seconds["plain"])
    memory_ratios = [
        rank_result["kept"] / rank_result["expected"] for rank_result in results_by_rank
    ]
    medians = {name: common.compute_spread(values)["median"] for name, values in seconds.items()}
    print(
        f"{system.read_cpu_name()}, {options.ranks} ranks, {prod(options.grid)} tokens, "
        f"{LAYERS} layers\n"
        f"  plain {medians['plain']:.3f} s, cached {medians['cached']:.3f} s, "
        f"ratio {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})\n"
        f"  a decision {1000 * medians['decision']:.1f} ms\n"
        f"  kept / two tensors: {min(memory_ratios):.3f} to {max(memory_ratios):.3f}"
    )
    record = {"seconds": seconds, "ratio": ratio, "kept": memory_ratios}
    common.write_json(options.json, CPU, [record])


if __name__ == "__main__":
    sys.exit(run_program(main))
