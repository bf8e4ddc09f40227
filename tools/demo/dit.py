"""Trains the DiTs by flow matching with the task's own timestep shift, boundary and channels.

    python -m tools.demo.dit --state STATE --task t2v-A14B --part high_noise    (and low_noise)

An expert trains on the noise levels of its side of the boundary; i2v's start from t2v's weights.
Legend: B clips, Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo.latents import CLIPS, SEED
from tools.demo.scenes import make_caption, make_random_scene
from tools.demo.text import TEXT_DIM, TEXT_LEN, load_trained_encoder, tokenize_texts
from tools.demo.training import Training, get_device, load_averaged_weights
from wan.app.flag_parser import Parser
from wan.app.programs import run_program
from wan.kernels.sdpa import SdpaKernel
from wan.modules.interfaces import ModelComponents, SingleDeviceAttention
from wan.modules.model import WanModel
from wan.settings.presets import NEGATIVE_PROMPT, PRESETS, TRAIN_TIMESTEPS, Preset
from wan.utils.torch_private import use_private_compiler_cache

CONFIG: dict[str, Any] = {
    "dim": 192,
    "eps": 1e-6,
    "ffn_dim": 384,
    "freq_dim": 256,
    "num_heads": 24,
    "num_layers": 4,
    "out_dim": 16,
    "text_dim": TEXT_DIM,
    "text_len": TEXT_LEN,
}
IN_DIM = {"t2v": 16, "i2v": 36}
SHARES = {9: 0.72, 17: 0.13, 33: 0.1, 249: 0.05}  # frames -> share of steps; 249: 1008 tokens
DROPPED = 0.1  # share of dropped captions
STEPS = {"t2v": (8500, 2e-3), "i2v": (2000, 1e-3)}  # steps and peak learning rate
TOKENS = 2048  # of a step, approximately
_SHORT = 150  # tokens


class TrainingKernel(SdpaKernel):
    """Attention with a fast backward pass on CPUs.

    Short sequences of tiny heads are fastest as plain products; long ones use PyTorch's kernel in
    float32, because its backward pass in bfloat16 is many times slower.
    """

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        if q_BSND.shape[1] > _SHORT:
            with torch.autocast(q_BSND.device.type, enabled=False):
                return super().__call__(q_BSND.float(), k_BSND.float(), v_BSND.float())
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        return (scores.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def make_dit(kind: str) -> WanModel:
    """Makes an untrained DiT, which predicts zero velocity."""
    kernel = TrainingKernel()
    collaborators = ModelComponents(lambda _: SingleDeviceAttention(kernel), kernel)
    model = WanModel(model_type=kind, in_dim=IN_DIM[kind], **CONFIG, components=collaborators)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.zeros_(model.head.head.weight)
    return model


def make_initial_dit(kind: str, part: str, state: Path) -> WanModel:
    """Makes the network that an expert's training starts from.

    i2v starts from t2v's weights, with zero weights for the channels of the image.
    """
    model = make_dit(kind)
    if kind == "i2v":
        weights = load_averaged_weights(state / f"t2v_{part}.pt")
        patches = weights["patch_embedding.weight"]
        unseen = torch.zeros(len(patches), 20, *patches.shape[2:])
        weights["patch_embedding.weight"] = torch.cat((patches, unseen), dim=1)
        model.load_state_dict(weights)
    return model


class Clips:
    """Pre-encoded clips, captions and (i2v) first frames; batches have clips of one length."""

    def __init__(self, kind: str, state: Path) -> None:
        self._latents = {n: torch.load(state / f"latents{n}.pt", mmap=True) for n in CLIPS}
        self._images = (
            {n: torch.load(state / f"images{n}.pt", mmap=True) for n in CLIPS}
            if kind == "i2v"
            else None
        )
        self._encoder = load_trained_encoder(state).to(get_device())

    def draw_batch(self, random: np.random.Generator) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Draws latents [B,Z,f,h,w], prompt embeddings and y [B,20,f,h,w] of a step."""
        frames = int(random.choice(tuple(SHARES), p=tuple(SHARES.values())))
        latents = self._latents[frames]
        tokens = latents[0, 0].numel() // 4
        num_clips = len(latents) if self._images is None else len(self._images[frames])
        rows = random.integers(num_clips, size=max(1, TOKENS // tokens))
        texts = [self._draw_caption(frames, int(row), random) for row in rows]
        chosen = torch.from_numpy(rows)
        clean = latents[chosen].float().to(get_device())
        if self._images is None:
            return clean, self.encode_captions(texts), None
        images = self._images[frames][chosen].float().to(get_device())
        return clean, self.encode_captions(texts), make_image_condition(images)

    def _draw_caption(self, frames: int, index: int, random: np.random.Generator) -> str:
        if random.random() < DROPPED:
            return "" if random.random() < 0.5 else NEGATIVE_PROMPT
        return make_caption(make_random_scene(SEED[frames], index), random)

    @torch.no_grad()
    def encode_captions(self, texts: list[str]) -> list[Tensor]:
        ids = tokenize_texts(texts).to(get_device())
        states = self._encoder(ids, (ids != 0).long()).last_hidden_state
        return [s[: int((row != 0).sum())] for s, row in zip(states, ids, strict=True)]


def make_image_condition(images_BZfhw: Tensor) -> Tensor:
    """Makes i2v's image condition: a mask of the first frame (4 channels) and its latents (16)."""
    mask = torch.zeros(len(images_BZfhw), 4, *images_BZfhw.shape[2:], device=images_BZfhw.device)
    mask[:, :, 0] = 1
    return torch.cat((mask, images_BZfhw), dim=1)


def draw_sigmas(random: np.random.Generator, count: int, preset: Preset, part: str) -> Tensor:
    """Draws sigmas, evenly spread before the shift, on the expert's side of the boundary."""
    shift, boundary = preset.sample_shift, preset.boundary or 0.0
    border = boundary / (shift - (shift - 1) * boundary)
    low, high = (border, 1.0) if part == "high_noise" else (0.0, border)
    even = (random.permutation(count) + random.random(count)) / count
    level = low + (high - low) * even
    return torch.from_numpy(shift * level / (1 + (shift - 1) * level)).float()


def compute_velocity_loss(
    model: Any, clips: Clips, preset: Preset, part: str, seed: list[int]
) -> Tensor:
    """Computes the mean squared error of the velocity (noise minus latents) of a batch."""
    random = np.random.default_rng(seed)
    clean, context, y = clips.draw_batch(random)
    noise = torch.from_numpy(random.standard_normal(clean.shape, dtype=np.float32)).to(get_device())
    sigma = draw_sigmas(random, len(clean), preset, part)
    mixed = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1, 1).to(get_device()))
    extra = None if y is None else list(y)
    tokens = clean[0, 0].numel() // 4
    with torch.autocast(get_device().type, torch.bfloat16):
        velocities = model(list(mixed), sigma * TRAIN_TIMESTEPS, context, tokens, extra)
    return F.mse_loss(torch.stack(velocities).float(), noise - clean)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder for states and data")
    parser.add_argument("--task", choices=("t2v-A14B", "i2v-A14B"), default="t2v-A14B")
    parser.add_argument("--part", choices=("high_noise", "low_noise"), required=True)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    preset, part = PRESETS[options.task], options.part
    model = make_initial_dit(preset.kind, part, options.state)
    use_private_compiler_cache()
    for block in model.blocks:
        block.compile(dynamic=False)
    file = options.state / f"{preset.kind}_{part}.pt"
    steps, peak = STEPS[preset.kind]
    training = Training(model, file, steps=steps, peak=peak)
    clips = Clips(preset.kind, options.state)
    while not training.is_finished:
        seed = [5, training.step, 0]
        training.update(compute_velocity_loss(model, clips, preset, part, seed))


if __name__ == "__main__":
    sys.exit(run_program(main))
