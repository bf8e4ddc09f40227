"""Distils the demo checkpoint into four steps without guidance, as a LoRA for each expert.

    python -m tools.demo.distil --state STATE --pairs 1024
    python -m tools.demo.distil --state STATE --expert high_noise    (and low_noise)
    python -m tools.demo.distil --state STATE --out examples/demo/T2V-A14B-4steps-lora
    python -m tools.demo.distil --score examples/demo/T2V-A14B-4steps-lora

The teacher follows its guided flow from noise in many small Euler steps, and what it passes at the
student's four levels is kept; the student learns the straight line from each level to the next.
Prompts are training scenes; those of the scores were never seen. Resumable; 40 minutes on 2 cores.
Legend: N clips, B clips of a step, Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.demo.evaluate import as_pixels, held_out, psnr, rates, right
from tools.demo.scenes import caption, random_scene
from tools.demo.score import look
from tools.demo.training import Training, averaged_weights, save_atomically
from wan import WanT2V

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "t2v-A14B"
RANK, SUBSTEPS, GUIDANCE, BATCH, SEED = 32, 12, 3.0, 32, 4000
SHAPE = (16, 3, 8, 8)  # latents of 9 frames of 64 x 64
TOKENS = 48
LEVELS = [5 * x / (1 + 4 * x) for x in (1.0, 0.75, 0.5, 0.25, 0.0)]  # as euler's, shift 5
PARTS = {"high_noise": (0, 1), "low_noise": (2, 3)}  # levels of each expert, by the boundary
LAYERS = [f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"]
LAYERS += ["ffn.0", "ffn.2"]


class Lora(nn.Module):
    """A frozen linear layer, and the pair beside it that learns."""

    def __init__(self, base: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def teacher() -> Any:
    return WanT2V("t2v-A14B", DEMO, precision="fp32", text_kv_cache=False)


def contexts(model: Any, texts: list[str]) -> list[Tensor]:
    encoder = model._pipeline.text.get()
    return [encoder(text) for text in texts]


def prompt(index: int) -> str:
    return caption(random_scene(SEED, index), np.random.default_rng([SEED, index]))


@torch.inference_mode()
def make_pairs(state: Path, count: int) -> None:
    """Write what the teacher passes at the levels, [N,5,Z,f,h,w], unless it is there."""
    file = state / "passed.pt"
    if file.exists():
        return
    model = teacher()
    (negative,) = contexts(model, [model.config.sample_neg_prompt])
    experts = {"high_noise": model.high_noise_model, "low_noise": model.low_noise_model}
    found = []
    for first in range(0, count, BATCH):
        texts = contexts(model, [prompt(i) for i in range(first, first + BATCH)])
        generator = torch.Generator().manual_seed(first)
        x = torch.randn(BATCH, *SHAPE, generator=generator)
        passed = [x]
        for level in range(4):
            network = experts["high_noise" if level < 2 else "low_noise"]
            grid = np.linspace(LEVELS[level], LEVELS[level + 1], SUBSTEPS + 1)
            for sigma, after in zip(grid, grid[1:], strict=False):
                t = torch.full((BATCH,), 1000 * sigma)
                cond = torch.stack(network(list(x), t, texts, TOKENS))
                uncond = torch.stack(network(list(x), t, [negative] * BATCH, TOKENS))
                x = x + (after - sigma) * (uncond + GUIDANCE * (cond - uncond))
            passed.append(x)
        found.append(torch.stack(passed, dim=1))
        print(f"{first + BATCH} clips", flush=True)
    save_atomically(torch.cat(found), file)


def student(part: str) -> Any:
    """The expert with pairs beside the linear layers of its blocks."""
    model = teacher()
    network = (model.high_noise_model if part == "high_noise" else model.low_noise_model).float()
    network.requires_grad_(False)
    for block in network.blocks:
        for layer in LAYERS:
            block.set_submodule(layer, Lora(block.get_submodule(layer)))
    return model, network


def train(state: Path, part: str, steps: int, peak: float) -> None:
    """The velocities from each of the part's levels straight to the next."""
    torch.manual_seed(0)
    model, network = student(part)
    passed = torch.load(state / "passed.pt", mmap=True)
    texts = contexts(model, [prompt(i) for i in range(len(passed))])
    training = Training(network, state / f"distilled_{part}.pt", steps=steps, peak=peak)
    while not training.done:
        random = np.random.default_rng([6, training.step])
        rows = random.integers(len(passed), size=BATCH)
        level = torch.from_numpy(random.choice(PARTS[part], size=BATCH))
        sigma = torch.tensor(LEVELS)[level]
        gap = torch.tensor(LEVELS)[level + 1] - sigma
        index = torch.from_numpy(rows)
        x, then = passed[index, level], passed[index, level + 1]
        found = network(list(x), 1000 * sigma, [texts[row] for row in rows], TOKENS)
        wanted = (then - x) / gap.view(-1, 1, 1, 1, 1)
        training.update(F.mse_loss(torch.stack(found), wanted))


def export(state: Path, out: Path, trained: str) -> None:
    """Both files of a --lora_dir, in bfloat16, under lightx2v's names."""
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        weights = averaged_weights(state / f"{trained}_{part}.pt")
        tensors = {
            f"diffusion_model.{name.removesuffix(f'.{end}.weight')}.lora_{end}.weight": tensor
            for name, tensor in weights.items()
            for end in ("down", "up")
            if name.endswith(f".{end}.weight")
        }
        save_file(
            {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()},
            out / f"{part}_model.safetensors",
        )


def score(folder: Path, prompts: int) -> None:
    """A table: few steps, distilled or not, beside the teacher's and step caches."""
    usual: dict[str, Any] = {"shift": 12.0, "guide_scale": GUIDANCE}
    cached = {"step_cache": "first_block", "step_cache_threshold": 0.2}
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "40 steps": ({}, {**usual, "sampling_steps": 40}),
        "20 steps": ({}, {**usual, "sampling_steps": 20}),
        "20 steps, `first_block` 0.2": (cached, {**usual, "sampling_steps": 20}),
        "8 steps": ({}, {**usual, "sampling_steps": 8}),
        "4 steps": ({}, {**usual, "sampling_steps": 4}),
        "4 steps, no guidance": ({}, {"shift": 12.0, "guide_scale": 1.0, "sampling_steps": 4}),
        "4 euler steps, no guidance": ({}, {"recipe": "lightning-4step"}),
        "the LoRA, 4 euler steps": ({"lora_dir": str(folder)}, {"recipe": "lightning-4step"}),
    }
    print("| Run | Colour / shape / motion, % | PSNR to the first | Seconds of denoising |")
    print("|---|---|---|---|")
    first: dict[int, Any] = {}
    for name, (loading, video) in rows.items():
        model = WanT2V("t2v-A14B", DEMO, precision="fp32", **loading)
        verdicts, seconds, like = [], [], []
        for number, scene in held_out(prompts):
            before = model._pipeline.stages.seconds.get("denoising", 0.0)
            frames: Any = model.generate(
                caption(scene),
                size=(64, 64),
                frame_num=9,
                seed=number,
                offload_model=False,
                **video,
            )
            seconds.append(model._pipeline.stages.seconds["denoising"] - before)
            clip = as_pixels(frames)
            like.append(psnr(clip, first.setdefault(number, clip)))
            verdicts.append(right(scene, look(clip)))
        found = rates(verdicts)
        marks = " / ".join(f"{found[key]:.0f}" for key in ("colour", "shape", "motion"))
        likeness = f"{np.mean(like):.1f}" if like[0] < 70 else ""
        print(f"| {name} | {marks} | {likeness} | {np.median(seconds):.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--state", type=Path, default=Path("outputs/distil"), help="folder for states and data"
    )
    parser.add_argument("--pairs", type=int, help="clips that the teacher makes")
    parser.add_argument("--expert", choices=PARTS, help="train its pairs")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--peak", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--out", type=Path, help="write the --lora_dir")
    parser.add_argument("--score", type=Path, help="a --lora_dir to compare with the teacher")
    parser.add_argument("--prompts", type=int, default=100)
    options = parser.parse_args()
    if options.score:
        score(options.score, options.prompts)
        return
    options.state.mkdir(parents=True, exist_ok=True)
    if options.pairs:
        make_pairs(options.state, options.pairs)
    if options.expert:
        train(options.state, options.expert, options.steps, options.peak)
    if options.out:
        export(options.state, options.out, "distilled")


if __name__ == "__main__":
    main()
