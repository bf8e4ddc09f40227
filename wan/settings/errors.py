"""The errors that a user sees as one sentence instead of a traceback, and the exit codes."""

from __future__ import annotations

import errno
import os
import sys


class InputError(ValueError):
    """Says what was given, what is allowed and what to do. The command line exits with code 2."""


class WriteError(OSError):
    """Says which file could not be written, why, and what to do. Exit code 1."""


class Terminated(BaseException):
    """SIGTERM has come. Raised where the main thread is, so that what is half written is removed.

    Like KeyboardInterrupt it is no Exception: nothing that handles errors should stop it.
    """


def exit_code(error: BaseException) -> int:
    """How a process ends: 2 refused, 130 interrupted, 143 terminated, 1 failed."""
    if isinstance(error, InputError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 143 if isinstance(error, Terminated) else 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device had no memory left.

    Python and accelerators have types for it. PyTorch's CPU code has none: its allocator and its
    mapped files raise a plain RuntimeError. Both end with what the system says of ENOMEM, which is
    looked for here, because it is libc's text and not one that a version of PyTorch may rephrase.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        torch = sys.modules.get("torch")  # not imported for this: there may be no memory for it
        of_a_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
        return of_a_device or os.strerror(errno.ENOMEM) in str(error)
    return isinstance(error, MemoryError)
