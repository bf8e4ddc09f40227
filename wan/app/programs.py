"""Helpers for the programs' command lines: argument types, output paths, error lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

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


_INSTALL_COMMANDS = {  # package of some programs only -> how to install it
    "aiohttp": 'pip install "ray[serve]"',
    "gguf": "pip install -r requirements-dev.txt",
    "matplotlib": "pip install -r requirements-power.txt",
    "ray": 'pip install "ray[serve]"',
    "starlette": "pip install -r requirements-serve.txt",
    "xfuser": "pip install -r requirements-cuda.txt",
}


def _describe_missing_package(error: BaseException) -> str | None:
    """Returns a sentence for a package that only some programs need; None for other errors."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").partition(".")[0]
    command = _INSTALL_COMMANDS.get(package)
    return None if command is None else f"The package {package} is not installed; {command}."


def exit_without_package(error: ModuleNotFoundError) -> NoReturn:
    """Ends a program that cannot import a package at its start: one sentence, exit code 2.

    Raises:
        ModuleNotFoundError: The package is one that every program needs.
    """
    sentence = _describe_missing_package(error)
    if sentence is None:
        raise error
    failures.print_error_once(sentence, Path(sys.argv[0]).name)
    sys.exit(2)


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
        missing_package = _describe_missing_package(error)
        sentence = missing_package or failures.describe_error(error)
        if sentence is None:
            raise
        failures.print_error_once(sentence, name or Path(sys.argv[0]).name)
        return 2 if missing_package else get_exit_code(error)
