"""Log messages, progress bars and stage times; ranks other than 0 log errors only."""

from __future__ import annotations

import logging
import math
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from wan.settings.errors import escape_controls

logger = logging.getLogger("wan")
_SILENT = ContextVar("silent", default=False)
_SHOWS_PROGRESS: ContextVar[bool | None] = ContextVar("shows_progress", default=None)
logger.addFilter(lambda record: record.levelno >= logging.WARNING or not _SILENT.get())
_PROMPTS_HIDDEN = threading.Event()


class _Handler(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        """Prints a message above the progress bars of a terminal."""
        tqdm = sys.modules.get("tqdm")
        if tqdm is None or _logs_progress():
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores that the reader of stdout has closed it (`| head`)."""
        if not isinstance(sys.exception(), BrokenPipeError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        """Formats a message on one line, with any names of files and tensors."""
        record.message = escape_controls(record.message)
        return super().formatMessage(record)


def set_up_logging(main_rank: bool = True) -> None:
    """Sends messages to stdout: INFO and above on the main rank, errors only on the others."""
    handler = _Handler(sys.stdout)
    handler.setFormatter(_Formatter("[%(asctime)s] %(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if main_rank else logging.ERROR)


def set_level(name: str) -> None:
    """Sets the main rank's log level: "info" or "debug"."""
    if logger.isEnabledFor(logging.INFO):
        logger.setLevel(name.upper())


@contextmanager
def silence_thread() -> Iterator[None]:
    """Drops this thread's progress bars and messages below WARNING while the block runs."""
    token = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(token)


@contextmanager
def show_progress(is_shown: bool) -> Iterator[None]:
    """Shows or hides progress bars in this context, at any level of the log.

    Those that are shown are written to stderr or into a notebook, not to the log.
    """
    token = _SHOWS_PROGRESS.set(is_shown)
    try:
        yield
    finally:
        _SHOWS_PROGRESS.reset(token)


def hide_prompts() -> None:
    """Keeps prompts out of this process's log."""
    _PROMPTS_HIDDEN.set()


def format_prompt(text: str) -> str:
    """Returns a prompt, or only its length after `hide_prompts`."""
    return f"({len(text)} characters)" if _PROMPTS_HIDDEN.is_set() else text


def make_progress_bar(total: int | None, description: str, unit: str) -> Any:
    """Returns a tqdm bar; it is disabled on other ranks, in silent threads and by `show_progress`.

    Without a terminal it writes a log line twice a minute and at each refresh. A bar inside of
    another one is removed when it is closed.
    """
    from tqdm.auto import tqdm

    is_shown, log_options = _SHOWS_PROGRESS.get(), dict[str, Any]()
    if is_shown is None:
        is_shown = logger.isEnabledFor(logging.INFO)
        if _logs_progress():
            log_options = {
                "file": _LogWriter(),
                "mininterval": 30,
                "delay": 30,
                "bar_format": "{desc}: {n_fmt}/{total_fmt} {unit}s, about {remaining} left"
                "{postfix}",
                "position": 0,  # no movement of a cursor
            }
    elif sys.stderr is None:
        is_shown = False
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=unit == "B",
        disable=_SILENT.get() or not is_shown,
        dynamic_ncols=not log_options,
        leave=None,
        **log_options,
    )


def make_step_bar(num_steps: int, stage: str = "loading") -> Any:
    """Returns the bar of denoising steps; until the first of them it shows this stage."""
    bar = make_progress_bar(num_steps, "sampling", "step")
    bar.set_postfix_str(stage)
    return bar


def _logs_progress() -> bool:
    """Whether progress is written to the log, because there is no terminal."""
    return sys.stderr is None or not sys.stderr.isatty()


def summarize_error(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type, without a full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def format_duration(seconds: float) -> str:
    """Formats seconds as "3 h 5 min", "4 min" or "20 s"."""
    minutes, hours = round(seconds / 60), round(seconds / 60) // 60
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if seconds >= 100 else f"{seconds:.0f} s"


class _LogWriter:
    """File-like object that writes a progress bar's lines to the log."""

    def write(self, text: str) -> None:
        if text.strip():  # tqdm writes "?" until it has a rate
            logger.info("%s", text.strip().replace(", about ? left", ""))

    def flush(self) -> None: ...


class StageTimer:
    """Measures the seconds of each named stage of a run.

    A nested stage's time is not counted in the outer stage. Stages in several threads may overlap,
    so that their sum can exceed the time of the run.

    Args:
        synchronize: Waits for the device at the end of each stage.

    Attributes:
        on_stage: Called with the name of a stage when it begins, and again after a nested one.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = {}
        self.on_stage: Callable[[str], None] = lambda _: None
        self._synchronize = synchronize
        self._running = threading.local()  # per thread: seconds of nested stages, present stage

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        running, outer = self._running, getattr(self._running, "inner", 0.0)
        outer_name, running.name = getattr(running, "name", None), name
        self.on_stage(name)
        start, running.inner = time.perf_counter(), 0.0
        try:
            yield
            self._synchronize()
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - running.inner
            running.inner, running.name = outer + elapsed, outer_name
            if outer_name is not None:
                self.on_stage(outer_name)


def collect_versions(device_type: str, packages: Iterable[str] = ()) -> dict[str, str]:
    """Returns the versions of Python and packages for a record.

    Args:
        device_type: As in PyTorch.
        packages: Additional packages, with attention kernels.
    """
    names = ["torch", "diffusers", "transformers", "safetensors", "imageio-ffmpeg", "ftfy"]
    names += ["torch-npu", "mindiesd"] if device_type == "npu" else []
    version_of = {"python": platform.python_version()}
    version_of |= {name: _read_package_version(name) for name in (*names, *packages)}
    return version_of | ({"cudnn": _read_cudnn_version()} if device_type == "cuda" else {})


@cache  # of the code that this process has loaded
def find_commit() -> str | None:
    """Returns the commit of the Git clone that this package runs from; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _read_cudnn_version() -> str:
    """Returns cuDNN's version as PyTorch has it: 91600 is 9.16.0.

    One version of PyTorch runs with several of cuDNN, whose kernels differ.
    """
    import torch

    version = None if torch.version.hip else torch.backends.cudnn.version()  # MIOpen's with HIP
    return str(version or "not available")


@cache
def _read_package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


class RareMessages(logging.Filter):
    """Logging filter that passes each message without a traceback once a minute."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is logged; messages are compared without their arguments."""
        if record.exc_info:
            return True
        now, key = time.monotonic(), str(record.msg)
        if now - self._last.get(key, -math.inf) < self._seconds:
            return False
        if len(self._last) > 1000:
            self._last.clear()
        self._last[key] = now
        return True
