"""Each step runs in a worker process, which may hang, crash or be killed: the check goes on.

One worker carries out one step after the other. It is replaced when a step did not end well, and
for each step that all ranks carry out together. Its output goes to a file; the end of that file is
part of the report of a step that failed.

As a program (`python -m tools.device_check.process FD`) this module is the worker. It reads jobs as
lines of JSON from its input: first {"device", "index", "world"}, answered by the facts or a
refusal, then a job for each step, answered by its lines as they come and by how the step ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tools.device_check.steps import (
    ABSENT,
    WRONG,
    Facts,
    Line,
    Outcome,
    UnavailableError,
    absent,
    line,
    line_from,
    worst,
)
from wan.settings.errors import InputError, is_out_of_memory

REPO = Path(__file__).resolve().parents[2]
START = 300.0  # seconds until a worker has imported torch and opened its device
TRIES = 2  # attempts to open a device
_POLL = 0.1
_TAIL = 4000  # characters
_LAST_WORDS = 0.5  # seconds in which a hanging worker writes its stacks

Job = dict[str, Any]


class DeviceError(Exception):
    """The device cannot be opened; the sentence says how the worker ended."""


class Worker:
    """A process that holds the device. hello: its first message.

    Raises:
        InputError: If the device is refused.
        DeviceError: If the process does not start.
    """

    def __init__(self, hello: Job) -> None:
        self._written = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)
        self._answers, theirs = os.pipe()
        self._rest = b""
        paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=self._written,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs,),
            start_new_session=True,  # so that its children are killed with it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        os.close(theirs)
        try:
            self._send(hello)
            deadline = time.monotonic() + START
            while (answer := self._answer()) is None:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    why = self._why() if ended else f"no answer within {START:.0f} s"
                    raise DeviceError(f"the device's process did not start: {why}\n{self._tail()}")
            if "refused" in answer:
                raise InputError(answer["refused"])
        except BaseException:
            self.end()
            raise
        self.facts = Facts(**answer["facts"])
        self.environment: dict[str, Any] = answer["environment"]

    def run(self, job: Job, stop: Callable[[], str | None]) -> Outcome:
        """Carry out a step. The worker must be ended where the outcome is WRONG.

        stop: Asked again and again while the step runs; returns why the step has to end, or None.
        """
        start, lines = time.monotonic(), list[Line]()

        def outcome(verdict: str, words: str = "", tail: str = "") -> Outcome:
            return Outcome(verdict, time.monotonic() - start, tuple(lines), words, tail)

        self._send(job)
        while True:
            answer = self._answer()
            if answer is not None and "line" in answer:
                lines.append(line_from(answer["line"]))
            elif answer is not None and "absent" in answer:
                return outcome(worst([ABSENT, *(one.verdict for one in lines)]), answer["absent"])
            elif answer is not None and "failed" in answer:
                return outcome(WRONG, answer["failed"], self._tail())
            elif answer is not None:
                return outcome(worst(one.verdict for one in lines))
            elif self._process.poll() is not None:
                return outcome(WRONG, self._why(), self._tail())
            elif (why := stop()) is not None:
                return outcome(WRONG, why, self._stacks())
            elif time.monotonic() - start > job["limit"]:
                return outcome(WRONG, f"it did not end within {job['limit']:g} s", self._stacks())

    def end(self) -> None:
        """Kill the worker and its children. One that the driver holds back is left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers)
        self._written.close()

    def _send(self, job: Job) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a worker that has ended is noticed on reading
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any] | None:
        """The next answer; None if there is none yet, or no more."""
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], _POLL)[0]:
                return None
            more = os.read(self._answers, 1 << 16)
            if not more:
                time.sleep(_POLL)  # the worker has closed its end and is ending
                return None
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(first))

    def _why(self) -> str:
        code = self._process.poll()
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _stacks(self) -> str:
        """The output with the stack of each thread, which faulthandler writes even in a hang."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_LAST_WORDS)
        return self._tail()

    def _tail(self) -> str:
        self._written.seek(0)
        return self._written.read().decode(errors="replace")[-_TAIL:]


class Bed:
    """Keeps a worker as long as its steps end well. Used as a context. hello: as for `Worker`."""

    def __init__(self, hello: Job) -> None:
        self._hello, self._failures = hello, 0
        self._worker: Worker | None = None

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def worker(self) -> Worker:
        """The worker; a new one is started where there is none."""
        if self._failures >= TRIES:
            raise DeviceError(f"the device could not be opened {TRIES} times in a row")
        if self._worker is None:
            self._failures += 1
            self._worker = Worker(self._hello)
            self._failures = 0
        return self._worker

    def clear(self) -> None:
        """End the worker, so that the next step gets another one."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def run(self, job: Job, stop: Callable[[], str | None] = lambda: None) -> Outcome:
        """Carry out one step, in a fresh process if the ranks carry it out together."""
        if job["together"]:
            self.clear()
        try:
            return self.worker().run(job, stop)
        except (InputError, DeviceError) as error:
            words, _, tail = str(error).partition("\n")
            return Outcome(WRONG, 0.0, (), words, tail)


def serve(answers: TextIO) -> None:
    """Answer jobs until the input ends."""
    jobs: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()

    def answer(**value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    hello = jobs.get()
    import torch

    from tools.device_check import bench, machine
    from wan.device import resolve

    try:
        device = resolve(hello["device"], hello["index"])
    except InputError as error:
        answer(refused=str(error))
        return
    torch.set_grad_enabled(False)
    facts = bench.facts(device, hello["world"])
    answer(facts=asdict(facts), environment=machine.environment(device))
    while True:
        job = jobs.get()
        module, _, function = job["work"].partition(":")
        module = module if "." in module else f"{__package__}.{module}"
        try:
            made = bench.prepare(device, job)
            for one in getattr(importlib.import_module(module), function)(made):
                answer(line=asdict(one if isinstance(one, Line) else measured(*one)))
        except (UnavailableError, InputError) as error:
            answer(absent=str(error))
        except BaseException as error:
            traceback.print_exc()
            answer(**{"absent" if is_out_of_memory(error) else "failed": _sentence(error)})
        else:
            answer(done=True)
        gc.collect()
        device.empty_cache()


def measured(what: str, measure: Callable[[], Any]) -> Line:
    """One measurement of a step. If it fails, the others are still made."""
    try:
        return line(what, *measure())
    except (UnavailableError, InputError) as reason:
        return absent(what, str(reason))
    except Exception as failure:  # the check reports whatever a kernel raises
        if is_out_of_memory(failure):
            return absent(what, "out of memory")
        return Line(what, WRONG, (), _sentence(failure))


def _sentence(failure: BaseException) -> str:
    """The type of an error and the first line of its message."""
    first = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {first[0][:300]}" if first else type(failure).__name__


def _read(jobs: queue.Queue[Job]) -> None:
    """Read the input. When it ends the supervising process is gone, and this one ends."""
    for text in sys.stdin:
        jobs.put(json.loads(text))
    os._exit(0)


if __name__ == "__main__":
    faulthandler.enable()  # a crash writes its stack
    faulthandler.register(signal.SIGUSR1)
    serve(os.fdopen(int(sys.argv[1]), "w"))
