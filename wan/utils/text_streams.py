"""Text that a program reads and prints, with any encoding of the locale."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


def set_up_text() -> None:
    """Makes a program read its arguments and files as UTF-8, and print any text.

    A program calls it first. Where Python would decode arguments, names of files and variables by a
    locale that is not UTF-8, the program starts again in Python's UTF-8 mode. What an output cannot
    encode is escaped, as Python does on stderr.
    """
    is_new_start = os.environ.get("PYTHONUTF8") == "1"
    if sys.getfilesystemencoding().lower() not in ("utf-8", "utf8") and not is_new_start:
        _restart_in_utf8_mode()
    if isinstance(sys.stdout, io.TextIOWrapper):  # not what a test or another program put there
        sys.stdout.reconfigure(errors="backslashreplace")


def _restart_in_utf8_mode() -> None:
    """Replaces this process by the same command; its outputs keep their encoding."""
    os.environ["PYTHONUTF8"] = "1"  # also for the processes that it starts
    if sys.stdout is not None:
        os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
