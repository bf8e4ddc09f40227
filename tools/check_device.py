"""Check that this machine's device computes correct results, and measure its speed.

    python tools/check_device.py [--full] [--device auto|cpu|cuda|npu] [--only STEP[,STEP]]
    torchrun --nproc_per_node=8 tools/check_device.py

Prints a table and writes a JSON file to attach to a bug report. Exit codes: 0 all right, 1
something is wrong, 2 refused, 130 interrupted. docs/devices.md explains the table.

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

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.device_check import steps as report
from tools.device_check.process import Bed, DeviceError, Job
from tools.device_check.steps import ABSENT, OK, STEPS, WRONG, Facts, Outcome, Step
from wan import env
from wan.cli.failures import raise_on_sigterm
from wan.cli.flags import Parser
from wan.output_files import check_output
from wan.settings.errors import InputError, Terminated, WriteError, get_exit_code
from wan.settings.execution import DEVICE_TYPES

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL = 0.1
ENDED = "ended because"
_DOUBTFUL = (ENDED, "RuntimeError", "Dist")  # a collective raises these when another rank fails
GRACE = 60.0  # seconds to wait for a rank beyond its step's limit


def main(argv: Sequence[str] | None = None, steps: tuple[Step, ...] = STEPS) -> int:
    """Check the device and return the exit code. steps: the table of steps."""
    speaks = True
    try:
        with raise_on_sigterm():  # so that SIGTERM also ends the worker
            speaks = env.rank() == 0
            options = _options(argv, steps)
            return _check(options, report.chosen(options.only, steps))
    except (InputError, WriteError, KeyboardInterrupt, Terminated) as error:
        if speaks:
            told = isinstance(error, InputError | WriteError)
            words = str(error) if told else "interrupted."
            print(f"check_device.py: {words}", file=sys.stderr)
        return get_exit_code(error)


def _options(argv: Sequence[str] | None, steps: tuple[Step, ...]) -> argparse.Namespace:
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
    options = parser.parse_args(argv)
    env.check_environment()  # MINDIE_SD_FA_TYPE would replace the kernel that is checked
    path: Path = options.json
    if env.rank() == 0:  # refuse a wrong path before anything is measured
        if path.suffix != ".json":
            raise InputError(f"--json is {path}; name a file that ends in .json.")
        check_output(path, report.REPORT, "--json")
    return options


def _check(options: argparse.Namespace, steps: list[Step]) -> int:
    """Run the steps on this rank and return the exit code; rank 0 prints and writes the report."""
    start, world, local = time.monotonic(), env.world_size(), env.local_rank()
    peers = Alone() if world == 1 else Ranks(env.rank(), world)
    folder = Path(tempfile.mkdtemp(prefix="wan-check-"))
    done: list[report.Done] = []
    about: dict[str, Any] = {}
    try:
        with Bed(options.device, local, world) as bed:
            facts, about = _opened(bed, peers)
            if peers.rank == 0:
                print(f"{facts.name}, {world} rank{'s' * (world > 1)}", flush=True)
            for index, step in enumerate(steps):
                job = Job(step, index, options.full, folder, step.together(facts))
                own = _own(bed, peers, facts, job, first_here=local == 0)
                outcomes = peers.merged(index, own, step.limit)
                # End the worker only now: the other ranks have this outcome, so that they do not
                # report a lost connection. A process group ends with its step, and a device error
                # may persist in its process.
                if own.verdict == WRONG or job.together:
                    bed.clear()
                done.append((step, joined(outcomes), outcomes))
                if peers.rank == 0:
                    print(report.row(step, done[-1][1]), flush=True)
    except (KeyboardInterrupt, Terminated):
        if peers.rank == 0 and done:
            about |= {"seconds": round(time.monotonic() - start, 1), "full": options.full}
            _report(options.json, done, {"verdict": "interrupted", **about})
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if peers.rank:
        return peers.same_code(None)
    code = int(any(outcome.verdict == WRONG for _, outcome, _ in done))
    about |= {"seconds": round(time.monotonic() - start, 1), "full": options.full}
    _report(options.json, done, {"verdict": WRONG if code else OK, **about})
    return peers.same_code(code)


def _report(path: Path, done: list[report.Done], about: dict[str, Any]) -> None:
    """Write the file and print the table."""
    report.write(path, done, about)
    print(f"\n{report.table(done)}\n\n{report.summary(done)}; {about['seconds']:.0f} s.")
    print(f"Attach {path} to a report.", flush=True)


def _opened(bed: Bed, peers: Alone) -> tuple[Facts, dict[str, Any]]:
    """Open the device of this rank. Raises InputError on all ranks if one rank has none."""
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


def _own(bed: Bed, peers: Alone, facts: Facts, job: Job, first_here: bool) -> Outcome:
    """Run a step on this rank. first_here: this is the first rank of its machine."""
    missing = job.step.missing(facts, job.full)
    if missing is not None:
        return Outcome(ABSENT, words=missing)
    if job.together:
        return bed.run(job, lambda: peers.others_failed(job.index))
    if facts.type == "cpu" and not first_here:
        return Outcome(ABSENT)  # the ranks of a machine have one CPU: one check suffices
    return bed.run(job)


class Alone:
    """The agreement of a single process."""

    rank, world = 0, 1

    def refusal(self, own: str | None) -> str | None:
        """Return the first rank's reason why the check cannot begin; None if all ranks can."""
        return own

    def others_failed(self, index: int) -> str | None:
        """Return the reason to end a step in which another rank failed; None if none did."""
        return None

    def merged(self, index: int, own: Outcome, limit: float) -> list[Outcome]:
        """Return the outcomes of a step, by rank."""
        return [own]

    def same_code(self, code: int | None) -> int:
        """Return rank 0's exit code on every rank; other ranks pass None."""
        assert code is not None
        return code


class Ranks(Alone):
    """The agreement of several ranks through torchrun's store.

    Raises:
        InputError: The store is not torchrun's.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._store = _store()

    def refusal(self, own: str | None) -> str | None:
        self._store.set(f"hello/{self.rank}", own or "")
        keys = [f"hello/{rank}" for rank in range(self.world)]
        if not self._wait(keys, 600):
            return "not all ranks have opened their devices within 600 s; start all of them."
        said = [self._store.get(key).decode() for key in keys]
        return next((sentence for sentence in said if sentence), None)

    def others_failed(self, index: int) -> str | None:
        key = f"failed/{index}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def merged(self, index: int, own: Outcome, limit: float) -> list[Outcome]:
        if own.words and not own.words.startswith(ENDED):  # the others would wait for this rank
            self._store.set(f"failed/{index}", f"{ENDED} rank {self.rank} has")
        self._store.set(f"outcome/{index}/{self.rank}", pickle.dumps(own).hex())
        keys = [f"outcome/{index}/{rank}" for rank in range(self.world)]
        self._wait(keys, max(0.0, limit - own.seconds) + GRACE)
        lost = Outcome(WRONG, words="the rank does not respond; it may be lost")
        return [
            pickle.loads(bytes.fromhex(self._store.get(key).decode()))
            if self._store.check([key])
            else lost
            for key in keys
        ]

    def same_code(self, code: int | None) -> int:
        """Share the code after rank 0 has written its files: torchrun may then end it."""
        if code is not None:
            self._store.set("code", str(code))
            return code
        return int(self._store.get("code")) if self._wait(["code"], GRACE) else 1

    def _wait(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True


def _store() -> Store:
    import torch.distributed as dist

    from wan.distributed import rendezvous

    here = rendezvous.read_rank_env()
    if here.holds_store:
        raise InputError("WORLD_SIZE is set, but there is no torchrun: start with torchrun.")
    store = dist.TCPStore(here.address, here.port, wait_for_workers=False)
    return dist.PrefixStore("check", store)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Merge the outcomes of all ranks: the lines of rank 0 and the worst verdict.

    A line that is wrong only on another rank is added with the number of that rank. A rank that was
    ended because of another rank's failure counts only if that rank reported nothing. An error that
    a collective may have raised because of another rank is shown only if there is no other cause.
    """
    by_itself = [o for o in outcomes if not o.words.startswith(ENDED)] or list(outcomes)
    causes = [o for o in by_itself if o.words and not o.words.startswith(_DOUBTFUL)]
    lines = list(outcomes[0].lines)
    reported = {one.what for one in lines if one.verdict == WRONG}
    for rank, outcome in enumerate(outcomes[1:], 1):
        bad = [one for one in outcome.lines if one.verdict == WRONG and one.what not in reported]
        lines += [replace(one, what=f"rank {rank}: {one.what}") for one in bad]
    cause = next(iter(causes or [o for o in by_itself if o.words]), outcomes[0])
    rank = outcomes.index(cause)
    words = f"rank {rank}: {cause.words}" if rank else cause.words
    verdict = report.worst(outcome.verdict for outcome in by_itself)
    return Outcome(verdict, max(o.seconds for o in outcomes), tuple(lines), words, cause.tail)


if __name__ == "__main__":
    sys.exit(main())
