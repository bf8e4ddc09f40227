"""`python -m wan.power`: measures the effect of FA_Power_Cap on a machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from wan.app import failures
from wan.settings.errors import InputError, get_exit_code
from wan.utils.text_streams import set_up_text

COMMANDS = {  # modules of wan.power, each with a main(argv)
    "report": "summarize schedule traces (--trace): order, gaps, exposed communication",
    "compare": "measure the attention modes on this machine and recommend one",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; exit codes as generate.py: 0 done, 1 failed, 2 refused."""
    set_up_text()
    argv = sys.argv[1:] if argv is None else argv
    try:
        with failures.raise_on_sigterm(), failures.ignore_closed_stdout():
            return _run_command(argv)
    except BaseException as error:
        message = failures.describe_error(error)
        if message is None:
            raise
        failures.print_error_once(message, "wan.power")
        return get_exit_code(error)


def _run_command(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m wan.power COMMAND ...\n")
        print("\n".join(f"  {name:9}{text}" for name, text in COMMANDS.items()))
        return 0
    if argv[0] == "predict":
        why, remedy = "is a program of its own", "start python benchmarks/power_model.py"
        raise InputError("The prediction", why=why, remedy=remedy)
    if argv[0] not in COMMANDS:
        raise InputError(f"There is no command {argv[0]!r}; use {', '.join(COMMANDS)}.")
    return int(import_module(f"wan.power.{argv[0]}").main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
