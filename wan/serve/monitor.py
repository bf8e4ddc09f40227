"""Detects ranks that hang: a process that is silent, or a video that makes no progress.

Each rank sends a heartbeat from a thread of its own. It says whether the main thread has moved
since the last one, so that slow work (loading, a step of an hour on a CPU) is told from a main
thread that waits for ever in one call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

HEARTBEAT = 2.0
"""Seconds between two heartbeats of a rank."""
SILENCE = 30.0
"""Seconds without any message after which a rank hangs; its GIL may be held while it loads."""
FLOOR = 60.0
"""Seconds that a main thread may stay in one call between two steps, however short they are."""
FACTOR = 10.0
"""Of the longest step so far: seconds that one may take."""
STARTING = 600.0
"""Seconds at least that ranks may take to come up without a sign."""
_TICK = 2 * HEARTBEAT  # a longer pause between two checks was one of this process


class GroupMonitor:
    """Measures the silence of ranks and the progress of their videos.

    All times are seconds of one clock. The longest step of each shape is kept from group to group.
    """

    def __init__(self, timeout: float) -> None:
        """Starts with no rank. timeout: seconds of --dist_timeout."""
        self._timeout = timeout
        self._longest: dict[str, float] = {}  # shape -> seconds
        self._step_shape: str | None = None  # of the step that is being taken
        self._step_begun: float | None = None
        self.begin_group(0.0)

    def begin_group(self, now: float) -> None:
        """A group of ranks has started."""
        self._silent: dict[int, float] = {}  # rank -> seconds
        self._shapes: dict[str, str] = {}  # job that is made -> its shape
        self._cancelled: set[str] = set()
        self._is_ready = False
        self._checked = now
        self._restart_clocks()

    def end_start(self) -> None:
        """All ranks are ready."""
        self._is_ready = True

    def begin_jobs(self, shapes: Mapping[str, str]) -> None:
        """The ranks get jobs to make. shapes: of each job, equal where steps take the same time."""
        self._shapes, self._cancelled = dict(shapes), set()
        self._restart_clocks()

    def cancel(self, job: str) -> None:
        """The ranks are told to end a job."""
        if job in self._shapes:
            self._cancelled.add(job)
            if self._all_cancelled():
                self._still = self._stepless = 0.0

    def receive(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        """Counts a message of a rank."""
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
        """Returns why the group hangs, or None; to be called about every second."""
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
        """Measures the step that has ended, and begins the next one."""
        if self._step_shape is not None and self._step_begun is not None:
            longest = self._longest.get(self._step_shape, 0.0)
            self._longest[self._step_shape] = max(longest, now - self._step_begun)
        is_between = message["follows"]
        self._step_shape = self._shapes.get(message["job"]) if is_between else None
        self._step_begun, self._stepless = now, 0.0

    def _all_cancelled(self) -> bool:
        return bool(self._shapes) and self._cancelled >= self._shapes.keys()

    def _bound(self, shapes: Collection[str | None]) -> float | None:
        """Returns the seconds that a step of some shapes may take; None if none was measured."""
        known = [self._longest[one] for one in shapes if one in self._longest]
        return max(FLOOR, FACTOR * max(known)) if known else None

    def _limit(self) -> float:
        """Returns how long all main threads may stand still."""
        if not self._is_ready:
            return max(self._timeout, STARTING)
        if self._all_cancelled():  # nobody waits for the result
            bound = self._bound({*self._shapes.values()}) or FLOOR
        else:
            bound = self._bound({self._step_shape}) or self._timeout
        return min(bound, self._timeout)

    def _longest_wait(self) -> float | None:
        """Returns how long no step may be taken, although main threads move; None: for ever."""
        if self._all_cancelled():
            return self._timeout
        bound = self._bound({self._step_shape})
        return None if bound is None else max(bound, self._timeout)
