"""A rank that hangs: it is noticed, killed and started again; its job is made by the new one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.jobs import Jobs
from wan.serve import group, monitor

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("serve"), pytest.mark.slow]


def test_a_rank_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may go on in time; else it is killed, and a job that was deleted does not come back."""
    monkeypatch.setattr(monitor, "SILENCE", 4.0)
    monkeypatch.setattr(group, "_RECOVERY", 3.0)
    jobs = Jobs(tmp_path / "jobs")

    async def wait(whether: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not whether():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    async def work() -> None:
        ranks = jobs.service.group
        living = asyncio.create_task(jobs.service.start())
        try:
            names = [await jobs.create({"num_inference_steps": n}) for n in (400, 2)]
            await wait(lambda: jobs.service.find(names[0]).done > 2)
            (pid,) = ranks.pids.values()
            os.kill(pid, signal.SIGSTOP)
            await wait(lambda: not ranks.ready)
            status, _, told = await jobs.ask("/health")
            assert (status, told["status"], told["restarts"]) == (503, "stalled", 0)
            assert "Rank 0 has not answered" in told["reason"]
            os.kill(pid, signal.SIGCONT)
            await wait(lambda: ranks.ready)
            assert jobs.service.find(names[0]).attempt == 1
            os.kill(pid, signal.SIGSTOP)
            await wait(lambda: not ranks.ready)
            await jobs.ask(f"/v1/videos/{names[0]}", method="DELETE")
            await wait(lambda: jobs.state(names[1]) == "completed")
            assert ranks.restarts == 1 and not Path(f"/proc/{pid}").exists()
            assert not (jobs.folder / "jobs" / names[0]).exists()
            assert (await jobs.ask("/health"))[0] == 200
        finally:
            await jobs.service.stop()
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)

    asyncio.run(work())
