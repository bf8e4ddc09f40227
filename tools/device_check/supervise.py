"""A step in a process of its own, which may hang, crash or be killed: the check goes on.

One worker process carries out one step after the other and is replaced as soon as a step did not
end well, and for each step that ranks carry out together. What it prints goes into a file; its last
lines are part of the report of a step that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.device_check.steps import ABSENT, WRONG, Facts, Line, Outcome, Step, line_from, worst
from wan.settings.errors import InputError

REPO = Path(__file__).resolve().parents[2]
START = 300.0  # seconds until a worker has imported torch and found its device
TRIES = 2  # of opening a device
_POLL = 0.1
_TAIL = 4000  # characters
_LAST_WORDS = 0.5  # seconds in which a hanging worker writes where it is

Job = dict[str, Any]
Stop = Callable[[], str | None]
"""Asked again and again while a step runs: why it has to end, None if it may go on."""


class DeviceError(Exception):
    """The device cannot even be opened; the sentence says how the worker ended."""


class Worker:
    """A process that has the device. hello: what it is told first. Used as a context.

    Raises InputError for a device that is refused, DeviceError where the process does not start.
    """

    def __init__(self, hello: Job) -> None:
        self._written = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)
        ours, theirs = os.pipe()
        self._answers, self._rest = ours, b""
        paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, str(REPO / "tools/device_check/worker.py"), str(theirs)],
            stdin=subprocess.PIPE,
            stdout=self._written,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs,),
            start_new_session=True,  # so that what it starts is ended with it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        os.close(theirs)
        try:
            answer = self._first(hello)
            if "refused" in answer:
                raise InputError(answer["refused"])
        except BaseException:
            self.end()
            raise
        self.facts = Facts(**answer["facts"])
        self.environment: dict[str, Any] = answer["environment"]

    def _first(self, hello: Job) -> dict[str, Any]:
        self._send(hello)
        deadline = time.monotonic() + START
        while (answer := self._answer(_POLL)) is None:
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = self._why() if ended else f"no answer within {START:.0f} s"
                raise DeviceError(f"the device's process did not start: {why}\n{self.tail()}")
        return answer

    def run(self, job: Job, limit: float, stop: Stop) -> Outcome:
        """Carry out a step. The worker is to be ended where the outcome is WRONG.

        job: the step's work and what it is given. limit: seconds.
        """
        start, lines = time.monotonic(), list[Line]()

        def outcome(verdict: str, words: str = "", tail: str = "") -> Outcome:
            return Outcome(verdict, time.monotonic() - start, tuple(lines), words, tail)

        self._send(job)
        while True:
            answer = self._answer(_POLL)
            if answer is not None and "line" in answer:
                lines.append(line_from(answer["line"]))
            elif answer is not None and "absent" in answer:
                return outcome(worst([ABSENT, *(line.verdict for line in lines)]), answer["absent"])
            elif answer is not None and "failed" in answer:
                return outcome(WRONG, answer["failed"], self.tail())
            elif answer is not None:
                return outcome(worst(line.verdict for line in lines))
            elif self._process.poll() is not None:
                return outcome(WRONG, self._why(), self.tail())
            elif (why := stop()) is not None:
                return outcome(WRONG, why, self._last_words())
            elif time.monotonic() - start > limit:
                return outcome(WRONG, f"it did not end within {limit:g} s", self._last_words())

    def _send(self, job: Job) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen when it is read
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self, patience: float) -> dict[str, Any] | None:
        """The next thing that it says; None where there is none yet, or no more."""
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], patience)[0]:
                return None
            more = os.read(self._answers, 1 << 16)
            if not more:
                time.sleep(patience)  # it has closed its end, and is ending
                return None
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(first))

    def _why(self) -> str:
        code = self._process.poll()
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _last_words(self) -> str:
        """Where each of its threads is: faulthandler writes it from inside a hanging call, too."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_LAST_WORDS)
        return self.tail()

    def tail(self) -> str:
        """The last of what it wrote."""
        self._written.seek(0)
        return self._written.read().decode(errors="replace")[-_TAIL:]

    def end(self) -> None:
        """Kill it and what it has started. One that the driver holds back is left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers)
        self._written.close()


class Bed:
    """Where steps run: keeps a worker for as long as its steps end well. Used as a context.

    hello: what each worker is told first.
    """

    def __init__(self, hello: Job) -> None:
        self._hello, self._failures = hello, 0
        self._worker: Worker | None = None

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def worker(self) -> Worker:
        """The worker, a new one where there is none. InputError, DeviceError: as `Worker`."""
        if self._failures >= TRIES:
            raise DeviceError(f"the device could not be opened {TRIES} times in a row")
        if self._worker is None:
            self._failures += 1
            self._worker = Worker(self._hello)
            self._failures = 0
        return self._worker

    def clear(self) -> None:
        """End the worker: the next step gets another one."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def run(self, step: Step, job: Job, stop: Stop = lambda: None) -> Outcome:
        """One step, in a fresh process if it is carried out together."""
        if job["together"]:
            self.clear()
        try:
            return self.worker().run(job, step.limit, stop)
        except (InputError, DeviceError) as error:
            words, _, tail = str(error).partition("\n")
            return Outcome(WRONG, 0.0, (), words, tail)
