"""Takes a request from prompt to latents to frames, with only the networks in memory it needs."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from wan import host
from wan.cache.policy import Cache
from wan.checkpoint.files import content_digest
from wan.checkpoint.source import own
from wan.device import Device
from wan.log import Stages
from wan.pipeline import conditioning
from wan.pipeline.decoding import Codec
from wan.pipeline.denoise import UNENDED, Boundary, Branches, Denoising, Stepped, both_here
from wan.pipeline.text import TextEncoder
from wan.pipeline.vae import Collected, Sink, VideoVAE
from wan.settings import timesteps
from wan.settings.errors import InputError
from wan.settings.execution import Offload, buffers
from wan.settings.request import Request

if TYPE_CHECKING:
    from PIL import Image

    from wan.modules.model import WanModel
    from wan.pipeline.clip import ClipVision
    from wan.pipeline.clips import Clip
    from wan.pipeline.driving import DrivingVideos
    from wan.pipeline.media import PoseVideo, Sound
    from wan.pipeline.residency import Parked
    from wan.pipeline.sources import ControlSources

_SPARE = 1 << 30  # bytes of an accelerator that are left to kernels and fragments


@dataclass
class Residency:
    """Where the weights of a pipeline's networks are between their calls.

    Attributes:
        device: The device of this rank.
        resident_blocks: As in `Execution`.
        beside: Returns the bytes on the device beside a DiT's blocks while it runs.
        offload: As in `Execution`; may change between two videos.
        request: The next video.
        parked: The networks that wait in host memory.
    """

    device: Device
    resident_blocks: int | None
    beside: Callable[[Request], int]
    offload: Offload = True
    request: Request | None = None
    parked: list[Parked] = field(default_factory=list)

    def resident(self, size: int, count: int) -> int:
        """Decides how many of `count` blocks of `size` bytes stay on the device."""
        free = None if self.device.type == "cpu" else self.device.free_memory()
        if self.resident_blocks is not None or free is None or self.request is None:
            return self.resident_blocks or 0
        left = free - _SPARE - self.beside(self.request) * 5 // 4 - buffers(self.device.type) * size
        return min(max(left // size, 0), count)

    def park(self, network: nn.Module, left: Callable[[], None] = lambda: None) -> None:
        """Keeps a loaded network in host memory, too. left: frees what else the network keeps."""
        from wan.pipeline.residency import Parked

        Parked(network, self.device.torch_device, self.parked, left)

    def leave(self) -> None:
        """Frees the accelerator's memory for something else."""
        for network in self.parked:
            network.leave()


class Experts:
    """Hands out the DiTs by name: "high_noise", "low_noise" or "dit".

    With `offload` True or "block", asking for one releases the other first, so that at most one is
    in memory; one that is needed again is read again.
    """

    def __init__(
        self,
        load: Callable[[str], WanModel],
        *,
        offload: Offload,
        files: Mapping[str, Iterable[Path]] | None = None,
        whole: Callable[[str], WanModel] | None = None,
    ) -> None:
        """Loads nothing yet.

        Args:
            load: load(name) brings a network to the device.
            offload: As in `Execution`.
            files: The weight files of each network, which `prefetch` reads ahead.
            whole: whole(name) loads a network that may be changed; None: as `load`.
        """
        self._load, self.offload, self._files = load, offload, files or {}
        self._whole = whole or load
        self._loaded: dict[str, WanModel] = {}
        self._kept: dict[str, WanModel] = {}

    def keep(self, name: str) -> WanModel:
        """Returns a network that the caller may change; it stays in memory as it is changed."""
        if name not in self._kept:
            loaded = name in self._loaded and isinstance(self.offload, bool)
            network = self._loaded.pop(name) if loaded else self._whole(name)
            self._kept[name] = own(network)
        return self._kept[name]

    def get(self, name: str) -> WanModel:
        if name in self._kept:
            return self._kept[name]
        if name not in self._loaded:
            if self.offload in (True, "block"):
                self.release()
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def prefetch(self, name: str) -> None:
        """Has the system read a network's files into its page cache in the background.

        No memory of the process or the device is taken; loading then runs at memory speed.
        """
        if name not in self._loaded and name not in self._kept:
            _read_ahead(self._files.get(name, ()))

    def release(self) -> None:
        freed = [weakref.ref(model) for model in self._loaded.values()]
        self._loaded.clear()
        if any(model() is not None for model in freed):
            gc.collect()  # a compiled module refers to itself


def _read_ahead(files: Iterable[Path]) -> None:
    host.in_background(partial(host.read_ahead, sorted(set(files))))


T = TypeVar("T")


class Lazy(Generic[T]):
    """A network that is loaded when it is first needed, and can be released."""

    def __init__(self, make: Callable[[], T], files: Iterable[Path] = ()) -> None:
        """Loads nothing yet. make: loads it. files: its weights, for `prefetch`."""
        self._make, self._files = make, files
        self._value: T | None = None

    def prefetch(self) -> None:
        if self._value is None:
            _read_ahead(self._files)

    def get(self) -> T:
        if self._value is None:
            self._value = self._make()
        return self._value

    def release(self) -> None:
        if self._value is not None:
            self._value = None
            gc.collect()  # a network with hooks, or sharded over ranks, refers to itself


FromMain = Callable[[Callable[[], Tensor]], Tensor]
"""Calls make() on one rank and returns its result on every rank."""


def make_here(make: Callable[[], Tensor]) -> Tensor:
    return make()


@dataclass(frozen=True)
class Sharing:
    """How ranks share work outside the DiT; by default each computes everything itself.

    Attributes:
        text: Distributes text embeddings.
        latents: Distributes the VAE's latents.
        branches: Computes the two guidance branches.
    """

    text: FromMain = make_here
    latents: FromMain = make_here
    branches: Branches = both_here


@dataclass(frozen=True)
class Inputs:
    """What a video is made from besides its request.

    Attributes:
        image: The image that it starts from.
        last_image: The image that it ends with.
        prompt_embeds: [length, text_dim], used instead of the prompt.
        negative_prompt_embeds: [length, text_dim], used instead of the negative prompt.
        sound: The sound that it follows.
        pose: The video whose poses it takes over.
        driving: What moves its character.
        sources: What VACE makes it from.
        start: The latents that it starts from instead of noise, float32 [Z,f,h,w].
        stepped: Gets the number of steps that are done and the latents after them, for each step.
        done: The clips of a chain that are there already.
        end: What the last of them has handed on, as `Clip.end`; on every rank.
    """

    image: Image.Image | None = None
    last_image: Image.Image | None = None
    prompt_embeds: Tensor | None = None
    negative_prompt_embeds: Tensor | None = None
    sound: Sound | None = None
    pose: PoseVideo | None = None
    driving: DrivingVideos | None = None
    sources: ControlSources | None = None
    start: Tensor | None = None
    stepped: Stepped | None = None
    done: int = 0
    end: Tensor | None = None

    def digests(self) -> dict[str, str | None]:
        """Returns the SHA-256 of each content, which all ranks of a video must have in common."""
        hooks = ("stepped", "done")
        names = [one.name for one in fields(self) if one.name not in hooks]
        return {name: _digest(getattr(self, name)) for name in names}


def _digest(content: Any) -> str | None:
    """Returns the SHA-256 of an input of a video, in hexadecimal; None where there is none."""
    if content is None:
        return None
    digest = hashlib.sha256()
    if isinstance(content, Tensor):
        digest.update(f"{content.dtype} {tuple(content.shape)}".encode())
        values = content.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(values.numpy().tobytes())
    elif hasattr(content, "tobytes") and hasattr(content, "mode"):  # a PIL image
        digest.update(f"{content.mode} {content.size}".encode() + content.tobytes())
    elif hasattr(content, "samples"):
        digest.update(content.samples.tobytes())
    else:
        files = content.files if hasattr(content, "files") else (content.path,)
        digest.update("".join(map(content_digest, files)).encode())
        for picture in getattr(content, "pictures", ()):
            digest.update(str(_digest(picture)).encode())
    return digest.hexdigest()


NO_INPUTS = Inputs()


@dataclass
class Pipeline:
    """The networks of a checkpoint and what makes videos with them.

    Attributes:
        device: The device of this rank.
        text: The text encoder.
        vae: The autoencoder.
        codec: Encodes and decodes with the autoencoder, on one rank or on all of them.
        clip: The image encoder.
        experts: The DiTs.
        text_size: The most tokens of a prompt, and the channels of each, that the DiTs take.
        residency: Where weights are between their calls.
        stages: The seconds of each stage.
        kernel: The name of the kernel that computes self-attention, for records.
        merges: Whether the dense kernel returns the log-sum-exp, by which a ring merges.
        caches: The step cache.
        sharing: How ranks share work.
        hearing: Returns the features [S,C,T] of a sound, for networks that follow one.
        kept: Embeddings of prompts that come next.
        boundary: Is told of every denoising step.
        is_main: This rank gets the frames.
        overlaps: Clips of a chain are decoded while the next ones are denoised.
    """

    device: Device
    text: Lazy[TextEncoder]
    vae: Lazy[VideoVAE]
    codec: Codec
    clip: Lazy[ClipVision]
    experts: Experts
    text_size: tuple[int, int]
    residency: Residency
    stages: Stages
    kernel: str
    merges: bool
    caches: Cache
    sharing: Sharing = field(default_factory=Sharing)
    hearing: Callable[[Sound], Tensor] | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    boundary: Boundary = UNENDED
    is_main: bool = True
    overlaps: bool = False

    def set_offload(self, offload: Offload) -> None:
        """Sets `offload_model` for the next video; networks loaded in another way are released."""
        before, self.residency.offload = self.residency.offload, offload
        self.experts.offload = offload
        if before != offload and not (isinstance(before, bool) and isinstance(offload, bool)):
            self.residency.parked.clear()
            for part in (self.text, self.vae, self.clip, self.experts):
                part.release()

    def latents(self, request: Request, inputs: Inputs = NO_INPUTS) -> Tensor:
        """Returns denoised latents, float32 [Z,f,h,w], on the device."""
        if inputs.prompt_embeds is None and request.prompt not in self.kept:
            self.text.prefetch()
        self.experts.prefetch(timesteps.schedule(request).experts[0])
        latents = self.advanced(self.prepared(request, inputs))
        self.done(self.experts)
        return latents

    def clips(self, request: Request, inputs: Inputs) -> Iterator[Clip]:
        """Makes a video clip by clip, on every rank."""
        from wan.pipeline import chain, characters, clips

        self.experts.prefetch(timesteps.schedule(request).experts[0])
        if request.chain is not None:
            return chain.made(self, request, inputs)
        made = clips.made if inputs.driving is None else characters.made
        return made(self, request, inputs)

    def sound_rows(self, sound: Sound, count: int) -> Tensor:
        """Returns what the network hears in each of `count` frames, [1,S,C,count]."""
        from wan.pipeline.sound import rows

        assert self.hearing is not None
        with self.stages("sound"):
            made = partial(self.hearing, sound)
            return rows(self.sharing.latents(made).to(self.device.torch_device), count)

    def prepared(self, request: Request, inputs: Inputs = NO_INPUTS) -> Denoising:
        """Prepares a video up to its first step."""
        contexts = self.texts(request, inputs.prompt_embeds, inputs.negative_prompt_embeds)
        with self.stages("conditioning"):
            conditions = conditioning.prepare(
                request,
                contexts,
                [one for one in (inputs.image, inputs.last_image) if one is not None],
                self.encode,
                self.look,
                self.device.torch_device,
                inputs.start,
            )
            if request.preset.kind == "vace":
                from wan.pipeline import control

                conditions = control.added(request, conditions, inputs.sources, self.encode)
            self.done(self.vae)
        return Denoising(request, conditions, inputs.stepped)

    def advanced(self, video: Denoising, phases: int | None = None) -> Tensor:
        """Takes the steps of a video's next `phases` experts, by default all, and returns latents.

        The expert stays in memory. A step cache holds one video, whose steps are not interrupted.
        """
        self.residency.request = video.request
        with self.stages("denoising"):
            video.to(self.device.torch_device)
            self.caches.start(video.request)
            branches = self.sharing.branches
            latents = video.advance(self.experts, branches, self.caches, phases, self.boundary)
            self.caches.end()
        return latents

    def texts(
        self,
        request: Request,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Embeds the prompt and the negative prompt, unless their embeddings are given."""
        self.residency.request = request
        with self.stages("text"):
            context = self._context(request.prompt, prompt_embeds)
            negative = context  # never looked at without guidance
            if request.guided:
                negative = self._context(request.negative_prompt, negative_prompt_embeds)
            self.done(self.text)
        return context, negative

    def keep_texts(self, texts: Sequence[str], request: Request) -> None:
        """Embeds texts, and keeps only these. request: the first of their videos."""
        self.kept = {text: x for text, x in self.kept.items() if text in texts}
        self.residency.request = request
        with self.stages("text"):
            for text in dict.fromkeys(texts):
                if text not in self.kept:
                    self.kept[text] = self._context(text, None).to("cpu", copy=True)  # no padding
            self.done(self.text)

    def decode(self, latents_Zfhw: Tensor) -> Tensor | None:
        """Returns pixels [3,F,H,W] in [-1, 1] on the main rank, else None; all ranks call it."""
        whole = Collected(self.device.torch_device)
        return whole.video if self.stream(latents_Zfhw, whole) else None

    def stream(
        self, latents_Zfhw: Tensor, sink: Sink, part: Callable[[], None] = lambda: None
    ) -> bool:
        """Decodes into the main rank's sink; all ranks call it.

        Args:
            latents_Zfhw: The denoised latents.
            sink: Gets the frames; used on the main rank alone.
            part: Called when the other ranks are not needed any more.

        Returns:
            Whether this is the main rank.
        """
        with self.stages("decoding"):
            is_main = self.codec.decode(latents_Zfhw, sink, part)
            self.done(self.vae)
        return is_main

    def abandon(self) -> None:
        """Releases after a failure what `latents` and `stream` would have released."""
        self.caches.end()
        for part in (self.text, self.clip, self.vae, self.experts):
            self.done(part)

    def encode(self, video_3FHW: Tensor) -> Tensor:
        """Returns the latents of pixels in [-1, 1] on every rank; all ranks call it."""
        latents = self.codec.encode(video_3FHW)

        def made() -> Tensor:
            assert latents is not None, "the main rank has them"
            return latents

        return self.sharing.latents(made)

    def look(self, images: Sequence[Tensor]) -> Tensor:
        """Computes CLIP's features and releases it, since the VAE takes more memory."""
        found = self.sharing.latents(lambda: self.clip.get()(images))
        self.done(self.clip)
        return found

    def _context(self, prompt: str, embeds: Tensor | None) -> Tensor:
        if embeds is None:
            embeds = self.kept.get(prompt)
        if embeds is None:
            embeds = self.sharing.text(lambda: self.text.get()(prompt))
        length, channels = self.text_size
        if embeds.dim() != 2 or embeds.shape[1] != channels or len(embeds) > length:
            why = f"of shape {list(embeds.shape)} do not fit the DiT"
            remedy = f"it takes [length <= {length}, {channels}]"
            raise InputError("Text embeddings", None, why, remedy)
        return embeds.to(self.device.torch_device)

    def done(self, part: Lazy[Any] | Experts) -> None:
        """Releases the network of a stage that is over, as the residency says."""
        if self.residency.offload == "cpu" and part in (self.text, self.experts):
            self.residency.leave()
        elif self.residency.offload:
            part.release()
        if self.residency.offload:
            self.device.empty_cache()
