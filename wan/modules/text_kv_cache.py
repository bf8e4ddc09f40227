"""Caches values that a network computes from the prompt and other inputs common to all steps.

Legend: B batch, T text tokens, C channels, N heads, D head size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from wan.utils.torch_private import count_in_place_writes

ContextKV = tuple[Tensor, ...]
"""Cross-attention keys and values of the text, [B,T,N,D] each, then those of the image, if any,
then those of a second text, if there is guidance in cross-attention."""


@dataclass
class EmbeddedContext:
    """Embedding [B,T,C] of image tokens, if any, and text; cached keys and values per layer.

    Attributes:
        second_text: Embedding [B,T,C] of a second text, for guidance in cross-attention.
    """

    embedding: Tensor
    kv: list[ContextKV | None] = field(default_factory=list)
    second_text: Tensor | None = None


T = TypeVar("T")


class InputCache(Generic[T]):
    """LRU cache of values computed from inputs; the capacity 2 is one per guidance branch.

    Tensors are compared by identity and version counter, so that a lookup costs nothing and a
    tensor changed in place (outside inference mode) is a miss. Other inputs are compared by value.
    Tensors are weakly referenced: the images of a clip have hundreds of megabytes.
    """

    def __init__(self, capacity: int = 2) -> None:
        self.capacity = capacity
        self._entries: list[tuple[list[Any], list[int], T]] = []

    def get(self, inputs: Sequence[object]) -> T | None:
        versions = _get_tensor_versions(inputs)
        for index, (entry, cached_versions, state) in enumerate(self._entries):
            is_hit = len(entry) == len(inputs) and all(map(_is_same_input, entry, inputs))
            if is_hit and cached_versions == versions:
                self._entries.append(self._entries.pop(index))  # most recently used
                return state
        return None

    def get_or_compute(self, inputs: Sequence[object], compute: Callable[[], T]) -> T:
        """Returns the cached value of the inputs, or calls compute() and caches its result."""
        state = self.get(inputs)
        if state is None:
            state = compute()
            self.add(inputs, state)
        return state

    def add(self, inputs: Sequence[object], state: T) -> None:
        keys = [weakref.ref(x) if isinstance(x, Tensor) else x for x in inputs]
        self._entries.append((keys, _get_tensor_versions(inputs), state))
        del self._entries[: -self.capacity]

    def clear(self) -> None:
        self._entries.clear()


def _is_same_input(cached: object, value: object) -> bool:
    if isinstance(value, Tensor):
        return isinstance(cached, weakref.ref) and cached() is value
    return not isinstance(cached, weakref.ref) and cached == value


def _get_tensor_versions(inputs: Sequence[object]) -> list[int]:
    return [count_in_place_writes(x) for x in inputs if isinstance(x, Tensor)]
