"""Distils the demo checkpoint into four steps without guidance, as a LoRA for each expert.

    python -m tools.demo.distil --state STATE --clips 1024
    python -m tools.demo.distil --state STATE --expert high_noise    (and low_noise)
    python -m tools.demo.distil --state STATE --out examples/demo/T2V-A14B-4steps-lora
    python -m tools.demo.distil --score examples/demo/T2V-A14B-4steps-lora

The teacher follows its guided flow from noise in many small Euler steps; its latents at the
student's four noise levels are stored, and the student learns the straight line from each level to
the next. Prompts are training scenes; the scores use held-out ones. Resumable; 40 minutes on 2
cores.
Legend: N clips, B clips of a step, Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tools.demo.evaluate import format_run_rows
from tools.demo.lora import BATCH, TOKENS, add_lora, encode_prompts, run_training_program
from tools.demo.scenes import make_caption, make_random_scene
from tools.demo.training import Training, save_atomically
from wan import WanT2V

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "t2v-A14B"
RANK, SUBSTEPS, GUIDANCE, SEED = 32, 12, 3.0, 4000
SHAPE = (16, 3, 8, 8)  # latents of 9 frames of 64 x 64
LEVELS = [5 * x / (1 + 4 * x) for x in (1.0, 0.75, 0.5, 0.25, 0.0)]  # euler's sigmas, shift 5
PARTS = {"high_noise": (0, 1), "low_noise": (2, 3)}  # indices of each expert's levels


def load_teacher() -> Any:
    return WanT2V("t2v-A14B", DEMO, precision="fp32")


def make_prompt(index: int) -> str:
    return make_caption(make_random_scene(SEED, index), np.random.default_rng([SEED, index]))


@torch.inference_mode()
def encode_trajectories(state: Path, count: int) -> None:
    """Writes the teacher's latents at the levels, [N,5,Z,f,h,w], unless the file exists."""
    file = state / "passed.pt"
    if file.exists():
        return
    model = load_teacher()
    (negative,) = encode_prompts(model, [model.config.sample_neg_prompt])
    experts = {"high_noise": model.high_noise_model, "low_noise": model.low_noise_model}
    trajectories = []
    for first in range(0, count, BATCH):
        texts = encode_prompts(model, [make_prompt(i) for i in range(first, first + BATCH)])
        generator = torch.Generator().manual_seed(first)
        x = torch.randn(BATCH, *SHAPE, generator=generator)
        trajectory = [x]
        for level in range(4):
            network = experts["high_noise" if level < 2 else "low_noise"]
            grid = np.linspace(LEVELS[level], LEVELS[level + 1], SUBSTEPS + 1)
            for sigma, next_sigma in zip(grid, grid[1:], strict=False):
                t = torch.full((BATCH,), 1000 * sigma)
                cond = torch.stack(network(list(x), t, texts, TOKENS))
                uncond = torch.stack(network(list(x), t, [negative] * BATCH, TOKENS))
                x = x + (next_sigma - sigma) * (uncond + GUIDANCE * (cond - uncond))
            trajectory.append(x)
        trajectories.append(torch.stack(trajectory, dim=1))
        print(f"{first + BATCH} clips", flush=True)
    save_atomically(torch.cat(trajectories), file)


def train_distilled_lora(state: Path, part: str, steps: int, peak: float) -> None:
    """Trains a LoRA on the velocities from each of the expert's levels straight to the next."""
    torch.manual_seed(0)
    model = load_teacher()
    network = add_lora(model, part, RANK)
    trajectories = torch.load(state / "passed.pt", mmap=True)
    texts = encode_prompts(model, [make_prompt(i) for i in range(len(trajectories))])
    training = Training(network, state / f"distilled_{part}.pt", steps=steps, peak=peak)
    while not training.is_finished:
        random = np.random.default_rng([6, training.step])
        rows = random.integers(len(trajectories), size=BATCH)
        level = torch.from_numpy(random.choice(PARTS[part], size=BATCH))
        sigma = torch.tensor(LEVELS)[level]
        gap = torch.tensor(LEVELS)[level + 1] - sigma
        index = torch.from_numpy(rows)
        x, x_next = trajectories[index, level], trajectories[index, level + 1]
        velocities = network(list(x), 1000 * sigma, [texts[row] for row in rows], TOKENS)
        wanted = (x_next - x) / gap.view(-1, 1, 1, 1, 1)
        training.update(F.mse_loss(torch.stack(velocities), wanted))


def score_distilled(folder: Path, prompts: int) -> None:
    """Prints a table of few steps, distilled or not, the teacher's steps, and step caches."""
    usual: dict[str, Any] = {"shift": 12.0, "guide_scale": GUIDANCE}
    cached = {"step_cache": "first_block:threshold=0.2"}
    compared: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "40 steps": ({}, {**usual, "sampling_steps": 40}),
        "20 steps": ({}, {**usual, "sampling_steps": 20}),
        "20 steps, `first_block` 0.2": (cached, {**usual, "sampling_steps": 20}),
        "8 steps": ({}, {**usual, "sampling_steps": 8}),
        "4 steps": ({}, {**usual, "sampling_steps": 4}),
        "4 steps, no guidance": ({}, {"shift": 12.0, "guide_scale": 1.0, "sampling_steps": 4}),
        "4 euler steps, no guidance": ({}, {"recipe": "lightning-4step"}),
        "the LoRA, 4 euler steps": ({"lora_dir": str(folder)}, {"recipe": "lightning-4step"}),
    }
    runs = (
        (name, WanT2V("t2v-A14B", DEMO, precision="fp32", **loading), video)
        for name, (loading, video) in compared.items()
    )
    for line in format_run_rows(runs, prompts):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(
        run_training_program(
            (__doc__ or "").splitlines()[0],
            "distilled",
            encode_trajectories,
            train_distilled_lora,
            score_distilled,
            steps=2500,
        )
    )
