"""Handles failures: sentences for errors, unusable paths, SIGTERM, and a closed stdout."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from wan.settings.errors import (
    FileChangedError,
    InputError,
    NotFiniteError,
    Terminated,
    WriteError,
    escape_controls,
    is_disk_full,
    is_out_of_memory,
)
from wan.utils import env

DECODING_NOTE = "while the video was decoded"
"""Exception note of errors during decoding."""


def describe_error(error: BaseException) -> str | None:
    """Returns a sentence for an error that a user can act on; None for other errors."""
    if isinstance(error, InputError):
        vars(error).setdefault("naming", env.make_flag_naming())
    if isinstance(error, InputError | WriteError | FileChangedError | NotFiniteError):
        return escape_controls(str(error))
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the video was not written."
    if isinstance(error, Terminated):
        return "terminated; the video was not written."
    if is_out_of_memory(error):
        remedy = "choose a smaller --size or --frame_num, or use --offload_model block"
        if DECODING_NOTE in getattr(error, "__notes__", ()):
            remedy = "decode the saved latents with --vae_tiling, or on a machine with more memory"
        return f"Out of memory; {remedy}; --plan reports what a run needs."
    if is_disk_full(error):
        name = getattr(error, "filename", None)
        location = "" if name is None else f" where {escape_controls(str(name))} is written"
        return f"The disk is full{location}; make space and start again."
    return None


@contextmanager
def refuse_unusable_paths() -> Iterator[None]:
    """Turns the system's errors for a path (too long, not permitted, I/O) into InputError."""
    try:
        yield
    except OSError as error:
        subject = "A path" if error.filename is None else os.fsdecode(error.filename)
        why = f"cannot be used ({error.strerror or error})"
        raise InputError(subject, why=why, remedy="give another one") from error


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise `Terminated` inside the block, if it runs in the main thread.

    SIGINT raises KeyboardInterrupt: a rank that torchrun has forked has torchrun's handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(_: int, __: FrameType | None) -> NoReturn:
        raise Terminated

    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    if callable(signal.getsignal(signal.SIGINT)):  # else the starting program ignores it
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def ignore_closed_stdout() -> Iterator[None]:
    """Ends the block without an error when the reader of stdout closes it, as `| head` does."""
    try:
        yield
        if sys.stdout is not None:  # None after `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


_SECONDS_OF_TORCHRUN = 30.0
"""torchrun ends the other ranks of a machine in this time after one has ended."""


def print_error_once(text: str, command: str) -> None:
    """Writes the error of a process that may be one of torchrun's ranks; see `print_error`.

    The first rank of a machine writes it. The others wait until torchrun ends them; if it does not,
    the first rank has no error, and they write theirs.
    """
    try:
        is_first = env.rank() == 0 or env.local_rank() == 0
    except InputError:  # invalid variables
        is_first = True
    if not is_first:
        if isinstance(sys.exc_info()[1], Terminated):  # by torchrun: the first rank has failed
            return
        time.sleep(_SECONDS_OF_TORCHRUN)
    print_error(text, command)


def print_error(text: str, command: str = "generate.py") -> None:
    """Writes one line to stderr, prefixed with the command's name."""
    sentence = escape_controls(" ".join(text.split()))
    sys.stderr.write(f"{command}: {sentence}\n")  # one write: several ranks may print
    sys.stderr.flush()
