"""Animate's network against tensors that the official code produced (float32, CPU)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import slow
from tests.numerics.procedural import procedural
from tests.numerics.test_official_vectors import distance, weights
from wan.modules.animate import WanAnimateModel
from wan.modules.interfaces import Collaborators


@pytest.fixture(scope="module")
def animate(reference: Path) -> Path:
    return reference / "animate"


def told(folder: Path, name: str = "dit_animate") -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@cache
def state(folder: Path) -> dict[str, Tensor]:
    found, made = weights(folder / "dit_animate.weights.safetensors"), told(folder)["procedural"]
    for name, (shape, scale) in made["tensors"].items():
        found[name] = procedural(made["seed"], name, shape, scale)
    return found


def network(folder: Path, **collaborators: Any) -> WanAnimateModel:
    with torch.device("meta"):
        model = WanAnimateModel(
            **told(folder)["config"], collaborators=Collaborators(**collaborators)
        )
    model.load_state_dict(state(folder), strict=True, assign=True)
    return model


def inputs(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments of a case, and what the file holds for it."""
    case, stored = told(folder)["cases"][name], load_file(folder / "dit_animate.cases.safetensors")
    own = {k.removeprefix(f"{name}."): x for k, x in stored.items() if k.startswith(f"{name}.")}
    if "all -1" in case["face"]:
        faces = -torch.ones(1, 3, case["face_frames"], 512, 512)
    else:
        small = stored["face_pool"][own["face_idx"]]
        large = small.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
        faces = (large.double() / 127.5 - 1).float().permute(3, 0, 1, 2)[None]
    row = case["clip_row"]
    clip_fea = procedural(7101, f"clip_fea{row}", [257, 1280], (1, -3)[row])[None]
    arguments = {
        "x": [own["x"]],
        "t": own["t"],
        "clip_fea": clip_fea,
        "context": [own["context"]],
        "seq_len": case["seq_len"],
        "y": [own["y"]],
        "pose_latents": own["pose_latents"],
        "face_pixel_values": faces,
    }
    return arguments, own


@pytest.mark.parametrize("case", ["b", *map(slow, ("a", "c", "d", "black"))])
@torch.no_grad()
def test_network(animate: Path, case: str) -> None:
    """In the second forward what depends on the clip alone is kept from the first."""
    model, (arguments, stored) = network(animate, text_kv_cache=True), inputs(animate, case)
    for _ in range(2):
        assert distance(model(**arguments)[0], stored["out"]) <= 2e-5


@pytest.mark.slow
@torch.no_grad()
def test_parts_of_the_network(animate: Path) -> None:
    model, (arguments, stored) = network(animate), inputs(animate, "a")
    motion = model.motion_encoder(arguments["face_pixel_values"][0].transpose(0, 1))
    assert distance(motion, stored["trace.motion"][0]) <= 1e-4
    faces = model.face_encoder(stored["trace.motion"][0])
    assert distance(faces[1:], stored["trace.face_encoder"][0]) <= 2e-5 and not faces[0].any()
    found: dict[str, Tensor] = {}
    for index, adapter in enumerate(model.face_adapter.fuser_blocks):

        def keep(_: object, __: object, out: Any, index: int = index) -> None:
            found[f"trace.face_adapter{index}"] = out[0]

        adapter.register_forward_hook(keep)
    model(**arguments)
    assert set(found) == {"trace.face_adapter0", "trace.face_adapter1"}
    for name, ours in found.items():
        assert distance(ours.reshape(stored[name].shape), stored[name]) <= 2e-5


@torch.no_grad()
def test_the_motion_of_a_face(animate: Path) -> None:
    stored, encoder = (
        load_file(animate / "animate_face.safetensors"),
        network(animate).motion_encoder,
    )
    assert distance(encoder.directions(), stored["direction.Q"]) <= 1e-6
    black = encoder(-torch.ones(1, 3, 512, 512))
    assert distance(black, stored["motion.black.out"].reshape(1, -1)) <= 1e-4


def test_networks_that_were_not_published(animate: Path) -> None:
    config = told(animate)["config"]
    for change, words in (
        ({"num_layers": 4}, "multiple of 5"),
        ({"use_img_emb": False}, "picture"),
    ):
        with pytest.raises(ValueError, match=words), torch.device("meta"):
            WanAnimateModel(**{**config, **change})
