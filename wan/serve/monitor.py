"""Detects ranks that hang: a process without messages, or a video without progress.

A separate thread of each rank sends heartbeats with whether the main thread has moved since the
last one. This distinguishes slow work (loading, a step of an hour on a CPU) from a main thread that
is blocked in one call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

HEARTBEAT = 2.0
"""Seconds between two heartbeats of a rank."""
SILENCE = 30.0
"""Seconds without a message after which a rank counts as hanging; loading may hold the GIL."""
FLOOR = 60.0
"""Minimum of the computed time limits of a step, in seconds."""
FACTOR = 10.0
"""Time limit of a step in multiples of the longest step of its shape."""
STARTING = 600.0
"""Minimum time limit of a start without progress, in seconds."""
_TICK = 2 * HEARTBEAT  # longest pause between two checks that counts; this process may be suspended


class GroupMonitor:
    """Measures the time since each rank's last message and since the last progress.

    All times are seconds of one clock. The longest step of each shape is kept across restarts.
    """

    def __init__(self, timeout: float) -> None:
        """Starts without ranks. timeout: seconds of --dist_timeout."""
        self._timeout = timeout
        self._longest: dict[str, float] = {}  # shape -> seconds
        self._step_shape: str | None = None  # of the current step
        self._step_begun: float | None = None
        self.begin_group(0.0)

    def begin_group(self, now: float) -> None:
        """Resets the state for a new group of ranks."""
        self._silent: dict[int, float] = {}  # rank -> seconds since its last message
        self._shapes: dict[str, str] = {}  # running job -> its shape
        self._cancelled: set[str] = set()
        self._is_ready = False
        self._checked = now
        self._restart_clocks()

    def end_start(self) -> None:
        """Marks all ranks as ready."""
        self._is_ready = True

    def begin_jobs(self, shapes: Mapping[str, str]) -> None:
        """Starts jobs. shapes: job id -> shape; steps of equal shapes take the same time."""
        self._shapes, self._cancelled = dict(shapes), set()
        self._restart_clocks()

    def cancel(self, job: str) -> None:
        """Marks a job as cancelled."""
        if job in self._shapes:
            self._cancelled.add(job)
            if self._all_cancelled():
                self._still = self._stepless = 0.0

    def receive(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        """Updates the state from a message of a rank."""
        self._silent[rank] = 0.0
        kind = message["is"]
        if kind != "alive" or message["moved"]:
            self._still = 0.0
        if kind == "step":
            self._count_step(message, now)
        elif kind in ("done", "failed"):
            self._shapes.pop(message["job"], None)
            self._step_shape = self._step_begun = None
            self._stepless = 0.0

    def check(self, now: float) -> str | None:
        """Returns why the group hangs, or None; called about once a second."""
        passed, self._checked = min(now - self._checked, _TICK), now
        for rank in self._silent:
            self._silent[rank] += passed
            if self._silent[rank] > SILENCE:
                return f"Rank {rank} has not answered for {SILENCE:.0f} s."
        if self._is_ready and not self._shapes:
            return None
        self._still += passed
        self._stepless += passed
        limit = self._limit()
        if self._still > limit:
            flag = " (--dist_timeout)" if limit == self._timeout else ""
            return f"The ranks have made no progress for {limit:.0f} s{flag}."
        most = self._longest_wait()
        if most is not None and self._stepless > most:
            return f"The ranks have taken no step for {most:.0f} s."
        return None

    def _restart_clocks(self) -> None:
        self._still = 0.0  # seconds since a main thread moved or a message came
        self._stepless = 0.0  # seconds since the last step or end of a job
        self._step_shape = self._step_begun = None

    def _count_step(self, message: Mapping[str, Any], now: float) -> None:
        """Records the duration of the step that ended, and starts the next one."""
        if self._step_shape is not None and self._step_begun is not None:
            longest = self._longest.get(self._step_shape, 0.0)
            self._longest[self._step_shape] = max(longest, now - self._step_begun)
        is_between = message["follows"]
        self._step_shape = self._shapes.get(message["job"]) if is_between else None
        self._step_begun, self._stepless = now, 0.0

    def _all_cancelled(self) -> bool:
        return bool(self._shapes) and self._cancelled >= self._shapes.keys()

    def _bound(self, shapes: Collection[str | None]) -> float | None:
        """Returns the time limit of a step of some shapes; None if no step was measured."""
        known = [self._longest[one] for one in shapes if one in self._longest]
        return max(FLOOR, FACTOR * max(known)) if known else None

    def _limit(self) -> float:
        """Returns the time limit for all main threads without movement, in seconds."""
        if not self._is_ready:
            return max(self._timeout, STARTING)
        if self._all_cancelled():  # the result is not needed
            bound = self._bound({*self._shapes.values()}) or FLOOR
        else:
            bound = self._bound({self._step_shape}) or self._timeout
        return min(bound, self._timeout)

    def _longest_wait(self) -> float | None:
        """Returns the time limit for moving main threads without a step; None: no limit."""
        if self._all_cancelled():
            return self._timeout
        bound = self._bound({self._step_shape})
        return None if bound is None else max(bound, self._timeout)
