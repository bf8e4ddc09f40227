"""Encodes and decodes videos with the VAE, with the first of three methods that fits into memory.

Whole frames on the main rank; rows of a frame split over all ranks (exact, too); tiles on the main
rank (approximate, and only for decoding). If memory runs out, the next method is tried.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from wan.device import Device
from wan.log import logger
from wan.pipeline import memory
from wan.pipeline.setup import Setup
from wan.pipeline.vae import Sink, VideoVAE
from wan.settings.errors import is_out_of_memory
from wan.vae.rows import ALL_ROWS

if TYPE_CHECKING:
    from wan.vae.sharded import ShardedRows

T = TypeVar("T")
ALONE, SHARED, TILES = "whole frames", "rows shared by all ranks", "tiles"
MakeRows = Callable[[int, bool], "ShardedRows"]
"""(height of the latents, whether it is split over all ranks) -> the rows of this rank."""


class Codec:
    """Runs the VAE on one rank or on all ranks. last_method: The method of the last call."""

    def __init__(
        self, setup: Setup, device: Device, vae: Callable[[], VideoVAE], rows: MakeRows | None
    ) -> None:
        """Loads nothing yet. get_vae: Loads the VAE. make_rows: None for one process."""
        self._setup, self._device, self._vae, self._rows = setup, device, vae, rows
        self.used = ""
        exact = (ALONE,) if rows is None else (ALONE, SHARED)
        self._encodes: tuple[str, ...] = (SHARED,) if setup.execution.vae_parallel else exact
        self._decodes = (TILES,) if setup.execution.vae_tiling else (*self._encodes, TILES)

    def encode(self, video_3FHW: Tensor) -> Tensor | None:
        """Returns the normalized latents [Z,f,h,w] on the main rank; all ranks call it."""
        _, frames, height, width = video_3FHW.shape
        time, scale, _ = self._setup.preset.vae_stride
        steps = 1 + (frames - 1) // time
        need = memory.vae_activations(self._setup, "encode", (steps, height, width))

        def attempt(method: str, may_fail: bool) -> Tensor | None:
            work = partial(VideoVAE.encode, video_3FHW=video_3FHW)
            # Ranks agree once before and once after the latent frames.
            return self._run(method, height // scale, 2 + steps, work, need if may_fail else 0)

        return self._first(self._encodes, attempt)

    def decode(self, latent_Zfhw: Tensor, sink: Sink, release: Callable[[], None]) -> bool:
        """Decodes latents into the sink of the main rank; all ranks call it.

        Args:
            latent_Zfhw: The normalized latents.
            sink: Receives the frames.
            release_ranks: Called as soon as the other ranks have finished their part.

        Returns:
            Whether this is the main rank.
        """
        _, steps, height, _ = latent_Zfhw.shape
        need = self._need(latent_Zfhw)
        is_main = self._rows is None or self._rows(height, False).rank == 0

        def attempt(method: str, may_fail: bool) -> None:
            if method == TILES:
                release()
                if is_main:
                    video = self._vae().decode_in_tiles(latent_Zfhw)
                    sink.begin((video.shape[1], video.shape[2], video.shape[3]))
                    sink.put(video)
                return
            work = partial(VideoVAE.stream, latent_Zfhw=latent_Zfhw, sink=sink)
            # Ranks agree three times first, then twice per latent frame: after layers and sink.
            self._run(method, height, 3 + 2 * steps, work, need if may_fail else 0)
            release()

        self._first(self._decodes, attempt)
        return is_main

    def decode_alone(self, latent_Zfhw: Tensor, sink: Sink) -> None:
        """Decodes on this rank into a sink; tries no other method."""
        self._check_free(self._need(latent_Zfhw))
        self._vae().stream(latent_Zfhw, sink)

    def _need(self, latent_Zfhw: Tensor) -> int:
        """Returns the minimum bytes of activations of decoding."""
        _, steps, height, width = latent_Zfhw.shape
        _, *scales = self._setup.preset.vae_stride
        size = steps, height * scales[0], width * scales[1]
        return memory.vae_activations(self._setup, "decode", size)

    def _first(self, methods: tuple[str, ...], attempt: Callable[[str, bool], T]) -> T:
        """Calls attempt(method, may_fail) until one has enough memory; the last may not fail."""
        for method, following in zip(methods, (*methods[1:], None), strict=True):
            self.used = method
            try:
                return attempt(method, following is not None)
            except Exception as error:
                if following is None or not is_out_of_memory(error):
                    raise
            gc.collect()
            self._device.empty_cache()
            exact = "; they are not exact" if following == TILES else ""
            logger.warning("The VAE has too little memory for %s: %s%s.", method, following, exact)
        raise AssertionError("the last method returns or raises")

    def _run(
        self, method: str, height: int, steps: int, work: Callable[..., T], need: int
    ) -> T | None:
        """Calls work(vae, rows=...) on the ranks that have rows, while the other ranks wait.

        Args:
            height: Rows of the latents.
            num_agreements: How often the ranks synchronize in `work`.
            work: Encodes or decodes.
            min_bytes: The minimum bytes for all rows.
        """
        if self._rows is None:
            self._check_free(need)
            return work(self._vae(), rows=ALL_ROWS)
        rows = self._rows(height, method == SHARED)

        def prepare() -> VideoVAE:
            self._check_free(rows.row_fraction * need)
            return self._vae()

        def attempt() -> T | None:
            if rows.is_idle:
                rows.wait_for_steps(1 + steps)
                return None
            return work(rows.run_together(prepare), rows=rows)

        return rows.run_together(attempt)

    def _check_free(self, need: float) -> None:
        """Raises MemoryError if fewer bytes are free on the device."""
        free = self._device.free_memory()
        if free is not None and need > free:
            raise MemoryError(f"The VAE needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free.")
