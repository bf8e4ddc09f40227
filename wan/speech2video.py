"""Speech to video: the official class `WanS2V`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from wan.app.call_arguments import Arguments
from wan.app.python_api import Generator, GuideScale, Result, video_call
from wan.settings.errors import InputError
from wan.settings.execution import Offload
from wan.tasks.base import StepCallback


class WanS2V(Generator):
    """Audio, a reference image and text to video: s2v-14B.

    Example:
        import wan

        model = wan.WanS2V("s2v-14B", "./Wan2.2-S2V-14B")
        video = model.generate("a woman sings", "woman.jpg", "song.wav", num_repeat=None)
        wan.save_video(video, "video.mp4", fps=16)
    """

    kind = "s2v"
    flag_names: ClassVar = {"ref_image_path": "image"}

    @video_call
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
        shift: float = 5.0,
        sample_solver: str = "unipc",
        sampling_steps: int = 40,
        guide_scale: GuideScale = 5.0,
        n_prompt: str = "",
        seed: int | None = -1,
        offload_model: Offload = True,
        init_first_frame: bool = False,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
        progress: bool = True,
        callback_on_step_end: StepCallback | None = None,
        **settings: Any,
    ) -> Result:
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

    def _check_arguments(self, call: Arguments) -> None:
        for name in ("enable_tts", "tts_prompt_audio", "tts_prompt_text", "tts_text"):
            if call.get(name):
                why = "is not available: there is no speech synthesis here"
                raise InputError(name, None, why, "give a recording as audio_path")
