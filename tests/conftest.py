"""Fixtures shared by all tests: the official vectors, and tiny checkpoints made once a session.

Torch is imported where it is used: the process that hands tests to the workers needs none.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# A shell that starts tests in the background has them, and what they start, ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
Tiny = Callable[..., Path]


LONG = (
    "serve",
    "ranks",
    "pairs",
    "test_long_videos.py",
    "test_s2v.py",
    "test_plan.py",
    "test_animate.py",
)
"""Groups of tests that take longest: they begin first, so that no worker waits for another."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files stay with a worker; those that need ranks with one, which starts pools of them once.

    But for files that need two ranks at most by default: their group is "pairs".
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            together = "ranks" if item.get_closest_marker("dist") else item.path.name
            item.add_marker(pytest.mark.xdist_group(together))

    def place(item: pytest.Item) -> int:
        marker = item.get_closest_marker("xdist_group")
        assert marker is not None
        return LONG.index(marker.args[0]) if marker.args[0] in LONG else len(LONG)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.items:  # the process that hands tests to the workers
        return
    import tests.preload  # noqa: F401

    # Each video collects garbage, 0.2 s where all that is imported is looked through.
    gc.collect()
    gc.freeze()


def slow(*case: object) -> Any:
    """A case of a parametrised test that only `make test-all` runs."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors, and a machine that may be busy: threads would wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of tensors made by the official code."""
    folder = os.environ.get("WAN_REFERENCE_DIR")
    if not folder:
        pytest.skip("WAN_REFERENCE_DIR is not set: no official vectors here")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """tiny(task, layout="official"): a complete random checkpoint folder. Do not write into it."""
    from wan.pipeline.tiny import make_checkpoint

    base = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, str], Path] = {}

    def make(task: str, layout: str = "official") -> Path:
        if (task, layout) not in made:
            made[task, layout] = make_checkpoint(task, base / f"{task}-{layout}", layout=layout)
        return made[task, layout]

    return make


@pytest.fixture(scope="session")
def image_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 96 x 64 PNG with a gradient and noise."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    pixels = np.linspace(0, 200, 96)[None, :, None] + 55 * rng.random((64, 96, 3))
    path = tmp_path_factory.mktemp("images") / "cat.png"
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path
