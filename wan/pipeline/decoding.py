"""How the ranks of a run encode and decode: by the first means that memory allows.

Whole frames on the main rank; rows shared by all ranks, which is exact, too; tiles on the main
rank, which are not, and never encode. Where memory runs out, the next of them is tried.
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
"""(rows of latents, shared by all ranks or on the main one) -> who computes which."""


class Codec:
    """The autoencoder of a run. used: how it was decoded last."""

    def __init__(
        self, setup: Setup, device: Device, vae: Callable[[], VideoVAE], rows: MakeRows | None
    ) -> None:
        """vae: loads it where it is needed. rows: None for a process alone."""
        self._setup, self._device, self._vae, self._rows = setup, device, vae, rows
        self.used = ""
        execution = setup.execution
        self._means: tuple[str, ...] = (ALONE, SHARED, TILES)
        if execution.vae_parallel:
            self._means = (SHARED, TILES)
        elif rows is None:
            self._means = (ALONE, TILES)
        self._decodes = (TILES,) if execution.vae_tiling else self._means

    def encode(self, video_3FHW: Tensor) -> Tensor | None:
        """The normalised latents [Z,f,h,w] on the main rank; every rank calls it."""
        _, frames, height, width = video_3FHW.shape
        time, scale, _ = self._setup.preset.vae_stride
        steps = 1 + (frames - 1) // time
        least = memory.vae_activations(self._setup, "encode", (steps, height, width))

        def attempt(means: str, may_skip: bool) -> Tensor | None:
            work = partial(VideoVAE.encode, video_3FHW=video_3FHW)
            need = least if may_skip else 0
            # Two of a beginning and an end.
            return self._together(means, height // scale, 2 + steps, work, need)

        return self._first(tuple(way for way in self._means if way != TILES), attempt)

    def decode(self, latent_Zfhw: Tensor, sink: Sink, part: Callable[[], None]) -> bool:
        """Frames go to the main rank's sink; whether this is that one. All ranks call it.

        part: called when the others are not needed any more.
        """
        _, steps, height, width = latent_Zfhw.shape
        _, *scales = self._setup.preset.vae_stride
        size = steps, height * scales[0], width * scales[1]
        least = memory.vae_activations(self._setup, "decode", size)
        is_main = self._rows is None or self._rows(height, False).rank == 0

        def attempt(means: str, may_skip: bool) -> None:
            if means == TILES:
                part()
                if is_main:
                    video = self._vae().decode_in_tiles(latent_Zfhw)
                    sink.begin((video.shape[1], video.shape[2], video.shape[3]))
                    sink.put(video)
                return
            work = partial(VideoVAE.stream, latent_Zfhw=latent_Zfhw, sink=sink)
            need = least if may_skip else 0
            # Three of a beginning; of each latent frame the layers, and what becomes of it.
            self._together(means, height, 3 + 2 * steps, work, need)
            part()

        self._first(self._decodes, attempt)
        return is_main

    def _first(self, order: tuple[str, ...], attempt: Callable[[str, bool], T]) -> T:
        """attempt(means, may_skip): it may raise MemoryError at once where another one follows."""
        for means, following in zip(order, (*order[1:], None), strict=True):
            self.used = means
            try:
                return attempt(means, following is not None)
            except Exception as error:
                if following is None or not is_out_of_memory(error):
                    raise
            gc.collect()
            self._device.empty_cache()
            exact = "; they are not exact" if following == TILES else ""
            logger.warning("The VAE has too little memory for %s: %s%s.", means, following, exact)
        raise AssertionError("the last means returns or raises")

    def _together(
        self, means: str, height: int, steps: int, work: Callable[..., T], need: int
    ) -> T | None:
        """work(vae, rows=...) on the ranks that have rows; the others wait for so many steps.

        need: bytes that must be free at least for all rows.
        """
        if self._rows is None:
            self._check_free(need)
            return work(self._vae(), rows=WHOLE)
        rows = self._rows(height, means == SHARED)

        def prepared() -> VideoVAE:
            self._check_free(rows.share * need)
            return self._vae()

        def attempt() -> T | None:
            if rows.is_idle:
                rows.wait(1 + steps)
                return None
            return work(rows.together(prepared), rows=rows)

        return rows.together(attempt)

    def _check_free(self, need: float) -> None:
        """MemoryError where so many bytes are not free."""
        free = self._device.free_memory()
        if free is not None and need > free:
            raise MemoryError(f"The VAE needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free.")
