"""Times LoRAs chosen per request of `python -m wan.serve` against no LoRA and against a restart.

    python -m benchmarks.video_loras --ranks 2 --jobs 20 --json results/video_loras.json

Two random LoRAs alternate over the jobs of one service of the demo checkpoint; after each pair a
video without a LoRA follows. The program prints

- seconds of a video with a LoRA over those of one without, in each round of three videos;
- seconds of a video after a restart of the service with `--lora`, which merges it, over the same;
- the difference of frames and latents from those of `generate.py --lora`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import CPU, results_file, write_json
from tests.pipelines import resolve_argv
from tests.serve.serving import PROMPT, ServiceProcess, generate_frames, read_frames
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import integer

_NAMES = ("a", "b")
_VIDEO = {"prompt": PROMPT, "num_frames": 17, "num_inference_steps": 8, "seed": 1}
_FLAGS = ("--prompt", PROMPT, "--frame_num", 17, "--sample_steps", 8, "--base_seed", 1)


def write_loras(folder: Path, rank: int) -> None:
    """Writes two LoRAs of all linear layers of the blocks of the demo checkpoint."""
    experts = resolve_argv(["--prompt", "x"]).setup.checkpoint.experts
    (tensors, *_) = (files.tensors for files in experts.values())
    for seed, name in enumerate(_NAMES):
        generator = torch.Generator().manual_seed(seed)
        factors: dict[str, torch.Tensor] = {}
        for parameter, info in tensors.items():
            layer, _, suffix = parameter.rpartition(".")
            if layer.startswith("blocks.") and suffix == "weight" and len(info.shape) == 2:
                rows, columns = info.shape
                down = torch.randn(rank, columns, generator=generator) / columns**0.5
                up = torch.randn(rows, rank, generator=generator) / 10
                factors |= {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
        save_file(factors, folder / f"{name}.safetensors")


def make_video(served: ServiceProcess, lora: str) -> tuple[float, np.ndarray]:
    """Returns the seconds from the request to the end of a video, and its frames."""
    start = time.monotonic()
    fields = _VIDEO | ({"lora": {"name": lora}} if lora else {})
    video = served.wait_for_video(served.request("/v1/videos", fields)[2]["id"], 600)
    assert video["status"] == "completed", video["error"]
    seconds = time.monotonic() - start
    return seconds, read_frames(served.folder / "jobs" / video["id"] / "video.mp4")


def measure_jobs(
    ranks: int, jobs: int, loras: Path, work: Path
) -> tuple[list[dict[str, float]], dict[str, list[np.ndarray]]]:
    """Returns seconds by LoRA for each round, and the frames of each LoRA's videos."""
    rounds: list[dict[str, float]] = []
    frames: dict[str, list[np.ndarray]] = {"a": [], "b": [], "": []}
    with ServiceProcess(work / "jobs", ranks, ["--lora_folder", loras]) as served:
        for lora in frames:  # the first videos load the networks and read the files
            make_video(served, lora)
        for number in range(jobs // 2):
            order = ["a", "b", ""] if number % 2 else ["", "a", "b"]
            seconds = {}
            for lora in order:
                seconds[lora], video = make_video(served, lora)
                frames[lora].append(video)
            rounds.append(seconds)
    return rounds, frames


def measure_restarts(ranks: int, rounds: int, loras: Path, work: Path) -> list[float]:
    """Returns seconds of a restart of the service with another merged LoRA, and of its video."""
    seconds = []
    for number in range(rounds):
        lora = loras / f"{_NAMES[number % 2]}.safetensors"
        start = time.monotonic()
        with ServiceProcess(work / f"merged{number}", ranks, flags=["--lora", lora]) as served:
            make_video(served, "")
            seconds.append(time.monotonic() - start)
    return seconds


def compare_with_merge(
    ranks: int, loras: Path, work: Path, frames: dict[str, list[np.ndarray]]
) -> dict[str, Any]:
    """Compares videos with those of `generate.py --lora` on as many ranks."""
    results: dict[str, Any] = {}
    sizes = ["--ulysses_size", ranks] if ranks > 1 else []
    for name in _NAMES:
        latents = {}
        for way, flags in (
            ("merged", ["--lora", loras / f"{name}.safetensors"]),
            ("separate", ["--lora_folder", loras, "--video_lora", name]),
        ):
            path = work / f"{name}_{way}.mp4"
            arguments = [*_FLAGS, *sizes, "--save_latents", *flags]
            video = generate_frames(path, *arguments, ranks=ranks)
            latents[way] = next(iter(load_file(path.with_suffix(".latents.safetensors")).values()))
            if way == "merged":
                difference = np.abs(video.astype(int) - frames[name][0])
                alike = all(np.array_equal(frames[name][0], other) for other in frames[name])
        separate, merged = latents["separate"], latents["merged"]
        error = (separate - merged).abs().max() / merged.abs().max()
        results[name] = {
            "videos_are_bit_equal": alike,
            "largest_frame_difference": int(difference.max()),
            "mean_frame_difference": float(difference.mean()),
            "largest_latents_difference": float(error),
        }
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all measurements."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    number = make_argument_type(integer(1, 10_000))
    parser.add_argument("--ranks", type=number, default=2, help="ranks of the service (2)")
    parser.add_argument("--jobs", type=number, default=20, help="videos with a LoRA (20)")
    parser.add_argument("--rank", type=number, default=16, help="rank of the LoRAs (16)")
    parser.add_argument("--restarts", type=number, default=3, help="restarts with --lora (3)")
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        work, loras = Path(folder), Path(folder) / "loras"
        loras.mkdir()
        write_loras(loras, options.rank)
        rounds, frames = measure_jobs(options.ranks, options.jobs, loras, work)
        with_loras = [statistics.mean(seconds[name] for name in _NAMES) for seconds in rounds]
        shares = [mine / seconds[""] for mine, seconds in zip(with_loras, rounds, strict=True)]
        plain = statistics.median(seconds[""] for seconds in rounds)
        print(
            f"a video with a LoRA: {statistics.median(with_loras):.2f} s, without {plain:.2f} s, "
            f"ratio {statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})",
            flush=True,
        )
        restarts = measure_restarts(options.ranks, options.restarts, loras, work)
        print(
            f"with a restart for --lora: {statistics.median(restarts):.2f} s, "
            f"{statistics.median(restarts) / plain:.2f} of a video without a LoRA",
            flush=True,
        )
        compared = compare_with_merge(options.ranks, loras, work, frames)
        print(f"against generate.py --lora: {compared}", flush=True)
        results = {"rounds": rounds, "restarts": restarts, "compared": compared}
        write_json(options.json, CPU, [results])


if __name__ == "__main__":
    sys.exit(run_program(main))
