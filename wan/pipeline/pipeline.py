"""Runs the stages of a video (text, conditioning, denoising, decoding) and loads their networks."""

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

_SPARE = 1 << 30  # bytes reserved for kernels and fragmentation


@dataclass
class Residency:
    """Offloads the weights of a pipeline's networks between their calls.

    Attributes:
        resident_blocks: As in `Execution`.
        bytes_outside_blocks: Returns the bytes that a DiT's forward needs outside its blocks.
        offload: As in `Execution`; may change between two videos.
        params: The next video.
        offloaded_modules: The networks with a copy in host memory.
    """

    device: Device
    resident_blocks: int | None
    beside: Callable[[Request], int]
    offload: Offload = True
    request: Request | None = None
    parked: list[Parked] = field(default_factory=list)

    def resident(self, size: int, count: int) -> int:
        """Computes how many of `num_blocks` blocks stay on the device."""
        free = None if self.device.type == "cpu" else self.device.free_memory()
        if self.resident_blocks is not None or free is None or self.request is None:
            return self.resident_blocks or 0
        left = free - _SPARE - self.beside(self.request) * 5 // 4 - buffers(self.device.type) * size
        return min(max(left // size, 0), count)

    def park(self, network: nn.Module, left: Callable[[], None] = lambda: None) -> None:
        """Adds a network that is offloaded to host memory. on_free: clears its caches."""
        from wan.pipeline.residency import Parked

        Parked(network, self.device.torch_device, self.parked, left)

    def leave(self) -> None:
        """Frees the accelerator memory of all offloaded networks."""
        for network in self.parked:
            network.leave()


class Experts:
    """Loads the DiTs by name: "high_noise", "low_noise" or "dit".

    With `offload` True or "block", loading one expert first releases the other, so that at most one
    is in memory; a released expert is loaded from its files again.
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
            load: Loads an expert to the device.
            offload: As in `Execution`.
            files: The weight files of each expert, for `prefetch`.
            load_editable: Loads an expert whose weights may be changed; default: `load`.
        """
        self._load, self.offload, self._files = load, offload, files or {}
        self._whole = whole or load
        self._loaded: dict[str, WanModel] = {}
        self._kept: dict[str, WanModel] = {}

    def keep(self, name: str) -> WanModel:
        """Returns an expert whose weights the caller may change; it is never released."""
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
        """Reads an expert's files into the page cache in the background.

        This takes no memory of the process or the device; loading then runs at memory speed.
        """
        if name not in self._loaded and name not in self._kept:
            _read_ahead(self._files.get(name, ()))

    def release(self) -> None:
        freed = [weakref.ref(model) for model in self._loaded.values()]
        self._loaded.clear()
        if any(model() is not None for model in freed):
            gc.collect()  # a compiled module has reference cycles


def _read_ahead(files: Iterable[Path]) -> None:
    host.in_background(partial(host.read_ahead, sorted(set(files))))


T = TypeVar("T")


class Lazy(Generic[T]):
    """A network that is loaded on first use and can be released."""

    def __init__(self, make: Callable[[], T], files: Iterable[Path] = ()) -> None:
        """Loads nothing yet. files: The weight files, for `prefetch`."""
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
            gc.collect()  # hooks and sharding make reference cycles


FromMain = Callable[[Callable[[], Tensor]], Tensor]
"""Calls make() on one rank and returns its result on all ranks."""


def make_here(make: Callable[[], Tensor]) -> Tensor:
    return make()


@dataclass(frozen=True)
class Sharing:
    """Distributes work outside the DiT over ranks; by default every rank computes everything.

    Attributes:
        run_text_encoder: Computes text embeddings, on rank 0 or (with FSDP) on all ranks.
        run_on_rank0: Computes a tensor on rank 0 and broadcasts it.
        run_branches: Computes the two guidance branches.
    """

    text: FromMain = make_here
    latents: FromMain = make_here
    branches: Branches = both_here


@dataclass(frozen=True)
class Inputs:
    """Images, audio, videos and tensors that condition a video.

    Attributes:
        prompt_embeds: [length, text_dim], used instead of the prompt.
        negative_prompt_embeds: [length, text_dim], used instead of the negative prompt.
        pose: The pose video of S2V.
        animate: The preprocessed videos of Animate.
        vace: The source video, mask and reference images of VACE.
        initial_latents: Latents used instead of noise, float32 [Z,f,h,w].
        callback_on_step_end: Called after each step with the number of steps done and the latents.
        num_clips_done: Clips that an earlier run has generated.
        clip_state: `Clip.state` of the last of these clips, on every rank.
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
        """Returns the SHA-256 of each input, by which ranks check that their inputs are equal."""
        hooks = ("stepped", "done")
        names = [one.name for one in fields(self) if one.name not in hooks]
        return {name: _digest(getattr(self, name)) for name in names}


def _digest(content: Any) -> str | None:
    """Returns the SHA-256 of an input in hexadecimal, or None without an input."""
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
    """The networks of a checkpoint, and the stages that generate a video with them.

    Attributes:
        vae_runner: Encodes and decodes with the VAE, on one rank or on all ranks.
        text_size: The DiTs' maximum number of text tokens, and the channels of a token.
        stages: Measures the seconds of each stage.
        kernel: The name of the self-attention kernel, for records.
        returns_lse: The dense kernel returns the log-sum-exp, as ring attention requires.
        encode_audio: Returns the features [S,C,T] of an audio file (S2V).
        cached_prompt_embeds: Prompt -> its embeddings, computed ahead.
        cancellation_point: Checked between denoising steps.
        is_main: This rank receives the frames.
        overlap_decoding: Each clip of a chain is decoded while the next one is denoised.
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
        """Sets `offload_model` for the next video; releases networks loaded for another mode."""
        before, self.residency.offload = self.residency.offload, offload
        self.experts.offload = offload
        if before != offload and not (isinstance(before, bool) and isinstance(offload, bool)):
            self.residency.parked.clear()
            for part in (self.text, self.vae, self.clip, self.experts):
                part.release()

    def latents(self, request: Request, inputs: Inputs = NO_INPUTS) -> Tensor:
        """Generates denoised latents, float32 [Z,f,h,w], on the device."""
        if inputs.prompt_embeds is None and request.prompt not in self.kept:
            self.text.prefetch()
        self.experts.prefetch(timesteps.schedule(request).experts[0])
        latents = self.advanced(self.prepared(request, inputs))
        self.done(self.experts)
        return latents

    def clips(self, request: Request, inputs: Inputs) -> Iterator[Clip]:
        """Generates a video clip by clip; all ranks call it."""
        from wan.pipeline import chain, characters, clips

        self.experts.prefetch(timesteps.schedule(request).experts[0])
        if request.chain is not None:
            return chain.made(self, request, inputs)
        made = clips.made if inputs.driving is None else characters.made
        return made(self, request, inputs)

    def sound_rows(self, sound: Sound, count: int) -> Tensor:
        """Returns the audio features of each of `num_frames` video frames, [1,S,C,F]."""
        from wan.pipeline.sound import rows

        assert self.hearing is not None
        with self.stages("sound"):
            made = partial(self.hearing, sound)
            return rows(self.sharing.latents(made).to(self.device.torch_device), count)

    def prepared(self, request: Request, inputs: Inputs = NO_INPUTS) -> Denoising:
        """Encodes prompt and inputs, and returns the denoising loop before its first step."""
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
        """Runs the steps of the next `num_experts` experts (default: all) and returns the latents.

        The last expert stays in memory. The step cache is started and ended in each call.
        """
        self.residency.request = video.request
        with self.stages("denoising"):
            video.to(self.device.torch_device)
            self.caches.start_video(video.request)
            branches = self.sharing.branches
            latents = video.advance(self.experts, branches, self.caches, phases, self.boundary)
            self.caches.clear()
        return latents

    def texts(
        self,
        request: Request,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the embeddings of the prompt and of the negative prompt."""
        self.residency.request = request
        with self.stages("text"):
            context = self._context(request.prompt, prompt_embeds)
            negative = context  # not used without guidance
            if request.guided:
                negative = self._context(request.negative_prompt, negative_prompt_embeds)
            self.done(self.text)
        return context, negative

    def keep_texts(self, texts: Sequence[str], request: Request) -> None:
        """Caches the embeddings of these prompts and drops all others. params: the first video."""
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
            sink: Receives the frames; only used on the main rank.
            release_ranks: Called as soon as the other ranks have finished their part.

        Returns:
            Whether this is the main rank.
        """
        with self.stages("decoding"):
            is_main = self.codec.decode(latents_Zfhw, sink, part)
            self.done(self.vae)
        return is_main

    def abandon(self) -> None:
        """Releases all networks and the step cache after a failure."""
        self.caches.clear()
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
        """Computes CLIP features, and releases CLIP before the VAE needs its memory."""
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
        """Releases or offloads a network after its stage, according to `offload_model`."""
        if self.residency.offload == "cpu" and part in (self.text, self.experts):
            self.residency.leave()
        elif self.residency.offload:
            part.release()
        if self.residency.offload:
            self.device.empty_cache()
