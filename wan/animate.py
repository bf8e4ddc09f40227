"""Character animation: the official class `WanAnimate`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.app.python_api import (
    UNGUIDED,
    DefaultFloat,
    DefaultInt,
    DefaultStr,
    Generator,
    GuideScale,
    Result,
)
from wan.settings.execution import Offload
from wan.settings.presets import EXAMPLE_PROMPTS


class WanAnimate(Generator):
    """Moves a character as in a video, or puts it into the video: animate-14B.

    Example:
        import wan

        model = wan.WanAnimate("animate-14B", "./Wan2.2-Animate-14B")
        video = model.generate("./preprocessed")
        wan.save_video(video, "video.mp4", fps=30)
    """

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
        guide_scale: GuideScale = UNGUIDED,
        input_prompt: str = "",
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        progress: bool = True,
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
        return self._generate_video(self._rename_arguments(locals()))

    def _rename_arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        prompt = call["input_prompt"] or EXAMPLE_PROMPTS[self.kind]
        return {**call, "input_prompt": prompt, "frame_num": call.pop("clip_len"), "img": None}
