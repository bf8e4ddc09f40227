"""Requests of clients of OpenAI, vllm-omni and SGLang: taken, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import check_refusals
from tests.serve.bodies import FORM, make_data_url, make_form, make_picture
from tests.serve.jobs import PROMPT, Jobs
from wan.serve import __main__ as command
from wan.serve.requests import fields
from wan.settings.errors import InputError

SIZE = {"width": 96, "height": 64}
TAKEN: dict[str, dict[str, Any]] = {
    # vllm-omni: benchmarks/diffusion, the examples, the fields of the form at their defaults
    "benchmark": SIZE | {"num_frames": 5, "fps": 8, "seed": 1, "num_inference_steps": 2},
    "width as text": {"width": "96", "height": "64"},
    "width and size": SIZE | {"size": "96x64"},
    "user": {"user": "somebody"},
    "no parameters": {"extra_params": {}},
    "parameters": {"extra_params": {"sample_shift": 5}},
    "parameters as text": {"extra_params": '{"seed": 3}'},
    "video_params": {"video_params": SIZE | {"num_frames": 5, "fps": 8}},
    "boundary": {"boundary_ratio": 0.875},
    "no sound": {"generate_sound": False, "sound_duration": 2.5},
    "no interpolation": {
        "enable_frame_interpolation": "false",
        "frame_interpolation_exp": 1,
        "frame_interpolation_scale": 1.0,
        "frame_interpolation_model_path": "elfgum/RIFE-4.22.lite",
    },
    "metrics": {"return_stage_metrics": True},
    "stream": {"stream": True},
    "true cfg": {"true_cfg_scale": 1.0},
    "quality": {"quality": "default"},
    "high quality": {"quality": "high", "output_quality": "high"},
    "start": {"start_time_seconds": 0},
    "no LoRA": {"lora": {}},
    "LoRA null": {"lora": None},
    "negative": {"negative_prompt": ""},
    "model": {"model": "t2v-A14B"},
    # SGLang: the fields of its request at their defaults
    "n": {"n": 1},
    "both counts": {"n": 1, "num_outputs_per_prompt": "1"},
    "size empty": {"size": ""},
    "device": {"generator_device": "cuda"},
    "no TeaCache": {"enable_teacache": False},
    "no upscaling": {
        "enable_upscaling": False,
        "upscaling_scale": 4,
        "upscaling_model_path": None,
    },
    "output quality": {"output_quality": "default", "output_compression": None},
    "text length": {"max_sequence_length": 512},
    "no kwargs": {"diffusers_kwargs": {}},
    "paths": {"output_path": None, "perf_dump_path": None, "video_path": None, "video_url": None},
    "extra_body": {"extra_body": {"num_frames": 5, "fps": 8}},
    "extra_body as text": {"extra_body": json.dumps({"fps": 8, "n": 1})},
    "extra_json": {"extra_json": {"num_inference_steps": 1}},
    "same twice": {"num_frames": "5", "extra_body": {"num_frames": 5}},
    "blocks": {"extra_body": {"extra_params": {"seed": 1}}},
    "nulls": {"size": None, "seconds": None, "seed": None, "input_reference": None, "model": None},
    "random": {"seed": -1},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "several": ({"n": 11}, "n"),
    "none": ({"n": 0}, "n"),
    "several outputs": ({"num_outputs_per_prompt": "40"}, "num_outputs_per_prompt"),
    "two numbers": ({"n": 2, "num_outputs_per_prompt": 1}, "num_outputs_per_prompt"),
    "seeds for others": ({"n": 3, "seed": [1, 2]}, "seed"),
    "many seeds": ({"seed": [*range(11)]}, "seed"),
    "no seed": ({"seed": []}, "seed"),
    "an empty seed": ({"seed": "1,,2"}, "seed"),
    "last seeds": ({"n": 2, "seed": 2**63 - 1}, "seed"),
    "TeaCache": ({"enable_teacache": True}, "enable_teacache"),
    "interpolation": ({"enable_frame_interpolation": "true"}, "enable_frame_interpolation"),
    "upscaling": ({"enable_upscaling": True}, "enable_upscaling"),
    "sound": ({"generate_sound": True}, "generate_sound"),
    "quality": ({"output_quality": "maximum"}, "output_quality"),
    "compression": ({"output_compression": 50}, "output_compression"),
    "text length": ({"max_sequence_length": 226}, "max_sequence_length"),
    "true cfg": ({"true_cfg_scale": 4}, "true_cfg_scale"),
    "LoRA": ({"lora": {"path": "/x", "scale": 1}}, "lora"),
    "LoRA as text": ({"lora": '{"path": "/x"}'}, "lora"),
    "ratio": ({"aspect_ratio": "wide"}, "aspect_ratio"),
    "ratio of nothing": ({"aspect_ratio": "16:0"}, "aspect_ratio"),
    "ratio and size": ({"aspect_ratio": "1:1", "size": "64x64"}, "aspect_ratio"),
    "edge and width": (SIZE | {"short_edge": 480}, "short_edge"),
    "edge": ({"short_edge": 0}, "short_edge"),
    "lossless": ({"quality": "lossless"}, "quality"),
    "frames and seconds": ({"seconds": 4, "num_frames": 5}, "seconds"),
    "one side": ({"width": 96}, "width"),
    "two sizes": (SIZE | {"size": "64x64"}, "width"),
    "wide": ({"width": "wide", "height": 64}, "width"),
    "path": ({"output_path": "/etc"}, "output_path"),
    "dump": ({"perf_dump_path": "/etc"}, "perf_dump_path"),
    "video": ({"video_path": "/etc/passwd"}, "video_path"),
    "kwargs": ({"diffusers_kwargs": {"eta": 1}}, "diffusers_kwargs"),
    "control": ({"control_type": "depth"}, "control_type"),
    "device": ({"generator_device": "moon"}, "generator_device"),
    "user": ({"user": ["a"]}, "user"),
    "two seeds": ({"seed": 1, "extra_body": {"seed": 2}}, "seed"),
    "no block": ({"extra_body": 3}, "extra_body"),
    "no JSON": ({"extra_params": "{x"}, "extra_params"),
    "list": ({"extra_params": "[1]"}, "extra_params"),
    "unknown inside": ({"extra_params": {"solver_name": "unipc"}}, "solver_name"),
    "file": ({"image_reference": {"file_id": "file-1"}}, "image_reference"),
    "address": ({"reference_url": "https://a.example/x.png"}, "reference_url"),
}


async def test_requests_that_are_taken(jobs: Jobs) -> None:
    wrong = {}
    for kind, body in TAKEN.items():
        status, _, answer = await jobs.request("/v1/videos", {"prompt": PROMPT} | body)
        if status != 200 or not isinstance(answer["seed"], int) or answer["seed"] < 0:
            wrong[kind] = answer
        if "width" in body and status == 200 and answer["size"] != "96x64":
            wrong[kind] = answer
    assert not wrong


async def test_requests_that_are_refused(jobs: Jobs) -> None:
    """Each with the field that asks for more than the service can do."""
    wrong, messages = {}, {}
    for kind, (body, param) in REFUSED.items():
        status, _, answer = await jobs.request("/v1/videos", {"prompt": PROMPT} | body)
        if (status, answer.get("error", {}).get("param")) != (400, param):
            wrong[kind] = status, answer
        else:
            messages[kind] = answer["error"]["message"]
    assert not wrong
    check_refusals("serve: requests of other APIs", messages, ["'Expecting.*'"])


async def test_a_size_from_its_shape(tmp_path: Path) -> None:
    """The missing one of area and shape is that of the service, 832x480; sides are 16n."""
    jobs = Jobs(tmp_path / "jobs", flags=["--size", "832*480"])
    for body, size in (
        ({"aspect_ratio": "16:9", "short_edge": 480}, "848x480"),
        ({"aspect_ratio": "9:16", "short_edge": "720"}, "720x1280"),
        ({"aspect_ratio": "1:1"}, "624x624"),
        ({"short_edge": 240}, "416x240"),
    ):
        status, _, video = await jobs.request("/v1/videos", {"prompt": PROMPT} | body)
        assert (status, video.get("size")) == (200, size), video
    body = {"prompt": PROMPT, "aspect_ratio": "1:1", "input_reference": make_data_url()}
    image_jobs = Jobs(tmp_path / "image", flags=["--task", "i2v-A14B"])
    status, _, answer = await image_jobs.request("/v1/videos", body)
    assert (status, answer["error"]["param"]) == (400, "aspect_ratio")


REFERENCES: dict[str, tuple[str, Any]] = {
    "text": ("input_reference", make_data_url()),
    "object": ("input_reference", {"image_url": make_data_url()}),
    "JSON text": ("input_reference", json.dumps({"image_url": make_data_url()})),
    "image_reference": ("image_reference", {"image_url": make_data_url()}),
    "image_reference as text": ("image_reference", json.dumps({"image_url": make_data_url()})),
    "reference_url": ("reference_url", make_data_url()),
    "a list of one": ("input_references", [make_data_url()]),
    "with a charset": ("input_reference", make_data_url(media_type="image/png;charset=utf-8")),
    "openai's key": ("input_reference[image_url]", make_data_url()),
    "JSON list": ("image_reference", json.dumps([{"image_url": make_data_url()}])),
}


@pytest.mark.parametrize("is_form", [False, True], ids=["JSON", "form"])
async def test_references_of_an_image(is_form: bool, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "i2v-A14B"])
    wrong = {}
    for kind, (name, value) in REFERENCES.items():
        if isinstance(value, dict) and is_form:
            value = json.dumps(value)
        body: Any = {"prompt": PROMPT, name: value}
        headers = {"Content_Type": FORM} if is_form else {}
        sent = make_form(body) if is_form else body
        status, _, answer = await jobs.request("/v1/videos", sent, **headers)
        if status != 200:
            wrong[kind] = answer
            continue
        job = jobs.service.find_job(answer["id"])
        if jobs.service.files.upload_path(job, "image").read_bytes() != make_picture():
            wrong[kind] = "other content"
    assert not wrong


def test_references_of_videos_and_audio(tmp_path: Path) -> None:
    url, content = "data:video/mp4;base64,AAAA", bytes(3)
    cases: dict[str, tuple[str, dict[str, Any], str]] = {
        "video": ("vace-1.3B", {"video_reference": {"video_url": url}}, "src_video"),
        "address": ("vace-1.3B", {"video_url": url}, "src_video"),
        "audio": ("s2v-14B", {"audio_reference": {"audio_url": url}}, "audio"),
        "pictures": ("vace-1.3B", {"input_references": [url]}, "src_ref_images/000"),
    }
    for kind, (task, body, name) in cases.items():
        run, _ = command._resolve_service_run(["--task", task], tmp_path, 1, 1)
        parsed = fields.parse_request({"prompt": PROMPT} | body, run, [task])
        assert parsed.files == {name: content}, kind
    several: dict[str, Any] = {"prompt": PROMPT, "input_references": [url, url]}
    run, _ = command._resolve_service_run(["--task", "i2v-A14B"], tmp_path, 1, 1)
    assert {*fields.parse_request(several, run, ["i2v-A14B"]).files} == {
        f"src_ref_images/00{index}" for index in range(2)
    }  # refused with its tasks when the run is resolved


def test_null_is_as_if_left_out(tmp_path: Path) -> None:
    run, _ = command._resolve_service_run([], tmp_path, 1, 1)
    names = {*fields.FIELD_TO_SETTING, *fields.IGNORED_FIELDS, *fields.BLOCKS}
    names |= {*fields.COMPUTED_FIELDS, "fps"}
    for name in names:
        assert fields.parse_request({"prompt": PROMPT, name: None}, run, ["x"]).names == {
            "prompt": "prompt"
        }
    with pytest.raises(InputError, match="prompt"):
        fields.parse_request({"prompt": None}, run, ["x"])


async def test_names_of_the_model(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", model_names=["Wan-AI/Wan2.2", "other"])
    ids = [model["id"] for model in (await jobs.request("/v1/models"))[2]["data"]]
    assert ids == ["Wan-AI/Wan2.2", "other", "t2v-A14B"]
    for name in (*ids, None):
        body = {"prompt": PROMPT, "model": name}
        status, _, answer = await jobs.request("/v1/videos", body)
        assert (status, answer["model"]) == (200, "Wan-AI/Wan2.2")
    assert (await jobs.refuse({"model": "sora-2"}))["param"] == "model"


async def test_a_number_as_seed_in_every_response(jobs: Jobs) -> None:
    for seed in (42, "42"):
        name = await jobs.create({"seed": seed})
        assert (await jobs.get_video(name))["seed"] == 42
    form = make_form({"prompt": PROMPT, "seed": "42"})
    assert (await jobs.request("/v1/videos", form, Content_Type=FORM))[2]["seed"] == 42
    job = jobs.service.find_job(name)
    jobs.service.journal.update_job(job, settings=job.settings | {"base_seed": "7"})  # 0.4.0
    assert (await jobs.get_video(name))["seed"] == 7


async def test_a_page_of_no_videos(jobs: Jobs) -> None:
    empty = {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
    assert (await jobs.request("/v1/videos?limit=0&after="))[2] == empty
    await jobs.create()
    assert (await jobs.request("/v1/videos?limit=0"))[2] == empty | {"has_more": True}


async def test_a_remix_with_nulls(jobs: Jobs) -> None:
    name = await jobs.create({"seed": "5"})
    body = {"prompt": "a blue star", "model": None}
    status, _, video = await jobs.request(f"/v1/videos/{name}/remix", body)
    assert (status, video["seed"], video["remixed_from_video_id"]) == (200, 5, name)


async def test_an_empty_file_input_of_a_form(jobs: Jobs) -> None:
    """Is as if left out, without a name; an empty file that has one is refused."""
    head = '--edge\r\nContent-Disposition: form-data; name="input_reference"; filename=""\r\n'
    part = f"{head}Content-Type: application/octet-stream\r\n\r\n\r\n".encode()
    form = part + make_form({"prompt": PROMPT})
    assert (await jobs.request("/v1/videos", form, Content_Type=FORM))[0] == 200
    form = form.replace(b'filename=""', b'filename="a.png"')
    status, _, answer = await jobs.request("/v1/videos", form, Content_Type=FORM)
    assert (status, answer["error"]["param"]) == (400, "input_reference")
