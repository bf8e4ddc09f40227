"""Teaches the demo checkpoint to continue a video clip by clip, as a LoRA for each i2v expert.

    python -m tools.demo.chain --state STATE --clips 1800
    python -m tools.demo.chain --state STATE --expert high_noise    (and low_noise)
    python -m tools.demo.chain --state STATE --out examples/demo/I2V-A14B-chain-lora
    python -m tools.demo.chain --score examples/demo/I2V-A14B-chain-lora --prompts 10

A clip's condition is that of SVI 2.0 Pro: the picture, the last latent of the previous clip, and a
mask of the picture alone. In training that latent is perturbed by noise, which simulates the
network's errors. A video is one shape that moves from corner to corner, along one side in each
clip. The scores compare videos of twenty clips with the plain chain, in which a clip begins with
the previous one's last frame, and draw both as strips (docs/long_videos.png): the picture and the
last frame of each clip, in pairs.
Legend: N clips, B clips of a step, Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

from tools.demo.dit import draw_sigmas
from tools.demo.evaluate import to_pixels
from tools.demo.last_image import load_base_model
from tools.demo.lora import add_lora, encode_prompts, run_training_program
from tools.demo.outputs import PICTURE as MARKED
from tools.demo.outputs import save_labelled_strips
from tools.demo.render import render_scene
from tools.demo.scenes import (
    BACKGROUNDS,
    COLOURS,
    REACH,
    SHAPES,
    SIZES,
    Actor,
    Scene,
    is_held_out,
    make_caption,
)
from tools.demo.score import find_foreground, find_largest_part
from tools.demo.training import Training, save_atomically
from wan.settings.presets import PRESETS
from wan.utils.files import check_output

FRAMES, TOKENS, CLIPS, BATCH = 17, 80, 3, 24  # per clip (2), clips of a training video, per step
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "long_videos.png"
RANK, SEED, DROPPED, BLUR = 16, 6000, 0.1, 0.3
LONG, REPORTED_CLIPS = (
    20,
    (1, 2, 5, 10, 20),
)  # clips of a scored video; clips whose drift is printed
Pixels = NDArray[np.uint8]


def make_clip_scenes(seed: int, index: int, count: int) -> list[Scene]:
    """Makes the scenes of a video's clips: a shape moves from corner to corner, along one side."""
    random = np.random.default_rng([seed, index])
    while True:
        colour, shape = str(random.choice(COLOURS)), str(random.choice(SHAPES))
        size, background = str(random.choice(tuple(SIZES))), str(random.choice(BACKGROUNDS))
        actor = Actor(shape, colour, size, "left", (0, 0), (0, 0))
        if is_held_out(Scene(background, (actor,))) == (seed != SEED):
            break
    far = (0.49 - SIZES[size] * REACH) * random.uniform(0.7, 0.95)
    corner = [int(random.choice((-1, 1))) for _ in range(2)]
    scenes = []
    for _ in range(count):
        axis, start = int(random.integers(2)), tuple(0.5 + far * side for side in corner)
        motion = (("right", "left"), ("down", "up"))[axis][corner[axis] > 0]
        corner[axis] = -corner[axis]
        end = tuple(0.5 + far * side for side in corner)
        clip_actor = replace(actor, motion=motion, start=(start[0], start[1]), end=(end[0], end[1]))
        scenes.append(Scene(background, (clip_actor,)))
    return scenes


def draw_clips(clips: list[Scene]) -> Iterator[Pixels]:
    """Renders each clip, [FRAMES,H,W,3]; later ones begin with the picture and four old frames."""
    picture, previous = None, None
    for scene in clips:
        if picture is None or previous is None:
            frames = render_scene(scene, FRAMES, 64)
            picture = frames[:1]
        else:
            new = render_scene(scene, FRAMES - 4, 64)[
                1:
            ]  # its first frame repeats the previous one
            frames = np.concatenate((picture, previous[-4:], new))
        yield frames
        previous = frames


@torch.inference_mode()
def encode_chain_clips(state: Path, count: int) -> None:
    """Writes latents of clips [N,16,f,h,w], CLIPS of each video, unless the file exists."""
    file = state / "chain.pt"
    if file.exists():
        return
    encode, clean = load_base_model()._pipeline.vae.get().encode, []
    for index in range(count // CLIPS):
        for frames in draw_clips(make_clip_scenes(SEED, index, CLIPS)):
            video = torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 127.5 - 1
            clean.append(encode(video))
    save_atomically(torch.stack(clean), file)


def train_chain_lora(state: Path, part: str, steps: int, peak: float) -> None:
    """Trains a LoRA by flow matching as in `tools.demo.dit`, with the condition of SVI 2.0 Pro."""
    torch.manual_seed(0)
    model = load_base_model()
    network = add_lora(model, part, RANK)
    clean = torch.load(state / "chain.pt", mmap=True)
    texts = [
        make_caption(scene, np.random.default_rng([SEED, index, clip]))
        for index in range(len(clean) // CLIPS)
        for clip, scene in enumerate(make_clip_scenes(SEED, index, CLIPS))
    ]
    prompt_embeds = encode_prompts(model, [*texts, ""])
    training = Training(network, state / f"chain_{part}.pt", steps=steps, peak=peak)
    while not training.is_finished:
        random = np.random.default_rng([8, training.step])
        rows = torch.from_numpy(random.integers(len(clean), size=BATCH))
        noise = torch.from_numpy(random.standard_normal(clean[rows].shape, dtype=np.float32))
        sigma = draw_sigmas(random, BATCH, PRESETS["i2v-A14B"], part)
        x = torch.lerp(clean[rows], noise, sigma.view(-1, 1, 1, 1, 1))
        y = torch.zeros(BATCH, 20, *clean.shape[2:])
        y[:, :4, 0] = 1
        y[:, 4:, 0] = clean[rows, :, 0]
        later = rows % CLIPS > 0
        motion = clean[rows[later] - 1][:, :, -1]
        blur = torch.from_numpy(random.random((len(motion), 1, 1, 1), dtype=np.float32)) * BLUR
        error = torch.from_numpy(random.standard_normal(motion.shape, dtype=np.float32))
        y[later, 4:, 1] = motion + blur * error
        text = [prompt_embeds[-1 if random.random() < DROPPED else row] for row in rows.tolist()]
        velocities = network(list(x), 1000 * sigma, text, TOKENS, list(y))
        training.update(F.mse_loss(torch.stack(velocities), noise - clean[rows]))


def score_chain(folder: Path, videos: int) -> None:
    """Prints the drift of videos of twenty clips with the LoRA, and of the plain chain."""
    check_output(PICTURE, MARKED, "The picture")
    print("| Chain | Clips | Colour | Background | Area | Wrong ways, % | Jump at a join, pixels |")
    print("|---|---|---|---|---|---|---|")
    strips = []
    for name, loading in (("last latent, LoRA", {"lora_dir": str(folder)}), ("last frame", {})):
        model, drifts = load_base_model(**loading), []
        for number in range(videos):
            clips = make_clip_scenes(SEED + 1, number, LONG)
            frames = generate_long_video(model, clips, number, bool(loading))
            drifts.append(_measure_drift(frames, clips, 5 if loading else 1))
            strips.append(_make_clip_strip(frames, 5 if loading else 1))
        means = np.mean(drifts, axis=0)
        for after in REPORTED_CLIPS:
            colour, background, area, wrong, jump = means[after - 1]
            jumped = f"{jump:.1f}" if after > 1 else ""
            print(
                f"| {name} | {after} | {colour:.0f} | {background:.0f} | {area:.2f} "
                f"| {100 * wrong:.0f} | {jumped} |",
                flush=True,
            )
    groups = [
        (
            f"Video {number + 1}: its image, then the last frame of each clip, 1 to {LONG}",
            [("last latent, LoRA", strips[number]), ("last frame", strips[videos + number])],
        )
        for number in range(min(videos, 4))
    ]
    save_labelled_strips(groups, PICTURE)


def generate_long_video(model: Any, clips: list[Scene], seed: int, latents: bool) -> Pixels:
    """Generates a video of twenty clips, [F,H,W,3]."""
    video = model.generate(
        "",
        Image.fromarray(next(draw_clips(clips))[0]),
        max_area=64 * 64,
        frame_num=FRAMES,
        seed=seed,
        sampling_steps=20,
        guide_scale=1.0,
        offload_model=False,
        chain="latent" if latents else "frame",
        clip_prompts=[make_caption(scene) for scene in clips],
    )
    return to_pixels(video)


def _measure_drift(
    frames: Pixels, clips: list[Scene], num_overlap_frames: int
) -> NDArray[np.floating[Any]]:
    """Measures each clip: distances of colours (0 to 441), ratio of areas, wrong way, jump."""
    masks = np.stack(
        [find_largest_part(mask) for mask in find_foreground(frames.astype(np.float32))]
    )
    ends = FRAMES + (FRAMES - num_overlap_frames) * np.arange(
        len(clips)
    )  # of each clip, in the video
    first, rows = 0, []
    picture = _measure_frame(frames[0], masks[0])
    for scene, end in zip(clips, ends, strict=True):
        last = _measure_frame(frames[end - 1], masks[end - 1])
        colour, background = (np.linalg.norm(last[n] - picture[n]) for n in (0, 1))
        start, stop = _locate_shape(masks[max(first - 1, 0)]), _locate_shape(masks[end - 1])
        actor = scene.actors[0]
        displacement = np.array(actor.end) - np.array(actor.start)
        right = float(np.dot(stop - start, displacement)) > 0.3 * 64 * float(
            displacement @ displacement
        )
        steps = np.linalg.norm(
            np.diff([_locate_shape(m) for m in masks[max(first - 1, 0) : end]], axis=0), axis=1
        )
        jump = max(steps[0] - np.median(steps), 0.0) if first else 0.0
        rows.append((colour, background, last[2] / picture[2], not right, jump))
        first = int(end)
    return np.array(rows)


def _measure_frame(frame: Pixels, mask: NDArray[np.bool_]) -> tuple[Any, Any, float]:
    """Measures the mean colours of the shape and the background, and the shape's area."""
    shape = frame[mask].mean(0) if mask.any() else np.zeros(3)
    return shape, frame[~mask].mean(0), float(mask.sum())


def _locate_shape(mask: NDArray[np.bool_]) -> NDArray[np.floating[Any]]:
    rows, columns = np.nonzero(mask)
    return np.array([columns.mean(), rows.mean()]) if len(rows) else np.full(2, np.nan)


def _make_clip_strip(frames: Pixels, num_overlap_frames: int) -> Pixels:
    """Draws the picture and the last frame of every clip, side by side."""
    indices = [0, *(FRAMES - 1 + (FRAMES - num_overlap_frames) * np.arange(LONG))]
    return np.concatenate([frames[index] for index in indices], axis=1)


if __name__ == "__main__":
    sys.exit(
        run_training_program(
            (__doc__ or "").splitlines()[0],
            "chain",
            encode_chain_clips,
            train_chain_lora,
            score_chain,
            steps=1500,
        )
    )
