"""The networks of a checkpoint: loaded when first needed, released as the memory policy says."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from wan.modules.model import WanModel


class Experts:
    """Hands out networks by name ("high_noise", "low_noise" or "dit").

    load(name) brings one to the device. With `offload`, asking for one releases the other first, so
    that at most one is in memory; one that is needed again is read again. files: each network's
    weight files, which `prefetch` reads ahead.
    """

    def __init__(
        self,
        load: Callable[[str], WanModel],
        *,
        offload: bool,
        files: Mapping[str, Iterable[Path]] | None = None,
    ) -> None:
        self._load, self.offload, self._files = load, offload, files or {}
        self._loaded: dict[str, WanModel] = {}
        self._kept: dict[str, WanModel] = {}

    def keep(self, name: str) -> WanModel:
        """A network for someone who will change it: it stays in memory, changes and all."""
        if name not in self._kept:
            loaded = name in self._loaded
            self._kept[name] = self._loaded.pop(name) if loaded else self._load(name)
        return self._kept[name]

    def get(self, name: str) -> WanModel:
        if name in self._kept:
            return self._kept[name]
        if name not in self._loaded:
            if self.offload:
                self.release()
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def prefetch(self, name: str) -> None:
        """Have the files of a network, needed soon, read into the system's page cache meanwhile.

        No memory of the process or the device is taken; loading then runs at memory speed.
        """
        if name not in self._loaded and name not in self._kept:
            files = sorted(set(self._files.get(name, ())))
            threading.Thread(target=_read_ahead, args=(files,), daemon=True).start()

    def release(self) -> None:
        freed = [weakref.ref(model) for model in self._loaded.values()]
        self._loaded.clear()
        if any(model() is not None for model in freed):
            gc.collect()  # a compiled module refers to itself


def _read_ahead(files: Iterable[Path]) -> None:
    if not hasattr(os, "posix_fadvise"):  # not on macOS
        return
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
