"""Compares how long two checkouts need from the start of a process to the first denoising step.

    git worktree add ../before COMMIT
    python -m benchmarks.start --base ../before --rounds 5

Each row is a command with the demo checkpoint: a video of one step on one rank or, by
`infer_t2v.sh`, on several, or a plan. A round runs it in both checkouts, in alternating order. The
program prints the number of imported modules, counted in a first run, and, with the ratios of the
rounds, median seconds: "seconds" until the first step begins (when the log has the stages' seconds,
less those from denoising on; of a plan: until it is printed), "cpu_seconds" of all processes.
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

from benchmarks.common import compute_ratios
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.errors import InputError
from wan.settings.values import integer
from wan.utils import system

REPO = Path(__file__).resolve().parents[1]
ROWS = {"1 rank": 1, "2 ranks": 2, "8 ranks": 8, "plan": 0}
_AFTER_START = re.compile(r"denoising ([\d.]+) s, decoding ([\d.]+) s, writing ([\d.]+) s")
_IMPORT = re.compile(r"^import time:[\d |]+ ([\w.]+)$", re.MULTILINE)


class Start(NamedTuple):
    """Seconds until the first step, CPU seconds of the whole command, imported modules."""

    seconds: float
    cpu_seconds: float
    modules: int


def make_command(ranks: int, video: Path) -> list[str]:
    """Returns the command of a row; 0 ranks: the plan."""
    launcher = ["bash", "infer_t2v.sh"] if ranks > 1 else [sys.executable, "generate.py"]
    if not ranks:
        return [*launcher, "--task", "t2v-A14B", "--plan"]
    demo = ["--ckpt_dir", "examples/demo/t2v-A14B", "--sample_steps", "1", "--base_seed", "1"]
    return [*launcher, *demo, "--prompt", "a large red star", "--save_file", str(video)]


def measure_start(checkout: Path, ranks: int, count_modules: bool = False) -> Start:
    """Runs the command of a row in a checkout.

    Raises:
        InputError: The command failed.
    """
    # The second run reads compiled modules, as that of a user does.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environment |= {"PYTHONPATH": "", "PYTHONPROFILEIMPORTTIME": "1" if count_modules else ""}
    programs = Path(sys.executable).parent  # torchrun, if the checkout has no environment
    environment |= {"NPROC_PER_NODE": str(ranks), "PATH": f"{programs}:{os.environ['PATH']}"}
    usage, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        command, begun = make_command(ranks, Path(folder) / "video.mp4"), time.monotonic()
        with Popen(
            command, cwd=checkout, env=environment, stdout=PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if ranks == 0:
                    seconds = time.monotonic() - begun
                elif stages := _AFTER_START.search(line):
                    seconds = time.monotonic() - begun - sum(map(float, stages.groups()))
        errors.seek(0)
        text = errors.read()
    if process.returncode or seconds is None:
        why = f"ends with {process.returncode}: {text[-2000:].strip()}"
        raise InputError(f"{' '.join(command)} in {checkout}", None, why)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return Start(seconds, cpu_seconds, len({*_IMPORT.findall(text)}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 100)), default=5)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=tuple(ROWS))
    options = parser.parse_args(argv)
    checkouts = (options.base.absolute(), REPO)
    if not (checkouts[0] / "generate.py").is_file():
        raise InputError("--base", options.base, "is no checkout of this repository")
    print(f"{system.read_cpu_name()}, {os.cpu_count()} cores, {options.rounds} rounds", flush=True)
    for row in options.rows:
        counted = [measure_start(checkout, ROWS[row], True).modules for checkout in checkouts]
        pairs: list[tuple[Start, Start]] = []
        for number in range(options.rounds):
            order = checkouts if number % 2 == 0 else checkouts[::-1]
            starts = [measure_start(checkout, ROWS[row]) for checkout in order]
            pairs.append((starts[number % 2], starts[1 - number % 2]))
        print(f"{row}: modules {counted[0]} -> {counted[1]}", flush=True)
        for name in ("seconds", "cpu_seconds"):
            before, after = ([getattr(pair[side], name) for pair in pairs] for side in (0, 1))
            medians, ratio = map(statistics.median, (before, after)), compute_ratios(after, before)
            numbers = "{:.2f} -> {:.2f}, ratio {median:.2f} ({min:.2f} to {max:.2f})"
            print(f"  {name}: {numbers.format(*medians, **ratio)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
