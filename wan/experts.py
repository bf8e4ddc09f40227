"""The networks of a checkpoint: loaded when first needed, released as the memory policy says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

from wan.modules.model import WanModel


class Experts:
    """Hands out networks by name ("high_noise", "low_noise" or "dit").

    load(name) brings one to the device. With `offload`, asking for one releases the other first, so
    that at most one is in memory; one that is needed again is read again.
    """

    def __init__(self, load: Callable[[str], WanModel], *, offload: bool) -> None:
        self._load, self.offload = load, offload
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

    def release(self) -> None:
        freed = [weakref.ref(model) for model in self._loaded.values()]
        self._loaded.clear()
        if any(model() is not None for model in freed):
            gc.collect()  # a compiled module refers to itself
