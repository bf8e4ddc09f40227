"""Character animation without preprocessing: the class `WanAnimate2`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.app.python_api import Generator, GuideScale, Result, video_call
from wan.settings.execution import Offload
from wan.tasks.base import StepCallback


class WanAnimate2(Generator):
    """Moves a character as in a driving video: animate2-14B.

    Example:
        import wan

        model = wan.WanAnimate2("animate2-14B", "./Wan2.2-Animate-2-14B-Diffusers")
        video = model.generate("a cat in a blue uniform", "cat.png", "dance.mp4")
        wan.save_video(video, "video.mp4", fps=24)
    """

    kind = "animate2"

    @video_call
    def generate(
        self,
        input_prompt: str,
        img: Any,
        src_video: str,
        size: tuple[int, int] = (640, 800),
        frame_num: int = 81,
        refert_num: int = 1,
        shift: float = 5.0,
        sample_solver: str = "dpm++",
        sampling_steps: int = 40,
        guide_scale: GuideScale = 3.0,
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
        """Generates one video, in clips; see `WanT2V.generate`.

        Args:
            input_prompt: Description of the character and the background.
            img: The character; like `img` of `WanI2V.generate`.
            src_video: The driving video. The returned video has no audio, and 24 frames per second.
            size: (width, height) in pixels; only its area is used.
            frame_num: Frames of a clip, 4n+1.
            refert_num: Overlap frames of consecutive clips, 1 or 5.
            output_type: "latent": the latents of all clips, concatenated; those of each clip start
                with the image's.
            **settings: Command-line flags, such as log_scale.
        """
