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
import itertools
import multiprocessing as mp
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import grid, write_json
from benchmarks.live_bytes import WHOLE, LiveBytes
from wan.distributed.ring import Ring
from wan.distributed.tokens import ShardedTokens
from wan.kernels.sdpa import SdpaKernel
from wan.loading import dit_dtypes
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.local import Attention, LocalAttention, LocalTokens, TokenShard
from wan.modules.model import WanModel
from wan.modules.textcache import TextKVCache
from wan.plan import Forward, Network, text_bytes, weights
from wan.settings.parallel import Parallel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = ("patch embedding", "self-attention", "cross-attention", "feed-forward", "head")
MODES = {0: "baseline", 1: "InsertComm", 2: "BlockAttn"}


@dataclass(frozen=True)
class Case:
    """One measured configuration. grid: latent tokens (frames, height, width)."""

    name: str
    parallel: Parallel
    precision: str
    grid: tuple[int, int, int]
    net: Network
    cached: bool = True

    @property
    def forward(self) -> Forward:
        tokens = prod(self.grid)
        e = DTYPES[self.precision].itemsize
        return Forward(self.net, tokens, 4 * tokens, self.parallel, e, slice_elements=1 << 20)

    def planned(self) -> dict[str, int]:
        """Bytes beyond weights and inputs: the whole forward's peak, and those of its parts."""
        moments = {moment.name: moment.total for moment in self.forward.moments()}
        parts = {name: moments[name] for name in PARTS}
        return {
            n: size + self.text() for n, size in {WHOLE: max(moments.values()), **parts}.items()
        }

    def text(self) -> int:
        return text_bytes(self.net, self.forward.e, contexts=1, cached=self.cached)


def parallels() -> list[tuple[str, Parallel]]:
    """Every mode on 1, 2 and 4 processes, without and with a ring."""
    found = [("one process", Parallel())]
    for ring, ulysses in ((1, 2), (2, 1), (1, 4), (2, 2), (4, 1)):
        base = Parallel(ring * ulysses, 1, ring, ulysses)
        for mode, name in MODES.items():
            if mode == 0 or ulysses > 1:
                found.append((f"{ring} x {ulysses} {name}", replace(base, comm_type=mode)))
        if ulysses > 1:
            overlap = replace(base, fa_alltoall_overlap=True)
            found.append((f"{ring} x {ulysses} overlap", overlap))
        if ring > 2:
            found.append(
                (f"{ring} x {ulysses} bidirectional", replace(base, ring_type="bidirectional"))
            )
    return found


def cases(options: argparse.Namespace) -> list[Case]:
    net = Network(options.dim, options.ffn_dim, options.heads, options.layers, 16, 16)
    f, h, w = options.grid
    padded = (f - 1, h - 1, w - 1)  # odd, where the grid is even: not divisible among the cards
    found = [
        Case(name, parallel, precision, options.grid, net)
        for (name, parallel), precision in itertools.product(parallels(), DTYPES)
    ]
    for precision in DTYPES:
        one, mode1 = Parallel(), Parallel(4, 1, 2, 2, comm_type=1)
        found.append(Case("one process, no text cache", one, precision, options.grid, net, False))
        found.append(Case("2 x 2 InsertComm, padded", mode1, precision, padded, net))
    return found


def collaborators(parallel: Parallel, store: str, rank: int) -> tuple[Attention, TokenShard]:
    """Attention and token shards as `wan.build` composes them, over gloo."""
    kernel = SdpaKernel()
    if parallel.world_size == 1:
        return LocalAttention(kernel), LocalTokens()
    world = parallel.world_size
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = dist.init_device_mesh(
        "cpu", (parallel.ring_size, parallel.ulysses_size), mesh_dim_names=("ring", "ulysses")
    )
    ring = Ring(mesh.get_group("ring"), parallel.ring_type)
    group, overlap = mesh.get_group("ulysses"), parallel.fa_alltoall_overlap
    attention = FAPowerCapAttention(parallel, group, overlap, kernel=kernel, ring=ring)
    return attention, ShardedTokens(dist.group.WORLD)


def network(case: Case, live: LiveBytes, store: str, rank: int) -> WanModel:
    """A random network whose parts are watched."""

    class Watched(WanModel):
        def _embed_patches(self, *args: Any) -> Tensor:
            return live.during("patch embedding", super()._embed_patches)(*args)

    attention, tokens = collaborators(case.parallel, store, rank)
    model = Watched(
        dim=case.net.dim,
        ffn_dim=case.net.ffn_dim,
        num_heads=case.net.heads,
        num_layers=case.net.layers,
        attention=live.during("self-attention", attention),
        tokens=tokens,
        text_cache=TextKVCache() if case.cached else None,
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
    live.leave_out([*model.parameters(), x, context])
    with torch.no_grad(), live:
        for _ in range(2):
            model([x], t, [context], prod(case.grid))
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
    own = weights(case.net.shapes(), case.forward.e, convert_all=False, cards=1).whole
    result: dict[str, Any] = {
        "case": case.name,
        "precision": case.precision,
        "tokens": prod(case.grid),
        "text_cache": case.cached,
        "weights_exact": own == found[0]["weights"],
        "parallel": asdict(case.parallel),
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
    for case in cases(options):
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
