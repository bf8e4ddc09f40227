"""Videos from a source video, a mask and reference images: the class `WanVace`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.app.python_api import Generator, GuideScale, Result, video_call
from wan.settings.execution import Offload
from wan.tasks.base import StepCallback


class WanVace(Generator):
    """Video, mask, reference images and text to video: vace-1.3B, vace-14B and vace-A14B.

    Example:
        import wan

        model = wan.WanVace("vace-14B", "./Wan2.1-VACE-14B")
        video = model.generate("a fox runs", src_video="depth.mp4", size=(832, 480))
        wan.save_video(video, "video.mp4", fps=16)
    """

    kind = "vace"

    @video_call
    def generate(
        self,
        input_prompt: str,
        src_video: str | None = None,
        src_mask: str | None = None,
        src_ref_images: Any = None,
        size: tuple[int, int] = (1280, 720),
        frame_num: int = 81,
        context_scale: Any = 1.0,
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
        """Generates one video; see `WanT2V.generate`.

        Args:
            input_prompt: Description of the video.
            src_video: A video to edit, or a control video (depth, pose, ...).
            src_mask: A mask video of the same size and length, or an image for all frames; white
                where pixels are generated.
            src_ref_images: A reference image or a list; each like `img` of `WanI2V.generate`.
            size: (width, height) in pixels; with `src_video` only its area is used.
            frame_num: 4n+1; by default at most the number of frames of `src_video`.
            context_scale: Strength of the control, one number or one per control block.
        """
