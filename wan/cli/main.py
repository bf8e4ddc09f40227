"""The command line: parses, resolves, launches and generates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import wan
from wan import env, host, log
from wan.checkpoint.layout import inspect_checkpoint
from wan.cli import failures, flags
from wan.cli.output import check_current_folder, usable_paths
from wan.cli.resolve import resolve
from wan.cli.videos import Video
from wan.log import logger
from wan.run import Run
from wan.settings.errors import InputError, get_exit_code

if TYPE_CHECKING:
    from wan.distributed.mesh import ParallelGroups
    from wan.distributed.rendezvous import PreparedRun, RunOncePerNode

Work = Callable[[Run, "Team | None"], int]
"""Executes a run and returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        The exit code: 0 done, 1 failed, 2 refused, 130 interrupted, 143 terminated.
    """
    speaks = True
    try:
        with failures.terminable(), failures.readable():
            speaks = env.rank() == 0
            log.setup(speaks)
            argv = sys.argv[1:] if argv is None else argv
            if "--plan" in argv:
                return _plan(argv)
            return carry_out(argv, generate)
    except BaseException as error:
        sentence = failures.describe(error)
        if sentence is None:
            raise
        if speaks or isinstance(error, InputError):
            failures.say(sentence)
        return get_exit_code(error)
    return 0  # stdout was closed


def carry_out(argv: Sequence[str], work: Work, inputs: bool = True) -> int:
    """Resolves and executes a command line, in one process or on the ranks of torchrun.

    Args:
        argv: The command line without the program's name.
        work: Executes the run, with the parallel groups or None.
        require_inputs: As for `wan.run.resolve_run`.
    """
    if env.world_size() > 1:
        return _launch(argv, work, inputs)
    return work(resolved(argv, inputs=inputs), None)


@host.memory_sampled()
def generate(run: Run, team: ParallelGroups | None = None) -> int:
    """Generates the videos of a run; the main rank writes them.

    Returns:
        The exit code: 1 if a line of a prompt file failed, else 0.
    """
    load_torch()
    from wan import device as devices
    from wan.pipeline import build

    log.set_level(run.output.log_level)
    for notice in run.notices:
        logger.warning(env.words().render(notice))
    device = devices.resolve(run.setup.execution.device) if team is None else team.device
    pipeline = build.build_pipeline(run.setup, device, team)
    if not run.lines:
        device.reset_peak_memory()
        video = Video(run, pipeline, team, None if team is None else team.close)
        video.extend_prompt()
        video.make()
        return 0
    from wan.cli import many

    failed = many.make(run, pipeline, team)
    if team is not None:
        team.close()
    return 1 if failed else 0


def resolved(
    argv: Sequence[str],
    once: RunOncePerNode = lambda make: make(),
    plan: bool = False,
    inputs: bool = True,
) -> Run:
    """Resolves a command line to a run.

    Args:
        argv: The command line without the program's name.
        run_once: Calls a function on one rank of each machine.
        plan, require_inputs: As for `wan.run.resolve_run`.
    """
    with usable_paths():
        given = flags.parse(argv)
        if not plan and "save_file" not in given:
            check_current_folder()
        if "prompt_file" in given:
            if plan:
                raise InputError("`plan` is about one video; drop `prompt_file`.")
            from wan.cli import prompt_file

            return prompt_file.resolved(
                given,
                partial(
                    resolve, make_demo=partial(make_demo, once), describe=cache(inspect_checkpoint)
                ),
            )
        return resolve(given, partial(make_demo, once), plan, inputs=inputs)


def _plan(argv: Sequence[str]) -> int:
    """Prints the plan of a run; under torchrun on the main rank only."""
    if env.rank() > 0:
        return 0
    run = resolved(argv, plan=True)
    load_torch()
    from wan.planner import report

    report.print_plan_report(run)
    return 0


def _launch(argv: Sequence[str], work: Work, inputs: bool) -> int:
    """Executes a command line as one of several ranks."""
    load_torch()
    from wan import device as devices
    from wan.distributed import rendezvous

    def prepare(once: RunOncePerNode) -> PreparedRun[Run]:
        run = resolved(argv, once, inputs=inputs)
        device = devices.resolve(run.setup.execution.device, env.local_rank())
        run.setup.check_device(device.can)
        facts = run.facts(device.type) | {"the version of wan": wan.__version__}
        if run.setup.attention.attention_backend != "auto":  # different kernels might deadlock
            from wan.pipeline import build

            facts["what computes attention"] = build.describe_dense_kernel(run.setup, device)
        return rendezvous.PreparedRun(
            seed=run.request.base_seed,
            with_seed=run.with_seed,
            device=device,
            mesh_sizes=run.setup.parallel.mesh_shape,
            timeout=timedelta(minutes=run.setup.parallel.dist_timeout),
            invariants=facts,
        )

    return rendezvous.run_ranks(prepare, work, failures.describe, failures.say)


def make_demo(once: RunOncePerNode, task: str, folder: Path) -> None:
    """Writes a randomly initialised checkpoint on one rank of each machine; the others wait."""
    load_torch()
    from wan.pipeline.tiny import make_checkpoint

    def make() -> None:
        logger.info("Making the randomly initialised checkpoint %s (once).", folder)
        try:
            make_checkpoint(task, folder)
        except (OSError, InputError):
            if not folder.is_dir():  # otherwise another run has just written it
                raise

    once(make)


def load_torch() -> None:
    """Imports torch; raises InputError if it loads torch-npu and CANN is missing."""
    try:
        import torch  # noqa: F401
    except RuntimeError as error:
        raise InputError(
            f"PyTorch does not load ({str(error).splitlines()[0]}); if torch-npu is installed, "
            "install CANN and source its set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run "
            "without NPUs."
        ) from error
