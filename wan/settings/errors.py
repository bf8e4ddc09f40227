"""The errors that a user sees as one sentence instead of a traceback, and the exit codes."""


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
