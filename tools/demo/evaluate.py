"""Scores an exported checkpoint on held-out prompts with the real pipeline.

    python -m tools.demo.evaluate --checkpoint OUT --report scores.json

The scores are: correct colour, shape and motion of every requested shape, also by kind of motion;
PSNR of the VAE and of i2v's first frame; and how often i2v's first frame preserves a drawing that
is not at the start of its motion.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tools.demo.render import render_scene
from tools.demo.scenes import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    Actor,
    Scene,
    make_caption,
    make_random_scene,
)
from tools.demo.score import DetectedShape, detect_shapes, find_foreground
from wan import WanCausal, WanI2V, WanT2V
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, make_output_path_type, run_program
from wan.configs import WAN_CONFIGS
from wan.modules.vae.video_vae import VideoVAE, read_vae_spec
from wan.settings.values import integer
from wan.utils import log
from wan.utils.files import OutputKind, write_output

SIDE, LONG = 64, 249
CAUSAL = ((81, 9, 0), (LONG - 12, 9, 0), (LONG - 12, 12, 3))  # frames, window, sink
GRID = (4, 8, 20), (1.0, 3.0, 5.0)  # steps, guidance
_SEED = 77


@dataclass(frozen=True)
class Setting:
    steps: int
    guidance: float
    prompts: int
    frames: int = 9
    shift: float = 12.0

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `generate` of every class."""
        return {
            "frame_num": self.frames,
            "shift": self.shift,
            "sampling_steps": self.steps,
            "guide_scale": self.guidance,
            "offload_model": False,
        }


def list_held_out_scenes(count: int) -> Iterator[tuple[int, Scene]]:
    """Lists numbered scenes whose combination of words is held out from training."""
    return ((n, make_random_scene(_SEED, n, held_out=True)) for n in range(count))


def to_pixels(video_3FHW: Tensor) -> NDArray[np.uint8]:
    """Converts a video in [-1, 1] to uint8 [F,H,W,3]."""
    pixels = ((video_3FHW + 1) * 127.5).round().clamp(0, 255).byte()
    return np.ascontiguousarray(pixels.permute(1, 2, 3, 0).numpy())


def compute_psnr(video: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> float:
    error = float(np.mean((video.astype(np.float64) - wanted) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-3)))


def judge_shapes(scene: Scene, detected: list[DetectedShape]) -> dict[str, list[bool]]:
    """Judges for each actor of a scene whether its colour, shape and motion were detected."""
    verdicts: dict[str, list[bool]] = {"colour": [], "shape": [], "motion": []}
    for actor, match in zip(scene.actors, _pair_shapes(scene.actors, detected), strict=True):
        verdicts["colour"].append(match is not None and match.colour == actor.colour)
        verdicts["shape"].append(match is not None and match.shape == actor.shape)
        verdicts["motion"].append(match is not None and match.motion == actor.motion)
    return verdicts


def _pair_shapes(
    actors: tuple[Actor, ...], detected: list[DetectedShape]
) -> list[DetectedShape | None]:
    """Assigns a detected shape to each actor: one of its colour, else the largest unassigned."""
    unmatched, matches = list(detected), dict[int, DetectedShape]()
    for number, actor in enumerate(actors):
        same = [s for s in unmatched if s.colour == actor.colour]
        if same:
            matches[number] = same[0]
            unmatched.remove(same[0])
    return [matches.get(n) or (unmatched.pop(0) if unmatched else None) for n in range(len(actors))]


def compute_rates(verdicts: list[dict[str, list[bool]]]) -> dict[str, float]:
    """Computes the percent of correct answers over all actors."""
    return {
        key: round(100 * float(np.mean([v for each in verdicts for v in each[key]])), 1)
        for key in verdicts[0]
    }


def compute_rates_by_motion(
    scenes: list[Scene], verdicts: list[dict[str, list[bool]]]
) -> dict[str, dict[str, float]]:
    """Computes the rates of the actors of each kind of motion."""
    rates = {}
    for motion in MOTIONS:
        chosen = [
            {
                key: [answers[n] for n, a in enumerate(scene.actors) if a.motion == motion]
                for key, answers in each.items()
            }
            for scene, each in zip(scenes, verdicts, strict=True)
        ]
        if any(each["motion"] for each in chosen):
            rates[motion] = compute_rates(chosen)
    return rates


def score_t2v(model: Any, setting: Setting) -> dict[str, Any]:
    verdicts = []
    for number, scene in list_held_out_scenes(setting.prompts):
        video = model.generate(
            make_caption(scene),
            size=(SIDE, SIDE),
            seed=number,
            **setting.keywords,
        )
        verdicts.append(judge_shapes(scene, detect_shapes(to_pixels(video))))
    scenes = [scene for _, scene in list_held_out_scenes(setting.prompts)]
    return {
        **vars(setting),
        **compute_rates(verdicts),
        "motions": compute_rates_by_motion(scenes, verdicts),
    }


def score_i2v(model: Any, setting: Setting) -> dict[str, Any]:
    """Scores i2v, including the first frame's mean PSNR to the input image."""
    verdicts, likeness = [], []
    for number, scene in list_held_out_scenes(setting.prompts):
        first = render_scene(scene, setting.frames, SIDE)[0]
        video = model.generate(
            make_caption(scene),
            Image.fromarray(first),
            max_area=SIDE * SIDE,
            seed=number,
            **setting.keywords,
        )
        likeness.append(compute_psnr(to_pixels(video)[0], first))
        verdicts.append(judge_shapes(scene, detect_shapes(to_pixels(video))))
    scenes = [scene for _, scene in list_held_out_scenes(setting.prompts)]
    return {
        **vars(setting),
        **compute_rates(verdicts),
        "motions": compute_rates_by_motion(scenes, verdicts),
        "first_frame_psnr": round(float(np.mean(likeness)), 2),
    }


def score_drawings(model: Any, setting: Setting) -> dict[str, float]:
    """Computes the percent of videos whose first frame preserves the input image's shape.

    The shape is in the middle of the image, in full size, for every motion. It is preserved if the
    intersection of both areas is more than 70 % of their union.
    """
    rates = {}
    for motion in MOTIONS:
        matches = []
        for number in range(setting.prompts):
            shape, colour = SHAPES[number % len(SHAPES)], COLOURS[number % len(COLOURS)]
            actor = Actor(shape, colour, "large", motion, (0.5, 0.5), (0.5, 0.5))
            scene = Scene(BACKGROUNDS[number % len(BACKGROUNDS)], (actor,))
            still = replace(scene, actors=(replace(actor, motion="left"),))
            image = render_scene(still, 1, SIDE)
            video = model.generate(
                make_caption(scene),
                Image.fromarray(image[0]),
                max_area=SIDE * SIDE,
                seed=number,
                **setting.keywords,
            )
            drawn_mask, frame_mask = find_foreground(
                np.stack((image[0], to_pixels(video)[0])).astype(np.float32)
            )
            matches.append((drawn_mask & frame_mask).sum() > 0.7 * (drawn_mask | frame_mask).sum())
        rates[motion] = round(100 * float(np.mean(matches)), 1)
    return rates


def score_causal(model: Any, prompts: int, video: dict[str, int]) -> dict[str, Any]:
    """Scores videos of a causal student in the 81 frames of the motion, and in the last 81.

    These may show a part of the way back, so their motions are not judged.

    video: Keyword arguments of `generate`.
    """
    first, last = [], []
    for number, scene in list_held_out_scenes(prompts):
        caption = make_caption(scene)
        pixels = to_pixels(model.generate(caption, size=(SIDE, SIDE), seed=number, **video))
        first.append(judge_shapes(scene, detect_shapes(pixels[:81])))
        last.append(judge_shapes(scene, detect_shapes(pixels[-81:])))
    rates = {"first": compute_rates(first), "last": compute_rates(last)}
    del rates["last"]["motion"]
    return {**video, "prompts": prompts, **rates}


def format_run_rows(runs: Iterable[tuple[str, Any, dict[str, Any]]], prompts: int) -> Iterator[str]:
    """Yields the lines of a table that compares t2v runs with the first run.

    Args:
        runs: Name, model and keyword arguments of `generate` of each run.
        prompts: Number of held-out scenes.
    """
    yield "| Run | Colour / shape / motion, % | PSNR to the first | Seconds of denoising |"
    yield "|---|---|---|---|"
    first: dict[int, Any] = {}
    for name, model, video in runs:
        verdicts, seconds, like = [], [], []
        for number, scene in list_held_out_scenes(prompts):
            frames: Any = model.generate(
                make_caption(scene),
                size=(SIDE, SIDE),
                frame_num=9,
                seed=number,
                offload_model=False,
                **video,
            )
            seconds.append(model._pipeline.stage_timer.seconds["denoising"])
            clip = to_pixels(frames)
            like.append(compute_psnr(clip, first.setdefault(number, clip)))
            verdicts.append(judge_shapes(scene, detect_shapes(clip)))
        rates = compute_rates(verdicts)
        scores = " / ".join(f"{rates[key]:.0f}" for key in ("colour", "shape", "motion"))
        likeness = f"{np.mean(like):.1f}" if like[0] < 70 else ""
        yield f"| {name} | {scores} | {likeness} | {np.median(seconds):.3f} |"


def score_vae(file: Path, count: int) -> dict[str, float]:
    """Computes the mean and worst PSNR of held-out clips after encoding and decoding."""
    cpu = torch.device("cpu")
    network = read_vae_spec(file).load(device=cpu, dtype_of=lambda *_: torch.float32)
    vae, psnrs = VideoVAE(network), []
    for _, scene in list_held_out_scenes(count):
        clip = render_scene(scene, 9, SIDE)
        pixels = torch.from_numpy(clip).permute(3, 0, 1, 2).float() / 127.5 - 1
        psnrs.append(compute_psnr(to_pixels(vae.decode(vae.encode(pixels))), clip))
    return {"mean_psnr": round(float(np.mean(psnrs)), 2), "worst_psnr": round(min(psnrs), 2)}


def _is_scores(file: Path) -> bool:
    """Whether a JSON file has the scores of the demo's VAE."""
    content: Any = json.loads(file.read_bytes())
    vae = content.get("vae") if isinstance(content, dict) else None
    return isinstance(vae, dict) and vae.keys() == {"mean_psnr", "worst_psnr"}


SCORES = OutputKind("scores of tools.demo.evaluate", _is_scores)


@log.silence_thread()
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the tasks")
    parser.add_argument("--report", type=make_output_path_type(SCORES), help="JSON file to write")
    parser.add_argument("--prompts", type=make_argument_type(integer(1, 10_000)), default=100)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args(argv)
    folder, report = options.checkpoint, dict[str, Any]()
    report["vae"] = score_vae(folder / "t2v-A14B" / "Wan2.1_VAE.safetensors", options.prompts)
    print(report["vae"], flush=True)
    tasks = {"t2v": (WanT2V, score_t2v, 12.0), "i2v": (WanI2V, score_i2v, 5.0)}
    for kind, (facade, score, shift) in tasks.items():
        task_folder = folder / f"{kind}-A14B"
        model: Any = facade(WAN_CONFIGS[task_folder.name], task_folder, precision=options.precision)
        report[kind] = []
        settings = [Setting(*pair, options.prompts, shift=shift) for pair in product(*GRID)]
        settings.append(Setting(20, 3.0, -(-options.prompts // 5), LONG, shift))
        for setting in settings:
            report[kind].append(score(model, setting))
            print(kind, report[kind][-1], flush=True)
        if kind == "i2v":
            report["drawings"] = score_drawings(model, Setting(20, 3.0, 12, shift=shift))
            print("drawings", report["drawings"], flush=True)
    causal = WanCausal("causal-1.3B", folder / "causal-1.3B", precision=options.precision)
    report["causal"] = []
    for frames, window, sink in CAUSAL:
        video = {"frame_num": frames, "local_attn_size": window, "sink_size": sink}
        prompts = options.prompts if frames < LONG // 2 else -(-options.prompts // 5)
        report["causal"].append(score_causal(causal, prompts, video))
        print("causal", report["causal"][-1], flush=True)
    if options.report:
        with write_output(options.report, SCORES) as temporary:
            temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_program(main))
