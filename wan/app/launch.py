"""Resolves command lines to runs, and executes a run in one process or on the ranks of torchrun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from wan.app import failures, flag_parser
from wan.app.job import VideoJob
from wan.app.output import check_current_folder, refuse_unusable_paths
from wan.app.resolve import resolve_command_line
from wan.app.run import Run
from wan.checkpoint.layout import inspect_checkpoint
from wan.settings.errors import InputError
from wan.utils import env, log, system
from wan.utils.log import logger
from wan.utils.version import __version__

if TYPE_CHECKING:
    from wan.distributed.mesh import ParallelGroups
    from wan.distributed.rendezvous import PreparedRun, RunOncePerNode


RunFunction = Callable[[Run, "ParallelGroups | None"], int]


"""Executes a run and returns the exit code."""


def execute_command_line(
    argv: Sequence[str], execute: RunFunction, require_inputs: bool = True
) -> int:
    """Resolves and executes a command line, in one process or on the ranks of torchrun.

    Args:
        argv: The command line without the program's name.
        execute: Executes the run, with the parallel groups or None.
        require_inputs: As for `wan.app.make_run.resolve_run`.
    """
    if env.world_size() > 1:
        return _execute_as_rank(argv, execute, require_inputs)
    return execute(resolve_argv(argv, require_inputs=require_inputs), None)


@system.sample_peak_memory()
def generate_videos(run: Run, groups: ParallelGroups | None = None) -> int:
    """Generates the videos of a run; the main rank writes them.

    Returns:
        The exit code: 1 if a line of a prompt file failed, else 0.
    """
    load_torch()
    from wan import device as devices
    from wan.pipeline import build

    log.set_level(run.output.log_level)
    for notice in run.notices:
        logger.warning(env.make_flag_naming().render(notice))
    device = devices.select_device(run.setup.execution.device) if groups is None else groups.device
    pipeline = build.build_pipeline(run.setup, device, groups)
    if not run.lines:
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


def resolve_argv(
    argv: Sequence[str],
    run_once: RunOncePerNode = lambda make: make(),
    plan: bool = False,
    require_inputs: bool = True,
) -> Run:
    """Resolves a command line to a run.

    Args:
        argv: The command line without the program's name.
        run_once: Calls a function on one rank of each node; the others wait.
        plan, require_inputs: As for `wan.app.make_run.resolve_run`.
    """
    with refuse_unusable_paths():
        user_settings = flag_parser.parse_flags(argv)
        if not plan and "save_file" not in user_settings:
            check_current_folder()
        if "prompt_file" in user_settings:
            if plan:
                raise InputError("`plan` is about one video; drop `prompt_file`.")
            from wan.app import prompt_file

            resolve = partial(
                resolve_command_line,
                make_demo=partial(make_random_checkpoint, run_once),
                inspect_folder=cache(inspect_checkpoint),
            )
            return prompt_file.resolve_prompt_file(user_settings, resolve)
        return resolve_command_line(
            user_settings,
            partial(make_random_checkpoint, run_once),
            plan,
            require_inputs=require_inputs,
        )


def _execute_as_rank(argv: Sequence[str], execute: RunFunction, require_inputs: bool) -> int:
    """Executes a command line as one of several ranks."""
    load_torch()
    from wan import device as devices
    from wan.distributed import rendezvous

    def prepare(run_once: RunOncePerNode) -> PreparedRun[Run]:
        run = resolve_argv(argv, run_once, require_inputs=require_inputs)
        device = devices.select_device(run.setup.execution.device, env.local_rank())
        run.setup.check_device(device.capabilities)
        invariants = run.collect_rank_invariants(device.type) | {"the version of wan": __version__}
        if run.setup.attention.attention_backend != "auto":  # different kernels might deadlock
            from wan.pipeline import build

            invariants["what computes attention"] = build.describe_dense_kernel(run.setup, device)
        return rendezvous.PreparedRun(
            seed=run.params.base_seed,
            with_seed=run.with_seed,
            device=device,
            mesh_sizes=run.setup.parallel.mesh_shape,
            timeout=timedelta(minutes=run.setup.parallel.dist_timeout),
            invariants=invariants,
        )

    return rendezvous.run_ranks(prepare, execute, failures.describe_error, failures.print_error)


def make_random_checkpoint(run_once: RunOncePerNode, task: str, folder: Path) -> None:
    """Writes a randomly initialized checkpoint on one rank of each node; the others wait."""
    load_torch()
    from wan.testing.random_checkpoint import make_checkpoint

    def make_once() -> None:
        logger.info("Making the randomly initialized checkpoint %s (once).", folder)
        try:
            make_checkpoint(task, folder)
        except (OSError, InputError):
            if not folder.is_dir():  # otherwise another run has just written it
                raise

    run_once(make_once)


def load_torch() -> None:
    """Imports torch; raises InputError if it does not load, as with torch-npu but without CANN."""
    try:
        import torch  # noqa: F401
    except RuntimeError as error:
        raise InputError(
            f"PyTorch does not load ({str(error).splitlines()[0]}); if torch-npu is installed, "
            "install CANN and source its set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run "
            "without NPUs."
        ) from error
