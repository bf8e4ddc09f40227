"""Trains the demo's causal student, which generates a video block by block in four steps.

    python -m tools.demo.causal --state STATE --clips 500
    python -m tools.demo.causal --state STATE --stage forced      (then few_step)
    python -m tools.demo.causal --state STATE --out examples/demo/causal-1.3B

A clip moves there in 81 frames, and a part of the way back. The first stage is flow matching with
teacher forcing: a sequence has the clean and the noisy tokens of a clip, and a noisy block attends
to itself and to the clean blocks before it. It starts from t2v's expert for low noise.
In the first block a shape may be anywhere, and the mean of all places is blurred: in the second
stage the student learns where the flow of the first stage ends, from each of the four noise levels.
Later blocks then follow the student's own latents, as they do in a video.
Legend: B clips of a step, N clips, Z latent channels, f h w latent frames/height/width, S tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tools.demo.distil import DEMO, encode_prompts
from tools.demo.dit import CONFIG, TrainingKernel, draw_sigmas
from tools.demo.export import SHARED_SETTINGS, link_shared
from tools.demo.render import render_scene
from tools.demo.scenes import make_caption, make_random_scene
from tools.demo.training import Training, load_averaged_weights, save_atomically
from tools.run_demo import PROMPTS
from wan import WanT2V
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.modules.interfaces import ModelComponents, SingleDeviceAttention
from wan.modules.lockstep import run_to_end
from wan.modules.model import WanModel
from wan.modules.rope import make_rope_table
from wan.modules.vae.video_vae import VideoVAE, read_vae_spec
from wan.settings.presets import PRESETS
from wan.settings.values import integer
from wan.testing.random_checkpoint import write_json
from wan.utils.files import write_folder
from wan.utils.torch_private import use_private_compiler_cache

FRAMES, RETURN, SEED = 81, 24, 5000  # frames of a motion, and of the way back
SIZE, WINDOW = 3, 3  # latent frames of a block; blocks to which a token attends
NUM_BLOCKS = (FRAMES + RETURN + 3) // 4 // SIZE  # of a clip
BLOCK_TOKENS, BATCH, GROUP = 48, 4, 64  # clips of a step; first blocks that are computed at once
NUM_ENDS, SUBSTEPS = 2048, 4  # first blocks in all; Euler steps from a noise level to the next
LEVELS = (1.0, 0.9375, 5 / 6, 0.625)  # of the sampler `dmd`
STEPS = {"forced": (750, 1e-3), "few_step": (800, 8e-4)}  # steps and peak learning rate
SETTINGS: dict[str, Any] = {
    "size": SHARED_SETTINGS["size"],
    "frame_num": FRAMES,
    "local_attn_size": SIZE * WINDOW,
    "fps": 16,
    "prompt": PROMPTS[0],
}


@torch.inference_mode()
def encode_clips(state: Path, count: int) -> None:
    """Writes the latents of the training clips, float16 [N,16,27,8,8], unless they exist."""
    file = state / "causal_clips.pt"
    if file.exists():
        return
    spec = read_vae_spec(DEMO / "Wan2.1_VAE.safetensors")
    vae = VideoVAE(spec.load(device=torch.device("cpu"), dtype_of=lambda *_: torch.bfloat16))
    order = [*range(FRAMES), *range(FRAMES - 2, FRAMES - 2 - RETURN, -1)]
    clips = []
    for index in range(count):
        video = torch.from_numpy(render_scene(make_random_scene(SEED, index), FRAMES, 64)[order])
        clips.append(vae.encode((video.permute(3, 0, 1, 2) / 127.5 - 1).bfloat16()).half())
    save_atomically(torch.stack(clips), file)


class BlockCausalKernel(TrainingKernel):
    """Attention of clean and noisy blocks to themselves and to the clean blocks before them.

    A sequence of one block has no earlier one; keys of another length are those of the text.
    """

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        is_text = k_BSND.shape[1] == CONFIG["text_len"]
        if is_text or q_BSND.shape[1] == BLOCK_TOKENS:
            rows = q_BSND.unflatten(1, (-1, BLOCK_TOKENS))
            k, v = (x[:, None].expand(-1, rows.shape[1], -1, -1, -1) for x in (k_BSND, v_BSND))
            out = super().__call__(*(x.flatten(0, 1) for x in (rows, k, v)))
            return out.unflatten(0, rows.shape[:2]).flatten(1, 2)
        q, k, v = (x.unflatten(1, (2, -1, BLOCK_TOKENS)) for x in (q_BSND, k_BSND, v_BSND))
        outputs = []
        for block in range(q.shape[2]):
            earlier = slice(max(0, block + 1 - WINDOW), block)
            keys, values = (
                torch.cat((x[:, :1, earlier].flatten(2, 3).expand(-1, 2, -1, -1, -1), own), dim=2)
                for x, own in ((k, k[:, :, block]), (v, v[:, :, block]))
            )
            rows = (x.flatten(0, 1) for x in (q[:, :, block], keys, values))
            outputs.append(super().__call__(*rows).unflatten(0, (-1, 2)))
        return torch.stack(outputs, dim=2).flatten(1, 3)


class TeacherForcedModel(WanModel):
    """Wan's network on the clean and the noisy blocks of clips at once."""

    def __init__(self) -> None:
        kernel = BlockCausalKernel()
        components = ModelComponents(lambda _: SingleDeviceAttention(kernel), kernel)
        super().__init__("t2v", in_dim=16, **CONFIG, components=components)

    def _embed_timesteps(self, *args: Any) -> tuple[Tensor, tuple[int, ...]]:
        """Embeds the timestep of each token, which all clips share."""
        e_BRC, lengths = super()._embed_timesteps(*args)
        return e_BRC.repeat_interleave(torch.tensor(lengths), dim=1), (sum(lengths),)

    def predict(
        self, clean: Tensor | None, noisy: Tensor, sigma: Tensor, text: list[Tensor]
    ) -> Tensor:
        """Predicts the velocities of the noisy latents of at least two clips, [B,Z,f,h,w].

        Args:
            clean: Latents of the clips; None: the noisy ones are first blocks.
            sigma: Noise levels of the blocks, which all clips share, or [B] of first blocks.
        """
        frames, (height, width) = [*range(noisy.shape[2])], noisy.shape[3:]
        x, t = noisy, sigma * 1000
        if clean is not None:
            x = torch.cat((clean, noisy), dim=2)
            t = F.pad(t, (len(t), 0)).repeat_interleave(BLOCK_TOKENS)[None]
        positions = frames * (x.shape[2] // len(frames)), height // 2, width // 2
        rope = make_rope_table(positions, self.dim // self.num_heads)
        stream = replace(self._make_stream(self.token_grid(x.shape[2:]), x.device), rope=rope)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.training):
            velocities = run_to_end(self._iterate_forward(x, t, text, None, None, stream))
        return velocities[:, :, -len(frames) :].float()


def make_model(weights: dict[str, Tensor]) -> TeacherForcedModel:
    """Makes a network with compiled blocks."""
    model = TeacherForcedModel()
    model.load_state_dict({name: x.float() for name, x in weights.items()})
    use_private_compiler_cache()
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


def draw_noise(random: np.random.Generator, shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(random.standard_normal(tuple(shape), dtype=np.float32))


class Clips:
    """The latents of the training clips, and their prompts in random wordings."""

    def __init__(self, state: Path) -> None:
        self._latents = torch.load(state / "causal_clips.pt", mmap=True)
        self._model = WanT2V("t2v-A14B", DEMO, precision="fp32")

    def draw(self, random: np.random.Generator, count: int) -> tuple[Tensor, list[Tensor]]:
        """Draws latents [B,Z,f,h,w] and prompt embeddings."""
        rows = random.integers(len(self._latents), size=count)
        return self._latents[torch.from_numpy(rows)].float(), self.encode_prompts(rows, random)

    @torch.no_grad()
    def encode_prompts(self, rows: Any, random: np.random.Generator) -> list[Tensor]:
        """Encodes the prompts of scenes."""
        texts = [make_caption(make_random_scene(SEED, int(row)), random) for row in rows]
        return encode_prompts(self._model, texts)


def compute_forced_losses(
    model: TeacherForcedModel,
    clips: Clips,
    random: np.random.Generator,
    levels: Tensor,
    last_level: float | None = None,
) -> Tensor:
    """Computes the squared errors of the velocities of a batch, [B,Z,f,h,w].

    Args:
        levels: Noise levels of the blocks.
        last_level: Take the student's clean latents from this noise level as earlier blocks; None:
            take those of the clips with a little noise, since in a video they are not exact either.
    """
    clean, text = clips.draw(random, BATCH)
    if last_level is None:
        context = torch.lerp(clean, draw_noise(random, clean.shape), 0.15 * random.random())
    else:
        noisy = torch.lerp(clean, draw_noise(random, clean.shape), last_level)
        with torch.no_grad():
            velocities = model.predict(clean, noisy, torch.full_like(levels, last_level), text)
        context = noisy - last_level * velocities
    noise = draw_noise(random, clean.shape)
    sigma = levels.repeat_interleave(SIZE).view(-1, 1, 1)
    velocities = model.predict(context, torch.lerp(clean, noise, sigma), levels, text)
    return (velocities - (noise - clean)).square()


def train_forced(state: Path) -> None:
    """Trains by flow matching with teacher forcing, from the weights of a network of t2v."""
    model = make_model(load_file(DEMO / "low_noise_model" / "diffusion_pytorch_model.safetensors"))
    steps, peak = STEPS["forced"]
    training = Training(model, state / "causal_forced.pt", steps=steps, peak=peak)
    clips = Clips(state)
    while not training.is_finished:
        random = np.random.default_rng([8, training.step])
        levels = draw_sigmas(random, NUM_BLOCKS, PRESETS["causal-1.3B"], "high_noise")  # all levels
        training.update(compute_forced_losses(model, clips, random, levels).mean())


@torch.no_grad()
def follow_flow(model: TeacherForcedModel, texts: list[Tensor], file: Path) -> Tensor:
    """Returns first blocks at the four levels and at the end of the flow, [N,5,Z,3,8,8]."""
    if file.exists():
        return torch.load(file, mmap=True)
    trajectories = []
    for first in range(0, NUM_ENDS, GROUP):
        x = draw_noise(np.random.default_rng([9, first]), (GROUP, 16, SIZE, 8, 8))
        trajectory = [x]
        for level, next_level in zip(LEVELS, (*LEVELS[1:], 0.0), strict=True):
            grid = np.linspace(level, next_level, SUBSTEPS + 1)
            for sigma, next_sigma in zip(grid, grid[1:], strict=False):
                text = texts[first : first + GROUP]
                velocity = model.predict(None, x, torch.full((GROUP,), sigma), text)
                x = x + (next_sigma - sigma) * velocity
            trajectory.append(x)
        trajectories.append(torch.stack(trajectory, dim=1))
    save_atomically(torch.cat(trajectories), file)
    return torch.cat(trajectories)


def train_few_step(state: Path) -> None:
    """Trains first blocks on the ends of the flow, and later blocks as before, at four levels."""
    clips, model = Clips(state), make_model(load_averaged_weights(state / "causal_forced.pt"))
    texts = clips.encode_prompts(range(NUM_ENDS), np.random.default_rng(9))
    blocks = follow_flow(model, texts, state / "causal_ends.pt")
    steps, peak = STEPS["few_step"]
    training = Training(model, state / "causal_few_step.pt", steps=steps, peak=peak)
    while not training.is_finished:
        random = np.random.default_rng([10, training.step])
        levels = torch.from_numpy(random.choice(LEVELS, size=NUM_BLOCKS)).float()
        losses = compute_forced_losses(model, clips, random, levels, LEVELS[-1])
        row, level = torch.from_numpy(random.integers((NUM_ENDS, len(LEVELS)), size=(32, 2))).T
        x, sigma = blocks[row, level], torch.tensor(LEVELS)[level]
        velocities = model.predict(None, x, sigma, [texts[n] for n in row])
        wanted = (x - blocks[row, -1]) / sigma.view(-1, 1, 1, 1, 1)
        training.update(losses[:, :, SIZE:].mean() + F.mse_loss(velocities, wanted))


def export_student(state: Path, out: Path) -> None:
    """Writes a new checkpoint folder; the student has the names of Self-Forcing's file."""
    weights = load_averaged_weights(state / "causal_few_step.pt")
    student = {f"model.{name}": x.bfloat16().clone() for name, x in weights.items()}
    with write_folder(out) as unfinished:
        torch.save({"generator_ema": student}, unfinished / "self_forcing_dmd.pt")
        link_shared(unfinished)
        config = {"_class_name": "WanModel", **CONFIG, "in_dim": 16, "model_type": "t2v"}
        write_json(unfinished / "config.json", config)
        write_json(unfinished / "generation_config.json", SETTINGS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder for states and data")
    count = make_argument_type(integer(1, 10_000_000))
    parser.add_argument("--clips", type=count, help="encode this number of clips")
    parser.add_argument("--stage", choices=STEPS, help="train this stage")
    parser.add_argument("--out", type=Path, help="write the checkpoint folder")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    options.state.mkdir(parents=True, exist_ok=True)
    if options.clips:
        encode_clips(options.state, options.clips)
    if options.stage:
        {"forced": train_forced, "few_step": train_few_step}[options.stage](options.state)
    if options.out:
        export_student(options.state, options.out)


if __name__ == "__main__":
    sys.exit(run_program(main))
