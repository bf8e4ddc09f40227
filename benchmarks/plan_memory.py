"""The plan's memory, stage by stage, against what lives in real runs (CPU).

    python benchmarks/plan_memory.py --json plan_memory.json

Each case is a run of a randomly initialised checkpoint, by as many processes of one thread as it
has ranks, joined by gloo: from prompt to frames, or the denoising loop alone. Measured is the
highest sum of the bytes of all living tensor storages in each stage, on the fullest rank, and
beside it the growth of the process's own memory (RssAnon, sampled every 5 ms), in which gloo's
buffers, the kernels' scratch, the allocator's reserve and imported libraries are too.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_json
from benchmarks.plan_cases import Case, cases
from wan.cli import flags
from wan.cli.resolve import resolve
from wan.device import resolve as resolve_device
from wan.distributed import mesh
from wan.log import Stages
from wan.pipeline import build
from wan.pipeline.pipeline import Inputs
from wan.planner.measure import Planner
from wan.run import Run
from wan.torch_private import Live

STAGES = {
    "text": "text encoder",
    "conditioning": "image encoder",
    "denoising": "denoising",
    "decoding": "decoding",
}
ENOUGH = 200e6  # bytes; from there on the plan must be right
WITHIN = 0.05


class Sampler(threading.Thread):
    """The most memory of its own that this process had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        while True:
            self.most = max(self.most, anonymous())
            time.sleep(0.005)


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Watched(Stages):
    """Stages whose most memory is kept: tensors, and the process's growth since the start."""

    def __init__(self, live: Live, sampler: Sampler) -> None:
        super().__init__()
        self.live, self.sampler, self.start = live, sampler, anonymous()
        self.found: dict[str, tuple[int, int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name not in STAGES:
            yield
            return
        self.live.peak, self.sampler.most = +self.live.held, 0
        yield
        self.found[STAGES[name]] = (self.live.peak.total(), self.sampler.most - self.start)


def run(case: Case, run: Run, store: str, rank: int) -> dict[str, tuple[int, int]]:
    """The stages on one rank."""
    torch.set_num_threads(1)
    setup, parallel, team = run.setup, run.setup.parallel, None
    if parallel.world_size > 1:
        world = parallel.world_size
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
        team = mesh.form(resolve_device("cpu"), parallel.sizes)
    sampler = Sampler()
    sampler.start()
    live = Live("cpu", resized=parallel.dit_fsdp or parallel.t5_fsdp)
    pipeline = build.pipeline(setup, resolve_device("cpu"), team)
    pipeline.stages = stages = Watched(live, sampler)
    texts = torch.zeros(2, *pipeline.text_size) if case.loop else (None, None)
    with live:
        latents = pipeline.latents(run.request, Inputs(run.image, None, *texts))
        if team is not None:
            dist.barrier()
        if not case.loop:  # the ranks choose together how the VAE decodes
            pipeline.decode(latents)
    return stages.found


def serve(answers: Any, *args: Any) -> None:
    answers.put(run(*args))


def measured(case: Case, planned: Run) -> dict[str, list[int]]:
    """Each stage on its fullest rank."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.plan_memory", "diffusers", "transformers"])
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (answers, case, planned, f"{folder}/store")
        ranks = [
            context.Process(target=serve, args=(*given, rank))
            for rank in range(planned.setup.parallel.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank of {case.name} ended with {process.exitcode}")
        found = [answers.get() for _ in ranks]
    names = {name for one in found for name in one}
    return {
        name: [max(one[name][which] for one in found if name in one) for which in (0, 1)]
        for name in names
    }


def compared(case: Case, folder: Path) -> list[dict[str, Any]]:
    planned = resolve(flags.parse(case.argv(folder)), lambda *_: None, plan=True)
    stages = Planner(planned.setup, planned.request).stages()
    real = measured(case, planned)
    return [
        {
            "case": case.name,
            "stage": name,
            "planned_bytes": parts.total(),
            "measured_bytes": real[name][0],
            "planned_over_measured": parts.total() / real[name][0],
            "process_bytes": real[name][1],
            "parts": dict(parts),
            "flags": list(case.flags),
        }
        for name, parts in stages.items()
        if name == "denoising" or not case.loop
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("case, stage: planned MB, measured MB, ratio, RssAnon MB")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            if options.only and options.only not in case.name:
                continue
            for row in compared(case, Path(folder)):
                rows.append(row)
                sizes = [row[f"{of}_bytes"] / 1e6 for of in ("planned", "measured", "process")]
                ratio = row["planned_over_measured"]
                wrong = row["measured_bytes"] >= ENOUGH and abs(ratio - 1) > WITHIN
                print(
                    f"{row['case']:38} {row['stage']:14} {sizes[0]:8.1f} {sizes[1]:8.1f} "
                    f"{ratio:.3f} {sizes[2]:8.1f}{'  WRONG' if wrong else ''}",
                    flush=True,
                )
    write_json(options.json, torch.device("cpu"), rows)
    large = [row["planned_over_measured"] for row in rows if row["measured_bytes"] >= ENOUGH]
    worst = max((abs(ratio - 1) for ratio in large), default=0)
    print(f"{len(rows)} rows; of {len(large)} with 200 MB or more, at most {worst:.1%} off")
    return int(worst > WITHIN)


if __name__ == "__main__":
    sys.exit(main())
