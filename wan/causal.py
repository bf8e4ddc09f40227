"""Text or image to video by a causal student, block by block: the class `WanCausal`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.app.python_api import Generator, GuideScale, Result, video_call
from wan.settings.execution import Offload


class WanCausal(Generator):
    """Text, and with causal-5B optionally a first image, to video of any length.

    Example:
        import wan

        model = wan.WanCausal("causal-1.3B", "./Wan2.1-T2V-1.3B", dit="self_forcing_dmd.pt")
        video = model.generate("a fox runs", frame_num=81)
        wan.save_video(video, "video.mp4", fps=16)
    """

    kind = "causal"

    @video_call
    def generate(
        self,
        input_prompt: str,
        img: Any = None,
        size: tuple[int, int] | None = None,
        frame_num: int | None = None,
        shift: float | None = None,
        sample_solver: str | None = None,
        sampling_steps: int | None = None,
        guide_scale: GuideScale | None = None,
        seed: int | None = -1,
        offload_model: Offload = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        progress: bool = True,
        **settings: Any,
    ) -> Result:
        """Generates one video; see `WanT2V.generate`. None: the task's default.

        Args:
            input_prompt: Description of the video.
            img: First image, for causal-5B; like `img` of `WanI2V.generate`.
        """
