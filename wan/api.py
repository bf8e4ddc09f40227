"""The official Python classes.

    from wan import WanT2V
    video = WanT2V("t2v-A14B", "./Wan2.2-T2V-A14B").generate("a cat", size=(832, 480))

The constructor takes what decides how networks are loaded and run, `generate` what one video is;
besides the official keywords both take the command line's (`wan.settings.fields.Option.python`).
What differs from the official classes: networks are loaded when first needed; with
`offload_model=True`, the official default, every network is released after its stage and read again
by the next call: give False to keep what fits, "cpu" to keep it in host memory, "block" to run what
does not fit (docs/memory.md). `generate_many` makes many videos.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.generator import DefaultFloat, DefaultInt, DefaultStr, Generator
from wan.settings.errors import InputError
from wan.settings.execution import Offload
from wan.settings.presets import EXAMPLE_PROMPTS

GuideScale = float | tuple[float, float]
_GUIDANCE = DefaultFloat(5.0)
_UNGUIDED = DefaultFloat(1.0)


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
        """Makes one video.

        Args:
            input_prompt: What to show.
            size: (width, height) in pixels.
            frame_num: 4n+1.
            shift: Of the noise schedule.
            sample_solver: "unipc" or "dpm++".
            sampling_steps: Solver steps.
            guide_scale: One number or (low noise, high noise).
            n_prompt: Negative prompt; "": the config's.
            seed: Negative or None: a random one.
            offload_model: True releases each network after its stage; False, "cpu", "block": as
                --offload_model.
            prompt_embeds: [length, text_dim], used instead of the prompt.
            negative_prompt_embeds: Likewise.
            output_type: "pt": the video; "latent": what the VAE would decode.
            **settings: Flags of a video without a keyword here, by their names (docs/cli.md).

        Returns:
            The video, float32 [3,F,H,W] in [-1, 1], or the latents [Z,f,h,w]. Of several ranks
            only the first one gets the video, the others None.

        Raises:
            InputError: A ValueError, for values that do not fit.
        """
        return self._generate(locals())


class WanI2V(Generator):
    """Image to video: i2v-A14B, and of Wan2.1 i2v-14B and flf2v-14B; the folder decides."""

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
        """Makes one video that begins with an image; see `WanT2V.generate`.

        Args:
            input_prompt: What is to happen.
            img: A PIL image, a path, a uint8 array [H,W,3] or a tensor; see
                `wan.pipeline.images.from_value`.
            max_area: Pixels of a frame; the image's aspect ratio is kept.
            last_image: What the video ends with (i2v-A14B, flf2v-14B); like `img`.
            num_repeat: Clips of a long video (i2v-A14B; docs/long_videos.md); with output_type
                "latent" their latents come one after the other.
            motion_latent: The last latent [Z,1,h,w] of a clip that this video continues, which then
                lacks the frames that the clip has already (`chain="latent"`).
        """
        return self._generate(locals())


class WanS2V(Generator):
    """Sound, a picture and text to video: s2v-14B."""

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
        """Makes one video of clips that follow a sound; see `WanT2V.generate`.

        Args:
            input_prompt: What is to happen.
            ref_image_path: The picture; like `img` of `WanI2V.generate`.
            audio_path: A sound, or a video with one; it is not put into what is returned.
            enable_tts, tts_prompt_audio, tts_prompt_text, tts_text: Refused: speech is not made
                here.
            num_repeat: Most clips; None: as many as the sound needs.
            pose_video: A video whose poses are taken over.
            max_area: Pixels of a frame; the picture's aspect ratio is nearly kept.
            infer_frames: Frames of a clip, 4n.
            init_first_frame: Begin with the picture.
            output_type: "latent": the latents of all clips one after the other.
        """
        return self._generate(self._named(locals()))

    def _named(self, call: dict[str, Any]) -> dict[str, Any]:
        for name in ("enable_tts", "tts_prompt_audio", "tts_prompt_text", "tts_text"):
            if call.pop(name):
                why = "is not available: speech is not made here"
                raise InputError(name, None, why, "make it elsewhere and give it as audio_path")
        return {**call, "img": call.pop("ref_image_path")}


class WanAnimate(Generator):
    """A character that moves as a video does, or is put into it: animate-14B."""

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
        """Makes one video of clips; see `WanT2V.generate`.

        Args:
            src_root_path: A folder of the preprocessing, with src_pose.mp4, src_face.mp4 and
                src_ref.png; to replace somebody also src_bg.mp4 and src_mask.mp4.
            replace_flag: Put the character into src_bg.mp4.
            clip_len: Frames of a clip, 4n+1.
            refert_num: Last frames that the next clip begins with, 1 or 5.
            input_prompt: What happens; "": the official one.
            output_type: "latent": the latents of all clips one after the other; each clip's begin
                with those of the picture.
        """
        return self._generate(self._named(locals()))

    def _named(self, call: dict[str, Any]) -> dict[str, Any]:
        prompt = call["input_prompt"] or EXAMPLE_PROMPTS[self.kind]
        return {**call, "input_prompt": prompt, "frame_num": call.pop("clip_len"), "img": None}


class WanVace(Generator):
    """A video, a mask, pictures and text to video: vace-1.3B, vace-14B and vace-A14B."""

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
        """Makes one video; see `WanT2V.generate`.

        Args:
            input_prompt: What to show.
            src_video: A video that is changed, or that controls the new one.
            src_mask: A video that is white where something new is made; as large and as long.
            src_ref_images: A picture, or a list of them; each like `img` of `WanI2V.generate`.
            size: (width, height) in pixels; with `src_video` its area counts.
            frame_num: 4n+1; by default at most as many as `src_video` has.
            context_scale: The weight of the control, or one for each control block.
        """
        return self._generate(locals())


class WanTI2V(Generator):
    """Text, with or without a first image, to video: ti2v-5B."""

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
        """Makes one video of `size`, or with `img`'s aspect ratio; see `WanI2V.generate`."""
        return self._generate(locals())
