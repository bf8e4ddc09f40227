"""`python -m wan.power compare`: compares the modes on this machine and recommends one.

    torchrun --nproc_per_node=8 -m wan.power compare --out DIR -- ARGUMENTS OF generate.py

The comparison first checks whether the networks fit into memory, and keeps only one expert in
memory if both do not fit. After a warm-up of both experts, every variant generates the same video
in every round, in random order. Its time is divided by the baseline's time of the same round, so
that slow drifts of the machine cancel. Two controls separate the effect of idle gaps between head
chunks (called "rests" in reports) from that of the order of exchanges. A short traced run of each
variant records its order and the lengths of its gaps.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wan.app import launch
from wan.app.flag_parser import Parser, parse_flags
from wan.app.run import Run
from wan.metering import exchange_order
from wan.metering.meter import PowerMeasurement
from wan.pipeline import memory_estimate
from wan.power.variants import Variant, VariantResult, list_variants
from wan.settings.attention_modes import MODES
from wan.settings.errors import InputError
from wan.settings.layers import Layer
from wan.settings.parallel import SIZE_FLAGS
from wan.settings.values import Reader, choice, integer, real
from wan.utils import env, log, system
from wan.utils.files import (
    VIDEO_KIND,
    check_folder,
    check_output,
    make_json_kind,
    make_marked_kind,
    write_output,
)
from wan.utils.log import logger
from wan.utils.version import __version__

if TYPE_CHECKING:
    from wan.distributed.mesh import ParallelGroups
    from wan.settings.attention import Attention

_PLOT_METADATA = {"Software": "wan.power"}
_PLOT_KIND = make_marked_kind("a plot of wan.power", b"Software\0wan.power")
PRESETS = {  # arguments of generate.py; those after -- override them
    "mlperf": [  # Inference v6.0, text to video
        *("--task", "t2v-A14B", "--size", "1280*720", "--frame_num", "81"),
        *("--sample_steps", "20", "--sample_guide_scale", "3.0,4.0", "--base_seed", "42"),
    ],
    "published": [  # FA_Power_Cap's published figures: four NPUs, a four-step LoRA
        *("--task", "t2v-A14B", "--size", "1280*720", "--frame_num", "161", "--ulysses_size", "4"),
        *("--sample_steps", "4", "--sample_solver", "euler", "--sample_shift", "5"),
        *("--sample_guide_scale", "1", "--base_seed", "42"),
    ],
}
_FORBIDDEN_FLAGS = (
    *("comm_type", "chunks", "fa_alltoall_overlap", "power", "trace", "plan", "compile"),
    *("decode_latents", "from_json", "use_prompt_extend", "prompt_file", "skip_existing"),
)
"""Flags of generate.py that the comparison sets itself or does not support."""
MIN_ROUNDS = 5
_COMPARISON_KIND = make_json_kind("a comparison of wan.power", "machine", "recommended", "variants")
_REPORT_TITLE = "# Comparison of the modes of FA_Power_Cap"
_REPORT_KIND = make_marked_kind("a report of wan.power compare", _REPORT_TITLE.encode())
_OFFLOAD_LABELS = {False: "all networks in memory", True: "one network at a time"}
_NUM_RESAMPLES = 4000  # bootstrap resamples of the rounds


def main(argv: Sequence[str]) -> int:
    """Runs a comparison; returns an exit code of generate.py."""
    log.set_up_logging(env.rank() == 0)
    separator = [*argv, "--"].index("--")
    if env.rank() > 0 and any(argument.startswith("--plan") for argument in argv[:separator]):
        return 0  # rank 0 prints the plan
    options = _parse_compare_options(argv[:separator])
    options.command = f"compare {shlex.join(argv)}"
    flags = parse_flags([*PRESETS.get(options.preset, ()), *argv[separator + 1 :]])
    for name in _FORBIDDEN_FLAGS:
        if name in flags:
            raise InputError(f"`{name}`", None, "cannot be used in a comparison", "drop it")
    _check_num_ranks(options, flags)
    if options.plan is not None:
        return _print_comparison_plan(options, launch.resolve_plan(flags))
    if env.world_size() == 1:
        raise InputError(
            "One process",
            None,
            "has no exchanges to compare",
            "start torchrun --nproc_per_node=2 -m wan.power compare ..., a process for each device",
        )
    # Networks are loaded once if they fit.
    options.chooses_offload_mode = "offload_model" not in flags
    if options.chooses_offload_mode:
        flags = flags.with_values({"offload_model": True})
    check_folder(options.out.absolute(), "--out", options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    _check_comparison_outputs(options.out)
    save_file = {"save_file": options.out / "baseline.mp4"}
    return launch.execute_run(
        lambda: flags.with_values(save_file),
        partial(_run_comparison, options),
        program="wan.power",
    )


def _check_num_ranks(options: Namespace, flags: Layer) -> None:
    """Refuses another number of ranks than the preset's, unless the user has set the sizes."""
    sizes = flags.select(SIZE_FLAGS).values
    preset_sizes = parse_flags(PRESETS.get(options.preset, ())).values
    num_ranks, world_size = preset_sizes.get("ulysses_size"), env.world_size()
    if num_ranks is None or sizes != {"ulysses_size": num_ranks} or world_size == num_ranks:
        return
    if options.plan is None or world_size > 1:
        raise InputError(
            f"--preset {options.preset}",
            None,
            f"is a workload of {num_ranks} ranks, but {world_size} were started",
            f"start torchrun --nproc_per_node={num_ranks} -m wan.power compare ..., or add "
            f"`ulysses_size={world_size}`",
        )


def _check_comparison_outputs(out: Path) -> None:
    """Refuses to overwrite files of other programs in the output folder."""
    files = {"comparison.json": _COMPARISON_KIND, "report.md": _REPORT_KIND, "gain.png": _PLOT_KIND}
    for name, file_kind in files.items():
        check_output(out / name, file_kind, "--out")
    for path in out.glob("*.mp4"):
        check_output(path, VIDEO_KIND, "--out")
    for path in out.glob("traces/*/rank*.json"):
        check_output(path, exchange_order.TRACE_KIND, "--out")


def _parse_compare_options(argv: Sequence[str]) -> Namespace:
    """Parses the options of the comparison, which precede "--"."""
    parser = Parser(
        prog="wan.power compare",
        description=(__doc__ or "").splitlines()[0],
        usage="torchrun --nproc_per_node=N -m wan.power compare --out DIR [...] -- ARGUMENTS",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--repeats", default="5", metavar="N", help="number of rounds, at least 5 (default: 5)"
    )
    modes_help = "values of --comm_type (default: %(default)s)"
    parser.add_argument(
        "--modes", default=",".join(map(str, MODES)), metavar="LIST", help=modes_help
    )
    parser.add_argument(
        "--chunks", metavar="LIST", help="also run InsertComm with these numbers of head chunks"
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="preset arguments of a published workload"
    )
    quick_help = "run only 4 steps of each expert and time the last 3"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    plan_help = "only print whether it fits devices with this much memory (1 GB = 1e9 bytes)"
    parser.add_argument("--plan", metavar="GB", help=plan_help)
    parser.add_argument(
        "--order", default="0", metavar="SEED", help="seed of the random order (default: 0)"
    )
    options = parser.parse_args(argv)

    def read_list(reader: Reader, name: str, text: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(reader(name, part) for part in text.split(",")))

    chunks = read_list(integer(1, 4096), "--chunks", options.chunks) if options.chunks else ()
    options.variants = list_variants(read_list(choice(*MODES), "--modes", options.modes), chunks)
    options.repeats = integer(MIN_ROUNDS, 10_000)("--repeats", options.repeats)
    options.order = integer(0, 2**32)("--order", options.order)
    if options.plan is not None:
        options.plan = int(real(0.001, 1e6)("--plan", options.plan) * 1e9)
    return options


def drop_unsupported_control(
    variants: list[Variant], attention: Attention, has_reference_kv: bool
) -> list[Variant]:
    """Removes the control with idle gaps where a task or its attention does not support it."""
    if not (attention.quant_alltoall or attention.use_rainfusion or has_reference_kv):
        return variants
    logger.info(
        "No run with rests only: not with --quant_alltoall, --use_rainfusion or a reference video."
    )
    return [variant for variant in variants if not variant.adds_idle_gaps]


def _run_comparison(options: Namespace, run: Run, groups: ParallelGroups | None) -> int:
    assert groups is not None
    if run.setup.parallel.ulysses_size == 1:
        raise InputError("`ulysses_size`", 1, "has no exchanges to compare", "give a larger one")
    from wan.power.rounds import ComparisonRounds

    variants = drop_unsupported_control(
        options.variants, run.setup.attention, run.setup.preset.has_reference_kv
    )
    if options.quick and run.setup.policy is not None:
        why = "takes single steps, and a step cache needs all of them"
        raise InputError("--quick", None, why, "drop it or --step_cache")
    run = _select_offload_mode(options, run, groups)
    rounds = ComparisonRounds(run, groups, variants, options.out, options.quick)
    seconds = rounds.warm_up()
    num_runs = options.repeats * len(rounds.results)
    run_time = log.format_duration(seconds) if seconds >= 10 else f"{seconds:.2f} s"
    total_time = log.format_duration(num_runs * seconds)
    logger.info("%d runs of about %s: %s, and loading.", num_runs, run_time, total_time)
    rng = random.Random(options.order)
    for round_number in range(1, options.repeats + 1):
        rounds.measure_round(rng.sample(rounds.results, len(rounds.results)))
        round_times = ", ".join(
            f"{result.variant.name} {result.seconds[-1]:.2f} s" for result in rounds.results
        )
        logger.info("Round %d of %d (measured): %s.", round_number, options.repeats, round_times)
        if groups.is_main:  # keeps finished rounds if the process is killed
            write_comparison(options, run, groups.device.name(), rounds.results)
    rounds.compare_videos()
    if groups.is_main:
        best_variant, reason = write_comparison(options, run, groups.device.name(), rounds.results)
        logger.info("%s (%s)", reason, best_variant.flags)
        logger.info("Report: %s", options.out / "report.md")
    return 0


def _select_offload_mode(options: Namespace, run: Run, groups: ParallelGroups) -> Run:
    """Returns the run with the first offload mode that fits into memory; the same on all ranks."""
    device_type, ranks_per_node = groups.device.type, env.local_world_size()
    free = system.read_available_memory() if device_type == "cpu" else groups.device.free_memory()
    free_per_rank = [num_bytes for num_bytes in groups.gather(free) if num_bytes is not None]
    offload_modes = [run.setup.execution.offload_model]
    if options.chooses_offload_mode:  # a step cache needs a video's steps in sequence
        offload_modes = [False, True] if run.setup.policy is None else [False]
    stage, needed = "", 0
    for offload in offload_modes:
        memory_options: dict[str, Any] = {"device": device_type, "offload_model": offload}
        stage, needed = memory_estimate.find_fullest_stage(
            run.setup, run.params, ranks_per_node, **memory_options
        )
        if not free_per_rank or needed <= min(free_per_rank):
            free_text = "" if not free_per_rank else f" of {min(free_per_rank) / 1e9:.1f} GB free"
            mode_text = f"--offload_model {offload}"
            if isinstance(offload, bool):
                mode_text = _OFFLOAD_LABELS[offload]
            logger.info("Plan: %.1f GB (%s)%s, %s.", needed / 1e9, stage, free_text, mode_text)
            execution = replace(run.setup.execution, offload_model=offload)
            return replace(run, setup=replace(run.setup, execution=execution))
    why = f"needs at least {needed / 1e9:.1f} GB ({stage})"
    why += f", and {min(free_per_rank) / 1e9:.1f} GB are free"
    raise InputError("The comparison", None, why, "use more ranks, --dit_fsdp or fewer frames")


def _print_comparison_plan(options: Namespace, run: Run) -> int:
    """Prints the memory that a comparison needs, and whether it fits."""
    params, fits_any = run.params, False
    width, height = params.video_size
    size = f"{width}*{height}, {params.frame_num} frames, {params.sample_steps} steps"
    print(f"Comparison: {params.preset.task}, {size}, {run.setup.parallel.world_size} ranks")
    for offload, mode in _OFFLOAD_LABELS.items():
        stage, needed = memory_estimate.find_fullest_stage(run.setup, params, offload_model=offload)
        fits_any = fits_any or needed <= options.plan
        verdict = "fits" if needed <= options.plan else "does not fit"
        print(f"  {mode}: {needed / 1e9:.1f} GB ({stage}); {verdict} {options.plan / 1e9:g} GB")
    num_runs = options.repeats * len(options.variants)
    steps = "4 steps of each expert" if options.quick else "a whole video"
    print(f"  at most {num_runs} runs, each {steps}; the warm-up estimates their time")
    if not fits_any:
        raise InputError("The comparison", None, "does not fit", "use more ranks or --dit_fsdp")
    return 0


@dataclass(frozen=True)
class TimeRatio:
    """A variant's time divided by the baseline's: median over rounds with a 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def change_text(self) -> str:
        """The change of time in per cent, negative if faster: "-12.3 % (-14.0 to -10.1)"."""
        percent = [100 * (x - 1) for x in (self.median, self.low, self.high)]
        return "{:+.1f} % ({:+.1f} to {:+.1f})".format(*percent)


def compute_time_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> TimeRatio:
    """Computes the time ratio per round; the interval is bootstrapped over the rounds."""
    ratios = np.array(seconds) / np.array(baseline)
    resamples = np.random.default_rng(0).integers(len(ratios), size=(_NUM_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[resamples], axis=1), [2.5, 97.5])
    return TimeRatio(float(np.median(ratios)), float(low), float(high))


def recommend_variant(results: Sequence[VariantResult]) -> tuple[Variant, str]:
    """Returns the fastest mode whose interval is entirely below 1, else the baseline; and why.

    Of modes whose intervals overlap, the simpler one is recommended.

    Args:
        results: Measurements of all variants, the baseline first.
    """
    baseline, *other_results = results
    if len(baseline.seconds) < MIN_ROUNDS:
        return baseline.variant, f"Fewer than {MIN_ROUNDS} rounds have ended, too few to decide."
    ratios = {
        candidate.variant: compute_time_ratio(candidate.seconds, baseline.seconds)
        for candidate in other_results
    }
    mode_ratios = {
        variant: time_ratio for variant, time_ratio in ratios.items() if not variant.is_control
    }
    if not mode_ratios:
        return baseline.variant, "No other mode was compared."
    faster = {
        variant: time_ratio for variant, time_ratio in mode_ratios.items() if time_ratio.high < 1
    }
    if not faster:
        return baseline.variant, f"No gain on this machine: {_explain_no_gain(baseline.power)}"
    fastest = min(faster.values(), key=lambda time_ratio: time_ratio.median)
    ties = [variant for variant, time_ratio in faster.items() if time_ratio.low <= fastest.high]
    best_variant = min(ties, key=lambda variant: (variant.chunks is not None, variant.comm_type))
    best_ratio = ratios[best_variant]
    control_ratio = next(
        (ratios[candidate] for candidate in ratios if candidate.adds_idle_gaps), None
    )
    reason = f"{best_variant.name}: {best_ratio.change_text} in time against the baseline. "
    if control_ratio is None:
        return best_variant, f"{reason}No control was run."
    reason += f"Rests without exchanges between them: {control_ratio.change_text}, "
    if control_ratio.high < 1:
        reason += "so it is the rests that help."
    elif control_ratio.low > best_ratio.high:
        reason += "so it is not the rests that help but the order of exchanges and attention."
    else:
        reason += "which does not show what helped."
    return best_variant, reason


def _explain_no_gain(measurements: Sequence[PowerMeasurement]) -> str:
    """Explains from the baseline's clock why no mode is faster."""
    no_gain = "no mode is faster than the baseline with 95 % confidence"
    shares = [result.throttled for result in measurements if result.throttled is not None]
    if not shares:
        return f"{no_gain}; throttling could not be read here."
    share = statistics.mean(shares)
    if share < 0.01:
        return f"{no_gain}, and the clock was never throttled, so rests can save nothing."
    names = sorted({name for result in measurements for name in result.reasons})
    why = "rests are too short, or attention draws too much power"
    if not any("power" in name for name in names):
        why = "but not for power, so rests cannot help"
    return (
        f"{no_gain}; the clock was throttled {share:.0%} of the time ({', '.join(names)}), {why}."
    )


def write_comparison(
    options: Namespace, run: Run, device: str, results: Sequence[VariantResult]
) -> tuple[Variant, str]:
    """Writes report.md and comparison.json; returns the recommendation and its reason.

    Args:
        device: Name of the device.
        results: Measurements so far, the baseline first.
    """
    best, reason = recommend_variant(results)
    baseline, (cfg, ring, ulysses) = results[0], run.setup.parallel.mesh_shape
    machine = {
        "device": device,
        "host": system.read_cpu_name(),
        "ranks": run.setup.parallel.world_size,
        "layout": f"ulysses {ulysses} x ring {ring} x cfg {cfg}",
        "wan": __version__,
    }
    variant_records, table_rows, order_lines = {}, "", ""
    for result in results:
        ratio = None if result is baseline else compute_time_ratio(result.seconds, baseline.seconds)
        variant_records[result.variant.name] = _make_variant_record(result, ratio)
        table_rows += f"| {' | '.join(format_variant_row(result, ratio))} |\n"
        order_lines += f"- {result.variant.name}: {result.order_summary}\n"
    recommendation = {"comm_type": best.comm_type, "chunks": best.chunks, "reason": reason}
    record = {"command": options.command, "machine": machine, "settings": run.settings}
    record |= {"recommended": recommendation, "variants": variant_records}
    with write_output(options.out / "comparison.json", _COMPARISON_KIND) as path:
        path.write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
    params = run.params
    width, height = params.video_size
    has_image = draw_time_changes(results, options.out)
    image_line = "![Time against the baseline](gain.png)\n" if has_image else ""
    timing_note, videos = "of denoising", "the videos that were decoded, and "
    if options.quick:
        timing_note, videos = "of all steps, from some steps of each expert", ""
    with write_output(options.out / "report.md", _REPORT_KIND) as path:
        path.write_text(
            f"""{_REPORT_TITLE} (measured)

`python -m wan.power {options.command}`

{params.preset.task}, {width}x{height}, {params.frame_num} frames, {params.sample_steps} steps; \
{device} ({machine["host"]}), {machine["ranks"]} ranks ({machine["layout"]}); \
{len(baseline.seconds)} rounds in random order; seconds {timing_note}; wan {__version__}.

**{reason}**

Recommended: `{best.flags}`

{image_line}
| Variant | Seconds: median (range) | Against the baseline: median (95 %) | Power: mean W, J \
| Clock: mean MHz, throttled | Peak memory, GiB | Video: largest difference, PSNR |
|---|---|---|---|---|---|---|
{table_rows}
Order of exchanges and attention in two traced steps, which are not timed (`python -m wan.power \
report {options.out}/traces/NAME` draws them):

{order_lines}
The folder also has {videos}comparison.json with every round's times and readings. \
docs/measuring_power.md explains how to read it.
""",
            encoding="utf-8",
        )
    return best, reason


def draw_time_changes(results: Sequence[VariantResult], folder: Path) -> bool:
    """Draws each variant's time ratio with its interval into gain.png.

    Returns:
        False if there is nothing to draw or matplotlib is not installed.
    """
    baseline, *other_results = results
    if not other_results or not baseline.seconds:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 1.4 + 0.4 * len(other_results)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(reversed(other_results)):
        ratio = compute_time_ratio(result.seconds, baseline.seconds)
        low, middle, high = (100 * (x - 1) for x in (ratio.low, ratio.median, ratio.high))
        color = "#999999" if result.variant.is_control else "#0072B2"
        axes.plot([low, high], [row, row], color=color, linewidth=2)
        axes.plot(middle, row, "o", color=color)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(
        range(len(other_results)), [result.variant.name for result in reversed(other_results)]
    )
    axes.set_ylim(-0.6, len(other_results) - 0.4)
    axes.set_xlabel("time against the baseline, per cent:\nmedian and 95 % interval; left: faster")
    with write_output(folder / "gain.png", _PLOT_KIND) as path:
        figure.savefig(path, format="png", dpi=120, metadata=_PLOT_METADATA)
    return True


def _make_variant_record(result: VariantResult, time_ratio: TimeRatio | None) -> dict[str, Any]:
    return {
        "seconds": result.seconds,
        "steps": result.steps,
        "ratio": None if time_ratio is None else asdict(time_ratio),
        "power": [power.to_record() for power in result.power],
        "series": [
            [part.series for part in (power.parts or (power,)) if part.series]
            for power in result.power
        ],
        "peak_memory_bytes": result.peak_memory,
        "schedule": result.order_summary,
        "latents_apart": result.latents_difference
        if math.isfinite(result.latents_difference or 0.0)
        else None,
        "largest_difference": result.max_pixel_difference,
        "psnr": result.psnr if math.isfinite(result.psnr) else None,
    }


def format_variant_row(result: VariantResult, time_ratio: TimeRatio | None) -> list[str]:
    """Formats the table row of a variant for the report."""

    def format_medians(**formats: str) -> str:
        cells = []
        for name, spec in formats.items():
            values = [x for power in result.power if (x := getattr(power, name)) is not None]
            cells.append(format(statistics.median(values), spec) if values else "not available")
        return ", ".join(cells) if {*cells} != {"not available"} else "not available"

    median, lowest, highest = (
        aggregate(result.seconds) for aggregate in (statistics.median, min, max)
    )
    video_text = (
        "not compared yet"
        if result.latents_difference is None
        else f"not decoded; latents off by {result.latents_difference:.1e}"
    )
    if result.max_pixel_difference is not None:
        video_text = f"{result.max_pixel_difference}, " + (
            "the same" if not result.max_pixel_difference else f"{result.psnr:.1f} dB"
        )
    return [
        result.variant.name,
        f"{median:.2f} ({lowest:.2f} to {highest:.2f})",
        "" if time_ratio is None else time_ratio.change_text,
        format_medians(mean_w=".0f", joules=".0f"),
        format_medians(mean_mhz=".0f", throttled=".0%"),
        "not available" if result.peak_memory is None else f"{result.peak_memory / 2**30:.2f}",
        "" if time_ratio is None else video_text,
    ]
