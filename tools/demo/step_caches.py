"""Measures the speed-up and the quality of step caches on the demo checkpoint.

    python -m tools.demo.step_caches --results outputs/sweep.jsonl --prompts 24
    python -m tools.demo.step_caches --results outputs/sweep.jsonl --prompts 100 --chosen
    python -m tools.demo.step_caches --results outputs/speed.jsonl --prompts 5   # nothing else runs
    python -m tools.demo.step_caches --results outputs/sweep.jsonl --speed outputs/speed.jsonl \
        --report docs/step_caches_demo

The program makes a video of every prompt without a cache, with each policy, and with fewer steps,
all from the same noise. The prompts are held out from training. The variants of a prompt are made
in turn, so that a drift of the machine's speed affects all of them equally. Each line of the
results is one video; an interrupted program resumes.

The report is a table and a plot. It shows the share of computed steps, the speed-up of denoising
(the median over prompts, on a quiet machine), and the marks: scores of colour, shape and motion of
each shape, by plain image processing. It compares every variant with the run without a cache: the
difference of the marks with a 95 % interval over prompts (bootstrap), PSNR and SSIM.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tools.demo.evaluate import SIDE, compute_psnr, judge_shapes, list_held_out_scenes, to_pixels
from tools.demo.outputs import PICTURE
from tools.demo.render import render_scene
from tools.demo.scenes import Scene, make_caption
from tools.demo.score import detect_shapes
from wan import WanI2V, WanT2V
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.configs import WAN_CONFIGS
from wan.settings.errors import InputError
from wan.settings.values import integer
from wan.utils import log
from wan.utils.files import OutputKind, check_output, write_output

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
FRAMES, GUIDANCE = 9, 3.0
Clip = NDArray[np.uint8]
Cache = tuple[tuple[str, Any], ...]
TASKS = {"t2v": (WanT2V, 12.0), "i2v": (WanI2V, 5.0)}
FEWER = (4, 6, 8, 10, 12, 15, 20, 25, 30)


@dataclass(frozen=True)
class Variant:
    """A variant: its steps, and the keyword arguments of its cache."""

    steps: int
    cache: Cache = ()

    @property
    def name(self) -> str:
        """Name in the results and the report."""
        settings = dict(self.cache)
        policy = settings.pop("step_cache", "no cache")
        more = " ".join(
            f"{key.removeprefix('step_cache_')} {value}" for key, value in settings.items()
        )
        return f"{policy} {more}".strip()


def list_variants(steps: int, only_chosen: bool) -> list[Variant]:
    """Lists the variants of a number of steps; the first has no cache. only_chosen: a selection."""
    listed = {stride: ",".join(map(str, range(0, steps, stride))) for stride in (2, 3)}
    interval, start = "attentioncache_interval", {"start_step": steps // 4}
    few: list[tuple[str, dict[str, Any]]] = [
        ("first_block:threshold=0.2", {}),
        ("mag:threshold=0.04", {}),
        (f"steps:{listed[2]}", {}),
        ("attention", {interval: 4, **start}),
        ("cfg", {}),
    ]
    more: list[tuple[str, dict[str, Any]]] = []
    more += [(f"first_block:threshold={value}", {}) for value in (0.05, 0.1, 0.3, 0.5)]
    more += [("first_block:threshold=0.2,order=1", {})]
    more += [(f"mag:threshold={value}", {}) for value in (0.02, 0.08, 0.15)]
    more += [(f"steps:{listed[3]}", {}), ("attention", {interval: 2, **start})]
    fewer = [steps // 2] if only_chosen else [count for count in FEWER if count < steps]
    return [
        *(Variant(count) for count in (steps, *fewer)),
        *(
            Variant(steps, (("step_cache", policy), *settings.items()))
            for policy, settings in (few if only_chosen else few + more)
        ),
    ]


class VideoMaker:
    """Makes videos of one task with a pipeline per cache and a shared text encoder and decoder."""

    def __init__(self, kind: str) -> None:
        self.facade, self.shift = TASKS[kind]
        self.kind, self.folder = kind, DEMO / f"{kind}-A14B"
        self._models: dict[Cache, Any] = {}
        self._plain = self._get_model(())
        self._negative = self._encode_prompt(self._plain.config.sample_neg_prompt)

    def _get_model(self, cache: Cache) -> Any:
        if cache not in self._models:
            config = WAN_CONFIGS[self.folder.name]
            self._models[cache] = self.facade(config, self.folder, **dict(cache))
        return self._models[cache]

    def _encode_prompt(self, text: str) -> Tensor:
        prompt_embeds: Tensor = self._plain._pipeline.text_encoder.get()(text)
        return prompt_embeds

    def __call__(self, scene: Scene, seed: int, variant: Variant) -> tuple[Clip, dict[str, float]]:
        """Makes a video; returns its frames, seconds of denoising, and share of full forwards."""
        model = self._get_model(variant.cache)
        pipeline = model._pipeline
        arguments: tuple[Any, ...] = (make_caption(scene),)
        seconds_before = pipeline.stage_timer.seconds.get("denoising", 0.0)
        size: dict[str, Any] = {"size": (SIDE, SIDE)}
        if self.kind == "i2v":
            arguments = (*arguments, Image.fromarray(render_scene(scene, FRAMES, SIDE)[0]))
            size = {"max_area": SIDE * SIDE}
        latents = model.generate(
            *arguments,
            **size,
            frame_num=FRAMES,
            shift=self.shift,
            sampling_steps=variant.steps,
            guide_scale=GUIDANCE,
            seed=seed,
            offload_model=False,
            prompt_embeds=self._encode_prompt(make_caption(scene)),
            negative_prompt_embeds=self._negative,
            output_type="latent",
        )
        seconds = pipeline.stage_timer.seconds["denoising"] - seconds_before
        share = _compute_share(model.step_cache, variant.steps)
        frames = to_pixels(self._plain._pipeline.decode(latents))
        return frames, {"seconds": seconds, "computed": share}


def _compute_share(record: dict[str, Any] | None, steps: int) -> float:
    if record is None:
        return 1.0
    return sum(map(len, record["computed"].values())) / (2 * steps)


def compute_ssim(a: Clip, b: Clip) -> float:
    """Computes the mean structural similarity of two clips [F,H,W,3], over windows of 7 x 7."""
    x, y = (torch.from_numpy(clip).permute(0, 3, 1, 2).double() for clip in (a, b))

    def mean(z: Tensor) -> Tensor:
        return F.avg_pool2d(z, 7, 1)

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    numerator = (2 * mx * my + c1) * (2 * cov + c2)
    return float((numerator / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean())


def make_missing_videos(options: argparse.Namespace) -> None:
    """Makes the missing videos and appends a line for each to the results."""
    results: Path = options.results
    check_output(results, RESULTS, "--results")
    finished = {_make_key(line) for line in read_result_lines(results)}
    results.parent.mkdir(parents=True, exist_ok=True)
    makers = {kind: VideoMaker(kind) for kind in options.kinds}
    with results.open("a", encoding="utf-8") as out:
        for number, scene in list_held_out_scenes(options.prompts):
            for kind, count in product(options.kinds, options.steps):
                identity = {"kind": kind, "of": count, "prompt": number}
                wanted = [
                    variant
                    for variant in list_variants(count, options.chosen)
                    if _make_key(identity | {"steps": variant.steps, "variant": variant.name})
                    not in finished
                ]
                if not wanted:
                    continue
                reference, _ = makers[kind](scene, number, Variant(count))
                for variant in wanted:
                    frames, figures = makers[kind](scene, number, variant)
                    scores = {
                        k: sum(v) / len(v)
                        for k, v in judge_shapes(scene, detect_shapes(frames)).items()
                    }
                    like = {
                        "psnr": compute_psnr(frames, reference),
                        "ssim": compute_ssim(frames, reference),
                    }
                    line = identity | {"steps": variant.steps, "variant": variant.name}
                    out.write(json.dumps(line | figures | like | {"marks": scores}) + "\n")
                    out.flush()
            print(f"prompt {number}", flush=True)


def read_result_lines(results: Path) -> list[dict[str, Any]]:
    """Reads the complete lines of the results."""
    lines = []
    for text in results.read_text(encoding="utf-8").splitlines() if results.is_file() else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue  # the program was interrupted while writing it
        if not _is_line(line):
            raise InputError(f"{results}", None, "has a line of another program", "give another")
        lines.append(line)
    return lines


def _is_line(line: Any) -> bool:
    """Returns whether a JSON value has the fields of a result."""
    numbers = ("of", "steps", "prompt", "seconds", "computed", "psnr", "ssim")
    return (
        isinstance(line, dict)
        and {*numbers, "kind", "variant", "marks"} <= line.keys()
        and all(isinstance(line[name], int | float) for name in numbers)
        and line["seconds"] > 0
        and isinstance(line["marks"], dict)
    )


def _is_results(file: Path) -> bool:
    """Returns whether the first line of a file is a result."""
    with file.open(encoding="utf-8") as lines:
        return _is_line(json.loads(lines.readline(1 << 16)))


RESULTS = OutputKind("results of tools.demo.step_caches", _is_results)
_TABLE = (
    "| Task, steps | Variant | Prompts | Computed | Speed-up | Marks, % | Difference (95 %) |"
    " PSNR | SSIM |"
)
PAGE = OutputKind("a page with the table", lambda file: _TABLE in file.read_text(encoding="utf-8"))


def _make_key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("kind", "of", "steps", "variant", "prompt"))


def summarize_variants(
    lines: Sequence[dict[str, Any]], quiet: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Summarizes each variant of each kind and number of steps, over the prompts with a reference.

    Args:
        quiet: Lines whose seconds are used, from a quiet machine.
    """
    seconds = {_make_key(line): line["seconds"] for line in quiet}

    def compute_speedup(kind: str, count: int, name: str, steps: int) -> float:
        """Computes the median speed-up over prompts; NaN without timings."""
        pairs = [
            (seconds.get((kind, count, count, "no cache", prompt)), elapsed)
            for (*variant, prompt), elapsed in seconds.items()
            if variant == [kind, count, steps, name]
        ]
        speedups = [plain / elapsed for plain, elapsed in pairs if plain is not None]
        return float(np.median(speedups or [np.nan]))

    summary = []
    for kind, count in sorted({(line["kind"], line["of"]) for line in lines}):
        rows: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
        for line in lines:
            if (line["kind"], line["of"]) == (kind, count):
                rows.setdefault((line["variant"], line["steps"]), {})[line["prompt"]] = line
        plain = rows.get(("no cache", count), {})
        for (name, steps), by_prompt in rows.items():
            prompts = sorted(by_prompt.keys() & plain.keys())
            if not prompts:
                continue
            ours, theirs = [by_prompt[p] for p in prompts], [plain[p] for p in prompts]
            scores, base = (
                np.array([np.mean([*x["marks"].values()]) for x in s]) for s in (ours, theirs)
            )
            summary.append(
                {
                    "kind": kind,
                    "of": count,
                    "variant": name if steps == count else f"no cache, {steps} steps",
                    "prompts": len(prompts),
                    "computed": float(np.mean([x["computed"] for x in ours])) * steps / count,
                    "speedup": compute_speedup(kind, count, name, steps),
                    "marks": 100 * float(scores.mean()),
                    "difference": [100 * x for x in compute_confidence_interval(scores - base)],
                    "psnr": float(np.mean([x["psnr"] for x in ours])),
                    "ssim": float(np.mean([x["ssim"] for x in ours])),
                }
            )
    return summary


def compute_confidence_interval(differences: NDArray[Any]) -> tuple[float, float, float]:
    """Computes the mean of paired differences and its 95 % bootstrap interval over prompts."""
    random = np.random.default_rng(0)
    resampled = random.choice(differences, (2000, len(differences))).mean(axis=1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return float(differences.mean()), float(low), float(high)


def write_report(results: Path, speed: Path, out: Path) -> None:
    """Writes out.md, whose table is replaced, and out.png: SSIM and marks over speed-up."""
    page, picture = out.with_suffix(".md"), out.with_suffix(".png")
    check_output(page, PAGE, "--report")
    check_output(picture, PICTURE, "--report")
    lines, quiet = read_result_lines(results), read_result_lines(speed)
    if not lines:
        raise InputError("--results", results, "has no results", "make some first")
    rows = summarize_variants(lines, quiet)
    table = [_TABLE, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        mean, low, high = row["difference"]
        table.append(
            f"| {row['kind']}, {row['of']} | {_shorten_steps(row['variant'])} | {row['prompts']} | "
            f"{row['computed']:.0%} | {row['speedup']:.2f} | {row['marks']:.1f} | {mean:+.1f} "
            f"({low:+.1f} to {high:+.1f}) | {row['psnr']:.1f} | {row['ssim']:.3f} |"
        )
    text_above = page.read_text(encoding="utf-8").split(table[0])[0] if page.is_file() else ""
    with write_output(page, PAGE) as temporary:
        temporary.write_text(text_above + "\n".join(table) + "\n", encoding="utf-8")
    prompts_by_variant: dict[tuple[Any, ...], set[int]] = {}
    for line in lines:
        prompts_by_variant.setdefault(_make_key(line)[:-1], set()).add(line["prompt"])
    common = set.intersection(*prompts_by_variant.values())  # a plot compares the same prompts
    rows = summarize_variants([line for line in lines if line["prompt"] in common], quiet)
    plot_variants(rows, picture)


def _shorten_steps(variant: str) -> str:
    """Shortens an evenly spaced list of steps."""
    return re.sub(r"^steps:0,(\d+),.*", r"steps: every \1", variant)


def plot_variants(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plots SSIM and marks over speed-up: a line per policy, a column per kind and steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = sorted({(row["kind"], row["of"]) for row in rows})
    figure, axes = pyplot.subplots(2, len(groups), figsize=(4 * len(groups), 7), squeeze=False)
    for column, (kind, count) in enumerate(groups):
        families: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: row["speedup"]):
            if (row["kind"], row["of"]) == (kind, count):
                families.setdefault(_get_policy(row["variant"]), []).append(row)
        for axis, measure, label in zip(
            axes[:, column], ("ssim", "marks"), ("SSIM", "marks, %"), strict=True
        ):
            for family, points in sorted(families.items()):
                x, y = ([row[name] for row in points] for name in ("speedup", measure))
                style = "k--o" if family == "no cache" else "-o"
                axis.plot(x, y, style, label=family, markersize=4)
            axis.set(title=f"{kind}, {count} steps", xlabel="speed-up of denoising", ylabel=label)
            axis.grid(alpha=0.3)
    names = axes[0][0].get_legend_handles_labels()
    figure.legend(*names, loc="lower center", ncols=len(names[1]), fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    with write_output(path, PICTURE) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": "tools.demo"})


def _get_policy(variant: str) -> str:
    """Returns a variant's policy; fewer steps belong to "no cache"."""
    if variant.startswith("no cache"):
        return "no cache"
    return re.split("[ :]", variant)[0] + (", order 1" if variant.endswith("order 1") else "")


@log.silence_thread()
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, one per video")
    parser.add_argument("--prompts", type=make_argument_type(integer(1, 10_000)), default=24)
    parser.add_argument("--kinds", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--steps", type=make_argument_type(integer(1, 1000)), nargs="+", default=[20, 40]
    )
    parser.add_argument("--chosen", action="store_true", help="only one variant of each policy")
    parser.add_argument("--speed", type=Path, help="results of a quiet machine (--results)")
    parser.add_argument("--report", type=Path, help="write NAME.md and NAME.png of the results")
    options = parser.parse_args(argv)
    if options.report is None:
        make_missing_videos(options)
    else:
        write_report(options.results, options.speed or options.results, options.report)


if __name__ == "__main__":
    sys.exit(run_program(main))
