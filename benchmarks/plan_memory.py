"""Compares the plan's memory of each stage with the live tensors of real runs on CPUs.

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
import wave
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

from benchmarks.common import add_json_option, write_json
from wan.app import flag_parser as flags
from wan.app.flag_parser import Parser
from wan.app.programs import run_program
from wan.app.resolve import ResolveContext, resolve_video
from wan.app.run import Run
from wan.device import select_device as resolve_device
from wan.distributed import mesh
from wan.media.video_writer import write_video
from wan.pipeline import build
from wan.pipeline.clips import generate_clips
from wan.planner.measure import Planner
from wan.settings.command import Output
from wan.settings.presets import PRESETS
from wan.testing import random_checkpoint
from wan.utils.log import StageTimer
from wan.utils.torch_private import StorageTracker

STAGES = {
    "text": "text encoder",
    "conditioning": "image encoder",
    "denoising": "denoising",
    "decoding": "decoding",
}
MIN_JUDGED_BYTES = 200e6  # bytes; smaller stages are not judged
TOLERANCE = 0.05  # relative

HEAD_DIMS = {"t2v-1.3B": 64, "t2v-A14B": 32, "i2v-A14B": 32, "ti2v-5B": 32}
HEAD_DIMS |= {"s2v-14B": 16, "animate-14B": 16, "vace-1.3B": 64}
LARGE_TEXT = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 8, "num_heads": 16}
LARGE = ("--size", "512*512", "--frame_num", "25", "--sample_steps", "2")
NO_GUIDANCE = ("--sample_guide_scale", "1")  # one guidance branch
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

    def make_arguments(self, folder: Path) -> list[str]:
        """Writes the checkpoint and inputs into `folder`; returns the command line."""
        checkpoint = folder / f"{self.task}-{len(self.text)}"
        if not checkpoint.is_dir():
            dim = PRESETS[self.task].num_heads * HEAD_DIMS[self.task]
            with patch.dict(random_checkpoint.TEXT_SIZES, self.text):
                random_checkpoint.make_checkpoint(
                    self.task, checkpoint, sizes={"dim": dim, "ffn_dim": 2 * dim}
                )
        argv = ["--plan", "--device", "cpu", "--task", self.task, "--ckpt_dir", str(checkpoint)]
        argv += ["--prompt", "cat " * 255]  # 511 tokens: the plan is for 512
        if self.image:
            Image.new("RGB", (512, 512)).save(folder / "image.png")
            argv += ["--image", str(folder / "image.png")]
        if self.task == "s2v-14B":  # two clips of 16 frames
            argv += [
                "--audio",
                str(write_tone(folder / "voice.wav", 1.7)),
            ]
        if self.task == "animate-14B":  # two clips of 13 frames
            argv += ["--src_root_path", str(write_animate_folder(folder / "moves", 20))]
        if self.task == "vace-1.3B":
            for name in ("video", "mask"):
                path = folder / f"{name}.mp4"
                if not path.exists():
                    write_video(torch.zeros(3, 17, 512, 512), Output(path, fps=16))
                argv += [f"--src_{name}", str(path)]
        return [*argv, *self.flags]


def write_tone(path: Path, seconds: float) -> Path:
    """Writes a wav of one tone, and returns its path."""
    samples = 8000 * torch.sin(torch.arange(int(16_000 * seconds)) * 0.1)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples.short().numpy().tobytes())
    return path


def write_animate_folder(folder: Path, frames: int) -> Path:
    """Writes black inputs of animate-14B, 512*512 pixels, unless they exist."""
    if not folder.is_dir():
        folder.mkdir()
        Image.new("RGB", (512, 512)).save(folder / "src_ref.png")
        for name in ("pose", "face", "bg", "mask"):
            video = torch.full((3, frames, 512, 512), -1.0)
            write_video(video, Output(folder / f"src_{name}.mp4", fps=30))
    return folder


def make_rank_flags(ring: int, ulysses: int) -> tuple[str, ...]:
    return ("--ring_size", str(ring), "--ulysses_size", str(ulysses))


def list_cases() -> Iterator[Case]:
    for name, case_flags in {
        **dict(list_loop_cases()),
        **dict(list_backend_cases()),
        **dict(list_cache_cases()),
    }.items():
        yield Case(name, (*LARGE, *case_flags), loop=True)
    yield from list_run_cases()


def list_cache_cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lists cases of step caches whose every step computes all blocks."""
    policies = {
        "first_block": "first_block:threshold=0,",
        "first_block, order 1": "first_block:threshold=0,order=1,",
        "steps": "steps:0-1,",
    }
    for name, policy in policies.items():
        cache_flags = ("--step_cache", f"{policy}force=true")
        yield f"{name}, one rank", (*cache_flags, *NO_GUIDANCE)
        yield f"{name}, one rank bf16", (*cache_flags, *NO_GUIDANCE, "--precision", "bf16")
        yield (
            f"{name}, 2 x 2 InsertComm",
            (*cache_flags, *make_rank_flags(2, 2), "--comm_type", "1"),
        )
    yield "steps, 2 x 2 FSDP", (*cache_flags, *make_rank_flags(2, 2), "--dit_fsdp")
    attention_flags = (
        *("--step_cache", "attention:force=true", "--start_step", "0", "--end_step", "4"),
        *("--attentioncache_interval", "2", "--sample_steps", "5"),  # the solver's history grows
    )
    yield "attention, one rank", (*attention_flags, *NO_GUIDANCE)
    yield "attention, 1 x 2", (*attention_flags, *make_rank_flags(1, 2), *NO_GUIDANCE)
    yield "attention, 1 x 2, two branches", (*attention_flags, *make_rank_flags(1, 2))


def list_loop_cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lists cases of modes, rings, dtypes, padding, guidance branches and sharded weights."""
    yield "one rank", NO_GUIDANCE
    yield "one rank bf16", (*NO_GUIDANCE, "--precision", "bf16")
    yield "one rank, two branches", ()
    for name, mode in MODES.items():
        yield f"1 x 2 {name}", (*make_rank_flags(1, 2), *mode, *NO_GUIDANCE)
        yield (
            f"1 x 2 {name} bf16",
            (*make_rank_flags(1, 2), *mode, *NO_GUIDANCE, "--precision", "bf16"),
        )
        yield f"1 x 4 {name}", (*make_rank_flags(1, 4), *mode, *NO_GUIDANCE)
        yield f"2 x 2 {name}", (*make_rank_flags(2, 2), *mode, *NO_GUIDANCE)
    yield "ring of 2", (*make_rank_flags(2, 1), *NO_GUIDANCE)
    yield "ring of 2 bf16", (*make_rank_flags(2, 1), *NO_GUIDANCE, "--precision", "bf16")
    yield "ring of 4", (*make_rank_flags(4, 1), *NO_GUIDANCE)
    yield "line of 4", (*make_rank_flags(4, 1), *NO_GUIDANCE, "--ring_type", "bidirectional")
    yield (
        "2 x 2 InsertComm, padded",
        (*make_rank_flags(2, 2), *NO_GUIDANCE, "--comm_type", "1", "--size", "528*496"),
    )
    yield "2 x 1 x 2, two branches", ("--cfg_size", "2", *make_rank_flags(1, 2))
    yield "1 x 2 FSDP", (*make_rank_flags(1, 2), "--dit_fsdp", *NO_GUIDANCE)
    yield (
        "2 x 2 FSDP bf16",
        (*make_rank_flags(2, 2), "--dit_fsdp", *NO_GUIDANCE, "--precision", "bf16"),
    )


def list_backend_cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lists cases of FP8 attention, FP8 exchanges, block-sparse attention, and combinations."""
    both = (*RAIN, "--rainfusion_type", "v3", *FP8)
    for name, method in (("FP8", FP8), ("RainFusion", RAIN), ("RainFusion FP8", both)):
        yield f"{name} one rank", (*method, *NO_GUIDANCE)
        yield f"{name} one rank bf16", (*method, *NO_GUIDANCE, "--precision", "bf16")
        yield (
            f"{name} 1 x 2 BlockAttn",
            (*make_rank_flags(1, 2), *method, "--comm_type", "2", *NO_GUIDANCE),
        )
        yield (
            f"{name} 2 x 2 InsertComm",
            (*make_rank_flags(2, 2), *method, "--comm_type", "1", *NO_GUIDANCE),
        )
    exchanged = (*FP8, "--quant_alltoall", *NO_GUIDANCE)
    yield "FP8 exchanged 1 x 2", (*make_rank_flags(1, 2), *exchanged)
    yield "FP8 exchanged 2 x 2 bf16", (*make_rank_flags(2, 2), *exchanged, "--precision", "bf16")


def list_run_cases() -> Iterator[Case]:
    """Lists runs of all stages: tasks, offload policies, text encoder and VAE."""
    size = ("--size", "512*512", "--frame_num", "17", "--sample_steps")
    two = (*size, "2", *make_rank_flags(1, 2))
    four = (*size, "4", *make_rank_flags(1, 2), "--offload_model")
    yield Case("t2v", (*size, "2", *NO_GUIDANCE))
    yield Case("t2v, large text encoder", (*size, "1", *NO_GUIDANCE), text=LARGE_TEXT)
    bf16 = ("--precision", "bf16")
    yield Case("t2v, large text encoder bf16", (*size, "1", *NO_GUIDANCE, *bf16), text=LARGE_TEXT)
    yield Case("t2v FSDP, large text encoder", (*two, *FSDP, *NO_GUIDANCE), text=LARGE_TEXT)
    yield Case("t2v, two experts, one at a time", (*four, "true"), "t2v-A14B")
    yield Case("t2v, two experts at once", (*four, "false"), "t2v-A14B")
    yield Case("i2v", two, "i2v-A14B", image=True)
    yield Case("i2v, all at once", (*four, "false"), "i2v-A14B", image=True)
    yield Case("ti2v", two, "ti2v-5B")
    yield Case("ti2v, image", two, "ti2v-5B", image=True)
    clips = ("--size", "512*512", "--infer_frames", "16", "--sample_steps", "2")
    yield Case("s2v", (*clips, *NO_GUIDANCE), "s2v-14B", image=True)
    yield Case("s2v, two branches", clips, "s2v-14B", image=True)
    yield Case("s2v, 1 x 2", (*clips, *make_rank_flags(1, 2), *NO_GUIDANCE), "s2v-14B", image=True)
    yield Case(
        "s2v FSDP", (*clips, *make_rank_flags(1, 2), *FSDP, *NO_GUIDANCE), "s2v-14B", image=True
    )
    animate_flags = ("--frame_num", "13", "--sample_steps", "2")
    yield Case("animate", animate_flags, "animate-14B")
    yield Case("animate, replace", (*animate_flags, "--replace_flag"), "animate-14B")
    yield Case("animate, guidance", (*animate_flags, "--sample_guide_scale", "2"), "animate-14B")
    yield Case("animate, 1 x 2", (*animate_flags, *make_rank_flags(1, 2)), "animate-14B")
    yield Case("animate FSDP", (*animate_flags, *make_rank_flags(1, 2), *FSDP), "animate-14B")
    yield Case("vace", (*size, "2", *NO_GUIDANCE), "vace-1.3B")
    yield Case("vace, two branches bf16", (*size, "2", *bf16), "vace-1.3B")
    yield Case("vace, 1 x 2 InsertComm", (*two, *NO_GUIDANCE, "--comm_type", "1"), "vace-1.3B")
    yield Case("vace FSDP", (*two, *NO_GUIDANCE, *FSDP), "vace-1.3B")
    yield Case("t2v, tiled decoding", (*size, "1", *NO_GUIDANCE, "--vae_tiling"))


class Sampler(threading.Thread):
    """Samples this process's anonymous memory and records the peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, read_rss_anon())
            time.sleep(0.005)


def read_rss_anon() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class StagePeaks(StageTimer):
    """Stages that record their peak memory: tensors, and the process's growth since the start."""

    def __init__(self, live: StorageTracker, sampler: Sampler) -> None:
        super().__init__()
        self.live, self.sampler, self.start_bytes = live, sampler, read_rss_anon()
        self.peaks: dict[str, tuple[int, int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name not in STAGES:
            yield
            return
        self.live.peak_bytes, self.sampler.peak = +self.live.live_bytes, 0
        yield
        now, previous = self.live.peak_bytes.total(), self.peaks.get(STAGES[name], (0, 0))
        self.peaks[STAGES[name]] = max((now, self.sampler.peak - self.start_bytes), previous)


def run_case(case: Case, run: Run, store: str, rank: int) -> dict[str, tuple[int, int]]:
    """Runs a case on one rank; returns the peaks of its stages."""
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
    pipeline.stage_timer = stages = StagePeaks(live, sampler)
    prompt_embeds = torch.zeros(2, *pipeline.text_size) if case.loop else (None, None)
    if run.params.has_clips:
        with live:
            clips = generate_clips(pipeline, run.params, run.load_inputs())
            while next(clips, None) is not None:
                pass
        return stages.peaks
    with live:
        inputs = replace(
            run.load_inputs(),
            prompt_embeds=prompt_embeds[0],
            negative_prompt_embeds=prompt_embeds[1],
        )
        latents = pipeline.generate_latents(run.params, inputs)
        if team is not None:
            dist.barrier()
        if not case.loop:  # collective: the ranks agree on how the VAE decodes
            pipeline.decode(latents)
    return stages.peaks


def send_result(answers: Any, *args: Any) -> None:
    answers.put(run_case(*args))


def measure_case(case: Case, planned: Run) -> dict[str, list[int]]:
    """Runs a case on all its ranks; returns each stage's maximum over the ranks."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.plan_memory", "diffusers", "transformers"])
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (answers, case, planned, f"{folder}/store")
        processes = [
            context.Process(target=send_result, args=(*arguments, rank))
            for rank in range(planned.setup.parallel.world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank of {case.name} ended with {process.exitcode}")
        results_by_rank = [answers.get() for _ in processes]
    names = {name for result in results_by_rank for name in result}
    return {
        name: [
            max(result[name][which] for result in results_by_rank if name in result)
            for which in (0, 1)
        ]
        for name in names
    }


def compare_case(case: Case, folder: Path) -> list[dict[str, Any]]:
    planned = resolve_video(
        ResolveContext(plan=True), flags.parse_flags(case.make_arguments(folder))
    )
    stages = Planner(planned.setup, planned.params).compute_stage_memory()
    measured = measure_case(case, planned)
    return [
        {
            "case": case.name,
            "stage": name,
            "planned_bytes": parts.total(),
            "measured_bytes": measured[name][0],
            "planned_over_measured": parts.total() / measured[name][0],
            "process_bytes": measured[name][1],
            "parts": dict(parts),
            "flags": list(case.flags),
        }
        for name, parts in stages.items()
        if name == "denoising" or not case.loop
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="run only cases whose name contains this text")
    add_json_option(parser)
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    print("case, stage: planned MB, measured MB, ratio, RssAnon MB")
    with tempfile.TemporaryDirectory() as folder:
        for case in list_cases():
            if options.only and options.only not in case.name:
                continue
            for row in compare_case(case, Path(folder)):
                rows.append(row)
                sizes = [row[f"{of}_bytes"] / 1e6 for of in ("planned", "measured", "process")]
                ratio = row["planned_over_measured"]
                wrong = row["measured_bytes"] >= MIN_JUDGED_BYTES and abs(ratio - 1) > TOLERANCE
                print(
                    f"{row['case']:38} {row['stage']:14} {sizes[0]:8.1f} {sizes[1]:8.1f} "
                    f"{ratio:.3f} {sizes[2]:8.1f}{'  WRONG' if wrong else ''}",
                    flush=True,
                )
    write_json(options.json, torch.device("cpu"), rows)
    large = [
        row["planned_over_measured"] for row in rows if row["measured_bytes"] >= MIN_JUDGED_BYTES
    ]
    worst = max((abs(ratio - 1) for ratio in large), default=0)
    print(f"{len(rows)} rows; of {len(large)} with 200 MB or more, at most {worst:.1%} off")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(run_program(main))
