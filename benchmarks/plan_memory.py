"""The plan's peak memory of a DiT forward against the tensors that live in real ones (CPU).

    python benchmarks/plan_memory.py --json plan_memory.json

Each case runs two forwards (the second with the text's keys and values from the cache) on 1, 2 or
4 processes joined by gloo. The measured peak is the highest sum of the bytes of all tensors that
live, weights and inputs excepted, on the fullest process: once of the whole forwards, and once
of each of their parts, since the largest part hides the others. Nothing is sampled, so
neighbours do not matter, with one exception: gloo's thread may let go of what was sent a moment
late, which adds up to one exchanged tensor. What a kernel takes for itself is not seen: on the CPU,
attention's scratch (0.7 MB a thread) and the float32 copy that adding a bfloat16 tensor makes.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import tempfile
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import grid, write_json
from benchmarks.live_bytes import WHOLE, LiveBytes
from benchmarks.plan_cases import DTYPES, PARTS, Case, cases
from wan.checkpoint.load import dit_dtypes
from wan.device import resolve
from wan.distributed.ring import Ring
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import StepInfo
from wan.kernels.select import select
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import (
    Attention,
    Collaborators,
    LocalAttention,
    LocalTokens,
    TokenShard,
)
from wan.modules.model import WanModel
from wan.planner.network import Network, weights


def collaborators(case: Case, store: str, rank: int) -> tuple[Attention, TokenShard]:
    """Attention and token shards as `wan.pipeline.build` composes them, over gloo."""
    parallel, several = case.parallel, case.parallel.world_size > 1
    head = case.net.dim // case.net.heads
    made = select(case.attention, resolve("cpu"), head, DTYPES[case.precision], {})
    if not several and not made.methods:
        return LocalAttention(made.dense), LocalTokens()
    groups: dict[str, Any] = {"ring": None, "ulysses": None}
    if several:
        world = parallel.world_size
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        sizes = (parallel.ring_size, parallel.ulysses_size)
        mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=tuple(groups))
        groups = {name: mesh.get_group(name) for name in groups}
    attention = FAPowerCapAttention(
        parallel,
        groups["ulysses"],
        parallel.fa_alltoall_overlap,
        kernel=made.dense,
        ring=Ring(groups["ring"], parallel.ring_type),
        methods=made.methods,
    )
    multiple = case.attention.row_multiple(parallel.ring_size) if several else 1
    world_group = dist.group.WORLD if several else None
    return attention, ShardedTokens(world_group, multiple, made.order)


def network(case: Case, live: LiveBytes, store: str, rank: int) -> WanModel:
    """A random network whose parts are watched."""

    class Watched(WanModel):
        def _embed_patches(self, *args: Any) -> Tensor:
            return live.during("patch embedding", super()._embed_patches)(*args)

    attention, tokens = collaborators(case, store, rank)
    model = Watched(
        dim=case.net.dim,
        ffn_dim=case.net.ffn_dim,
        num_heads=case.net.heads,
        num_layers=case.net.layers,
        collaborators=Collaborators(
            live.during("self-attention", attention), tokens=tokens, text_kv_cache=case.cached
        ),
    ).requires_grad_(False)
    dtype_of = dit_dtypes(DTYPES[case.precision], convert_all=False)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name, parameter.dtype))
    live.watch("head", model.head)
    for block in model.blocks:
        live.watch("cross-attention", block.get_submodule("cross_attn"))
        live.watch("feed-forward", block.get_submodule("ffn"))
    return model


def measure(case: Case, store: str, rank: int) -> dict[str, int]:
    """Peak bytes of two forwards, and the network's own bytes."""
    torch.manual_seed(0)
    live = LiveBytes(PARTS)
    model = network(case, live, store, rank)
    f, h, w = case.grid
    x, t = torch.randn(16, f, 2 * h, 2 * w), torch.tensor([500.0])
    context = torch.randn(400, case.net.text_dim).to(DTYPES[case.precision])
    step = StepInfo(0, 1, "cond", "dit", case.grid, prod(case.grid))
    live.leave_out([*model.parameters(), x, context])
    with torch.no_grad(), live:
        for _ in range(2):
            model([x], t, [context], prod(case.grid), step=step)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {**live.peak, "weights": size}


def serve(case: Case, store: str, rank: int, answers: Any) -> None:
    torch.set_num_threads(1)
    answers.put(measure(case, store, rank))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(case: Case) -> dict[str, Any]:
    """The case in fresh processes; the fullest one counts."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.plan_memory"])
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=serve, args=(case, f"{folder}/store", rank, answers))
            for rank in range(case.parallel.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{case.name}: a process failed")
    found = [answers.get() for _ in ranks]
    own = weights(case.net.shapes(), case.forward.e, convert_all=False, ranks=1).whole
    result: dict[str, Any] = {
        "case": case.name,
        "precision": case.precision,
        "tokens": prod(case.grid),
        "text_cache": case.cached,
        "weights_exact": own == found[0]["weights"],
        "parallel": asdict(case.parallel),
        "attention": asdict(case.attention),
    }
    for part, planned in case.planned().items():
        measured = max(answer[part] for answer in found)
        result[part] = {
            "planned_bytes": planned,
            "measured_bytes": measured,
            "planned_over_measured": planned / measured,
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=1536)
    parser.add_argument("--ffn_dim", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--grid", type=grid, default=(4, 16, 32), help="tokens F,H,W")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    print("planned MB, measured MB, ratio; the ratios of parts of the forward")
    net = Network(options.dim, options.ffn_dim, options.heads, options.layers, 16, 16)
    for case in cases(net, options.grid):
        if options.only and options.only not in f"{case.name} {case.precision}":
            continue
        result = run(case)
        results.append(result)
        whole = result[WHOLE]
        ratios = [f"{part} {result[part]['planned_over_measured']:.3f}" for part in PARTS]
        print(
            f"{case.name:28} {case.precision} {whole['planned_bytes'] / 1e6:7.1f} "
            f"{whole['measured_bytes'] / 1e6:7.1f} {whole['planned_over_measured']:.3f}  "
            f"{', '.join(ratios)}{'' if result['weights_exact'] else '  WEIGHTS DIFFER'}",
            flush=True,
        )
    write_json(options.json, torch.device("cpu"), results)
    worst = max(
        abs(result[part]["planned_over_measured"] - 1)
        for result in results
        for part in ((WHOLE, *PARTS) if result["text_cache"] else (WHOLE,))
    )  # without the cache, parts may hold one layer's K/V and not the planned two
    print(f"largest deviation: {worst:.1%}")
    return int(worst > 0.1 or not all(result["weights_exact"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
