"""Real ranks for tests: pools of processes that stay up, ranks started one by one, and torchrun.

All ranks except torchrun's are forked from a server that only imports modules (not from pytest's
process, whose OpenMP threads a fork would lose) and use one thread each. The server itself is
forked from pytest's process before the first test, so that modules are imported once. Every call
has a time limit. On any error the output of every rank is shown and the ranks are killed.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import itertools
import multiprocessing as mp
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

REPO = Path(__file__).parents[1]
GENERATE = str(REPO / "generate.py")
_PATHS = (str(REPO), *filter(None, [os.environ.get("PYTHONPATH")]))  # that of simulated NPUs, too
TORCHRUN = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_PATHS)}
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])
_POOLS: dict[int, Pool] = {}
_PORT_LOCKS: list[IO[str]] = []


def fork_server() -> None:
    """Starts multiprocessing's fork server as a fork of this process.

    multiprocessing starts a new interpreter, which takes seconds to import torch and diffusers.
    """

    def fork(_: object, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not those of pytest's capture
            _close_write_end(descriptors[-1])
            exec(arguments[-1])  # `python -c`: the server's loop
        finally:
            os._exit(0)

    resource_tracker.ensure_running()  # an interpreter of its own
    with patch("multiprocessing.util.spawnv_passfds", fork):
        forkserver.ensure_running()


def _close_write_end(read_end: int) -> None:
    """Closes the other end of a pipe, whose closing by pytest's process ends the server."""
    pipe = os.fstat(read_end).st_ino
    for descriptor in range(3, os.sysconf("SC_OPEN_MAX")):
        with suppress(OSError):
            if descriptor != read_end and os.fstat(descriptor).st_ino == pipe:
                os.close(descriptor)
                return


def run_on_ranks(
    world: int, work: Callable[..., Any], *args: Any, timeout: float = 120
) -> list[Any]:
    """Calls work(*args) on every rank of a pool and returns the results by rank.

    The pool is started on first use. work must be importable by name. Raises AssertionError with
    all tracebacks.
    """
    if world not in _POOLS:
        _POOLS[world] = Pool(world)
    try:
        return _POOLS[world].run(work, args, timeout)
    except BaseException:
        _POOLS.pop(world).kill()
        raise


class Pool:
    """`world` processes that form a gloo group during each call."""

    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="wan-store-")
        store = f"{self._folder.name}/store"
        ends = [_CONTEXT.Pipe() for _ in range(world)]
        self.pipes = [parent_end for parent_end, _ in ends]
        self.ranks = [
            _CONTEXT.Process(target=_serve_pool, args=(child_end, rank, world, store), daemon=True)
            for rank, (_, child_end) in enumerate(ends)
        ]
        for process in self.ranks:
            process.start()

    def run(self, work: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((work, args))
        deadline = time.monotonic() + timeout
        answers: list[Any] = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0.1)):
                answers.append((False, f"no answer after {timeout} s"))
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:
                self.ranks[rank].join(5)
                answers.append((False, f"the process ended: {self.ranks[rank].exitcode}"))
        failed = [f"--- rank {i}\n{text}" for i, (ok, text) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
        self._folder.cleanup()


def _serve_pool(pipe: Any, rank: int, world: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for number in itertools.count():
        try:
            work, args = pipe.recv()
        except EOFError:
            os._exit(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}{number}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()  # all are connected before one may be done
        try:
            answer = True, work(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        else:  # a group that is not destroyed keeps a polling thread of gloo
            dist.destroy_process_group()
            gc.collect()
        pipe.send(answer)


@atexit.register
def _kill_pools() -> None:
    for pool in _POOLS.values():
        pool.kill()


class Ranks:
    """Processes that call `work(*args)` with a launcher's environment variables; their output.

    work must be importable by name; its return value is the exit code.
    """

    def __init__(
        self, variables: Sequence[Mapping[str, str]], work: Callable[..., int], *args: Any
    ) -> None:
        self.texts = [""] * len(variables)
        self._output_changed = threading.Condition()
        self.processes: list[Any] = []
        self._readers: list[threading.Thread] = []
        for rank, environ in enumerate(variables):
            read_end, write_end = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run_rank, args=(write_end, dict(environ), work, args)
            )
            process.start()
            write_end.close()
            reader = threading.Thread(target=self._read, args=(rank, read_end), daemon=True)
            reader.start()
            self.processes.append(process)
            self._readers.append(reader)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()

    def wait_for_output(self, rank: int, word: str, timeout: float = 60) -> None:
        """Waits until the output of a rank contains a word."""
        with self._output_changed:
            assert self._output_changed.wait_for(lambda: word in self.texts[rank], timeout), (
                self.format_outputs()
            )

    def wait_for_exit(self, timeout: float = 60) -> list[int]:
        """Waits until all have ended; returns the exit codes (negative: killed by that signal)."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.1))
        for reader in self._readers:  # the last process that writes has ended
            reader.join(max(deadline - time.monotonic(), 0.1))
        codes = [process.exitcode for process in self.processes]
        running = None in codes or any(reader.is_alive() for reader in self._readers)
        assert not running, f"still running after {timeout} s\n{self.format_outputs()}"
        # gloo of torch 2.8 reports its links on the standard output.
        self.texts = [re.sub(r"(?m)^\[Gloo\] .*\n", "", text) for text in self.texts]
        return codes

    def lines(self, prefix: str = "generate.py: ") -> list[str]:
        """Returns the lines that start with `prefix`, without it, ordered by rank."""
        return [
            line.removeprefix(prefix)
            for text in self.texts
            for line in text.splitlines()
            if line.startswith(prefix)
        ]

    def format_outputs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(self.texts))

    def _read(self, rank: int, pipe: Any) -> None:
        while part := os.read(pipe.fileno(), 1 << 16):
            with self._output_changed:
                self.texts[rank] += part.decode(errors="replace")
                self._output_changed.notify_all()


def make_rank_envs(world: int, **more: str) -> list[dict[str, str]]:
    """Returns the environment variables of each rank, as a launcher on one machine sets them."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [{**common, "RANK": str(r), "LOCAL_RANK": str(r), **more} for r in range(world)]


def free_port() -> str:
    """Returns a port that no other test uses while this process lives.

    It is below those that the system gives to connections, and its lock file is kept open.
    """
    folder = Path(tempfile.gettempdir()) / "wan-ports"
    folder.mkdir(exist_ok=True)
    for port in range(20_000, 32_000):
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _PORT_LOCKS.append(lock)
        return str(port)
    raise OSError("all ports of the tests are used")


def _run_rank(pipe: Any, environ: dict[str, str], work: Callable[..., int], args: Any) -> None:
    import torch

    for stream in (1, 2):
        os.dup2(pipe.fileno(), stream)
    pipe.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (of a pipe, no file to seek in)
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.exit(work(*args))


def exec_torchrun(*argv: object) -> int:
    """Runs torchrun's agent as the work of `Ranks`; its ranks share its output."""
    os.execv(sys.executable, _make_torchrun_command(argv))


def torchrun(ranks: int, *argv: object, timeout: float = 180, **env: str) -> Any:
    """Runs generate.py under torchrun; returns the finished process, with text output."""
    options = ["--standalone", f"--nproc_per_node={ranks}", GENERATE]
    try:
        return subprocess.run(
            _make_torchrun_command([*options, *argv]),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=REPO,
            env={**os.environ, **TORCHRUN, **env},
        )
    except subprocess.TimeoutExpired as late:
        outputs = [(out or b"").decode(errors="replace") for out in (late.stdout, late.stderr)]
        raise AssertionError(f"still running after {timeout} s\n" + "\n".join(outputs)) from None


def _make_torchrun_command(argv: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *map(str, argv)]
