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

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from wan import build
from wan.settings.checkpoint import Checkpoint, check_task, describe
from wan.settings.errors import InputError
from wan.settings.execution import Execution, Parallel
from wan.settings.presets import PRESETS
from wan.settings.request import Request

GuideScale = float | tuple[float, float]


def _with_files(checkpoint: Checkpoint, config: Any) -> Checkpoint:
    """The checkpoint with the files that the config names, where the folder has them."""
    named = {
        "vae": checkpoint.folder / config.vae_checkpoint,
        "text_encoder": checkpoint.folder / config.t5_checkpoint,
        "tokenizer": checkpoint.folder / config.t5_tokenizer,
    }
    return replace(checkpoint, **{part: path for part, path in named.items() if path.exists()})


class _Facade:
    tasks: tuple[str, ...]

    def __init__(
        self,
        config: Any,
        checkpoint_dir: str | Path,
        device_id: int = 0,
        rank: int = 0,
        t5_fsdp: bool = False,
        dit_fsdp: bool = False,
        use_sp: bool = False,
        t5_cpu: bool = False,
        init_on_cpu: bool = True,
        convert_model_dtype: bool = False,
        *,
        device: str = "auto",
        precision: str = "auto",
        noise_device: str = "cpu",
    ) -> None:
        """config: from WAN_CONFIGS, perhaps edited. checkpoint_dir: official or diffusers layout.

        Of the config, boundary, sample_neg_prompt, file names (t5_checkpoint, t5_tokenizer,
        vae_checkpoint) and float32 as t5_dtype or param_dtype count; the networks' sizes come from
        the checkpoint. init_on_cpu has no effect: networks go straight to their device. device,
        precision and noise_device as on the command line. Raises InputError (a ValueError) for
        folders and settings that do not fit.
        """
        Parallel(world_size=2 if use_sp or rank else 1, t5_fsdp=t5_fsdp, dit_fsdp=dit_fsdp)
        self.config, self._noise_device = config, noise_device
        if precision == "auto" and config.param_dtype == torch.float32:
            precision = "fp32"
        execution = Execution(
            device=device,
            precision=precision,
            convert_model_dtype=convert_model_dtype,
            t5_cpu=t5_cpu,
        )
        self._checkpoint = _with_files(describe(Path(checkpoint_dir)), config)
        matching = [t for t in self.tasks if self._fits(t)]
        self._preset = PRESETS[(matching or self.tasks)[0]]
        check_task(self._checkpoint, self._preset)
        two = self._preset.boundary is not None
        self._boundary = config.get("boundary", self._preset.boundary) if two else None
        fp32 = config.t5_dtype == torch.float32
        self._pipeline = build.pipeline(
            self._checkpoint,
            execution,
            device_index=device_id,
            t5_dtype=torch.float32 if fp32 else None,
        )

    def _fits(self, task: str) -> bool:
        preset = PRESETS[task]
        return self._checkpoint.experts.keys() == set(preset.experts)

    def _run(
        self,
        prompt: str,
        image: Image.Image | None,
        size: tuple[int, int],
        offload_model: bool,
        output_type: str,
        embeds: dict[str, Any],
        *,
        guide_scale: GuideScale,
        n_prompt: str,
        seed: int,
        **sampling: Any,
    ) -> Tensor:
        if output_type not in ("pt", "latent"):
            raise InputError(f"output_type is {output_type!r}; choose 'pt' or 'latent'.")
        low, high = guide_scale if isinstance(guide_scale, tuple | list) else (guide_scale,) * 2
        request = Request(
            noise_device=self._noise_device,
            preset=self._preset,
            prompt=prompt,
            negative_prompt=n_prompt or self.config.sample_neg_prompt,
            image_size=None if image is None else image.size,
            size=size,
            guide_scale=(low, high),
            boundary=self._boundary,
            seed=seed if seed >= 0 else random.SystemRandom().randrange(2**63),
            **sampling,
        )
        self._pipeline.set_offload(offload_model)
        latents = self._pipeline.latents(request, image=image, **embeds)
        return latents if output_type == "latent" else self._pipeline.decode(latents)


class WanT2V(_Facade):
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
    ) -> Tensor:
        """The video [3,F,H,W] in [-1, 1], or with output_type="latent" the latents [16,f,h,w].

        size: (width, height). guide_scale: one number or (low noise, high noise).
        """
        return self._run(
            input_prompt,
            None,
            size,
            offload_model,
            output_type,
            {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds},
            guide_scale=guide_scale,
            n_prompt=n_prompt,
            seed=seed,
            frame_num=frame_num,
            sample_shift=shift,
            sample_solver=sample_solver,
            sample_steps=sampling_steps,
        )


class WanI2V(_Facade):
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
    ) -> Tensor:
        """The video [3,F,H,W] with img's aspect ratio at about max_area pixels; see `WanT2V`."""
        if img is None:
            raise InputError("WanI2V.generate starts from a picture; give one as img.")
        return self._run(
            input_prompt,
            img,
            (max_area, 1),
            offload_model,
            output_type,
            {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds},
            guide_scale=guide_scale,
            n_prompt=n_prompt,
            seed=seed,
            frame_num=frame_num,
            sample_shift=shift,
            sample_solver=sample_solver,
            sample_steps=sampling_steps,
        )


class WanTI2V(_Facade):
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
    ) -> Tensor:
        """The video [3,F,H,W] of `size`, or with img's aspect ratio if given; see `WanT2V`."""
        return self._run(
            input_prompt,
            img,
            size if img is None else (max_area, 1),
            offload_model,
            output_type,
            {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds},
            guide_scale=guide_scale,
            n_prompt=n_prompt,
            seed=seed,
            frame_num=frame_num,
            sample_shift=shift,
            sample_solver=sample_solver,
            sample_steps=sampling_steps,
        )
