"""Anonymous host memory of each rank while a DiT is sharded over several, against its share.

    python -m benchmarks.fsdp_memory --ranks 4 --stored bf16 --precision bf16

Writes a synthetic sharded checkpoint in a temporary folder and starts gloo ranks, one process and
one thread each. Every rank notes RssAnon of /proc (Linux) once imports and process group are done,
loads its share with the code of generate.py while a thread samples RssAnon, and notes it again.
Limit, above that first level: model bytes / ranks + 0.25 GB. Status 1 where a rank exceeds it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.load_memory import (
    DTYPES,
    Sampler,
    blueprint,
    rss_anon,
    write_in_another_process,
)
from wan.checkpoint.load import dit_dtypes
from wan.distributed.fsdp import Sharded

ALLOWANCE = 0.25e9  # bytes per rank beside its share


def measure(rank: int, ranks: int, folder: Path, precision: str) -> dict[str, float]:
    """One rank's figures, in bytes above its level before loading (base) and seconds."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store, timeout, world_size=ranks, rank=rank)
    place = Sharded(init_device_mesh("cpu", (ranks,)), lambda network: network.blocks)
    dist.barrier()
    base = rss_anon()
    sampler = Sampler()
    sampler.start()
    start = time.perf_counter()
    model = blueprint(folder).load(
        device=torch.device("cpu"),
        dtype_of=dit_dtypes(DTYPES[precision], convert_all=False),
        place=place,
    )
    seconds = time.perf_counter() - start
    sampler.running = False
    sampler.join()
    final = rss_anon()
    result = {
        "rank": rank,
        "base_bytes": base,
        "peak_bytes": sampler.peak - base,
        "final_bytes": final - base,
        "share_bytes": sum(place.share(p)[0].nbytes for p in model.parameters()),
        "model_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "seconds": seconds,
    }
    dist.barrier()
    dist.destroy_process_group()
    return result


def report(result: dict[str, Any]) -> None:
    """The figures in GB (1e9 bytes)."""

    def gb(key: str, figures: dict[str, Any] = result) -> str:
        return f"{figures[key] / 1e9:.3f} GB"

    print(
        f"files {gb('file_bytes')}, model {gb('model_bytes')}, per rank "
        f"{gb('model_bytes_per_rank')}, limit {gb('limit_bytes')}"
    )
    for rank in result["ranks"]:
        print(
            f"rank {rank['rank']}: {gb('base_bytes', rank)} before; above that: peak "
            f"{gb('peak_bytes', rank)}, after loading {gb('final_bytes', rank)} "
            f"(share {gb('share_bytes', rank)}), {rank['seconds']:.1f} s"
        )
    print("within the limit" if result["within_limit"] else "OVER THE LIMIT")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=1.2, help="size of the files")
    parser.add_argument("--stored", choices=DTYPES, default="bf16")
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_in_another_process(folder, options.gigabytes, options.stored)
        arguments = [
            (rank, options.ranks, folder, options.precision) for rank in range(options.ranks)
        ]
        with get_context("spawn").Pool(options.ranks) as pool:  # the ranks wait for each other
            ranks = pool.starmap(measure, arguments, chunksize=1)
            pool.close()
            pool.join()
    share = ranks[0]["model_bytes"] / options.ranks
    limit = share + ALLOWANCE
    result: dict[str, Any] = {
        "command": sys.argv,
        "torch": torch.__version__,
        "file_bytes": size,
        "model_bytes": ranks[0]["model_bytes"],
        "model_bytes_per_rank": share,
        "limit_bytes": limit,
        "ranks": ranks,
        "within_limit": all(max(r["peak_bytes"], r["final_bytes"]) <= limit for r in ranks),
    }
    report(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if result["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
