"""A method for some layers of some networks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from wan.kernels.base import AttendRows, Call, Method


class OnLayers:
    """Implements `wan.kernels.base.Method`: another one, where it applies and the layer is listed.

    layers: (expert, index of the block).
    """

    def __init__(self, method: Method, layers: Collection[tuple[str, int]]) -> None:
        self._method, self._layers = method, frozenset(layers)
        self.name, self.q_multiple = method.name, method.q_multiple

    def applies(self, call: Call | None) -> bool:
        if call is None:
            raise ValueError(f"{self.name} serves some layers only: pass step and layer.")
        return (call.expert, call.layer) in self._layers and self._method.applies(call)

    def pack(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, valid: int, call: Call | None
    ) -> Sequence[Any]:
        return self._method.pack(q_BsND, k_BsND, v_BsND, valid, call)

    def prepare(self, q: Any, k: Any, v: Any, call: Call | None) -> AttendRows:
        return self._method.prepare(q, k, v, call)
