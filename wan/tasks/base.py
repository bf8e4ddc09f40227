"""Tasks: their inputs, the sizes of their videos, the inputs of denoising, and their clips.

`TASKS` names the room of each kind of task. A room defines `TASK`, a subclass of `Task` with what
differs from text to video. This module and the rooms import torch only in functions that compute,
so that a wrong setting or file is refused before torch is loaded.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import MAX_POSITIONS, Preset
from wan.settings.rules import Values
from wan.settings.video_options import Size, VideoSettings
from wan.tasks.input_digests import hash_input

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

    from wan.checkpoint.lora.folder import VideoLoras
    from wan.media.audio import Audio
    from wan.modules.interfaces import ModelComponents
    from wan.modules.model import WanModel

SampleNoise = Callable[[], "Tensor"]
"""Draws new noise of the latents' shape in each call."""
EncodeVideo = Callable[["Tensor"], "Tensor"]
"""Pixels [3,F,H,W] in [-1, 1] to normalized latents [Z,f,h,w]."""
StepCallback = Callable[[int, "Tensor"], None]
"""Called with the number of steps done and the latents after them."""
ShowPreview = Callable[["Tensor"], None]
"""Receives a frame [3,H,W] in [-1, 1] of the predicted video."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The conditions of a video other than its settings. Tasks add fields for their files.

    Attributes:
        image: The first image.
        last_image: The image with which the video ends.
        prompt_embeds: [length, text_dim], used instead of the prompt.
        negative_prompt_embeds: [length, text_dim], used instead of the negative prompt.
        initial_latents: Latents used instead of noise, float32 [Z,f,h,w].
        callback_on_step_end: Called after each step.
        show_preview: Called on the main rank with each preview.
        callback_on_block_end: Called with index and latents of each denoised block of frames.
        num_clips_done: Clips, or blocks of frames, that an earlier run has generated.
        clip_state: `Clip.state` of the last of these clips, or the latents [Z,f,h,w] of all these
            blocks, on every rank.
        files: Input files whose content determines the video.
        loras: LoRAs of this video only, by network.
        pads_soundtrack: Whether silence follows a soundtrack that is shorter than the video, which
            is cut otherwise.
    """

    image: Image.Image | None = None
    last_image: Image.Image | None = None
    prompt_embeds: Tensor | None = None
    negative_prompt_embeds: Tensor | None = None
    initial_latents: Tensor | None = None
    callback_on_step_end: StepCallback | None = None
    show_preview: ShowPreview | None = None
    callback_on_block_end: Callable[[int, Tensor], None] | None = None
    num_clips_done: int = 0
    clip_state: Tensor | None = None
    files: tuple[Path, ...] = ()
    loras: VideoLoras = field(default_factory=dict)
    pads_soundtrack: ClassVar[bool] = False

    @property
    def source_size(self) -> Size | None:
        """(width, height) from which the size of the video follows; None: from `size` alone."""
        return None if self.image is None else self.image.size

    @property
    def soundtrack(self) -> tuple[Path, float] | None:
        """The audio of the video: a file, and the second at which it starts."""
        return None

    @property
    def components(self) -> tuple[str, ...]:
        """Networks of the checkpoint that only these inputs need."""
        return ()

    def compute_digests(self) -> dict[str, str]:
        """Returns the SHA-256 of each input, by which ranks check that their inputs are equal."""
        names = [entry.name for entry in fields(self) if entry.name != "num_clips_done"]
        digests = {name: hash_input(getattr(self, name)) for name in names}
        return {name: digest for name, digest in digests.items() if digest is not None}


NO_INPUTS = Inputs()


@dataclass(frozen=True)
class DenoiseInputs:
    """The inputs of the denoising loop that are the same in all steps.

    Attributes:
        initial_latents: float32 [Z,f,h,w].
        context: Text embeddings of the prompt, [length, text_dim].
        negative_context: Text embeddings of the negative prompt, [length, text_dim].
        y: Masks and image latents, concatenated to the channels of the latents (i2v: [20,f,h,w]).
        clip_fea: CLIP features of the images, for Wan2.1's image models.
        sample_noise: Samples more noise, for stochastic solvers.
        make_model_timesteps: Converts a timestep t for the model: [1], or one for each token.
        restore_fixed_frames: Overwrites frames that do not change, such as ti2v's first frame.
        num_fixed_frames: Number of first latent frames that do not change.
        model_kwargs: Branch -> further keywords of the network. A function of the network is called
            once, before the first step, and replaced by its result.
    """

    initial_latents: Tensor
    context: Tensor
    negative_context: Tensor
    y: Tensor | None = None
    clip_fea: Tensor | None = None
    sample_noise: SampleNoise | None = None
    make_model_timesteps: Callable[[Tensor], Tensor] = lambda t: t.reshape(1)
    restore_fixed_frames: Callable[[Tensor], Tensor] = lambda latents: latents
    num_fixed_frames: int = 0
    model_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Encoders(Protocol):
    """The parts of the pipeline with which a task encodes its inputs; all ranks call them.

    Attributes:
        torch_device: The device of the denoising loop.
        stage_timer: Measures the seconds of a stage, such as "conditioning".
    """

    stage_timer: Any

    @property
    def torch_device(self) -> torch.device: ...

    def encode_prompt(
        self,
        params: VideoParams,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the embeddings of the prompt and of the negative prompt."""

    def encode_video(self, video_3FHW: Tensor) -> Tensor:
        """Returns the normalized latents [Z,f,h,w] of pixels in [-1, 1]."""

    def encode_image(self, images: Sequence[Tensor]) -> Tensor:
        """Returns the CLIP features [images,T,C] of images [3,H,W] in [-1, 1]."""

    def sample_audio_features(self, audio: Audio, num_frames: int) -> Tensor:
        """Returns the audio features of each of `num_frames` video frames, [1,S,C,F]."""

    def run_on_rank0(self, make: Callable[[], Tensor]) -> Tensor:
        """Returns the tensor that `make` returns on the main rank."""

    def release_vae(self) -> None:
        """Frees the memory of the VAE before denoising, according to `offload_model`."""


@dataclass(frozen=True)
class Clip:
    """A generated clip.

    Attributes:
        latents: [Z,f,h,w], on every rank.
        frames: [3,F,H,W] in [-1, 1], the clip without overlap frames; None except on the main rank.
        state: The tensor from which the next clip continues, on every rank; None: none can follow.
    """

    latents: Tensor
    frames: Tensor | None
    state: Tensor | None = None


class ClipMaker(Protocol):
    """Prepares the clips of one video and finishes them; `wan.pipeline.clips` has the loop.

    Attributes:
        state_needs_frames: Whether the next clip continues from decoded frames, so that a clip
            cannot be decoded while the next one is denoised.
        continues_after_last: Whether a later run may add clips after the last one.
    """

    state_needs_frames: bool
    continues_after_last: bool

    def prepare_clip(self, index: int, state: Tensor | None) -> tuple[VideoParams, DenoiseInputs]:
        """Encodes the inputs of a clip. state: That of the previous clip; None for the first."""

    def select_latents(self, index: int, latents_Zfhw: Tensor) -> Tensor:
        """Returns the latents to decode for a clip."""

    def trim_frames(self, index: int, frames_3FHW: Tensor) -> Tensor:
        """Returns the decoded frames that the clip adds to the video."""

    def make_state(self, latents_Zfhw: Tensor, frames_3FHW: Tensor | None) -> Tensor:
        """Returns the state of a clip on every rank; the frames are only on the main rank."""


class Task:
    """A kind of task; the defaults are those of text to video.

    Attributes:
        kind: Key of `TASKS`.
        network: "module:class" of the DiT.
        loop: "module:class" of the denoising loop.
        runs_in_lockstep: Both guidance branches may run in lockstep; see `wan.modules.lockstep`.
        diffusers_classes: Classes of the pipeline and of the DiT in diffusers; None: it has none.
        joins_clips: Whether the clips are encoded to mp4 files one by one, which are joined.
            Otherwise all frames are encoded to one file.
        upload_names: Field of a service's request -> file of the folder `src_root_path`.
        needed_uploads, scene_uploads: Those of them that are needed: always, with `replace_flag`.
        uploads_without_prompt: Settings with whose files a prompt is optional.
        has_fixed_fps: Whether the frames per second follow from the audio.
        fixed_prompts: Prompts of all videos, which are encoded with those of the video.
    """

    kind = "t2v"
    network: ClassVar[str] = "wan.modules.model:WanModel"
    loop: ClassVar[str] = "wan.pipeline.denoise:DenoisingLoop"
    runs_in_lockstep: ClassVar[bool] = True
    diffusers_classes: ClassVar[tuple[str, str] | None] = ("WanPipeline", "WanTransformer3DModel")
    joins_clips: ClassVar[bool] = False
    upload_names: ClassVar[Mapping[str, str]] = {}
    needed_uploads: ClassVar[tuple[str, ...]] = ()
    scene_uploads: ClassVar[tuple[str, ...]] = ()
    uploads_without_prompt: ClassVar[frozenset[str]] = frozenset()
    has_fixed_fps: ClassVar[bool] = False
    fixed_prompts: ClassVar[tuple[str, ...]] = ()

    # Inputs and settings; no torch.

    def read_inputs(self, preset: Preset, values: Values) -> Inputs:
        """Reads and checks the input files, or images in memory, that settings name.

        Args:
            values: Settings, merged over the checkpoint's; those of other subjects are ignored.

        Raises:
            InputError: An input is damaged.
        """
        return Inputs()

    def complete_settings(
        self, preset: Preset, values: Values, inputs: Inputs, defaults: Values
    ) -> dict[str, Any]:
        """Returns settings that follow from the inputs, such as the number of clips.

        Args:
            values: Settings of the user.
            defaults: Settings of the checkpoint's generation_config.json.
        """
        return {}

    def choose_fps(self, params: VideoParams, inputs: Inputs, defaults: Values) -> float:
        """Returns the default of the video's frames per second."""
        return params.fps

    def list_notices(self, params: VideoParams) -> tuple[str, ...]:
        """Returns lines about a video for the log and the plan."""
        return ()

    def complete_params(self, preset: Preset, chosen: dict[str, Any], values: Values) -> None:
        """Completes the fields of `VideoParams` in place."""

    # Sizes; no torch.

    def compute_video_size(self, params: VideoParams) -> Size:
        """Returns (width, height) of the generated video."""
        return params.size

    def compute_frame_size(self, params: VideoParams) -> Size:
        """Returns (width, height) of the generated frames, from which the video is cropped."""
        return self.compute_video_size(params)

    def count_reference_latents(self, params: VideoParams) -> int:
        """Returns the latent frames of images that precede those of the video."""
        return 0

    def has_clips(self, params: VideoParams) -> bool:
        """Returns whether the video is generated clip by clip."""
        return False

    def count_clip_frames(self, params: VideoParams, clip: int) -> int:
        """Returns the frames that a clip adds to the video; the first or last may add fewer."""
        return params.frame_num

    def count_clips(self, params: VideoParams) -> int:
        """Returns the clips, or blocks of frames, that are stored one by one; else 0."""
        return params.num_clip or 0

    def make_clip_params(self, params: VideoParams, clip: int) -> VideoParams:
        """Returns the parameters of a clip of a long i2v video: its prompt, its seed as in SVI."""
        prompt = params.clip_prompts[clip] if params.clip_prompts else params.prompt
        return replace(params, prompt=prompt, base_seed=(params.base_seed + 42 * clip) % 2**63)

    def make_forward_params(self, params: VideoParams) -> VideoParams:
        """Returns the parameters of the frames that a forward pass computes."""
        return params

    def count_kept_latents(self, params: VideoParams) -> int:
        """Returns the latent frames whose keys and values are kept between forward passes."""
        return params.latent_shape[1] - 1 if params.preset.has_reference_kv else 0

    def count_extra_tokens(self, params: VideoParams, clip: int) -> int:
        """Returns the tokens of a clip that are appended to the video's."""
        return 0

    def count_encoded_latents(self, params: VideoParams) -> int:
        """Returns the latent frames that the VAE encodes at once; 0 if it encodes nothing."""
        return 0

    def count_decoded_latents(self, params: VideoParams) -> int:
        """Returns the latent frames that the VAE decodes at once."""
        return params.latent_shape[1] - self.count_reference_latents(params)

    def starts_with_known_frame(self, params: VideoParams, clip: int) -> bool:
        """Returns whether the first frame of a clip is an input or ends the previous clip."""
        return False

    def estimate_host_bytes(self, params: VideoParams) -> dict[str, int]:
        """Returns bytes of frames that are kept in host memory while a clip is denoised."""
        return {}

    def estimate_denoise_bytes(self, params: VideoParams) -> dict[str, int]:
        """Returns bytes on the device of inputs of denoising other than latents and text."""
        return {}

    # Conditions; torch.

    def make_denoise_inputs(
        self, params: VideoParams, base: DenoiseInputs, inputs: Inputs, encoders: Encoders
    ) -> DenoiseInputs:
        """Returns the inputs of denoising of a video without clips.

        Args:
            base: Noise, and text embeddings.
        """
        return base

    def make_clips(self, params: VideoParams, inputs: Inputs, encoders: Encoders) -> ClipMaker:
        """Starts a video of several clips."""
        raise NotImplementedError

    def make_model_kwargs(
        self, params: VideoParams, config: Mapping[str, Any], make: Callable[..., Tensor]
    ) -> dict[str, Any]:
        """Returns keywords of the network for `--plan`, as `DenoiseInputs.model_kwargs`.

        Args:
            make: make(*shape) returns a tensor without data.
        """
        return {}

    def make_encoder_input(
        self, params: VideoParams, video: Tensor, make: Callable[..., Tensor]
    ) -> Tensor | None:
        """Returns, for `--plan` on a CPU, the caller's tensors while `video` is encoded."""
        return video.clone()


TASKS = {
    "t2v": "text2video",
    "i2v": "image2video",
    "ti2v": "textimage2video",
    "s2v": "speech2video",
    "animate": "animate",
    "animate2": "animate2",
    "vace": "vace",
    "causal": "causal",
}
"""Kind of a task -> its module in `wan.tasks`, which defines `TASK`."""


@cache
def get_task(kind: str) -> Task:
    """Returns the task of a kind."""
    task: Task = import_module(f"wan.tasks.{TASKS[kind]}").TASK
    return task


@dataclass(frozen=True, kw_only=True)
class VideoParams(VideoSettings):
    """The settings of one video with all defaults resolved, and its sizes.

    `make_video_params` builds them from settings and defaults.
    """

    def __post_init__(self) -> None:
        self._check_size()

    @property
    def task(self) -> Task:
        return get_task(self.preset.kind)

    @property
    def all_prompts(self) -> tuple[str, ...]:
        """Prompts to encode: of the clips, with guidance the negative one, and of the task."""
        prompts = self.clip_prompts or (self.prompt,)
        negative = (self.negative_prompt,) if self.uses_negative_prompt else ()
        return (*prompts, *negative, *self.task.fixed_prompts)

    @property
    def has_clips(self) -> bool:
        """Whether the video is generated clip by clip."""
        return self.task.has_clips(self)

    @property
    def num_frames(self) -> int:
        """Frames of the whole video."""
        return sum(map(self.count_clip_frames, range(self.num_clip or 1)))

    def count_clip_frames(self, clip: int) -> int:
        """Returns the frames that a clip adds to the video; the first or last may add fewer."""
        return self.task.count_clip_frames(self, clip)

    def make_clip_params(self, clip: int) -> VideoParams:
        """Returns the parameters of a clip, or of a block of frames."""
        return self.task.make_clip_params(self, clip)

    @property
    def num_blocks(self) -> int:
        """Blocks of a causal video, each of which takes all steps; 1 for other tasks."""
        return self.latent_shape[1] // (self.num_frame_per_block or self.latent_shape[1])

    def count_clip_tokens(self, clip: int) -> int:
        """Returns the number of tokens in self-attention: video tokens and extra tokens."""
        num_video_tokens = math.prod(self.task.make_forward_params(self).grid)
        return num_video_tokens + self.task.count_extra_tokens(self, clip)

    @property
    def starts_from_source(self) -> bool:
        """Whether denoising starts from the noisy latents of a source, with its last steps."""
        return self.strength is not None or bool(self.refine)

    @property
    def step_range(self) -> range:
        """Indices of the computed steps among all `num_forwards`."""
        return make_noise_schedule(self).step_range

    @property
    def num_forwards(self) -> int:
        """Steps of the complete noise schedule: `sample_steps`, or the forward passes in them."""
        return len(make_noise_schedule(self.with_all_steps).experts)

    @property
    def with_all_steps(self) -> VideoParams:
        """The video as if it started from noise, with the complete noise schedule."""
        return replace(self, strength=None, refine=None)

    @property
    def max_clip_tokens(self) -> int:
        """Largest number of tokens in self-attention of any clip; the second one may have more."""
        return self.count_clip_tokens(0 if self.num_clip == 1 else 1)

    @property
    def area(self) -> int:
        """Pixels of a frame that the user has chosen, where the shape follows from an input."""
        return self.max_area or self.size[0] * self.size[1]

    @property
    def video_size(self) -> Size:
        """(width, height) of the generated video."""
        return self.task.compute_video_size(self)

    @property
    def frame_size(self) -> Size:
        """(width, height) of the generated frames, in whole tokens."""
        return self.task.compute_frame_size(self)

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(channels, frames, height, width) of the latents of the video, or of a clip.

        The frames include those of the reference images of Animate (one) and VACE.
        """
        (width, height), (t, h, w) = self.frame_size, self.preset.vae_stride
        frames = (self.frame_num - 1) // t + 1 + self.task.count_reference_latents(self)
        return self.preset.latent_channels, frames, height // h, width // w

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens along frame, height and width."""
        (_, *sides), patch = self.latent_shape, self.preset.patch_size
        frames, height, width = (
            side // patch_side for side, patch_side in zip(sides, patch, strict=True)
        )
        return frames, height, width

    def _check_size(self) -> None:
        """Raises InputError for a size of partial tokens or of more tokens than positions."""
        preset, (width, height) = self.preset, self.frame_size
        multiple, size = preset.size_multiple, f"{width}*{height}"
        if width % multiple or height % multiple:
            sides = (max(multiple, round(n / multiple) * multiple) for n in (width, height))
            suggestion = "*".join(map(str, sides))
            why = f"is not a multiple of {multiple} in width and height, as {preset.task} requires"
            raise InputError("`size`", size, why, f"try {suggestion}")
        for axis, tokens in zip(("frames", "height", "width"), self.grid, strict=True):
            if tokens > MAX_POSITIONS:
                why = (
                    f"with {self.frame_num} frames makes {tokens} tokens along {axis}, and the "
                    f"network has {MAX_POSITIONS} positions"
                )
                raise InputError("`size`", size, why, "choose a smaller video")


def make_video_params(
    preset: Preset, values: Mapping[str, Any], image_size: Size | None = None
) -> VideoParams:
    """Builds the parameters of a video from checked settings and the task's defaults.

    Args:
        values: Flag -> checked value, and `boundary` of a recipe or configuration, which replaces
            the preset's; settings of other subjects are ignored.
        image_size: `Inputs.source_size`.
    """
    names = {entry.name for entry in fields(VideoParams)}
    chosen: dict[str, Any] = {"prompt": preset.prompt, "size": preset.size, "fps": preset.fps}
    chosen |= {"frame_num": preset.frame_num, "infer_frames": preset.infer_frames}
    chosen |= {"sample_steps": preset.sample_steps, "sample_shift": preset.sample_shift}
    chosen |= {"sample_guide_scale": preset.sample_guide_scale, "boundary": preset.boundary}
    chosen |= {name: value for name, value in values.items() if name in names}
    chosen["negative_prompt"] = values.get("negative_prompt") or preset.negative_prompt
    if preset.sample_shift_480p is not None and set(chosen["size"]) == {832, 480}:
        chosen["sample_shift"] = values.get("sample_shift", preset.sample_shift_480p)
    get_task(preset.kind).complete_params(preset, chosen, values)
    if chosen.get("timesteps") is not None:
        chosen["sample_steps"] = len(chosen["timesteps"])
    if chosen.get("base_seed", -1) < 0:
        chosen["base_seed"] = random.SystemRandom().randrange(10**10)  # digits that can be typed
    if preset.boundary is None or chosen["boundary"] is None:
        chosen["boundary"] = preset.boundary
    return VideoParams(**chosen | {"preset": preset, "image_size": image_size})


def check_clip_settings(preset: Preset, values: Values) -> None:
    """Refuses settings about latents that have no effect on a video of clips."""
    for name in ("decode_latents", "save_latents", "fixed_latents"):
        if values.get(name):
            why = f"has no effect on {preset.task}, whose clips are decoded one after the other"
            raise InputError(f"`{name}`", None, why, "drop it")


def make_noise_sampler(
    params: VideoParams, device: torch.device, num_skipped: int = 0
) -> SampleNoise:
    """Returns a function that samples noise, float32 [Z,f,h,w], from the seed of the video.

    The first sample is the initial noise, the others are that of a forward pass's frames. Noise is
    sampled on the CPU by default, so that a seed gives the same noise on every device; the official
    code samples on the device, as `--noise_device device` does.

    num_skipped: Samples that an earlier run has used.
    """
    import torch

    noise_device = torch.device("cpu") if params.noise_device == "cpu" else device
    generator = torch.Generator(noise_device).manual_seed(params.base_seed)
    shape_of_steps = params.task.make_forward_params(params).latent_shape
    shapes = chain([params.latent_shape], repeat(shape_of_steps))

    def sample_noise() -> Tensor:
        shape = next(shapes)
        sample = torch.randn(shape, generator=generator, device=noise_device, dtype=torch.float32)
        return sample.to(device)

    for _ in range(num_skipped):
        sample_noise()
    return sample_noise


def build_dit(config: Mapping[str, Any], components: ModelComponents | None = None) -> WanModel:
    """Builds the DiT of a model type.

    Args:
        config: From `wan.checkpoint.config.read_dit_config`; the arguments of the class.
        components: Attention, kernels, sharding and caches; None: those for one device.
    """
    kind = config["model_type"]
    module, _, class_name = (get_task(kind) if kind in TASKS else Task).network.partition(":")
    model: WanModel = getattr(import_module(module), class_name)(**config, components=components)
    return model
