"""Exact bytes of the tensors that live during a piece of work, on any threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WHOLE = "whole forward"


class LiveBytes(TorchDispatchMode):
    """The bytes of all tensor storages made under it, while they live; their peaks, by part.

    PyTorch's own memory profiler hears of the calling thread's frees only; gloo's threads free too.
    Storages are followed by weak references, so whoever frees them is seen.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self.peak = dict.fromkeys((WHOLE, *parts), 0)
        self._within = [WHOLE]
        self._held = 0
        self._known: dict[int, Any] = {}

    def leave_out(self, given: Sequence[Tensor]) -> None:
        """Storages that are not to be counted."""
        self._known |= {x.untyped_storage()._cdata: x for x in given}

    def during(self, part: str, work: Callable[..., Tensor]) -> Any:
        """work, as a part of the forward."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            self._within.append(part)
            out = work(*args, **kwargs)
            self._within.remove(part)
            return out

        return call

    def watch(self, part: str, module: nn.Module) -> None:
        """The module's calls, as a part of the forward."""
        module.register_forward_pre_hook(lambda *_: self._within.append(part))
        module.register_forward_hook(lambda *_: self._within.remove(part))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._follow(x.untyped_storage())
        for part in self._within:
            self.peak[part] = max(self.peak[part], self._held)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            self._held -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self._held += size
