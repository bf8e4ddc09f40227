"""Videos of several clips: conditions, lengths and seeds of clips, recipes, refusals, calls."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import wan
from tests.pipelines import resolve_plan
from tests.refusals import check_refusals, get_refusal
from wan.app.run import Run
from wan.modules.t5 import TextEncoder
from wan.pipeline.clips import generate_clips
from wan.settings import recipes
from wan.settings.presets import PRESETS
from wan.tasks.base import Inputs, VideoParams, make_video_params
from wan.tasks.image2video import make_chained_condition

PRO = "SVI_Wan2.2-I2V-A14B_{}_noise_lora_v2.0_pro.safetensors"
QUICK: dict[str, Any] = {"max_area": 32 * 16, "frame_num": 5, "seed": 7, "sampling_steps": 2}
LATENT: dict[str, Any] = {"chain": "latent", "frame_num": 9}  # the fewest frames
ONE_STEP = {**QUICK, "sampling_steps": 1, "guide_scale": 1.0, "offload_model": False}


def request(**values: Any) -> VideoParams:
    settings = {"prompt": "", "size": (48, 32), "frame_num": 9, "base_seed": 7, **values}
    return make_video_params(PRESETS["i2v-A14B"], settings, (48, 32))


def plan_run(*arguments: object) -> Run:
    return resolve_plan("--task", "i2v-A14B", *arguments)


def test_chained_conditions_of_clips() -> None:
    """4 channels of the mask, then 16 of latents, in 3 latent frames of 4 x 6, computed by hand."""
    anchor, motion = torch.full((16, 1, 4, 6), 2.0), torch.full((16, 1, 4, 6), 3.0)
    first = make_chained_condition(request(chain="latent"), anchor, None)
    later = make_chained_condition(request(chain="latent"), anchor, motion)
    table = {"mask": [1, 0, 0], "first": [2, 0, 0], "later": [2, 3, 0]}
    for condition, name in ((first, "first"), (later, "later")):
        assert condition.shape == (20, 3, 4, 6) and condition.dtype == torch.float32
        for channel in range(20):
            expected = table["mask" if channel < 4 else name]
            assert condition[channel, :, 1, 2].tolist() == expected
            assert torch.equal(condition[channel], condition[channel, :, :1, :1].expand(3, 4, 6))


def test_how_long_a_video_is() -> None:
    table = {("latent", 81, n): 81 + 76 * (n - 1) for n in (1, 2, 50)}
    table |= {("latent", 9, 3): 17, ("frame", 81, 3): 241}
    for (chain_mode, frames, clips), total_frames in table.items():
        params = request(chain=chain_mode, frame_num=frames, num_clip=clips)
        assert sum(map(params.count_clip_frames, range(clips))) == total_frames, params


def test_each_clip_has_a_seed_and_a_prompt() -> None:
    params = request(clip_prompts=("a", "b", "c"))
    assert (params.num_clip, params.chain, params.prompt) == (3, "frame", "a")
    assert [params.make_clip_params(n).base_seed for n in range(3)] == [7, 49, 91]
    assert [params.make_clip_params(n).prompt for n in range(3)] == ["a", "b", "c"]
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
    for names, expected_recipes, settings in RECIPES:
        paths = [Path("/models/svi-model/version-2.0") / name for name in names]
        chosen, values = recipes.choose_recipes("auto", [], paths, PRESETS["i2v-A14B"])
        assert chosen == expected_recipes and settings.items() <= values.items(), names


def test_what_the_recipe_sets_in_a_run() -> None:
    run = plan_run("--recipe", "svi-2-pro", "--num_clip", 4)
    expected = {**SVI, "chain": "latent", "num_clip": 4, "frame_num": 81}
    expected["sample_guide_scale"] = (4.0, 4.0)
    assert {name: getattr(run.params, name) for name in expected} == expected
    assert run.settings["num_clip"] == 4 and run.settings["fps"] == 15
    custom = plan_run("--recipe", "svi-2-pro", "--fps", 24, "--frame_num", 121, "--sample_steps", 8)
    assert (custom.output.fps, custom.params.frame_num, custom.params.sample_steps) == (24, 121, 8)
    assert any("loses color" in line for line in custom.notices)
    plain = plan_run("--num_clip", 2)
    assert (plain.params.chain, plain.params.boundary, plain.output.fps) == ("frame", 0.9, 16)
    assert any("drifts" in line for line in plain.notices)
    assert plan_run().params.chain is None and not plan_run().params.has_clips


def test_flags_that_are_refused() -> None:
    table = (
        *(
            "--num_clip 0",
            "--num_clip two",
            "--num_clip 2 --frame_num 80",
            "--chain latent --frame_num 5",
        ),
        *("--chain pixels", "--num_clip 3 --clip_prompts a b", "--clip_prompts a --prompt b"),
        *("--task t2v-A14B --num_clip 2", "--task ti2v-5B --clip_prompts a"),
        *("--task t2v-A14B --chain latent", "--task t2v-A14B --recipe svi-2-pro"),
        *("--overlap_decoding --vae_tiling", "--num_clip 2 --save_latents steps"),
    )
    messages = {arguments: get_refusal(plan_run, *arguments.split()) for arguments in table}
    check_refusals("long videos: flags", messages)


def test_a_lora_of_another_version_is_refused() -> None:
    file_names = "SVI_Wan2.2-I2V-A14B_high_noise_lora_v2.0.safetensors", "svi_2.1_pro.safetensors"
    messages = {
        name: get_refusal(recipes.check_svi_loras, "frame", [Path(name)]) for name in file_names
    }
    check_refusals("long videos: LoRAs", messages)
    for name in file_names:
        recipes.check_svi_loras(None, [Path(name)])
    recipes.check_svi_loras("latent", [Path(PRO.format("high")), Path("svinging.safetensors")])


@pytest.fixture(scope="module")
def model(tiny) -> Any:
    return wan.WanI2V("i2v-A14B", tiny("i2v-A14B"))


def test_one_call_is_as_many_calls_with_the_kept_latent(model: Any, image_path: Path) -> None:
    args: dict[str, Any] = {**ONE_STEP, **LATENT, "img": str(image_path)}
    latent_args, prompts = {**args, "output_type": "latent"}, ["a", "b", "c"]
    latents = model.generate("", clip_prompts=prompts, **latent_args)
    assert latents.shape == (16, 9, 2, 2)
    motion_latents = None, latents[:, 2:3], latents[:, 5:6]
    for number, (prompt, motion) in enumerate(zip(prompts, motion_latents, strict=True)):
        clip_args = {"seed": 7 + 42 * number, "motion_latent": motion}
        clip_latents = model.generate(prompt, **latent_args | clip_args)
        assert torch.equal(clip_latents, latents[:, 3 * number : 3 * number + 3])
    second = model.generate("b", **{**args, "seed": 49}, motion_latent=motion_latents[1])
    video = model.generate("", clip_prompts=prompts[:2], **args)
    first = model._pipeline.decode(latents[:, :3])
    assert video.shape == (3, 9 + 4, 16, 16) and torch.equal(video, torch.cat((first, second), 1))
    alone = model.generate("b", **{**latent_args, "seed": 49})
    assert not torch.equal(alone, latents[:, 3:6]), "the latent is looked at"


def test_a_chain_of_frames_begins_with_the_last_one(model: Any, image_path: Path) -> None:
    video = model.generate("a", str(image_path), num_repeat=2, **ONE_STEP)
    first = model.generate("a", str(image_path), **ONE_STEP)
    assert video.shape == (3, 9, 16, 16) and torch.equal(video[:, :5], first)
    # An image has 256 levels, the last frame has not.
    args = ONE_STEP | {"seed": 49}
    near, far = (
        (video[:, 5:] - model.generate("a", image, **args)[:, 1:]).abs().mean()
        for image in (first[:, -1] / 2 + 0.5, str(image_path))
    )
    assert near < 0.1 * far


def test_calls_that_are_refused(model: Any, image_path: Path) -> None:
    two: dict[str, Any] = {"clip_prompts": ["a", "b"]}
    table: dict[str, dict[str, Any]] = {
        "motion of a chain of frames": {"motion_latent": torch.zeros(16, 1, 4, 6)},
        "two latents": {"motion_latent": torch.zeros(16, 2, 4, 6), **LATENT},
        "embeddings": {**two, "prompt_embeds": torch.zeros(1, 64)},
        "no clip": {"num_repeat": 0},
        "an empty prompt": {"clip_prompts": ["a", " "]},
    }
    call = {"input_prompt": "a", "img": str(image_path), **QUICK, "max_area": 48 * 32}
    messages = {
        name: get_refusal(model.generate, **{**call, **overrides})
        for name, overrides in table.items()
    }
    check_refusals("long videos: calls", messages)


def test_long_videos_among_other_videos(model: Any, image_path: Path) -> None:
    """Also with grouped experts, where a long video is generated without a pause."""
    args: dict[str, Any] = {**QUICK, "img": str(image_path), "guide_scale": 1.0}
    args["output_type"] = "latent"
    calls = ["a", {"input_prompt": "b", "num_repeat": 2}, "c"]
    latents = list(model.generate_many(calls, group_by_expert=True, **args))
    args["offload_model"] = False
    alone = model.generate("b", num_repeat=2, **args), model.generate("c", **args)
    assert all(map(torch.equal, latents[1:], alone)) and latents[1].shape[1] == 4


def test_overlap_changes_no_bit_and_survives_a_failure(
    model: Any,
    tiny,
    image_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args: dict[str, Any] = {**ONE_STEP, **LATENT, "img": str(image_path), "num_repeat": 2}
    plain = model.generate("a", **args)
    overlapping_model: Any = wan.WanI2V("i2v-A14B", tiny("i2v-A14B"), overlap_decoding=True)
    decoded = overlapping_model.generate("a", **{**args, "offload_model": True})
    assert torch.equal(decoded, plain) and "decoded again" not in caplog.text

    def full(self: Any, *_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(type(overlapping_model._pipeline.vae_runner), "decode_alone", full)
    assert torch.equal(overlapping_model.generate("a", **args), plain)
    assert "decoded again, without overlap (no room)" in caplog.text


def test_texts_are_embedded_once_and_not_kept(
    model: Any, image_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long video keeps the cached embeddings of other videos, and frees its own."""
    embedded_prompts, embed = list[str](), TextEncoder.__call__

    def embed_and_record(self: TextEncoder, prompt: str) -> torch.Tensor:
        embedded_prompts.append(prompt)
        return embed(self, prompt)

    monkeypatch.setattr(TextEncoder, "__call__", embed_and_record)
    args: dict[str, Any] = {**ONE_STEP, "img": str(image_path), "n_prompt": "no"}
    args |= {"guide_scale": 2.0, "output_type": "latent"}
    long = {"input_prompt": "", "clip_prompts": ["b", "c"]}
    list(model.generate_many([long, "a"], **args))
    assert sorted(embedded_prompts) == ["a", "b", "c", "no"]
    pipeline = model._pipeline
    pipeline.cache_prompt_embeds(["d"], request())
    cached_embeds, embeddings = {**pipeline.cached_prompt_embeds}, list[weakref.ref[torch.Tensor]]()
    params = request(clip_prompts=("b", "c"), num_clip=2, sample_steps=1, chain="latent")
    with Image.open(image_path) as image:
        clips = generate_clips(pipeline, params, Inputs(image=image.resize((48, 32))))
        next(clips)
        embeddings += [
            weakref.ref(x) for text, x in pipeline.cached_prompt_embeds.items() if text != "d"
        ]
        assert len(embeddings) == 3 and pipeline.cached_prompt_embeds["d"] is cached_embeds["d"]
        for embeds in pipeline.cached_prompt_embeds.values():
            assert embeds.untyped_storage().nbytes() == embeds.nbytes, "a view keeps all tokens"
        del embeds
        clips.close()  # as at the end of a video
    assert pipeline.cached_prompt_embeds.keys() == cached_embeds.keys() and not any(
        embedding_ref() is not None for embedding_ref in embeddings
    )
