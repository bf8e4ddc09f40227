"""Videos of several clips: conditions, lengths and seeds of clips, recipes, refusals, calls."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import wan
from tests.refusals import check_refusals, said
from wan.cli import flags
from wan.cli.resolve import resolve_command_line
from wan.pipeline.conditioning import make_chained_condition
from wan.pipeline.pipeline import Inputs
from wan.pipeline.text import TextEncoder
from wan.run import Run
from wan.settings import recipes
from wan.settings.presets import PRESETS
from wan.settings.request import VideoParams, make_video_params

PRO = "SVI_Wan2.2-I2V-A14B_{}_noise_lora_v2.0_pro.safetensors"
QUICK: dict[str, Any] = {"max_area": 48 * 32, "frame_num": 9, "seed": 7, "sampling_steps": 2}
ONE_STEP = {**QUICK, "sampling_steps": 1, "guide_scale": 1.0, "offload_model": False}


def request(**values: Any) -> VideoParams:
    given = {"prompt": "", "size": (48, 32), "frame_num": 9, "base_seed": 7, **values}
    return make_video_params(PRESETS["i2v-A14B"], given, (48, 32))


def planned(*words: object) -> Run:
    given = ["--plan", "--task", "i2v-A14B", *map(str, words)]
    return resolve_command_line(flags.parse_flags(given), lambda *_: None, plan=True)


def test_what_a_clip_is_given() -> None:
    """4 channels of the mask, then 16 of latents, in 3 latent frames of 4 x 6, computed by hand."""
    anchor, motion = torch.full((16, 1, 4, 6), 2.0), torch.full((16, 1, 4, 6), 3.0)
    first = make_chained_condition(request(chain="latent"), anchor, None)
    later = make_chained_condition(request(chain="latent"), anchor, motion)
    table = {"mask": [1, 0, 0], "first": [2, 0, 0], "later": [2, 3, 0]}
    for found, name in ((first, "first"), (later, "later")):
        assert found.shape == (20, 3, 4, 6) and found.dtype == torch.float32
        for channel in range(20):
            wanted = table["mask" if channel < 4 else name]
            assert found[channel, :, 1, 2].tolist() == wanted
            assert torch.equal(found[channel], found[channel, :, :1, :1].expand(3, 4, 6))


def test_how_long_a_video_is() -> None:
    table = [("latent", 81, n, 81 + 76 * (n - 1)) for n in (1, 2, 50)]
    for chain, frames, clips, whole in (*table, ("latent", 9, 3, 17), ("frame", 81, 3, 241)):
        asked = request(chain=chain, frame_num=frames, num_clip=clips)
        assert sum(map(asked.count_clip_frames, range(clips))) == whole, (chain, frames, clips)


def test_each_clip_has_a_seed_and_a_prompt() -> None:
    asked = request(clip_prompts=("a", "b", "c"))
    assert (asked.num_clip, asked.chain, asked.prompt) == (3, "frame", "a")
    assert [asked.make_clip_params(n).base_seed for n in range(3)] == [7, 49, 91]
    assert [asked.make_clip_params(n).prompt for n in range(3)] == ["a", "b", "c"]
    assert request(num_clip=2, base_seed=2**63 - 1).make_clip_params(1).base_seed == 41


SVI = {"sample_solver": "euler", "sample_steps": 50, "sample_shift": 5.0, "boundary": 0.875}


SVI_FILE = "SVI_v2_PRO_Wan2.2-I2V-A14B_HIGH_lora_rank_128_fp16.safetensors"
FOUR_STEPS = "wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022.x"
CHAINED = {"chain": "latent", "fps": 15.0}
RECIPES: list[tuple[list[str], tuple[str, ...], dict[str, Any]]] = [
    ([PRO.format("high")], ("svi-2-pro",), {**SVI, "sample_guide_scale": (4.0, 4.0)}),
    ([SVI_FILE], ("svi-2-pro",), {**CHAINED, "frame_num": 81}),
    (
        [PRO.format("low"), FOUR_STEPS],
        ("distill-4step", "svi-2-pro"),
        {**CHAINED, "sample_steps": 4, "boundary_step": 2, "sample_guide_scale": (1.0, 1.0)},
    ),
    (["SVI_Wan2.2-I2V-A14B_high_noise_lora_v2.0.safetensors"], (), {}),
    (["other.safetensors"], (), {}),
]


def test_the_recipe_is_recognised() -> None:
    for names, found, settings in RECIPES:
        paths = [Path("/models/svi-model/version-2.0") / name for name in names]
        chosen, values = recipes.choose_recipes("auto", [], paths, PRESETS["i2v-A14B"])
        assert chosen == found and settings.items() <= values.items(), names


def test_what_the_recipe_sets_in_a_run() -> None:
    run = planned("--recipe", "svi-2-pro", "--clips", 4)
    asked = run.params
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
    assert (own.output.fps, own.params.frame_num, own.params.sample_steps) == (24, 121, 8)
    assert any("loses color" in line for line in own.notices)
    plain = planned("--clips", 2)
    assert (plain.params.chain, plain.params.boundary, plain.output.fps) == ("frame", 0.9, 16)
    assert any("drifts" in line for line in plain.notices)
    assert planned().params.chain is None and not planned().params.has_clips


def test_what_is_refused() -> None:
    table = (
        *("--clips 0", "--clips two", "--clips 2 --frame_num 80", "--chain latent --frame_num 5"),
        *("--chain pixels", "--clips 3 --clip_prompts a b", "--clip_prompts a --prompt b"),
        *("--task t2v-A14B --clips 2", "--task ti2v-5B --clip_prompts a"),
        *("--task t2v-A14B --chain latent", "--task t2v-A14B --recipe svi-2-pro"),
        *("--overlap_decoding --vae_tiling", "--clips 2 --save_latents steps"),
    )
    found = {words: said(planned, *words.split()) for words in table}
    check_refusals("long videos: flags", found)


def test_a_lora_of_another_version_is_refused() -> None:
    others = "SVI_Wan2.2-I2V-A14B_high_noise_lora_v2.0.safetensors", "svi_2.1_pro.safetensors"
    found = {name: said(recipes.check_svi_loras, "frame", [Path(name)]) for name in others}
    check_refusals("long videos: LoRAs", found)
    for name in others:
        recipes.check_svi_loras(None, [Path(name)])
    recipes.check_svi_loras("latent", [Path(PRO.format("high")), Path("svinging.safetensors")])


@pytest.fixture(scope="module")
def model(tiny) -> Any:
    return wan.WanI2V("i2v-A14B", tiny("i2v-A14B"))


def test_one_call_is_as_many_calls_with_the_kept_latent(model: Any, image_path: Path) -> None:
    args: dict[str, Any] = {**ONE_STEP, "img": str(image_path), "guide_scale": 2.0}
    prompts, chain = ["a", "b", "c"], {"chain": "latent"}
    whole = model.generate("", clip_prompts=prompts, **chain, **args)
    latents = model.generate("", clip_prompts=prompts, output_type="latent", **chain, **args)
    assert whole.shape == (3, 9 + 4 + 4, 32, 48) and latents.shape == (16, 9, 4, 6)
    motion = None
    for number, prompt in enumerate(prompts):
        one = {**args, **chain, "seed": 7 + 42 * number, "motion_latent": motion}
        made = model.generate(prompt, output_type="latent", **one)
        assert torch.equal(made, latents[:, 3 * number : 3 * number + 3])
        if number < 2:
            shown = whole[:, 9:13] if number else whole[:, :9]
            assert torch.equal(model.generate(prompt, **one), shown)
        motion = made[:, -1:]
    alone = model.generate("b", output_type="latent", **{**args, "seed": 49})
    assert not torch.equal(alone, latents[:, 3:6]), "the latent is looked at"


def test_a_chain_of_frames_begins_with_the_last_one(model: Any, image_path: Path) -> None:
    whole = model.generate("a", str(image_path), num_repeat=2, **ONE_STEP)
    assert whole.shape == (3, 17, 32, 48)
    first = model.generate("a", str(image_path), **ONE_STEP)
    assert torch.equal(whole[:, :9], first)
    # An image has 256 levels, the last frame has not.
    args = {**ONE_STEP, "seed": 49}
    again = model.generate("a", first[:, -1] / 2 + 0.5, **args)
    other = model.generate("a", str(image_path), **args)
    near, far = ((whole[:, 9:] - one[:, 1:]).abs().mean() for one in (again, other))
    assert near < 0.1 * far


def test_calls_that_are_refused(model: Any, image_path: Path) -> None:
    two: dict[str, Any] = {"clip_prompts": ["a", "b"]}
    table: dict[str, dict[str, Any]] = {
        "motion of a chain of frames": {"motion_latent": torch.zeros(16, 1, 4, 6)},
        "two latents": {"motion_latent": torch.zeros(16, 2, 4, 6), "chain": "latent"},
        "embeddings": {**two, "prompt_embeds": torch.zeros(1, 64)},
        "no clip": {"num_repeat": 0},
        "an empty prompt": {"clip_prompts": ["a", " "]},
    }
    call = {"input_prompt": "a", "img": str(image_path), **QUICK}
    found = {name: said(model.generate, **{**call, **more}) for name, more in table.items()}
    check_refusals("long videos: calls", found)


def test_many_long_videos_beside_others(model: Any, image_path: Path) -> None:
    """Also with grouped experts, where a long video is generated without a pause."""
    args: dict[str, Any] = {**QUICK, "img": str(image_path), "guide_scale": 1.0}
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
    args: dict[str, Any] = {**ONE_STEP, "img": str(image_path), "chain": "latent"}
    args |= {"num_repeat": 3}
    plain = wan.WanI2V("i2v-A14B", tiny("i2v-A14B")).generate("a", **args)
    beside: Any = wan.WanI2V("i2v-A14B", tiny("i2v-A14B"), overlap_decoding=True)
    for offload in (False, True):
        assert torch.equal(beside.generate("a", **{**args, "offload_model": offload}), plain)

    def full(self: Any, *_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(type(beside._pipeline.vae_runner), "decode_alone", full)
    assert torch.equal(beside.generate("a", **args), plain)
    assert "decoded again, without overlap (no room)" in caplog.text


def test_texts_are_embedded_once_and_not_kept(
    model: Any, image_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long video keeps the cached embeddings of other videos, and frees its own."""
    said, embed = list[str](), TextEncoder.__call__

    def counted(self: TextEncoder, prompt: str) -> torch.Tensor:
        said.append(prompt)
        return embed(self, prompt)

    monkeypatch.setattr(TextEncoder, "__call__", counted)
    args: dict[str, Any] = {**ONE_STEP, "img": str(image_path), "n_prompt": "no"}
    args |= {"guide_scale": 2.0, "frame_num": 5, "output_type": "latent"}
    long = {"input_prompt": "", "clip_prompts": ["b", "c"]}
    list(model.generate_many([long, "a"], **args))
    assert sorted(said) == ["a", "b", "c", "no"]
    pipeline = model._pipeline
    pipeline.cache_prompt_embeds(["d"], request())
    before, embeddings = {**pipeline.cached_prompt_embeds}, list[weakref.ref[torch.Tensor]]()
    asked = request(clip_prompts=("b", "c"), num_clip=2, sample_steps=1, chain="latent")
    with Image.open(image_path) as image:
        clips = pipeline.generate_clips(asked, Inputs(image.resize((48, 32))))
        next(clips)
        embeddings += [
            weakref.ref(x) for text, x in pipeline.cached_prompt_embeds.items() if text != "d"
        ]
        assert len(embeddings) == 3 and pipeline.cached_prompt_embeds["d"] is before["d"]
        clips.close()  # as at the end of a video
    assert pipeline.cached_prompt_embeds.keys() == before.keys() and not any(
        one() is not None for one in embeddings
    )
