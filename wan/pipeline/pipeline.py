"""Runs the stages of a video (text, conditioning, denoising, decoding) and loads their networks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from wan.cache.policy import Cache
from wan.checkpoint.formats.tensor_source import materialize_tensors
from wan.device import Device
from wan.modules.t5 import TextEncoder
from wan.modules.vae.video_vae import FrameCollector, LatentBlocks, Sink, VideoVAE
from wan.pipeline.denoise import (
    NEVER_CANCELLED,
    CancellationPoint,
    DenoisingLoop,
    RunBranches,
)
from wan.pipeline.memory_estimate import RESERVED_BYTES
from wan.pipeline.preview import Preview
from wan.pipeline.vae_runner import VaeRunner
from wan.pipeline.video_loras import VideoLoraLoader
from wan.settings import noise_schedule
from wan.settings.errors import InputError
from wan.settings.execution import Offload, count_block_buffers
from wan.tasks.base import NO_INPUTS, DenoiseInputs, Inputs, VideoParams, make_noise_sampler
from wan.utils import log, system
from wan.utils.log import StageTimer

if TYPE_CHECKING:
    from wan.media.audio import Audio
    from wan.modules.clip import ClipVision
    from wan.modules.model import WanModel
    from wan.pipeline.offload import OffloadedModule

_BLOCK_SIZE = 3  # latent frames that are decoded between two checks for a cancellation


@dataclass
class OffloadManager:
    """Decides which weights stay on the device, and has the networks with a copy in host memory.

    Attributes:
        resident_blocks: As in `Execution`.
        bytes_outside_blocks: Returns the bytes that a DiT's forward needs outside its blocks.
        offload: As in `Execution`; may change between two videos.
        params: The next video; the pipeline sets it before a network is loaded or called.
        offloaded_modules: The networks with a copy in host memory.
    """

    device: Device
    resident_blocks: int | None
    bytes_outside_blocks: Callable[[VideoParams], int]
    offload: Offload = True
    params: VideoParams | None = None
    offloaded_modules: list[OffloadedModule] = field(default_factory=list)

    def count_resident_blocks(self, block_bytes: int, num_blocks: int) -> int:
        """Computes how many of `num_blocks` blocks stay on the device."""
        free_bytes = None if self.device.type == "cpu" else self.device.free_memory()
        if self.resident_blocks is not None or free_bytes is None or self.params is None:
            return self.resident_blocks or 0
        outside_blocks = self.bytes_outside_blocks(self.params) * 5 // 4
        buffers = count_block_buffers(self.device.type) * block_bytes
        available = free_bytes - RESERVED_BYTES - outside_blocks - buffers
        return min(max(available // block_bytes, 0), num_blocks)

    def register(self, network: nn.Module, on_free: Callable[[], None] = lambda: None) -> None:
        """Adds a network that is offloaded to host memory. on_free: clears its caches."""
        from wan.pipeline.offload import OffloadedModule

        # The new object adds itself to the list.
        OffloadedModule(network, self.device.torch_device, self.offloaded_modules, on_free)

    def free_device_memory(self) -> None:
        """Frees the accelerator memory of all offloaded networks."""
        for network in self.offloaded_modules:
            network.free_device_memory()


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
        load_editable: Callable[[str], WanModel] | None = None,
    ) -> None:
        """Stores the loaders; `get` loads an expert.

        Args:
            load: Loads an expert to the device.
            offload: As in `Execution`.
            files: The weight files of each expert, for `prefetch`.
            load_editable: Loads an expert whose weights may be changed; default: `load`.
        """
        self._load, self.offload, self._files = load, offload, files or {}
        self._load_editable = load_editable or load
        self._loaded: dict[str, WanModel] = {}
        self._editable: dict[str, WanModel] = {}

    def load_editable(self, name: str) -> WanModel:
        """Returns an expert whose weights the caller may change; it is never released."""
        if name not in self._editable:
            # With "cpu" or "block" the weights are replaced in each forward pass.
            is_reusable = name in self._loaded and isinstance(self.offload, bool)
            network = self._loaded.pop(name) if is_reusable else self._load_editable(name)
            self._editable[name] = materialize_tensors(network)
        return self._editable[name]

    def get(self, name: str) -> WanModel:
        """Returns an expert; loads it first, and before that releases others, if necessary."""
        if name in self._editable:
            return self._editable[name]
        if name not in self._loaded:
            if self.offload in (True, "block"):
                self.release()
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def prefetch(self, name: str) -> None:
        """Reads an expert's files into the page cache in the background.

        This takes no memory of the process or the device; loading then runs at memory speed.
        """
        if name not in self._loaded and name not in self._editable:
            _prefetch_weight_files(self._files.get(name, ()))

    def release(self) -> None:
        model_refs = [weakref.ref(model) for model in self._loaded.values()]
        self._loaded.clear()
        if any(model() is not None for model in model_refs):
            gc.collect()  # a compiled module has reference cycles


def _prefetch_weight_files(files: Iterable[Path]) -> None:
    system.start_background_thread(partial(system.prefetch_files, sorted(set(files))))


T = TypeVar("T")


class LazyModule(Generic[T]):
    """A network that is loaded on first use and can be released."""

    def __init__(self, load: Callable[[], T], files: Iterable[Path] = ()) -> None:
        """Stores the loader, which `get` calls. files: The weight files, for `prefetch`."""
        self._load, self._files = load, files
        self._module: T | None = None

    def prefetch(self) -> None:
        if self._module is None:
            _prefetch_weight_files(self._files)

    def get(self) -> T:
        if self._module is None:
            self._module = self._load()
        return self._module

    def release(self) -> None:
        if self._module is not None:
            self._module = None
            gc.collect()  # hooks and sharding make reference cycles


def make_base_inputs(
    params: VideoParams,
    contexts: tuple[Tensor, Tensor],
    device: torch.device,
    initial_latents: Tensor | None = None,
) -> DenoiseInputs:
    """Returns the inputs of denoising that all tasks have: noise and text embeddings."""
    sample_noise = make_noise_sampler(params, device)
    latents = sample_noise()  # sampled even if unused, so that later samples match the seed
    latents = latents if initial_latents is None else initial_latents.to(device)
    if params.sample_solver == "rcm" or params.starts_from_source:  # the first sigma is not 1
        latents = latents * noise_schedule.make_noise_schedule(params).sigmas[0]
    return DenoiseInputs(latents, *contexts, sample_noise=sample_noise)


ShareResult = Callable[[Callable[[], Tensor]], Tensor]
"""share_result(make): calls make() on one rank or on all ranks; every rank gets the result."""


def run_locally(make: Callable[[], Tensor]) -> Tensor:
    return make()


@dataclass
class Pipeline:
    """The networks of a checkpoint, and the stages that generate a video with them.

    By default every rank computes everything.

    Attributes:
        vae_runner: Encodes and decodes with the VAE, on one rank or on all ranks.
        text_size: (text_len, text_dim) of the DiTs: maximum number of text tokens, their channels.
        stage_timer: Measures the seconds of each stage.
        kernel_name: The name of the self-attention kernel, for records.
        can_return_lse: The dense kernel can return the log-sum-exp, as ring attention requires.
        run_text_encoder: Computes text embeddings, on rank 0 or (with FSDP) on all ranks.
        run_on_rank0: Computes a tensor on rank 0 and broadcasts it; all ranks call it.
        run_branches: Computes the two guidance branches; None: each rank computes both.
        encode_audio: Returns the features [S,C,T] of an audio file (S2V).
        cached_prompt_embeds: Prompt -> its embeddings, computed ahead.
        cancellation_point: Checked between denoising steps.
        is_main: This rank is the main rank (rank 0), which receives the frames.
        overlap_decoding: Each clip of a chain is decoded while the next one is denoised.
        select_ops: Selects the operations of the blocks for a video.
        video_loras: Attaches the LoRAs of single videos.
    """

    device: Device
    text_encoder: LazyModule[TextEncoder]
    vae: LazyModule[VideoVAE]
    vae_runner: VaeRunner
    clip_vision: LazyModule[ClipVision]
    experts: Experts
    text_size: tuple[int, int]
    offload_manager: OffloadManager
    stage_timer: StageTimer
    kernel_name: str
    can_return_lse: bool
    step_cache: Cache
    video_loras: VideoLoraLoader
    run_text_encoder: ShareResult = run_locally
    run_on_rank0: ShareResult = run_locally
    run_branches: RunBranches | None = None
    encode_audio: Callable[[Audio], Tensor] | None = None
    cached_prompt_embeds: dict[str, Tensor] = field(default_factory=dict)
    cancellation_point: CancellationPoint = NEVER_CANCELLED
    is_main: bool = True
    overlap_decoding: bool = False
    select_ops: Callable[[VideoParams], None] = lambda params: None

    def set_offload(self, offload: Offload) -> None:
        """Sets the offload mode for the next video; releases networks loaded for another mode."""
        previous, self.offload_manager.offload = self.offload_manager.offload, offload
        self.experts.offload = offload
        if previous != offload and not (isinstance(previous, bool) and isinstance(offload, bool)):
            self.offload_manager.offloaded_modules.clear()
            for network in (self.text_encoder, self.vae, self.clip_vision, self.experts):
                network.release()

    def generate_latents(self, params: VideoParams, inputs: Inputs = NO_INPUTS) -> Tensor:
        """Generates denoised latents, float32 [Z,f,h,w], on the device."""
        if inputs.prompt_embeds is None and params.prompt not in self.cached_prompt_embeds:
            self.text_encoder.prefetch()
        experts = noise_schedule.make_noise_schedule(params).experts
        self.experts.prefetch(experts[0])
        with log.make_step_bar(len(experts) * params.num_blocks, "text") as bar:
            latents = self.denoise(self.prepare_denoising(params, inputs), bar=bar)
        self.release(self.experts)
        return latents

    def generate_blocks(self, params: VideoParams, inputs: Inputs = NO_INPUTS) -> LatentBlocks:
        """Prepares a video of a task that makes blocks; each is denoised when it is requested."""
        self.experts.prefetch(noise_schedule.make_noise_schedule(params).experts[0])
        loop = self.prepare_denoising(params, inputs)
        return LatentBlocks(params.latent_shape, self._denoise_blocks(loop))

    def _denoise_blocks(self, loop: DenoisingLoop) -> Iterator[Tensor]:
        from wan.pipeline.block_loop import BlockLoop

        assert isinstance(loop, BlockLoop)
        self.offload_manager.params = loop.params
        self.select_ops(loop.params)
        loop.to(self.torch_device)
        try:
            with self.video_loras.attach(self.experts, loop.loras) as experts:
                blocks = loop.iterate_blocks(experts, self.cancellation_point)
                while True:
                    with self.stage_timer("denoising"):
                        block = next(blocks, None)
                    if block is None:
                        return
                    yield block
        finally:
            self.release(self.experts)

    def sample_audio_features(self, audio: Audio, num_frames: int) -> Tensor:
        """Returns the audio features of each of `num_frames` video frames, [1,S,C,F]."""
        from wan.modules.audio_encoder import sample_features_per_frame

        assert self.encode_audio is not None
        with self.stage_timer("sound"):
            encode = partial(self.encode_audio, audio)
            return sample_features_per_frame(
                self.run_on_rank0(encode).to(self.device.torch_device), num_frames
            )

    def prepare_denoising(self, params: VideoParams, inputs: Inputs = NO_INPUTS) -> DenoisingLoop:
        """Encodes prompt and inputs, and returns the denoising loop before its first step."""
        if params.clip_prompts:  # encoded together, so that the text encoder is loaded once
            self.cache_prompt_embeds([*self.cached_prompt_embeds, *params.all_prompts], params)
        contexts = self.encode_prompt(params, inputs.prompt_embeds, inputs.negative_prompt_embeds)
        with self.stage_timer("conditioning"):
            base = make_base_inputs(params, contexts, self.torch_device, inputs.initial_latents)
            loop_inputs = params.task.make_denoise_inputs(params, base, inputs, self)
            del base
            self.release(self.vae)
        preview = self.make_preview(params, inputs)
        callback = inputs.callback_on_step_end
        make_loop: type[DenoisingLoop] = resolve_name(params.task.loop)
        return make_loop(params, loop_inputs, callback, preview, inputs.loras)

    def make_preview(self, params: VideoParams, inputs: Inputs) -> Preview | None:
        """Returns the preview of a video; None without one, and on ranks other than the main one.

        The VAE stays in memory from the first picture until the video is decoded.
        """
        if inputs.show_preview is None or not params.preview or not self.is_main:
            return None

        def decode(latents_Zfhw: Tensor) -> Tensor:
            collector = FrameCollector(torch.device("cpu"))
            with self.stage_timer("preview"), log.silence_thread():
                self.vae_runner.decode_alone(latents_Zfhw, collector)
            return collector.video

        return Preview(params, decode, inputs.show_preview)

    def denoise(
        self, loop: DenoisingLoop, num_experts: int | None = None, *, bar: Any = None
    ) -> Tensor:
        """Runs the steps of the next `num_experts` experts (default: all) and returns the latents.

        The last expert stays in memory. The step cache is started and ended in each call.
        bar: The progress bar of the steps; None: a new one.
        """
        self.offload_manager.params = loop.params
        with self.stage_timer("denoising"):
            loop.to(self.device.torch_device)
            self.step_cache.start_video(loop.params)
            self.select_ops(loop.params)
            with self.video_loras.attach(self.experts, loop.loras) as experts:
                latents = loop.advance(
                    experts,
                    self.run_branches,
                    self.step_cache,
                    num_experts,
                    self.cancellation_point,
                    bar,
                )
            self.step_cache.clear()
        return latents

    def encode_prompt(
        self,
        params: VideoParams,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the embeddings of the prompt and of the negative prompt."""
        self.offload_manager.params = params
        with self.stage_timer("text"):
            context = self._get_prompt_embeds(params.prompt, prompt_embeds)
            negative = context  # not used without guidance
            if params.uses_negative_prompt:
                negative = self._get_prompt_embeds(params.negative_prompt, negative_prompt_embeds)
            self.release(self.text_encoder)
        return context, negative

    def cache_prompt_embeds(self, prompts: Sequence[str], params: VideoParams) -> None:
        """Caches the embeddings of these prompts and drops all others. params: the first video."""
        cached = self.cached_prompt_embeds.items()
        self.cached_prompt_embeds = {
            prompt: embeds for prompt, embeds in cached if prompt in prompts
        }
        self.offload_manager.params = params
        new_prompts = [p for p in dict.fromkeys(prompts) if p not in self.cached_prompt_embeds]
        with (
            self.stage_timer("text"),
            log.make_progress_bar(len(new_prompts), "text", "prompt") as bar,
        ):
            for prompt in new_prompts:
                # A copy, so that a view does not keep a padded tensor in memory.
                embeds = self._get_prompt_embeds(prompt, None).to("cpu", copy=True)
                self.cached_prompt_embeds[prompt] = embeds
                bar.update()
            self.release(self.text_encoder)

    def decode(self, latents_Zfhw: Tensor) -> Tensor | None:
        """Returns pixels [3,F,H,W] in [-1, 1] on the main rank, else None; all ranks call it."""
        collector = FrameCollector(self.device.torch_device)
        return collector.video if self.decode_to_sink(latents_Zfhw, collector) else None

    def decode_to_sink(
        self,
        latents: Tensor | LatentBlocks,
        sink: Sink,
        on_other_ranks_done: Callable[[], None] = lambda: None,
    ) -> bool:
        """Decodes into the main rank's sink; all ranks call it.

        Args:
            latents: The denoised latents [Z,f,h,w], or blocks of them.
            sink: Receives the frames; only used on the main rank.
            on_other_ranks_done: Called as soon as the other ranks have finished their part.

        Returns:
            Whether this is the main rank.
        """
        blocks = latents
        if not isinstance(blocks, LatentBlocks):
            blocks = LatentBlocks(blocks.shape, self._split_latents(blocks))
        with self.stage_timer("decoding"):
            is_main = self.vae_runner.decode(blocks, sink, on_other_ranks_done)
            self.release(self.vae)
        return is_main

    def _split_latents(self, latents_Zfhw: Tensor) -> Iterator[Tensor]:
        """Yields blocks of latents; raises an error before the next one if the video is cancelled.

        All ranks iterate at the same time.
        """
        for block in latents_Zfhw.split(_BLOCK_SIZE, dim=1):
            self.cancellation_point.raise_if_cancelled()
            yield block

    @property
    def torch_device(self) -> torch.device:
        """The device of the denoising loop."""
        return self.device.torch_device

    def release_vae(self) -> None:
        """Frees the memory of the VAE before denoising, according to `offload`."""
        self.release(self.vae)

    def release_all(self) -> None:
        """Releases all networks and the step cache after a failure."""
        self.step_cache.clear()
        for network in (self.text_encoder, self.clip_vision, self.vae, self.experts):
            self.release(network)

    def encode_video(self, video_3FHW: Tensor) -> Tensor:
        """Returns the latents of pixels in [-1, 1] on every rank; all ranks call it."""
        latents = self.vae_runner.encode(video_3FHW)

        def get_latents() -> Tensor:
            assert latents is not None, "the main rank got no latents"
            return latents

        return self.run_on_rank0(get_latents)

    def encode_image(self, images: Sequence[Tensor]) -> Tensor:
        """Computes CLIP features of images, and releases CLIP before the VAE needs its memory."""
        features = self.run_on_rank0(lambda: self.clip_vision.get()(images))
        self.release(self.clip_vision)
        return features

    def _get_prompt_embeds(self, prompt: str, embeds: Tensor | None) -> Tensor:
        if embeds is None:
            embeds = self.cached_prompt_embeds.get(prompt)
        if embeds is None:
            embeds = self.run_text_encoder(lambda: self.text_encoder.get()(prompt))
        length, channels = self.text_size
        if embeds.dim() != 2 or embeds.shape[1] != channels or len(embeds) > length:
            why = f"of shape {list(embeds.shape)} do not fit the DiT"
            remedy = f"it takes [length <= {length}, {channels}]"
            raise InputError("Text embeddings", None, why, remedy)
        return embeds.to(self.device.torch_device)

    def release(self, network: LazyModule[Any] | Experts) -> None:
        """Frees a network's memory after its stage, according to `offload`.

        False: the network stays. "cpu": all networks with a copy in host memory leave the device;
        others are released. True and "block": the network is released.
        """
        if self.offload_manager.offload == "cpu" and network in (self.text_encoder, self.experts):
            self.offload_manager.free_device_memory()
        elif self.offload_manager.offload:
            network.release()
        if self.offload_manager.offload:
            self.device.empty_cache()
