"""Builds pipelines for tests of parts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wan.app import flag_parser, resolve
from wan.app.resolve import make_setup
from wan.app.resolve import resolve_command_line as asked_for
from wan.app.run import Run
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.tensor_source import owns_memory
from wan.device import select_device
from wan.pipeline import build
from wan.pipeline.pipeline import Pipeline
from wan.settings.presets import PRESETS

QUICK = ["--size", "64*64", "--frame_num", "5", "--base_seed", "7", "--device", "cpu"]


def build_cpu_pipeline(task: str, folder: Path, **values: Any) -> Pipeline:
    """Builds a checkpoint's pipeline on one CPU process. values: Settings by flag name."""
    checkpoint = inspect_checkpoint(folder)
    setup, _ = make_setup({**values, "device": "cpu"}, PRESETS[task], checkpoint, world_size=1)
    return build.build_pipeline(setup, select_device("cpu"))


def build_quick_pipeline(folder: Path, *argv: str) -> tuple[Run, Pipeline]:
    """Returns the run of a short command line (see `QUICK`), and its pipeline."""
    task = () if "--task" in argv else ("--task", folder.name)
    run = asked_for(
        flag_parser.parse_flags(["--ckpt_dir", str(folder), *QUICK, *task, *argv]), fail_on_demo
    )
    return run, build.build_pipeline(run.setup, select_device("cpu"))


def resolve_argv(argv: Sequence[object], **options: Any) -> Run:
    """Returns the run of a command line. options: As for `resolve_settings`."""
    return resolve.resolve_settings(flag_parser.parse_flags([*map(str, argv)]), **options)


def resolve_plan(*argv: object) -> Run:
    """Returns the run of `--plan` with these arguments."""
    return asked_for(flag_parser.parse_flags(["--plan", *map(str, argv)]), fail_on_demo, plan=True)


def fail_on_demo(*_: Any) -> None:
    raise AssertionError("no demo checkpoint is asked for here")


def generate_quick_latents(folder: Path, *argv: str) -> Tensor:
    """Generates the latents of a short command line."""
    run, pipeline = build_quick_pipeline(folder, *argv)
    return pipeline.generate_latents(run.params)


def count_owned_bytes(network: nn.Module) -> int:
    """Returns the bytes of the tensors of a network that are not in memory-mapped files."""
    tensors = (x for x in (*network.parameters(), *network.buffers()) if owns_memory(x))
    storages = (x.untyped_storage() for x in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
