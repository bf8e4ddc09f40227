"""Runs diffusers' Wan2.1 image-to-video pipeline, with its 257 image tokens, on several ranks:

    torchrun --nproc_per_node=3 examples/diffusers_i2v.py [FOLDER IMAGE]

FOLDER is a checkpoint in diffusers' layout (Wan-AI/Wan2.1-I2V-14B-480P-Diffusers, downloaded).
Without it, a tiny network of random weights makes noise, on CPUs. Neither the number of video
tokens nor the 257 + 512 image and text tokens need to be divisible by the number of ranks. See
docs/diffusers.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import WanImageToVideoPipeline
from diffusers.utils import export_to_video, load_image
from PIL import Image
from transformers import CLIPImageProcessorPil

from wan.diffusers import parallelize_pipe
from wan.testing.random_checkpoint import make_checkpoint


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as temporary
    ):  # one folder per rank, all with the same tensors
        if sys.argv[1:]:
            folder, image = sys.argv[1], load_image(sys.argv[2])
        else:
            folder = str(make_checkpoint("i2v-14B", Path(temporary, "i2v"), layout="diffusers"))
            image = Image.radial_gradient("L").convert("RGB")
        pipe = WanImageToVideoPipeline.from_pretrained(
            folder, image_processor=CLIPImageProcessorPil()
        )
    several = dist.is_torchelastic_launched()
    if several:
        dist.init_process_group("gloo")
    call = {"image": image, "prompt": "the scene comes gently to life", "width": 112, "height": 80}
    call |= {"num_frames": 9, "num_inference_steps": 4}

    def video() -> np.ndarray:
        return pipe(**call, generator=torch.Generator().manual_seed(0)).frames[0]

    alone = video()
    parallelize_pipe(pipe, device="cpu")
    frames = video()
    if not several or dist.get_rank() == 0:
        print(f"life.mp4: {frames.shape}, {abs(frames - alone).max():.1e} from the pipeline alone")
        export_to_video(frames, "life.mp4", fps=16)
    if several:
        dist.barrier()  # gloo aborts if a rank exits before the others
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
