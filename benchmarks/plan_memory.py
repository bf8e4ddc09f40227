"""Compare the plan's memory of each stage with the live tensors of real runs on CPUs.

    python benchmarks/plan_memory.py --json plan_memory.json

Each case runs a randomly initialized checkpoint, from prompt to frames or the denoising loop alone,
with one process of one thread for each rank, connected by gloo. The program prints a row for each
stage: the planned bytes, the measured bytes, and their ratio. Measured is the peak of the summed
bytes of all live tensor storages, on the rank with the highest peak. The last column is the growth
of the process's anonymous memory (RssAnon, sampled every 5 ms), which includes gloo's buffers, the
kernels' scratch, the allocator's reserve and imported libraries. The exit code is 1 if the plan of
a large stage is more than 5 % off. The JSON file has the rows with the parts of the plan.
"""

from __future__ import annotations

import multiprocessing as mp
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import results_file, write_json
from tools import make_character
from tools.make_sound import write
from wan.cli import flags
from wan.cli.flags import Parser
from wan.cli.programs import run_program
from wan.cli.resolve import resolve_command_line
from wan.device import select_device as resolve_device
from wan.distributed import mesh
from wan.log import StageTimer
from wan.pipeline import build, tiny
from wan.pipeline.video import save_video
from wan.planner.measure import Planner
from wan.run import Run
from wan.settings.command import Output
from wan.settings.presets import PRESETS
from wan.torch_private import StorageTracker

STAGES = {
    "text": "text encoder",
    "conditioning": "image encoder",
    "denoising": "denoising",
    "decoding": "decoding",
}
ENOUGH = 200e6  # bytes; smaller stages are not judged
WITHIN = 0.05  # relative

HEAD_DIMS = {"t2v-1.3B": 64, "t2v-A14B": 32, "i2v-A14B": 32, "ti2v-5B": 32}
HEAD_DIMS |= {"s2v-14B": 16, "animate-14B": 16, "vace-1.3B": 64}
LARGE_TEXT = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 8, "num_heads": 16}
LARGE = ("--size", "512*512", "--frame_num", "25", "--sample_steps", "2")
ONE = ("--sample_guide_scale", "1")  # one guidance branch
MODES = {
    "baseline": (),
    "InsertComm": ("--comm_type", "1"),
    "BlockAttn": ("--comm_type", "2"),
    "overlap": ("--fa_alltoall_overlap",),
}
FP8 = ("--fa_quant", "fp8")
RAIN = ("--use_rainfusion", "--sparse_start_step", "0")
FSDP = ("--dit_fsdp", "--t5_fsdp")


@dataclass(frozen=True)
class Case:
    """A run on CPUs.

    Attributes:
        loop: Run the denoising loop only.
        text: Sizes of the text encoder that replace the defaults of the random checkpoint.
    """

    name: str
    flags: tuple[str, ...]
    task: str = "t2v-1.3B"
    loop: bool = False
    text: Mapping[str, int] = field(default_factory=dict)
    image: bool = False

    def argv(self, folder: Path) -> list[str]:
        """Write the checkpoint and inputs into `folder`; return the command line."""
        made = folder / f"{self.task}-{len(self.text)}"
        if not made.is_dir():
            dim = PRESETS[self.task].num_heads * HEAD_DIMS[self.task]
            with patch.dict(tiny.TEXT_SIZES, self.text):
                tiny.make_checkpoint(self.task, made, sizes={"dim": dim, "ffn_dim": 2 * dim})
        argv = ["--plan", "--device", "cpu", "--task", self.task, "--ckpt_dir", str(made)]
        argv += ["--prompt", "cat " * 255]  # 511 tokens: the plan is for 512
        if self.image:
            Image.new("RGB", (512, 512)).save(folder / "image.png")
            argv += ["--image", str(folder / "image.png")]
        if self.task == "s2v-14B":
            argv += ["--audio", str(write(folder / "voice.wav", 1.7))]  # two clips of 16 frames
        if self.task == "animate-14B":  # two clips of 13 frames
            moves = folder / "moves"
            if not moves.is_dir():
                make_character.write(moves, (512, 512), 20)
            argv += ["--src_root_path", str(moves)]
        if self.task == "vace-1.3B":
            for name in ("video", "mask"):
                path = folder / f"{name}.mp4"
                if not path.exists():
                    save_video(torch.zeros(3, 17, 512, 512), Output(path, fps=16))
                argv += [f"--src_{name}", str(path)]
        return [*argv, *self.flags]


def ranks(ring: int, ulysses: int) -> tuple[str, ...]:
    return ("--ring_size", str(ring), "--ulysses_size", str(ulysses))


def cases() -> Iterator[Case]:
    for name, given in {**dict(loops()), **dict(methods()), **dict(caches())}.items():
        yield Case(name, (*LARGE, *given), loop=True)
    yield from runs()


def caches() -> Iterator[tuple[str, tuple[str, ...]]]:
    """List cases of step caches whose every step computes all blocks."""
    shown = {
        "first_block": ("first_block", "--step_cache_threshold", "0"),
        "first_block, order 1": (
            *("first_block", "--step_cache_threshold", "0", "--step_cache_order", "1"),
        ),
        "steps": ("steps:0-1",),
    }
    for name, policy in shown.items():
        given = ("--step_cache", *policy, "--step_cache_force")
        yield f"{name}, one rank", (*given, *ONE)
        yield f"{name}, one rank bf16", (*given, *ONE, "--precision", "bf16")
        yield f"{name}, 2 x 2 InsertComm", (*given, *ranks(2, 2), "--comm_type", "1")
    yield "steps, 2 x 2 FSDP", (*given, *ranks(2, 2), "--dit_fsdp")
    kept = (
        *("--use_attentioncache", "--start_step", "0", "--end_step", "4", "--step_cache_force"),
        *("--attentioncache_interval", "2", "--sample_steps", "5"),  # the solver's history grows
    )
    yield "attention, one rank", (*kept, *ONE)
    yield "attention, 1 x 2", (*kept, *ranks(1, 2), *ONE)
    yield "attention, 1 x 2, two branches", (*kept, *ranks(1, 2))


def loops() -> Iterator[tuple[str, tuple[str, ...]]]:
    """List cases of modes, rings, dtypes, padding, guidance branches and sharded weights."""
    yield "one rank", ONE
    yield "one rank bf16", (*ONE, "--precision", "bf16")
    yield "one rank, two branches, no text cache", ("--text_kv_cache", "false")
    for name, mode in MODES.items():
        yield f"1 x 2 {name}", (*ranks(1, 2), *mode, *ONE)
        yield f"1 x 2 {name} bf16", (*ranks(1, 2), *mode, *ONE, "--precision", "bf16")
        yield f"1 x 4 {name}", (*ranks(1, 4), *mode, *ONE)
        yield f"2 x 2 {name}", (*ranks(2, 2), *mode, *ONE)
    yield "ring of 2", (*ranks(2, 1), *ONE)
    yield "ring of 2 bf16", (*ranks(2, 1), *ONE, "--precision", "bf16")
    yield "ring of 4", (*ranks(4, 1), *ONE)
    yield "line of 4", (*ranks(4, 1), *ONE, "--ring_type", "bidirectional")
    yield "2 x 2 InsertComm, padded", (*ranks(2, 2), *ONE, "--comm_type", "1", "--size", "528*496")
    yield "2 x 1 x 2, two branches", ("--cfg_size", "2", *ranks(1, 2))
    yield "1 x 2 FSDP", (*ranks(1, 2), "--dit_fsdp", *ONE)
    yield "2 x 2 FSDP bf16", (*ranks(2, 2), "--dit_fsdp", *ONE, "--precision", "bf16")


def methods() -> Iterator[tuple[str, tuple[str, ...]]]:
    """List cases of FP8 attention, FP8 exchanges, block-sparse attention, and combinations."""
    both = (*RAIN, "--rainfusion_type", "v3", *FP8)
    for name, method in (("FP8", FP8), ("RainFusion", RAIN), ("RainFusion FP8", both)):
        yield f"{name} one rank", (*method, *ONE)
        yield f"{name} one rank bf16", (*method, *ONE, "--precision", "bf16")
        yield f"{name} 1 x 2 BlockAttn", (*ranks(1, 2), *method, "--comm_type", "2", *ONE)
        yield f"{name} 2 x 2 InsertComm", (*ranks(2, 2), *method, "--comm_type", "1", *ONE)
    exchanged = (*FP8, "--quant_alltoall", *ONE)
    yield "FP8 exchanged 1 x 2", (*ranks(1, 2), *exchanged)
    yield "FP8 exchanged 2 x 2 bf16", (*ranks(2, 2), *exchanged, "--precision", "bf16")


def runs() -> Iterator[Case]:
    """List runs of all stages: tasks, offload policies, text encoder and VAE."""
    size = ("--size", "512*512", "--frame_num", "17", "--sample_steps")
    two = (*size, "2", *ranks(1, 2))
    four = (*size, "4", *ranks(1, 2), "--offload_model")
    yield Case("t2v", (*size, "2", *ONE))
    yield Case("t2v, large text encoder", (*size, "1", *ONE), text=LARGE_TEXT)
    bf16 = ("--precision", "bf16")
    yield Case("t2v, large text encoder bf16", (*size, "1", *ONE, *bf16), text=LARGE_TEXT)
    yield Case("t2v FSDP, large text encoder", (*two, *FSDP, *ONE), text=LARGE_TEXT)
    yield Case("t2v, two experts, one at a time", (*four, "true"), "t2v-A14B")
    yield Case("t2v, two experts at once", (*four, "false"), "t2v-A14B")
    yield Case("i2v", two, "i2v-A14B", image=True)
    yield Case("i2v, all at once", (*four, "false"), "i2v-A14B", image=True)
    yield Case("ti2v", two, "ti2v-5B")
    yield Case("ti2v, image", two, "ti2v-5B", image=True)
    clips = ("--size", "512*512", "--infer_frames", "16", "--sample_steps", "2")
    yield Case("s2v", (*clips, *ONE), "s2v-14B", image=True)
    yield Case("s2v, two branches", clips, "s2v-14B", image=True)
    yield Case("s2v, 1 x 2", (*clips, *ranks(1, 2), *ONE), "s2v-14B", image=True)
    yield Case("s2v FSDP", (*clips, *ranks(1, 2), *FSDP, *ONE), "s2v-14B", image=True)
    moved = ("--frame_num", "13", "--sample_steps", "2")
    yield Case("animate", moved, "animate-14B")
    yield Case("animate, replace", (*moved, "--replace_flag"), "animate-14B")
    yield Case("animate, guidance", (*moved, "--sample_guide_scale", "2"), "animate-14B")
    yield Case("animate, 1 x 2", (*moved, *ranks(1, 2)), "animate-14B")
    yield Case("animate FSDP", (*moved, *ranks(1, 2), *FSDP), "animate-14B")
    yield Case("vace", (*size, "2", *ONE), "vace-1.3B")
    yield Case("vace, two branches bf16", (*size, "2", *bf16), "vace-1.3B")
    yield Case("vace, 1 x 2 InsertComm", (*two, *ONE, "--comm_type", "1"), "vace-1.3B")
    yield Case("vace FSDP", (*two, *ONE, *FSDP), "vace-1.3B")
    yield Case("t2v, tiled decoding", (*size, "1", *ONE, "--vae_tiling"))


class Sampler(threading.Thread):
    """Samples this process's anonymous memory and records the peak."""

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


class Watched(StageTimer):
    """Stages that record their peak memory: tensors, and the process's growth since the start."""

    def __init__(self, live: StorageTracker, sampler: Sampler) -> None:
        super().__init__()
        self.live, self.sampler, self.start = live, sampler, anonymous()
        self.found: dict[str, tuple[int, int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name not in STAGES:
            yield
            return
        self.live.peak_bytes, self.sampler.most = +self.live.live_bytes, 0
        yield
        now, before = self.live.peak_bytes.total(), self.found.get(STAGES[name], (0, 0))
        self.found[STAGES[name]] = max((now, self.sampler.most - self.start), before)


def run(case: Case, run: Run, store: str, rank: int) -> dict[str, tuple[int, int]]:
    """Run a case on one rank; return the peaks of its stages."""
    torch.set_num_threads(1)
    setup, parallel, team = run.setup, run.setup.parallel, None
    if parallel.world_size > 1:
        world = parallel.world_size
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
        team = mesh.make_parallel_groups(resolve_device("cpu"), parallel.mesh_shape)
    sampler = Sampler()
    sampler.start()
    live = StorageTracker("cpu", resizes=parallel.dit_fsdp or parallel.t5_fsdp)
    pipeline = build.build_pipeline(setup, resolve_device("cpu"), team)
    pipeline.stages = stages = Watched(live, sampler)
    texts = torch.zeros(2, *pipeline.text_size) if case.loop else (None, None)
    if run.params.has_clips:
        with live:
            clips = pipeline.generate_clips(run.params, run.make_inputs())
            while next(clips, None) is not None:
                pass
        return stages.found
    with live:
        given = replace(run.make_inputs(), prompt_embeds=texts[0], negative_prompt_embeds=texts[1])
        latents = pipeline.generate_latents(run.params, given)
        if team is not None:
            dist.barrier()
        if not case.loop:  # collective: the ranks agree on how the VAE decodes
            pipeline.decode(latents)
    return stages.found


def serve(answers: Any, *args: Any) -> None:
    answers.put(run(*args))


def measured(case: Case, planned: Run) -> dict[str, list[int]]:
    """Run a case on all its ranks; return each stage's maximum over the ranks."""
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
    planned = resolve_command_line(flags.parse_flags(case.argv(folder)), lambda *_: None, plan=True)
    stages = Planner(planned.setup, planned.params).stage_memory()
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="run only cases whose name contains this text")
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
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
    sys.exit(run_program(main))
