"""Parameters of one video with all defaults resolved, and its sizes in pixels, latents and tokens.

Contains the official rules that derive a video's size from an image. Pure Python.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from wan.settings import rules
from wan.settings import values as readers
from wan.settings.errors import InputError
from wan.settings.fields import REQUIRED, load_option, option
from wan.settings.presets import MAX_POSITIONS, TRAIN_TIMESTEPS, Preset
from wan.settings.solvers import SOLVERS
from wan.settings.sound import NUM_DROPPED_FRAMES
from wan.settings.values import choice, integer, real, switch

Size = tuple[int, int]
"""(width, height) in pixels."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. Pairs of numbers are (low-noise expert, high-noise expert)."""

    sample_solver: str = option(
        "unipc",
        choice(*SOLVERS),
        "; ".join(f"{name}: {row.help}" for name, row in SOLVERS.items()),
        diffusers="scheduler",
        checkpoint=True,
    )
    sample_steps: int = option(
        REQUIRED,
        integer(1, TRAIN_TIMESTEPS),
        "number of sampling steps (default: the task's)",
        keyword="sampling_steps",
        diffusers="num_inference_steps",
        checkpoint=True,
        common=True,
    )
    sample_shift: float = option(
        REQUIRED,
        real(0.001, 1000),
        "shift of the noise schedule; larger: more steps at high noise (default: the task's)",
        keyword="shift",
        diffusers="flow_shift",
        checkpoint=True,
    )
    timesteps: tuple[float, ...] | None = option(
        None,
        readers.read_timesteps,
        "timestep of each step, falling, above 0 to 1000, for euler, dmd and rcm (default: from "
        "--sample_steps and --sample_shift)",
        diffusers=True,
    )
    boundary_step: int | None = option(
        None,
        integer(0, TRAIN_TIMESTEPS),
        "number of steps of the high-noise expert (default: by timestep)",
        diffusers="boundary_ratio",
    )
    ode: bool = option(False, switch, "add no noise between the steps of rcm (default false)")
    sigma_max: float | None = option(
        None,
        real(0, 1e6, exclude_min=True),
        "noise-to-data ratio of the first step of rcm (default: t2v 80, i2v 200)",
    )
    sample_guide_scale: tuple[float, float] = option(
        REQUIRED,
        readers.read_guide_scale,
        "guidance scale: one number, or LOW,HIGH for the two experts; 1: no guidance (default: the "
        "task's)",
        keyword="guide_scale",
        diffusers="guidance_scale",
        checkpoint=True,
        common=True,
    )
    base_seed: int = option(
        REQUIRED,
        integer(-(2**63), 2**63 - 1),
        "seed of the noise; negative: random (default -1)",
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
class VideoParams(Sampling):
    """Parameters of one video; `make_video_params` builds them from settings and defaults.

    Attributes:
        size: (width, height); with an image only its area has an effect.
        boundary: Timestep / 1000 from which on the high-noise expert computes the step; None for a
            single network.
        image_size: (width, height) of the first image after EXIF rotation, or of VACE's source
            video; None without one.
        infer_frames, num_clip, chain, clip_prompts, start_from_ref, refert_num, replace_flag: None
            for tasks that do not use them.
        fps: Frames per second of the task's training videos.
        num_source_frames: Frames of Animate's pose video; None: the frames of all clips.
        num_reference_images: Number of VACE's reference images, each one latent frame before the
            latents of the video.
        has_last_image: Whether the video also ends with an image.
        max_area: Pixels of a frame of a video with an image; None: those of `size`.
    """

    preset: Preset
    prompt: str = option(
        REQUIRED,
        readers.read_text_value,
        "text prompt (default: an example)",
        keyword="input_prompt",
        diffusers=True,
        checkpoint=True,
        common=True,
    )
    negative_prompt: str = option(
        REQUIRED,
        readers.read_text_value,
        "negative prompt (default, or '': the official one)",
        keyword="n_prompt",
        diffusers=True,
        checkpoint=True,
        common=True,
    )
    size: Size = option(
        REQUIRED,
        readers.read_size,
        "width and height in pixels; with an image only their area counts (default: the task's)",
        diffusers=True,
        checkpoint=True,
        common=True,
    )
    frame_num: int = option(
        REQUIRED,
        readers.read_frame_num,
        "frames of the video or clip (default: the task's)",
        diffusers="num_frames",
        checkpoint=True,
        common=True,
    )
    infer_frames: int | None = option(
        None, readers.read_clip_frames, "frames of a clip, 4n (s2v; default 80)", checkpoint=True
    )
    num_clip: int | None = option(
        None,
        integer(1, 10_000),
        "number of clips (i2v-A14B; default 1); for s2v and animate the maximum (default: as long "
        "as the audio or pose video)",
        keyword="num_repeat",
        alias="clips",
    )
    chain: str | None = option(
        None,
        choice("latent", "frame"),
        "start of the next clip: last latent (SVI 2.0 Pro) or last frame of the previous clip "
        "(i2v-A14B; default: latent with SVI's LoRA, else frame)",
        checkpoint=True,
    )
    clip_prompts: tuple[str, ...] | None = option(
        None,
        readers.read_text_values,
        "a prompt for each clip (i2v-A14B; default: --prompt for all clips)",
    )
    start_from_ref: bool | None = option(
        None,
        switch,
        "start from the image instead of gray, and keep the first 3 frames (s2v; default false)",
        keyword="init_first_frame",
    )
    refert_num: int | None = option(
        None, choice(1, 5), "number of frames that consecutive clips share (animate; default 1)"
    )
    replace_flag: bool | None = option(
        None, switch, "put the character into src_bg.mp4 (animate; default false)"
    )
    conditioning_scale: tuple[float, ...] | None = option(
        None,
        readers.read_factors,
        "strength of the control, one number or one per control block (vace; default 1)",
        keyword="context_scale",
    )
    boundary: float | None
    fps: float
    num_reference_images: int = 0
    num_source_frames: int | None = None
    image_size: Size | None = None
    has_last_image: bool = False
    max_area: int | None = None

    def __post_init__(self) -> None:
        preset, (low, high) = self.preset, self.sample_guide_scale
        if self.boundary is None and low != high:
            why = f"has two numbers, but {preset.task} has one network"
            raise InputError("`sample_guide_scale`", f"{low:g},{high:g}", why, "give one number")
        self._check_size()
        values = {"task": preset.task, "solver": SOLVERS[self.sample_solver], **vars(self)}
        rules.check_rules(
            (*rules.SAMPLING_RULES, *rules.IMAGE_RULES, *rules.CLIP_AND_TASK_RULES), values
        )

    @property
    def first_sigma(self) -> float:
        """First noise-to-data ratio of rcm; the defaults are its authors' (TurboDiffusion)."""
        return self.sigma_max or (200.0 if self.preset.kind == "i2v" else 80.0)

    @property
    def all_prompts(self) -> tuple[str, ...]:
        """Prompts to encode: those of the clips and, with guidance, the negative prompt."""
        prompts = self.clip_prompts or (self.prompt,)
        return (*prompts, self.negative_prompt) if self.uses_guidance else prompts

    @property
    def uses_guidance(self) -> bool:
        """Whether any step also computes the unconditional branch."""
        return any(scale != 1 for scale in self.sample_guide_scale)

    @property
    def has_clips(self) -> bool:
        """Whether the video is generated clip by clip."""
        return self.preset.kind in ("s2v", "animate") or self.chain is not None

    @property
    def num_overlap_frames(self) -> int:
        """Frames at the start of a later clip that repeat the previous clip (`chain`).

        For "latent" these are the image and the four frames of the last latent.
        """
        return {None: 0, "frame": 1, "latent": 5}[self.chain]

    def make_clip_params(self, clip: int) -> VideoParams:
        """Returns the parameters of one clip of `chain`: its prompt, and its seed as in SVI."""
        prompt = self.clip_prompts[clip] if self.clip_prompts else self.prompt
        return replace(self, prompt=prompt, base_seed=(self.base_seed + 42 * clip) % 2**63)

    def count_clip_frames(self, clip: int) -> int:
        """Returns the number of video frames that a clip adds; the first or last may add fewer."""
        if self.chain is not None:
            return self.frame_num - (self.num_overlap_frames if clip else 0)
        if self.infer_frames is None:
            return self._count_frames_up_to(clip + 1) - self._count_frames_up_to(clip)
        dropped = 0 if clip or self.start_from_ref else NUM_DROPPED_FRAMES
        return self.infer_frames - dropped

    def _count_frames_up_to(self, clip: int) -> int:
        """Returns the number of video frames in the first `clip` clips of Animate."""
        num_overlap_frames = self.refert_num or 0
        count = num_overlap_frames + clip * (self.frame_num - num_overlap_frames) if clip else 0
        return count if self.num_source_frames is None else min(count, self.num_source_frames)

    def count_clip_tokens(self, clip: int) -> int:
        """Returns the number of tokens in self-attention: video tokens and extra tokens."""
        num_extra_tokens = 0
        if self.preset.kind == "s2v":
            _, _, height, width = self.latent_shape
            _, rows, columns = self.grid
            num_extra_tokens = rows * columns
            if clip or self.start_from_ref:
                num_extra_tokens += (height // 4) * (width // 4) + 4 * (height // 8) * (width // 8)
                num_extra_tokens += rows * columns
        return math.prod(self.grid) + num_extra_tokens

    @property
    def max_clip_tokens(self) -> int:
        """Largest number of tokens in self-attention of any clip."""
        return self.count_clip_tokens(0 if self.num_clip == 1 else 1)

    @property
    def video_size(self) -> Size:
        """(width, height) of the generated video."""
        area = self.max_area or self.size[0] * self.size[1]
        if self.preset.kind == "s2v":
            return compute_s2v_size(self.image_size or self.size, area)
        if self.image_size is None:
            return self.size
        if self.preset.kind == "vace":
            return compute_vace_size(self.preset, self.image_size, area)
        compute_size = compute_i2v_size if self.preset.kind == "i2v" else compute_ti2v_size
        return compute_size(self.preset, self.image_size, area)

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(channels, frames, height, width) of the latents of the video, or of a clip.

        The frames include those of the reference images of Animate (one) and VACE.
        """
        (width, height), (t, h, w) = self.video_size, self.preset.vae_stride
        num_images = 1 if self.preset.kind == "animate" else self.num_reference_images
        frames = (self.frame_num - 1) // t + 1 + num_images
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
        preset, (width, height) = self.preset, self.video_size
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
    preset: Preset,
    values: Mapping[str, Any],
    image_size: Size | None = None,
) -> VideoParams:
    """Builds the parameters of a video from checked settings and the task's defaults.

    Args:
        preset: Task.
        values: Flag -> checked value, and `boundary` of a recipe or configuration, which replaces
            the preset's; settings of other subjects are ignored.
        image_size: As in `VideoParams`.
    """
    names = {field.name for field in fields(VideoParams)}
    chosen: dict[str, Any] = {
        name: getattr(preset, name) for name in names if hasattr(preset, name)
    }
    chosen |= {name: value for name, value in values.items() if name in names}
    chosen["negative_prompt"] = values.get("negative_prompt") or preset.negative_prompt
    if preset.sample_shift_480p is not None and set(chosen["size"]) == {832, 480}:
        chosen["sample_shift"] = values.get("sample_shift", preset.sample_shift_480p)
    chosen["has_last_image"] = values.get("last_image") is not None
    if preset.infer_frames is not None:  # the latent frames of a clip are a quarter of its frames
        chosen["frame_num"] = chosen["infer_frames"] - NUM_DROPPED_FRAMES
        chosen["start_from_ref"] = bool(chosen.get("start_from_ref"))
    if preset.kind == "animate":
        chosen["refert_num"] = chosen.get("refert_num") or 1
        chosen["replace_flag"] = bool(chosen.get("replace_flag"))
        chosen["num_source_frames"] = values.get("num_source_frames")
    if chosen.get("clip_prompts"):
        chosen["prompt"], count = chosen["clip_prompts"][0], len(chosen["clip_prompts"])
        chosen["num_clip"] = chosen.get("num_clip") or count
    if preset.kind == "i2v" and preset.boundary is not None:
        clip_transition = chosen.get("chain") or ("frame" if chosen.get("num_clip") else None)
        chosen["chain"] = clip_transition
        chosen["num_clip"] = clip_transition and (chosen.get("num_clip") or 1)
    if chosen.get("timesteps") is not None:
        chosen["sample_steps"] = len(chosen["timesteps"])
    if chosen.get("base_seed", -1) < 0:
        chosen["base_seed"] = random.SystemRandom().randrange(10**10)  # digits that can be typed
    if preset.boundary is None or chosen["boundary"] is None:
        chosen["boundary"] = preset.boundary
    return VideoParams(**chosen | {"preset": preset, "image_size": image_size})


def compute_i2v_size(preset: Preset, image: Size, area: int) -> Size:
    """Computes the size of an i2v video: the image's aspect ratio at about `area` pixels.

    As in the official code, sides are floored to whole latents, then to whole tokens.
    """
    ratio = image[1] / image[0]
    stride, patch = preset.vae_stride[1], preset.patch_size[1]
    sides = (math.sqrt(area / ratio), math.sqrt(area * ratio))
    width, height = (int(side // stride // patch * patch) * stride for side in sides)
    return _check_nonzero_size(image, (width, height))


def compute_vace_size(preset: Preset, video: Size, area: int) -> Size:
    """Computes the size of a VACE video: the source video's, in whole tokens, within `area`."""
    if video[0] * video[1] > area:
        return compute_ti2v_size(preset, video, area)
    multiple = preset.size_multiple
    return _check_nonzero_size(
        video, (video[0] // multiple * multiple, video[1] // multiple * multiple)
    )


def compute_s2v_size(image: Size, area: int) -> Size:
    """Computes the size of an s2v video: the image scaled down to `area`, in multiples of 64.

    As in the official code, 100 scales are tried, from 1 (or the largest that could fit) down; the
    first whose sides, rounded up, fit into `area` is taken. If none fits, the sides of a frame with
    this area are rounded down.
    """
    width, height = image
    pixels, border, more = width * height, 63 * (width + height), 63 * 63 - area
    first_scale, last_scale = 1.0, 0.1
    if pixels > area:
        first_scale = math.sqrt(area / pixels)
        root = border * border - 2 * pixels * more
        last_scale = (-border + math.sqrt(root)) / (2 * pixels) if root > 0 else first_scale
    for step in range(100):
        scale = first_scale + (last_scale - first_scale) * step / 99
        candidate = tuple(-(-int(side * scale) // 64) * 64 for side in image)
        if candidate[0] * candidate[1] <= area:
            return _check_nonzero_size(image, (candidate[0], candidate[1]))
    ratio = height / width
    rows, columns = math.sqrt(area * ratio), math.sqrt(area / ratio)
    across, down = (
        int(min(side, image_side) // 64 * 64)
        for side, image_side in ((columns, width), (rows, height))
    )
    return _check_nonzero_size(image, (across, down))


def compute_ti2v_size(preset: Preset, image: Size, area: int) -> Size:
    """Computes the size of a ti2v video, which the image is scaled to cover and cropped to.

    As in the official code, there are two candidates of whole tokens within `area`, one with the
    height rounded first and one with the width; the one closer to the image's aspect ratio is
    taken, on a tie the first.
    """
    multiple, ratio = preset.size_multiple, image[0] / image[1]
    ideal_width = math.sqrt(area * ratio)
    ideal_height = area / ideal_width

    def round_down(side: float) -> int:
        return int(side // multiple * multiple)

    width, height = round_down(ideal_width), round_down(ideal_height)
    candidates = [(round_down(area / height), height) if height else (0, 0)]
    candidates.append((width, round_down(area / width)) if width else (0, 0))

    def measure_distortion(candidate: Size) -> float:
        if not all(candidate):
            return math.inf
        candidate_ratio = candidate[0] / candidate[1]
        return max(ratio / candidate_ratio, candidate_ratio / ratio)

    return _check_nonzero_size(image, min(candidates, key=measure_distortion))


def _check_nonzero_size(image: Size, size: Size) -> Size:
    if not all(size):
        raise InputError(
            f"The image is {image[0]}x{image[1]}, and at the chosen `size` one side of the video "
            "would vanish",
            remedy="crop the image, or choose a larger `size`",
        )
    return size
