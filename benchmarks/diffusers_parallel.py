"""Compare our attention layer in a diffusers network with diffusers' context parallelism.

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
from benchmarks.common import CPU, interleave, launch, slowest
from wan.cli.flags import Parser
from wan.cli.programs import make_argument_type, run_program
from wan.diffusers import parallelize_transformer
from wan.settings.values import integer, real

Grid = tuple[int, ...]
TEXT = 64


def network(heads: int = 12, **more: Any) -> WanTransformer3DModel:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": heads, "attention_head_dim": 64, "ffn_dim": 4 * 64 * heads}
    return WanTransformer3DModel(**sizes, num_layers=4, text_dim=TEXT, **more).eval()


def theirs(net: WanTransformer3DModel, **degrees: Any) -> WanTransformer3DModel:
    with patch("torch.accelerator.device_count", return_value=1):
        net.enable_parallelism(config=ContextParallelConfig(**degrees))
    return net


def inputs(grid: Grid, per_token: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    f, h, w = grid
    x = torch.randn(1, 16, f, 2 * h, 2 * w, generator=generator)
    text = torch.randn(1, 512, TEXT, generator=generator)
    return x, torch.full((1, f * h * w) if per_token else (1,), 500.0), text


def measure(ranks: int, grid: Grid, rounds: int) -> dict[str, Any]:
    """Measure the networks on one rank."""
    logging.set_verbosity_error()
    nets = {
        "theirs": theirs(network(), ulysses_degree=ranks),
        "ours": parallelize_transformer(network(), device="cpu", ulysses_size=ranks),
        "ours, 1": parallelize_transformer(
            network(), device="cpu", ulysses_size=ranks, comm_type=1
        ),
    }
    x = inputs(grid)
    plain = forward(network(), *x)
    runs: dict[str, common.Run] = {name: partial(forward, net, *x) for name, net in nets.items()}
    off = {name: (run() - plain).abs().max().item() for name, run in runs.items()}
    added = {name: common.peak_bytes(run, CPU) for name, run in runs.items()}
    return {"times": interleave(runs, rounds), "added": added, "off": off}


def disagree(kind: str, _: str) -> dict[str, Any]:
    """Run diffusers' First Block Cache on one of two ranks while only one rank's tokens change."""
    logging.set_verbosity_error()
    net = network()
    if kind == LAST:
        theirs(net, **U2)
    net.enable_cache(FirstBlockCacheConfig(threshold=0.02))  # the ranks measure 0.011 and 0.028
    if kind != LAST:
        theirs(net, **U2)
    x, t, text = inputs((4, 8, 8))
    for step in range(4):
        changed = x.clone()
        changed[:, :, 2:] *= 1 + step  # the last rank's tokens
        with net.cache_context("cond"):
            forward(net, changed, t, text)
    return {"off": float("nan")}


def case(kind: str, who: str) -> dict[str, Any]:
    """Run a case on one rank; return the largest difference from the network on one device."""
    logging.set_verbosity_error()
    build, grid, degrees, settings = CASES[kind]
    net, plain = build(), build()
    x = inputs(grid, kind == "a timestep per token, odd")
    if net.config.image_dim:
        x = (*x, torch.randn(1, 257, 32, generator=torch.Generator().manual_seed(2)))
    net = (
        theirs(net, **degrees)
        if who == "theirs"
        else parallelize_transformer(net, device="cpu", **settings)
    )
    return {"off": (forward(net, *x) - forward(plain, *x)).abs().max().item()}


def forward(net: WanTransformer3DModel, *x: torch.Tensor) -> torch.Tensor:
    return net(*x, return_dict=False)[0]


IMAGE = {"image_dim": 32, "added_kv_proj_dim": 768}
LAST = "First Block Cache, enabled after the parallelism"
U2: dict[str, Any] = {"ulysses_degree": 2}
ANY = {**U2, "ulysses_anything": True}
CASES: dict[str, tuple[Callable[[], Any], Grid, dict[str, Any], dict[str, Any]]] = {
    "tokens that divide": (network, (3, 4, 4), U2, {"ulysses_size": 2}),
    "an odd number of tokens": (network, (3, 5, 7), U2, {"ulysses_size": 2}),
    "a timestep per token, odd": (network, (3, 5, 7), U2, {"ulysses_size": 2}),
    "image tokens": (lambda: network(**IMAGE), (3, 4, 4), U2, {"ulysses_size": 2}),
    "a ring": (network, (3, 4, 4), {"ring_degree": 2}, {"ring_size": 2}),
    "an odd number of heads": (lambda: network(3), (3, 4, 4), U2, {"ring_size": 2}),
    "an odd number of tokens, its ulysses_anything": (network, (3, 5, 7), ANY, {}),
    "an odd number of heads, its ulysses_anything": (lambda: network(3), (3, 4, 4), ANY, {}),
}


def outcome(work: Callable[..., dict[str, Any]], kind: str, who: str, limit: float) -> str:
    try:
        off = max(one["off"] for one in launch(2, work, kind, who, timeout=limit))
        return f"runs, off by {off:.1e}"
    except multiprocessing.TimeoutError:
        return "hangs"
    except Exception as error:  # the library's error is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=make_argument_type(integer(1, 64)), default=2)
    parser.add_argument("--grid", type=common.grid, default=(5, 20, 20))
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=5)
    parser.add_argument(
        "--limit", type=make_argument_type(real(0, 1e5, exclude_min=True)), default=180
    )
    parser.add_argument("--json", type=common.results_file)
    given = parser.parse_args(argv)
    found = launch(given.ranks, measure, given.ranks, given.grid, given.rounds)
    times = slowest([one["times"] for one in found])
    results: list[dict[str, Any]] = []
    for name in times:
        row = {
            "name": name,
            "seconds": common.spread(times[name]),
            "against theirs": common.ratios(times[name], times["theirs"]),
            "added MB": max(one["added"][name] for one in found) / 1e6,
            "off": max(one["off"][name] for one in found),
        }
        results.append(row)
        print(row)
    for kind in CASES:
        said = {who: outcome(case, kind, who, given.limit) for who in ("theirs", "ours")}
        results.append({"case": kind, **said})
        print(results[-1])
    for kind in ("First Block Cache, ranks disagree", LAST):
        said = {"theirs": outcome(disagree, kind, "theirs", given.limit)}
        tested = "runs: tests/distributed/test_diffusers_caches.py"
        results.append({"case": kind, **said, "ours": tested})
        print(results[-1])
    common.write_json(given.json, CPU, results)


if __name__ == "__main__":
    sys.exit(run_program(main))
