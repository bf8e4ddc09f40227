"""The programs of --measure: the check, the communication modes, this program beside diffusers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from wan.utils.files import check_folder, check_output_folder, make_marked_kind, remove_output

REPO = Path(__file__).resolve().parents[2]
_HEADING = "# Log of check_device.py --measure"
LOG = make_marked_kind("a log of check_device.py", _HEADING.encode())
SHARES = {"check": 0.4, "compare": 0.35, "against": 0.25}
"""Program -> share of the time limit."""


def _make_commands(
    ranks: int, checkpoint: Path | None, folder: Path
) -> dict[str, tuple[list[str], str]]:
    """Returns the arguments of Python of each program, and why it is left out, or ""."""
    several = f"-m torch.distributed.run --standalone --nproc_per_node={ranks}".split()
    checkpoint_flag = [] if checkpoint is None else ["--ckpt_dir", str(checkpoint)]
    check = ["tools/check_device.py", "--json", str(folder / "check.json")]
    compare = ["-m", "wan.power", "compare", "--quick", "--out", str(folder / "compare"), "--"]
    against = "-m benchmarks.against --size 320*192 --frames 9 --steps 4 --cache warm --rounds 1"
    files = ["--json", str(folder / "against.json"), "--keep", str(folder / "weights")]
    alone = "one rank has no exchanges to compare" if ranks == 1 else ""
    missing = "" if find_spec("diffusers") else "diffusers is not installed"
    return {
        "check": ([*several, *check] if ranks > 1 else check, ""),
        "compare": ([*several, *compare, *checkpoint_flag], alone),
        "against": ([*against.split(), *files], missing),
    }


def measure_programs(folder: Path, ranks: int, checkpoint: Path | None, minutes: float) -> int:
    """Runs the programs one after the other, each with its share of the time; prints outcomes.

    Args:
        folder: Folder of the programs' results and of a log of each, PROGRAM.txt.
        checkpoint: Checkpoint for the comparison of the modes; None: the demo.

    Returns:
        The exit code: 1 if a program failed or was ended.
    """
    out = folder.absolute()
    check_output_folder(out, {f"{name}.txt": LOG for name in SHARES}, "--measure")
    check_folder(out, "--measure", folder)
    out.mkdir(parents=True, exist_ok=True)
    code = 0
    for name, (arguments, reason) in _make_commands(ranks, checkpoint, out).items():
        limit = 60 * minutes * SHARES[name]
        outcome = f"left out: {reason}"
        if not reason:
            print(f"{name}: at most {limit / 60:.1f} minutes", flush=True)
            is_done, outcome = _run_program(arguments, limit, out / f"{name}.txt")
            code |= not is_done
        print(f"{name}: {outcome}", flush=True)
    print(f"The results are in {folder}.")
    return code


def _run_program(arguments: list[str], limit: float, file: Path) -> tuple[bool, str]:
    """Runs Python with a time limit; returns whether it succeeded, and its outcome."""
    start = time.monotonic()
    remove_output(file, LOG)
    with file.open("x") as log:
        print(_HEADING, file=log, flush=True)
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=REPO, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return False, f"ended after its limit of {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if code:
        return False, f"failed with exit code {code}, see {file.name}"
    return True, f"done in {time.monotonic() - start:.0f} s"
