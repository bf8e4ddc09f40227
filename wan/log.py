"""Messages, progress bars and stage times; only the main rank speaks."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

logger = logging.getLogger("wan")


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


def progress(total: int | None, description: str, unit: str) -> Any:
    """A tqdm bar on the main rank, silent elsewhere and where nobody set up logging (API use)."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=unit == "B",
        disable=not logger.isEnabledFor(logging.INFO),
        dynamic_ncols=True,
    )


class Stages:
    """Seconds spent per named stage of a run; a stage inside another is not counted twice.

    synchronize: waits for the device, so that a stage's time holds all of its work.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = {}
        self._synchronize = synchronize
        self._inner = 0.0  # seconds that stages inside the running one have taken

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, outer_inner, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
            self._synchronize()
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inner
            self._inner = outer_inner + elapsed


def versions(device_type: str, packages: Iterable[str] = ()) -> dict[str, str]:
    """Of Python and of the packages that a video depends on, for its record.

    device_type: torch's. packages: what computes attention beside PyTorch.
    """
    names = ["torch", "diffusers", "transformers", "safetensors", "imageio-ffmpeg", "ftfy"]
    names += ["torch-npu", "mindiesd"] if device_type == "npu" else []
    found = {"python": platform.python_version()}
    found |= {name: _version(name) for name in (*names, *packages)}
    return found | ({"cudnn": _cudnn()} if device_type == "cuda" else {})


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
