"""Builds pipelines for tests of parts of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from wan.app import flag_parser, resolve
from wan.app.resolve import ResolveContext, make_setup, resolve_video
from wan.app.run import Run
from wan.checkpoint.formats.tensor_source import owns_memory
from wan.checkpoint.layout import inspect_checkpoint
from wan.device import select_device
from wan.pipeline import build, memory_estimate
from wan.pipeline.pipeline import Pipeline
from wan.planner.measure import Planner
from wan.settings.errors import COMMAND_LINE_NAMING
from wan.settings.layers import Layer, read_layer
from wan.settings.presets import PRESETS
from wan.settings.run_options import read_run_options

QUICK = ["--size", "64*64", "--frame_num", "5", "--base_seed", "7", "--device", "cpu"]


def build_cpu_pipeline(task: str, folder: Path, **values: Any) -> Pipeline:
    """Builds a checkpoint's pipeline on one CPU process. values: Settings by flag name."""
    checkpoint = inspect_checkpoint(folder)
    setup, _ = make_setup(
        read_run_options({**values, "device": "cpu"}), PRESETS[task], checkpoint, world_size=1
    )
    return build.build_pipeline(setup, select_device("cpu"))


def build_quick_pipeline(folder: Path, *argv: str) -> tuple[Run, Pipeline]:
    """Returns the run of a short command line (see `QUICK`), and its pipeline."""
    task = () if "--task" in argv else ("--task", folder.name)
    run = resolve_video(
        ResolveContext(make_demo=fail_on_demo),
        flag_parser.parse_flags(["--ckpt_dir", str(folder), *QUICK, *task, *argv]),
    )
    return run, build.build_pipeline(run.setup, select_device("cpu"))


def resolve_argv(argv: Sequence[object], **options: Any) -> Run:
    """Returns the run of a command line. options: As for `ResolveContext`."""
    flags = flag_parser.parse_flags([*map(str, argv)])
    return resolve.resolve_settings(flags, ResolveContext(**options))


def resolve_plan(*argv: object) -> Run:
    """Returns the run of `--plan` with these arguments."""
    return resolve_video(
        ResolveContext(plan=True, make_demo=fail_on_demo),
        flag_parser.parse_flags(["--plan", *map(str, argv)]),
    )


def read_values(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reads settings, texts or JSON, which need not fit together."""
    return read_layer(raw, "a test", COMMAND_LINE_NAMING, "record").values


def make_layer(raw: Mapping[str, Any]) -> Layer:
    """Reads settings of one source, texts or JSON, as a layer."""
    return read_layer(raw, "a test", COMMAND_LINE_NAMING)


def fail_on_demo(*_: Any) -> None:
    raise AssertionError("no demo checkpoint is asked for here")


def generate_quick_latents(folder: Path, *argv: str) -> Tensor:
    """Generates the latents of a short command line."""
    run, pipeline = build_quick_pipeline(folder, *argv)
    return pipeline.generate_latents(run.params)


def make_experts(network: Any) -> Any:
    """Returns a loop's experts, each of which is this network."""
    return SimpleNamespace(get=lambda _: network, prefetch=lambda _: None)


def estimate_run(run: Run) -> dict[str, memory_estimate.Usage]:
    """Returns the memory of a run's stages as it is estimated before it is loaded."""
    sizes = memory_estimate.estimate_network_sizes(run.setup, run.params)
    return memory_estimate.compute_stage_memory(run.setup, run.params, sizes)


def plan_stages(run: Run) -> dict[str, memory_estimate.Usage]:
    """Returns the memory of a run's stages as a plan measures it."""
    return Planner(run.setup, run.params).compute_stage_memory()


def count_owned_bytes(network: nn.Module) -> int:
    """Returns the bytes of the tensors of a network that are not in memory-mapped files."""
    tensors = (x for x in (*network.parameters(), *network.buffers()) if owns_memory(x))
    storages = (x.untyped_storage() for x in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
