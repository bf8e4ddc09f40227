"""Executes a run in one process or on the ranks of torchrun."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from wan.app import failures
from wan.app.job import VideoJob
from wan.app.resolve import (
    ResolveContext,
    load_torch,
    make_random_checkpoint,
    resolve_settings,
)
from wan.app.run import Run
from wan.settings.layers import Layer
from wan.utils import env, log, system
from wan.utils.log import logger
from wan.utils.version import __version__

if TYPE_CHECKING:
    from wan.device import Device
    from wan.distributed.mesh import ParallelGroups
    from wan.distributed.rendezvous import PreparedRun, RunOncePerNode


RunFunction = Callable[[Run, "ParallelGroups | None"], int]
"""Executes a run and returns the exit code."""


def execute_run(
    read_flags: Callable[[], Layer],
    execute: RunFunction,
    require_inputs: bool = True,
    program: str = "generate.py",
) -> int:
    """Resolves settings to a run and executes it, in one process or on the ranks of torchrun.

    Args:
        read_flags: Returns the user's settings. If one rank refuses them, no rank starts.
        execute: Executes the run, with the parallel groups or None.
        require_inputs: As for `wan.app.resolve.ResolveContext`.
        program: The name before an error of the ranks.
    """
    if env.world_size() > 1:
        return _execute_on_ranks(read_flags, execute, require_inputs, program)
    context = ResolveContext(require_inputs=require_inputs)
    return execute(resolve_settings(read_flags(), context), None)


def resolve_plan(flags: Layer) -> Run:
    """Resolves settings to a run that is only planned; refuses the files that a run refuses."""
    run = resolve_settings(flags, ResolveContext(plan=True))
    load_torch()
    from wan.pipeline import build

    build.check_network_files(run.setup)
    return run


@system.sample_peak_memory()
def generate_videos(run: Run, groups: ParallelGroups | None = None) -> int:
    """Generates the videos of a run; the main rank writes them.

    Returns:
        The exit code: 1 if a line of a prompt file failed, else 0.
    """
    log.set_level(run.output.log_level)
    if groups is None:  # ranks log it before the rendezvous
        _log_start(run.settings["task"])
    for notice in run.notices:
        logger.warning(env.make_flag_naming().render(notice))
    load_torch()
    from wan import device as devices
    from wan.pipeline import build, time_estimate

    device = devices.select_device(run.setup.execution.device) if groups is None else groups.device
    pipeline = build.build_pipeline(run.setup, device, groups)
    if not run.lines:
        if device.type == "cpu" and run.decode_latents is None:
            dtype = build.DTYPES[run.setup.execution.get_dit_precision(device.type)]
            notice = time_estimate.describe_long_run(run.setup, run.params, dtype)
            if notice:
                logger.warning(env.make_flag_naming().render(notice))
        device.reset_peak_memory()
        video = VideoJob(run, pipeline, groups, None if groups is None else groups.close)
        video.extend_prompt()
        video.make()
        return 0
    from wan.app import batch_job

    has_failed = batch_job.make_videos(run, pipeline, groups)
    if groups is not None:
        groups.close()
    return 1 if has_failed else 0


def collect_start_invariants(run: Run, device: Device) -> dict[str, Any]:
    """Returns the values that must be equal on all ranks before they start; see `Run`."""
    invariants = run.collect_rank_invariants(device.type) | {"the version of wan": __version__}
    if run.setup.attention.attention_backend != "auto":  # different kernels might deadlock
        from wan.pipeline import build

        invariants["what computes attention"] = build.describe_dense_kernel(run.setup, device)
    return invariants


def _execute_on_ranks(
    read_flags: Callable[[], Layer],
    execute: RunFunction,
    require_inputs: bool,
    program: str,
) -> int:
    """Executes a run on this rank, if all ranks have resolved the same one."""
    _log_start(f"{env.world_size()} ranks")
    load_torch()
    from wan import device as devices
    from wan.distributed import rendezvous

    def prepare(run_once: RunOncePerNode) -> PreparedRun[Run]:
        make_demo = partial(make_random_checkpoint, run_once)
        context = ResolveContext(require_inputs=require_inputs, make_demo=make_demo)
        run = resolve_settings(read_flags(), context)
        device = devices.select_device(run.setup.execution.device, env.local_rank())
        run.setup.check_device(device.capabilities)
        return rendezvous.PreparedRun(
            seed=run.params.base_seed,
            with_seed=run.with_seed,
            device=device,
            mesh_sizes=run.setup.parallel.mesh_shape,
            timeout=timedelta(minutes=run.setup.parallel.dist_timeout),
            invariants=collect_start_invariants(run, device),
        )

    notify = partial(failures.print_error, command=program)
    return rendezvous.run_ranks(prepare, execute, failures.describe_error, notify)


def _log_start(subject: str) -> None:
    """Logs what is started: importing PyTorch is the longest part of the start of a small video."""
    logger.info("Starting %s: PyTorch is imported.", subject)
