"""Checks that this machine's device computes correct results, and measures its speed.

    python tools/check_device.py [--full] [--device auto|cpu|cuda|npu] [--only STEP[,STEP]]
    torchrun --nproc_per_node=8 tools/check_device.py
    python tools/check_device.py --measure DIR [--ranks 8] [--ckpt_dir DIR] [--minutes 25]

Prints each step and writes a JSON file to attach to a bug report. With --measure it then compares
the communication modes (several ranks), and this program with diffusers from process start to mp4.
Exit codes: 0 all right, 1 something is wrong, 2 refused, 130 interrupted. docs/devices.md explains
the table.

Under torchrun the supervising processes of the ranks exchange messages only through torchrun's
key-value store, never by a collective. If a rank fails, hangs or is killed, the others therefore
lose only the current step.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.distributed import rank_env

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.device_check import steps as report
from tools.device_check.measure import measure_programs
from tools.device_check.steps import ABSENT, OK, STEPS, WRONG, DeviceProperties, Job, Outcome, Step
from tools.device_check.worker import DeviceError, Worker
from wan.app.failures import raise_on_sigterm
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.errors import InputError, Terminated, WriteError, get_exit_code
from wan.settings.execution import DEVICE_TYPES
from wan.settings.values import integer, real
from wan.utils import env
from wan.utils.files import check_output

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL = 0.1
ENDED = "ended because"
_DOUBTFUL = (ENDED, "RuntimeError", "Dist")  # a collective raises these when another rank fails
GRACE = 60.0  # seconds to wait for a rank beyond its step's limit


def main(argv: Sequence[str] | None = None, steps: tuple[Step, ...] = STEPS) -> int:
    """Checks the device and returns the exit code. steps: the table of steps."""
    is_spokesman = True
    try:
        with raise_on_sigterm():  # so that SIGTERM also ends the worker
            is_spokesman = env.rank() == 0
            options = _parse_options(argv, steps)
            if options.measure is None:
                return _run_check(options, report.select_steps(options.only, steps))
            checkpoint = options.ckpt_dir and options.ckpt_dir.absolute()
            minutes = options.minutes or 25.0
            return measure_programs(options.measure, options.ranks or 1, checkpoint, minutes)
    except (InputError, WriteError, KeyboardInterrupt, Terminated) as error:
        if is_spokesman:
            is_refusal = isinstance(error, InputError | WriteError)
            message = str(error) if is_refusal else "interrupted."
            print(f"check_device.py: {message}", file=sys.stderr)
        return get_exit_code(error)


def _parse_options(argv: Sequence[str] | None, steps: tuple[Step, ...]) -> argparse.Namespace:
    parser = Parser(
        prog="check_device.py",
        description="Check that this machine's device computes correct results, and how fast.",
        epilog=f"Steps: {', '.join(step.name for step in steps)}. See docs/devices.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--full", action="store_true", help="also run steps that take minutes")
    parser.add_argument("--device", choices=DEVICE_TYPES, default="auto")
    parser.add_argument("--only", metavar="STEP[,STEP]", help="names or numbers of steps")
    parser.add_argument("--json", metavar="FILE", type=Path, default=Path("device_check.json"))
    parser.add_argument(
        "--measure", metavar="DIR", type=Path, help="measure speed too, without torchrun"
    )
    ranks = make_argument_type(integer(1, 64))
    parser.add_argument("--ranks", type=ranks, help="of --measure (1)")
    minutes = make_argument_type(real(0, 1e5, exclude_min=True))
    parser.add_argument("--minutes", type=minutes, help="of --measure in all (25)")
    parser.add_argument("--ckpt_dir", type=Path, help="of --measure: t2v-A14B (the demo)")
    options = parser.parse_args(argv)
    of_measure = (options.ranks, options.minutes, options.ckpt_dir)
    if options.measure is None and of_measure != (None, None, None):
        raise InputError("--ranks, --minutes and --ckpt_dir have no effect without --measure.")
    defaults = (False, "auto", None, Path("device_check.json"))
    of_check = (options.full, options.device, options.only, options.json)
    if options.measure is not None and (of_check != defaults or env.world_size() > 1):
        why = "starts the check itself, with all steps"
        raise InputError("--measure", why=why, remedy="use only --ranks, --minutes and --ckpt_dir")
    env.check_environment()  # MINDIE_SD_FA_TYPE would replace the kernel that is checked
    path: Path = options.json
    if env.rank() == 0:  # refuse a wrong path before anything is measured
        if path.suffix != ".json":
            raise InputError(f"--json is {path}; name a file that ends in .json.")
        check_output(path, report.REPORT, "--json")
    return options


def _run_check(options: argparse.Namespace, steps: list[Step]) -> int:
    """Runs the steps on this rank; returns the exit code. Rank 0 prints and writes the report."""
    start, world, local = time.monotonic(), env.world_size(), env.local_rank()
    ranks, worker = Ranks(env.rank(), world), Worker(options.device, local, world)
    folder = Path(tempfile.mkdtemp(prefix="wan-check-"))
    results: list[report.StepResult] = []
    about: dict[str, Any] = {"verdict": "interrupted"}
    try:
        properties, machine = _open_device(worker, ranks)
        about |= {"facts": asdict(properties), "environment": machine}
        if ranks.rank == 0:
            print(f"{properties.name}, {world} rank{'s' * (world > 1)}", flush=True)
        for index, step in enumerate(steps):
            job = Job(step, index, options.full, folder, step.is_collective(properties))
            rank_outcome = _run_step(worker, ranks, properties, job, first_here=local == 0)
            outcomes = ranks.gather_outcomes(index, rank_outcome, step.limit)
            # End the worker only now: the other ranks have this outcome, so that they do not
            # report a lost connection. A process group ends with its step, and a device error
            # may persist in its process.
            if rank_outcome.verdict == WRONG or job.is_collective:
                worker.end()
            results.append((step, merge_outcomes(outcomes), outcomes))
            if ranks.rank == 0:
                print(report.format_row(step, results[-1][1]), flush=True)
        is_wrong = any(outcome.verdict == WRONG for _, outcome, _ in results)
        about["verdict"] = WRONG if is_wrong else OK
    finally:
        worker.end()
        shutil.rmtree(folder, ignore_errors=True)
        if ranks.rank == 0 and results:
            about |= {"seconds": round(time.monotonic() - start, 1), "full": options.full}
            report.write_json_report(options.json, results, about)
            print(f"\n{report.format_summary(results)}; {about['seconds']:.0f} s.")
            print(f"Attach {options.json} to a report.", flush=True)
    return ranks.share_exit_code(int(about["verdict"] == WRONG))


def _open_device(worker: Worker, ranks: Ranks) -> tuple[DeviceProperties, dict[str, Any]]:
    """Opens the device of this rank. Raises InputError on all ranks if one rank has none."""
    refusal, opened = "", None
    try:
        opened = worker.open()
    except (InputError, DeviceError) as error:
        refusal = str(error)
    refusal = ranks.agree_on_refusal(refusal)
    if refusal or opened is None:
        raise InputError(refusal)
    return opened


def _run_step(
    worker: Worker, ranks: Ranks, properties: DeviceProperties, job: Job, first_here: bool
) -> Outcome:
    """Runs a step on this rank. first_here: this is the first rank of its machine."""
    missing = job.step.find_obstacle(properties, job.full)
    if missing is not None:
        return Outcome(ABSENT, words=missing)
    if properties.type == "cpu" and not (first_here or job.is_collective):
        return Outcome(ABSENT)  # the ranks of a machine have one CPU: one check suffices
    return worker.run(job, lambda: ranks.find_failure(job))


class Ranks:
    """The agreement of several ranks through torchrun's store.

    Raises:
        InputError: The store is not torchrun's.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._store = _open_store() if world > 1 else None

    def agree_on_refusal(self, refusal: str) -> str:
        """Returns the first rank's reason why the check cannot begin; "" if all ranks can."""
        if self._store is None:
            return refusal
        self._store.set(f"hello/{self.rank}", refusal)
        keys = [f"hello/{rank}" for rank in range(self.world)]
        if not _wait_for_keys(self._store, keys, 600):
            return "not all ranks have opened their devices within 600 s; start all of them."
        refusals = [self._store.get(key).decode() for key in keys]
        return next((sentence for sentence in refusals if sentence), "")

    def find_failure(self, job: Job) -> str | None:
        """Returns the reason to end a step in which another rank failed; None if none did."""
        key = f"failed/{job.index}"
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def gather_outcomes(self, index: int, outcome: Outcome, limit: float) -> list[Outcome]:
        """Returns the outcomes of a step, by rank."""
        if self._store is None:
            return [outcome]
        if outcome.words and not outcome.words.startswith(ENDED):  # the others would wait for it
            self._store.set(f"failed/{index}", f"{ENDED} rank {self.rank} has")
        self._store.set(f"outcome/{index}/{self.rank}", pickle.dumps(outcome).hex())
        keys = [f"outcome/{index}/{rank}" for rank in range(self.world)]
        _wait_for_keys(self._store, keys, max(0.0, limit - outcome.seconds) + GRACE)
        lost = Outcome(WRONG, words="the rank does not respond; it may be lost")
        return [
            pickle.loads(bytes.fromhex(self._store.get(key).decode()))
            if self._store.check([key])
            else lost
            for key in keys
        ]

    def share_exit_code(self, code: int) -> int:
        """Returns rank 0's code, which it shares when it has written its files.

        torchrun may end rank 0 as soon as another rank has ended.
        """
        if self._store is None:
            return code
        if self.rank == 0:
            self._store.set("code", str(code))
        return int(self._store.get("code")) if _wait_for_keys(self._store, ["code"], GRACE) else 1


def _wait_for_keys(store: Store, keys: list[str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _open_store() -> Store:
    import torch.distributed as dist

    here = rank_env.read_rank_env()
    if here.holds_store:
        raise InputError("WORLD_SIZE is set, but there is no torchrun: start with torchrun.")
    store = dist.TCPStore(here.address, here.port, wait_for_workers=False)
    return dist.PrefixStore("check", store)


def merge_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Merges the outcomes of all ranks: the lines of rank 0 and the worst verdict.

    A line that is wrong only on another rank is added with the number of that rank. A rank that was
    ended because of another rank's failure counts only if that rank reported nothing. An error that
    a collective may have raised because of another rank is shown only if there is no other cause.
    """
    by_itself = [o for o in outcomes if not o.words.startswith(ENDED)] or list(outcomes)
    causes = [o for o in by_itself if o.words and not o.words.startswith(_DOUBTFUL)]
    lines = list(outcomes[0].lines)
    reported = {line.what for line in lines if line.verdict == WRONG}
    for rank, outcome in enumerate(outcomes[1:], 1):
        bad = [
            line for line in outcome.lines if line.verdict == WRONG and line.what not in reported
        ]
        lines += [replace(line, what=f"rank {rank}: {line.what}") for line in bad]
    cause = next(iter(causes or [o for o in by_itself if o.words]), outcomes[0])
    rank = outcomes.index(cause)
    reason = f"rank {rank}: {cause.words}" if rank else cause.words
    verdict = report.find_worst(outcome.verdict for outcome in by_itself)
    return Outcome(verdict, max(o.seconds for o in outcomes), tuple(lines), reason, cause.tail)


if __name__ == "__main__":
    sys.exit(run_program(main))
