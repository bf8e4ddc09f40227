"""Pipelines of tests that look at parts of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wan.checkpoint.layout import describe
from wan.device import resolve
from wan.pipeline import build
from wan.pipeline.pipeline import Pipeline
from wan.run import make_setup
from wan.settings.presets import PRESETS


def on_cpu(task: str, folder: Path, **values: Any) -> Pipeline:
    """A checkpoint's pipeline in one process; values: as of the flags of these names."""
    checkpoint = describe(folder)
    setup, _ = make_setup({**values, "device": "cpu"}, PRESETS[task], checkpoint, world=1)
    return build.pipeline(setup, resolve("cpu"))
