"""The networks of a checkpoint: loaded when first needed, released as the memory policy says.

One request from prompt to frames: encode, condition, denoise, decode.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from PIL import Image
from torch import Tensor

from wan.device import Device
from wan.log import Stages
from wan.modules.model import WanModel
from wan.pipeline import conditioning
from wan.pipeline import denoise as sampler
from wan.pipeline.text import TextEncoder
from wan.pipeline.vae import VideoVAE
from wan.settings.errors import InputError
from wan.settings.request import Request


class Experts:
    """Hands out networks by name ("high_noise", "low_noise" or "dit").

    load(name) brings one to the device. With `offload`, asking for one releases the other first, so
    that at most one is in memory; one that is needed again is read again. files: each network's
    weight files, which `prefetch` reads ahead.
    """

    def __init__(
        self,
        load: Callable[[str], WanModel],
        *,
        offload: bool,
        files: Mapping[str, Iterable[Path]] | None = None,
    ) -> None:
        self._load, self.offload, self._files = load, offload, files or {}
        self._loaded: dict[str, WanModel] = {}
        self._kept: dict[str, WanModel] = {}

    def keep(self, name: str) -> WanModel:
        """A network for someone who will change it: it stays in memory, changes and all."""
        if name not in self._kept:
            loaded = name in self._loaded
            self._kept[name] = self._loaded.pop(name) if loaded else self._load(name)
        return self._kept[name]

    def get(self, name: str) -> WanModel:
        if name in self._kept:
            return self._kept[name]
        if name not in self._loaded:
            if self.offload:
                self.release()
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def prefetch(self, name: str) -> None:
        """Have the files of a network, needed soon, read into the system's page cache meanwhile.

        No memory of the process or the device is taken; loading then runs at memory speed.
        """
        if name not in self._loaded and name not in self._kept:
            files = sorted(set(self._files.get(name, ())))
            threading.Thread(target=_read_ahead, args=(files,), daemon=True).start()

    def release(self) -> None:
        freed = [weakref.ref(model) for model in self._loaded.values()]
        self._loaded.clear()
        if any(model() is not None for model in freed):
            gc.collect()  # a compiled module refers to itself


def _read_ahead(files: Iterable[Path]) -> None:
    if not hasattr(os, "posix_fadvise"):  # not on macOS
        return
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


T = TypeVar("T")


class Lazy(Generic[T]):
    """A part that is made when first needed and can be released."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._value: T | None = None

    def get(self) -> T:
        if self._value is None:
            self._value = self._make()
        return self._value

    def release(self) -> None:
        if self._value is not None:
            self._value = None
            gc.collect()  # a network with hooks, or sharded over ranks, refers to itself


FromMain = Callable[[Callable[[], Tensor]], Tensor]
"""Calls make() on one process and gives every process its result."""


def make_here(make: Callable[[], Tensor]) -> Tensor:
    return make()


@dataclass
class Pipeline:
    """The parts of a run. offload: release each part as soon as its stage is over.
    kernel: the name of self-attention's, for records.

    share_text, share_latents: how processes come to the text embeddings and the VAE's latents (by
    default each makes its own). branches: where the two guidance branches are computed.
    """

    device: Device
    text: Lazy[TextEncoder]
    vae: Lazy[VideoVAE]
    experts: Experts
    text_dim: int
    text_len: int
    offload: bool
    stages: Stages
    kernel: str
    share_text: FromMain = make_here
    share_latents: FromMain = make_here
    branches: sampler.Branches = sampler.both_here

    def set_offload(self, offload: bool) -> None:
        self.offload = self.experts.offload = offload

    def latents(
        self,
        request: Request,
        *,
        image: Image.Image | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
    ) -> Tensor:
        """Denoised latents, float32 [Z,f,h,w], on the device.

        prompt_embeds, negative_prompt_embeds: [length, text_dim], used instead of the prompts.
        """
        with self.stages("text"):
            context = self._context(request.prompt, prompt_embeds)
            if all(scale == 1 for scale in request.guide_scale):
                negative = context  # never looked at
            else:
                negative = self._context(request.negative_prompt, negative_prompt_embeds)
            self._done(self.text)
        with self.stages("conditioning"):
            conditions = conditioning.prepare(
                request,
                context,
                negative,
                image,
                lambda video: self.share_latents(lambda: self.vae.get().encode(video)),
                self.device.torch_device,
            )
            self._done(self.vae)
        with self.stages("denoising"):
            latents = sampler.denoise(request, conditions, self.experts, self.branches)
            self._done(self.experts)
        return latents

    def decode(self, latents_Zfhw: Tensor) -> Tensor:
        """Pixels [3,F,H,W] in [-1, 1]."""
        with self.stages("decoding"):
            video = self.vae.get().decode(latents_Zfhw)
            self._done(self.vae)
        return video

    def _context(self, prompt: str, embeds: Tensor | None) -> Tensor:
        if embeds is None:
            embeds = self.share_text(lambda: self.text.get()(prompt))
        if embeds.dim() != 2 or embeds.shape[1] != self.text_dim or len(embeds) > self.text_len:
            raise InputError(
                f"Text embeddings of shape {list(embeds.shape)} do not fit the DiT: it takes "
                f"[length <= {self.text_len}, {self.text_dim}]."
            )
        return embeds.to(self.device.torch_device)

    def _done(self, part: Lazy[TextEncoder] | Lazy[VideoVAE] | Experts) -> None:
        if self.offload:
            part.release()
            self.device.empty_cache()
