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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.demo.evaluate import format_run_rows
from tools.demo.scenes import make_caption, make_random_scene
from tools.demo.training import Training, load_averaged_weights, save_atomically
from wan import WanT2V
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import integer
from wan.utils.files import check_output, make_safetensors_kind, write_output

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "t2v-A14B"
RANK, SUBSTEPS, GUIDANCE, SEED = 32, 12, 3.0, 4000
BATCH, TOKENS = 32, 48  # clips per step; tokens of 9 frames of 64 x 64
LAYERS = [f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"]
LAYERS += ["ffn.0", "ffn.2"]
SHAPE = (16, 3, 8, 8)  # latents of 9 frames of 64 x 64
LEVELS = [5 * x / (1 + 4 * x) for x in (1.0, 0.75, 0.5, 0.25, 0.0)]  # euler's sigmas, shift 5
PARTS = {"high_noise": (0, 1), "low_noise": (2, 3)}  # indices of each expert's levels
_MARK = {"tools.demo": "a LoRA of the demo"}
LORA = make_safetensors_kind("a LoRA of tools.demo", *_MARK)


class Lora(nn.Module):
    """A frozen linear layer with a trainable pair of matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def add_lora(model: Any, expert: str, rank: int) -> Any:
    """Adds a LoRA to every linear layer of an expert's blocks; freezes all other weights."""
    network = (model.high_noise_model if expert == "high_noise" else model.low_noise_model).float()
    network.requires_grad_(False)
    for block in network.blocks:
        for layer in LAYERS:
            block.set_submodule(layer, Lora(block.get_submodule(layer), rank))
    return network


def load_teacher() -> Any:
    return WanT2V("t2v-A14B", DEMO, precision="fp32")


def encode_prompts(model: Any, texts: list[str]) -> list[Tensor]:
    """Encodes each text to prompt embeddings."""
    encoder = model._pipeline.text_encoder.get()
    return [encoder(text) for text in texts]


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


def train_distilled_lora(state: Path, part: str) -> None:
    """Trains a LoRA on the velocities from each of the expert's levels straight to the next."""
    torch.manual_seed(0)
    model = load_teacher()
    network = add_lora(model, part, RANK)
    trajectories = torch.load(state / "passed.pt", mmap=True)
    texts = encode_prompts(model, [make_prompt(i) for i in range(len(trajectories))])
    training = Training(network, state / f"distilled_{part}.pt", steps=2500, peak=2e-3)
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


def export_lora(state: Path, out: Path) -> None:
    """Writes both files of a --lora_dir, in bfloat16, with the layer names of LightX2V."""
    for part in PARTS:
        check_output(out / f"{part}_model.safetensors", LORA, "--out")
    for part in PARTS:
        weights = load_averaged_weights(state / f"distilled_{part}.pt")
        tensors = {
            f"diffusion_model.{name.removesuffix(f'.{end}.weight')}.lora_{end}.weight": tensor
            for name, tensor in weights.items()
            for end in ("down", "up")
            if name.endswith(f".{end}.weight")
        }
        with write_output(out / f"{part}_model.safetensors", LORA) as temporary:
            save_file(
                {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()},
                temporary,
                metadata=_MARK,
            )


def score_distilled(folder: Path) -> None:
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
    for line in format_run_rows(runs, 100):
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--state", type=Path, default=Path("outputs/distilled"), help="folder for states and data"
    )
    parser.add_argument(
        "--clips",
        type=make_argument_type(integer(1, 10_000_000)),
        help="make the data of this number of clips",
    )
    parser.add_argument("--expert", choices=PARTS, help="train the LoRA of this expert")
    parser.add_argument("--out", type=Path, help="write the --lora_dir")
    parser.add_argument("--score", type=Path, help="a --lora_dir to compare with none")
    options = parser.parse_args(argv)
    if options.score:
        score_distilled(options.score)
        return
    options.state.mkdir(parents=True, exist_ok=True)
    if options.clips:
        encode_trajectories(options.state, options.clips)
    if options.expert:
        train_distilled_lora(options.state, options.expert)
    if options.out:
        export_lora(options.state, options.out)


if __name__ == "__main__":
    sys.exit(run_program(main))
