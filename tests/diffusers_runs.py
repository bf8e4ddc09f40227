"""Runs of diffusers' pipelines on tiny checkpoints, the same on every rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.distributed.distributed_c10d import _world

TOLERANCE = 1e-4  # of latents in float32, against the pipeline as it is
Settings = dict[str, Any]
FORMS = {  # task, images, size
    "2.1": ("t2v-1.3B", 0, (112, 80)),
    "2.2": ("t2v-A14B", 0, (112, 80)),
    "5B": ("ti2v-5B", 0, (224, 160)),
    "5B image": ("ti2v-5B", 1, (224, 160)),
    "2.1 image": ("i2v-14B", 1, (112, 80)),
    "2.1 two images": ("flf2v-14B", 2, (112, 80)),
    "2.2 image": ("i2v-A14B", 1, (112, 80)),
    "control": ("vace-1.3B", 0, (112, 80)),
    "2.2 control": ("vace-A14B", 0, (112, 80)),
}


@dataclass(frozen=True)
class Video:
    """A checkpoint folder in diffusers' layout, and a call of its pipeline.

    images: Number of input images."""

    folder: Path
    images: int = 0
    size: tuple[int, int] = (112, 80)  # 105 tokens, of the 5B model a quarter
    frames: int = 9
    steps: int = 3
    guidance: float = 5.0
    count: int = 1

    def pipe(self) -> Any:
        """The pipeline without its encoders: texts and images come as embeddings."""
        from diffusers import WanImageToVideoPipeline, WanPipeline, WanVACEPipeline
        from diffusers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        absent = ["text_encoder", "tokenizer"]
        if self.images:
            absent += ["image_encoder", "image_processor"]
        kind = WanImageToVideoPipeline if self.images else WanPipeline
        if self.has_control:
            kind = WanVACEPipeline
        pipe = kind.from_pretrained(
            self.folder, torch_dtype=torch.float32, **dict.fromkeys(absent, None)
        )
        if self.images:
            shape = self.images, 257, pipe.transformer.config.image_dim or 1
            image_embeds = torch.randn(shape, generator=torch.Generator().manual_seed(6))
            pipe.encode_image = lambda *_: image_embeds
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @property
    def has_control(self) -> bool:
        return "WanVACEPipeline" in (self.folder / "model_index.json").read_text()

    def _control(self) -> dict[str, Any]:
        """A video, its mask and a picture."""
        shape, random = (self.frames, *self.size[::-1], 3), np.random.default_rng(1)
        pixels = random.integers(0, 255, shape, dtype=np.uint8)
        masks = np.zeros_like(pixels)
        masks[1:, : self.size[1] // 2] = 255
        video, mask = ([Image.fromarray(frame) for frame in frames] for frames in (pixels, masks))
        inputs = {"video": video, "mask": mask, "reference_images": [video[0]]}
        return {**inputs, "conditioning_scale": [0.9, 0.6]}

    def latents(self, pipe: Any, **kwargs: Any) -> Tensor:
        """Returns the latents that the pipeline generates, [B,C,f,h,w]."""
        generator = torch.Generator().manual_seed(5)
        cond, uncond = torch.randn(2, 1, 512, 64, generator=generator)
        pixels = np.random.default_rng(0).integers(0, 255, (2, 80, 112, 3), dtype=np.uint8)
        images = [Image.fromarray(image) for image in pixels][: self.images]
        return pipe(
            **(
                dict(zip(("image", "last_image"), images, strict=False))
                | (self._control() if self.has_control else {})
                | {"generator": torch.Generator().manual_seed(3), "prompt_embeds": cond}
                | kwargs
            ),
            negative_prompt_embeds=uncond,
            width=self.size[0],
            height=self.size[1],
            num_frames=self.frames,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            num_videos_per_prompt=self.count,
            output_type="latent",
        ).frames


def make_video(tiny: Any, form: str, **fields: Any) -> Video:
    """Returns the video of a row of `FORMS`. fields: Further fields of `Video`."""
    task, images, size = FORMS[form]
    return Video(tiny(task, "diffusers"), images, **{"size": size, **fields})


@contextmanager
def parallelized_pipe(pipe: Any, **settings: Any) -> Iterator[Any]:
    """Parallelizes the pipeline inside the `with` block; no process group remains after it."""
    from wan.diffusers import deparallelize, parallelize_pipe

    groups = {*_world.pg_map}
    yield parallelize_pipe(pipe, **settings)
    deparallelize(pipe)
    assert {*_world.pg_map} == groups
    gc.collect()  # the threads of many groups would slow the other tests
