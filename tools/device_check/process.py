"""Runs each step in a worker process, which may hang, crash or be killed without ending the check.

One worker runs one step after the other. It is replaced after a failed step, and for each
collective step. Its output goes to a file; the end of that file is part of a failed step's report.

A worker receives jobs. For each job it sends the lines of its step as they are measured, and then
an `_End` with the result.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tools.device_check.steps import (
    ABSENT,
    OK,
    WRONG,
    DeviceProperties,
    Job,
    Line,
    Outcome,
    UnavailableError,
    find_worst,
    make_absent,
    make_line,
)
from wan.settings.errors import InputError, is_out_of_memory

REPO = Path(__file__).resolve().parents[2]
START = 300.0  # seconds until a worker has imported torch and opened its device
TRIES = 2  # failed attempts to open a device, after which steps fail at once
_POLL = 0.1
_TAIL = 4000  # characters
_LAST_WORDS = 0.5  # seconds in which a hanging worker writes its stacks


@dataclass(frozen=True)
class _End:
    """The end of a step: OK, or ABSENT or WRONG with a reason."""

    verdict: str
    reason: str = ""


class DeviceError(Exception):
    """The device cannot be opened; the message describes how the worker ended."""


class Worker:
    """A process that holds the device.

    Args:
        kind: Value of --device.
        index: Number of the device on this machine.
        world: Number of ranks.

    Raises:
        InputError: The device is refused.
        DeviceError: The process does not start.
    """

    def __init__(self, kind: str, index: int, world: int) -> None:
        self._written = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)
        self._pipe, theirs = Pipe()
        paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
        program = f"from {__name__} import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=self._written,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that its children are killed with it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        try:
            self._send((kind, index, world))
            deadline = time.monotonic() + START
            while (answer := self._read_answer()) is None:
                if time.monotonic() > deadline:
                    raise self._make_start_error(f"no answer within {START:.0f} s")
            if isinstance(answer, InputError):
                raise answer
            if isinstance(answer, _End):
                raise self._make_start_error(answer.reason)
        except BaseException:
            self.end()
            raise
        self.properties: DeviceProperties = answer[0]
        self.environment: dict[str, Any] = answer[1]

    def run(self, job: Job, stop: Callable[[], str | None]) -> Outcome:
        """Runs a step. The caller must end the worker if the outcome is WRONG.

        Args:
            stop: Polled while the step runs; returns a reason to end the step, or None.
        """
        start, lines = time.monotonic(), list[Line]()

        def make_outcome(end: _End, tail: Callable[[], str]) -> Outcome:
            verdict = (
                end.verdict
                if end.verdict == WRONG
                else find_worst(step_line.verdict for step_line in lines)
            )
            output = tail() if end.verdict == WRONG else ""
            return Outcome(verdict, time.monotonic() - start, tuple(lines), end.reason, output)

        self._send(job)
        while True:
            answer, limit = self._read_answer(), job.step.limit
            if isinstance(answer, Line):
                lines.append(answer)
            elif answer is not None:
                return make_outcome(answer, self._read_tail)
            elif (why := stop()) is not None:
                return make_outcome(_End(WRONG, why), self._read_stacks)
            elif time.monotonic() - start > limit:
                return make_outcome(
                    _End(WRONG, f"it did not end within {limit:g} s"), self._read_stacks
                )

    def end(self) -> None:
        """Kills the worker and its children; does not wait for one that is stuck in the driver."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._pipe.close()
        self._written.close()

    def _send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # an ended worker is detected on reading
            self._pipe.send(message)

    def _read_answer(self) -> Any:
        """Reads the next message: an `_End` if the process ended, None without a message."""
        alive = self._process.poll() is None
        with contextlib.suppress(EOFError, ConnectionError):
            if self._pipe.poll(_POLL):
                return self._pipe.recv()
            if alive:
                return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.returncode
        if code is not None and code < 0:
            return _End(WRONG, f"its process was ended by {signal.Signals(-code).name}")
        return _End(WRONG, f"its process ended with exit code {code}")

    def _make_start_error(self, why: str) -> DeviceError:
        return DeviceError(f"the device's process did not start: {why}\n{self._read_tail()}")

    def _read_stacks(self) -> str:
        """Returns the output with all threads' stacks, which faulthandler writes even in a hang."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_LAST_WORDS)
        return self._read_tail()

    def _read_tail(self) -> str:
        self._written.seek(0)
        return self._written.read().decode(errors="replace")[-_TAIL:]


class WorkerKeeper:
    """Reuses a worker until a step fails. A context manager; takes the arguments of `Worker`."""

    def __init__(self, *worker_arguments: Any) -> None:
        self._worker_arguments, self._failures = worker_arguments, 0
        self._worker: Worker | None = None

    def __enter__(self) -> WorkerKeeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_worker()

    def get_worker(self) -> Worker:
        """Returns the worker; starts one if there is none."""
        if self._failures >= TRIES:
            raise DeviceError(f"the device could not be opened {TRIES} times in a row")
        if self._worker is None:
            self._failures += 1
            self._worker = Worker(*self._worker_arguments)
            self._failures = 0
        return self._worker

    def end_worker(self) -> None:
        """Ends the worker, so that the next step gets a new one."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def run(self, job: Job, stop: Callable[[], str | None] = lambda: None) -> Outcome:
        """Runs a step; a collective step runs in a new process."""
        if job.is_collective:
            self.end_worker()
        try:
            return self.get_worker().run(job, stop)
        except (InputError, DeviceError) as error:
            reason, _, tail = str(error).partition("\n")
            return Outcome(WRONG, 0.0, (), reason, tail)


def serve(fd: int) -> None:
    """Runs the worker: opens the device and runs jobs until the supervising process ends."""
    faulthandler.enable()  # a crash writes its stack
    faulthandler.register(signal.SIGUSR1)
    pipe, jobs = Connection(fd), queue.Queue[Any]()
    threading.Thread(target=_read_jobs, args=(pipe, jobs), daemon=True).start()
    kind, index, world = jobs.get()
    import torch

    from tools.device_check import bench, machine
    from wan.device import select_device

    try:
        device = select_device(kind, index)
    except InputError as error:
        pipe.send(InputError(str(error)))
        return
    torch.set_grad_enabled(False)
    pipe.send((bench.describe_device(device, world), machine.describe_machine(device)))
    while True:
        job: Job = jobs.get()
        module, _, function = job.step.work.partition(":")
        module = module if "." in module else f"{__package__}.{module}"
        end = _End(OK)
        try:
            step_bench = bench.make_bench(device, job)
            for measurement in getattr(importlib.import_module(module), function)(step_bench):
                pipe.send(
                    measurement if isinstance(measurement, Line) else _measure_line(*measurement)
                )
        except (UnavailableError, InputError) as error:
            end = _End(ABSENT, str(error))
        except BaseException as error:
            traceback.print_exc()
            end = _End(ABSENT if is_out_of_memory(error) else WRONG, _describe_failure(error))
        pipe.send(end)
        gc.collect()
        device.empty_cache()


def _read_jobs(pipe: Connection, jobs: queue.Queue[Any]) -> None:
    """Reads jobs into a queue; ends this process when the supervising process has ended."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            jobs.put(pipe.recv())
    os._exit(0)


def _measure_line(label: str, measure: Callable[[], Any]) -> Line:
    """Runs one measurement of a step; an error becomes its line, so that the others still run."""
    try:
        return make_line(label, *measure())
    except (UnavailableError, InputError) as reason:
        return make_absent(label, str(reason))
    except Exception as failure:  # the report lists errors of kernels
        if is_out_of_memory(failure):
            return make_absent(label, "out of memory")
        return Line(label, WRONG, (), _describe_failure(failure))


def _describe_failure(failure: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    first = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {first[0][:300]}" if first else type(failure).__name__
