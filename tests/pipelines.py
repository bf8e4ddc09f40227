"""Pipelines of tests that look at parts of a run."""

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
    """A checkpoint's pipeline in one process; values: as of the flags of these names."""
    checkpoint = inspect_checkpoint(folder)
    setup, _ = make_setup({**values, "device": "cpu"}, PRESETS[task], checkpoint, world_size=1)
    return build.build_pipeline(setup, select_device("cpu"))


def composed(folder: Path, *argv: str) -> tuple[Run, Pipeline]:
    """What a quick command line asks for, and the pipeline that makes it."""
    task = () if "--task" in argv else ("--task", folder.name)
    asked = asked_for(flags.parse_flags(["--ckpt_dir", str(folder), *QUICK, *task, *argv]), no_demo)
    return asked, build.build_pipeline(asked.setup, select_device("cpu"))


def planned(*argv: object) -> Run:
    """What `--plan` and these words ask for."""
    return asked_for(flags.parse_flags(["--plan", *map(str, argv)]), no_demo, plan=True)


def no_demo(*_: Any) -> None:
    raise AssertionError("no demo checkpoint is asked for here")


def latents(folder: Path, *argv: str) -> Tensor:
    """The latents of a quick command line."""
    asked, pipeline = composed(folder, *argv)
    return pipeline.generate_latents(asked.params)


def held(network: nn.Module) -> int:
    """Bytes of memory behind the tensors of a network that are not in mapped files."""
    tensors = (x for x in (*network.parameters(), *network.buffers()) if owns_memory(x))
    storages = (x.untyped_storage() for x in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
