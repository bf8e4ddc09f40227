"""Attention of Wan-Animate-2: tokens also attend to the reference tokens of their own frame.

The reference video's tokens pass the network once per clip, and the rotated keys and values of all
blocks are kept. In the denoising steps a token of latent frame j attends to all tokens of the
generated video and to the reference tokens of frame j - 1; frame 0, the reference image, to none.
The attention to the reference tokens is computed frame by frame, and merged with the other by
log-sum-exp, so no mask exists and every dense kernel with log-sum-exp can be used.

The official code attends with a mask over a padded layout: each frame has as many slots as the
larger frame of the two videos, and a short clip has those of a full one. Unused slots of the
generated video, and of the reference frame that a token sees, are zero keys, which
`ReferenceLayout.count_zero_keys` counts: they add exp(0) to the denominator of the softmax, and
nothing to its numerator.

Legend: S queries or tokens, N heads of a chunk on this rank, D head size, T latent frames, A tokens
of a latent frame. The batch size is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from wan.kernels.interfaces import Kernel
from wan.modules.host_kv import ChunkKV, HostKV
from wan.modules.rope import GridPositions
from wan.settings.attention_modes import Grid
from wan.utils import trace
from wan.utils.partial_attention import KeyPart, KvBlock, LseMerger, attend_to_blocks


@dataclass(frozen=True)
class ReferenceLayout:
    """Token grids of a clip, and the rows of the generated video that each rank attends with.

    Attributes:
        grid: Tokens of the reference video along frame, height and width.
        generated: Those of the generated video, which has one frame more, the reference image.
        padded_len: Tokens of the generated video over all ranks, with padding.
        full_frames: Latent frames of the generated video in a full clip.
        first_column: Position of the first column of reference tokens.
    """

    grid: Grid
    generated: Grid
    padded_len: int
    full_frames: int
    first_column: int

    def __post_init__(self) -> None:
        if self.generated[0] != self.grid[0] + 1 or self.full_frames < self.generated[0]:
            raise ValueError(
                f"The reference video has {self.grid[0]} latent frames, the generated video "
                f"{self.generated[0]} and a full clip {self.full_frames}; the generated video must "
                "have one more than the reference video, and a full clip at least as many."
            )

    @property
    def positions(self) -> GridPositions:
        """Rotary positions of the reference tokens: one frame later, and to the right."""
        f, h, w = self.grid
        return range(1, 1 + f), range(h), range(self.first_column, self.first_column + w)

    @property
    def frame_size(self) -> int:
        """Tokens of a frame of the generated video."""
        return math.prod(self.generated[1:])

    @property
    def reference_frame_size(self) -> int:
        """Tokens of a frame of the reference video."""
        return math.prod(self.grid[1:])

    def find_frames(self, ring_rank: int, ring_size: int) -> range:
        """Finds the reference frames to which the queries of a ring rank attend."""
        rows = self.padded_len // ring_size
        first, end = ring_rank * rows, min((ring_rank + 1) * rows, math.prod(self.generated))
        if first >= end:
            return range(0)
        start, stop = first // self.frame_size, -(-end // self.frame_size)
        return range(max(start - 1, 0), stop - 1)

    def split_rows(self, first_row: int, num_rows: int) -> Iterator[tuple[int, int, range]]:
        """Splits query rows into runs of whole frames and the rest of frames that are cut.

        Yields:
            The first and the end row, counted from `first_row`, and their reference frames. Rows of
            the reference image are left out.
        """
        row, end = max(first_row, self.frame_size), first_row + num_rows
        while row < end:
            frame, num_frames = row // self.frame_size, (end - row) // self.frame_size
            stop = row + num_frames * self.frame_size
            if row % self.frame_size or not num_frames:  # the rest of a frame
                num_frames, stop = 1, min((frame + 1) * self.frame_size, end)
            yield row - first_row, stop - first_row, range(frame - 1, frame - 1 + num_frames)
            row = stop

    def split_keys(self, first_key: int, num_keys: int, log_scale: float) -> Sequence[KeyPart]:
        """Splits consecutive keys of the generated video at the borders of frame 1."""
        size = self.frame_size
        start, stop = (min(max(i * size - first_key, 0), num_keys) for i in (1, 2))
        if not log_scale or start == stop:
            return ((0, num_keys, 0.0),)
        parts = (0, start, 0.0), (start, stop, log_scale), (stop, num_keys, 0.0)
        return [part for part in parts if part[0] < part[1]]

    def count_zero_keys(self, log_scale: float) -> tuple[float, float]:
        """Counts the zero keys of a query of frame 0, and of one of another frame.

        Those in frame 1 of the generated video count exp(log_scale) each.
        """
        slots = max(self.frame_size, self.reference_frame_size)
        unused_slots = slots - self.frame_size
        unused = self.full_frames * slots - math.prod(self.generated)
        of_all = unused + unused_slots * math.expm1(log_scale)
        return of_all, of_all + slots - self.reference_frame_size


@dataclass(eq=False)
class ReferenceKV:
    """Rotated keys and values of the reference tokens in all blocks.

    A rank holds those of its heads, in the frames to which its queries attend.

    Attributes:
        device: The device that computes.
        in_host_memory: Keep them in page-locked memory of the host; before a block attends, its
            tensors are copied to the device, and those of the next block meanwhile.
        frames: The reference frames on this rank.
        layers: Layer -> its head chunks.
    """

    layout: ReferenceLayout
    device: torch.device
    in_host_memory: bool = False
    frames: range = range(0)
    layers: dict[int, dict[int, ChunkKV]] = field(default_factory=dict)
    is_complete: bool = False
    _host: HostKV | None = None

    def __post_init__(self) -> None:
        if self.in_host_memory and self.device.type != "cpu":
            self._host = HostKV(self.device, self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        chunks = (chunk for layer in self.layers.values() for chunk in layer.values())
        return sum(tensor.nbytes for chunk in chunks for tensor in chunk)

    def record(
        self, layer: int, chunk: int, k_1SND: Tensor, v_1SND: Tensor, ring: tuple[int, int]
    ) -> None:
        """Keeps this rank's frames of all reference tokens.

        Args:
            ring: This rank's index in the ring, and the ring's size.
        """
        self.frames = self.layout.find_frames(*ring)
        size = self.layout.reference_frame_size
        k, v = (
            self._keep(x[0].unflatten(0, (-1, size))[self.frames.start : self.frames.stop])
            for x in (k_1SND, v_1SND)
        )
        self.layers.setdefault(layer, {})[chunk] = k, v

    def fetch_layer(self, layer: int, next_layer: int) -> dict[int, ChunkKV]:
        """Returns the head chunks of a layer on the device, and starts the copy of the next one."""
        if self._host is None:
            return self.layers[layer]
        return self._host.fetch_layer(layer, next_layer)

    def _keep(self, x: Tensor) -> Tensor:
        if self._host is None:
            return x.clone(memory_format=torch.contiguous_format)
        return self._host.allocate(x.shape, x.dtype).copy_(x)


@dataclass(frozen=True)
class ReferencePass:
    """How a forward pass uses the keys and values of the reference tokens.

    Attributes:
        kv: They are recorded in this pass, until they are complete.
        log_scale: Added to the logits of the keys in frame 1 of the generated video.
        layers: The layers that run, in this order.
    """

    kv: ReferenceKV
    log_scale: float
    layers: Sequence[int]

    def get_layer(self, layer: int) -> LayerReference:
        """Returns those of a layer."""
        if not self.kv.is_complete:
            return LayerReference(self, layer, {})
        index = self.layers.index(layer)
        next_layer = self.layers[(index + 1) % len(self.layers)]
        return LayerReference(self, layer, self.kv.fetch_layer(layer, next_layer))


@dataclass(frozen=True)
class LayerReference:
    """The reference tokens in one call of self-attention.

    Attributes:
        chunks: Keys and values of each head chunk.
    """

    reference_pass: ReferencePass
    layer: int
    chunks: dict[int, ChunkKV]
    needs_lse: ClassVar[bool] = True

    @property
    def is_recording(self) -> bool:
        """Whether the call is one of the reference tokens, whose keys and values are kept."""
        return not self.reference_pass.kv.is_complete

    def record(
        self, chunk: int, k_1SND: Tensor, v_1SND: Tensor, ring: tuple[int, int] = (0, 1)
    ) -> None:
        """Keeps the keys and values of a head chunk; see `ReferenceKV.record`."""
        self.reference_pass.kv.record(self.layer, chunk, k_1SND, v_1SND, ring)

    def attend(
        self,
        kernel: Kernel,
        q_blocks: Sequence[tuple[int, Tensor]],
        kv_blocks: Iterable[KvBlock],
        valid_rows: Sequence[int],
        chunk: int = 0,
        device_type: str | None = None,
    ) -> list[Tensor]:
        """Computes attention of each query block to the generated video and its reference frames.

        Args:
            q_blocks: Global index of the first row, and [1,S,N,D].
            kv_blocks: Those of the ring, or a single one; all are consumed.
            valid_rows: Rows without padding of each owner of a block.
            chunk: The head chunk.
            device_type: As in `LseMerger`.
        """
        layout, log_scale = self.reference_pass.kv.layout, self.reference_pass.log_scale
        queries = [q for _, q in q_blocks]
        mergers = [LseMerger(device_type) for _ in q_blocks]
        for block, ((first_row, q), merger) in enumerate(zip(q_blocks, mergers, strict=True)):
            with trace.add_context(block=block):
                self._add_reference(kernel, first_row, q, chunk, merger)
        attend_to_blocks(
            kernel.with_lse,
            queries,
            kv_blocks,
            valid_rows,
            mergers,
            lambda first_key, num_keys: layout.split_keys(first_key, num_keys, log_scale),
        )
        if any(layout.count_zero_keys(log_scale)):
            for (first_row, q), merger in zip(q_blocks, mergers, strict=True):
                merger.add(q.new_zeros(()).expand(q.shape), self._zero_keys_lse(first_row, q))
        return [merger.result().to(q.dtype) for q, merger in zip(queries, mergers, strict=True)]

    def _add_reference(
        self, kernel: Kernel, first_row: int, q_1SND: Tensor, chunk: int, merger: LseMerger
    ) -> None:
        """Adds the attention to the reference frames; rows of frame 0 have no key."""
        _, num_rows, num_heads, _ = q_1SND.shape
        runs = [*self.reference_pass.kv.layout.split_rows(first_row, num_rows)]
        if not runs:
            return
        k_TAND, v_TAND = self.chunks[chunk]
        first_frame = self.reference_pass.kv.frames.start
        out_1SND = torch.zeros_like(q_1SND, memory_format=torch.contiguous_format)
        lse_1NS = q_1SND.new_full((1, num_heads, num_rows), -math.inf, dtype=torch.float32)
        for start, stop, frames in runs:
            local = slice(frames.start - first_frame, frames.stop - first_frame)
            q_TAND = q_1SND[0, start:stop].unflatten(0, (len(frames), -1))
            with trace.span("reference attention", q_TAND, keys=k_TAND.shape[1]):
                out_TAND, lse_TNA = kernel.with_lse(q_TAND, k_TAND[local], v_TAND[local])
            out_1SND[0, start:stop] = out_TAND.flatten(0, 1)
            lse_1NS[0, :, start:stop] = lse_TNA.transpose(0, 1).flatten(1)
        with trace.span("merge"):
            merger.add(out_1SND, lse_1NS)

    def _zero_keys_lse(self, first_row: int, q_1SND: Tensor) -> Tensor:
        """Returns the log-sum-exp of the zero keys of each query, [1,N,S]."""
        layout = self.reference_pass.kv.layout
        counts = layout.count_zero_keys(self.reference_pass.log_scale)
        lse = [math.log(count) if count else -math.inf for count in counts]
        _, num_rows, num_heads, _ = q_1SND.shape
        lse_S = q_1SND.new_full((num_rows,), lse[1], dtype=torch.float32)
        lse_S[: max(layout.frame_size - first_row, 0)] = lse[0]
        return lse_S.expand(1, num_heads, num_rows)
