"""Character animation: the official class `WanAnimate`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from wan.app.python_api import Generator, GuideScale, Result, video_call
from wan.settings.execution import Offload
from wan.settings.presets import EXAMPLE_PROMPTS
from wan.tasks.base import StepCallback


class WanAnimate(Generator):
    """Moves a character as in a video, or puts it into the video: animate-14B.

    Example:
        import wan

        model = wan.WanAnimate("animate-14B", "./Wan2.2-Animate-14B")
        video = model.generate("./preprocessed")
        wan.save_video(video, "video.mp4", fps=30)
    """

    kind = "animate"
    flag_names: ClassVar = {"clip_len": "frame_num"}
    default_prompt = EXAMPLE_PROMPTS[kind]

    @video_call
    def generate(
        self,
        src_root_path: str,
        replace_flag: bool = False,
        clip_len: int = 77,
        refert_num: int = 1,
        shift: float = 5.0,
        sample_solver: str = "dpm++",
        sampling_steps: int = 20,
        guide_scale: GuideScale = 1.0,
        input_prompt: str = "",
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
            src_root_path: Output folder of the official preprocessing, with src_pose.mp4,
                src_face.mp4 and src_ref.png; for replacement also src_bg.mp4 and src_mask.mp4.
            replace_flag: Replace the person in src_bg.mp4 with the character.
            clip_len: Frames of a clip, 4n+1.
            refert_num: Overlap frames of consecutive clips, 1 or 5.
            input_prompt: Description of the video; "": the official default.
            output_type: "latent": the latents of all clips, concatenated; those of each clip start
                with the reference image's.
        """
