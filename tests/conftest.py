"""Fixtures shared by all tests: the official vectors, and tiny checkpoints made once a session.

Torch is imported where it is used: the process that hands tests to the workers needs none.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from wan.utils.compiler_cache import prepare_compiler_cache

hypothesis.settings.register_profile("no deadline", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("no deadline")
# In a background job of a shell, the tests and their child processes would ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
prepare_compiler_cache()  # one for all tests, which move the user's cache folder
gc.disable()  # until all modules are imported, which collections would scan many times
Tiny = Callable[..., Path]


SLOWEST_GROUPS = (
    "serve",
    "tasks",
    "ranks",
    "pairs",
    "test_long_videos.py",
    "torchrun",
    "test_plan.py",
)
"""The slowest groups of tests. They start first, so that no worker idles at the end."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests by file; tests that need ranks share a worker, which starts their pools once.

    Files that need at most two ranks by default have the group "pairs" instead.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            group = "ranks" if item.get_closest_marker("dist") else item.path.name
            item.add_marker(pytest.mark.xdist_group(group))

    def get_group_index(item: pytest.Item) -> int:
        marker = item.get_closest_marker("xdist_group")
        assert marker is not None
        return (
            SLOWEST_GROUPS.index(marker.args[0])
            if marker.args[0] in SLOWEST_GROUPS
            else len(SLOWEST_GROUPS)
        )

    items.sort(key=get_group_index)


SECONDS, SECONDS_IF_SLOW = 240, 1800
"""The longest time of a test on a busy machine, where a quick one may take a minute."""
STDERR = pytest.StashKey[int]()
"""The standard error of pytest itself, which is captured during tests."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)


def get_time_limit(item: pytest.Item) -> int:
    return SECONDS_IF_SLOW if item.get_closest_marker("slow") else SECONDS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends the process of a test that no exception ends, such as an endless loop in C++.

    The stack of each thread is printed before; pytest-xdist starts another worker.
    """
    file = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(1.25 * get_time_limit(item), exit=True, file=file)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def limit_time(item: pytest.Item) -> Iterator[None]:
    """Fails the test that takes too long; the other tests of its process go on."""
    limit = get_time_limit(item)

    def fail(*_: object) -> None:
        pytest.fail(f"{item.nodeid} has taken more than {limit} s")

    handler = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with limit_time(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with limit_time(item):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Without the test whose process has ended, which pytest-xdist 3.8.0 starts again and again."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):
        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work[node].values()
            pending = ((unit, name) for unit in units for name in unit if not unit[name])
            unit, ended = next(pending, ({}, None))
            unit[ended] = True
            super().remove_node(node)
            return ended

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for processes and for limits of time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items:  # otherwise the process that hands tests to the workers
        import tests.preload  # noqa: F401

        _ignore_living_objects()
    gc.set_threshold(10_000, 20)  # few cycles are garbage, and memory is measured after `collect`
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    # If a collected test starts ranks; those on simulated NPUs import the vendor's packages anew.
    if "tests.dist" in sys.modules and "torch_npu" not in sys.modules:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # for the output of ranks, too
        sys.modules["tests.dist"].fork_server()
        capture.suspend_global_capture()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        _ignore_living_objects()


def _ignore_living_objects() -> None:
    """Hides imported modules from the garbage collections of videos, 0.2 s each otherwise."""
    gc.collect()
    gc.freeze()


def slow(*case: object) -> Any:
    """A case of a parametrised test that only `make test-all` runs."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _temporary_folder(shared_folder: Path) -> None:
    from tests.refusals import hide_temporary_folders

    hide_temporary_folders(shared_folder)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Restores the environment variables after each test; a run sets some, such as RANK."""
    initial_environ = dict(os.environ)
    yield
    assert logging.root.manager.disable == 0, "the test leaves the log of its process disabled"
    if os.environ != initial_environ:
        os.environ.clear()
        os.environ.update(initial_environ)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: the tensors are small and the machine may be busy."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of tensors computed with the official code."""
    folder = os.environ.get("WAN_REFERENCE_DIR")
    if not folder:
        pytest.skip("WAN_REFERENCE_DIR is not set: no official vectors here")
    return Path(folder)


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock of a file."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of a run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def tiny(shared_folder: Path) -> Tiny:
    """tiny(task, layout="official"): a complete random checkpoint folder. Do not write into it.

    Each is made once: all workers of a run share one folder. Its VAE is half as wide as usual.
    """
    from wan.testing import random_checkpoint

    make_checkpoint = random_checkpoint.make_checkpoint  # `refusals` replaces it

    def make(task: str, layout: str = "official") -> Path:
        folder = shared_folder / "checkpoints" / f"{task}-{layout}"
        folder.parent.mkdir(exist_ok=True)
        with lock_file(folder.with_suffix(".lock")):
            if not folder.exists():
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(random_checkpoint, "VAE_BASE", 4)
                    patch.setattr(random_checkpoint, "VAE_DECODER_BASE", (4, 5))
                    make_checkpoint(task, folder, layout=layout)
            return folder

    return make


@pytest.fixture(scope="session")
def usual_tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """As `tiny`, with VAEs of the usual width, for tests of this width."""
    from wan.testing.random_checkpoint import make_checkpoint

    @cache
    def make(task: str, layout: str = "official") -> Path:
        return make_checkpoint(task, tmp_path_factory.mktemp("usual") / task, layout=layout)

    return make


Refusals = Callable[..., None]
"""The type of the fixture `refusals`."""


@pytest.fixture
def refusals(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Refusals:
    """refusals(table, {case: argv}): generate.py refuses each case, as in `refusals.txt`.

    Each refusal is one sentence with exit code 2, before weights are read or the demo checkpoint is
    made, and no file is written. folders: The current folder of each case. hide: Passed to
    `check_refusals`. plans: `--plan` refuses each case in the same words.
    """
    from tests.refusals import check_refusals
    from wan.cli import main

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    for name in (
        "checkpoint.load.load_weights",
        "checkpoint.load.map_tensors",
        "testing.random_checkpoint.make_checkpoint",
    ):
        monkeypatch.setattr(f"wan.{name}", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def check(
        table: str,
        cases: Mapping[str, Sequence[object]],
        folders: Mapping[str, Path] | None = None,
        hide: Sequence[str] = (),
        plans: bool = False,
    ) -> None:
        files_before = sorted(tmp_path.rglob("*"))
        codes, messages = {}, {}
        for case, argv in cases.items():
            if folders:
                monkeypatch.chdir(folders[case])
            capfd.readouterr()  # of what came before
            codes[case] = main.main([str(word) for word in argv])
            messages[case] = capfd.readouterr().err
            assert messages[case].startswith("generate.py: "), (case, messages[case])
            if plans:
                assert main.main(["--plan", *map(str, argv)]) == 2, (case, messages[case])
                assert capfd.readouterr().err == messages[case]
            messages[case] = messages[case].removeprefix("generate.py: ")
        assert {case: code for case, code in codes.items() if code != 2} == {}, messages
        check_refusals(table, messages, hide)
        assert sorted(tmp_path.rglob("*")) == files_before, "something was written"

    return check


@pytest.fixture(scope="session")
def image_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 96 x 64 PNG with a gradient and noise."""
    from tests.tasks.tasks import write_picture

    return write_picture(tmp_path_factory.mktemp("images") / "cat.png")
