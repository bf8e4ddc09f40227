"""The official Python classes.

    from wan import WanT2V
    video = WanT2V("t2v-A14B", "./Wan2.2-T2V-A14B").generate("a cat", size=(832, 480))
    wan.save_video(video, "cat.mp4", fps=16)

The constructor takes settings for loading and running the networks, `generate` those of one video.
Both take the official keywords and those of the command line (`wan.settings.fields.Option.python`).
Differences from the official classes: networks are loaded when first needed. With
`offload_model=True`, the official default, every network is released after its stage and read again
by the next call. False keeps the networks that fit, "cpu" keeps them in host memory, and "block"
runs networks that do not fit (docs/memory.md). `generate_many` generates many videos.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from wan.generator import DefaultFloat, DefaultInt, DefaultStr, Generator
from wan.output_files import VIDEO_KIND, check_output
from wan.settings.command import Output
from wan.settings.errors import InputError
from wan.settings.execution import Offload
from wan.settings.presets import EXAMPLE_PROMPTS
from wan.settings.values import read_path, real

GuideScale = float | tuple[float, float]
_GUIDANCE = DefaultFloat(5.0)
_UNGUIDED = DefaultFloat(1.0)


def save_video(video: Tensor, path: str | Path, fps: float = 16.0) -> None:
    """Writes a video that `generate` has returned to an mp4 file.

    Args:
        video: Float [3,F,H,W] in [-1, 1], with even H and W.
        path: Ends in .mp4. Only a video of this package is replaced.
        fps: Frames per second, 1 to 240: 16 for the A14B networks, 24 for ti2v-5B.

    Raises:
        InputError: A ValueError: an argument is invalid.
        WriteError: An OSError: the file could not be written; no part of it is left.
    """
    from wan.pipeline.video import write_video

    if not isinstance(video, Tensor) or video.dim() != 4 or len(video) != 3 or not video.numel():
        shape = list(video.shape) if isinstance(video, Tensor) else type(video).__name__
        remedy = "give what `generate` returned on rank 0"
        raise InputError("The video", shape, "is no tensor of shape [3, F, H, W]", remedy)
    if video.shape[2] % 2 or video.shape[3] % 2:
        size = f"{video.shape[3]}*{video.shape[2]}"
        raise InputError("The video", size, "has an odd side", "crop it to even ones")
    file = read_path("path", str(path))
    if file.suffix.lower() != ".mp4":
        raise InputError("path", file, "must end in .mp4, the only format written")
    check_output(file, VIDEO_KIND, "path")
    write_video(video.detach().float().cpu(), Output(file, fps=real(1, 240)("fps", fps)))


class WanT2V(Generator):
    """Text to video: t2v-A14B (two experts), or the dense Wan 2.1 networks."""

    kind = "t2v"

    def generate(
        self,
        input_prompt: str,
        size: tuple[int, int] = (1280, 720),
        frame_num: int = 81,
        shift: float = DefaultFloat(5.0),
        sample_solver: str = DefaultStr("unipc"),
        sampling_steps: int = DefaultInt(50),
        guide_scale: GuideScale = _GUIDANCE,
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        **settings: Any,
    ) -> Tensor | None:
        """Generates one video.

        Args:
            input_prompt: Description of the video.
            size: (width, height) in pixels.
            frame_num: 4n+1.
            shift: Shift of the noise schedule.
            sample_solver: "unipc" or "dpm++".
            sampling_steps: Number of solver steps.
            guide_scale: One number or (low noise, high noise).
            n_prompt: Negative prompt; "": the default of the config.
            seed: Seed of the noise; negative or None: random.
            offload_model: True releases each network after its stage; False, "cpu", "block": as
                --offload_model.
            prompt_embeds: Prompt embeddings [length, text_dim], used instead of the prompt.
            negative_prompt_embeds: Embeddings [length, text_dim] of the negative prompt.
            output_type: "pt": the video; "latent": its latents.
            **settings: Other command-line flags of a video, by their names (docs/cli.md).

        Returns:
            The video, float32 [3,F,H,W] in [-1, 1], or the latents [Z,f,h,w]. With several ranks
            only rank 0 returns the video, the others None.

        Raises:
            InputError: A ValueError: a value is invalid.
        """
        return self._generate_video(locals())


class WanI2V(Generator):
    """Image to video: i2v-A14B, Wan2.1's i2v-14B and flf2v-14B, depending on the checkpoint."""

    kind = "i2v"

    def generate(
        self,
        input_prompt: str,
        img: Any,
        max_area: int = 720 * 1280,
        frame_num: int = 81,
        shift: float = DefaultFloat(5.0),
        sample_solver: str = DefaultStr("unipc"),
        sampling_steps: int = DefaultInt(40),
        guide_scale: GuideScale = _GUIDANCE,
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        last_image: Any = None,
        num_repeat: int | None = None,
        motion_latent: Tensor | None = None,
        output_type: str = "pt",
        **settings: Any,
    ) -> Tensor | None:
        """Generates one video that starts from an image; see `WanT2V.generate`.

        Args:
            input_prompt: Description of the motion.
            img: First frame: a PIL image, a path, a uint8 array [H,W,3] or a tensor.
            max_area: Pixels of a frame; the image's aspect ratio is kept.
            last_image: Last frame (i2v-A14B, flf2v-14B); like `img`.
            num_repeat: Number of clips of a long video (i2v-A14B; docs/long_videos.md); with
                output_type "latent" their latents are concatenated.
            motion_latent: Last latent [Z,1,h,w] of the clip that this video continues
                (`chain="latent"`); the frames that both share are not repeated.
        """
        return self._generate_video(locals())


class WanS2V(Generator):
    """Audio, a reference image and text to video: s2v-14B."""

    kind = "s2v"

    def generate(
        self,
        input_prompt: str,
        ref_image_path: Any,
        audio_path: str,
        enable_tts: bool = False,
        tts_prompt_audio: str | None = None,
        tts_prompt_text: str | None = None,
        tts_text: str | None = None,
        num_repeat: int | None = 1,
        pose_video: str | None = None,
        max_area: int = 720 * 1280,
        infer_frames: int = 80,
        shift: float = DefaultFloat(5.0),
        sample_solver: str = DefaultStr("unipc"),
        sampling_steps: int = DefaultInt(40),
        guide_scale: GuideScale = _GUIDANCE,
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        init_first_frame: bool = False,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        **settings: Any,
    ) -> Tensor | None:
        """Generates one video, in clips, that is driven by audio; see `WanT2V.generate`.

        Args:
            input_prompt: Description of the video.
            ref_image_path: Reference image; like `img` of `WanI2V.generate`.
            audio_path: An audio file, or a video with audio. The returned video has no audio.
            enable_tts, tts_prompt_audio, tts_prompt_text, tts_text: Refused, as there is no speech
                synthesis here.
            num_repeat: Maximum number of clips; None: as many as the audio needs.
            pose_video: A video with the poses to follow.
            max_area: Pixels of a frame; the image's aspect ratio is approximately kept.
            infer_frames: Frames of a clip, 4n.
            init_first_frame: Start the video with the reference image.
            output_type: "latent": the latents of all clips, concatenated.
        """
        return self._generate_video(self._rename_arguments(locals()))

    def _rename_arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        for name in ("enable_tts", "tts_prompt_audio", "tts_prompt_text", "tts_text"):
            if call.pop(name):
                why = "is not available: there is no speech synthesis here"
                raise InputError(name, None, why, "give a recording as audio_path")
        return {**call, "img": call.pop("ref_image_path")}


class WanAnimate(Generator):
    """Moves a character as in a video, or puts it into the video: animate-14B."""

    kind = "animate"

    def generate(
        self,
        src_root_path: str,
        replace_flag: bool = False,
        clip_len: int = 77,
        refert_num: int = 1,
        shift: float = DefaultFloat(5.0),
        sample_solver: str = DefaultStr("dpm++"),
        sampling_steps: int = DefaultInt(20),
        guide_scale: GuideScale = _UNGUIDED,
        input_prompt: str = "",
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        **settings: Any,
    ) -> Tensor | None:
        """Generates one video, in clips; see `WanT2V.generate`.

        Args:
            src_root_path: Output folder of the official preprocessing, with src_pose.mp4,
                src_face.mp4 and src_ref.png; for replacement also src_bg.mp4 and src_mask.mp4.
            replace_flag: Replace the person in src_bg.mp4 with the character.
            clip_len: Frames of a clip, 4n+1.
            refert_num: Overlap frames of consecutive clips, 1 or 5.
            input_prompt: Description of the video; "": the official default.
            output_type: "latent": the latents of all clips, concatenated; those of each clip start
                with the reference image's.
        """
        return self._generate_video(self._rename_arguments(locals()))

    def _rename_arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        prompt = call["input_prompt"] or EXAMPLE_PROMPTS[self.kind]
        return {**call, "input_prompt": prompt, "frame_num": call.pop("clip_len"), "img": None}


class WanVace(Generator):
    """Video, mask, reference images and text to video: vace-1.3B, vace-14B and vace-A14B."""

    kind = "vace"

    def generate(
        self,
        input_prompt: str,
        src_video: str | None = None,
        src_mask: str | None = None,
        src_ref_images: Any = None,
        size: tuple[int, int] = (1280, 720),
        frame_num: int = DefaultInt(81),
        context_scale: Any = 1.0,
        shift: float = DefaultFloat(5.0),
        sample_solver: str = DefaultStr("unipc"),
        sampling_steps: int = DefaultInt(50),
        guide_scale: GuideScale = _GUIDANCE,
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        **settings: Any,
    ) -> Tensor | None:
        """Generates one video; see `WanT2V.generate`.

        Args:
            input_prompt: Description of the video.
            src_video: A video to edit, or a control video (depth, pose, ...).
            src_mask: A mask video of the same size and length, white where pixels are generated.
            src_ref_images: A reference image or a list; each like `img` of `WanI2V.generate`.
            size: (width, height) in pixels; with `src_video` only its area is used.
            frame_num: 4n+1; by default at most the number of frames of `src_video`.
            context_scale: Strength of the control, one number or one per control block.
        """
        return self._generate_video(locals())


class WanTI2V(Generator):
    """Text, and optionally a first image, to video: ti2v-5B."""

    kind = "ti2v"

    def generate(
        self,
        input_prompt: str,
        img: Any = None,
        size: tuple[int, int] = (1280, 704),
        max_area: int = 704 * 1280,
        frame_num: int = 81,
        shift: float = DefaultFloat(5.0),
        sample_solver: str = DefaultStr("unipc"),
        sampling_steps: int = DefaultInt(50),
        guide_scale: GuideScale = _GUIDANCE,
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        **settings: Any,
    ) -> Tensor | None:
        """Generates one video of `size`, or with `img`'s aspect ratio; see `WanI2V.generate`."""
        return self._generate_video(locals())
