"""The service with real processes: answers to clients, and recovery from failures."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import openai
import pytest
from PIL import Image

from tests.dist import REPO, TORCHRUN, free_port
from tests.serve.serving import (
    PROMPT,
    Faults,
    ServiceProcess,
    generate_frames,
    make_post_request,
    open_connection,
    read_frames,
)
from tests.tasks.tasks import write_moving_box
from tools import make_character, make_sound

pytestmark = [
    pytest.mark.dist,
    pytest.mark.xdist_group("serve"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

GENERATE_ARGS = ("--frame_num", 5, "--sample_steps", 2, "--base_seed", 7, "--prompt", PROMPT)
LONG = {"num_inference_steps": 1000, "num_frames": 17}  # deleted before it is complete
DENOISE, PIPELINE = "wan.pipeline.denoise:", "wan.pipeline.pipeline:Pipeline."
FAULTS: dict[str, tuple[int, str, str, bool, str | None, int]] = {
    # rank, failing function, fault, whether after its return, error of the job, restarts
    "between": (1, f"{DENOISE}DenoisingLoop._check_finite", "raise", False, "internal_error", 0),
    "before an exchange": (1, f"{DENOISE}predict_velocity", "raise", False, None, 1),
    "inside an exchange": (1, "wan.distributed.ulysses:_start_exchange", "raise", True, None, 1),
    "after an exchange": (1, f"{DENOISE}predict_velocity", "raise", True, None, 1),
    "no memory": (1, f"{DENOISE}predict_velocity", "memory", False, "out_of_memory", 1),
    "killed in text": (1, f"{PIPELINE}encode_prompt", "kill", False, None, 1),
    "killed in denoising": (0, f"{DENOISE}predict_velocity", "kill", False, None, 1),
    "killed in decoding": (0, f"{PIPELINE}decode_to_sink", "kill", False, None, 1),
    "killed in writing": (
        0,
        "wan.media.video_writer:Mp4Encoder.write_frames",
        "kill",
        False,
        None,
        1,
    ),
}
FAULT_TARGETS = dict.fromkeys(at for _, at, *_ in FAULTS.values())


def has_finished_steps(served: ServiceProcess, video: str) -> bool:
    """Whether more than one step is done."""
    return bool(served.request(f"/v1/videos/{video}")[2]["steps"][0] > 1)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Makes ranks of `served` fail."""
    return Faults(tmp_path_factory.mktemp("faults") / "path", *FAULT_TARGETS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[ServiceProcess]:
    """A service of two ranks with InsertComm and few connections."""
    folder = tmp_path_factory.mktemp("serve") / "jobs"
    kwargs: dict[str, Any] = {"path": faults.path, "descriptors": 150}
    with ServiceProcess(folder, 2, ["--queue", 6], ["--comm_type", 1], **kwargs) as service:
        yield service


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The frames of `GENERATE_ARGS` by generate.py, which `served` must reproduce."""
    path = tmp_path_factory.mktemp("own") / "own.mp4"
    return generate_frames(path, *GENERATE_ARGS, "--ulysses_size", 2, "--comm_type", 1, ranks=2)


def test_create_poll_and_fetch(served: ServiceProcess, own: np.ndarray, tmp_path: Path) -> None:
    client = served.client()
    more = {"num_frames": 5, "num_inference_steps": 2, "seed": 7}
    video = client.videos.create(prompt=PROMPT, size="64x64", extra_body=more)
    assert video.object == "video" and video.status in ("queued", "in_progress")
    assert (video.model, video.size, video.seconds) == ("t2v-A14B", "64x64", "0.625")
    video = client.videos.poll(video.id, poll_interval_ms=100)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    path = tmp_path / "v.mp4"
    path.write_bytes(client.videos.download_content(video.id).read())
    assert (read_frames(path) == own).all()
    for variant, width in (("thumbnail", 64), ("spritesheet", 256)):
        picture = client.videos.download_content(video.id, variant=variant).read()
        assert imageio.v3.imread(picture).shape[1] == width
    status, headers, part = served.request(f"/v1/videos/{video.id}/content", Range="bytes=4-11")
    assert status == 206 and part == path.read_bytes()[4:12] and part.startswith(b"ftyp")
    assert headers["content-type"] == "video/mp4"


def test_several_videos_of_one_job(served: ServiceProcess, own: np.ndarray, tmp_path: Path) -> None:
    """Each equals the video of a request with its seed alone."""
    single, several = served.create(seed=6, size="64x64"), served.create(seed=6, n=2, size="64x64")
    frames = []
    for video, index in ((single, 0), (several, 0), (several, 1)):
        assert served.wait_for_video(video)["status"] == "completed"
        content = served.request(f"/v1/videos/{video}/content?index={index}")[2]
        (tmp_path / "v.mp4").write_bytes(content)
        frames.append(read_frames(tmp_path / "v.mp4"))
    assert (frames[0] == frames[1]).all() and (frames[2] == own).all()
    assert (frames[0] != frames[2]).any()
    video = served.request(f"/v1/videos/{several}")[2]
    assert video["steps"] == [4, 4] and all(row["stage_durations"] for row in video["data"])


def test_events_of_stages_and_steps(served: ServiceProcess) -> None:
    """The stages that the ranks report, in their order, and every step."""
    video = served.create(num_inference_steps=3)
    status, headers, text = served.request(f"/v1/videos/{video}/events")
    assert status == 200 and headers.get_content_type() == "text/event-stream"
    blocks = [
        dict(line.split(": ", 1) for line in block.splitlines() if line)
        for block in text.decode().strip().split("\n\n")
    ]
    events = [(block["event"], json.loads(block["data"])) for block in blocks if "event" in block]
    stages = [event["stage"] for kind, event in events if kind == "stage"]
    assert {"denoising", "decoding", "writing"} <= {*stages}
    assert stages.index("denoising") < stages.index("decoding")
    assert [event["done"] for kind, event in events if kind == "step"] == [1, 2, 3]
    assert events[-1] == ("end", served.request(f"/v1/videos/{video}")[2])


def test_a_preview_while_a_video_is_generated(served: ServiceProcess) -> None:
    """The newest picture, until the job is deleted."""
    video = served.create(num_inference_steps=16, preview=4)
    path = f"/v1/videos/{video}/content?variant=preview"
    answer: Any = None
    state: Any = None

    def has_preview() -> bool:
        nonlocal answer, state
        answer, state = served.request(path), served.request(f"/v1/videos/{video}")[2]
        return answer[0] == 200 and state["preview_step"] > 0

    served.wait(has_preview)
    assert state["status"] == "in_progress" and 4 <= state["preview_step"] <= state["steps"][0] + 4
    _, headers, picture = answer
    assert headers["content-type"] == "image/jpeg" and imageio.v3.imread(picture).shape[2] == 3
    finished = served.wait_for_video(video)
    assert finished["preview_step"] == 16 and finished["stage_durations"]["preview"] > 0
    status, headers, newest = served.request(path, If_None_Match=headers["etag"])
    assert status == 200 and newest != picture
    assert served.request(path, If_None_Match=headers["etag"])[0] == 304
    served.request(f"/v1/videos/{video}", method="DELETE")
    assert served.request(path)[0] == 404


def test_list_in_pages_and_remix(served: ServiceProcess) -> None:
    client = served.client()
    shortest = {"num_frames": 1, "num_inference_steps": 1}
    ids = [served.create(seed=number, **shortest) for number in range(2)]
    listed = [video.id for video in client.videos.list(limit=1)]
    assert listed[:2] == ids[::-1] and len(listed) == len(set(listed))
    assert [video.id for video in client.videos.list(limit=1, order="asc")] == listed[::-1]
    remixed = client.videos.remix(ids[0], prompt="a small red star grows on a brown background")
    assert remixed.remixed_from_video_id == ids[0] and remixed.seed == 0
    assert served.wait_for_video(remixed.id)["status"] == "completed"


def test_deleted_and_abandoned_videos_end(served: ServiceProcess) -> None:
    """Videos deleted while queued or running, and one whose synchronous client disconnects."""
    client = served.client()
    running, queued = served.create(**LONG), served.create()
    served.wait(lambda: has_finished_steps(served, running))
    for video in (running, queued):
        assert client.videos.delete(video).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video)
    folder = served.folder / "jobs"
    served.wait(lambda: not (folder / running).exists() and not (folder / queued).exists(), 10)
    assert served.health()["running"] == 0  # the queued one may have been started meanwhile
    folders_before = {*folder.iterdir()}
    body = json.dumps({"prompt": PROMPT, **LONG}).encode()
    with open_connection(served.port, make_post_request(len(body), body, "/v1/videos/sync")):
        served.wait(lambda: served.health()["running"] == 1)
    served.wait(
        lambda: {*folder.iterdir()} == folders_before and served.health()["running"] == 0, 10
    )
    assert served.wait_for_video(served.create())["status"] == "completed"
    assert served.health()["restarts"] == 0


def test_nothing_of_a_deleted_video_is_left(served: ServiceProcess) -> None:
    """No prompt is in the journal, the log or any other file; the log has only the job's id."""
    texts = {"prompt": "zq private zq", "negative_prompt": "zq unwanted zq"}
    name = served.create(num_frames=1, num_inference_steps=1, **texts)
    served.wait_for_video(name)
    served.request(f"/v1/videos/{name}", method="DELETE")
    paths = [path for path in served.folder.rglob("*") if path.is_file()]
    assert not [path for path in paths if b"zq " in path.read_bytes()]
    assert name in (served.folder / "ranks.log").read_text()


def test_synchronous_routes(served: ServiceProcess) -> None:
    body = {"prompt": PROMPT, "num_frames": 5, "num_inference_steps": 1}
    status, headers, content = served.request("/v1/videos/sync", body)
    assert status == 200 and content[4:8] == b"ftyp" and float(headers["X-Inference-Time-S"]) > 0
    mlperf = {"negative_prompt": "static", "size": "64x64", "seconds": 0.3, "fps": 16, "seed": 42}
    mlperf |= {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "boundary_ratio": 0.875}
    mlperf |= {"output_format": "mp4", "response_format": "video_path"}
    status, _, answer = served.request("/v1/videos/generations", body | mlperf)
    assert status == 200 and {*answer} == {"video_id", "video_path"}, answer
    assert Path(answer["video_path"]).read_bytes()[4:8] == b"ftyp"


def test_foreign_pages_and_hosts(served: ServiceProcess) -> None:
    assert served.request("/v1/videos", Host="evil.example")[0] == 421
    assert served.request("/v1/videos", Origin="http://evil.example")[0] == 403
    assert served.request("/v1/videos", Origin=served.url)[0] == 200
    assert served.request("/v1/videos/..%2f..%2fjournal.sqlite/content")[0] == 404
    assert served.request("/v1/videos/video_x/content")[0] == 404
    status, _, answer = served.request("/v1/videos", b"{" * 10)
    assert status == 400 and "no JSON object" in answer["error"]["message"]


def test_models_metrics_and_page(served: ServiceProcess) -> None:
    """All metrics of the example Grafana dashboard are exported."""
    assert served.request("/v1/models")[2]["data"][0]["id"] == "t2v-A14B"
    status, headers, page = served.request("/")
    assert status == 200 and headers.get_content_type() == "text/html" and b"<form" in page
    assert served.request("/liveness")[2] == {"status": "ok"}
    text = served.request("/metrics")[2].decode()
    assert 'wan_jobs_total{event="completed"}' in text and "wan_step_seconds_bucket" in text
    cached_texts = re.search(r'wan_texts_total{from="cache"} (\S+)', text)
    assert (
        cached_texts is not None and float(cached_texts[1]) > 0
    )  # tests request the same prompt repeatedly
    board = json.loads((REPO / "examples/serve/grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for expression in expressions for name in re.findall(r"\bwan_\w+", expression)}
    exported = set()
    for name, kind in re.findall(r"(?m)^# TYPE (\w+) (\w+)$", text):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        exported |= {name + end for end in ends}
    assert len(named) > 10 and named <= exported, named - exported


def test_unfinished_requests_leave_room_for_jobs(served: ServiceProcess) -> None:
    """Unsent bodies and unread answers, as many as there may be connections."""
    page = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500
    with ExitStack() as slow:
        for sent in (make_post_request(1000, path="/v1/videos"), page):
            for _ in range(40):
                with suppress(OSError):
                    slow.enter_context(open_connection(served.port, sent))
        video = served.create(num_frames=1, num_inference_steps=1)
        assert served.wait_for_video(video)["status"] == "completed"


def check_fault(kind: str, served: ServiceProcess, faults: Faults, own: np.ndarray) -> None:
    """The job fails with its reason, or is retried; the next video equals that of generate.py."""
    rank, at, do, after, code, restarts = FAULTS[kind]
    restarts_before = served.health()["restarts"]
    faults.arm(rank, at, do, after)
    first, second = served.create(num_inference_steps=4), served.create(seed=7)
    video = served.wait_for_video(first)
    assert (video["error"] or {"code": None})["code"] == code, video
    assert video["attempt"] == (1 if code else 2)
    if code == "out_of_memory":
        assert "The estimated need is" in video["error"]["message"]
    assert served.wait_for_video(second)["status"] == "completed"
    assert served.health()["restarts"] - restarts_before == restarts
    assert not faults.is_armed
    files = {path.name for path in (served.folder / "jobs" / first).iterdir()}
    assert files == (set() if code else {"video.mp4", "video.json"})
    assert (read_frames(served.folder / "jobs" / second / "video.mp4") == own).all()


def test_a_job_that_one_rank_cannot_go_on_with(
    served: ServiceProcess, faults: Faults, own: np.ndarray
) -> None:
    """It ends on all ranks, which continue with the next job."""
    check_fault("between", served, faults, own)


STRANGE = (b"", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b'{"secret": "no"}\n', b"x" * 100_000)


@pytest.mark.slow  # tests/serve/test_group.py has it with ranks that have no model
def test_a_killed_rank(served: ServiceProcess) -> None:
    """Its job is retried by new ranks, in spite of foreign connections to the front's port."""
    restarts_before = served.health()["restarts"]
    port = json.loads((served.folder / "front.json").read_text())["port"]
    with ExitStack() as strangers:
        for number in range(100):
            strangers.enter_context(open_connection(port, STRANGE[number % 5]))
        running = served.create(num_inference_steps=10)
        served.wait(lambda: has_finished_steps(served, running))
        waiting = served.create(num_inference_steps=1)
        os.kill(served.list_rank_pids()[-1], signal.SIGKILL)
        for video in (running, waiting):
            assert served.wait_for_video(video)["status"] == "completed"
    assert served.health()["restarts"] == restarts_before + 1
    assert served.request(f"/v1/videos/{running}")[2]["attempt"] == 2


@pytest.mark.slow
def test_a_killed_front(served: ServiceProcess) -> None:
    """Running and waiting jobs are made after the next start; the old ranks exit.

    The first of two videos is complete, and is not made again.
    """
    running, ranks = served.create(num_inference_steps=20, n=2), served.list_rank_pids()
    served.wait(lambda: served.request(f"/v1/videos/{running}")[2]["steps"][0] > 20)
    first = served.folder / "jobs" / running / "video.mp4"
    written = first.stat().st_mtime_ns
    waiting = served.create(seed=7)
    served.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    served.start()
    resumed = served.wait_for_video(running)
    assert (resumed["status"], resumed["attempt"]) == ("completed", 2)
    assert first.stat().st_mtime_ns == written and resumed["steps"] == [40, 40]
    assert served.wait_for_video(waiting)["status"] == "completed"


@pytest.mark.slow
def test_uploads(tmp_path: Path) -> None:
    """An image as a file and as a data URL; a broken one; a body that is too large; a key."""
    key = "0123456789abcdef"
    (tmp_path / "key").write_text(f"{key}\n")
    options = ["--api_key", tmp_path / "key", "--max_body", 1]
    with ServiceProcess(tmp_path / "jobs", 2, options, ["--task", "i2v-A14B"], key=key) as served:
        client, image = served.client(), REPO / "examples" / "star.png"
        more = {"num_frames": 5, "num_inference_steps": 1, "seed": 1}
        ids = [client.videos.create(prompt=PROMPT, input_reference=image, extra_body=more).id]
        url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
        for image_field in ({"input_reference": {"image_url": url}}, {"input_reference": url}):
            body = {"prompt": PROMPT} | more | image_field
            ids.append(served.request("/v1/videos", body)[2]["id"])
        assert {served.wait_for_video(item)["status"] for item in ids} == {"completed"}
        first, *other_videos = [
            read_frames(served.folder / "jobs" / item / "video.mp4") for item in ids
        ]
        assert all((item == first).all() for item in other_videos)
        remixed = client.videos.remix(ids[0], prompt="it grows")
        assert served.wait_for_video(remixed.id)["status"] == "completed"
        with pytest.raises(openai.BadRequestError, match="the uploaded input_reference"):
            client.videos.create(prompt=PROMPT, input_reference=("x.png", b"x" * 99))
        with pytest.raises(openai.BadRequestError, match="starts from an image"):
            client.videos.create(prompt=PROMPT)
        assert served.request("/v1/videos", b"x" * 2_000_000)[0] == 413
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").videos.list()
        folders = {path.name for path in (served.folder / "jobs").iterdir()}
        assert folders == {*ids, remixed.id}


@pytest.mark.slow
def test_a_sound_and_a_character(tmp_path: Path) -> None:
    """Their files are uploads; a playlist that refers to other files is refused."""
    sound = make_sound.write_wav(tmp_path / "s.wav")
    make_character.write_character_folder(tmp_path / "moves", (48, 32), 17)
    image = (REPO / "examples" / "star.png").read_bytes()
    character_files = {path.stem: path.read_bytes() for path in (tmp_path / "moves").iterdir()}
    tasks: dict[str, tuple[list[object], str, dict[str, bytes]]] = {
        # flags, a field of sound or video, and all files
        "s2v-14B": (
            ["--infer_frames", 4, "--size", "64*64"],
            "audio",
            {"image": image, "audio": sound.read_bytes()},
        ),
        "animate-14B": (["--frame_num", 5], "src_pose", character_files),
    }
    for task, (flags, name, files) in tasks.items():
        with ServiceProcess(tmp_path / task, 1, flags=["--task", task, *flags]) as served:
            body = {"num_inference_steps": "1", "seed": "1", "num_clip": "1"} | files
            status, _, video = served.request_form("/v1/videos", body)
            assert status == 200, video
            assert served.wait_for_video(video["id"])["status"] == "completed"
            remix = served.client().videos.remix(video["id"], prompt="faster")
            assert served.wait_for_video(remix.id)["status"] == "completed"
            listed = {name: f"ffconcat version 1.0\nfile {sound}\n".encode()}
            status, _, refused = served.request_form("/v1/videos", body | listed)
            assert status == 400 and "cannot be read" in refused["error"]["message"], refused


@pytest.mark.slow
def test_a_video_its_mask_and_several_pictures(tmp_path: Path) -> None:
    """As a form, as data URLs, and by generate.py; a second attempt reads the same files."""
    names = ("v.mp4", "m.mp4", "a.png", "b.png")
    for name in names[:2]:
        write_moving_box(tmp_path / name)
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (40, 30), colour).save(tmp_path / name)
    files = {name: (tmp_path / name).read_bytes() for name in names}
    urls = {
        name: f"data:application/octet-stream;base64,{base64.b64encode(x).decode()}"
        for name, x in files.items()
    }
    more = {"prompt": PROMPT, "num_frames": 5, "num_inference_steps": 2, "seed": 1}
    flags = ["--task", "vace-1.3B", "--size", "64*48"]

    def make_inputs(contents: dict[str, Any], pictures: list[Any]) -> dict[str, Any]:
        return {
            "src_video": contents["v.mp4"],
            "src_mask": contents["m.mp4"],
            "src_ref_images": pictures,
        }

    with ServiceProcess(tmp_path / "jobs", 2, flags=flags) as served:
        form = {name: str(value) for name, value in more.items()}
        both = [files["a.png"], files["b.png"]]
        bodies = [form | make_inputs(files, both), form | make_inputs(files, both[:1])]
        answers = [served.request_form("/v1/videos", body) for body in bodies]
        assert [status for status, _, _ in answers] == [200, 200], answers
        ids = [answer["id"] for _, _, answer in answers]
        pictures = [urls["a.png"], {"image_url": urls["b.png"]}]
        ids.append(served.request("/v1/videos", more | make_inputs(urls, pictures))[2]["id"])
        ids.append(served.client().videos.remix(ids[0], prompt=PROMPT).id)
        assert [served.wait_for_video(item)["status"] for item in ids] == ["completed"] * 4
        named = f"{tmp_path / 'a.png'},{tmp_path / 'b.png'}"
        call = [*GENERATE_ARGS, *flags, "--src_ref_images", named, "--ulysses_size", 1]
        call[call.index("--base_seed") + 1] = 1
        call += ["--src_video", tmp_path / "v.mp4", "--src_mask", tmp_path / "m.mp4"]
        expected = generate_frames(tmp_path / "own.mp4", *call, ranks=1)
        results = [read_frames(served.folder / "jobs" / item / "video.mp4") for item in ids]
        same = [(item == expected).all() for item in results]
        assert same == [True, False, True, True]
        body = bodies[0] | {"num_inference_steps": "40"}
        listed = {n if n != "src_ref_images" else f"{n}[]": x for n, x in body.items()}
        long, short = (served.request_form("/v1/videos", item)[2]["id"] for item in (body, listed))
        served.wait(lambda: has_finished_steps(served, long))
        os.kill(served.list_rank_pids()[0], signal.SIGKILL)
        ended = [served.wait_for_video(item) for item in (long, short)]
        assert [item["status"] for item in ended] == ["completed"] * 2
        assert [item["attempt"] for item in ended] == [2, 1]
        killed, undisturbed = (
            read_frames(served.folder / "jobs" / item / "video.mp4") for item in (long, short)
        )
        assert (killed == undisturbed).all()
        status, _, refused = served.request_form(
            "/v1/videos", form | make_inputs(files, [b"x" * 99])
        )
        assert status == 400 and "the uploaded src_ref_images" in refused["error"]["message"]


@pytest.mark.slow
def test_stopped_with_jobs(tmp_path: Path) -> None:
    """The jobs are made after the next start, each once."""
    with ServiceProcess(tmp_path / "jobs", 2) as served:
        ids = [served.create(seed=7, num_inference_steps=n) for n in (30, 2, 2)]
        served.wait(lambda: has_finished_steps(served, ids[0]))
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(served.request, "/v1/videos/sync", {"prompt": PROMPT})
            events = threads.submit(served.request, f"/v1/videos/{ids[0]}/events")
            served.wait(lambda: served.health()["queued"] == 3)
            start = time.monotonic()
            assert served.stop() == 0 and time.monotonic() - start < 15
        assert not served.list_rank_pids() and not served.count_tracebacks(), served.read_logs()
        assert waiting.result()[2]["error"]["code"] == "stopping"
        assert b"event: step" in events.result()[2]
        assert not [*(tmp_path / "jobs" / "jobs" / ids[0]).iterdir()]
        served.start()
        ended = [served.wait_for_video(video) for video in ids]
        assert [(video_fields["status"], video_fields["attempt"]) for video_fields in ended] == [
            ("completed", 1)
        ] * 3


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """The running job fails with its reason, new jobs are refused, then the service continues."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk]).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        with ServiceProcess(disk / "jobs", 2) as served:
            running = served.create(num_inference_steps=20)
            with suppress(OSError), (disk / "fill").open("wb", buffering=0) as fill:
                while True:
                    fill.write(bytes(4096))
            video = served.wait_for_video(running)
            assert (video["status"], video["error"]["code"]) == ("failed", "disk_full"), video
            status, headers, answer = served.request(
                "/v1/videos", {"prompt": PROMPT, "num_frames": 5}
            )
            assert (status, answer["error"]["code"]) == (507, "disk_full"), answer
            assert int(headers["Retry-After"]) > 0 and served.health()["status"] == "ok"
            (disk / "fill").unlink()
            assert served.wait_for_video(served.create())["status"] == "completed"
            assert served.health()["restarts"] == 0
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@contextmanager
def second_node(front: Path, port: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the rank of another machine, and restarts it whenever it has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--node_rank=1"]
    command += ["--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    command += ["-m", "wan.serve.ranks", str(front)]
    started: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()

    def keep_running() -> None:
        while not stopped.wait(0.5):
            with Path(f"{front.parent}.node.log").open("ab") as log:
                environment = os.environ | TORCHRUN
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            started[-1].wait()

    thread = threading.Thread(target=keep_running)
    thread.start()
    try:
        yield started
    finally:
        stopped.set()
        started[-1].terminate()
        thread.join(60)


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Both nodes are on this machine: a rank of the second is killed, and its job is retried."""
    port, folder = int(free_port()), tmp_path / "jobs"
    options = ["--nodes", 2, "--node_address", f"127.0.0.1:{port}"]
    with (
        second_node(folder / "front.json", port) as node,
        ServiceProcess(folder, 2, options) as served,
    ):
        video = served.create(seed=7)
        assert served.wait_for_video(video)["status"] == "completed"
        expected = generate_frames(
            tmp_path / "one.mp4", *GENERATE_ARGS, "--ulysses_size", 2, ranks=2
        )
        assert np.array_equal(read_frames(folder / "jobs" / video / "video.mp4"), expected)
        running = served.create(num_inference_steps=20)
        served.wait(lambda: has_finished_steps(served, running))
        children = Path(f"/proc/{node[-1].pid}/task/{node[-1].pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        result = served.wait_for_video(running, 180)
        assert (result["status"], result["attempt"]) == ("completed", 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_faults_of_a_rank(ranks: int, tmp_path: Path) -> None:
    faults = Faults(tmp_path / "path", *FAULT_TARGETS)
    expected = generate_frames(
        tmp_path / "own.mp4", *GENERATE_ARGS, "--ulysses_size", ranks, ranks=ranks
    )
    with ServiceProcess(tmp_path / "jobs", ranks, path=faults.path) as served:
        for kind in FAULTS:
            check_fault(kind, served, faults, expected)
