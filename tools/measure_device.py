"""Checks a new device, compares FA_Power_Cap's modes on it, and measures its speed in one command.

    python tools/measure_device.py [--ranks 8] [--ckpt_dir DIR] [--minutes 25] [--out DIR]

Three programs run one after the other, each with a time limit: the device check, a quick comparison
of the communication modes (with two or more ranks), and a comparison with diffusers from process
start to mp4. The second one uses the demo checkpoint without --ckpt_dir; the comparison with
diffusers always uses random weights of the 1.3B's published sizes. The same command does not repeat
programs that succeeded. The folder then has report.md, each program's results and log, and
to_send.zip, which has everything but videos.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wan import __version__
from wan.app.failures import raise_on_sigterm
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type
from wan.settings.errors import InputError, Terminated, get_exit_code
from wan.settings.values import integer, real
from wan.utils import system
from wan.utils.files import (
    OutputKind,
    check_folder,
    check_output_folder,
    is_output,
    make_marked_kind,
    remove_output,
    write_output,
)
from wan.utils.text_streams import set_up_text

REPO = Path(__file__).resolve().parent.parent
_SHARES = {"check": 0.35, "compare": 0.35, "against": 0.3}
_RESULTS = {
    "check": "check.json",
    "compare": "compare/report.md",
    "against": "against.txt",
}
_TITLES = {
    "check": "Does the device compute correctly?",
    "compare": "Does FA_Power_Cap help here?",
    "against": "From start to mp4, compared with diffusers",
}

_LOG, _HEADING = "# Log of tools/measure_device.py", "# What was measured"


def _is_state(path: Path) -> bool:
    """Whether a JSON file has the state of a measurement: outcomes of our programs."""
    state = json.loads(path.read_bytes())
    texts = state.values() if isinstance(state, dict) and state.keys() <= _TITLES.keys() else [None]
    return all(isinstance(text, str) for text in texts)


def _is_archive(path: Path) -> bool:
    """Whether a zip file has the report and state of a measurement."""
    try:
        with zipfile.ZipFile(path) as packed:
            return {"report.md", "state.json"} <= {*packed.namelist()}
    except zipfile.BadZipFile:
        return False


LOG = make_marked_kind("a log of measure_device.py", _LOG.encode())
REPORT = make_marked_kind("a report of measure_device.py", _HEADING.encode())
STATE = OutputKind("the state of measure_device.py", _is_state)
ARCHIVE = OutputKind("an archive of measure_device.py", _is_archive)


@dataclass(frozen=True)
class Stage:
    """One program of the measurement.

    Attributes:
        skip_reason: Why the program is left out; "" if it runs.
    """

    name: str
    command: list[str]
    skip_reason: str = ""


def list_stages(ranks: int, checkpoint: Path | None, out: Path) -> list[Stage]:
    """Lists the programs for a number of ranks."""
    python = [sys.executable]
    several = [*python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    start = several if ranks > 1 else python
    folder = [] if checkpoint is None else ["--ckpt_dir", str(checkpoint)]
    compare = ["-m", "wan.power", "compare", "--quick", "--out", str(out / "compare")]
    against = ["--size", "320*192", "--frames", "9", "--steps", "4", "--cache", "warm"]
    against += ["--rounds", "1", "--json", str(out / "against.json")]
    against += ["--keep", str(out / "weights")]
    return [
        Stage("check", [*start, "tools/check_device.py", "--json", str(out / "check.json")]),
        Stage(
            "compare",
            [*several, *compare, "--", *folder],
            "" if ranks > 1 else "one rank has no exchanges to compare",
        ),
        Stage(
            "against",
            [*python, "-m", "benchmarks.against", *against],
            "" if find_spec("diffusers") else "diffusers is not installed",
        ),
    ]


def run_stage(stage: Stage, seconds: float, out: Path) -> str:
    """Runs a program with a time limit; returns its outcome: "done in ...", or its failure."""
    start = time.monotonic()
    file = out / f"{stage.name}.txt"
    remove_output(file, LOG)
    with file.open("x") as log:
        log.write(f"{_LOG}\n")
        log.flush()
        process = subprocess.Popen(
            stage.command, cwd=REPO, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"ended after its limit of {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if code:
        return f"failed with exit code {code}, see {stage.name}.txt"
    return f"done in {time.monotonic() - start:.0f} s"


def write_report(out: Path, state: dict[str, str], ranks: int) -> None:
    """Writes report.md and to_send.zip."""
    lines = [_HEADING, "", f"{system.read_cpu_name()}, {ranks} ranks, wan {__version__}.", ""]
    for name, title in _TITLES.items():
        lines += [f"## {title}", "", f"{state.get(name, 'not begun')}.", ""]
        result = out / _RESULTS[name]
        if result.exists():
            lines += [f"Result: [{_RESULTS[name]}]({_RESULTS[name]})", ""]
        if name == "against" and result.exists():
            medians = [
                line for line in result.read_text().splitlines() if line.startswith("warm, ")
            ]
            lines += ["```", *medians, "```", ""]
        if name == "check" and (log := out / "check.txt").exists():
            lines += ["```", *log.read_text().splitlines()[-40:], "```", ""]
        if name == "compare" and result.exists():
            report_lines = result.read_text().replace("](", f"]({name}/").splitlines()
            lines += [f"#{line}" if line.startswith("#") else line for line in report_lines] + [""]
    lines += ["## What to send", "", "to_send.zip has all of this but the videos.", ""]
    with write_output(out / "report.md", REPORT) as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")
    kinds = (".md", ".json", ".txt", ".png")
    with (
        write_output(out / "to_send.zip", ARCHIVE) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for path in sorted(out.rglob("*")):
            if path.suffix in kinds and "weights" not in path.relative_to(out).parts:
                packed.write(path, path.relative_to(out))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and returns the exit code: 1 if a program failed or was ended."""
    parser = Parser("measure_device.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks",
        type=make_argument_type(integer(1, 64)),
        default=1,
        help="devices that compute one video (1)",
    )
    parser.add_argument("--ckpt_dir", type=Path, help="a checkpoint of t2v-A14B (the demo)")
    parser.add_argument(
        "--minutes",
        type=make_argument_type(real(0, 1e5, exclude_min=True)),
        default=25.0,
        help="time limit of all programs together (25)",
    )
    parser.add_argument("--out", type=Path, default=Path("measured"), help="results (measured)")
    options = parser.parse_args(argv)
    out = options.out.absolute()
    logs = {f"{name}.txt": LOG for name in _TITLES}
    kinds = {"state.json": STATE, "report.md": REPORT, "to_send.zip": ARCHIVE}
    check_output_folder(out, logs | kinds, "--out")
    check_folder(out, "--out", options.out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "state.json"
    state: dict[str, str] = json.loads(file.read_text()) if is_output(file, STATE) else {}
    folder = options.ckpt_dir and options.ckpt_dir.absolute()
    for stage in list_stages(options.ranks, folder, out):
        if state.get(stage.name, "").startswith("done"):
            continue
        limit = 60 * options.minutes * _SHARES[stage.name]
        if stage.skip_reason:
            state[stage.name] = f"left out: {stage.skip_reason}"
        else:
            print(f"{_TITLES[stage.name]} At most {limit / 60:.1f} minutes.", flush=True)
            state[stage.name] = run_stage(stage, limit, out)
        print(f"  {stage.name}: {state[stage.name]}", flush=True)
        with write_output(file, STATE) as temporary:
            temporary.write_text(json.dumps(state, indent=1) + "\n")
        write_report(out, state, options.ranks)
    print(f"Report: {options.out / 'report.md'}. To send: {options.out / 'to_send.zip'}")
    return int(any(outcome.startswith(("failed", "ended")) for outcome in state.values()))


if __name__ == "__main__":
    set_up_text()
    try:
        with raise_on_sigterm():
            sys.exit(main())
    except (InputError, KeyboardInterrupt, Terminated) as error:
        message = str(error) if isinstance(error, InputError) else "interrupted."
        print(f"measure_device.py: {message}", file=sys.stderr)
        sys.exit(get_exit_code(error))
