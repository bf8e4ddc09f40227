"""Builds pipelines for tests of parts of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.source import owns_memory
from wan.cli import flags
from wan.cli.resolve import resolve_command_line as asked_for
from wan.device import select_device
from wan.pipeline import build
from wan.pipeline.pipeline import Pipeline
from wan.run import Run, make_setup
from wan.settings.presets import PRESETS

QUICK = ["--size", "64*64", "--frame_num", "5", "--base_seed", "7", "--device", "cpu"]


def on_cpu(task: str, folder: Path, **values: Any) -> Pipeline:
    """Builds a checkpoint's pipeline on one CPU process. values: Settings by flag name."""
    checkpoint = inspect_checkpoint(folder)
    setup, _ = make_setup({**values, "device": "cpu"}, PRESETS[task], checkpoint, world_size=1)
    return build.build_pipeline(setup, select_device("cpu"))


def composed(folder: Path, *argv: str) -> tuple[Run, Pipeline]:
    """Returns the run of a short command line (see `QUICK`), and its pipeline."""
    task = () if "--task" in argv else ("--task", folder.name)
    asked = asked_for(flags.parse_flags(["--ckpt_dir", str(folder), *QUICK, *task, *argv]), no_demo)
    return asked, build.build_pipeline(asked.setup, select_device("cpu"))


def planned(*argv: object) -> Run:
    """Returns the run of `--plan` with these arguments."""
    return asked_for(flags.parse_flags(["--plan", *map(str, argv)]), no_demo, plan=True)


def no_demo(*_: Any) -> None:
    raise AssertionError("no demo checkpoint is asked for here")


def latents(folder: Path, *argv: str) -> Tensor:
    """Generates the latents of a short command line."""
    asked, pipeline = composed(folder, *argv)
    return pipeline.generate_latents(asked.params)


def held(network: nn.Module) -> int:
    """Returns the bytes of the tensors of a network that are not in memory-mapped files."""
    tensors = (x for x in (*network.parameters(), *network.buffers()) if owns_memory(x))
    storages = (x.untyped_storage() for x in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
