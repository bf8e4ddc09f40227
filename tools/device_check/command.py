"""The story of a check: what is asked for, each step on its ranks, table, file, exit code."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.device_check import report
from tools.device_check.agree import Alone, Ranks, joined
from tools.device_check.report import Done
from tools.device_check.steps import ABSENT, OK, STEPS, WRONG, Facts, Outcome, Step, chosen
from tools.device_check.supervise import Bed, DeviceError
from wan import env
from wan.cli.failures import terminable
from wan.cli.flags import Parser
from wan.settings.errors import InputError, Terminated, exit_code
from wan.settings.execution import DEVICE_TYPES

FILE = "device_check.json"


def main(argv: Sequence[str] | None = None, steps: tuple[Step, ...] = STEPS) -> int:
    """Exit code: 0 nothing is wrong, 1 something is, 2 refused, 130 interrupted.

    steps: those that there are.
    """
    speaks = True
    try:
        with terminable():  # so that the worker is ended
            speaks = env.rank() == 0
            options = _options(argv, steps)
            return _checked(options, chosen(options.only, steps))
    except (InputError, KeyboardInterrupt, Terminated) as error:
        if speaks:
            words = str(error) if isinstance(error, InputError) else "interrupted."
            print(f"check_device.py: {words}", file=sys.stderr)
        return exit_code(error)


def _options(argv: Sequence[str] | None, steps: tuple[Step, ...]) -> argparse.Namespace:
    names = ", ".join(step.name for step in steps)
    parser = Parser(
        prog="check_device.py",
        description="Does this machine's device compute what it should, and how fast?",
        epilog=f"Steps: {names}. docs/devices.md says how to read the table.",
        allow_abbrev=False,
    )
    parser.add_argument("--full", action="store_true", help="also what takes minutes")
    parser.add_argument("--device", choices=DEVICE_TYPES, default="auto")
    parser.add_argument("--only", metavar="STEP[,STEP]", help="names or numbers of steps")
    parser.add_argument("--json", metavar="FILE", type=Path, default=Path(FILE))
    options = parser.parse_args(argv)
    env.refused()  # MINDIE_SD_FA_TYPE would replace the kernel that is checked
    if env.rank() == 0:
        _check_writable(options.json)
    return options


def _check_writable(path: Path) -> None:
    """InputError before anything is measured that could then not be written."""
    if path.suffix != ".json" or path.is_dir():
        raise InputError(f"--json is {path}; name a file that ends in .json.")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise InputError(
            f"--json {path} cannot be written ({error.strerror}); name a file in a folder that "
            "exists."
        ) from error


def _checked(options: argparse.Namespace, steps: list[Step]) -> int:
    """The check on this rank; the main one prints and writes."""
    start, world, local = time.monotonic(), env.world_size(), env.local_rank()
    peers = Alone() if world == 1 else Ranks(env.rank(), world)
    folder = Path(tempfile.mkdtemp(prefix="wan-check-"))
    hello = {"device": options.device, "index": local, "world": world}
    try:
        with Bed(hello) as bed:
            facts, about = _opened(bed, peers)
            if peers.rank == 0:
                print(f"{facts.name}, {world} rank{'s' * (world > 1)}", flush=True)
            check = _Check(bed, peers, facts, options.full, folder, local == 0)
            done = [check.step(index, step) for index, step in enumerate(steps)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if peers.rank:
        return peers.same_code(None)
    code = int(any(outcome.verdict == WRONG for _, outcome, _ in done))
    about |= {"seconds": round(time.monotonic() - start, 1), "full": options.full}
    report.write(options.json, done, {"verdict": WRONG if code else OK, **about})
    print(f"\n{report.table(done)}\n\n{report.summary(done)}; {about['seconds']:.0f} s.")
    print(f"Attach {options.json} to a report.", flush=True)
    return peers.same_code(code)


def _opened(bed: Bed, peers: Alone) -> tuple[Facts, dict[str, Any]]:
    """The device of this rank. InputError on all ranks where one has none."""
    refusal, worker = None, None
    try:
        worker = bed.worker()
    except (InputError, DeviceError) as error:
        refusal = str(error)
    refusal = peers.refusal(refusal)
    if refusal is not None or worker is None:
        raise InputError(refusal or "")
    about = {"facts": asdict(worker.facts), "environment": worker.environment}
    return worker.facts, about


class _Check:
    """The steps of one rank. first_here: it is the first rank of its machine."""

    def __init__(
        self, bed: Bed, peers: Alone, facts: Facts, full: bool, folder: Path, first_here: bool
    ) -> None:
        self._bed, self._peers, self._facts = bed, peers, facts
        self._full, self._folder, self._first_here = full, folder, first_here

    def step(self, index: int, step: Step) -> Done:
        """Carry out a step and hear of the other ranks'."""
        own = self._own(index, step)
        outcomes = self._peers.merged(index, own, step.limit)
        # After the others know: they would only see that a connection is lost. A group has come to
        # its end with its step, and an error of a device may stay with its process.
        if own.verdict == WRONG or step.together(self._facts):
            self._bed.clear()
        outcome = joined(outcomes)
        if self._peers.rank == 0:
            print(report.row(step, outcome), flush=True)
        return step, outcome, outcomes

    def _own(self, index: int, step: Step) -> Outcome:
        missing = step.missing(self._facts, self._full)
        if missing is not None:
            return Outcome(ABSENT, words=missing)
        together = step.together(self._facts)
        if not together and self._facts.type == "cpu" and not self._first_here:
            return Outcome(ABSENT)  # the ranks of a machine share its CPU
        job = {
            "work": step.work,
            "index": index,
            "together": together,
            "limit": step.limit,
            "full": self._full,
            "folder": str(self._folder),
        }
        if not together:
            return self._bed.run(step, job)
        return self._bed.run(step, job, lambda: self._peers.others_failed(index))
