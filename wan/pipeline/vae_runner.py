"""Encodes and decodes videos with the VAE, with the first of three methods that fits into memory.

Whole frames on the main rank; rows of a frame split over all ranks (exact, too); tiles on the main
rank (approximate, and only for decoding). If memory runs out, the next method is tried.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from wan.device import Device
from wan.modules.vae.rows import ALL_ROWS
from wan.modules.vae.video_vae import LatentBlocks, Sink, VideoVAE
from wan.pipeline import memory_estimate
from wan.pipeline.setup import Setup
from wan.settings.errors import is_out_of_memory
from wan.utils.log import logger

if TYPE_CHECKING:
    from wan.modules.vae.sharded import ShardedRows

T = TypeVar("T")
WHOLE_FRAME, ROW_PARALLEL, TILED = "whole frames", "rows shared by all ranks", "tiles"
MakeRows = Callable[[int, bool], "ShardedRows"]
"""(height of the latents, whether it is split over all ranks) -> the rows of this rank."""


class VaeRunner:
    """Runs the VAE on one rank or on all ranks. last_method: The method of the last call."""

    def __init__(
        self,
        setup: Setup,
        device: Device,
        get_vae: Callable[[], VideoVAE],
        make_rows: MakeRows | None,
    ) -> None:
        """Loads nothing yet. get_vae: Loads the VAE. make_rows: None for one process."""
        self._setup, self._device, self._get_vae = setup, device, get_vae
        self._make_rows = make_rows
        self.last_method = ""
        exact_methods = (WHOLE_FRAME,) if make_rows is None else (WHOLE_FRAME, ROW_PARALLEL)
        self._encode_methods: tuple[str, ...] = (
            (ROW_PARALLEL,) if setup.execution.vae_parallel else exact_methods
        )
        self._decode_methods = (
            (TILED,) if setup.execution.vae_tiling else (*self._encode_methods, TILED)
        )

    def encode(self, video_3FHW: Tensor) -> Tensor | None:
        """Returns the normalized latents [Z,f,h,w] on the main rank; all ranks call it."""
        _, frames, height, width = video_3FHW.shape
        time_stride, space_stride, _ = self._setup.preset.vae_stride
        num_latent_frames = 1 + (frames - 1) // time_stride
        min_bytes = memory_estimate.estimate_vae_activations(
            self._setup, "encode", (num_latent_frames, height, width)
        )

        def attempt(method: str, may_fail: bool) -> Tensor | None:
            encode_video = partial(VideoVAE.encode, video_3FHW=video_3FHW)

            def wait(rows: ShardedRows) -> None:  # as often as `Autoencoder.encode` agrees
                rows.join_memory_agreements(1)
                rows.agree(True)
                rows.join_memory_agreements(1 + num_latent_frames)

            least = min_bytes if may_fail else 0
            return self._run_on_ranks(method, height // space_stride, wait, encode_video, least)

        return self._try_methods(self._encode_methods, attempt)

    def decode(self, blocks: LatentBlocks, sink: Sink, release_ranks: Callable[[], None]) -> bool:
        """Decodes latents into the sink of the main rank; all ranks call it.

        Args:
            blocks: All ranks request each block; tiles are decoded after the last one.
            sink: Receives the frames.
            release_ranks: Called as soon as the other ranks have finished their part.

        Returns:
            Whether this is the main rank.
        """
        height, min_bytes = blocks.shape[2], self._estimate_decode_bytes(blocks.shape)
        is_main = self._make_rows is None or self._make_rows(height, False).rank == 0

        def attempt(method: str, may_fail: bool) -> None:
            if method == TILED:
                latent_Zfhw = blocks.join()
                release_ranks()
                if is_main:
                    self._decode_tiles(latent_Zfhw, sink)
                return
            decode_to_sink = partial(VideoVAE.stream, blocks=blocks, sink=sink)

            def wait(rows: ShardedRows) -> None:  # as often as `VideoVAE.stream` agrees
                rows.join_memory_agreements(1)
                for index, block in enumerate(blocks):
                    rows.join_memory_agreements(1)
                    if index == 0:
                        rows.agree(True)
                    rows.join_memory_agreements(1 + 2 * block.shape[1])

            least = min_bytes if may_fail else 0
            self._run_on_ranks(method, height, wait, decode_to_sink, least)
            release_ranks()

        self._try_methods(self._decode_methods, attempt)
        return is_main

    def decode_alone(self, latent_Zfhw: Tensor, sink: Sink) -> None:
        """Decodes on this rank into a sink: whole frames, or tiles with `vae_tiling`."""
        if self._setup.execution.vae_tiling:
            self._decode_tiles(latent_Zfhw, sink)
            return
        self._check_free_memory(self._estimate_decode_bytes(latent_Zfhw.shape))
        self._get_vae().stream(LatentBlocks(latent_Zfhw.shape, [latent_Zfhw]), sink)

    def _decode_tiles(self, latent_Zfhw: Tensor, sink: Sink) -> None:
        video = self._get_vae().decode_in_tiles(latent_Zfhw)
        sink.begin((video.shape[1], video.shape[2], video.shape[3]))
        sink.write_frames(video)

    def _estimate_decode_bytes(self, latent_shape: Sequence[int]) -> int:
        """Returns the minimum bytes of activations of decoding latents of shape (Z, f, h, w)."""
        _, num_latent_frames, height, width = latent_shape
        _, *space_strides = self._setup.preset.vae_stride
        size = num_latent_frames, height * space_strides[0], width * space_strides[1]
        return memory_estimate.estimate_vae_activations(self._setup, "decode", size)

    def _try_methods(self, methods: tuple[str, ...], attempt: Callable[[str, bool], T]) -> T:
        """Calls attempt(method, may_fail) until one has enough memory; the last may not fail."""
        for method, fallback in zip(methods, (*methods[1:], None), strict=True):
            self.last_method = method
            try:
                return attempt(method, fallback is not None)
            except Exception as error:
                if fallback is None or not is_out_of_memory(error):
                    raise
            gc.collect()
            self._device.empty_cache()
            suffix = "; they are not exact" if fallback == TILED else ""
            logger.warning("The VAE has too little memory for %s: %s%s.", method, fallback, suffix)
        raise AssertionError("the last method returns or raises")

    def _run_on_ranks(
        self,
        method: str,
        height: int,
        wait: Callable[[ShardedRows], None],
        work: Callable[..., T],
        min_bytes: int,
    ) -> T | None:
        """Calls work(vae, rows=...) on the ranks that have rows, while the other ranks wait.

        Args:
            height: Rows of the latents.
            wait: Joins the memory agreements of `work` on a rank without rows.
            work: Encodes or decodes.
            min_bytes: The minimum bytes for all rows.
        """
        if self._make_rows is None:
            self._check_free_memory(min_bytes)
            return work(self._get_vae(), rows=ALL_ROWS)
        rows = self._make_rows(height, method == ROW_PARALLEL)

        def load_vae() -> VideoVAE:
            self._check_free_memory(rows.row_fraction * min_bytes)
            return self._get_vae()

        def attempt() -> T | None:
            if rows.is_idle:
                rows.join_memory_agreements(1)  # of loading
                wait(rows)
                return None
            return work(rows.run_with_memory_agreement(load_vae), rows=rows)

        return rows.run_with_memory_agreement(attempt)

    def _check_free_memory(self, min_bytes: float) -> None:
        """Raises MemoryError if fewer bytes are free on the device."""
        free_bytes = self._device.free_memory()
        if free_bytes is not None and min_bytes > free_bytes:
            raise MemoryError(
                f"The VAE needs {min_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free."
            )
