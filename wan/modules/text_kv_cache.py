"""Caches values that a network computes from the prompt and other inputs common to all steps.

Legend: B batch, T text tokens, C channels, N heads, D head size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
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
    """LRU cache of values computed from inputs; by default one per guidance branch.

    Tensors are compared by identity and version counter, so that a lookup costs nothing and a
    tensor changed in place (outside inference mode) is a miss. Other inputs are compared by value.
    Tensors are weakly referenced: the images of a clip have hundreds of megabytes.

    Args:
        is_enabled: Whether anything is cached.
    """

    def __init__(self, is_enabled: bool = True, capacity: int = 2) -> None:
        self._is_enabled, self._capacity = is_enabled, capacity
        self._entries: list[tuple[list[Any], list[int], T]] = []

    @property
    def is_active(self) -> bool:
        """Whether values are cached now; with autograd each forward builds a new graph."""
        return self._is_enabled and not torch.is_grad_enabled()

    def get_or_compute(self, inputs: Sequence[object], compute: Callable[[], T]) -> T:
        """Returns the cached value of the inputs, or calls compute() and caches its result."""
        if not self.is_active:
            return compute()
        versions = _get_tensor_versions(inputs)
        for index, (entry, cached_versions, state) in enumerate(self._entries):
            is_hit = len(entry) == len(inputs) and all(map(_is_same_input, entry, inputs))
            if is_hit and cached_versions == versions:
                self._entries.append(self._entries.pop(index))  # most recently used
                return state
        state = compute()
        keys = [weakref.ref(x) if isinstance(x, Tensor) else x for x in inputs]
        self._entries.append((keys, versions, state))
        del self._entries[: -self._capacity]
        return state

    def clear(self) -> None:
        self._entries.clear()


def _is_same_input(cached: object, value: object) -> bool:
    if isinstance(value, Tensor):
        return isinstance(cached, weakref.ref) and cached() is value
    return not isinstance(cached, weakref.ref) and cached == value


def _get_tensor_versions(inputs: Sequence[object]) -> list[int]:
    return [count_in_place_writes(x) for x in inputs if isinstance(x, Tensor)]
