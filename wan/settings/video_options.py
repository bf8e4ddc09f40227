"""Settings of one video: sampling, size, length, inputs, and the settings of single tasks.

Each field is a flag, see `wan.settings.fields`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wan.settings import values
from wan.settings.fields import (
    REQUIRED,
    HelpText,
    command_option,
    list_options,
    load_option,
    option,
)
from wan.settings.guidance import Guidance
from wan.settings.noise_tables import NOISE_TABLES, OFFICIAL_TABLE
from wan.settings.presets import MAX_POSITIONS, TASKS_OF_KIND, TRAIN_TIMESTEPS, Preset
from wan.settings.solvers import SOLVERS, SOLVERS_OF_ANY_TIMESTEPS
from wan.settings.values import choice, integer, real, switch

Size = tuple[int, int]
"""(width, height) in pixels."""
_ANIMATE = (*TASKS_OF_KIND["animate"], *TASKS_OF_KIND["animate2"])
_VIDEO_TO_VIDEO = (*TASKS_OF_KIND["t2v"], *TASKS_OF_KIND["ti2v"])
MAX_REFERENCE_IMAGES = 16  # of `src_ref_images`; each adds a latent frame


def _list_tasks(*kinds: str) -> tuple[str, ...]:
    return tuple(task for kind in kinds for task in TASKS_OF_KIND[kind])


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. Pairs of numbers are (low-noise expert, high-noise expert)."""

    sample_solver: str = option(
        "unipc",
        choice(*SOLVERS),
        HelpText(
            "; ".join(f"{name}: {row.help}" for name, row in SOLVERS.items()), "default unipc"
        ),
        diffusers="scheduler",
        checkpoint=True,
    )
    sample_steps: int = option(
        REQUIRED,
        integer(1, TRAIN_TIMESTEPS),
        HelpText("number of sampling steps", "default: the task's"),
        keyword="sampling_steps",
        diffusers="num_inference_steps",
        checkpoint=True,
        common=True,
    )
    sample_shift: float = option(
        REQUIRED,
        real(0.001, 1000),
        HelpText(
            "shift of the noise schedule; larger: more steps at high noise", "default: the task's"
        ),
        keyword="shift",
        diffusers="flow_shift",
        checkpoint=True,
    )
    sigmas: str = option(
        OFFICIAL_TABLE,
        choice(OFFICIAL_TABLE, *NOISE_TABLES),
        HelpText(
            "noise table that `sample_shift` shifts; official: equal steps; simple, beta, beta57: "
            "as in ComfyUI, beta and beta57 with more steps at both ends",
            "default official",
        ),
    )
    timesteps: tuple[float, ...] | None = option(
        None,
        values.read_timesteps,
        HelpText(
            "timestep of each step, falling, above 0 to 1000, for "
            f"{values.join_with_or(SOLVERS_OF_ANY_TIMESTEPS)}",
            "default: from `sample_steps` and `sample_shift`",
        ),
        diffusers=True,
    )
    boundary_step: int | None = option(
        None,
        integer(0, TRAIN_TIMESTEPS),
        HelpText("number of steps of the high-noise expert", "default: by timestep"),
        diffusers="boundary_ratio",
    )
    ode: bool = option(
        False, switch, HelpText("add no noise between the steps of rcm", "default false")
    )
    sigma_max: float | None = option(
        None,
        real(0, 1e6, exclude_min=True),
        HelpText("noise-to-data ratio of the first step of rcm", "default: t2v 80, i2v 200"),
    )
    sample_guide_scale: tuple[float, float] = option(
        REQUIRED,
        values.read_guide_scale,
        HelpText(
            "guidance scale: one number, or LOW,HIGH for the two experts; 1: no guidance",
            "default: the task's",
        ),
        keyword="guide_scale",
        diffusers="guidance_scale",
        checkpoint=True,
        common=True,
    )
    base_seed: int = option(
        REQUIRED,
        integer(-(2**63), 2**63 - 1),
        HelpText("seed of the noise; negative: random", "default -1"),
        keyword="seed",
        diffusers="generator",
        common=True,
    )
    noise_device: str = load_option(
        "cpu",
        choice("cpu", "device"),
        "where noise is drawn; cpu (default): a seed gives the same noise on every device",
        variables={"PRECISION": {"0": "device", "1": "cpu"}},
    )


@dataclass(frozen=True, kw_only=True)
class VideoSettings(Sampling, Guidance):
    """The settings of one video, all resolved; `wan.tasks.base.VideoParams` adds its sizes.

    Attributes:
        size: (width, height); with an image only its area has an effect.
        boundary: Timestep / 1000 from which on the high-noise expert computes the step; None for a
            single network.
        image_size: (width, height) of the first image after EXIF rotation, or of VACE's source
            video; None without one.
        infer_frames, num_clip, chain, clip_prompts, num_frame_per_block, local_attn_size,
            sink_size, start_from_ref, refert_num, replace_flag, log_scale: None for tasks that do
            not use them.
        fps: Frames per second of the task's training videos.
        num_source_frames: Frames of Animate's pose video, or of Animate-2's driving video; None:
            the frames of all clips.
        num_reference_images: Number of VACE's reference images, each one latent frame before the
            latents of the video.
        has_source_video: Whether denoising starts from a video, which is encoded.
        has_last_image: Whether the video also ends with an image.
        max_area: Pixels of a frame of a video with an image; None: those of `size`.
    """

    preset: Preset
    prompt: str = option(
        REQUIRED,
        values.read_text_value,
        HelpText("text prompt", "default: an example"),
        keyword="input_prompt",
        diffusers=True,
        checkpoint=True,
        common=True,
    )
    negative_prompt: str = option(
        REQUIRED,
        values.read_text_value,
        HelpText("negative prompt", "default, or '': the official one"),
        keyword="n_prompt",
        diffusers=True,
        checkpoint=True,
        common=True,
    )
    size: Size = option(
        REQUIRED,
        values.read_size,
        HelpText(
            "width and height in pixels; with an image only their area counts",
            "default: the task's",
            {
                "t2v": "width and height in pixels",
                "vace": "width and height in pixels; with a source video only their area counts",
                "animate": "width and height in pixels, which are those of the pose video",
            },
        ),
        diffusers=True,
        checkpoint=True,
        common=True,
    )
    frame_num: int = option(
        REQUIRED,
        values.read_frame_num,
        HelpText(
            "frames of the video or clip",
            "default: the task's",
            dict.fromkeys(("t2v", "ti2v", "vace"), "frames of the video")
            | dict.fromkeys(("animate", "animate2"), "frames of a clip")
            | {"causal": "frames of the video, in whole blocks: 12n-3, of causal-5B 32n-3"},
        ),
        diffusers="num_frames",
        checkpoint=True,
        common=True,
    )
    infer_frames: int | None = option(
        None,
        values.read_clip_frames,
        HelpText("frames of a clip, 4n", "s2v; default 80"),
        checkpoint=True,
        tasks=TASKS_OF_KIND["s2v"],
    )
    num_clip: int | None = option(
        None,
        integer(1, 10_000),
        HelpText(
            "number of clips, for s2v, animate and animate2 the maximum",
            "i2v-A14B: default 1; else as long as the audio or video",
            {"i2v": "number of clips"}
            | dict.fromkeys(("s2v", "animate", "animate2"), "number of clips at most"),
        ),
        keyword="num_repeat",
        tasks=("i2v-A14B", *TASKS_OF_KIND["s2v"], *_ANIMATE),
    )
    chain: str | None = option(
        None,
        choice("latent", "frame"),
        HelpText(
            "start of the next clip: last latent (SVI 2.0 Pro) or last frame of the previous clip",
            "i2v-A14B; default: latent with SVI's LoRA, else frame",
        ),
        checkpoint=True,
        tasks=("i2v-A14B",),
    )
    clip_prompts: tuple[str, ...] | None = option(
        None,
        values.read_text_values,
        HelpText(
            "a prompt for each clip, for causal tasks for equal parts of the blocks",
            "i2v-A14B; default: `prompt` for all clips",
            {"causal": "a prompt for each of equal parts of the blocks"},
        ),
        tasks=("i2v-A14B", *TASKS_OF_KIND["causal"]),
    )
    num_frame_per_block: int | None = option(
        None,
        integer(1, MAX_POSITIONS),
        HelpText("latent frames of a block", "causal; default 3, causal-5B: 8"),
        checkpoint=True,
        tasks=TASKS_OF_KIND["causal"],
    )
    local_attn_size: int | None = option(
        None,
        integer(1, MAX_POSITIONS),
        HelpText(
            "latent frames to which a token attends at most, with its block and `sink_size`",
            "causal; default 21, causal-5B: 32",
        ),
        checkpoint=True,
        tasks=TASKS_OF_KIND["causal"],
    )
    sink_size: int | None = option(
        None,
        integer(0, MAX_POSITIONS),
        HelpText(
            "first latent frames of the video to which all later ones attend",
            "causal; default 0, causal-5B: 8",
        ),
        checkpoint=True,
        tasks=TASKS_OF_KIND["causal"],
    )
    start_from_ref: bool | None = option(
        None,
        switch,
        HelpText(
            "start from the image instead of gray, and keep the first 3 frames",
            "s2v; default false",
        ),
        keyword="init_first_frame",
        tasks=TASKS_OF_KIND["s2v"],
    )
    refert_num: int | None = option(
        None,
        choice(1, 5),
        HelpText("number of frames that consecutive clips share", "animate, animate2; default 1"),
        tasks=_ANIMATE,
    )
    log_scale: float | None = option(
        None,
        real(-100, 100),
        HelpText(
            "added to the attention logits of the video's first latent frame",
            "animate2; default 0; distilled: -1.3",
        ),
        tasks=TASKS_OF_KIND["animate2"],
    )
    replace_flag: bool | None = option(
        None,
        switch,
        HelpText("put the character into the video src_bg", "animate; default false"),
        tasks=TASKS_OF_KIND["animate"],
    )
    conditioning_scale: tuple[float, ...] | None = option(
        None,
        values.read_factors,
        HelpText("strength of the control, one number or one per control block", "vace; default 1"),
        keyword="context_scale",
        tasks=TASKS_OF_KIND["vace"],
    )
    strength: float | None = option(
        None,
        real(0, 1, exclude_min=True),
        HelpText(
            "share of the steps that are computed, from the noisy `src_video` on",
            "t2v, ti2v; default 0.8; with `refine` the steps of the low-noise expert",
        ),
        needs="src_video",
        tasks=_VIDEO_TO_VIDEO,
    )
    refine: bool | None = option(
        None,
        switch,
        HelpText(
            "compute all steps from `src_video` on with the low-noise expert",
            "t2v-A14B; default false",
        ),
        needs="src_video",
        tasks=("t2v-A14B",),
    )
    preview: int = option(
        0,
        values.read_preview,
        HelpText(
            "picture of the predicted video after each step, or after every N steps",
            "default 0: none",
            command_line=", as NAME.preview.jpg until the video is complete",
        ),
        record=False,
        python=None,
        line=True,
    )
    boundary: float | None
    fps: float
    num_reference_images: int = 0
    has_source_video: bool = False
    num_source_frames: int | None = None
    image_size: Size | None = None
    has_last_image: bool = False
    max_area: int | None = None

    @property
    def first_sigma(self) -> float:
        """First noise-to-data ratio of rcm; the defaults are its authors' (TurboDiffusion)."""
        return self.sigma_max or self.preset.rcm_sigma

    @property
    def uses_guidance(self) -> bool:
        """Whether any step also computes the unconditional branch."""
        return any(scale != 1 for scale in self.sample_guide_scale)

    @property
    def uses_negative_prompt(self) -> bool:
        """Whether any step uses the negative prompt."""
        return self.uses_guidance or self.nag_scale is not None


@dataclass(frozen=True)
class ImageOptions:
    """Image inputs. The Python classes also take images in memory under these keywords."""

    image: Path | None = option(
        None,
        values.read_path,
        HelpText(
            note="i2v, s2v, animate2: needed; default none",
            kinds=dict.fromkeys(("i2v", "ti2v", "s2v", "causal"), "image to start from")
            | {"animate2": "image of the character"},
        ),
        keyword="img",
        diffusers=True,
        common=True,
        media="image/*",
        tasks=(*_list_tasks("i2v", "ti2v", "s2v", "animate2"), "causal-5B"),
        needed=dict.fromkeys(_list_tasks("i2v", "s2v", "animate2"), ()),
    )
    last_image: Path | None = option(
        None,
        values.read_path,
        HelpText("image to end with", "flf2v: needed, i2v-A14B: optional; default none"),
        diffusers=True,
        media="image/*",
        tasks=("i2v-A14B", "flf2v-14B"),
        needed={"flf2v-14B": ()},
    )


@dataclass(frozen=True)
class SpeechOptions:
    """Audio and pose inputs of s2v-14B."""

    audio: Path | None = option(
        None,
        values.read_path,
        HelpText("audio file, or video file with an audio track", "s2v: needed; default none"),
        keyword="audio_path",
        media="audio/*,video/*",
        tasks=TASKS_OF_KIND["s2v"],
        needed=dict.fromkeys(TASKS_OF_KIND["s2v"], ()),
    )
    pose_video: Path | None = option(
        None,
        values.read_path,
        HelpText("video whose poses the character follows", "s2v; default none"),
        media="video/*",
        tasks=TASKS_OF_KIND["s2v"],
    )
    audio_sync: bool = command_option(
        False,
        switch,
        HelpText(
            "cut the first 3/16 s of the audio, by which officially the video runs ahead of it",
            "s2v; default false",
        ),
        line=True,
        tasks=TASKS_OF_KIND["s2v"],
    )


@dataclass(frozen=True)
class AnimateOptions:
    """Preprocessed inputs of animate-14B."""

    src_root_path: Path | None = option(
        None,
        values.read_path,
        HelpText(
            "folder with src_pose.mp4, src_face.mp4 and src_ref.png",
            "animate: needed; default none",
        ),
        tasks=TASKS_OF_KIND["animate"],
        needed=dict.fromkeys(TASKS_OF_KIND["animate"], ()),
    )


@dataclass(frozen=True)
class VaceOptions:
    """The source or driving video, and further control inputs of VACE."""

    src_video: Path | None = option(
        None,
        values.read_path,
        HelpText(
            note="animate2: needed; vace: this or `src_ref_images` is needed; default none",
            kinds=dict.fromkeys(("t2v", "ti2v"), "video to edit, or latents of `save_latents`")
            | {"vace": "video to edit, or control video", "animate2": "driving video"},
        ),
        media="video/*",
        tasks=(*_VIDEO_TO_VIDEO, *TASKS_OF_KIND["vace"], *TASKS_OF_KIND["animate2"]),
        needed=dict.fromkeys(TASKS_OF_KIND["vace"], ("src_ref_images",))
        | dict.fromkeys(TASKS_OF_KIND["animate2"], ()),
    )
    src_mask: Path | None = option(
        None,
        values.read_path,
        HelpText(
            "mask video, or one image for all frames: white is generated, black is kept",
            "vace; default: all white",
        ),
        needs="src_video",
        media="video/*,image/*",
        tasks=TASKS_OF_KIND["vace"],
    )
    src_ref_images: tuple[str, ...] = option(
        (),
        values.read_image_files,
        HelpText(
            "reference images",
            "vace: this or `src_video` is needed; default none",
            command_line=", separated by commas or the flag repeated",
        ),
        media="image/*",
        tasks=TASKS_OF_KIND["vace"],
        needed=dict.fromkeys(TASKS_OF_KIND["vace"], ("src_video",)),
    )


INPUT_OPTIONS: tuple[type, ...] = (ImageOptions, SpeechOptions, AnimateOptions, VaceOptions)
"""The dataclasses of the options for input files."""


def list_needed_inputs(task: str) -> list[tuple[str, ...]]:
    """Returns groups of input settings; a video of the task needs one of each group."""
    options = {name: flag for group in INPUT_OPTIONS for name, flag in list_options(group).items()}
    groups = [(name, *flag.needed[task]) for name, flag in options.items() if task in flag.needed]
    return [group for index, group in enumerate(groups) if group[::-1] not in groups[:index]]
