"""Resolves settings to runs, and executes a run in one process or on the ranks of torchrun."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from wan.app import failures
from wan.app.failures import refuse_unusable_paths
from wan.app.job import VideoJob
from wan.app.output import check_current_folder
from wan.app.prompt_file import resolve_prompt_file
from wan.app.resolve import resolve_command_line
from wan.app.run import Run
from wan.checkpoint.layout import inspect_checkpoint
from wan.settings.errors import InputError
from wan.settings.rules import Values
from wan.utils import env, log, system
from wan.utils.log import logger
from wan.utils.version import __version__

if TYPE_CHECKING:
    from wan.distributed.mesh import ParallelGroups
    from wan.distributed.rendezvous import PreparedRun, RunOncePerNode


RunFunction = Callable[[Run, "ParallelGroups | None"], int]
"""Executes a run and returns the exit code."""


def execute_run(
    read_user_settings: Callable[[], Values], execute: RunFunction, require_inputs: bool = True
) -> int:
    """Resolves settings to a run and executes it, in one process or on the ranks of torchrun.

    Args:
        read_user_settings: Returns the user's settings. If one rank refuses them, no rank starts.
        execute: Executes the run, with the parallel groups or None.
        require_inputs: As for `wan.app.resolve.resolve_run`.
    """
    if env.world_size() > 1:
        return _execute_on_ranks(read_user_settings, execute, require_inputs)
    return execute(resolve_settings(read_user_settings(), require_inputs=require_inputs), None)


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


@refuse_unusable_paths()
def resolve_settings(
    user_settings: Values,
    run_once: RunOncePerNode = lambda make: make(),
    plan: bool = False,
    require_inputs: bool = True,
) -> Run:
    """Resolves the user's settings to a run of one video or of a prompt file.

    Args:
        user_settings: Checked settings, as from `wan.app.flag_parser.parse_flags`.
        run_once: Calls a function on one rank of each node; the others wait.
        plan, require_inputs: As for `wan.app.resolve.resolve_run`.
    """
    if not plan and "save_file" not in user_settings:
        check_current_folder()
    if "prompt_file" in user_settings:
        if plan:
            raise InputError("`plan` is about one video; drop `prompt_file`.")
        return resolve_prompt_file(user_settings, partial(make_line_resolver, run_once=run_once))
    make_demo = partial(make_random_checkpoint, run_once)
    return resolve_command_line(user_settings, make_demo, plan, require_inputs=require_inputs)


def make_line_resolver(
    shared: Values, run_once: RunOncePerNode = lambda make: make()
) -> Callable[[Values], Run]:
    """Returns a function that resolves the settings of one of several videos.

    They override the shared settings. The checkpoint folder is inspected once.
    """
    make_demo = partial(make_random_checkpoint, run_once)
    inspect_folder = cache(inspect_checkpoint)

    def resolve_line(line_settings: Values) -> Run:
        names = {"clip_prompts"} if "prompt" in line_settings else set()
        if "timesteps" in line_settings:  # they replace the whole schedule
            names |= {"timesteps", "sample_steps", "sample_shift", "boundary_step"}
        inherited = {name: value for name, value in shared.items() if name not in names}
        settings = inherited | {**line_settings}
        return resolve_command_line(settings, make_demo, inspect_folder=inspect_folder)

    return resolve_line


def _execute_on_ranks(
    read_user_settings: Callable[[], Values], execute: RunFunction, require_inputs: bool
) -> int:
    """Executes a run on this rank, if all ranks have resolved the same one."""
    load_torch()
    from wan import device as devices
    from wan.distributed import rendezvous

    def prepare(run_once: RunOncePerNode) -> PreparedRun[Run]:
        run = resolve_settings(read_user_settings(), run_once, require_inputs=require_inputs)
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
