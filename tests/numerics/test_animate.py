"""Animate's network against tensors that the official code produced (float32, CPU)."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import slow
from tests.numerics.official import Networks, PipelineParts, distance, weights
from tests.numerics.procedural import make_procedural_tensor
from wan.modules.animate import WanAnimateModel
from wan.modules.interfaces import ModelComponents
from wan.pipeline.clips import generate_clips
from wan.settings.presets import PRESETS
from wan.tasks.animate import (
    AnimateInputs,
    fold_mask_to_latent,
    letterbox_image,
    make_ping_pong_indices,
)
from wan.tasks.animate import count_overlapping_clips as count_clips
from wan.tasks.base import VideoParams, make_video_params


@pytest.fixture(scope="module")
def animate(reference: Path) -> Path:
    return reference / "animate"


def read_json(folder: Path, name: str = "dit_animate") -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@cache
def load_state(folder: Path) -> dict[str, Tensor]:
    tensors, specs = (
        weights(folder / "dit_animate.weights.safetensors"),
        read_json(folder)["procedural"],
    )
    for name, (shape, scale) in specs["tensors"].items():
        tensors[name] = make_procedural_tensor(specs["seed"], name, shape, scale)
    return tensors


def load_network(folder: Path, **components: Any) -> WanAnimateModel:
    with torch.device("meta"):
        model = WanAnimateModel(
            **read_json(folder)["config"], components=ModelComponents(**components)
        )
    model.load_state_dict(load_state(folder), strict=True, assign=True)
    return model


def load_inputs(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the model arguments of a case and its tensors in the file."""
    case, stored = (
        read_json(folder)["cases"][name],
        load_file(folder / "dit_animate.cases.safetensors"),
    )
    case_tensors = {
        k.removeprefix(f"{name}."): x for k, x in stored.items() if k.startswith(f"{name}.")
    }
    if "all -1" in case["face"]:
        faces = -torch.ones(1, 3, case["face_frames"], 512, 512)
    else:
        small = stored["face_pool"][case_tensors["face_idx"]]
        large = small.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
        faces = (large.double() / 127.5 - 1).float().permute(3, 0, 1, 2)[None]
    row = case["clip_row"]
    clip_fea = make_procedural_tensor(7101, f"clip_fea{row}", [257, 1280], (1, -3)[row])[None]
    arguments = {
        "x": [case_tensors["x"]],
        "t": case_tensors["t"],
        "clip_fea": clip_fea,
        "context": [case_tensors["context"]],
        "seq_len": case["seq_len"],
        "y": [case_tensors["y"]],
        "pose_latents": case_tensors["pose_latents"],
        "face_pixel_values": faces,
    }
    return arguments, case_tensors


@pytest.mark.parametrize("case", ["b", *map(slow, ("a", "c", "d", "black"))])
@torch.no_grad()
def test_network(animate: Path, case: str) -> None:
    """The second forward uses the features of the clip that the first one cached."""
    model, (arguments, stored) = (
        load_network(animate, text_kv_cache=True),
        load_inputs(animate, case),
    )
    for _ in range(2):
        assert distance(model(**arguments)[0], stored["out"]) <= 2e-5


@torch.no_grad()
def test_the_motion_of_a_face(animate: Path) -> None:
    stored = load_file(animate / "animate_face.safetensors")
    encoder = load_network(animate).motion_encoder
    assert distance(encoder.compute_directions(), stored["direction.Q"]) <= 1e-6
    black = encoder(-torch.ones(1, 3, 512, 512))
    assert distance(black, stored["motion.black.out"].reshape(1, -1)) <= 1e-4


def test_helpers(animate: Path) -> None:
    """Letterboxing with OpenCV's resize, clip plans, ping-pong indices and masks are exact."""
    stored = load_file(animate / "animate_helpers.safetensors")
    plans = read_json(animate, "animate_helpers")
    for name in ("down", "exact", "odd", "same", "tall", "wide"):
        resized = letterbox_image(stored[f"resize.{name}.in"].numpy(), (64, 48))
        assert torch.equal(torch.from_numpy(resized), stored[f"resize.{name}.out"]), name
    for plan in plans["clip_plan"]:
        request = make_params(plan["real"], plan["clip_len"], plan["refert_num"])
        assert request.num_clip == plan["clips"]
        tail = plan["tail_of_padded_index"]
        assert make_ping_pong_indices(plan["real"] - 2, len(tail), plan["real"]) == tail
        assert make_ping_pong_indices(plan["target"] - 1, 1, plan["real"]) == [plan["last_index"]]
        frames = [request.count_clip_frames(index) for index in range(plan["clips"])]
        assert sum(frames) == plan["real"]
        assert frames[0] == min(plan["clip_len"], plan["real"])
    for name, case in plans["i2v_mask"].items():
        count, out = case["mask_len"], stored[f"mask.{name}.out"]
        mask = torch.zeros(4 * case["lat_t"] - 3, case["h"], case["w"])
        if case["mask_pixel_values"]:
            mask = stored[f"mask.{name}.pixel"][0].clone()
        mask[:count] = 1
        assert torch.equal(fold_mask_to_latent(mask), out), name


def make_params(frames: int, clip: int = 9, refert: int = 1, **options: Any) -> VideoParams:
    values = {
        "frame_num": clip,
        "refert_num": refert,
        "size": (64, 48),
        "num_source_frames": frames,
    }
    count = count_clips(frames, clip, refert)
    return make_video_params(PRESETS["animate-14B"], {**values, "num_clip": count, **options})


class _Networks(Networks):
    """The network of the runs; its motion encoder looks up stored motions; records latents."""

    def __init__(self, folder: Path) -> None:
        self.model = load_network(folder)
        stored = load_file(folder / "e2e_animate.cases.safetensors")
        known_faces = stored["src_face"].double() / 127.5 - 1
        self.known_faces = torch.cat((known_faces, -torch.ones(1, 64, 64, 3))).float()
        self.rows = torch.cat((stored["face_motion"], stored["face_motion_black"]))
        self.model.motion_encoder.forward = self.motion  # type: ignore[method-assign]
        self.calls: list[Tensor] = []

    def motion(self, faces_P3HW: Tensor) -> Tensor:
        small = faces_P3HW[:, :, ::8, ::8].permute(0, 2, 3, 1)
        distances = (small[:, None] - self.known_faces[None]).abs().amax(dim=(2, 3, 4))
        assert float(distances.amin(dim=1).max()) < 1e-6
        return self.rows[distances.argmin(dim=1)]

    def __call__(self, *args: Any, **call_kwargs: Any) -> list[Tensor]:
        self.calls.append(args[0][0].clone())
        return self.model(*args, **call_kwargs)


class _Pipeline(PipelineParts):
    """A pipeline with the CLIP features of the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "e2e_animate.cases.safetensors", _Networks(folder))
        self.clip_images: list[Tensor] = []

    def encode_image(self, images: list[Tensor]) -> Tensor:
        self.clip_images += images
        return make_procedural_tensor(7101, "clip_fea0", [257, 1280], 1)[None]


@pytest.mark.parametrize("run", ["animate", "animate_cfg", "replace", "animate_bf16in"])
def test_whole_run(animate: Path, run: str) -> None:
    """Two clips of `WanAnimate.generate`; the rounded one is compared with less precision."""
    case = read_json(animate, "e2e_animate")["runs"][run]
    stored = load_file(animate / "e2e_animate.cases.safetensors")

    def make_frame_reader(name: str, side: int) -> Any:
        frames = stored[name].repeat_interleave(side, 1).repeat_interleave(side, 2)
        return lambda chosen: frames[chosen].numpy()

    names = {"pose": 1, "face": 8, "bg": 1, "mask": 1}
    parts = {name: make_frame_reader(f"src_{name}", side) for name, side in names.items()}
    parts["background"] = parts.pop("bg")
    picture = Image.fromarray(stored["src_ref"].numpy())
    animate_inputs = AnimateInputs(
        reference_image=picture,
        pose_size=(64, 48),
        num_frames=case["frames_in"],
        fps=30.0,
        readers=parts,
    )
    request = make_params(
        case["frames_in"],
        case["clip_len"],
        case["refert_num"],
        sample_solver=case["sample_solver"],
        sample_steps=case["sampling_steps"],
        sample_shift=case["shift"],
        sample_guide_scale=(case["guide_scale"],) * 2,
        base_seed=case["seed"],
        replace_flag=case.get("replace_flag", False),
    )
    assert request.num_clip == case["clips"]
    pipeline: Any = _Pipeline(animate)
    clips = list(generate_clips(pipeline, request, animate_inputs))
    limit = {"latent": 1e-2, "video": 1e-2} if case["rounded_inputs"] else {}
    limit = {"latent": 1e-4, "video": 2e-4} | limit
    assert distance(pipeline.clip_images[0], stored[f"{run}.clip_input"]) <= limit["video"]
    calls = pipeline.experts.calls
    branches = 2 if request.uses_guidance else 1
    assert len(calls) == branches * case["sampling_steps"] * len(clips)
    for index, clip in enumerate(clips):
        get = partial("{}.clip{}.{}".format, run, index)
        first_call = calls[branches * case["sampling_steps"] * index]
        assert distance(first_call, stored[get("noise")]) == 0
        assert distance(clip.latents, stored[get("latent_final")]) <= limit["latent"]
    video = torch.cat([clip.frames for clip in clips], dim=1)
    assert distance(video, stored[f"{run}.video"]) <= limit["video"]
