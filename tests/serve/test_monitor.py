"""Detection of hung ranks: missing heartbeats, main threads without progress, slow steps."""

from __future__ import annotations

import threading
import time

import pytest

from wan.serve.ranks import __main__ as ranks
from wan.serve.ranks.monitor import FACTOR, FLOOR, SILENCE, STARTING, GroupMonitor

TIMEOUT = 1800.0


class Group:
    """Two ranks that send heartbeats, with a simulated clock."""

    def __init__(self) -> None:
        self.monitor, self.now = GroupMonitor(TIMEOUT), 1000.0
        self.monitor.begin_group(self.now)

    def start(self, *jobs: str) -> None:
        for rank in (0, 1):
            self.monitor.receive(rank, {"is": "ready"}, self.now)
        self.monitor.mark_ready()
        self.monitor.begin_jobs(dict.fromkeys(jobs, "shape"))

    def step(self, *, seconds: float = 0.0, follows: bool = True) -> None:
        assert self.pass_time(seconds) is None
        self.monitor.receive(0, {"is": "step", "job": "a", "follows": follows}, self.now)

    def pass_time(
        self, seconds: float, moving: tuple[int, ...] = (), ranks: tuple[int, ...] = (0, 1)
    ) -> str | None:
        """Advances the clock while some ranks send heartbeats; returns the first hang's reason.

        moving: Ranks whose main thread makes progress."""
        for _ in range(round(seconds)):
            self.now += 1
            for rank in ranks:
                self.monitor.receive(rank, {"is": "alive", "moved": rank in moving}, self.now)
            reason = self.monitor.find_hang(self.now)
            if reason is not None:
                return reason
        return None


def test_a_silent_rank_hangs_whatever_the_others_do() -> None:
    group = Group()
    group.start()
    assert group.pass_time(100_000) is None  # idle
    assert group.pass_time(SILENCE - 2, ranks=(0,)) is None
    assert "Rank 1 has not answered" in str(group.pass_time(10, moving=(0,), ranks=(0,)))
    start = Group()  # which gives no sign
    assert start.pass_time(TIMEOUT - 10, ranks=()) is None
    assert start.pass_time(20, ranks=()) is not None


@pytest.mark.parametrize(
    ("step", "follows", "limit", "reason"),
    [
        (30, True, 30 * FACTOR, "no progress"),
        (1, True, FLOOR, "no progress"),
        (1, False, TIMEOUT, "--dist_timeout"),  # decoding and writing follow
    ],
)
def test_a_step_that_takes_much_longer_than_those_before(
    step: float, follows: bool, limit: float, reason: str
) -> None:
    group = Group()
    group.start("a")
    assert group.pass_time(TIMEOUT - 10) is None  # no step was measured: a load, or a first step
    group.step()
    group.step(seconds=step, follows=follows)
    assert group.pass_time(limit - 2) is None
    assert reason in str(group.pass_time(10))


def test_slow_work_is_no_hang() -> None:
    """The main thread of one rank moves: weights are loaded, or a step takes hours."""
    group = Group()
    group.start("a")
    assert group.pass_time(20 * TIMEOUT, moving=(0,)) is None
    group.step()
    group.step(seconds=5)
    assert group.pass_time(TIMEOUT - 10, moving=(1,)) is None
    assert "no step" in str(group.pass_time(20, moving=(1,)))


def test_the_longest_step_outlives_a_group() -> None:
    group = Group()
    group.start("a")
    group.step()
    group.step(seconds=30)
    group.monitor.begin_group(group.now)
    assert group.pass_time(STARTING - 10, ranks=()) is None
    group.start("a")
    group.step()
    assert group.pass_time(30 * FACTOR - 2) is None
    assert group.pass_time(10) is not None


def test_a_cancelled_job_ends_soon_in_any_stage() -> None:
    group = Group()
    group.start("a")
    assert group.pass_time(FLOOR + 30) is None
    group.monitor.cancel("a")
    assert group.pass_time(FLOOR - 2) is None and group.pass_time(10) is not None
    group.start("a", "b")  # they share loads, and b is wanted
    group.monitor.cancel("a")
    assert group.pass_time(FLOOR + 30) is None


@pytest.mark.parametrize("end", ["done", "failed"])
def test_ranks_wait_as_long_as_they_like_for_the_next_job(end: str) -> None:
    group = Group()
    group.start("a", "b")
    group.step()
    for job, reason in (("a", "no progress"), ("b", "None")):
        group.monitor.receive(0, {"is": end, "job": job}, group.now)
        assert reason in str(group.pass_time(TIMEOUT + 10))


def test_a_pause_of_the_front_is_not_the_ranks() -> None:
    group = Group()
    group.start("a")
    assert group.pass_time(2) is None
    assert group.monitor.find_hang(group.now + 10_000) is None


def test_whether_a_main_thread_moves() -> None:
    positions: list[object] = []
    finished = threading.Event()

    def record_positions() -> None:
        for _ in range(20):
            positions.append(ranks._get_main_position())
            time.sleep(0.01)
        finished.set()

    threading.Thread(target=record_positions).start()
    finished.wait()
    assert len({*map(str, positions[2:-2])}) == 1
    finished.clear()
    positions.clear()
    threading.Thread(target=record_positions).start()
    while not finished.is_set():
        sum(range(1000))
    assert len({*map(str, positions)}) > 1
