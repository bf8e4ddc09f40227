"""Teaches the demo checkpoint to follow a video and its mask: VACE blocks for both t2v experts.

    python -m tools.demo.vace --state STATE --clips 3000
    python -m tools.demo.vace --state STATE --expert high_noise    (and low_noise)
    python -m tools.demo.vace --state STATE --out examples/demo/vace-A14B
    python -m tools.demo.vace --score examples/demo/vace-A14B --prompts 50

The t2v networks stay frozen; control blocks are initialized from their blocks. A clip has one of
three tasks. "replace": a shape moves along a curve, the mask is a box around it, and in the box the
source has another shape. "path": the same with a gray box. "frames": some frames are given, the
others are gray and masked. The scores use held-out combinations of words; docs/vace.png has some of
their clips: the source, its mask, the video.
Legend: N clips, Z latent channels, f h w latent frames/height/width, F H W pixels.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tools.demo.dit import CONFIG, TrainingKernel, draw_sigmas
from tools.demo.evaluate import compute_psnr, to_pixels
from tools.demo.lora import TOKENS, encode_prompts, run_training_program
from tools.demo.outputs import PICTURE as MARKED
from tools.demo.outputs import remove_export, save_labelled_strips
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
    make_random_scene,
)
from tools.demo.score import detect_shapes, find_foreground, find_largest_part
from tools.demo.training import Training, load_averaged_weights, save_atomically
from wan import WanT2V, WanVace
from wan.media.video_writer import write_video
from wan.modules.interfaces import ModelComponents, SingleDeviceAttention
from wan.modules.vace import VaceWanModel
from wan.settings.command import Output
from wan.settings.presets import PRESETS
from wan.tasks.vace import fold_mask_to_vace_channels
from wan.testing.random_checkpoint import write_json
from wan.utils.files import check_output, write_folder
from wan.utils.torch_private import use_private_compiler_cache

REPO = Path(__file__).resolve().parents[2]
DEMO, PICTURE = REPO / "examples" / "demo" / "t2v-A14B", REPO / "docs" / "vace.png"
LAYERS, FRAMES, SIDE, BATCH = (0, 2), 9, 64, 32
SEED, DROPPED, GREY, EXAMPLE = 7000, 0.1, 128, 5
TASKS = {"replace": 0.35, "path": 0.25, "frames": 0.4}  # shares of the training clips
PICTURED_CLIPS = {"replace": (1, 5), "path": (2,), "frames": (0, 1)}  # clips in the picture
CONDITION_FRAMES = ((0,), (8,), (0, 8), (0, 1, 2, 3, 4), (0, 4, 8))  # indices of the given frames
_DIT, _VACE = "diffusion_pytorch_model.safetensors", "vace.safetensors"
OTHER_FILES = ["google/umt5-xxl"]  # files and links of its folder that are not in `EXPORTED`
OTHER_FILES += [f"{part}_model/{_VACE}" for part in ("high_noise", "low_noise")]
OTHER_FILES += [f"{part}_model/{_DIT}.index.json" for part in ("high_noise", "low_noise")]
_CONTROL_PREFIXES = ("vace_blocks.", "vace_patch_embedding.")
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ControlledClip:
    """A clip with its control inputs.

    Attributes:
        text: Prompt.
        source: Control video, [F,H,W,3].
        mask: [F,H,W], 255 where the video is generated.
        wanted: Target video, [F,H,W,3].
        actor: Shape in the target video.
    """

    text: str
    source: Pixels
    mask: Pixels
    wanted: Pixels
    actor: Actor


def make_clip(task: str, seed: int, index: int) -> ControlledClip:
    """Makes clip number `index` of a task; seeds other than SEED make held-out clips."""
    random = np.random.default_rng([seed, index])
    if task == "frames":
        return _make_frames_clip(seed, index, random)
    while True:
        background, actor = str(random.choice(BACKGROUNDS)), _draw_actor(random)
        if is_held_out(Scene(background, (actor,))) == (seed != SEED):
            break
    room = 0.49 - SIZES[actor.size] * REACH
    curve = _draw_curve(random, room)
    wanted = _render_along(background, actor, curve)
    half = SIZES[actor.size] * REACH + random.uniform(0.01, 0.06)
    pixel = (np.arange(SIDE) + 0.5) / SIDE
    x_F, y_F = (abs(pixel - curve[:, axis, None]) < half for axis in range(2))
    mask = np.where(y_F[:, :, None] & x_F[:, None, :], 255, 0).astype(np.uint8)
    if task == "replace":
        other = replace(_draw_actor(random), size="small" if random.random() < 0.5 else actor.size)
        source = _render_along(background, other, curve)
    else:
        source = np.where(mask[..., None] > 0, np.uint8(GREY), wanted)
    text = f"a {actor.size} {actor.colour} {actor.shape} on a {background} background"
    return ControlledClip(text, source, mask, wanted, actor)


def _make_frames_clip(seed: int, index: int, random: np.random.Generator) -> ControlledClip:
    scene = make_random_scene(seed, index, held_out=seed != SEED)
    wanted = render_scene(scene, FRAMES, SIDE)
    mask = np.full(wanted.shape[:3], 255, np.uint8)
    mask[list(CONDITION_FRAMES[int(random.integers(len(CONDITION_FRAMES)))])] = 0
    source = np.where(mask[..., None] > 0, np.uint8(GREY), wanted)
    return ControlledClip(make_caption(scene), source, mask, wanted, scene.actors[0])


def _draw_actor(random: np.random.Generator) -> Actor:
    colour, shape = str(random.choice(COLOURS)), str(random.choice(SHAPES))
    return Actor(shape, colour, str(random.choice(tuple(SIZES))), "path", (0, 0), (0, 0))


def _draw_curve(random: np.random.Generator, room: float) -> NDArray[np.floating[Any]]:
    """Draws the centre in each frame, [F,2]: a Bezier curve of three points, not all close."""
    while True:
        a, b, c = random.uniform(0.5 - room, 0.5 + room, (3, 2))
        if np.linalg.norm(c - a) + np.linalg.norm(b - a) > 1.5 * room:
            break
    t = np.linspace(0, 1, FRAMES)[:, None]
    curve: NDArray[np.floating[Any]] = (1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c
    return curve


def _render_along(background: str, actor: Actor, curve: NDArray[np.floating[Any]]) -> Pixels:
    scenes = (
        Scene(background, (replace(actor, start=(x, y), end=(x, y)),)) for x, y in curve.tolist()
    )
    return np.concatenate([render_scene(scene, 1, SIDE) for scene in scenes])


def draw_tasks(count: int) -> list[str]:
    """Draws the tasks of a number of training clips."""
    return [
        str(task) for task in np.random.default_rng(0).choice([*TASKS], count, p=[*TASKS.values()])
    ]


@torch.inference_mode()
def encode_control_clips(state: Path, count: int) -> None:
    """Writes latents [N,3,16,f,h,w] (target, inactive, reactive) and masks [N,F,H,W] once."""
    file = state / "vace.pt"
    if file.exists():
        return
    encode, latents, masks = _load_t2v_model()._pipeline.vae.get().encode, [], []
    for index, task in enumerate(draw_tasks(count)):
        control_clip = make_clip(task, SEED, index)
        mask = torch.from_numpy(control_clip.mask) > 0
        wanted, source = (
            torch.from_numpy(p).permute(3, 0, 1, 2) / 127.5 - 1
            for p in (control_clip.wanted, control_clip.source)
        )
        parts = (wanted, source * ~mask, source * mask)
        latents.append(torch.stack([encode(part) for part in parts]).half())
        masks.append(mask)
    save_atomically((torch.stack(latents), torch.stack(masks)), file)


def _load_t2v_model() -> Any:
    return WanT2V("t2v-A14B", DEMO, precision="fp32")


def make_vace_model(part: str) -> VaceWanModel:
    """Makes a frozen t2v expert with trainable control blocks, whose hints are zero at first."""
    kernel = TrainingKernel()
    collaborators = ModelComponents(lambda _: SingleDeviceAttention(kernel), kernel)
    model = VaceWanModel(LAYERS, **CONFIG, in_dim=16, components=collaborators)
    model.load_state_dict(load_file(DEMO / f"{part}_model" / _DIT), strict=False)
    blocks: Any = model.vace_blocks
    for layer, block in zip(LAYERS, blocks, strict=True):
        block.load_state_dict(model.blocks[layer].state_dict(), strict=False)
        torch.nn.init.zeros_(block.after_proj.weight)
        torch.nn.init.zeros_(block.after_proj.bias)
    torch.nn.init.eye_(blocks[0].before_proj.weight)
    torch.nn.init.zeros_(blocks[0].before_proj.bias)
    torch.nn.init.xavier_uniform_(model.vace_patch_embedding.weight.flatten(1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(_CONTROL_PREFIXES))
    return model


def train_control_blocks(state: Path, part: str, steps: int, peak: float) -> None:
    """Trains the control blocks by flow matching as in `tools.demo.dit`."""
    torch.manual_seed(0)
    latents, masks = torch.load(state / "vace.pt", mmap=True)
    texts = [
        make_clip(task, SEED, index).text for index, task in enumerate(draw_tasks(len(latents)))
    ]
    prompt_embeds = encode_prompts(_load_t2v_model(), [*texts, ""])
    model = make_vace_model(part)
    use_private_compiler_cache()
    for block in model.blocks:
        block.compile(dynamic=False)
    training = Training(model, state / f"vace_{part}.pt", steps=steps, peak=peak)
    while not training.is_finished:
        random = np.random.default_rng([9, training.step])
        rows = torch.from_numpy(random.integers(len(latents), size=BATCH))
        clean, inactive, reactive = latents[rows].float().unbind(1)
        mask_latents = [
            fold_mask_to_vace_channels(masks[row].float(), clean.shape[2:]) for row in rows
        ]
        control = torch.cat((inactive, reactive, torch.stack(mask_latents)), dim=1)
        noise = torch.from_numpy(random.standard_normal(clean.shape, dtype=np.float32))
        sigma = draw_sigmas(random, BATCH, PRESETS["vace-A14B"], part)
        x = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1, 1))
        text = [prompt_embeds[-1 if random.random() < DROPPED else row] for row in rows.tolist()]
        with torch.autocast("cpu", torch.bfloat16):
            velocities = model(list(x), 1000 * sigma, list(control), text, TOKENS)
        training.update(F.mse_loss(torch.stack(velocities).float(), noise - clean))


def export_vace(state: Path, out: Path, trained: str) -> None:
    """Writes a checkpoint folder: links to t2v's files, and an index that adds control blocks."""
    remove_export(out, OTHER_FILES)
    with write_folder(out) as unfinished:
        _write_export(state, unfinished, trained)
    write_control_files(_make_example_clip(), REPO / "examples" / "control")


def _make_example_clip() -> ControlledClip:
    """Makes the clip of the exported settings and of examples/control."""
    return make_clip("replace", SEED + 1, EXAMPLE)


def _write_export(state: Path, out: Path, trained: str) -> None:
    shared = Path("..") / DEMO.name
    (out / "google").mkdir()
    (out / "google" / "umt5-xxl").symlink_to(Path("..") / shared / "google" / "umt5-xxl")
    for file in ("Wan2.1_VAE.safetensors", "models_t5_umt5-xxl-enc-bf16.safetensors"):
        (out / file).symlink_to(shared / file)
    for part in ("high_noise", "low_noise"):
        weights = load_averaged_weights(state / f"{trained}_{part}.pt")
        control_weights = {
            n: t.bfloat16().contiguous()
            for n, t in weights.items()
            if n.startswith(_CONTROL_PREFIXES)
        }
        folder = out / f"{part}_model"
        folder.mkdir()
        save_file(control_weights, folder / _VACE, metadata={"format": "pt"})
        linked = shared / folder.name / _DIT
        (folder / _DIT).symlink_to(Path("..") / linked)
        with safe_open(out / linked, "pt") as base:
            weight_map = dict.fromkeys(base.keys(), _DIT) | dict.fromkeys(control_weights, _VACE)
        write_json(folder / f"{_DIT}.index.json", {"metadata": {}, "weight_map": weight_map})
        config = {"_class_name": "VaceWanModel", **CONFIG, "in_dim": 16, "model_type": "vace"}
        write_json(folder / "config.json", config | {"vace_layers": LAYERS, "vace_in_dim": 96})
    write_json(out / "configuration.json", {"framework": "Pytorch"})
    settings = json.loads((DEMO / "generation_config.json").read_text())
    settings |= {"sample_guide_scale": 1.0, "prompt": _make_example_clip().text}
    write_json(out / "generation_config.json", settings)


def score_vace(folder: Path, clips: int) -> None:
    """Prints scores of detected shapes and distances from the targets, with and without control."""
    check_output(PICTURE, MARKED, "The picture")
    print("| Task | Control | Colour / shape, % | Centre off, pixels | Kept, dB | All, dB |")
    print("|---|---|---|---|---|---|")
    model = WanVace("vace-A14B", folder, precision="fp32")
    groups: list[tuple[str, list[tuple[str, Pixels]]]] = []
    for task in TASKS:
        for scale in (1.0, 0.0):
            rows = []
            for number in range(clips):
                control_clip = make_clip(task, SEED + 1, number)
                video = generate_controlled(model, control_clip, number, scale)
                rows.append(_score_clip(control_clip, video))
                if scale and number in PICTURED_CLIPS[task]:
                    groups.append((_TITLES[task], _make_strips(control_clip, video)))
            colour, shape, off, psnr_kept, psnr_all = np.nanmean(rows, axis=0)
            print(
                f"| {task} | {'yes' if scale else 'no'} | {100 * colour:.0f} / {100 * shape:.0f} "
                f"| {off:.1f} | {psnr_kept:.1f} | {psnr_all:.1f} |",
                flush=True,
            )
    save_labelled_strips(groups, PICTURE)


def generate_controlled(
    model: Any, control_clip: ControlledClip, seed: int, scale: float = 1.0
) -> Pixels:
    """Generates a video [F,H,W,3] from the files of a clip."""
    with tempfile.TemporaryDirectory() as folder:
        video = model.generate(
            control_clip.text,
            *map(str, write_control_files(control_clip, Path(folder))),
            size=(SIDE, SIDE),
            frame_num=FRAMES,
            seed=seed,
            context_scale=scale,
            sampling_steps=20,
            guide_scale=1.0,
            shift=12.0,
            offload_model=False,
        )
    return to_pixels(video)


def write_control_files(control_clip: ControlledClip, folder: Path) -> list[Path]:
    """Writes a clip's control inputs as source.mp4 and mask.mp4."""
    videos = {
        "source": control_clip.source,
        "mask": np.repeat(control_clip.mask[..., None], 3, axis=-1),
    }
    for name, frames in videos.items():
        video_3FHW = (torch.from_numpy(frames).permute(3, 0, 1, 2) + 0.25) / 127.5 - 1
        write_video(video_3FHW, Output(folder / f"{name}.mp4", fps=16))
    return [folder / f"{name}.mp4" for name in videos]


def _score_clip(control_clip: ControlledClip, video: Pixels) -> list[float]:
    """Scores a video: colour, shape, distance of centres, PSNR where the mask is 0, PSNR."""
    detected, keep_mask = detect_shapes(video), control_clip.mask == 0
    right = [
        float(bool(detected) and getattr(detected[0], name) == getattr(control_clip.actor, name))
        for name in ("colour", "shape")
    ]
    off = np.nanmean(
        np.linalg.norm(_locate_shapes(video) - _locate_shapes(control_clip.wanted), axis=-1)
    )
    return [
        *right,
        float(off),
        compute_psnr(video[keep_mask], control_clip.wanted[keep_mask]),
        compute_psnr(video, control_clip.wanted),
    ]


def _locate_shapes(video: Pixels) -> NDArray[np.floating[Any]]:
    """Locates the largest shape in each frame: row and column, [F,2]; NaN without a shape."""
    masks = [find_largest_part(mask) for mask in find_foreground(video.astype(np.float32))]
    return np.array([np.argwhere(m).mean(0) if m.any() else (np.nan, np.nan) for m in masks])


_TITLES = {
    "replace": "The masked shape is replaced (white: generated)",
    "path": "A shape drawn into a moving box (gray: unknown)",
    "frames": "The frames between given frames (gray: unknown)",
}
"""Task -> title of its strips."""


def _make_strips(control_clip: ControlledClip, result: Pixels) -> list[tuple[str, Pixels]]:
    """Draws the source, the mask and the video, each as a strip of its frames."""
    mask = np.repeat(control_clip.mask[..., None], 3, axis=-1)
    videos = {"source": control_clip.source, "mask": mask, "result": result}
    return [(label, np.concatenate(list(video), axis=1)) for label, video in videos.items()]


if __name__ == "__main__":
    described = (__doc__ or "").splitlines()[0]
    sys.exit(
        run_training_program(
            described,
            "vace",
            encode_control_clips,
            train_control_blocks,
            score_vace,
            steps=5000,
            export=export_vace,
        )
    )
