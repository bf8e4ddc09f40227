"""Messages, progress bars and stage times; only the main rank speaks."""

from __future__ import annotations

import logging
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any

logger = logging.getLogger("wan")
_SILENT = ContextVar("silent", default=False)
logger.addFilter(lambda record: record.levelno >= logging.WARNING or not _SILENT.get())
_HIDDEN = threading.Event()  # prompts stay out of the log


class _Handler(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Who reads our output may leave early (`| head`); that is no failure."""
        if not isinstance(sys.exception(), BrokenPipeError):
            super().handleError(record)


def setup(main_rank: bool = True) -> None:
    """Send messages to stdout: INFO and up on the main rank, errors only on the others."""
    handler = _Handler(sys.stdout)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if main_rank else logging.ERROR)


def set_level(name: str) -> None:
    """ "info" or "debug": what the main rank says."""
    if logger.isEnabledFor(logging.INFO):
        logger.setLevel(name.upper())


@contextmanager
def silence() -> Iterator[None]:
    """Drops the messages below WARNING and the progress bars of this thread, of no other one."""
    before = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(before)


def hide_prompts() -> None:
    """Keeps prompts out of the log of this process, whose users can delete them elsewhere."""
    _HIDDEN.set()


def format_prompt(text: str) -> str:
    """Returns a prompt as the log shows it."""
    return f"({len(text)} characters)" if _HIDDEN.is_set() else text


def progress(total: int | None, description: str, unit: str) -> Any:
    """A tqdm bar on the main rank, silent elsewhere and where nobody set up logging (API use).

    Without a terminal it is a line of the log twice a minute, and whenever it is refreshed.
    """
    from tqdm import tqdm

    lines: dict[str, Any] = {}
    if sys.stderr is None or not sys.stderr.isatty():
        form = "{desc}: {n_fmt}/{total_fmt} {unit}s, about {remaining} left"
        lines = {"file": _Lines(), "mininterval": 30, "delay": 30, "bar_format": form}
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=unit == "B",
        disable=_SILENT.get() or not logger.isEnabledFor(logging.INFO),
        dynamic_ncols=not lines,
        **lines,
    )


def duration(seconds: float) -> str:
    """Writes seconds as a reader would say them: "3 h 5 min", "4 min", "20 s"."""
    minutes, hours = round(seconds / 60), round(seconds / 60) // 60
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if seconds >= 100 else f"{seconds:.0f} s"


class _Lines:
    """A file that writes a bar's lines into the log, for a terminal that is none."""

    def write(self, text: str) -> None:
        if text.strip():
            logger.info("%s", text.strip())

    def flush(self) -> None: ...


class Stages:
    """Seconds spent per named stage of a run; a stage inside another is not counted twice.

    Those of a thread are added, so that stages that overlap are longer together than the run.

    synchronize: waits for the device, so that a stage's time holds all of its work.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = {}
        self._synchronize = synchronize
        self._running = threading.local()  # seconds of the stages inside a thread's present one

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        running, outer = self._running, getattr(self._running, "inner", 0.0)
        start, running.inner = time.perf_counter(), 0.0
        try:
            yield
            self._synchronize()
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - running.inner
            running.inner = outer + elapsed


def versions(device_type: str, packages: Iterable[str] = ()) -> dict[str, str]:
    """Of Python and of the packages that a video depends on, for its record.

    device_type: torch's. packages: what computes attention beside PyTorch.
    """
    names = ["torch", "diffusers", "transformers", "safetensors", "imageio-ffmpeg", "ftfy"]
    names += ["torch-npu", "mindiesd"] if device_type == "npu" else []
    found = {"python": platform.python_version()}
    found |= {name: _version(name) for name in (*names, *packages)}
    return found | ({"cudnn": _cudnn()} if device_type == "cuda" else {})


def commit() -> str | None:
    """The commit of the clone that this package runs from; None outside of one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cudnn() -> str:
    """As PyTorch writes it (91600: 9.16.0); its kernels differ, and not by PyTorch's version."""
    import torch

    version = None if torch.version.hip else torch.backends.cudnn.version()  # there MIOpen's
    return str(version or "not available")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
