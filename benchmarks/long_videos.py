"""Measures the gain of decoding a clip while the next is denoised, and the memory of many clips.

    python -m benchmarks.long_videos --rounds 5 --plot docs/overlap.png --json results/long.json
    python -m benchmarks.long_videos --memory 5 20 50

The program makes videos with the demo checkpoint's i2v networks. Each round makes one with and one
without overlap, with resident networks and with offloaded ones. The plot has the timelines of both.
`--memory` runs generate.py once for each number of clips and prints its peak.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, compute_ratios, results_file, time_interleaved, write_json
from wan import WanI2V
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, make_output_path_type, run_program
from wan.settings.values import integer
from wan.utils.files import make_marked_kind, write_output
from wan.utils.log import StageTimer

ROOT = Path(__file__).resolve().parents[1]
DEMO, IMAGE = ROOT / "examples" / "demo" / "i2v-A14B", ROOT / "examples" / "star.png"
FRAMES, STEPS = 17, 20
PROMPT = "a large yellow star moves left on a gray background"
Span = tuple[str, float, float]
"""Stage, start and end in seconds."""


class Timeline(StageTimer):
    """Stages that also record the start and end of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with super().__call__(name):
            yield
        self.spans.append((name, start, time.perf_counter()))


def _make_video(model: Any, clips: int, offload: bool) -> None:
    model.generate(
        PROMPT,
        str(IMAGE),
        max_area=64 * 64,
        frame_num=FRAMES,
        sampling_steps=STEPS,
        guide_scale=1.0,
        seed=1,
        chain="latent",
        num_repeat=clips,
        offload_model=offload,
    )


def measure_overlap_gain(rounds: int, clips: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of videos with and without overlap, for each offload policy."""
    models = {
        name: WanI2V("i2v-A14B", DEMO, overlap_decoding=name == "overlap")
        for name in ("one after the other", "overlap")
    }
    times = {}
    for offload in (False, True):
        runs = {name: partial(_make_video, model, clips, offload) for name, model in models.items()}
        times["loaded when needed" if offload else "kept"] = time_interleaved(runs, rounds)
    return times


def record_timelines(clips: int) -> dict[str, list[Span]]:
    """Returns the spans of all stages of one video, with and without overlap."""
    spans_by_name = {}
    for name in ("one after the other", "overlap"):
        model: Any = WanI2V("i2v-A14B", DEMO, overlap_decoding=name == "overlap")
        _make_video(model, 1, False)  # loads the networks
        stages = model._pipeline.stage_timer = Timeline()
        start = time.perf_counter()
        _make_video(model, clips, False)
        spans_by_name[name] = [(stage, a - start, b - start) for stage, a, b in stages.spans]
    return spans_by_name


_METADATA = {"Software": "benchmarks.long_videos"}
_TITLES = {
    "one after the other": "each clip is decoded before the next one is denoised",
    "overlap": "each clip is decoded while the next one is denoised (overlap_decoding)",
}
PLOT = make_marked_kind("a plot of benchmarks.long_videos", b"Software\0benchmarks.long_videos")


def plot_timelines(timelines: dict[str, list[Span]], path: Path) -> None:
    """Draws the timelines of denoising and decoding, one below the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(timelines), 1, sharex=True, figsize=(9, 3.6), layout="tight")
    for axis, (name, spans) in zip(axes, timelines.items(), strict=True):
        for row, (stage_name, colour) in enumerate(
            (("denoising", "#2a6f97"), ("decoding", "#e07a1f"))
        ):
            bars = [(a, b - a) for stage, a, b in spans if stage == stage_name]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=colour, edgecolor="white")
            for number, (begin, length) in enumerate(bars, 1):
                axis.text(begin + length / 2, row, str(number), ha="center", va="center", size=8)
        axis.set_yticks((0, 1), ("denoising", "decoding"))
        axis.invert_yaxis()
        axis.set_title(_TITLES[name], loc="left", fontsize=10)
        axis.set_title(f"{max(b for *_, b in spans):.1f} s", loc="right", fontsize=10)
    axes[-1].set_xlabel("seconds from the start of the video; numbers: clips")
    with write_output(path, PLOT) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata=_METADATA)
    plt.close(figure)


def measure_memory(clips: int) -> dict[str, Any]:
    """Runs generate.py with a number of clips; returns its peak memory and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "v.mp4"
        flags = ["--task", "i2v-A14B", "--image", IMAGE, "--frame_num", FRAMES, "--sample_steps", 4]
        flags += ["--num_clip", clips, "--chain", "latent", "--base_seed", 1, "--save_file", out]
        command = [sys.executable, ROOT / "generate.py", *flags, "--offload_model", "false"]
        start = time.perf_counter()
        subprocess.run([*map(str, command)], check=True, capture_output=True)
        seconds = time.perf_counter() - start
        record = json.loads(out.with_suffix(".json").read_text())
    return {"clips": clips, "seconds": seconds, **record["peak_memory_bytes"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the gain of overlapped decoding, or with --memory the memory of many clips."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=5)
    parser.add_argument(
        "--clips", type=make_argument_type(integer(1, 1000)), default=6, help="of a video"
    )
    parser.add_argument(
        "--memory", type=make_argument_type(integer(1, 1000)), nargs="+", help="numbers of clips"
    )
    parser.add_argument("--plot", type=make_output_path_type(PLOT))
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
    results: list[Any] = []
    for clips in options.memory or ():
        results.append(measure_memory(clips))
        print(results[-1], flush=True)
    if not options.memory:
        for name, times in measure_overlap_gain(options.rounds, options.clips).items():
            overlapped, plain = times["overlap"], times["one after the other"]
            share = compute_ratios(overlapped, plain)
            print(
                f"{name}: {statistics.median(plain):.2f} s one after the other, "
                f"{statistics.median(overlapped):.2f} s with overlap, ratio {share['median']:.3f} "
                f"({share['min']:.3f} to {share['max']:.3f})",
                flush=True,
            )
            results.append({"networks": name, "seconds": times, "ratio": share})
        if options.plot:
            plot_timelines(record_timelines(options.clips), options.plot)
    write_json(options.json, CPU, results)


if __name__ == "__main__":
    sys.exit(run_program(main))
