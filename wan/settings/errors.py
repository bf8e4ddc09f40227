"""The errors that a user sees as one sentence instead of a traceback, and the exit codes."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_REFERENCE = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


@dataclass(frozen=True)
class Words:
    """How a front end writes a setting.

    Attributes:
        setting: Writes a setting from its name and its value, which is None where only the name
            matters.
        names: The front end's own names, where they differ from the flags'.
    """

    setting: Callable[[str, str | None], str]
    names: Mapping[str, str] = field(default_factory=dict)

    def render(self, text: str) -> str:
        """The text with every `name` and `name=value` in backticks written for this front end."""

        return _REFERENCE.sub(lambda found: self.write(found[1], found[2]), text)

    def write(self, name: str, value: str | None = None) -> str:
        """A setting, from its flag's name, as this front end writes it."""
        return self.setting(self.names.get(name, name), value)


KEYWORDS = Words(lambda name, value: name if value is None else f"{name}={value}")
"""Settings as in a Python call, with the flags' names."""
COMMAND_LINE = Words(lambda name, value: f"--{name}" if value is None else f"--{name} {value}")


class EndedError(Exception):
    """A video that all ranks have agreed to end between two steps.

    Attributes:
        code: "cancelled", or "ended" because of another rank.
    """

    def __init__(self, code: str) -> None:
        super().__init__(f"The video was {code}.")
        self.code = code


class InputError(ValueError):
    """Refused input: what it is about, its value, why it is refused, and what to do.

    In every part a setting stands in backticks under its flag's name, `comm_type` or `comm_type=1`;
    the front end that reports the error writes it in its own words. The parts form one sentence:
    "WHAT VALUE WHY; REMEDY." The command line exits with code 2.

    Args:
        what: The subject of the sentence: a setting in backticks, a file, a noun.
        value: The value that was given; None where the subject says enough.
        why: The predicate: "has no effect with `ring_size=1`".
        remedy: What to do: "drop it or use a larger ring".

    Example:
        >>> str(InputError("`ring_type`", "ring", "has no effect with `ring_size=1`", "drop it"))
        'ring_type=ring has no effect with ring_size=1; drop it.'
    """

    words: Words = KEYWORDS

    def __init__(self, what: str, value: object = None, why: str = "", remedy: str = "") -> None:
        super().__init__(what, value, why, remedy)
        self.what, self.value, self.why, self.remedy = what, value, why, remedy

    def __str__(self) -> str:
        subject = _short(self.words.render(self.what))
        setting = re.fullmatch(r"`(\w+)`", self.what)
        if self.value is not None and setting:  # a value's own backticks stay as they were typed
            subject = self.words.write(setting[1], _short(str(self.value)))
        elif self.value is not None:
            subject = f"{subject} {_short(str(self.value))}"
        why = _short(self.words.render(self.why))
        sentence = " ".join(part for part in (subject, why) if part)
        remedy = self.words.render(self.remedy)
        sentence = "; ".join(part for part in (sentence, remedy) if part)
        return sentence if sentence.endswith((".", "?")) else f"{sentence}."


def _short(text: str) -> str:
    """The text without the middle of words of hundreds of characters, as paths may be."""
    return re.sub(
        r"\S{400,}", lambda word: f"{word[0][:60]}...{word[0][-20:]} ({len(word[0])} long)", text
    )


@contextmanager
def spoken(words: Words) -> Iterator[None]:
    """Refusals that leave this block are written in the words of a front end."""
    try:
        yield
    except InputError as error:
        error.words = words
        raise


class WriteError(OSError):
    """Says which file could not be written, why, and what to do. Exit code 1."""


class FileChangedError(OSError):
    """Says which weight file was changed while a run used it, and what to do. Exit code 1."""


class NotFiniteError(ArithmeticError):
    """Says after which step latents are NaN or infinite, of which no video can be made.

    All ranks have the same latents and raise it together. Exit code 1.

    Attributes:
        latents: The latents after that step, float32 [Z,f,h,w].
    """

    def __init__(self, sentence: str, latents: Any) -> None:
        super().__init__(sentence)
        self.latents = latents


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


def is_disk_full(error: BaseException) -> bool:
    """Whether a file system had no space left, or none for this user."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


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
