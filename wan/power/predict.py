"""`python -m wan.power predict`: whether head chunks can help on a device, before anything is run.

What a layer computes and sends is the model's arithmetic (`workload`); how fast, at what power and
under which governor are assumptions (`assumptions`), or measured (`calibrate`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wan.cli.flags import Parser
from wan.cli.resolve import resolve
from wan.modules.schedule import MODES
from wan.power import sensitivity
from wan.power.assumptions import FACTS, Assumptions, decide, listed
from wan.power.calibrate import Calibration, calibrate
from wan.power.governor import KINDS
from wan.power.prediction import Prediction, Row, predict, verdict
from wan.power.workload import EXCHANGED, Workload, layer, workload
from wan.run import Run
from wan.settings import values
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS
from wan.settings.parallel import SIZES
from wan.settings.presets import ALIASES
from wan.settings.values import Reader, real

PUBLISHED_RUN: dict[str, Any] = {
    "task": "t2v-A14B",
    "size": (1280, 720),
    "frame_num": 161,
    "sample_steps": 4,
    "sample_guide_scale": (1.0, 1.0),
    "ulysses_size": 4,
}
"""What is predicted where nothing else is asked for: the run of the published row."""
PUBLISHED = {0: 108.35, 1: 90.36, 2: 90.34}
"""Its seconds by --comm_type, as FA_Power_Cap's authors measured them on four NPUs."""
RUN_FLAGS = (*PUBLISHED_RUN, "ring_size", "cfg_size")
OWN: dict[str, tuple[Reader, str]] = {
    "tdp": (real(1, 1e5), "W: the limit of a device; powers are shown in W"),
    "calibrate": (values.path, "SERIES.json: the governor as a measured series shows it"),
    "out": (values.path, "folder for predict.json and sensitivity.png"),
}


@dataclass(frozen=True)
class Report:
    """All that the command says.

    Attributes:
        run: What is predicted.
        work: Its arithmetic.
        by: The assumptions.
        sources: Where each of these comes from.
        found: The prediction.
        watts: Of the limit, where known.
        calibration: What a measured series showed.
    """

    run: Run
    work: Workload
    by: Assumptions
    sources: Mapping[str, str]
    found: Prediction
    watts: float | None
    calibration: Calibration | None


def main(argv: Sequence[str]) -> int:
    """Print the prediction; write it where --out says."""
    given = _parse(argv)
    folder = given.get("out")
    if folder is not None:
        sensitivity.check_folder(folder)
    report = make_report(given)
    print(*lines(report), sep="\n", flush=True)
    if folder is not None:
        swept = sensitivity.sweep(report.work, report.by)
        sensitivity.draw(swept, report.by, report.found, folder / "sensitivity.png")
        text = json.dumps(record(report, swept), indent=1, ensure_ascii=False)
        (folder / "predict.json").write_text(text + "\n", encoding="utf-8")
        print(f"Written: predict.json and sensitivity.png in {folder}")
    return 0


def _parse(argv: Sequence[str]) -> dict[str, Any]:
    """Checked values of the flags that were given."""
    parser = Parser(
        prog="python -m wan.power predict",
        description="Predict the time of each mode of attention, without running anything.",
        epilog="Flags left out: the run and the assumptions of the published row; for another "
        "task its own size, frames, steps and guidance, on 4 ranks.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    readers = {name: FLAGS[name].read for name in RUN_FLAGS}
    readers |= {name: reader for name, (reader, _) in OWN.items()}
    readers |= {name: fact.read for name, fact in FACTS.items()}
    for name in RUN_FLAGS:
        parser.add_argument(f"--{name}", metavar=name.upper(), help=FLAGS[name].help)
    for name, (_, meaning) in OWN.items():
        parser.add_argument(f"--{name}", metavar=name.upper(), help=meaning)
    group = parser.add_argument_group("assumptions")
    for name, fact in FACTS.items():
        meaning = f"{fact.meaning} ({fact.default} {fact.unit}".rstrip() + ")"
        group.add_argument(f"--{name}", metavar=name.upper(), help=meaning)
    raw = vars(parser.parse_args(list(argv)))
    return {name: readers[name](f"--{name}", value) for name, value in raw.items()}


def make_report(given: Mapping[str, Any]) -> Report:
    """The prediction for checked flags. InputError for what contradicts, or cannot be predicted."""
    wanted = {name: given[name] for name in RUN_FLAGS if name in given}
    task = wanted.get("task", PUBLISHED_RUN["task"])
    is_like = ALIASES.get(task, task) == PUBLISHED_RUN["task"]
    basis = PUBLISHED_RUN if is_like else {"ulysses_size": PUBLISHED_RUN["ulysses_size"]}
    run = resolve({**basis, **wanted, "plan": True}, lambda *_: None, plan=True)
    if run.setup.parallel.ulysses_size == 1:
        raise InputError(
            "--ulysses_size 1 exchanges nothing, so there is nothing to put between pieces of "
            "attention; give the ranks that share the heads, for example --ulysses_size 4."
        )
    calibration, measured, watts = None, dict[str, float](), given.get("tdp")
    assumed, _ = decide(given, measured)
    if "calibrate" in given:
        calibration = _calibrated(given["calibrate"], assumed)
        watts, measured = watts or calibration.limit, dict(calibration.found)
        for name in ("pfa", "ps"):  # shares of the series' limit; --tdp asks about another one
            measured[name] *= calibration.limit / watts
    by, sources = decide(given, measured)
    work = workload(run)
    return Report(run, work, by, sources, predict(work, by), watts, calibration)


def _calibrated(path: Path, assumed: Assumptions) -> Calibration:
    if assumed.governor != "hysteresis":
        raise InputError(
            f"--calibrate fits the hysteresis governor, but --governor is {assumed.governor}; "
            "drop one of them."
        )
    return calibrate(path, assumed)


def lines(report: Report) -> Iterator[str]:
    """For the terminal."""
    run, work, by, found = report.run, report.work, report.by, report.found
    parallel = run.setup.parallel
    yield (
        f"Predicted, not run: {_name(report)}, {parallel.world_size} ranks (ulysses "
        f"{parallel.ulysses_size}, ring {parallel.ring_size}, cfg {parallel.cfg_size}), "
        f"{work.layers} layer calls of a rank"
    )
    times = dict.fromkeys(KINDS, 0.0)
    for kind, seconds in layer(work, MODES[0], 1, by):
        times[kind] += seconds
    sent = EXCHANGED * work.exchange_bytes(work.local_heads, by.element_bytes)
    flops = work.attention_flops(work.local_heads, work.rows, work.plan.tokens)
    yield (
        f"Predicted for a layer at the rated clock: attention {times['fa'] * 1e3:.1f} ms "
        f"({flops / 1e12:.1f} TFLOP), other work {times['linear'] * 1e3:.1f} ms "
        f"({work.linear_flops / 1e12:.1f} TFLOP), exchanges {times['comm'] * 1e3:.1f} ms "
        f"({sent / 1e9:.2f} GB)"
    )
    yield ""
    yield from _table(report)
    yield ""
    gains = (f"{row.chunks}: {found.gain(row):z.1%}" for row in found.by_chunks)
    yield "Predicted gain of mode 1 by head chunks: " + ", ".join(gains)
    yield from verdict(work, by, found)
    if is_published(run):
        yield _beside_published(found)
    if report.calibration is not None:
        yield (
            f"Measured series ({report.calibration.source}): the fitted model has the measured "
            f"clock in {1 - report.calibration.differ:.1%} of its samples."
        )
    yield ""
    yield "All predicted values rest on these (--calibrate measures the governor and the powers):"
    for one in listed(by, report.sources):
        value = one["value"] if isinstance(one["value"], str) else f"{one['value']:.4g}"
        yield f"  {one['name']:14}{value:>11} {one['unit']:8}{one['source']:36}{one['meaning']}"


def asked(run: Run) -> dict[str, Any]:
    """What is predicted, by flags."""
    names = ("size", "frame_num", "sample_steps", "sample_guide_scale")
    found = {"task": run.request.preset.task}
    found |= {name: getattr(run.request, name) for name in names}
    return found | dict(zip(SIZES, run.setup.parallel.sizes, strict=True))


def is_published(run: Run) -> bool:
    """Whether it is the run of the published row."""
    return asked(run) == {**dict.fromkeys(SIZES, 1), **PUBLISHED_RUN}


def record(report: Report, swept: sensitivity.Swept) -> dict[str, Any]:
    """Of a prediction, for a file: predicted values stand under "predicted"."""
    found, calibration = report.found, report.calibration

    def of(row: Row) -> dict[str, Any]:
        totals = {"mean_power": row.denoising.mean_power, "mean_clock": row.denoising.mean_clock}
        totals |= asdict(row.denoising)
        gain = found.gain(row)
        return {"chunks": row.chunks, "seconds": row.seconds, "gain": gain, "denoising": totals}

    return {
        "run": asked(report.run),
        "limit_watts": report.watts,
        "assumptions": list(listed(report.by, report.sources)),
        "calibration": None if calibration is None else {"measured": asdict(calibration)},
        "predicted": {
            "modes": {row.name: of(row) for row in found.rows},
            "by_chunks": [of(row) for row in found.by_chunks],
            "best_chunks": found.best.chunks,
            "verdict": list(verdict(report.work, report.by, found)),
            "gain_of_modes_1_and_2_by_assumption": swept,
        },
        "published_seconds": PUBLISHED if is_published(report.run) else None,
    }


def _table(report: Report) -> Iterator[str]:
    found = report.found
    heads = ("time", "gain", "mean power", "trips", "throttled")
    yield f"{'':32}{'':>7}" + "".join(f"{'predicted':>12}" for _ in heads)
    yield f"{'mode':32}{'chunks':>7}" + "".join(f"{head:>12}" for head in heads)
    for row in found.rows:
        totals = row.denoising
        cells = (
            f"{row.seconds:.2f} s",
            f"{found.gain(row):z.2%}" if row is not found.modes[0] else "-",
            _power(totals.mean_power, report.watts),
            f"{totals.trips:.0f}" if report.by.governor == "hysteresis" else "-",
            f"{totals.throttled / totals.seconds:.0%}",
        )
        yield f"{row.name:32}{row.chunks:>7}" + "".join(f"{cell:>12}" for cell in cells)


def _power(share: float, watts: float | None) -> str:
    return f"{share:.2f} TDP" if watts is None else f"{share * watts:.0f} W"


def _name(report: Report) -> str:
    request = report.run.request
    size, guided = "*".join(map(str, request.size)), "" if request.guided else ", no guidance"
    task = f"{request.preset.task}, {size}, {request.frame_num} frames"
    return f"{task}, {request.sample_steps} steps{guided}"


def _beside_published(found: Prediction) -> str:
    words = [
        f"mode {key} measured {PUBLISHED[key]:.2f} s ({1 - PUBLISHED[key] / PUBLISHED[0]:.2%}), "
        f"predicted {row.seconds:.2f} s ({found.gain(row):z.2%})"
        for key, row in found.modes.items()
    ]
    return "Published by the authors: " + "; ".join(words) + "."
