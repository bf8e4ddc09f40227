"""Compares our attention layer in a diffusers network with diffusers' context parallelism.

    python benchmarks/diffusers_parallel.py --ranks 2 --json results/diffusers_parallel.json

A WanTransformer3DModel runs on gloo ranks of one thread each. "theirs" is `enable_parallelism` with
Ulysses, which is written for accelerators: this program patches the number of accelerators from 0
to 1. "ours" is `parallelize_transformer` in mode 0, "ours, 1" in mode 1. A round runs each once,
its time is that of the slowest rank, and ratios are taken inside a round. The program prints
seconds, ratios, the peak bytes that a forward adds, and the distance from the network on one
device.

Then it prints for each of several cases whether each side runs, or its error. "hangs" means that a
case has not ended after --limit seconds, which include the start of the ranks. The JSON file has
all results.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import ContextParallelConfig, WanTransformer3DModel
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import CPU, run_on_ranks, take_slowest_rank, time_interleaved
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.diffusers import parallelize_transformer
from wan.settings.values import integer, real

Grid = tuple[int, ...]
TEXT = 64


def make_network(heads: int = 12, **more: Any) -> WanTransformer3DModel:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": heads, "attention_head_dim": 64, "ffn_dim": 4 * 64 * heads}
    return WanTransformer3DModel(**sizes, num_layers=4, text_dim=TEXT, **more).eval()


def enable_diffusers_parallelism(
    net: WanTransformer3DModel, **degrees: Any
) -> WanTransformer3DModel:
    with patch("torch.accelerator.device_count", return_value=1):
        net.enable_parallelism(config=ContextParallelConfig(**degrees))
    return net


def make_inputs(grid: Grid, per_token: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    f, h, w = grid
    x = torch.randn(1, 16, f, 2 * h, 2 * w, generator=generator)
    text = torch.randn(1, 512, TEXT, generator=generator)
    return x, torch.full((1, f * h * w) if per_token else (1,), 500.0), text


def measure_networks(ranks: int, grid: Grid, rounds: int) -> dict[str, Any]:
    """Measures the networks on one rank."""
    logging.set_verbosity_error()
    nets = {
        "theirs": enable_diffusers_parallelism(make_network(), ulysses_degree=ranks),
        "ours": parallelize_transformer(make_network(), device="cpu", ulysses_size=ranks),
        "ours, 1": parallelize_transformer(
            make_network(), device="cpu", ulysses_size=ranks, comm_type=1
        ),
    }
    x = make_inputs(grid)
    plain = run_forward(make_network(), *x)
    runs: dict[str, common.Run] = {
        name: partial(run_forward, net, *x) for name, net in nets.items()
    }
    off = {name: (run() - plain).abs().max().item() for name, run in runs.items()}
    added = {name: common.measure_peak_bytes(run, CPU) for name, run in runs.items()}
    return {"times": time_interleaved(runs, rounds), "added": added, "off": off}


def run_disagreeing_ranks(kind: str, _: str) -> dict[str, Any]:
    """Runs diffusers' First Block Cache on one of two ranks while only one rank's tokens change."""
    logging.set_verbosity_error()
    net = make_network()
    if kind == LAST:
        enable_diffusers_parallelism(net, **U2)
    net.enable_cache(FirstBlockCacheConfig(threshold=0.02))  # the ranks measure 0.011 and 0.028
    if kind != LAST:
        enable_diffusers_parallelism(net, **U2)
    x, t, text = make_inputs((4, 8, 8))
    for step in range(4):
        changed = x.clone()
        changed[:, :, 2:] *= 1 + step  # the last rank's tokens
        with net.cache_context("cond"):
            run_forward(net, changed, t, text)
    return {"off": float("nan")}


def run_case(kind: str, who: str) -> dict[str, Any]:
    """Runs a case on one rank; returns the largest difference from the network on one device."""
    logging.set_verbosity_error()
    build, grid, degrees, settings = CASES[kind]
    net, plain = build(), build()
    x = make_inputs(grid, kind == "a timestep per token, odd")
    if net.config.image_dim:
        x = (*x, torch.randn(1, 257, 32, generator=torch.Generator().manual_seed(2)))
    net = (
        enable_diffusers_parallelism(net, **degrees)
        if who == "theirs"
        else parallelize_transformer(net, device="cpu", **settings)
    )
    return {"off": (run_forward(net, *x) - run_forward(plain, *x)).abs().max().item()}


def run_forward(net: WanTransformer3DModel, *x: torch.Tensor) -> torch.Tensor:
    return net(*x, return_dict=False)[0]


IMAGE = {"image_dim": 32, "added_kv_proj_dim": 768}
LAST = "First Block Cache, enabled after the parallelism"
U2: dict[str, Any] = {"ulysses_degree": 2}
ANY = {**U2, "ulysses_anything": True}
CASES: dict[str, tuple[Callable[[], Any], Grid, dict[str, Any], dict[str, Any]]] = {
    "tokens that divide": (make_network, (3, 4, 4), U2, {"ulysses_size": 2}),
    "an odd number of tokens": (make_network, (3, 5, 7), U2, {"ulysses_size": 2}),
    "a timestep per token, odd": (make_network, (3, 5, 7), U2, {"ulysses_size": 2}),
    "image tokens": (lambda: make_network(**IMAGE), (3, 4, 4), U2, {"ulysses_size": 2}),
    "a ring": (make_network, (3, 4, 4), {"ring_degree": 2}, {"ring_size": 2}),
    "an odd number of heads": (lambda: make_network(3), (3, 4, 4), U2, {"ring_size": 2}),
    "an odd number of tokens, its ulysses_anything": (make_network, (3, 5, 7), ANY, {}),
    "an odd number of heads, its ulysses_anything": (lambda: make_network(3), (3, 4, 4), ANY, {}),
}


def describe_outcome(work: Callable[..., dict[str, Any]], kind: str, who: str, limit: float) -> str:
    try:
        off = max(result["off"] for result in run_on_ranks(2, work, kind, who, timeout=limit))
        return f"runs, off by {off:.1e}"
    except multiprocessing.TimeoutError:
        return "hangs"
    except Exception as error:  # the library's error is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=make_argument_type(integer(1, 64)), default=2)
    parser.add_argument("--grid", type=common.parse_token_grid, default=(5, 20, 20))
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=5)
    parser.add_argument(
        "--limit", type=make_argument_type(real(0, 1e5, exclude_min=True)), default=180
    )
    parser.add_argument("--json", type=common.results_file)
    options = parser.parse_args(argv)
    results_by_rank = run_on_ranks(
        options.ranks, measure_networks, options.ranks, options.grid, options.rounds
    )
    times = take_slowest_rank([rank_result["times"] for rank_result in results_by_rank])
    results: list[dict[str, Any]] = []
    for name in times:
        row = {
            "name": name,
            "seconds": common.compute_spread(times[name]),
            "against theirs": common.compute_ratios(times[name], times["theirs"]),
            "added MB": max(rank_result["added"][name] for rank_result in results_by_rank) / 1e6,
            "off": max(rank_result["off"][name] for rank_result in results_by_rank),
        }
        results.append(row)
        print(row)
    for kind in CASES:
        outcomes = {
            who: describe_outcome(run_case, kind, who, options.limit) for who in ("theirs", "ours")
        }
        results.append({"case": kind, **outcomes})
        print(results[-1])
    for kind in ("First Block Cache, ranks disagree", LAST):
        outcomes = {
            "theirs": describe_outcome(run_disagreeing_ranks, kind, "theirs", options.limit)
        }
        tested = "runs: tests/distributed/test_diffusers_caches.py"
        results.append({"case": kind, **outcomes, "ours": tested})
        print(results[-1])
    common.write_json(options.json, CPU, results)


if __name__ == "__main__":
    sys.exit(run_program(main))
