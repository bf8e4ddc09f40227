"""Videos of clips: what a clip is given, their lengths and seeds, recipes, refusals, calls."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import wan
from wan.cli import flags
from wan.cli.resolve import resolve
from wan.pipeline.conditioning import chained_channels
from wan.pipeline.pipeline import Inputs
from wan.pipeline.text import TextEncoder
from wan.run import Run
from wan.settings import recipes
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.settings.request import Request, make_request

PRO = "SVI_Wan2.2-I2V-A14B_{}_noise_lora_v2.0_pro.safetensors"
QUICK = {"max_area": 48 * 32, "frame_num": 9, "sampling_steps": 2, "guide_scale": 2.0}


def request(**values: Any) -> Request:
    given = {"prompt": "", "size": (48, 32), "frame_num": 9, "base_seed": 7, **values}
    return make_request(PRESETS["i2v-A14B"], given, (48, 32))


def planned(*words: object) -> Run:
    given = ["--plan", "--task", "i2v-A14B", *map(str, words)]
    return resolve(flags.parse(given), lambda *_: None, plan=True)


def test_what_a_clip_is_given() -> None:
    """By hand: 4 channels of the mask, then 16 of latents, in 3 latent frames of 4 x 6."""
    anchor, motion = torch.full((16, 1, 4, 6), 2.0), torch.full((16, 1, 4, 6), 3.0)
    first = chained_channels(request(chain="latent"), anchor, None)
    later = chained_channels(request(chain="latent"), anchor, motion)
    table = {"mask": [1, 0, 0], "first": [2, 0, 0], "later": [2, 3, 0]}
    for found, name in ((first, "first"), (later, "later")):
        assert found.shape == (20, 3, 4, 6) and found.dtype == torch.float32
        for channel in range(20):
            wanted = table["mask" if channel < 4 else name]
            assert found[channel, :, 1, 2].tolist() == wanted
            assert torch.equal(found[channel], found[channel, :, :1, :1].expand(3, 4, 6))


@pytest.mark.parametrize(
    ("chain", "frames", "clips", "whole"),
    [
        *(("latent", 81, n, 81 + 76 * (n - 1)) for n in (1, 2, 50)),
        ("latent", 9, 3, 17),
        ("frame", 81, 3, 241),
    ],
)
def test_how_long_a_video_is(chain: str, frames: int, clips: int, whole: int) -> None:
    asked = request(chain=chain, frame_num=frames, num_clip=clips)
    assert sum(map(asked.clip_frames, range(clips))) == whole


def test_each_clip_has_a_seed_and_a_prompt() -> None:
    asked = request(clip_prompts=("a", "b", "c"))
    assert (asked.num_clip, asked.chain, asked.prompt) == (3, "frame", "a")
    assert [asked.of_clip(n).base_seed for n in range(3)] == [7, 49, 91]
    assert [asked.of_clip(n).prompt for n in range(3)] == ["a", "b", "c"]
    assert request(num_clip=2, base_seed=2**63 - 1).of_clip(1).base_seed == 41


SVI = {"sample_solver": "euler", "sample_steps": 50, "sample_shift": 5.0, "boundary": 0.875}


@pytest.mark.parametrize(
    ("names", "found", "settings"),
    [
        ([PRO.format("high")], ("svi-2-pro",), {**SVI, "sample_guide_scale": (4.0, 4.0)}),
        (
            ["SVI_v2_PRO_Wan2.2-I2V-A14B_HIGH_lora_rank_128_fp16.safetensors"],
            ("svi-2-pro",),
            {"fps": 15.0, "frame_num": 81, "chain": "latent"},
        ),
        (
            [PRO.format("low"), "wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022.x"],
            ("distill-4step", "svi-2-pro"),
            {"sample_steps": 4, "boundary_step": 2, "sample_guide_scale": (1.0, 1.0)}
            | {"chain": "latent", "fps": 15.0},
        ),
        (["SVI_Wan2.2-I2V-A14B_high_noise_lora_v2.0.safetensors"], (), {}),
        (["other.safetensors"], (), {}),
    ],
    ids=str,
)
def test_the_recipe_is_recognised(
    names: list[str], found: tuple[str, ...], settings: dict[str, Any]
) -> None:
    paths = [Path("/models/svi-model/version-2.0") / name for name in names]
    chosen, values = recipes.choose("auto", [], paths, PRESETS["i2v-A14B"])
    assert chosen == found and settings.items() <= values.items()


def test_what_the_recipe_sets_in_a_run() -> None:
    run = planned("--recipe", "svi-2-pro", "--clips", 4)
    asked = run.request
    assert (asked.chain, asked.num_clip, asked.frame_num, asked.boundary) == (
        "latent",
        4,
        81,
        0.875,
    )
    assert (asked.sample_solver, asked.sample_steps, asked.sample_shift) == ("euler", 50, 5.0)
    assert asked.sample_guide_scale == (4.0, 4.0) and run.output.fps == 15
    assert run.settings["num_clip"] == 4 and run.settings["fps"] == 15
    own = planned("--recipe", "svi-2-pro", "--fps", 24, "--frame_num", 121, "--sample_steps", 8)
    assert (own.output.fps, own.request.frame_num, own.request.sample_steps) == (24, 121, 8)
    assert any("loses colour" in line or "lose colour" in line for line in own.notices)
    plain = planned("--clips", 2)
    assert (plain.request.chain, plain.request.boundary, plain.output.fps) == ("frame", 0.9, 16)
    assert any("drifts" in line for line in plain.notices)
    assert planned().request.chain is None and not planned().request.clips


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--clips 0", "--num_clip 0 must be from 1 to 10000"),
        ("--clips two", "--num_clip two must be a whole number"),
        ("--clips 2 --frame_num 80", "--frame_num 80 must be 4n+1; use 77 or 81"),
        ("--chain latent --frame_num 5", "--frame_num 5 is too short"),
        ("--chain pixels", "--chain pixels must be latent or frame"),
        ("--clips 3 --clip_prompts a b", "The number of --clip_prompts and --num_clip 3 differ"),
        ("--clip_prompts a --prompt b", "--prompt is said by --clip_prompts, too"),
        ("--task t2v-A14B --clips 2", "--num_clip has no effect on t2v-A14B"),
        ("--task ti2v-5B --clip_prompts a", "--clip_prompts has no effect on ti2v-5B"),
        ("--task t2v-A14B --chain latent", "--chain has no effect on t2v-A14B"),
        ("--task t2v-A14B --recipe svi-2-pro", "--recipe svi-2-pro is for i2v-A14B"),
        ("--overlap_decoding --vae_tiling", "--overlap_decoding decodes on one rank by itself"),
        ("--clips 2 --save_latents steps", "--save_latents steps is about one clip"),
    ],
)
def test_what_is_refused(words: str, sentence: str) -> None:
    task = [] if "--task" in words else ["--task", "i2v-A14B"]
    with pytest.raises(InputError) as refused:
        resolve(flags.parse(["--plan", *task, *words.split()]), lambda *_: None, plan=True)
    assert sentence in str(refused.value)


def test_a_lora_of_another_version_is_refused() -> None:
    for name in ("SVI_Wan2.2-I2V-A14B_high_noise_lora_v2.0.safetensors", "svi_2.1_pro.safetensors"):
        with pytest.raises(InputError, match=r"is not SVI 2\.0 Pro"):
            recipes.check_chain("frame", [Path(name)])
        recipes.check_chain(None, [Path(name)])
    recipes.check_chain("latent", [Path(PRO.format("high")), Path("svinging.safetensors")])


@pytest.fixture(scope="module")
def model(tiny) -> Any:
    return wan.WanI2V("i2v-A14B", tiny("i2v-A14B"))


def test_one_call_is_as_many_calls_with_the_kept_latent(model: Any, image_path: Path) -> None:
    args: dict[str, Any] = {**QUICK, "img": str(image_path), "chain": "latent"}
    prompts = ["a", "b", "c"]
    whole = model.generate("", clip_prompts=prompts, seed=7, **args)
    latents = model.generate("", clip_prompts=prompts, seed=7, output_type="latent", **args)
    assert whole.shape == (3, 9 + 4 + 4, 32, 48) and latents.shape == (16, 9, 4, 6)
    parts, motion = [], None
    for number, prompt in enumerate(prompts):
        one = {**args, "seed": 7 + 42 * number, "motion_latent": motion}
        parts.append(model.generate(prompt, **one))
        made = model.generate(prompt, output_type="latent", **one)
        assert torch.equal(made, latents[:, 3 * number : 3 * number + 3])
        motion = made[:, -1:]
    assert torch.equal(whole, torch.cat(parts, dim=1))
    assert not torch.equal(parts[1], model.generate("b", seed=49, **args)[:, 5:])  # it is looked at


def test_a_chain_of_frames_begins_with_the_last_one(model: Any, image_path: Path) -> None:
    args: dict[str, Any] = {**QUICK, "seed": 7}
    whole = model.generate("a", str(image_path), num_repeat=2, **args)
    assert whole.shape == (3, 17, 32, 48)
    first = model.generate("a", str(image_path), **args)
    assert torch.equal(whole[:, :9], first)
    # An image has 256 levels, the last frame has not.
    args["seed"] = 49
    again = model.generate("a", first[:, -1] / 2 + 0.5, **args)
    other = model.generate("a", str(image_path), **args)
    near, far = ((whole[:, 9:] - one[:, 1:]).abs().mean() for one in (again, other))
    assert near < 0.1 * far


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"motion_latent": torch.zeros(16, 1, 4, 6)}, "motion_latent is of chain=latent"),
        (
            {"motion_latent": torch.zeros(16, 2, 4, 6), "chain": "latent"},
            r"motion_latent \[16, 2, 4, 6\] must be floats of shape \[16, 1, 4, 6\]",
        ),
        (
            {"clip_prompts": ["a", "b"], "prompt_embeds": torch.zeros(1, 64)},
            "Embeddings do not go with clip_prompts",
        ),
        ({"num_repeat": 0}, "num_repeat=0 must be from 1"),
        ({"clip_prompts": ["a", " "]}, "clip_prompts has an empty text"),
    ],
)
def test_calls_that_are_refused(
    keywords: dict[str, Any], sentence: str, model: Any, image_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence):
        model.generate("a", str(image_path), seed=7, **QUICK, **keywords)


def test_many_long_videos_beside_others(model: Any, image_path: Path) -> None:
    """With experts grouped, too: a long video is made in one go."""
    args: dict[str, Any] = {**QUICK, "img": str(image_path), "seed": 7}
    calls = ["a", {"input_prompt": "b", "num_repeat": 2, "chain": "latent"}, "c"]
    found = list(model.generate_many(calls, group_by_expert=True, **args))
    alone = [model.generate("a", **args), None, model.generate("c", **args)]
    alone[1] = model.generate("b", num_repeat=2, chain="latent", **args)
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(one, other)
    assert np.isfinite(found[1].numpy()).all() and found[1].shape[1] == 13


def test_overlap_changes_no_bit_and_survives_a_failure(
    tiny, image_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args: dict[str, Any] = {**QUICK, "img": str(image_path), "chain": "latent", "seed": 7}
    args |= {"num_repeat": 3}
    plain = wan.WanI2V("i2v-A14B", tiny("i2v-A14B")).generate("a", **args)
    beside: Any = wan.WanI2V("i2v-A14B", tiny("i2v-A14B"), overlap_decoding=True)
    for offload in (False, True):
        assert torch.equal(beside.generate("a", offload_model=offload, **args), plain)

    def full(self: Any, *_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(type(beside._pipeline.codec), "decode_alone", full)
    assert torch.equal(beside.generate("a", **args), plain)
    assert "decoded again, without overlap (no room)" in caplog.text


def test_texts_are_embedded_once_and_not_kept(
    model: Any, image_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long video among others loses none of theirs, and its own are gone with it."""
    said, embed = list[str](), TextEncoder.__call__

    def counted(self: TextEncoder, prompt: str) -> torch.Tensor:
        said.append(prompt)
        return embed(self, prompt)

    monkeypatch.setattr(TextEncoder, "__call__", counted)
    args: dict[str, Any] = {**QUICK, "img": str(image_path), "seed": 7, "n_prompt": "no"}
    args |= {"sampling_steps": 1, "frame_num": 5, "output_type": "latent"}
    long = {"input_prompt": "", "clip_prompts": ["b", "c"]}
    list(model.generate_many([long, "a"], **args))
    assert sorted(said) == ["a", "b", "c", "no"]
    pipeline = model._pipeline
    pipeline.keep_texts(["d"], request())
    before, embeddings = {**pipeline.kept}, list[weakref.ref[torch.Tensor]]()
    asked = request(clip_prompts=("b", "c"), num_clip=2, sample_steps=1, chain="latent")
    with Image.open(image_path) as image:
        clips = pipeline.clips(asked, Inputs(image.resize((48, 32))))
        next(clips)
        embeddings += [weakref.ref(x) for text, x in pipeline.kept.items() if text != "d"]
        assert len(embeddings) == 3 and pipeline.kept["d"] is before["d"]
        clips.close()  # as where a video is ended
    assert pipeline.kept.keys() == before.keys() and not any(
        one() is not None for one in embeddings
    )
