"""Keys and values of layers in page-locked host memory, copied to the device layer by layer.

While a layer computes, the keys and values of the next one are copied on a separate stream. Its
copies run in order, so that rows that a layer has written back are read only afterwards.

Legend: T latent frames, A tokens of a frame, N heads of a chunk on this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from wan.device import CopyStream

ChunkKV = tuple[Tensor, Tensor]
"""Keys and values of a head chunk, [T,A,N,D] each."""


class HostKV:
    """Copies of layers on the device.

    Attributes:
        layers: Layer -> its head chunks in page-locked host memory, from `allocate`.
    """

    def __init__(self, device: torch.device, layers: dict[int, dict[int, ChunkKV]]) -> None:
        self.layers, self._device, self._stream = layers, device, CopyStream(device)
        self._copies: dict[int, tuple[dict[int, ChunkKV], object]] = {}
        self._computed = self._stream.make_event()

    def allocate(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Returns page-locked host memory."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def fetch_layer(self, layer: int, next_layer: int) -> dict[int, ChunkKV]:
        """Returns the head chunks of a layer on the device, and starts the copy of the next one."""
        for index in (layer, next_layer):
            if index not in self._copies:
                self._start_copy(index)
        chunks, event = self._copies.pop(layer)
        self._stream.make_compute_wait(event)
        self._copies = {i: copy for i, copy in self._copies.items() if i == next_layer}
        return chunks

    def write_back(self, target: Tensor, source: Tensor, rows: Iterable[slice]) -> None:
        """Starts the copy of rows to host memory, after the computations queued so far."""
        self._stream.record_computed(self._computed)
        self._stream.record_stream(source)
        self._stream.copy(target, [(row, source[row]) for row in rows], self._computed)

    def _start_copy(self, layer: int) -> None:
        stream, chunks, stored = self._stream, dict[int, ChunkKV](), self.layers.get(layer, {})
        for index, chunk in stored.items():
            k, v = (torch.empty_like(x, device=self._device) for x in chunk)
            chunks[index] = k, v
        stream.record_computed(self._computed)  # the memory may be that of earlier tensors
        for index, chunk in stored.items():
            for target, source in zip(chunks[index], chunk, strict=True):
                stream.record_stream(target)
                stream.copy(target.flatten(), [(slice(None), source.flatten())], self._computed)
        copied = stream.make_event()
        stream.record_copied(copied)
        self._copies[layer] = chunks, copied
