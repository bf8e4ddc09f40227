"""Text or image to video: the official class `WanTI2V`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.app.python_api import Generator, GuideScale, Result, video_call
from wan.settings.execution import Offload
from wan.tasks.base import StepCallback


class WanTI2V(Generator):
    """Text, and optionally a first image, to video: ti2v-5B.

    Example:
        import wan

        model = wan.WanTI2V("ti2v-5B", "./Wan2.2-TI2V-5B")
        video = model.generate("the cat jumps", img="cat.jpg")
        wan.save_video(video, "video.mp4", fps=24)
    """

    kind = "ti2v"

    @video_call
    def generate(
        self,
        input_prompt: str,
        img: Any = None,
        size: tuple[int, int] = (1280, 704),
        max_area: int = 704 * 1280,
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
        """Generates one video of `size`, or with `img`'s aspect ratio; see `WanI2V.generate`."""
