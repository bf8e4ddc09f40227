"""Real gloo ranks for tests: pools of processes that stay up, and torchrun.

A pool's ranks are forked from a server that only ever imports (never from pytest's own process,
whose OpenMP threads a fork would lose), use one thread each and are joined in one process group.
Every call has a time limit; whatever goes wrong, every rank's traceback is shown and the pool goes.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])
_POOLS: dict[int, Pool] = {}


def run(world: int, work: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """work(*args) on every rank of a pool, which is started when first needed; results by rank.

    work must be importable by name. Raises AssertionError with all tracebacks.
    """
    if world not in _POOLS:
        _POOLS[world] = Pool(world)
    try:
        return _POOLS[world].run(work, args, timeout)
    except BaseException:
        _POOLS.pop(world).kill()
        raise


class Pool:
    """`world` processes in one gloo group."""

    def __init__(self, world: int) -> None:
        store = tempfile.mktemp(prefix="wan-store-")
        ends = [_CONTEXT.Pipe() for _ in range(world)]
        self.pipes = [ours for ours, _ in ends]
        self.ranks = [
            _CONTEXT.Process(target=_serve, args=(theirs, rank, world, store), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
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


def _serve(pipe: Any, rank: int, world: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, work(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@atexit.register
def _close() -> None:
    for pool in _POOLS.values():
        pool.kill()


def torchrun(ranks: int, *argv: object, timeout: float = 180, **env: str) -> Any:
    """generate.py under torchrun; the finished process, with text output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(REPO / "generate.py"), *map(str, argv)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
