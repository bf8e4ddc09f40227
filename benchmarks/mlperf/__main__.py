"""MLPerf's text-to-video workload on this machine, for each communication mode, with energy.

    pip install --no-deps -r benchmarks/mlperf/requirements.txt
    python -m benchmarks.mlperf --small --ranks 2 --tests performance accuracy test04
    python -m benchmarks.mlperf --ranks 8 --modes 0 1 2 -- --ckpt_dir ./Wan2.2-T2V-A14B --power

MLPerf's load generator issues the 248 prompts of six VBench dimensions at 1280*720, 81 frames and
20 steps (--small: six prompts, 64*64 x 9, 4 steps). `performance` measures latency (SingleStream)
or throughput (Offline). `accuracy` makes every video and writes vbench_full_info.json, from which
VBench computes its dimensions elsewhere; --score FILE then reads its results. `test04` issues one
prompt repeatedly: a cached answer would be faster. --service drives `python -m wan.serve` over HTTP
instead. Flags after `--` are passed to generate.py.

Each mode's logs, videos and results are written to --out; a test with a result is not repeated, and
report.md and report.json summarize all results. This is MLPerf-shaped, not a submission: nobody has
reviewed it, and steps of a submission (audits, system description) are missing.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.mlperf import rules
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type
from wan.checkpoint.headers import read_json
from wan.settings.errors import InputError, WriteError, get_exit_code
from wan.settings.values import integer, read_path, real
from wan.utils import system
from wan.utils.files import check_output, make_json_kind, make_marked_kind, write_output
from wan.utils.text_streams import set_up_text

_DRIVER = "benchmarks.mlperf.driver"
_TITLE = "# MLPerf-shaped, not a submission"
ROWS = make_json_kind("rows of benchmarks.mlperf", "cpu", "rows")
REPORT = make_marked_kind("a report of benchmarks.mlperf", _TITLE.encode())


def _run_in_process(ranks: int, mode: int, shared: list[str], flags: list[str]) -> None:
    """Runs the load generator on a pipeline, on new ranks."""
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    mode_flags = ["--comm_type", str(mode)] if ranks > 1 else []
    subprocess.run([*start, _DRIVER, *shared, "--", *mode_flags, *flags], check=True)


def _run_over_http(ranks: int, mode: int, shared: list[str], flags: list[str], out: Path) -> None:
    """Runs the load generator on a new service, over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    mode_flags = ["--comm_type", str(mode)] if ranks > 1 else []
    options = ["--port", str(port), "--ranks", str(ranks), "--journal", str(out / "service")]
    options += ["--kept_texts", "0", "--together", "1", "--queue", "1000"]
    command = [sys.executable, "-m", "wan.serve", *options, "--", *mode_flags, *flags]
    service = subprocess.Popen(command)
    try:
        while not _is_up(url):
            if service.poll() is not None:
                raise InputError("The service did not start", remedy="see its error above")
            time.sleep(0.5)
        subprocess.run([sys.executable, "-m", _DRIVER, *shared, "--url", url], check=True)
    finally:
        service.terminate()
        service.wait()


def _is_up(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health").status == 200)
    except OSError:
        return False


def _read_rows(out: Path) -> list[dict[str, Any]]:
    """Reads one row of results for each measured mode and scenario."""
    rows = []
    for file in sorted(out.glob("mode*/*/performance/result.json")):
        try:
            rows.append(_read_row(file))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            why = f"holds no results of benchmarks.mlperf ({type(error).__name__}: {error})"
            raise InputError(f"{file.parents[1]}", None, why, "move it away") from error
    return rows


def _read_row(file: Path) -> dict[str, Any]:
    """Reads the row of a mode and scenario from the result of `performance`."""
    folder, result = file.parents[1], read_json(file)
    row: dict[str, Any] = {"mode": int(file.parents[2].name[4:]), "scenario": result["scenario"]}
    if result["scenario"] == "SingleStream":
        row["latency_s"] = result["90.00_percentile_latency_ns"] / 1e9
    else:
        row["samples_per_s"] = result["samples_per_second"]
    row |= {
        "videos": result["videos"],
        "validity": result["validity"],
        **_average_energy(result["power"]),
    }
    same_prompt = folder / "test04" / "result.json"
    if same_prompt.exists():
        row["gain_of_the_same"] = (
            _compute_video_seconds(result) / _compute_video_seconds(read_json(same_prompt)) - 1
        )
        row["test04"] = "pass" if row["gain_of_the_same"] <= rules.MOST_GAIN else "fail"
    accuracy = folder / "accuracy" / "result.json"
    if accuracy.exists():
        row["videos_for_vbench"] = read_json(accuracy)["videos"]
    return row


def _compute_video_seconds(result: dict[str, Any]) -> float:
    """Returns the mean seconds of a video."""
    if result["scenario"] == "Offline":
        return 1 / float(result["samples_per_second"])
    return float(result["mean_latency_ns"]) / 1e9


def _average_energy(power: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the means of the metered quantities over the videos."""
    names = {"joules": "joules", "mean_w": "watts", "mean_mhz": "mhz", "throttled": "throttled"}
    means = {}
    for name, column in names.items():
        values = [video_power[name] for video_power in power if video_power.get(name) is not None]
        if values:
            means[column] = statistics.mean(values)
    return means


def write_report(out: Path, small: bool) -> str:
    """Writes report.json and report.md, and returns the latter."""
    rows = _read_rows(out)
    with write_output(out / "report.json", ROWS) as temporary:
        temporary.write_text(
            json.dumps({"cpu": system.read_cpu_name(), "rows": rows}, indent=1) + "\n"
        )
    heads = {
        "scenario": "scenario",
        "mode": "`--comm_type`",
        "latency_s": "s, 90th percentile",
        "samples_per_s": "videos/s",
        "joules": "J per video",
        "watts": "mean W",
        "mhz": "mean MHz",
        "throttled": "throttled",
        "videos": "videos",
        "validity": "validity (load generator)",
        "gain_of_the_same": "same prompt faster by",
        "test04": "TEST04",
        "videos_for_vbench": "videos for VBench",
    }
    lines = [_TITLE, ""]
    if small:
        lines += ["Six small videos (`--small`), which do not measure the workload's speed."]
        lines += ["With fewer than 64 queries the load generator rates SingleStream invalid.", ""]
    if not any("joules" in row for row in rows):
        lines += ["Energy: not metered (no `--power`), or this machine has no meter.", ""]
    used = [name for name in heads if any(name in row for row in rows)]
    lines += ["| " + " | ".join(heads[name] for name in used) + " |", "|---" * len(used) + "|"]
    for row in sorted(rows, key=lambda row: (row["scenario"], row["mode"])):
        lines.append("| " + " | ".join(_format_cell(name, row.get(name)) for name in used) + " |")
    text = "\n".join(lines) + "\n"
    with write_output(out / "report.md", REPORT) as temporary:
        temporary.write_text(text)
    return text


def _format_cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ("gain_of_the_same", "throttled"):
        return f"{value:.1%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def score_vbench(file: Path) -> str:
    """Computes the accuracy from VBench's results and compares it with the required one.

    Args:
        file: VBench's *_eval_results.json: dimension -> [score, videos].
    """
    results = read_json(file)
    missing = [name for name in rules.DIMENSIONS if name not in results]
    if missing:
        raise InputError(f"{file} has no {missing[0]}", remedy="score all six dimensions")
    try:
        scores = [real(0, 1)(f"{file}: {name}", results[name][0]) for name in rules.DIMENSIONS]
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(
            f"{file}", None, "holds no scores of VBench", "give its results"
        ) from error
    mean = 100 * statistics.mean(scores)
    verdict = "enough" if mean >= rules.LEAST_ACCURACY else "too little"
    return f"{mean:.4f}: {verdict} (at least {rules.LEAST_ACCURACY} is required)"


def run_workload(argv: list[str]) -> int:
    """Runs the tests of all modes and writes the report; returns the exit code."""
    separator = argv.index("--") if "--" in argv else len(argv)
    flags = argv[separator + 1 :]
    command = Parser(
        "python -m benchmarks.mlperf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rules.add_options(command)
    command.add_argument(
        "--ranks",
        type=make_argument_type(integer(1, 64)),
        default=1,
        help="processes that share a video (1)",
    )
    command.add_argument(
        "--modes", nargs="+", type=make_argument_type(integer(0, 2)), default=[0], choices=(0, 1, 2)
    )
    command.add_argument("--service", action="store_true", help="drive python -m wan.serve")
    command.add_argument(
        "--score",
        type=make_argument_type(read_path),
        help="only compute the accuracy from this file of VBench",
    )
    options = command.parse_args(argv[:separator])
    if options.score is not None:
        print(score_vbench(options.score))
        return 0
    rules.check_flags(flags)  # refuse wrong flags and missing packages before anything starts
    rules.load_workload(options.small)
    for name, kind in (("report.json", ROWS), ("report.md", REPORT)):
        check_output(options.out / name, kind, "--out")
    for mode in options.modes:
        out = options.out / f"mode{mode}"
        out.mkdir(parents=True, exist_ok=True)
        shared = ["--scenarios", *options.scenarios, "--tests", *options.tests]
        shared += ["--small"] * options.small + ["--cached"] * options.cached
        shared += ["--out", str(out)]
        if options.service:
            _run_over_http(options.ranks, mode, shared, flags, out)
        else:
            _run_in_process(options.ranks, mode, shared, flags)
    print(write_report(options.out, options.small))
    return 0


if __name__ == "__main__":
    set_up_text()
    try:
        sys.exit(run_workload(sys.argv[1:]))
    except (InputError, WriteError) as error:
        print(f"benchmarks.mlperf: {error}", file=sys.stderr)
        sys.exit(get_exit_code(error))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
