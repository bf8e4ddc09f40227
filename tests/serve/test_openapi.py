"""/openapi.json, which describes requests, and the page that is made from it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.pipelines import read_values
from tests.serve.bodies import FORM, make_data_url, make_form, make_picture
from tests.serve.jobs import PROMPT, Jobs, resolve_service
from wan.serve.http import operations
from wan.serve.http.metrics import Metrics
from wan.serve.http.openapi import make_openapi
from wan.serve.http.routes import Routes
from wan.serve.jobs.job import ServiceJob
from wan.serve.requests import fields
from wan.serve.requests.schema import RequestSchema, check_needed_fields, make_request_schema
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS

TASKS = (
    *("t2v-A14B", "i2v-A14B", "ti2v-5B", "s2v-14B", "animate-14B", "animate2-14B", "vace-1.3B"),
    "causal-5B",
)
ONE_NETWORK = ("guidance_high", "guidance_low", "boundary_ratio")


def make_run(task: str) -> Any:
    return resolve_service("--task", task)[0]


def make_schema(task: str) -> RequestSchema:
    return make_request_schema(make_run(task), [task], 1000, 100)


def list_accepted(entry: dict[str, Any]) -> Iterator[Any]:
    """Yields values that a schema allows: its default, choices, examples and limits."""
    if "$ref" in entry or "x-media" in entry:
        yield make_data_url()
        return
    if "const" in entry:
        yield entry["const"]
        return
    if "default" in entry:
        yield entry["default"]
    yield from entry.get("enum", ())
    yield from entry.get("examples", ())
    kind = entry.get("type")
    if kind in ("integer", "number"):
        step = 1 if kind == "integer" else 1e-6
        yield from (entry[name] for name in ("minimum", "maximum") if name in entry)
        if "exclusiveMinimum" in entry:
            yield entry["exclusiveMinimum"] + step
    elif kind == "boolean":
        yield from (True, False)
    elif kind == "array":
        yield from ([value] for value in list_accepted(entry["items"]))
    elif kind == "object":
        required = entry.get("required", ())
        yield {name: next(list_accepted(entry["properties"][name])) for name in required}
    elif kind == "string":
        yield entry.get("examples", ["text"])[0]
    for choice in entry.get("anyOf", ()):
        yield from list_accepted(choice)


def list_refused(entry: dict[str, Any]) -> Iterator[Any]:
    """Yields values that a schema does not allow."""
    if "x-media" in entry:
        yield from ("/etc/passwd", 1)
    elif "const" in entry or "enum" in entry:
        yield "neither"
    elif entry.get("type") in ("integer", "number"):
        yield from (entry.get("maximum", 0) + 1, "many")
        yield entry["minimum"] - 1 if "minimum" in entry else entry["exclusiveMinimum"]
        if "x-step" in entry:
            yield entry["minimum"] + entry["x-step"] // 2
        if "multipleOf" in entry:
            yield entry["minimum"] + entry["multipleOf"] // 2
    elif entry.get("type") == "boolean":
        yield "perhaps"
    elif entry.get("type") == "array":
        yield []


@pytest.mark.parametrize("task", TASKS)
def test_requests_made_from_the_schema(task: str) -> None:
    """The parser takes what the schema allows, and refuses what is outside."""
    run, wrong = make_run(task), []

    def is_taken(name: str, value: Any) -> bool:
        body = {"prompt": PROMPT, name: value}
        if name in ("width", "height"):
            body |= {"width": 64, "height": 64, name: value}
        if name == "guidance_scale_2":
            body |= {"guidance_scale": 3}
        try:
            parsed = fields.parse_request(body, run, [task])
            for index in range(parsed.num_outputs):
                read_values(ServiceJob("x", parsed.settings).make_output_settings(index))
        except InputError:
            return False
        return True

    # The service's own limit of them is checked later.
    limited = ("num_frames", "infer_frames", "frame_num", "seconds")
    for name, entry in make_schema(task).properties.items():
        if name == "clip_prompts" or "clip_prompts" in entry.get("x-alias-of", ""):
            continue
        wrong += [(name, value) for value in list_accepted(entry) if not is_taken(name, value)]
        wrong += [
            (name, value, "taken")
            for value in list_refused(entry)
            if is_taken(name, value)
            and not (name in limited and value == entry["maximum"] + 1)
            and not (name == "fps" and "const" in entry)
        ]
    assert not wrong


def test_fields_of_the_running_task() -> None:
    """Every field is in the schema of some task, and options of other tasks are absent."""
    schemas = {task: make_schema(task).properties for task in TASKS}
    known = set().union(*schemas.values())
    accepted = {*fields.FIELD_TO_SETTING, *fields.IGNORED_FIELDS}
    lines = {name for name, flag in FLAGS.items() if flag.line} - {"save_file", fields.FOLDER}
    unstarted = {name for name in lines if (need := FLAGS[name].needs) and not FLAGS[need].line}
    lines -= unstarted  # they need a setting that these services are started without
    accepted -= {name for name, setting in fields.FIELD_TO_SETTING.items() if setting in unstarted}
    assert not {*accepted, *lines, *fields.BLOCKS, *fields.COMPUTED_FIELDS} - known
    for name, flag in FLAGS.items():
        wrong = [task for task in TASKS if flag.tasks and task not in flag.tasks]
        if name != "src_mask":  # also a file of animate's folder
            assert not [task for task in wrong if name in schemas[task]], name
    for task in ("ti2v-5B", "s2v-14B", "animate-14B", "vace-1.3B"):
        assert not {*ONE_NETWORK[:2], "boundary_step"} & {*schemas[task]}
    assert schemas["s2v-14B"].keys() >= {"input_reference", "audio", "infer_frames"}
    assert "num_frames" not in schemas["s2v-14B"] and "seconds" not in schemas["s2v-14B"]
    assert schemas["animate-14B"].keys() >= {"src_ref", "src_pose", "src_face"}
    names = {"input_reference", "src_video", "refert_num", "log_scale"}
    assert schemas["animate2-14B"].keys() >= names
    started = resolve_service("--sample_steps", "7")[0]
    entry = make_request_schema(started, ["x"], 50, 9).properties
    assert entry["num_inference_steps"]["default"] == 7 and entry["num_frames"]["maximum"] == 49


def list_references(node: Any) -> Iterator[str]:
    """Yields each $ref of a document."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from list_references(value)
    elif isinstance(node, list):
        for value in node:
            yield from list_references(value)


async def test_the_description_of_the_routes(jobs: Jobs) -> None:
    status, headers, document = await jobs.request("/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert document["openapi"] == "3.1.0" and not document["info"]["x-random-weights"]
    for reference in list_references(document):
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
    names, described = [], set()
    for path, methods in document["paths"].items():
        needed = {*re.findall(r"{(\w+)}", path)}
        assert {entry["name"] for entry in methods.get("parameters", ())} == needed
        for method, operation in methods.items():
            if method != "parameters":
                names.append(operation["operationId"])
                described.add((method.upper(), path))
                real = path.replace("{id}", "video_x").replace("{field}", "image")
                status, *_ = await jobs.request(real, method=method.upper())
                assert status != 405 and "200" in operation["responses"]
    served = Routes(jobs.service, Metrics()).list_routes()
    assert described == {(method, route.path) for route in served for method in route.methods or ()}
    assert described >= {("HEAD", "/health"), ("POST", "/v1/videos/sync"), ("GET", "/")}
    assert len(names) == len({*names}) >= 8
    video = (await jobs.request(f"/v1/videos/{await jobs.create()}"))[2]
    async with asyncio.timeout(60):  # the events of a waiting video have no end
        answer = await jobs.request(f"/v1/videos/{video['id']}/events", method="HEAD")
    assert answer[0] == 200 and not answer[2]
    schemas = document["components"]["schemas"]
    assert {*schemas["Video"]["required"]} <= {*video}
    for path, component in (("/v1/videos", "Videos"), ("/v1/models", "Models")):
        assert {*schemas[component]["required"]} <= {*(await jobs.request(path))[2]}
    error = (await jobs.request("/v1/videos/x"))[2]["error"]
    assert {*schemas["Error"]["properties"]["error"]["required"]} == {*error}
    json.dumps(make_openapi(make_schema("t2v-A14B")), allow_nan=False)


async def test_routes_without_a_key_are_described_as_such(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", key="a secret of the API")
    wrong = []
    for path, methods in make_openapi(make_schema("t2v-A14B"))["paths"].items():
        needs_key = methods.get("get", methods.get("post")).get("security") != []
        status, *_ = await jobs.request(path, method="GET" if "get" in methods else "POST")
        wrong += [path] if needs_key != (status == 401) else []
    assert not wrong


async def test_a_request_that_is_sent_again(tmp_path: Path) -> None:
    """From the fields and files of a video comes an equal job."""
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "i2v-A14B"])
    sent = {
        "prompt": PROMPT,
        "input_reference": make_data_url(),
        "size": "64*64",
        "frame_num": "5",
        "guidance_scale": "4",
        "guidance_scale_2": "3",
        "num_clip": 2,
        "priority": 3,
        "seed": "12",
        "negative_prompt": "dark",
    }
    first = await jobs.create(sent)
    video = await jobs.get_video(first)
    assert video["request"] == {
        "prompt": PROMPT,
        "size": "64x64",
        "num_frames": "5",
        "guidance_high": 4.0,
        "guidance_low": 3.0,
        "num_clip": 2,
        "priority": 3,
        "seed": 12,
        "negative_prompt": "dark",
    }
    assert video["inputs"] == {"input_reference": 1}
    path = f"/v1/videos/{first}/inputs/input_reference"
    status, headers, content = await jobs.request(path)
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    assert headers["x-content-type-options"] == "nosniff"
    assert content == make_picture()
    url = make_data_url(media_type="")
    form = make_form({"extra_body": json.dumps(video["request"]), "input_reference": url})
    second = (await jobs.request("/v1/videos", form, Content_Type=FORM))[2]["id"]
    one, two = (jobs.service.find_job(name) for name in (first, second))
    assert (one.shape, one.guidance, one.priority) == (two.shape, two.guidance, two.priority)
    assert read_values(one.settings) == read_values(two.settings)
    for name in (f"{path}?index=1", f"/v1/videos/{first}/inputs/audio", path.replace("v", "x")):
        assert (await jobs.request(name))[0] == 404


NEEDED = {
    "t2v-A14B": [["prompt"]],
    "i2v-A14B": [["prompt"], ["input_reference"]],
    "flf2v-14B": [["prompt"], ["input_reference"], ["last_image"]],
    "ti2v-5B": [["prompt"]],
    "s2v-14B": [["input_reference"], ["audio"]],
    "animate-14B": [["src_ref"], ["src_pose"], ["src_face"]],
    "animate2-14B": [["input_reference"], ["src_video"]],
    "vace-1.3B": [["prompt"], ["src_video", "src_ref_images"]],
}
"""Task -> groups of fields, of which a request needs one each."""


@pytest.mark.parametrize("task", NEEDED)
def test_all_missing_fields_are_named(task: str) -> None:
    run, schema = make_run(task), make_schema(task)

    def find_missing(body: dict[str, Any]) -> tuple[str, set[str]] | None:
        try:
            parsed = fields.parse_request(body, run, [task])
            check_needed_fields(parsed.settings, parsed.files, run)
        except InputError as error:
            words = set(re.findall(r"\w+", str(error)))
            optional = {"prompt"} if ["prompt"] not in NEEDED[task] else set()
            return error.subject, (words - optional) & {*schema.properties}
        return None

    groups = NEEDED[task]
    complete = {name: make_data_url() for group in groups for name in group[:1]}
    complete |= {"prompt": PROMPT} if "prompt" in complete else {}
    assert find_missing({}) == (groups[0][0], {name for group in groups for name in group})
    assert find_missing(complete) is None
    if "prompt" not in complete:
        subject, _ = find_missing(complete | {"prompt": ""}) or ("", None)
        assert subject == "prompt"
    for group in groups:
        body = {name: value for name, value in complete.items() if name not in group}
        assert find_missing(body) == (group[0], {*group})
        for name in group[1:]:
            assert find_missing(body | {name: make_data_url()}) is None
    described = schema.make_object_schema()
    several = [{"required": [name]} for group in groups[-1:] if len(group) > 1 for name in group]
    assert {*described["required"]} == {name for (name, *others) in groups if not others}
    assert described.get("anyOf", []) == several


async def test_where_a_video_is_in_the_queue(jobs: Jobs) -> None:
    first = await jobs.create()
    jobs.complete(first, seconds=8)
    assert "queue_position" not in (await jobs.get_video(first))
    names = [await jobs.create() for _ in range(3)]
    videos = [(await jobs.get_video(name)) for name in names]
    assert [video["queue_position"] for video in videos] == [0, 1, 2]
    assert [video["seconds_left"] for video in videos] == [8, 16, 24]
    jobs.start_idle_ranks()
    running = await jobs.get_video(names[0])
    assert running["queue_position"] is None and 0 < running["seconds_left"] <= 8


async def test_a_filtered_list(jobs: Jobs) -> None:
    names = [
        await jobs.create({"prompt": f"a {word} Star", "seed": 7})
        for word in ("red", "tan", "old", "blue", "gray")
    ]
    jobs.complete(names[1])
    jobs.service._running[names[2]] = jobs.service.find_job(names[2])
    jobs.handle_rank_message("failed", job=names[2], code="not_finite", message="x")
    assert await jobs.service.journal.save()

    async def find(query: str) -> tuple[list[int], bool, str | None]:
        page = (await jobs.request(f"/v1/videos?{query}"))[2]
        return [names.index(row["id"]) for row in page["data"]], page["has_more"], page["last_id"]

    assert await find("status=queued,in_progress") == ([4, 3, 0], False, names[0])
    assert await find("status=queued,completed") == ([4, 3, 1, 0], False, names[0])
    assert await find("status=queued,in_progress&limit=3") == ([4, 3, 0], False, names[0])
    assert await find("limit=5") == ([4, 3, 2, 1, 0], False, names[0])
    assert await find("limit=4") == ([4, 3, 2, 1], True, names[1])
    assert await find("order=asc&limit=2") == ([0, 1], True, names[1])
    assert await find(f"order=asc&limit=3&after={names[1]}") == ([2, 3, 4], False, names[4])
    assert await find("status=queued,queued&limit=2") == ([4, 3], True, names[3])
    assert await find(f"status=queued&limit=2&after={names[3]}") == ([0], False, names[0])
    assert await find("status=completed,failed&order=asc") == ([1, 2], False, names[2])
    assert (await find("search=STAR+blue"))[0] == [3]
    assert await find("search=star&limit=2") == ([4, 3], True, names[3])
    assert await find("search=a+red") == ([0], False, names[0])
    assert (await find(f"search={names[2][-8:]}+7"))[0] == [2]
    assert await find("search=moon") == ([], False, names[0])
    status, _, answer = await jobs.request("/v1/videos?status=done")
    assert (status, answer["error"]["param"]) == (400, "status")


async def test_the_files_of_the_page(tmp_path: Path) -> None:
    """They need no key, and the page runs no script and loads nothing from elsewhere."""
    jobs = Jobs(tmp_path / "jobs", key="a secret of the API")
    texts = {}
    for name, kind in {
        "": "html",
        **{n: n.rpartition(".")[2] for n in operations.PAGE_FILES},
    }.items():
        status, headers, content = await jobs.request(f"/{name}")
        expected = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[kind]
        assert (status, headers["content-type"]) == (200, f"{expected}; charset=utf-8")
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        texts[name] = content.decode()
    linked = re.findall(r'(?:src|href)="([\w.]+)"|from "\./([\w.]+)"', "".join(texts.values()))
    assert {a or b for a, b in linked} == {*operations.PAGE_FILES}
    assert not re.search(r"<script>|<style>|\son\w+=|innerHTML|https?://(?!127)", texts[""])
    assert not any("innerHTML" in text or "eval(" in text for text in texts.values())
    assert (await jobs.request("/openapi.json"))[0] == 401


CHARACTER = ("src_ref", "src_pose", "src_face")
BROKEN: list[tuple[str, tuple[str, ...], dict[str, Any], str]] = [
    # task, fields with a picture, further fields, the field that the refusal names
    ("t2v-A14B", (), {"video_url": make_data_url(b"abc")}, "video_url"),
    ("i2v-A14B", ("image_reference",), {"last_image": make_data_url(b"abc")}, "last_image"),
    ("vace-1.3B", (), {"src_ref_images": make_data_url(b"abc")}, "src_ref_images"),
    ("animate-14B", CHARACTER, {"src_pose": make_data_url(b"abc")}, "src_pose"),
    ("animate-14B", CHARACTER, {"replace_flag": True}, "src_bg"),  # replacing needs the scene
    # A playlist that refers to another file.
    ("s2v-14B", ("image",), {"audio": make_data_url(b"ffconcat version 1.0\nfile x")}, "audio"),
]


@pytest.mark.parametrize(("task", "pictures", "more", "named"), BROKEN)
async def test_a_broken_upload_is_named_once(
    task: str, pictures: tuple[str, ...], more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    jobs = Jobs(tmp_path / "jobs", flags=["--task", task])
    error = await jobs.refuse(dict.fromkeys(pictures, make_data_url()) | more)
    assert (error["param"], error["message"].count(named)) == (named, 2 if "bg" in named else 1)
    assert str(tmp_path) not in error["message"]


async def test_random_weights_are_said_to_be_random(tmp_path: Path) -> None:
    """No checkpoint in the repository is trained for ti2v-5B."""
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "ti2v-5B"])
    info = (await jobs.request("/openapi.json"))[2]["info"]
    assert info["x-random-weights"] and "random" in info["description"]


async def test_an_uploaded_file_keeps_its_name(tmp_path: Path) -> None:
    """Also in a remix, and without the folders of the client."""
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "i2v-A14B"])
    part = 'Content-Disposition: form-data; name="input_reference"; '
    part += 'filename="C:\\\\a\\\\Портрет 1.png"'
    body = b"--edge\r\n" + part.encode() + b"\r\n\r\n" + make_picture() + b"\r\n"
    body += make_form({"prompt": PROMPT})
    video = (await jobs.request("/v1/videos", body, Content_Type=FORM))[2]
    remix = await jobs.remix(video["id"])
    for name in (video["id"], remix["id"]):
        status, headers, content = await jobs.request(f"/v1/videos/{name}/inputs/input_reference")
        assert (status, content) == (200, make_picture())
        kind, _, file_name = headers["content-disposition"].partition("; filename*=utf-8''")
        assert (kind, unquote(file_name)) == ("attachment", "Портрет 1.png")
