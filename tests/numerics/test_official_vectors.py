"""Results against tensors that the official code produced (float32, CPU)."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.numerics.official import CPU, distance, weights
from wan.media.images import convert_image_to_tensor
from wan.media.video_writer import to_uint8
from wan.modules import clip, t5
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.modules.rope import apply_rope, compute_rope_angles, make_rope_table
from wan.modules.vae import video_vae as vae
from wan.pipeline.scheduler import make_solver
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import PRESETS
from wan.tasks.base import make_video_params
from wan.tasks.image2video import compute_i2v_size
from wan.tasks.video2video import compute_ti2v_size

SOLVERS = {"unipc": "unipc", "dpm++": "dpmpp"}
DIT_CASES = [
    *(("dit_t2v_h12", case) for case in ("a", "a_pad176", "a_pad180", "b", "c", "d")),
    *(("dit_i2v", case) for case in ("a", "odd")),
    *(("dit_ti2v", case) for case in ("uniform", "first_frame", "first_frame_pad64", "odd")),
]


def load_dit_case(
    reference: Path, name: str, case: str, **components: Any
) -> tuple[WanModel, tuple, torch.Tensor]:
    config = json.loads((reference / f"{name}.json").read_text())["config"]
    model = WanModel(**config, components=ModelComponents(**components))
    model.load_state_dict(weights(reference / f"{name}.weights.safetensors"), strict=True)
    cases = load_file(reference / f"{name}.cases.safetensors")
    x, t, context = (cases[f"{case}.{key}"] for key in ("x", "t", "context"))
    y = cases.get(f"{case}.y")
    arguments = ([x], t, [context], int(cases[f"{case}.seq_len"]), None if y is None else [y])
    return model, arguments, cases[f"{case}.out"]


def test_dit(reference: Path) -> None:
    wrong = {}
    for name, case in DIT_CASES:
        model, arguments, out = load_dit_case(reference, name, case)
        with torch.no_grad():
            error = distance(model(*arguments)[0], out)
        wrong |= {} if error <= 2e-5 else {(name, case): error}
    assert not wrong


@torch.no_grad()
def test_dit_with_image_tokens(reference: Path) -> None:
    """Wan2.1's image-to-video network and its image embedding."""
    metadata = json.loads((reference / "dit_i2v21.json").read_text())
    state = weights(reference / "dit_i2v21.weights.safetensors")
    cases = load_file(reference / "dit_i2v21.cases.safetensors")
    for case in ("a", "b", "b_pad16", "c", "text512"):
        config = metadata["config"] | {"text_len": metadata["cases"][case]["text_len"]}
        model = WanModel(**config, image_dim=1280)
        model.load_state_dict(state, strict=True)
        x, y, t, context = (cases[f"{case}.{key}"] for key in ("x", "y", "t", "context"))
        clip_features = cases["clip_fea"].float()[metadata["cases"][case]["clip_rows"]]
        tokens = int(cases[f"{case}.seq_len"])
        actual = model([x], t, [context], tokens, [y], clip_fea=clip_features)[0]
        assert distance(actual, cases[f"{case}.out"]) <= 2e-5, case
        if case == "b":
            assert distance(model.img_emb(clip_features), cases["b.trace.img_emb"]) <= 2e-5


def test_clip_preprocessing(reference: Path) -> None:
    cases = load_file(reference / "clip_preprocess.safetensors")
    metadata = json.loads((reference / "clip_preprocess.json").read_text())["cases"]
    for case in ("up", "down"):
        image = Image.fromarray(cases[f"{case}.image_u8"].numpy())
        actual = clip.preprocess_clip_image(convert_image_to_tensor(image))[
            :, :, :: metadata[case]["row_step"]
        ]
        assert distance(actual, cases[f"{case}.out_rows"]) <= 1e-4, case


def test_dit_with_autograd_takes_the_same_path(reference: Path) -> None:
    model, arguments, out = load_dit_case(reference, "dit_ti2v", "first_frame")
    actual = model(*arguments)[0]
    assert distance(actual.detach(), out) <= 2e-5
    actual.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bf16_weights_stay_close(reference: Path) -> None:
    """The official network has a relative rms error of 2 % under bfloat16 autocast."""
    from wan.settings.numerics import keeps_fp32

    model, arguments, out = load_dit_case(reference, "dit_t2v_h12", "a")
    for name, parameter in model.named_parameters():
        if not keeps_fp32(name):
            parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        actual = model(*arguments)[0]
    assert actual.dtype == torch.float32
    assert ((actual - out).square().mean() / out.square().mean()).sqrt() <= 0.02


def test_rope(reference: Path) -> None:
    cases = load_file(reference / "rope.safetensors")
    for head_dim in (128, 24, 16, 12, 8):
        rotated = apply_rope(cases[f"d{head_dim}.x"].float(), make_rope_table((3, 5, 7), head_dim))
        assert distance(rotated, cases[f"d{head_dim}.out"]) <= 5e-6, head_dim


def test_rope_angles(reference: Path) -> None:
    cases = load_file(reference / "rope.safetensors")
    positions = cases["table128.positions"].long()
    frame, height, width = (
        compute_rope_angles(grid, 128)[positions][:, part]
        for grid, part in (
            ((1024, 1, 1), slice(0, 22)),
            ((1, 1024, 1), slice(22, 43)),
            ((1, 1, 1024), slice(43, 64)),
        )
    )
    angles = torch.cat((frame, height, width), dim=1)
    assert distance(angles.cos(), cases["table128.cos"]) <= 1e-12
    assert distance(angles.sin(), cases["table128.sin"]) <= 1e-12


def test_sigma_tables_are_exact(reference: Path) -> None:
    cases = load_file(reference / "schedulers.safetensors")
    tables = [key.removesuffix(".sigmas") for key in cases if key.endswith(".sigmas")]
    assert len(tables) >= 42
    for table in tables:
        steps, shift = map(int, re.search(r"s(\d+)_shift(\d+)", table).groups())
        solver = "unipc" if table.endswith("unipc") else "dpm++"
        values = {"sample_solver": solver, "sample_steps": steps, "sample_shift": shift}
        request = make_video_params(PRESETS["t2v-A14B"], {"prompt": "", **values})
        schedule = make_noise_schedule(request)
        _, timesteps = make_solver(request, schedule)
        assert torch.equal(torch.tensor(schedule.sigmas), cases[f"{table}.sigmas"]), table
        assert torch.equal(timesteps, cases[f"{table}.timesteps"]), table


def test_trajectories(reference: Path) -> None:
    cases = load_file(reference / "schedulers.safetensors")
    for solver, (steps, shift) in product(SOLVERS, ((4, 5), (20, 12), (40, 5))):
        run = f"s{steps}_shift{shift}"
        values = {"sample_solver": solver, "sample_steps": steps, "sample_shift": shift}
        request = make_video_params(PRESETS["t2v-A14B"], {"prompt": "", **values})
        stepper, timesteps = make_solver(request, make_noise_schedule(request))
        trajectory = [cases[f"{run}.noise"]]
        for velocity in cases[f"{run}.model_outputs"][: len(timesteps)]:
            trajectory.append(stepper.step(trajectory[-1], velocity))
        expected = cases[f"{run}.{SOLVERS[solver]}.trajectory"]
        assert distance(torch.stack(trajectory), expected) <= 2e-5, (solver, run)


def write_weights(reference: Path, name: str, folder: Path, dtype: torch.dtype) -> Path:
    """Write the official weights as a file that the loader reads."""
    state = load_file(reference / f"{name}.weights.safetensors")
    save_file({key: t.to(dtype) for key, t in state.items()}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_text_encoder_in_fp32(reference: Path, tiny, tmp_path: Path, stored: torch.dtype) -> None:
    """Loaded as in a run, also from bfloat16 weights, which are upcast layer by layer."""
    path = write_weights(reference, "t5", tmp_path, stored)
    network = t5.read_text_encoder_spec(path).load(
        device=CPU, dtype_of=t5.choose_text_encoder_dtypes(torch.float32)
    )
    tokenizer = t5.load_tokenizer(tiny("t2v-1.3B") / "google/umt5-xxl")
    t5.TextEncoder(network, tokenizer, dtype=torch.float32, text_len=160)
    cases = load_file(reference / "t5.cases.safetensors")
    with torch.no_grad():
        out = network(cases["ids"], cases["mask"])
    for row, valid in enumerate((23, 150)):
        assert distance(out[row, :valid], cases["out"][row, :valid]) <= 2e-5
    assert {p.dtype for p in network.parameters()} == {stored}


@pytest.mark.parametrize("name", ["vae21", "vae22"])
def test_vae(reference: Path, tmp_path: Path, name: str) -> None:
    path = write_weights(reference, name, tmp_path, torch.float32)
    network = vae.read_vae_spec(path).load(device=CPU, dtype_of=lambda *_: torch.float32)
    video_vae, cases = vae.VideoVAE(network), load_file(reference / f"{name}.cases.safetensors")
    for case in ("c0", "c1", "c2"):
        latent = video_vae.encode(cases[f"{case}.video"])
        assert distance(latent, cases[f"{case}.latent"]) <= 2e-5, case
        for latent_key, decoded_key in (("latent", "decoded"), ("latent_rand", "decoded_rand")):
            latents, expected = cases[f"{case}.{latent_key}"], cases[f"{case}.{decoded_key}"]
            video, collector = video_vae.decode(latents), vae.FrameCollector(CPU)
            assert distance(video, expected) <= 2e-5, (case, latent_key)
            blocks = vae.LatentBlocks(latents.shape, latents.split([1, len(latents[0]) - 1], dim=1))
            video_vae.stream(blocks, collector)
            assert torch.equal(collector.video, video), (case, latent_key)


def test_sizes_and_prompt_cleaning(reference: Path) -> None:
    tables = json.loads((reference / "preprocess.json").read_text())
    for row in tables["ti2v_best_output_size"]:
        size = compute_ti2v_size(PRESETS["ti2v-5B"], tuple(row["image_wh"]), row["max_area"])
        assert list(size) == row["out_wh"]
    for row in tables["i2v_size"]:
        size = compute_i2v_size(PRESETS["i2v-A14B"], tuple(row["image_wh"]), row["max_area"])
        assert list(size) == row["pixel_hw"][::-1]
    for row in tables["text_clean"]:
        assert t5.clean_prompt(row["raw"]) == row["clean"]


def test_frames_as_handed_to_the_encoder(reference: Path) -> None:
    cases = load_file(reference / "save_video.safetensors")
    video = next(t for t in cases.values() if t.is_floating_point())
    frames = next(t for t in cases.values() if t.dtype == torch.uint8)
    assert torch.equal(to_uint8(video[0]), frames)


def test_pixels_are_exact() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    actual = convert_image_to_tensor(Image.fromarray(np.stack((values,) * 3, axis=-1)))
    expected = (torch.from_numpy(values).float() / 255 - 0.5) / 0.5
    assert torch.equal(actual[1], expected)
