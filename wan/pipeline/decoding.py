"""The ranks of a run encode and decode with the first of three methods for which memory suffices.

The methods are whole frames on the main rank; rows shared by all ranks, which is exact as well; and
tiles on the main rank, which are not exact and never encode. If memory runs out, the next method is
tried.
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
from wan.vae.rows import WHOLE

if TYPE_CHECKING:
    from wan.vae.sharded import ShardedRows

T = TypeVar("T")
ALONE, SHARED, TILES = "whole frames", "rows shared by all ranks", "tiles"
MakeRows = Callable[[int, bool], "ShardedRows"]
"""(rows of latents, whether all ranks share them) -> the rows of this rank."""


class Codec:
    """Encodes and decodes with the autoencoder of a run. used: the method of the last call."""

    def __init__(
        self, setup: Setup, device: Device, vae: Callable[[], VideoVAE], rows: MakeRows | None
    ) -> None:
        """Loads nothing yet. vae: loads the autoencoder. rows: None for one process."""
        self._setup, self._device, self._vae, self._rows = setup, device, vae, rows
        self.used = ""
        exact = (ALONE,) if rows is None else (ALONE, SHARED)
        self._encodes: tuple[str, ...] = (SHARED,) if setup.execution.vae_parallel else exact
        self._decodes = (TILES,) if setup.execution.vae_tiling else (*self._encodes, TILES)

    def encode(self, video_3FHW: Tensor) -> Tensor | None:
        """Returns the normalised latents [Z,f,h,w] on the main rank; every rank calls it."""
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
        """Gives the frames to the sink of the main rank; every rank calls it.

        Args:
            latent_Zfhw: The normalised latents.
            sink: Receives the frames.
            release: Called when the other ranks are not needed any more.

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
            # Ranks agree three times at first, and twice in each latent frame: layers and sink.
            self._run(method, height, 3 + 2 * steps, work, need if may_fail else 0)
            release()

        self._first(self._decodes, attempt)
        return is_main

    def decode_alone(self, latent_Zfhw: Tensor, sink: Sink) -> None:
        """Gives the frames to a sink without the other ranks, and without another try."""
        self._check_free(self._need(latent_Zfhw))
        self._vae().stream(latent_Zfhw, sink)

    def _need(self, latent_Zfhw: Tensor) -> int:
        """Returns the bytes that decoding computes with, at least."""
        _, steps, height, width = latent_Zfhw.shape
        _, *scales = self._setup.preset.vae_stride
        size = steps, height * scales[0], width * scales[1]
        return memory.vae_activations(self._setup, "decode", size)

    def _first(self, methods: tuple[str, ...], attempt: Callable[[str, bool], T]) -> T:
        """Calls attempt(method, may_fail) in turn; a method may fail where another one follows."""
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
        """Calls work(vae, rows=...) on the ranks that have rows, while the others wait.

        Args:
            method: One of the three.
            height: Rows of the latents.
            steps: The number of agreements in `work`.
            work: Encodes or decodes.
            need: The bytes that all rows need at least.
        """
        if self._rows is None:
            self._check_free(need)
            return work(self._vae(), rows=WHOLE)
        rows = self._rows(height, method == SHARED)

        def prepare() -> VideoVAE:
            self._check_free(rows.share * need)
            return self._vae()

        def attempt() -> T | None:
            if rows.is_idle:
                rows.wait(1 + steps)
                return None
            return work(rows.together(prepare), rows=rows)

        return rows.together(attempt)

    def _check_free(self, need: float) -> None:
        """Raises MemoryError if fewer bytes are free."""
        free = self._device.free_memory()
        if free is not None and need > free:
            raise MemoryError(f"The VAE needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free.")
