"""Run an earlier commit and this working tree on the same requests: is every result bit-equal?

    python tools/compare_versions.py --base 606a441 [--only fp8] [--jobs 2] [--json report.json]

Both run every case of version_cases.py on the same tiny checkpoints, which the earlier one makes;
the denoised latents and the frames of the mp4 are compared. Exit codes: 0 all equal (or named in
MAY_DIFFER), 1 not, 2 refused, 130 interrupted.

What no version brings (torch, diffusers, transformers) is imported once. Every rank is a fork of
this process with the variables that torchrun would set, and imports `wan` from its own tree.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

REPO = Path(__file__).resolve().parents[1]
if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(REPO))

from tools.version_cases import CASES, FIXTURES, MAY_DIFFER, Case  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

SIMULATED_NPU = Path(sys.prefix) / "npu_sim"  # of `make test-npu`
TIME_LIMIT = 600  # seconds of a rank, which then ends with -14 (SIGALRM)
LIBRARIES = (
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "diffusers.models.transformers.transformer_wan",
    "diffusers.schedulers.scheduling_dpmsolver_multistep",
    "diffusers.schedulers.scheduling_unipc_multistep",
    "ftfy",
    "imageio_ffmpeg",
    "safetensors.torch",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.umt5.modeling_umt5",
)


class RefusedError(Exception):
    """Why nothing is compared, in one sentence."""


@dataclass(frozen=True)
class Outcome:
    """A case that was run in both trees. result: equal, different, named (may differ), failed."""

    name: str
    result: str
    detail: str
    seconds: float
    command: str

    def __str__(self) -> str:
        return f"{self.name:<32} {self.seconds:5.1f} s  {self.result}  {self.detail}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True, help="the earlier commit")
    parser.add_argument("--only", default="", help="run the cases with this in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time")
    parser.add_argument("--keep", type=Path, help="a new folder for all results and checkpoints")
    parser.add_argument("--json", type=Path, help="also write the outcomes, with their commands")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    try:
        cases = _chosen(options.only)
        versions = {"base": _git("rev-parse", f"{options.base}^{{commit}}")}
        versions["present"] = _git("describe", "--always", "--dirty")
        with _workplace(versions["base"], options.keep) as folder:
            outcomes = compare_all(cases, max(options.jobs, 1), folder)
    except (RefusedError, OSError) as error:
        print(f"compare_versions.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare_versions.py: interrupted.", file=sys.stderr)
        return 130
    counts = Counter(outcome.result for outcome in outcomes)
    seconds = round(time.monotonic() - started)
    words = (f"{counts[result]} {result}" for result in ("equal", "named", "different", "failed"))
    print(f"{len(outcomes)} cases: {', '.join(words)}; {seconds} s.")
    if options.json:
        report = {**versions, "seconds": seconds, "cases": [asdict(o) for o in outcomes]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["different"] or counts["failed"] else 0


def _chosen(only: str) -> list[Case]:
    cases = [case for case in CASES if only in case.name]
    if not SIMULATED_NPU.is_dir():
        print(f"Without {SIMULATED_NPU} (make test-npu) the cases of simulated NPUs are left out.")
        cases = [case for case in cases if not case.on_simulated_npu]
    if not cases:
        raise RefusedError(f"no case has {only!r} in its name")
    return cases


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", REPO, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RefusedError(f"git {' '.join(arguments)}: {done.stderr.strip().splitlines()[0]}")
    return done.stdout.strip()


@contextmanager
def _workplace(base: str, keep: Path | None) -> Iterator[Path]:
    """A folder, with the earlier version in `tree` until the end; removed if not to be kept."""
    if keep:
        keep.mkdir(parents=True)
    folder = keep.resolve() if keep else Path(tempfile.mkdtemp(prefix="wan-versions-"))
    tree = folder / "tree"
    try:
        for side in ("made", "base", "present"):
            (folder / side).mkdir()
        _git("worktree", "add", "--detach", str(tree), base)
        yield folder
    finally:
        if tree.exists():
            _git("worktree", "remove", "--force", str(tree))
        if keep is None:
            shutil.rmtree(folder)


def compare_all(cases: Sequence[Case], jobs: int, folder: Path) -> list[Outcome]:
    """Make the fixtures and run the cases; each outcome is printed when it is known."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # what can be forked
    for library in LIBRARIES:
        import_module(library)
    gc.freeze()  # what is imported stays: no rank need look through it

    def make(fixture: Case) -> None:
        if failure := play(fixture, folder, "made"):
            sys.exit(f"{fixture.name}: {failure}")

    def run(case: Case) -> None:
        outcome = compare(case, folder)
        print(outcome, flush=True)
        (folder / f"{case.name}.outcome").write_text(json.dumps(asdict(outcome)))

    def read(case: Case) -> Outcome:
        file = folder / f"{case.name}.outcome"
        if not file.exists():
            return Outcome(case.name, "failed", "the comparing process was lost", 0, case.command)
        return Outcome(**json.loads(file.read_text()))

    with_npu = any(case.on_simulated_npu for case in cases)
    for stage in FIXTURES:
        needed = [fixture for fixture in stage if with_npu or not fixture.on_simulated_npu]
        if missing := run_all(needed, jobs, make):
            raise RefusedError(f"the base did not make {', '.join(missing)}")
    run_all(cases, jobs, run)
    return [read(case) for case in cases]


def compare(case: Case, folder: Path) -> Outcome:
    """Run a case in the earlier tree, then in this one."""
    started = time.monotonic()
    failures = list(filter(None, (play(case, folder, side) for side in ("base", "present"))))
    base, present = (folder / side / case.name for side in ("base", "present"))
    detail = "; ".join(failures or differences(base, present))
    result = "failed" if failures else "different" if detail else "equal"
    if result == "different" and case.name in MAY_DIFFER:
        result, detail = "named", f"{MAY_DIFFER[case.name]}: {detail}"
    seconds = round(time.monotonic() - started, 1)
    return Outcome(case.name, result, detail, seconds, case.typed(_paths(case, folder, "present")))


def differences(base: Path, present: Path) -> Iterator[str]:
    """What differs between the results of two runs, given their paths without a suffix."""
    import torch

    kinds = 0
    for what, read in (("latents", _latents), ("frames", _frames)):
        a, b = read(base), read(present)
        if a is None and b is None:
            continue
        kinds += 1
        if a is None or b is None:
            yield f"{what} only in {'present' if a is None else 'base'}"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{what} were {a.dtype} {[*a.shape]}, are {b.dtype} {[*b.shape]}"
        elif not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            yield f"{what} differ by up to {(a.double() - b.double()).abs().max().item():.2g}"
        elif not a.isfinite().all():
            yield f"{what} hold NaN or infinity in both"
    if not kinds:
        yield "neither wrote a result"


def _latents(out: Path) -> Tensor | None:
    from safetensors.torch import load_file

    path = Path(f"{out}.latents.safetensors")
    return load_file(path)["latents"] if path.is_file() else None


def _frames(out: Path) -> Tensor | None:
    import numpy as np
    import torch

    from tools.contact_sheet import read_frames

    path = Path(f"{out}.mp4")
    if not path.is_file():
        return None
    return torch.from_numpy(np.stack([np.asarray(frame) for frame in read_frames(path)]))


def _paths(case: Case, folder: Path, side: str) -> dict[str, Path]:
    """side: "base", "present", or "made" for a fixture, which the earlier version makes."""
    fixed = {"base": folder / "tree", "made": folder / "made", "npu_sim": SIMULATED_NPU}
    return {**fixed, "repo": REPO, "out": folder / side / case.name}


def play(case: Case, folder: Path, side: str) -> str:
    """Run a case on all its ranks. Empty, or how it failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = Path(f"{_paths(case, folder, side)['out']}.log")
    pids = [fork(partial(_rank, case, folder, side, i, port, log)) for i in range(case.ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if not any(codes):
        return ""
    said = log.read_text(errors="replace").splitlines()[-15:]
    return "\n  ".join([f"{side} ended with {', '.join(map(str, codes))}:", *said])


def _rank(case: Case, folder: Path, side: str, rank: int, port: int, log: Path) -> None:
    paths = _paths(case, folder, side)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    signal.alarm(TIME_LIMIT)
    variables = case.variables(paths)
    os.environ |= variables
    if case.ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    tree = REPO if side == "present" else paths["base"]
    others = [entry for entry in sys.path if entry not in (str(REPO), str(REPO / "tools"))]
    sys.path[:] = [str(tree), *filter(None, variables.get("PYTHONPATH", "").split(":")), *others]
    del sys.modules["tools"]  # to be found again, in that tree
    import wan

    if not Path(wan.__file__).is_relative_to(tree):
        sys.exit(f"wan was imported from {wan.__file__}, not from {tree}")
    os.chdir(folder)  # where no real checkpoint is found by its name
    script, *sys.argv[1:] = case.words(paths)
    if script == "-c":
        exec(sys.argv[1], {"__name__": "__main__"})
    else:
        runpy.run_path(str(tree / script), run_name="__main__")


def fork(work: Callable[[], object]) -> int:
    """The id of a new process that does the work and ends: with 0, or with 1 if that fails."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # nobody above could catch it: that is the other process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_all(cases: Sequence[Case], jobs: int, work: Callable[[Case], object]) -> list[str]:
    """work(case) for all, `jobs` at a time, each in a process group of its own.

    Returns the names of those that failed. Whatever ends this early, no process is left over.
    """
    waiting, running, failed = list(cases)[::-1], dict[int, Case](), []
    try:
        while waiting or running:
            if waiting and len(running) < jobs:
                case = waiting.pop()
                running[fork(partial(_in_own_group, work, case))] = case
            else:
                pid, status = os.wait()
                case = running.pop(pid)
                failed += [case.name] if status else []
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # first, as it may have no group yet
                os.killpg(pid, signal.SIGKILL)
    return failed


def _in_own_group(work: Callable[[Case], object], case: Case) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the first process only, which ends the others
    work(case)


if __name__ == "__main__":
    sys.exit(main())
