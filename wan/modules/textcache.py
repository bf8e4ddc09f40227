"""Caches values that a network computes from the prompt and other inputs common to all steps.

Legend: B batch, T text tokens, C channels, N heads, D head size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from wan.torch_private import times_changed

TextKV = tuple[Tensor, ...]
"""Cross-attention keys and values of the text, [B,T,N,D] each, then those of the image, if any."""


@dataclass
class TextState:
    """Embedding [B,T,C] of a prompt, and the cached keys and values of each layer."""

    embedding: Tensor
    kv: list[TextKV | None] = field(default_factory=list)


T = TypeVar("T")


class KeptByInput(Generic[T]):
    """LRU cache of values computed from inputs; the capacity 2 is one per guidance branch.

    Tensors are compared by identity and version counter, so that a lookup costs nothing and a
    tensor changed in place (outside inference mode) is a miss. Other inputs are compared by value.
    Tensors are weakly referenced: the images of a clip have hundreds of megabytes.
    """

    def __init__(self, capacity: int = 2) -> None:
        self.capacity = capacity
        self._entries: list[tuple[list[Any], list[int], T]] = []

    def get(self, inputs: Sequence[object]) -> T | None:
        versions = _versions(inputs)
        for index, (known, known_versions, state) in enumerate(self._entries):
            same = len(known) == len(inputs) and all(map(_same, known, inputs))
            if same and known_versions == versions:
                self._entries.append(self._entries.pop(index))  # most recently used
                return state
        return None

    def once(self, inputs: Sequence[object], make: Callable[[], T]) -> T:
        """Returns the cached value of the inputs, or calls compute() and caches its result."""
        found = self.get(inputs)
        if found is None:
            found = make()
            self.put(inputs, found)
        return found

    def put(self, inputs: Sequence[object], state: T) -> None:
        known = [weakref.ref(one) if isinstance(one, Tensor) else one for one in inputs]
        self._entries.append((known, _versions(inputs), state))
        del self._entries[: -self.capacity]

    def clear(self) -> None:
        self._entries.clear()


def _same(known: object, given: object) -> bool:
    if isinstance(given, Tensor):
        return isinstance(known, weakref.ref) and known() is given
    return not isinstance(known, weakref.ref) and known == given


def _versions(inputs: Sequence[object]) -> list[int]:
    return [times_changed(one) for one in inputs if isinstance(one, Tensor)]
