"""Errors that are reported as one sentence without a traceback, and the exit codes."""

from __future__ import annotations

import errno
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_REFERENCE = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


@dataclass(frozen=True)
class FlagNaming:
    """How a front end (command line, Python, HTTP) writes a setting in messages.

    Attributes:
        format_setting: Formats a setting from its name and its value; a value of None gives the
            name alone.
        names: Flag -> the front end's name of it, where the two differ.
        remedies: Names of settings in remedies; None: as elsewhere.
    """

    format_setting: Callable[[str, str | None], str]
    names: Mapping[str, str] = field(default_factory=dict)
    remedies: FlagNaming | None = None

    def render(self, text: str) -> str:
        """Replaces each `name` and `name=value` in backticks by the front end's form of it."""

        return _REFERENCE.sub(lambda match: self.render_setting(match[1], match[2]), text)

    def render_setting(self, name: str, value: str | None = None) -> str:
        """Formats the setting of a flag for this front end."""
        return self.format_setting(self.names.get(name, name), value)


KEYWORD_NAMING = FlagNaming(lambda name, value: name if value is None else f"{name}={value}")
"""Settings as keyword arguments with the flags' names."""
COMMAND_LINE_NAMING = FlagNaming(
    lambda name, value: f"--{name}" if value is None else f"--{name} {value}"
)


def make_file_naming(path: object) -> FlagNaming:
    """Returns how settings of a file are written: `record.json: sample_steps 8`."""
    return FlagNaming(
        lambda name, value: f"{path}: {name}" + ("" if value is None else f" {value}")
    )


class EndedError(Exception):
    """All ranks have agreed to end a video between two steps.

    Attributes:
        code: "cancelled", or "ended" where another rank has failed.
    """

    def __init__(self, code: str) -> None:
        super().__init__(f"The video was {code}.")
        self.code = code


class InputError(ValueError):
    """Input is refused.

    The message is one sentence: "SUBJECT VALUE WHY; REMEDY." Each part writes a setting in
    backticks with the flag's name, `comm_type` or `comm_type=1`; the front end that reports the
    error replaces it, for example by `--comm_type 1`. The command line exits with code 2.

    Args:
        subject: A setting in backticks, a file, or a noun.
        value: The refused value; None where the subject needs none.
        why: Predicate: "has no effect with `ring_size=1`".
        remedy: Suggestion: "drop it or use a larger ring".

    Example:
        >>> str(InputError("`ring_type`", "ring", "has no effect with `ring_size=1`", "drop it"))
        'ring_type=ring has no effect with ring_size=1; drop it.'
    """

    naming: FlagNaming = KEYWORD_NAMING

    def __init__(self, subject: str, value: object = None, why: str = "", remedy: str = "") -> None:
        super().__init__(subject, value, why, remedy)
        self.subject, self.value, self.why, self.remedy = subject, value, why, remedy

    def __str__(self) -> str:
        subject = _shorten_words(self.naming.render(self.subject))
        setting = re.fullmatch(r"`(\w+)`", self.subject)
        if self.value is not None and setting:  # backticks in a value stay as typed
            subject = self.naming.render_setting(setting[1], _shorten_words(str(self.value)))
        elif self.value is not None:
            subject = f"{subject} {_shorten_words(str(self.value))}"
        why = _shorten_words(self.naming.render(self.why))
        sentence = " ".join(part for part in (subject, why) if part)
        remedy = (self.naming.remedies or self.naming).render(self.remedy)
        sentence = "; ".join(part for part in (sentence, remedy) if part)
        sentence = escape_controls(sentence)
        return sentence if sentence.endswith((".", "?")) else f"{sentence}."


def escape_controls(text: str) -> str:
    """Escapes characters that control a terminal or the direction of text, such as `\\x1b`.

    Names in files of others may hold them. Line breaks are escaped too, spaces are not.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _shorten_words(text: str) -> str:
    """Cuts the middle out of words of 400 or more characters, such as long paths."""
    return re.sub(
        r"\S{400,}",
        lambda match: f"{match[0][:60]}...{match[0][-20:]} ({len(match[0])} long)",
        text,
    )


@contextmanager
def name_settings(naming: FlagNaming) -> Iterator[None]:
    """Formats the InputErrors that leave this block for a front end; an inner block wins."""
    try:
        yield
    except InputError as error:
        vars(error).setdefault("naming", naming)
        raise


class WriteError(OSError):
    """A file could not be written. Exit code 1."""


class FileChangedError(OSError):
    """A file changed, or proved to be damaged, while a run used it. Exit code 1."""


class NotFiniteError(ArithmeticError):
    """The latents after a step contain NaN or infinity.

    All ranks have the same latents and raise it together. Exit code 1.

    Attributes:
        latents: Latents after that step, float32 [Z,f,h,w].
    """

    def __init__(self, sentence: str, latents: Any) -> None:
        super().__init__(sentence)
        self.latents = latents


class Terminated(BaseException):
    """SIGTERM was received. Raised in the main thread, so that unfinished files are removed.

    Like KeyboardInterrupt it is no Exception, so that error handlers do not catch it.
    """


def get_exit_code(error: BaseException) -> int:
    """Returns the exit code of an error: 2 refused, 130 interrupted, 143 terminated, 1 failed."""
    if isinstance(error, InputError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 143 if isinstance(error, Terminated) else 1


def is_disk_full(error: BaseException) -> bool:
    """Whether the error is a full disk or an exhausted disk quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is exhausted host or device memory.

    PyTorch's CPU allocator and its memory-mapped files raise a plain RuntimeError. Both messages
    end with libc's text for ENOMEM, which is searched for here, because PyTorch may rephrase the
    rest.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        torch = sys.modules.get("torch")  # not imported here: there may be no memory for it
        is_device_error = torch is not None and isinstance(error, torch.OutOfMemoryError)
        return is_device_error or os.strerror(errno.ENOMEM) in str(error)
    return isinstance(error, MemoryError)
