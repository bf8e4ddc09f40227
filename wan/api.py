"""The official Python classes: thin facades over the pipeline.

    from wan import WanT2V
    from wan.configs import WAN_CONFIGS
    video = WanT2V(WAN_CONFIGS["t2v-A14B"], "./Wan2.2-T2V-A14B").generate("a cat", size=(832, 480))

Differences from the official classes: networks are loaded when first needed; besides the official
keywords `generate` takes `prompt_embeds`, `negative_prompt_embeds` ([length, text_dim]) and
`output_type` ("pt": the video, "latent": what the VAE would decode). With `offload_model=True`, the
official default, every network is released after its stage and read again by the next call; give
False to keep what fits.
"""

from __future__ import annotations

from PIL import Image
from torch import Tensor

from wan.facade import Facade, GuideScale
from wan.settings.errors import InputError


class WanT2V(Facade):
    """Text to video: t2v-A14B (two experts), or the dense Wan 2.1 networks."""

    tasks = ("t2v-A14B", "t2v-14B")

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
        seed: int = -1,
        offload_model: bool = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
    ) -> Tensor | None:
        """The video [3,F,H,W] in [-1, 1], or with output_type="latent" the latents [16,f,h,w].

        Of several processes only the first one gets the video, the others None.
        size: (width, height). guide_scale: one number or (low noise, high noise).
        """
        return self._run(
            input_prompt,
            None,
            size,
            offload_model,
            output_type,
            (prompt_embeds, negative_prompt_embeds),
            self._sampling(
                frame_num, shift, sample_solver, sampling_steps, guide_scale, n_prompt, seed
            ),
        )


class WanI2V(Facade):
    """Image to video: i2v-A14B."""

    tasks = ("i2v-A14B",)

    def generate(
        self,
        input_prompt: str,
        img: Image.Image,
        max_area: int = 720 * 1280,
        frame_num: int = 81,
        shift: float = 5.0,
        sample_solver: str = "unipc",
        sampling_steps: int = 40,
        guide_scale: GuideScale = 5.0,
        n_prompt: str = "",
        seed: int = -1,
        offload_model: bool = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
    ) -> Tensor | None:
        """The video [3,F,H,W] with img's aspect ratio at about max_area pixels; see `WanT2V`."""
        if img is None:
            raise InputError("WanI2V.generate starts from a picture; give one as img.")
        return self._run(
            input_prompt,
            img,
            (max_area, 1),
            offload_model,
            output_type,
            (prompt_embeds, negative_prompt_embeds),
            self._sampling(
                frame_num, shift, sample_solver, sampling_steps, guide_scale, n_prompt, seed
            ),
        )


class WanTI2V(Facade):
    """Text, with or without a first picture, to video: ti2v-5B."""

    tasks = ("ti2v-5B",)

    def generate(
        self,
        input_prompt: str,
        img: Image.Image | None = None,
        size: tuple[int, int] = (1280, 704),
        max_area: int = 704 * 1280,
        frame_num: int = 81,
        shift: float = 5.0,
        sample_solver: str = "unipc",
        sampling_steps: int = 50,
        guide_scale: GuideScale = 5.0,
        n_prompt: str = "",
        seed: int = -1,
        offload_model: bool = True,
        *,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pt",
    ) -> Tensor | None:
        """The video [3,F,H,W] of `size`, or with img's aspect ratio if given; see `WanT2V`."""
        return self._run(
            input_prompt,
            img,
            size if img is None else (max_area, 1),
            offload_model,
            output_type,
            (prompt_embeds, negative_prompt_embeds),
            self._sampling(
                frame_num, shift, sample_solver, sampling_steps, guide_scale, n_prompt, seed
            ),
        )
