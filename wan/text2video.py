"""Text to video: the official class `WanT2V`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.app.python_api import Generator, GuideScale, Result, video_call
from wan.settings.execution import Offload
from wan.tasks.base import StepCallback


class WanT2V(Generator):
    """Text to video: t2v-A14B (two experts), or the dense Wan 2.1 networks.

    Example:
        import wan

        model = wan.WanT2V("t2v-A14B", "./Wan2.2-T2V-A14B")
        config = model.config  # the defaults of `generate` are the official ones, not the task's
        video = model.generate(
            "a red fox in the snow",
            size=(832, 480),
            sampling_steps=config.sample_steps,
            shift=config.sample_shift,
            guide_scale=config.sample_guide_scale,
        )
        wan.save_video(video, "fox.mp4", fps=config.sample_fps)
    """

    kind = "t2v"

    @video_call
    def generate(
        self,
        input_prompt: str,
        size: tuple[int, int] = (1280, 720),
        frame_num: int = 81,
        shift: float = 5.0,
        sample_solver: str = "unipc",
        sampling_steps: int = 50,
        guide_scale: GuideScale = 5.0,
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        progress: bool = True,
        callback_on_step_end: StepCallback | None = None,
        **settings: Any,
    ) -> Result:
        """Generates one video.

        Args:
            input_prompt: Description of the video.
            size: (width, height) in pixels.
            frame_num: 4n+1; by default at most the number of frames of `src_video`.
            shift: Shift of the noise schedule; `model.config.sample_shift` is the task's.
            sample_solver: "unipc" or "dpm++".
            sampling_steps: Number of solver steps; `model.config.sample_steps` is the task's.
            guide_scale: One number or (low noise, high noise); `model.config.sample_guide_scale`
                is the task's. Recipes of few-step weights replace the defaults of these settings,
                and so do the presets of Wan2.1's image networks.
            n_prompt: Negative prompt; "": the default of the config.
            seed: Seed of the noise; negative or None: random.
            offload_model: True releases each network after its stage; False, "cpu", "block": as
                --offload_model.
            prompt_embeds: Prompt embeddings [length, text_dim], used instead of the prompt.
            negative_prompt_embeds: Embeddings [length, text_dim] of the negative prompt.
            output_type: "pt": the video; "latent": its latents.
            progress: Show progress bars, on rank 0 only.
            callback_on_step_end: Called after each step, on every rank, with the number of steps
                that are done and the latents [Z,f,h,w].
            **settings: Other command-line flags of a video, by their names (docs/cli.md), such as
                src_video and strength (docs/video2video.md).

        Returns:
            The video, float32 [3,F,H,W] in [-1, 1], or the latents [Z,f,h,w]. With several ranks
            only rank 0 returns the video, the others None.

        Raises:
            InputError: A ValueError: a value is invalid.
        """
