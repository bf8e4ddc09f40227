"""Keys and values that a causal network keeps from the finished frames of its video.

A causal network generates a video block by block. The tokens of a block attend to each other and to
the kept keys of earlier frames: the first frames of the video (the sink) and the last ones (the
window). Keys are kept as they are attended to, normalized and rotated by their absolute positions.

The place of a frame in the cache follows from its number alone. So the keys of a block replace
those of its earlier forward passes, however many there are, and the first pass of a block
replaces the frames that leave the window.

Where they do not fit on the device, they are in host memory: before a layer computes, its keys are
copied to the device (`wan.modules.host_kv`), and the frames that it replaces are written back.

Legend: S tokens, N heads of a chunk on this rank, D head size, T frames in the cache, A tokens of a
frame. The batch size is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from torch import Tensor

from wan.kernels.interfaces import Kernel
from wan.modules.host_kv import ChunkKV, HostKV
from wan.utils import trace
from wan.utils.partial_attention import KvBlock


@dataclass(eq=False)
class KVCache:
    """The kept keys and values of all blocks of the network, for the heads of this rank.

    Attributes:
        window: Frames to which a token attends at most, with the sink and the token's block.
        sink: First frames of the video that are never replaced.
        layers: Layer -> its head chunks, on the device or in host memory.
        host: Copies them from and to host memory; None: they are on the device.
    """

    window: int
    sink: int = 0
    layers: dict[int, dict[int, ChunkKV]] = field(default_factory=dict)
    host: HostKV | None = None
    _fetched: dict[int, ChunkKV] = field(default_factory=dict)  # those of the layer that computes
    _first: int | None = None  # first frame after the sink since `restart`

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        chunks = (chunk for layer in self.layers.values() for chunk in layer.values())
        return sum(tensor.nbytes for chunk in chunks for tensor in chunk)

    def clear(self) -> None:
        """Frees all memory."""
        self.layers.clear()
        self._fetched, self.host = {}, None

    def fetch_layer(self, layer: int, next_layer: int) -> None:
        """Makes a layer's keys and values available, and starts the copy of the next one's."""
        chunks = self.layers.setdefault(layer, {})
        self._fetched = chunks if self.host is None else self.host.fetch_layer(layer, next_layer)

    def find_slots(self, frames: range) -> list[int]:
        """Returns the places of frames; the frames of the window share places in turn."""
        turn, first = self.window - self.sink, self._first or self.sink
        return [x if x < self.sink else self.sink + (x - first) % turn for x in frames]

    def restart(self, num_frames: int) -> int:
        """Drops the frames after the sink, and returns the first one that is to be written again.

        Args:
            num_frames: Frames of the video that have been written.
        """
        self._first = max(self.sink, num_frames - (self.window - self.sink))
        return self._first

    def write(
        self, layer: int, chunk: int, frames: range, kv_1SND: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keeps the keys and values of a block; returns all kept ones, [1,S,N,D] each.

        Args:
            layer: The layer that `fetch_layer` was last called with.
            chunk: The head chunk.
            frames: The frames of the block.
            kv_1SND: Their keys and values.
        """
        new_kv = [x[0].unflatten(0, (len(frames), -1)) for x in kv_1SND]
        shape = self.window, *new_kv[0].shape[1:]
        if chunk not in self._fetched:
            k, v = (x.new_empty(shape) for x in new_kv)
            self._fetched[chunk] = k, v
        slots = self.find_slots(frames)
        starts = [i for i, slot in enumerate(slots) if i == 0 or slot != slots[i - 1] + 1]
        spans = [slice(*span) for span in pairwise((*starts, len(slots)))]
        rows = [slice(slots[span.start], slots[span.stop - 1] + 1) for span in spans]
        for x_TAND, new in zip(self._fetched[chunk], new_kv, strict=True):
            for row, span in zip(rows, spans, strict=True):
                x_TAND[row] = new[span]
        if self.host is not None:
            if chunk not in self.layers[layer]:
                k, v = (self.host.allocate(shape, x.dtype) for x in new_kv)
                self.layers[layer][chunk] = k, v
            for target, x_TAND in zip(self.layers[layer][chunk], self._fetched[chunk], strict=True):
                self.host.write_back(target, x_TAND, rows)
        k_TAND, v_TAND = self._fetched[chunk]
        num_dropped = 0 if self._first is None else self._first - self.sink
        num_kept = min(frames.stop - num_dropped, self.window)
        return k_TAND[:num_kept].flatten(0, 1)[None], v_TAND[:num_kept].flatten(0, 1)[None]


@dataclass(frozen=True)
class CachedPass:
    """A forward pass of a block. Implements `wan.modules.interfaces.FurtherKeys`.

    Attributes:
        frames: The frames of the block, counted from the first one of the video.
        layers: The layers that run.
    """

    cache: KVCache
    frames: range
    layers: Sequence[int]

    def get_layer(self, layer: int) -> CachedLayer:
        """Returns the kept keys of a layer."""
        next_layer = self.layers[(self.layers.index(layer) + 1) % len(self.layers)]
        self.cache.fetch_layer(layer, next_layer)
        return CachedLayer(self, layer)


@dataclass(frozen=True)
class CachedLayer:
    """The kept keys in a call of self-attention. Implements `wan.modules.interfaces.LayerKeys`."""

    forward_pass: CachedPass
    layer: int
    needs_lse: ClassVar[bool] = False
    is_recording: ClassVar[bool] = False

    def record(
        self, chunk: int, k_1SND: Tensor, v_1SND: Tensor, ring: tuple[int, int] = (0, 1)
    ) -> None:
        """Does nothing: `attend` keeps the keys and values."""

    def attend(
        self,
        kernel: Kernel,
        q_blocks: Sequence[tuple[int, Tensor]],
        kv_blocks: Iterable[KvBlock],
        valid_rows: Sequence[int],
        chunk: int = 0,
        device_type: str | None = None,
    ) -> list[Tensor]:
        """Keeps the keys of a head chunk, and attends to all kept ones; see `LayerKeys`."""
        ((_, k, v),) = kv_blocks
        new_kv = k[:, : valid_rows[0]], v[:, : valid_rows[0]]
        forward_pass = self.forward_pass
        k, v = forward_pass.cache.write(self.layer, chunk, forward_pass.frames, new_kv)
        outputs = []
        for block, (_, q) in enumerate(q_blocks):
            with (
                trace.add_context(block=block),
                trace.span("attention", q, keys=k.shape[1], method="dense"),
            ):
                outputs.append(kernel(q, k, v))
        return outputs
