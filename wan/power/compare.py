"""`python -m wan.power compare`: compares the modes on this machine and recommends one.

    torchrun --nproc_per_node=8 -m wan.power compare --out DIR -- ARGUMENTS OF generate.py

The comparison first checks whether the networks fit into memory, and keeps only one expert in
memory if both do not. After a warm-up of both experts, every variant generates the same video in
every round, in random order. Its time is divided by the baseline's time of the same round, so that
slow drifts of the machine cancel. Two controls separate the effect of idle gaps ("rests") between
head chunks from that of the order of exchanges. A short traced run of each variant records its
order and the lengths of its gaps.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wan import __version__, env, host, log
from wan.cli import main as command
from wan.cli.flags import Parser, parse
from wan.evidence import order
from wan.evidence.meter import Measured
from wan.log import logger
from wan.output_files import VIDEO, check_folder, check_output, json_kind, marked_kind, write_output
from wan.power.timeline import PLOT, PLOT_METADATA
from wan.run import Run
from wan.settings.attention_modes import MODES
from wan.settings.errors import InputError
from wan.settings.values import Reader, choice, integer, real
from wan.trace import Event

if TYPE_CHECKING:
    from wan.distributed.mesh import ParallelGroups

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
_DECIDED = (
    *("comm_type", "chunks", "fa_alltoall_overlap", "power", "trace", "plan", "compile"),
    *("decode_latents", "from_json", "use_prompt_extend", "prompt_file", "skip_existing"),
)
"""Flags of generate.py that the comparison sets or does not support."""
FEWEST = 5  # rounds
_COMPARISON = json_kind("a comparison of wan.power", "machine", "recommended", "variants")
_TITLE = "# Comparison of the modes of FA_Power_Cap"
_REPORT = marked_kind("a report of wan.power compare", _TITLE.encode())
_NETWORKS = {False: "all networks in memory", True: "one network at a time"}
_RESAMPLES = 4000  # bootstrap resamples of the rounds


@dataclass(frozen=True)
class Variant:
    """One compared configuration of the attention layer.

    Attributes:
        name: Name in tables and files.
        comm_type: A key of `attention_modes.MODES`.
        chunks: Maximum head chunks of a call; None for the mode's number.
        adds_idle_gaps: The control with the baseline's exchanges and idle gaps between head chunks.
        locks_clock: The control with the baseline at a locked clock.
    """

    name: str
    comm_type: int
    chunks: int | None = None
    rests: bool = False
    locked: bool = False

    @property
    def is_control(self) -> bool:
        return self.rests or self.locked

    @property
    def slug(self) -> str:
        """The name as a file or folder name."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")

    @property
    def flags(self) -> str:
        """The flags of generate.py that select this variant."""
        more = "" if self.chunks is None else f" --chunks {self.chunks}"
        return f"--comm_type {self.comm_type}{more}"


def variants(modes: Sequence[int], chunks: Sequence[int]) -> list[Variant]:
    """Lists the baseline, the modes, InsertComm with other numbers of chunks, and the controls."""
    found = [Variant(MODES[mode].name, mode) for mode in sorted({0, *modes})]
    found += [Variant(f"InsertComm, {n} chunks", 1, n) for n in chunks]
    if 1 in modes:  # the control has its gap lengths
        found.append(Variant("control: rests without exchanges", 0, rests=True))
    return [*found, Variant("control: baseline, locked clock", 0, locked=True)]


@dataclass
class Result:
    """Measurements of a variant; lists have one element per round.

    Attributes:
        seconds: Denoising time.
        steps: Seconds of each step.
        power: Combined measurement of all ranks' devices.
        peak_memory: Bytes of the fullest device; None if not reported.
        order_summary: Summary of its traces in one sentence.
        latents_difference: Largest absolute difference of the latents from the baseline's, relative
            to the baseline's largest value; None before the comparison.
        max_pixel_difference: Largest difference of the video from the baseline's, in levels of 0
            to 255; None if the video was not decoded.
        psnr: PSNR of the video against the baseline's, dB.
    """

    variant: Variant
    seconds: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    power: list[Measured] = field(default_factory=list)
    peak_memory: int | None = None
    schedule: str = "the baseline's"
    apart: float | None = None
    largest: int | None = None
    psnr: float = float("inf")


def main(argv: Sequence[str]) -> int:
    """Runs a comparison; returns an exit code of generate.py."""
    log.setup(env.rank() == 0)
    cut = [*argv, "--"].index("--")
    options, arguments = _options(argv[:cut]), list(argv[cut + 1 :])
    options.command = f"compare {' '.join(argv)}"
    arguments = [*PRESETS.get(options.preset, ()), *arguments]
    given = parse(arguments)
    for name in _DECIDED:
        if name in given:
            raise InputError(f"`{name}`", None, "is set by compare itself", "drop it")
    if options.plan is not None:
        return _show_plan(options, command.resolved(arguments, plan=True))
    if env.world_size() == 1:
        raise InputError(
            "One process",
            None,
            "has no exchanges to compare",
            "start torchrun --nproc_per_node=2 -m wan.power compare ..., a process for each device",
        )
    options.keeps = "offload_model" not in given  # load networks once if they fit
    if options.keeps:
        arguments += ["--offload_model", "true"]
    check_folder(options.out.absolute(), "--out", options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    _check_outputs(options.out)
    arguments += ["--save_file", str(options.out / "baseline.mp4")]
    return command.carry_out(arguments, partial(_compare, options))


def _check_outputs(out: Path) -> None:
    """Refuses to overwrite files of other programs in the output folder."""
    kinds = {"comparison.json": _COMPARISON, "report.md": _REPORT, "gain.png": PLOT}
    for name, kind in kinds.items():
        check_output(out / name, kind, "--out")
    for path in out.glob("*.mp4"):
        check_output(path, VIDEO, "--out")
    for path in out.glob("traces/*/rank*.json"):
        check_output(path, order.TRACE, "--out")


def _options(argv: Sequence[str]) -> Namespace:
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
    parser.add_argument(
        "--modes", default="0,1,2", metavar="LIST", help="values of --comm_type (default: 0,1,2)"
    )
    parser.add_argument(
        "--chunks", metavar="LIST", help="also run InsertComm with these numbers of head chunks"
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="preset arguments of a published workload"
    )
    quick = "run only 4 steps of each expert and time the last 3"
    parser.add_argument("--quick", action="store_true", help=quick)
    plan = "print what fits devices with so much memory (1 GB = 1e9 bytes); no run"
    parser.add_argument("--plan", metavar="GB", help=plan)
    parser.add_argument(
        "--order", default="0", metavar="SEED", help="seed of the random order (default: 0)"
    )
    options = parser.parse_args(argv)

    def each(read: Reader, name: str, listed: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(read(name, part) for part in listed.split(",")))

    chunks = each(integer(1, 4096), "--chunks", options.chunks) if options.chunks else ()
    options.variants = variants(each(choice(*MODES), "--modes", options.modes), chunks)
    options.repeats = integer(FEWEST, 10_000)("--repeats", options.repeats)
    options.order = integer(0, 2**32)("--order", options.order)
    if options.plan is not None:
        options.plan = int(real(0.001, 1e6)("--plan", options.plan) * 1e9)
    return options


def _compare(options: Namespace, run: Run, team: ParallelGroups | None) -> int:
    assert team is not None
    if run.setup.parallel.ulysses_size == 1:
        raise InputError("`ulysses_size`", 1, "has no exchanges to compare", "give a larger one")
    from wan.power.rounds import Rounds

    attention, compared = run.setup.attention, options.variants
    if attention.quant_alltoall or attention.use_rainfusion:  # not supported by the control
        logger.info("No run with rests only: not with --quant_alltoall or --use_rainfusion.")
        compared = [variant for variant in compared if not variant.rests]
    if options.quick and run.setup.policy is not None:
        why = "takes single steps, and a step cache needs all of them"
        raise InputError("--quick", None, why, "drop it or --step_cache")
    run = _fitted(options, run, team)
    rounds = Rounds(run, team, compared, options.out, options.quick)
    seconds = rounds.prepare()
    count = options.repeats * len(rounds.results)
    one = log.duration(seconds) if seconds >= 10 else f"{seconds:.2f} s"
    whole = log.duration(count * seconds)
    logger.info("%d runs of about %s: %s, and loading.", count, one, whole)
    shuffled = random.Random(options.order)
    for number in range(1, options.repeats + 1):
        rounds.measure(shuffled.sample(rounds.results, len(rounds.results)))
        took = ", ".join(f"{one.variant.name} {one.seconds[-1]:.2f} s" for one in rounds.results)
        logger.info("Round %d of %d (measured): %s.", number, options.repeats, took)
        if team.is_main:  # keeps finished rounds if the process is killed
            write(options, run, team.device.name(), rounds.results)
    rounds.close()
    if team.is_main:
        chosen, reason = write(options, run, team.device.name(), rounds.results)
        logger.info("%s (%s)", reason, chosen.flags)
        logger.info("Report: %s", options.out / "report.md")
    return 0


def _fitted(options: Namespace, run: Run, team: ParallelGroups) -> Run:
    """Keeps all networks in memory if they fit, else one at a time; the same on all ranks."""
    from wan.pipeline import memory

    kind, here = team.device.type, env.local_world_size()
    free = host.available_memory() if kind == "cpu" else team.device.free_memory()
    known = [one for one in team.gather(free) if one is not None]
    ways = [run.setup.execution.offload_model]
    if options.keeps:  # a step cache needs a video's steps in sequence
        ways = [False, True] if run.setup.policy is None else [False]
    stage, need = "", 0
    for offload in ways:
        given: dict[str, Any] = {"device": kind, "offload_model": offload}
        stage, need = memory.find_fullest_stage(run.setup, run.request, here, **given)
        if not known or need <= min(known):
            where = "" if not known else f" of {min(known) / 1e9:.1f} GB free"
            how = f"--offload_model {offload}"
            if isinstance(offload, bool):
                how = _NETWORKS[offload]
            logger.info("Plan: %.1f GB (%s)%s, %s.", need / 1e9, stage, where, how)
            execution = replace(run.setup.execution, offload_model=offload)
            return replace(run, setup=replace(run.setup, execution=execution))
    why = f"needs at least {need / 1e9:.1f} GB ({stage}), and {min(known) / 1e9:.1f} GB are free"
    raise InputError("The comparison", None, why, "use more ranks, --dit_fsdp or fewer frames")


def _show_plan(options: Namespace, run: Run) -> int:
    """Prints the memory that a comparison needs, and whether it fits."""
    from wan.pipeline import memory

    request, fits = run.request, False
    width, height = request.video_size
    size = f"{width}*{height}, {request.frame_num} frames, {request.sample_steps} steps"
    print(f"Comparison: {request.preset.task}, {size}, {run.setup.parallel.world_size} ranks")
    for offload, how in _NETWORKS.items():
        stage, need = memory.find_fullest_stage(run.setup, request, offload_model=offload)
        fits = fits or need <= options.plan
        verdict = "fits" if need <= options.plan else "does not fit"
        print(f"  {how}: {need / 1e9:.1f} GB ({stage}); {verdict} {options.plan / 1e9:g} GB")
    count = options.repeats * len(options.variants)
    steps = "4 steps of each expert" if options.quick else "a whole video"
    print(f"  at most {count} runs, each {steps}; the warm-up estimates their time")
    if not fits:
        raise InputError("The comparison", None, "does not fit", "use more ranks or --dit_fsdp")
    return 0


@dataclass(frozen=True)
class Ratio:
    """A variant's time divided by the baseline's: median over rounds with a 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def gain(self) -> str:
        """The difference in per cent: "-12.3 % (-14.0 to -10.1)"."""
        percent = [100 * (x - 1) for x in (self.median, self.low, self.high)]
        return "{:+.1f} % ({:+.1f} to {:+.1f})".format(*percent)


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Computes the time ratio per round; the interval is bootstrapped over the rounds."""
    each = np.array(seconds) / np.array(baseline)
    draws = np.random.default_rng(0).integers(len(each), size=(_RESAMPLES, len(each)))
    low, high = np.percentile(np.median(each[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(each)), float(low), float(high))


def recommend(results: Sequence[Result]) -> tuple[Variant, str]:
    """Returns the fastest mode whose interval is entirely below 1, else the baseline; and why.

    Of modes whose intervals overlap, the simpler one is recommended.

    Args:
        results: Measurements of all variants, the baseline first.
    """
    baseline, *others = results
    if len(baseline.seconds) < FEWEST:
        return baseline.variant, f"Fewer than {FEWEST} rounds have ended, too few to decide."
    ratios = {one.variant: ratio(one.seconds, baseline.seconds) for one in others}
    modes = {variant: found for variant, found in ratios.items() if not variant.is_control}
    if not modes:
        return baseline.variant, "No other mode was compared."
    faster = {variant: found for variant, found in modes.items() if found.high < 1}
    if not faster:
        return baseline.variant, f"No gain on this machine: {_no_gain(baseline.power)}"
    best = min(faster.values(), key=lambda found: found.median)
    alike = [variant for variant, found in faster.items() if found.low <= best.high]
    chosen = min(alike, key=lambda variant: (variant.chunks is not None, variant.comm_type))
    gain, alone = ratios[chosen], next((ratios[one] for one in ratios if one.rests), None)
    reason = f"{chosen.name}: {gain.gain} of the baseline's time. "
    if alone is None:
        return chosen, f"{reason}No control was run."
    reason += f"Rests without exchanges between them: {alone.gain}, "
    if alone.high < 1:
        reason += "so it is the rests that help."
    elif alone.low > gain.high:
        reason += "so it is not the rests that help but the order of exchanges and attention."
    else:
        reason += "which does not show what helped."
    return chosen, reason


def _no_gain(baseline: Sequence[Measured]) -> str:
    """Explains from the baseline's clock why no mode is faster."""
    slower = "no mode is certainly faster than the baseline"
    shares = [one.throttled for one in baseline if one.throttled is not None]
    if not shares:
        return f"{slower}; throttling could not be read here."
    share = statistics.mean(shares)
    if share < 0.01:
        return f"{slower}, and the clock was never throttled, so that rests can save nothing."
    names = sorted({name for one in baseline for name in one.reasons})
    why = "rests are too short, or attention draws too much power"
    if not any("power" in name for name in names):
        why = "but not for power, so that rests cannot help"
    return f"{slower}; the clock was throttled {share:.0%} of the time ({', '.join(names)}), {why}."


def rests(events: Sequence[Event]) -> list[float]:
    """Returns the gaps between attention of consecutive head chunks in a layer, in seconds."""
    found, last = [], None
    for event in events:
        if event.kind != "attention":
            continue
        layer = tuple(event.facts.get(name) for name in ("step", "branch", "layer"))
        chunk = event.facts.get("chunk")
        if last is not None and last[0] == layer and last[1] != chunk:
            found.append((event.begin - last[2]) / 1e9)
        last = layer, chunk, event.end
    return found


def schedule(folder: Path, variant: Variant) -> str:
    """Summarizes the traces of a variant in one sentence."""
    try:
        ranks = order.read(folder)
    except InputError as error:  # other machines keep their ranks' traces
        return f"not available ({error})"
    events = [event for rank in ranks for event in rank.events]
    length, busy = (sum(e.length for e in events if e.kind == x) for x in ("step", "attention"))
    duty = f"attention {busy / length:.0%} of a step"
    if variant.rests:
        return f"a control with InsertComm's rests, without a planned order; {duty}"
    gaps = [1e3 * gap for rank in ranks for gap in rests(rank.events)]
    between = f"rests in a layer {statistics.median(gaps):.3f} ms (median)" if gaps else "no rests"
    differences = (order.compare(rank.plan, rank.events).difference for rank in ranks)
    return f"{next((one for one in differences if one), 'as planned')}; {duty}; {between}"


def write(
    options: Namespace, run: Run, device: str, results: Sequence[Result]
) -> tuple[Variant, str]:
    """Writes report.md and comparison.json; returns the recommendation and its reason.

    Args:
        device: Name of the device.
        results: Measurements so far, the baseline first.
    """
    chosen, reason = recommend(results)
    baseline, (cfg, ring, ulysses) = results[0], run.setup.parallel.mesh_shape
    machine = {
        "device": device,
        "host": host.cpu(),
        "ranks": run.setup.parallel.world_size,
        "layout": f"ulysses {ulysses} x ring {ring} x cfg {cfg}",
        "wan": __version__,
    }
    found, rows, orders = {}, "", ""
    for one in results:
        against = None if one is baseline else ratio(one.seconds, baseline.seconds)
        found[one.variant.name] = _record(one, against)
        rows += f"| {' | '.join(_cells(one, against))} |\n"
        orders += f"- {one.variant.name}: {one.schedule}\n"
    advice = {"comm_type": chosen.comm_type, "chunks": chosen.chunks, "reason": reason}
    record = {"command": options.command, "machine": machine, "settings": run.settings}
    record |= {"recommended": advice, "variants": found}
    with write_output(options.out / "comparison.json", _COMPARISON) as path:
        path.write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
    request = run.request
    width, height = request.video_size
    picture = "![Gain of each variant](gain.png)\n" if draw_gains(results, options.out) else ""
    timed = "of denoising"
    if options.quick:
        timed = "of all steps, from some steps of each expert"
    with write_output(options.out / "report.md", _REPORT) as path:
        path.write_text(
            f"""{_TITLE} (measured)

`python -m wan.power {options.command}`

{request.preset.task}, {width}x{height}, {request.frame_num} frames, {request.sample_steps} steps; \
{device} ({machine["host"]}), {machine["ranks"]} ranks ({machine["layout"]}); \
{len(baseline.seconds)} rounds in random order; seconds {timed}; wan {__version__}.

**{reason}**

Recommended: `{chosen.flags}`

{picture}
| Variant | Seconds: median (range) | Against the baseline: median (95 %) | Power: mean W, J \
| Clock: mean MHz, throttled | Peak memory, GiB | Video: largest difference, PSNR |
|---|---|---|---|---|---|---|
{rows}
Order of exchanges and attention in two traced steps, which are not timed (`python -m wan.power \
report {options.out}/traces/NAME` draws them):

{orders}
The folder also has the videos that were decoded, and comparison.json with every round's times \
and readings. docs/measuring_power.md explains how to read it.
""",
            encoding="utf-8",
        )
    return chosen, reason


def draw_gains(results: Sequence[Result], folder: Path) -> bool:
    """Draws each variant's time ratio with its interval into gain.png.

    Returns:
        False if there is nothing to draw or matplotlib is not installed.
    """
    baseline, *others = results
    if not others or not baseline.seconds:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 1.4 + 0.4 * len(others)), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(reversed(others)):
        found = ratio(one.seconds, baseline.seconds)
        low, middle, high = (100 * (x - 1) for x in (found.low, found.median, found.high))
        colour = "#999999" if one.variant.is_control else "#0072B2"
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(middle, place, "o", color=colour)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(others)), [one.variant.name for one in reversed(others)])
    axes.set_ylim(-0.6, len(others) - 0.4)
    axes.set_xlabel("time against the baseline, per cent:\nmedian and 95 % interval; left: faster")
    with write_output(folder / "gain.png", PLOT) as path:
        figure.savefig(path, format="png", dpi=120, metadata=PLOT_METADATA)
    return True


def _record(one: Result, against: Ratio | None) -> dict[str, Any]:
    return {
        "seconds": one.seconds,
        "steps": one.steps,
        "ratio": None if against is None else asdict(against),
        "power": [power.record() for power in one.power],
        "series": [
            [part.series for part in (power.parts or (power,)) if part.series]
            for power in one.power
        ],
        "peak_memory_bytes": one.peak_memory,
        "schedule": one.schedule,
        "latents_apart": one.apart if math.isfinite(one.apart or 0.0) else None,
        "largest_difference": one.largest,
        "psnr": one.psnr if math.isfinite(one.psnr) else None,
    }


def _cells(one: Result, against: Ratio | None) -> list[str]:
    """Formats the table row of a variant for the report."""

    def medians(**forms: str) -> str:
        cells = []
        for name, form in forms.items():
            values = [x for power in one.power if (x := getattr(power, name)) is not None]
            cells.append(format(statistics.median(values), form) if values else "not available")
        return ", ".join(dict.fromkeys(cells))

    middle, least, most = (of(one.seconds) for of in (statistics.median, min, max))
    video = (
        "not compared yet" if one.apart is None else f"not decoded; latents off by {one.apart:.1e}"
    )
    if one.largest is not None:
        video = f"{one.largest}, " + ("the same" if not one.largest else f"{one.psnr:.1f} dB")
    return [
        one.variant.name,
        f"{middle:.2f} ({least:.2f} to {most:.2f})",
        "" if against is None else against.gain,
        medians(mean_w=".0f", joules=".0f"),
        medians(mean_mhz=".0f", throttled=".0%"),
        "not available" if one.peak_memory is None else f"{one.peak_memory / 2**30:.2f}",
        "" if against is None else video,
    ]
