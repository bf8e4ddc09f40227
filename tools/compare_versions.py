"""Runs an earlier commit and this working tree on the same requests; compares results bit by bit.

    python tools/compare_versions.py --base 0d6978b7 --keep base_results [--only fp8] [--jobs 2]

Both versions run the cases of version_cases.py on the same tiny checkpoints, which the base makes;
all latents and frames that a case writes are compared. The base's code is exported into the folder
of --keep, together with its checkpoints and results. Later comparisons with the same folder reuse
them, also while the first one is still running, and an interrupted comparison resumes. --base_only
makes the base's results and compares nothing.

Exit codes: 0 all equal (or listed in MAY_DIFFER), 1 not, 2 refused, 130 interrupted.

The libraries (torch, diffusers, transformers) are imported once. Every rank is a fork of this
process with torchrun's variables, and imports `wan` from the tree of its version.
"""

from __future__ import annotations

import fcntl
import gc
import io
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

REPO = Path(__file__).resolve().parents[1]
if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(REPO))

from tools.make_cases import Case  # noqa: E402
from tools.version_cases import CASES, FIXTURES, MAY_DIFFER  # noqa: E402
from wan.app.flag_parser import Parser  # noqa: E402
from wan.app.programs import (  # noqa: E402
    make_argument_type,
    make_output_path_type,
    run_program,
)
from wan.settings.errors import InputError, WriteError, get_exit_code  # noqa: E402
from wan.settings.values import integer, read_path  # noqa: E402
from wan.utils.files import OutputKind, make_json_kind, remove_output, write_folder, write_output  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

SIMULATED_NPU = Path(sys.prefix) / "npu_sim"  # of `make test-npu`
TIME_LIMIT = 600  # seconds of a rank, which then ends with -14 (SIGALRM)
LIBRARIES = (
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "diffusers.models.transformers.transformer_wan",
    "diffusers.pipelines.wan.pipeline_wan",
    "diffusers.pipelines.wan.pipeline_wan_i2v",
    "diffusers.schedulers.scheduling_dpmsolver_multistep",
    "diffusers.schedulers.scheduling_unipc_multistep",
    "ftfy",
    "imageio_ffmpeg",
    "safetensors.torch",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.umt5.modeling_umt5",
)

OUTCOMES = make_json_kind("outcomes of compare_versions.py", "base", "present", "seconds", "cases")
_CASE = make_json_kind("a case of compare_versions.py", "name", "command")
_COMMIT = OutputKind(
    "a commit of compare_versions.py",
    lambda file: re.fullmatch(r"[0-9a-f]{40}", file.read_text()) is not None,
)
_LOCK = "commit.lock"


@dataclass(frozen=True)
class Folders:
    """Folders of the two versions.

    Attributes:
        base: Has the export of the earlier commit (`tree`), its checkpoints (`made`) and its
            results (`base`).
        present: Has the results of this working tree; removed at the end.
    """

    base: Path
    present: Path

    def get_results_folder(self, case: Case, side: str) -> Path:
        """Returns a case's folder. side: "base", "present", or "made" for a fixture."""
        return (self.present if side == "present" else self.base) / side / case.name

    def make_paths(self, case: Case, side: str) -> dict[str, Path]:
        """Returns the paths that a case's command may refer to, by variable."""
        fixed = {"base": self.base / "tree", "made": self.base / "made", "npu_sim": SIMULATED_NPU}
        return {**fixed, "out": self.get_results_folder(case, side) / "out"}


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        result: "equal", "different", "named" (different, with a reason in MAY_DIFFER), "failed", or
            "made" if only the base ran it.
    """

    name: str
    result: str
    detail: str
    seconds: float
    command: str

    def __str__(self) -> str:
        return f"{self.name:<32} {self.seconds:5.1f} s  {self.result}  {self.detail}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True, help="the earlier commit")
    parser.add_argument("--only", default="", help="run the cases whose name matches this regex")
    parser.add_argument(
        "--jobs",
        type=make_argument_type(integer(1, 1000)),
        default=os.cpu_count(),
        help="cases at a time",
    )
    parser.add_argument(
        "--keep", type=make_argument_type(read_path), help="folder that keeps the base's results"
    )
    parser.add_argument("--base_only", action="store_true", help="make the base's results only")
    parser.add_argument(
        "--json",
        type=make_output_path_type(OUTCOMES),
        help="also write the outcomes, with their commands",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    try:
        options = parser.parse_args(argv)
        cases = _choose_cases(options.only)
        versions = {"base": _run_git("rev-parse", f"{options.base}^{{commit}}")}
        versions["present"] = _run_git("describe", "--always", "--dirty")
        with TemporaryDirectory(prefix="wan-versions-") as temporary:
            base = options.keep or Path(temporary, "kept")
            folders = Folders(base.resolve(), Path(temporary, "new"))
            export_commit(versions["base"], folders.base)
            outcomes = run_cases(cases, options.jobs, folders, options.base_only)
    except (InputError, OSError) as error:
        print(f"compare_versions.py: {error}", file=sys.stderr)
        return get_exit_code(error) if isinstance(error, WriteError) else 2
    except KeyboardInterrupt:
        print("compare_versions.py: interrupted.", file=sys.stderr)
        return 130
    counts = Counter(outcome.result for outcome in outcomes)
    seconds = round(time.monotonic() - started)
    parts = (f"{counts[result]} {result}" for result in sorted(counts))
    print(f"{len(outcomes)} cases: {', '.join(parts)}; {seconds} s.")
    if options.json:
        report = {**versions, "seconds": seconds, "cases": [asdict(o) for o in outcomes]}
        with write_output(options.json, OUTCOMES) as temporary:
            temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["different"] or counts["failed"] else 0


def _choose_cases(only: str) -> list[Case]:
    try:
        cases = [case for case in CASES if re.search(only, case.name)]
    except re.error as error:
        raise InputError(f"--only {only!r} is no regular expression ({error})") from error
    if not SIMULATED_NPU.is_dir():
        print(f"Without {SIMULATED_NPU} (make test-npu) the cases of simulated NPUs are left out.")
        cases = [case for case in cases if not case.on_simulated_npu]
    if not cases:
        raise InputError(f"no case's name matches {only!r}")
    return cases


def _run_git(*arguments: str) -> str:
    process = subprocess.run(["git", "-C", REPO, *arguments], capture_output=True, text=True)
    if process.returncode:
        raise InputError(f"git {' '.join(arguments)}: {process.stderr.strip().splitlines()[0]}")
    return process.stdout.strip()


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def export_commit(commit: str, folder: Path) -> None:
    """Writes the code of a commit into `tree` of a folder, unless it exists.

    Raises:
        InputError: The folder has another commit's results, or other files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    commit_file = folder / "commit"
    if not commit_file.is_file() and (
        foreign_files := [
            entry.name for entry in folder.iterdir() if entry.name not in (_LOCK, "tree")
        ]
    ):
        raise InputError(f"{folder} has files of another program, such as {foreign_files[0]}")
    with _lock_file(folder / _LOCK):
        if not commit_file.is_file():
            command = ["git", "-C", str(REPO), "archive", commit]
            archive = subprocess.run(command, capture_output=True, check=True).stdout
            with (
                write_folder(folder / "tree") as tree,
                tarfile.open(fileobj=io.BytesIO(archive)) as files,
            ):
                files.extractall(tree, filter="data")
            with write_output(commit_file, _COMMIT) as temporary:
                temporary.write_text(commit)
        elif commit_file.read_text() != commit:
            raise InputError(
                f"{folder} holds the results of {commit_file.read_text()}, not {commit}"
            )


def run_cases(
    cases: Sequence[Case], jobs: int, folders: Folders, base_only: bool = False
) -> list[Outcome]:
    """Makes the fixtures and runs the cases; prints each outcome as it arrives."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # so that forks work
    for library in LIBRARIES:
        import_module(library)
    gc.freeze()  # imported objects stay: the ranks' collections skip them
    for folder in (folders.base / "made", folders.base / "base", folders.present / "present"):
        folder.mkdir(parents=True, exist_ok=True)

    def make_fixture(fixture: Case) -> None:
        if failure := run_base_case(fixture, folders, "made"):
            sys.exit(f"{fixture.name}: {failure}")

    def outcome_file(case: Case) -> Path:
        return folders.present / f"{case.name}.outcome"

    def run_case(case: Case) -> None:
        outcome = compare_case(case, folders, base_only)
        print(outcome, flush=True)
        outcome_file(case).write_text(json.dumps(asdict(outcome)))

    def read_outcome(case: Case) -> Outcome:
        if not outcome_file(case).exists():
            return Outcome(case.name, "failed", "the comparing process was lost", 0, case.command)
        return Outcome(**json.loads(outcome_file(case).read_text()))

    with_npu = any(case.on_simulated_npu for case in cases)
    for stage in FIXTURES:
        needed = [fixture for fixture in stage if with_npu or not fixture.on_simulated_npu]
        if missing := run_in_processes(needed, jobs, make_fixture):
            raise InputError(f"the base did not make {', '.join(missing)}")
    run_in_processes(cases, jobs, run_case)
    return [read_outcome(case) for case in cases]


def compare_case(case: Case, folders: Folders, base_only: bool = False) -> Outcome:
    """Runs a case in the base's tree unless it has results, then in this one; compares them."""
    started = time.monotonic()
    failures = [run_base_case(case, folders, "base")]
    side, result, detail = "base", "made", ""
    if not base_only:
        side, result = "present", "equal"
        failures.append(run_on_ranks(case, folders, side))
        detail = "; ".join(
            find_differences(
                folders.get_results_folder(case, "base"), folders.get_results_folder(case, side)
            )
        )
    if any(failures):
        result, detail = "failed", "; ".join(filter(None, failures))
    elif detail:
        result = "different"
        if case.name in MAY_DIFFER:
            result, detail = "named", f"{MAY_DIFFER[case.name]}: {detail}"
    seconds = round(time.monotonic() - started, 1)
    return Outcome(
        case.name, result, detail, seconds, case.format_command(folders.make_paths(case, side))
    )


def find_differences(base: Path, present: Path) -> Iterator[str]:
    """Yields the differences between the latents and videos in two folders."""
    import torch

    files = {
        file.relative_to(folder)
        for folder in (base, present)
        for file in folder.rglob("*")
        if file.suffix in (".safetensors", ".mp4")
    }
    if not files:
        yield "neither wrote a result"
    for file in sorted(files):
        both = [_load_tensors(folder / file) for folder in (base, present)]
        for name in sorted(both[0].keys() | both[1].keys()):
            label = f"{name} of {file}"
            a, b = (tensors.get(name) for tensors in both)
            if a is None or b is None:
                yield f"{label} only in {'present' if a is None else 'base'}"
            elif (a.shape, a.dtype) != (b.shape, b.dtype):
                yield f"{label} were {a.dtype} {[*a.shape]}, are {b.dtype} {[*b.shape]}"
            elif not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                most = (a.double() - b.double()).abs().max().item()
                yield f"{label} differ by up to {most:.2g}"
            elif not a.isfinite().all():
                yield f"{label} hold NaN or infinity in both"


def _load_tensors(path: Path) -> dict[str, Tensor]:
    """Loads the tensors of a latents file or the frames of a video; {} without a file."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from tools.contact_sheet import read_frames

    if not path.is_file():
        return {}
    if path.suffix == ".safetensors":
        return load_file(path)
    return {
        "frames": torch.from_numpy(np.stack([np.asarray(frame) for frame in read_frames(path)]))
    }


def run_base_case(case: Case, folders: Folders, side: str) -> str:
    """Runs a case of the base unless an earlier comparison did; returns its error or ""."""
    folder = folders.get_results_folder(case, side)
    marker = folder.with_name(f"{case.name}.json")  # has the command that made the results
    with _lock_file(folder.with_name(f"{case.name}.lock")):
        if marker.is_file() and json.loads(marker.read_text()) == asdict(case):
            return ""
        remove_output(marker, _CASE)
        failure = run_on_ranks(case, folders, side)
        if not failure:
            with write_output(marker, _CASE) as temporary:
                temporary.write_text(json.dumps(asdict(case)))
    return failure


def run_on_ranks(case: Case, folders: Folders, side: str) -> str:
    """Runs a case on all its ranks; returns its error or ""."""
    folder = folders.get_results_folder(case, side)
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    folder.mkdir()
    log = folder.with_name(f"{case.name}.log")
    log.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = [
        fork_process(partial(_run_rank, case, folders, side, i, port, log))
        for i in range(case.ranks)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if not any(codes):
        return ""
    log_lines = log.read_text(errors="replace").splitlines()[-15:]
    return "\n  ".join([f"{side} ended with {', '.join(map(str, codes))}:", *log_lines])


def _run_rank(case: Case, folders: Folders, side: str, rank: int, port: int, log: Path) -> None:
    names = folders.make_paths(case, side)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    signal.alarm(TIME_LIMIT)
    variables = case.make_variables(names)
    os.environ |= variables
    if case.ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    tree = REPO if side == "present" else names["base"]
    other_paths = [entry for entry in sys.path if entry not in (str(REPO), str(REPO / "tools"))]
    sys.path[:] = [
        str(tree),
        *filter(None, variables.get("PYTHONPATH", "").split(":")),
        *other_paths,
    ]
    for name in [name for name in sys.modules if name.split(".")[0] == "wan" or name == "tools"]:
        del sys.modules[name]  # to import it from that tree
    import wan

    if not Path(wan.__file__).is_relative_to(tree):
        sys.exit(f"wan was imported from {wan.__file__}, not from {tree}")
    os.chdir(
        folders.get_results_folder(case, side).parent
    )  # has no real checkpoint under a default name
    script, *sys.argv[1:] = case.split_command(names)
    if script == "-c":
        exec(sys.argv[1], {"__name__": "__main__"})
    else:
        runpy.run_path(str(tree / script), run_name="__main__")


def fork_process(work: Callable[[], object]) -> int:
    """Calls `work` in a forked process and returns its id; its exit code is 0, or 1 on errors."""
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
    except BaseException:  # callers of the fork belong to the parent process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_in_processes(cases: Sequence[Case], jobs: int, work: Callable[[Case], object]) -> list[str]:
    """Calls work(case) for all cases, `jobs` at a time, each in a separate process group.

    Returns the names of the failed cases. All processes are killed if this ends early.
    """
    waiting, running, failed = list(cases)[::-1], dict[int, Case](), []
    try:
        while waiting or running:
            if waiting and len(running) < jobs:
                case = waiting.pop()
                running[fork_process(partial(_run_in_process_group, work, case))] = case
            else:
                pid, status = os.wait()
                case = running.pop(pid)
                failed += [case.name] if status else []
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # first, since its group may not exist yet
                os.killpg(pid, signal.SIGKILL)
    return failed


def _run_in_process_group(work: Callable[[Case], object], case: Case) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches only the parent, which ends the others
    work(case)


if __name__ == "__main__":
    sys.exit(run_program(main))
