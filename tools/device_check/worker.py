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
    """A process that holds the device. It starts when it is needed, also after `end`.

    Args:
        kind: Value of --device.
        index: Number of the device on this machine.
        world: Number of ranks.
    """

    def __init__(self, kind: str, index: int, world: int) -> None:
        self._device, self._failures = (kind, index, world), 0
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> tuple[DeviceProperties, dict[str, Any]]:
        """Starts the process; returns the device's properties and the machine's description.

        Raises:
            InputError: The device is refused.
            DeviceError: The process does not start.
        """
        if self._failures >= TRIES:
            raise DeviceError(f"the device could not be opened {TRIES} times in a row")
        self._failures += 1
        self._start()
        deadline = time.monotonic() + START
        while (answer := self._read_answer()) is None and time.monotonic() < deadline:
            pass
        if isinstance(answer, tuple):
            self._failures = 0
            return answer
        tail = self._read_tail()
        self.end()
        if isinstance(answer, InputError):
            raise answer
        why = f"no answer within {START:.0f} s" if answer is None else answer.reason
        raise DeviceError(f"the device's process did not start: {why}\n{tail}")

    def _start(self) -> None:
        self._written = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self._pipe, theirs = Pipe()
        paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            stdout=self._written,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that its children are killed with it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self._send(self._device)

    def run(self, job: Job, find_reason_to_stop: Callable[[], str | None]) -> Outcome:
        """Runs a step, a collective one in a new process.

        The caller must end the worker if the outcome is WRONG.

        Args:
            find_reason_to_stop: Polled while the step runs.
        """
        if job.is_collective:
            self.end()
        try:
            if self._process is None:
                self.open()
        except (InputError, DeviceError) as error:
            reason, _, tail = str(error).partition("\n")
            return Outcome(WRONG, 0.0, (), reason, tail)
        start, lines, end, tail = time.monotonic(), list[Line](), None, ""
        self._send(job)
        while end is None:
            answer = self._read_answer()
            if isinstance(answer, Line):
                lines.append(answer)
            elif answer is not None:
                end, tail = answer, self._read_tail()
            elif (why := find_reason_to_stop()) is not None:
                end, tail = _End(WRONG, why), self._read_stacks()
            elif time.monotonic() - start > job.step.limit:
                why = f"it did not end within {job.step.limit:g} s"
                end, tail = _End(WRONG, why), self._read_stacks()
        seconds, is_wrong = time.monotonic() - start, end.verdict == WRONG
        verdict = WRONG if is_wrong else find_worst(line.verdict for line in lines)
        return Outcome(verdict, seconds, tuple(lines), end.reason, tail if is_wrong else "")

    def end(self) -> None:
        """Kills the process and its children; does not wait for one stuck in the driver."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._pipe.close()
        self._written.close()
        self._process = None

    def _send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # an ended worker is detected on reading
            self._pipe.send(message)

    def _read_answer(self) -> Any:
        """Reads the next message: an `_End` if the process ended, None without a message."""
        assert self._process is not None
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

    def _read_stacks(self) -> str:
        """Returns the output with all threads' stacks, which faulthandler writes even in a hang."""
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_LAST_WORDS)
        return self._read_tail()

    def _read_tail(self) -> str:
        self._written.seek(0)
        return self._written.read().decode(errors="replace")[-_TAIL:]


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
            for item in getattr(importlib.import_module(module), function)(step_bench):
                pipe.send(item if isinstance(item, Line) else _measure_line(*item))
        except InputError as reason:
            end = _End(ABSENT, str(reason))
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
    except InputError as reason:
        return make_absent(label, str(reason))
    except Exception as failure:  # the report lists errors of kernels
        if is_out_of_memory(failure):
            return make_absent(label, "out of memory")
        return Line(label, WRONG, (), _describe_failure(failure))


def _describe_failure(failure: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    first = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {first[0][:300]}" if first else type(failure).__name__
