"""Text keys and values, which are the same at every step of a prompt.

Legend: B batch, T text tokens, C channels, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from wan.torch_private import times_changed

TextKV = tuple[Tensor, ...]
"""Keys and values of a layer's cross-attention, [B,T,N,D] each; then an image's, if any."""


@dataclass
class TextState:
    """One prompt as a model sees it: its embedding [B,T,C] and, once computed, each layer's K/V."""

    embedding: Tensor
    kv: list[TextKV | None] = field(default_factory=list)


class TextKVCache:
    """The states of the last `capacity` contexts of one model (2: both guidance branches).

    A context is recognised by its tensor objects, not their values, so a hit costs nothing. Tensors
    that were changed in place since (outside inference mode) count as new.
    """

    def __init__(self, capacity: int = 2) -> None:
        self.capacity = capacity
        self._entries: list[tuple[list[Tensor], list[int], TextState]] = []

    def get(self, context: Sequence[Tensor]) -> TextState | None:
        versions = [times_changed(c) for c in context]
        for known, known_versions, state in self._entries:
            same = len(known) == len(context) and all(
                a is b for a, b in zip(known, context, strict=True)
            )
            if same and known_versions == versions:
                return state
        return None

    def put(self, context: Sequence[Tensor], state: TextState) -> None:
        self._entries.append((list(context), [times_changed(c) for c in context], state))
        del self._entries[: -self.capacity]

    def clear(self) -> None:
        self._entries.clear()
