"""Fixtures shared by all tests: the official vectors, and tiny checkpoints made once a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wan.pipeline.tiny import make_checkpoint

# A shell that starts tests in the background has them, and what they start, ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
Tiny = Callable[..., Path]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors, and a machine that may be busy: threads would wait for each other."""
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
    rng = np.random.default_rng(0)
    pixels = np.linspace(0, 200, 96)[None, :, None] + 55 * rng.random((64, 96, 3))
    path = tmp_path_factory.mktemp("images") / "cat.png"
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path
