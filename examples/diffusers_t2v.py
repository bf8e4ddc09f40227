"""Runs diffusers' text-to-video pipeline in sequence parallel:

    torchrun --nproc_per_node=2 examples/diffusers_t2v.py [FOLDER]

FOLDER is a checkpoint in diffusers' layout (Wan-AI/Wan2.2-T2V-A14B-Diffusers, downloaded). Without
it, a tiny network of random weights makes noise on CPUs; the program then shows how little the
ranks' video differs from that of the pipeline on one device. See docs/diffusers.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import WanPipeline
from diffusers.utils import export_to_video

from wan.diffusers import apply_cache_on_pipe, parallelize_pipe
from wan.testing.random_checkpoint import make_checkpoint


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as temporary
    ):  # one folder per rank, all with the same tensors
        if sys.argv[1:]:
            folder = sys.argv[1]
        else:
            folder = str(make_checkpoint("t2v-A14B", Path(temporary, "t2v"), layout="diffusers"))
        pipe = WanPipeline.from_pretrained(folder)
    several = dist.is_torchelastic_launched()
    if several:
        dist.init_process_group("gloo")
    ranks = dist.get_world_size() if several else 1
    call = {"prompt": "a red fox trots through fresh snow", "width": 128, "height": 96}
    call |= {"num_frames": 9, "num_inference_steps": 8}

    def video() -> np.ndarray:
        return pipe(**call, generator=torch.Generator().manual_seed(0)).frames[0]

    alone = video()
    parallelize_pipe(pipe, device="cpu", comm_type=1)  # logs a notice with one process
    shared = video()
    apply_cache_on_pipe(pipe, "first_block", threshold=0.08)
    frames = video()
    if not several or dist.get_rank() == 0:
        print(f"{ranks} ranks: {abs(shared - alone).max():.1e} from the pipeline alone, of 1")
        print(f"fox.mp4: {frames.shape}; the step cache: {abs(frames - alone).max():.1e}")
        export_to_video(frames, "fox.mp4", fps=16)
    if several:
        dist.barrier()  # gloo aborts if a rank exits before the others
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
