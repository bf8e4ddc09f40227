"""Image to video: the official class `WanI2V`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.app.python_api import Generator, GuideScale, Result, video_call
from wan.settings.execution import Offload
from wan.tasks.base import StepCallback


class WanI2V(Generator):
    """Image to video: i2v-A14B, Wan2.1's i2v-14B and flf2v-14B, depending on the checkpoint.

    Example:
        import wan

        model = wan.WanI2V("i2v-A14B", "./Wan2.2-I2V-A14B")
        video = model.generate("the cat jumps", "cat.jpg", max_area=832 * 480)
        wan.save_video(video, "video.mp4", fps=16)
    """

    kind = "i2v"

    @video_call
    def generate(
        self,
        input_prompt: str,
        img: Any,
        max_area: int = 720 * 1280,
        frame_num: int = 81,
        shift: float = 5.0,
        sample_solver: str = "unipc",
        sampling_steps: int = 40,
        guide_scale: GuideScale = 5.0,
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
        progress: bool = True,
        callback_on_step_end: StepCallback | None = None,
        **settings: Any,
    ) -> Result:
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
