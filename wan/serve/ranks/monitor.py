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
        self._longest_step: dict[str, float] = {}  # shape -> seconds
        self._step_shape: str | None = None  # of the current step
        self._step_started_at: float | None = None
        self.begin_group(0.0)

    def begin_group(self, now: float) -> None:
        """Resets the state for a new group of ranks."""
        self._silence: dict[int, float] = {}  # rank -> seconds since its last message
        self._shapes: dict[str, str] = {}  # running job -> its shape
        self._cancelled: set[str] = set()
        self._is_ready = False
        self._checked_at = now
        self._restart_clocks()

    def mark_ready(self) -> None:
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
            if self._are_all_cancelled():
                self._seconds_since_move = self._seconds_since_step = 0.0

    def receive(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        """Updates the state from a message of a rank."""
        self._silence[rank] = 0.0
        message_type = message["is"]
        if message_type != "alive" or message["moved"]:
            self._seconds_since_move = 0.0
        if message_type == "step":
            self._count_step(message, now)
        elif message_type in ("done", "failed"):
            self._shapes.pop(message["job"], None)
            self._step_shape = self._step_started_at = None
            self._seconds_since_step = 0.0

    def find_hang(self, now: float) -> str | None:
        """Returns why the group hangs, or None; called about once a second."""
        elapsed, self._checked_at = min(now - self._checked_at, _TICK), now
        for rank in self._silence:
            self._silence[rank] += elapsed
            if self._silence[rank] > SILENCE:
                return f"Rank {rank} has not answered for {SILENCE:.0f} s."
        if self._is_ready and not self._shapes:
            return None
        self._seconds_since_move += elapsed
        self._seconds_since_step += elapsed
        limit = self._compute_move_limit()
        if self._seconds_since_move > limit:
            flag = " (--dist_timeout)" if limit == self._timeout else ""
            return f"The ranks have made no progress for {limit:.0f} s{flag}."
        step_limit = self._compute_step_limit()
        if step_limit is not None and self._seconds_since_step > step_limit:
            return f"The ranks have taken no step for {step_limit:.0f} s."
        return None

    def _restart_clocks(self) -> None:
        self._seconds_since_move = 0.0  # seconds since a main thread moved or a message came
        self._seconds_since_step = 0.0  # seconds since the last step or end of a job
        self._step_shape = self._step_started_at = None

    def _count_step(self, message: Mapping[str, Any], now: float) -> None:
        """Records the duration of the step that ended, and starts the next one."""
        if self._step_shape is not None and self._step_started_at is not None:
            longest = self._longest_step.get(self._step_shape, 0.0)
            self._longest_step[self._step_shape] = max(longest, now - self._step_started_at)
        is_between = message["follows"]
        self._step_shape = self._shapes.get(message["job"]) if is_between else None
        self._step_started_at, self._seconds_since_step = now, 0.0

    def _are_all_cancelled(self) -> bool:
        return bool(self._shapes) and self._cancelled >= self._shapes.keys()

    def _bound_step(self, shapes: Collection[str | None]) -> float | None:
        """Returns the time limit of a step of some shapes; None if no step was measured."""
        longest = [self._longest_step[shape] for shape in shapes if shape in self._longest_step]
        return max(FLOOR, FACTOR * max(longest)) if longest else None

    def _compute_move_limit(self) -> float:
        """Returns the time limit for all main threads without movement, in seconds."""
        if not self._is_ready:
            return max(self._timeout, STARTING)
        if self._are_all_cancelled():  # the result is not needed
            bound = self._bound_step({*self._shapes.values()}) or FLOOR
        else:
            bound = self._bound_step({self._step_shape}) or self._timeout
        return min(bound, self._timeout)

    def _compute_step_limit(self) -> float | None:
        """Returns the time limit for moving main threads without a step; None: no limit."""
        if self._are_all_cancelled():
            return self._timeout
        bound = self._bound_step({self._step_shape})
        return None if bound is None else max(bound, self._timeout)
