"""Helpers for the programs' command lines: argument types, output paths, error lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wan.app import failures
from wan.settings.errors import InputError, get_exit_code
from wan.settings.values import Reader, read_path
from wan.utils.files import OutputKind, check_output
from wan.utils.text_streams import set_up_text


def make_argument_type(reader: Reader) -> Callable[[str], Any]:
    """Returns a reader as the `type` of an argparse option."""

    def convert(raw: str) -> Any:
        try:
            return reader("", raw)
        except InputError as error:  # argparse prefixes the option's name
            raise argparse.ArgumentTypeError(str(error).rstrip(".").lstrip()) from error

    return convert


def make_output_path_type(kind: OutputKind) -> Callable[[str], Path]:
    """Returns the `type` of an option for an output file, which checks the path."""

    def read_output_path(name: str, raw: Any) -> Path:
        file: Path = read_path(name, raw)
        check_output(file, kind, name)
        return file

    return make_argument_type(Reader(read_output_path, metavar="FILE"))


def run_program(main: Callable[[], int | None], name: str | None = None) -> int:
    """Runs a program and returns its exit code; prints one line for an error a user can act on.

    Args:
        main: The program.
        name: Prefix of the error line; None: the file name of the program.
    """
    set_up_text()
    try:
        return main() or 0
    except Exception as error:
        sentence = failures.describe_error(error)
        if sentence is None:
            raise
        failures.print_error(sentence, name or Path(sys.argv[0]).name)
        return get_exit_code(error)
