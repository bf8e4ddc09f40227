"""What the three official classes share: checkpoint, pipeline, and one request at a time.

The official Python classes: thin facades over the pipeline.

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
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from wan.checkpoint.layout import Checkpoint, check_task, describe
from wan.cli import env, keywords
from wan.modules.model import WanModel
from wan.pipeline import build, images
from wan.settings import attention as attention_flags
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.presets import PRESETS
from wan.settings.request import Request

GuideScale = float | tuple[float, float]
ImageLike = str | Path | Image.Image | np.ndarray | Tensor
"""What `wan.pipeline.images.from_value` takes."""
_NETWORKS = {
    "high_noise_model": "high_noise",
    "low_noise_model": "low_noise",
    "model": "dit",
}


def _with_files(checkpoint: Checkpoint, config: Any) -> Checkpoint:
    """The checkpoint with the files that the config names, where the folder has them."""
    named = {
        "vae": checkpoint.folder / config.vae_checkpoint,
        "text_encoder": checkpoint.folder / config.t5_checkpoint,
        "tokenizer": checkpoint.folder / config.t5_tokenizer,
    }
    return replace(checkpoint, **{part: path for part, path in named.items() if path.exists()})


class Facade:
    """One checkpoint, ready for requests. `tasks`: a class's; the folder decides among them."""

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
        **settings: Any,
    ) -> None:
        """config: from WAN_CONFIGS, perhaps edited. checkpoint_dir: official or diffusers layout.

        Of the config, boundary, sample_neg_prompt, file names (t5_checkpoint, t5_tokenizer,
        vae_checkpoint) and float32 as t5_dtype or param_dtype count; the networks' sizes come from
        the checkpoint. init_on_cpu has no effect: networks go straight to their device. device,
        precision and noise_device as on the command line. Raises InputError (a ValueError) for
        folders and settings that do not fit.

        use_sp: the processes of torch.distributed, which the caller has initialised, share each
        video. `generate` is then called on every process and returns the video on the first one,
        None on the others (latents on all). rank is taken from the group.

        settings: those of `wan.settings.keywords`, as on the command line (ulysses_size, comm_type,
        fa_quant, use_rainfusion, quant_dit_path, ...); sparse_start_step is by default a quarter of
        the task's own steps, for all requests: one with no more steps than that is refused. The
        variables that stand for flags have no effect; those refused there are refused here.
        """
        env.refused()
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
        own = {"dit_fsdp": dit_fsdp, "t5_fsdp": t5_fsdp, "t5_cpu": t5_cpu}
        values = keywords.read({**settings, **own})
        self._parallel, self._team = build.team(
            self._checkpoint,
            use_sp,
            values,
            execution,
            device_id,
        )
        steps = self._preset.sample_steps
        self._attention, quantised = keywords.attending(
            values, execution, self._checkpoint, self._parallel, steps
        )
        self._pipeline = build.pipeline(
            self._checkpoint,
            execution,
            parallel=self._parallel,
            attention=self._attention,
            quantised=quantised,
            team=self._team,
            device_index=device_id,
            t5_dtype=torch.float32 if fp32 else None,
        )

    def _fits(self, task: str) -> bool:
        preset = PRESETS[task]
        return self._checkpoint.experts.keys() == set(preset.experts)

    def __getattr__(self, name: str) -> WanModel:
        """The official attributes low_noise_model and high_noise_model, or model where it is one.

        For tools that change networks in place: one that was asked for stays in memory.
        """
        expert = _NETWORKS.get(name)
        if expert is None or expert not in self._checkpoint.experts:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._pipeline.experts.keep(expert)

    def _run(
        self,
        prompt: str,
        img: ImageLike | None,
        size: tuple[int, int],
        offload_model: bool,
        output_type: str,
        embeds: tuple[Tensor | None, Tensor | None],
        sampling: dict[str, Any],
    ) -> Tensor | None:
        image = None if img is None else images.from_value(img)
        if output_type not in ("pt", "latent"):
            raise InputError(f"output_type is {output_type!r}; choose 'pt' or 'latent'.")
        request = Request(
            preset=self._preset,
            prompt=prompt,
            image_size=None if image is None else image.size,
            size=size,
            boundary=self._boundary,
            noise_device=self._noise_device,
            **sampling,
        )
        attention_flags.check_request(
            self._attention, request.sample_steps, prod(request.grid), self._parallel
        )
        if self._team is not None:  # ranks that drew different seeds would mix their noise
            request = replace(request, seed=self._team.value_from_main(request.seed))
        self._pipeline.set_offload(offload_model)
        latents = self._pipeline.latents(
            request, image=image, prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1]
        )
        if output_type == "latent":
            return latents
        if self._team is not None and not self._team.is_main:
            return None
        return self._pipeline.decode(latents)

    def _sampling(
        self,
        frame_num: int,
        shift: float,
        solver: str,
        steps: int,
        guide_scale: GuideScale,
        n_prompt: str,
        seed: int,
    ) -> dict[str, Any]:
        """The official keywords under the names of `Request`."""
        pair = guide_scale if isinstance(guide_scale, tuple | list) else (guide_scale,) * 2
        return {
            "frame_num": frame_num,
            "sample_shift": shift,
            "sample_solver": solver,
            "sample_steps": steps,
            "guide_scale": pair,
            "negative_prompt": n_prompt or self.config.sample_neg_prompt,
            "seed": seed if seed >= 0 else random.SystemRandom().randrange(2**63),
        }


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
        img: ImageLike,
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
            raise InputError("WanI2V.generate starts from an image; give one as img.")
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
    """Text, with or without a first image, to video: ti2v-5B."""

    tasks = ("ti2v-5B",)

    def generate(
        self,
        input_prompt: str,
        img: ImageLike | None = None,
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
