"""Validation of requests: fields and bodies; a refused request creates no job."""

from __future__ import annotations

import json
from typing import Any

from tests.refusals import check_refusals
from tests.serve.bodies import FORM, make_data_url, make_form, make_picture
from tests.serve.jobs import PROMPT, Jobs
from wan.serve.requests import fields
from wan.settings.flags import FLAGS

NAMES = sorted(
    {*FLAGS, *fields.COMPUTED_FIELDS, *fields.UPLOADS, fields.FOLDER}
    | {*fields.FIELD_TO_SETTING, *(name for name, x in fields.IGNORED_FIELDS.items() if x)}
)
URLENCODED = "application/x-www-form-urlencoded"
NEVER = {  # JSON values that no field accepts
    "object": '{"a": 1}',
    "empty object": "{}",
    "list of lists": "[[1]]",
    "list with null": "[null]",
    "1e308": "1e308",
    "-1e308": "-1e308",
    "10**30": str(10**30),
    "long": json.dumps("x" * 100_000),
}
NO_JSON = {  # refused whatever the field is
    "deep": "[" * 50 + "]" * 50,
    "NaN": "NaN",
    "Infinity": "Infinity",
    "above float64": "1e400",
    "digits": "9" * 5000,
    "lone surrogate": '"\\ud800"',
}
NO_NUMBER = ("nan", "inf", "many", "", "1,,1", "9" * 5000, "\0")
TEXTS = ("prompt", "negative_prompt")


async def test_odd_values(jobs: Jobs) -> None:
    wrong = []
    accepted = {("size", ""), ("diffusers_kwargs", "empty object")}
    accepted |= {(name, "empty object") for name in fields.LORAS}
    for name in NAMES:
        texts = {} if name in TEXTS else {text: json.dumps(text) for text in NO_NUMBER}
        bodies = NO_JSON if name in ("prompt", "seed", "size", "lora") else {}
        for kind, value in (NEVER | bodies | texts).items():
            if (name, kind) in accepted:
                continue
            prompt = "" if name == "prompt" else f'"prompt": "{PROMPT}", '
            body = f'{{{prompt}"{name}": {value}}}'.encode()
            status, _, answer = await jobs.request("/v1/videos", body)
            sentence = answer["error"]["message"]
            if not (400 <= status < 500 and 0 < len(sentence) < 700 and "\n" not in sentence):
                wrong.append((name, kind, status, sentence))
    assert not wrong
    assert (await jobs.request("/v1/videos"))[2]["data"] == []
    assert (await jobs.request("/health"))[2]["queued"] == 0


REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    # fields of the request, and the field named by the refusal
    "unknown field": ({"colour": "red"}, "colour"),
    "name of other programs": ({"steps": 4}, "steps"),
    "name of a flag": ({"frames": 5}, "frames"),
    "misspelt": ({"guidence_scale": 4}, "guidence_scale"),
    "misspelt setting": ({"sample_step": 4}, "sample_step"),
    "of loading, misspelt": ({"ckpt_dirs": "/x"}, "ckpt_dirs"),
    "size": ({"size": "17x33"}, "size"),
    "frames": ({"num_frames": 6}, "num_frames"),
    "steps": ({"num_inference_steps": 0}, "num_inference_steps"),
    "twice": ({"seed": 1, "base_seed": 2}, "base_seed"),
    "seconds and frames": ({"seconds": 1, "num_frames": 5}, "seconds"),
    "boundary": ({"boundary_ratio": 0.5}, "boundary_ratio"),
    "image": ({"input_reference": "data:image/png;base64,AAAA"}, "input_reference"),
    "no base64": ({"input_reference": "data:image/png;base64,AA!"}, "input_reference"),
    "path": ({"image": "/etc/passwd"}, "image"),
    "other path": ({"audio": "/etc/passwd"}, "audio"),
    "other picture": ({"src_ref_images": "/etc/passwd"}, "src_ref_images"),
    "pictures": ({"src_ref_images": ["data:image/png;base64,AA=="] * 99}, "src_ref_images"),
    "folder": ({"src_root_path": "/etc"}, "src_root_path"),
    "save_file": ({"save_file": "x.mp4"}, "save_file"),
    "latents": ({"latent_path": "x"}, "latent_path"),
    "of loading": ({"comm_type": 2}, "comm_type"),
    "step cache": ({"step_cache": "mag"}, "step_cache"),
    "model": ({"model": "sora-2"}, "model"),
    "second guidance alone": ({"guidance_scale_2": 3}, "guidance_scale_2"),
    "two guidances": ({"guidance_scale": 3, "sample_guide_scale": 4}, "sample_guide_scale"),
    "three guidances": ({"guidance_high": 3, "guidance_scale_2": 4}, "guidance_high"),
    "priority": ({"priority": 101}, "priority"),
    "too long": ({"num_frames": 4001}, None),
    "prompt": ({"prompt": "x" * 10_001}, None),
    "no prompt": ({"prompt": "\u200b"}, "prompt"),
    "null": ({"prompt": None}, "prompt"),
    "deep": ({"seed": [[[[[[[[[1]]]]]]]]]}, None),
}


async def test_refusals(jobs: Jobs) -> None:
    """Each refusal names its field, no path of this machine, and is not to be retried."""
    messages, wrong = {}, {}
    for kind, (request_fields, param) in REFUSED.items():
        body = {"prompt": PROMPT} | request_fields
        status, headers, answer = await jobs.request("/v1/videos", body)
        messages[kind] = answer["error"]["message"]
        outcome = (status, headers["x-should-retry"], answer["error"]["param"])
        if outcome != (400, "false", param) or str(jobs.folder) in messages[kind]:
            wrong[kind] = outcome
    assert not wrong
    assert (await jobs.request("/health"))[2]["queued"] == 0
    assert not [*(jobs.folder / "jobs").iterdir()]
    check_refusals("serve: fields", messages, ["Only base64 data is allowed"])  # Python's words


async def test_bodies_that_cannot_be_read(jobs: Jobs) -> None:
    """Neither JSON nor a form, or a form with a repeated field."""
    image = {"image": make_picture(), "image[image_url]": make_data_url()}
    twice = '{"fps": 8, "fps": 16}'
    bodies: dict[str, tuple[bytes, dict[str, Any]]] = {
        "no JSON": (b"{" * 10, {}),
        "a list": (b"[1]", {}),
        "deep": (b"[" * 100_000, {}),
        "digits": (b'{"seed": ' + b"9" * 5000 + b"}", {}),
        "NaN": (b'{"seed": NaN}', {}),
        "half a pair": (b'{"prompt": "\\ud800"}', {}),
        "half a pair in a name": (b'{"prompt": "a", "extra_body": {"\\ud800": 1}}', {}),
        "half a pair in a list": (b'{"prompt": "a", "lora": [{"name": "\\ud800"}]}', {}),
        "a form without an edge": (b"x", {"content_type": "multipart/form-data"}),
        "twice": (make_form({"seed": ["1", "1"]}), {"content_type": FORM}),
        "twice, urlencoded": (b"prompt=a&prompt=b", {"content_type": URLENCODED}),
        "many, urlencoded": (b"a&" * 101, {"content_type": URLENCODED}),
        "long, urlencoded": (b"prompt=" + b"a" * 250_000, {"content_type": URLENCODED}),
        "a number and a list": (make_form({"seed": "1", "seed[]": ["2"]}), {"content_type": FORM}),
        "a list and a number": (make_form({"seed[]": ["2"], "seed": "1"}), {"content_type": FORM}),
        "a file and an address": (make_form(image), {"content_type": FORM}),
        "two files": (make_form({"image": [make_picture()] * 2}), {"content_type": FORM}),
        "twice in JSON": (b'{"prompt": "a", "seed": 1, "seed": 1}', {}),
        "twice, escaped": (b'{"prompt": "a", "\\u0070rompt": "b"}', {}),
        "twice, UTF-16": ('{"prompt": "a", "prompt": "b"}'.encode("utf-16"), {}),
        "twice in a block": (b'{"prompt": "a", "extra_body": {"seed": 1, "seed": 2}}', {}),
        "twice in a list": (b'{"prompt": "a", "lora": [{"name": "a", "name": "b"}]}', {}),
        "twice in JSON text": (make_form({"extra_body": twice}), {"content_type": FORM}),
        "twice in text of a list": (
            rb'{"prompt": "a", "lora": ["{\"name\": \"a\", \"name\": \"b\"}"]}',
            {},
        ),
    }
    messages, wrong = {}, {}
    for kind, (body, headers) in bodies.items():
        status, _, answer = await jobs.request("/v1/videos", body, **headers)
        messages[kind] = answer["error"]["message"]
        if status != 400:
            wrong[kind] = status
    assert not wrong
    del messages["a form without an edge"]  # its wording is from Starlette
    check_refusals("serve: bodies", messages, ["'Expecting.*'"])  # Python's words


async def test_other_routes_refuse_unknown_values(jobs: Jobs) -> None:
    name = await jobs.create()
    prompt = {"prompt": PROMPT}
    requests: dict[str, tuple[str, Any, int]] = {
        "order": ("/v1/videos?order=up", None, 400),
        "limit": ("/v1/videos?limit=-1", None, 400),
        "too many": ("/v1/videos?limit=101", None, 400),
        "no such video": ("/v1/videos/video_x", None, 404),
        "no id": ("/v1/videos/..", None, 404),
        "variant": (f"/v1/videos/{name}/content?variant=sound", None, 400),
        "not done": (f"/v1/videos/{name}/content", None, 404),
        "more than a prompt": (f"/v1/videos/{name}/remix", prompt | {"seed": 1}, 400),
        "limit twice": ("/v1/videos?limit=1&limit=2", None, 400),
        "index twice": (f"/v1/videos/{name}/content?index=0&index=1", None, 400),
    }
    messages, wrong = {}, {}
    for kind, (path, body, status) in requests.items():
        actual, _, answer = await jobs.request(path, body)
        messages[kind] = answer["error"]["message"]
        if actual != status:
            wrong[kind] = actual
    assert not wrong
    check_refusals("serve: routes", messages)
    assert (await jobs.request("/v1/nothing"))[0] == 404


async def test_alternative_field_names(jobs: Jobs) -> None:
    body = {"model": "t2v-A14B", "comm_type": 0, "seconds": "0.3", "num_inference_steps": "1"}
    body |= {"flow_shift": 5, "fps": 16, "size": "64x64", "boundary_ratio": 0.875, "seed": 6}
    status, _, video = await jobs.request("/v1/videos", {"prompt": PROMPT} | body)
    assert status == 200, video
    reported = [video[name] for name in ("num_frames", "fps", "seed", "size", "steps")]
    assert reported == [5, 16, 6, "64x64", [0, 1]]
    assert jobs.service.find_job(video["id"]).settings["sample_shift"] == 5


async def test_samplers_and_noise_tables(jobs: Jobs) -> None:
    """Progress counts the forward passes of two-pass steps."""
    body = {"prompt": PROMPT, "num_inference_steps": 3, "sample_solver": "res_2s", "sigmas": "beta"}
    status, _, video = await jobs.request("/v1/videos", body)
    assert (status, video["steps"]) == (200, [0, 5]), video
    job = jobs.service.find_job(video["id"])
    assert (job.settings["sample_solver"], job.settings["sigmas"]) == ("res_2s", "beta")
    status, _, answer = await jobs.request("/v1/videos", body | {"sigmas": "karras"})
    assert status == 400 and "official, simple, beta or beta57" in str(answer)
