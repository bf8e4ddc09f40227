"""The command line: parses, resolves, launches and generates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from wan.app import failures
from wan.app.flag_parser import parse_flags
from wan.app.launch import execute_run, generate_videos, resolve_plan
from wan.settings.errors import InputError, get_exit_code
from wan.utils import env, log


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        The exit code: 0 done, 1 failed, 2 refused, 130 interrupted, 143 terminated.
    """
    is_main = True
    try:
        with failures.raise_on_sigterm(), failures.ignore_closed_stdout():
            is_main = env.rank() == 0
            log.set_up_logging(is_main)
            argv = sys.argv[1:] if argv is None else argv
            if "--plan" in argv:
                return _print_plan(argv)
            return execute_run(partial(parse_flags, argv), generate_videos)
    except BaseException as error:
        sentence = failures.describe_error(error)
        if sentence is None:
            raise
        if is_main or isinstance(error, InputError):
            failures.print_error_once(sentence, "generate.py")
        return get_exit_code(error)
    return 0  # ignore_closed_stdout has suppressed a BrokenPipeError


def _print_plan(argv: Sequence[str]) -> int:
    """Prints the plan of a run; under torchrun on the main rank only."""
    if env.rank() > 0:
        return 0
    run = resolve_plan(parse_flags(argv))
    from wan.planner import report

    report.print_plan_report(run)
    return 0
