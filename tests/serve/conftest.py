"""Fixtures of the service's tests; each test that is a coroutine gets a new event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.webhook_receiver import Receiver
from tests.serve.jobs import Jobs
from wan.app import resolve
from wan.serve.queue import deliveries
from wan.serve.queue.service import Limits

inspect_checkpoint = cache(resolve.inspect_checkpoint)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 60))
    return True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """New webhooks and uploads are looked for more often; `caplog` gets the package's log.

    The headers of a checkpoint are read once.
    """
    monkeypatch.setattr(resolve, "inspect_checkpoint", inspect_checkpoint)
    monkeypatch.setattr(deliveries, "_POLL", 0.02)
    monkeypatch.setattr(logging.getLogger("wan"), "propagate", True)


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    """A service whose ranks make one video at a time."""
    return Jobs(tmp_path / "jobs", Limits(batch_size=1))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    server = Receiver()
    yield server
    server.shutdown()
    server.server_close()
