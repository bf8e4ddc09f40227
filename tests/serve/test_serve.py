"""The service with its real processes: what clients get, and what survives."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import openai
import pytest
from PIL import Image

from tests.cli.test_vace import write
from tests.dist import REPO, TORCHRUN, Ranks, launcher
from tests.serve.serving import PROMPT, Served, breaking
from wan.cli.main import main
from wan.serve import __main__ as command

pytestmark = [
    pytest.mark.dist,
    pytest.mark.xdist_group("serve"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def frames(path: Path) -> np.ndarray:
    return np.stack(list(imageio.get_reader(path).iter_data()))


def generated(path: Path, *flags: object, ranks: int = 1) -> np.ndarray:
    """What generate.py makes of the same settings."""
    given = ["--frame_num", 5, "--sample_steps", 2, "--base_seed", 7, "--prompt", PROMPT]
    argv = [*map(str, [*given, *flags, "--save_file", path])]
    with Ranks(launcher(ranks) if ranks > 1 else [{}], main, argv) as processes:
        assert processes.ended(300) == [0] * ranks, processes.said()
    return frames(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two ranks with InsertComm."""
    folder = tmp_path_factory.mktemp("serve") / "jobs"
    one = Served(folder, 2, ["--queue", 6], ["--comm_type", 1])
    yield one
    assert one.stop() == 0 and not one.ranks()


def test_create_poll_and_fetch(served: Served, tmp_path: Path) -> None:
    client = served.client()
    more = {"num_frames": 5, "num_inference_steps": 2, "seed": 7}
    video = client.videos.create(prompt=PROMPT, size="64x64", extra_body=more)
    assert video.object == "video" and video.status in ("queued", "in_progress")
    assert (video.model, video.size, video.seconds) == ("t2v-A14B", "64x64", "0.625")
    video = client.videos.poll(video.id, poll_interval_ms=100)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    path = tmp_path / "v.mp4"
    path.write_bytes(client.videos.download_content(video.id).read())
    flags = ["--ulysses_size", 2, "--comm_type", 1]
    assert (frames(path) == generated(tmp_path / "own.mp4", *flags, ranks=2)).all()
    for variant, width in (("thumbnail", 64), ("spritesheet", 256)):
        picture = client.videos.download_content(video.id, variant=variant).read()
        assert imageio.v3.imread(picture).shape[1] == width
    status, headers, part = served.ask(f"/v1/videos/{video.id}/content", Range="bytes=4-11")
    assert status == 206 and part == path.read_bytes()[4:12] and part.startswith(b"ftyp")
    assert headers["content-type"] == "video/mp4"


def test_list_in_pages_and_remix(served: Served) -> None:
    client = served.client()
    made = [served.create(seed=number) for number in range(3)]
    listed = [video.id for video in client.videos.list(limit=2)]
    assert listed[:3] == made[::-1] and len(listed) == len(set(listed))
    assert [video.id for video in client.videos.list(limit=2, order="asc")] == listed[::-1]
    remixed = client.videos.remix(made[0], prompt="a small red star grows on a brown background")
    assert remixed.remixed_from_video_id == made[0] and remixed.seed == 0
    assert served.ended(remixed.id)["status"] == "completed"


def test_delete_while_queued_and_while_running(served: Served) -> None:
    client = served.client()
    running = served.create(num_inference_steps=40, num_frames=17)
    queued = served.create()
    served.wait(lambda: served.ask(f"/v1/videos/{running}")[2]["steps"][0] > 1)
    for video in (queued, running):
        assert client.videos.delete(video).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video)
    served.wait(lambda: served.health()["running"] == 0, 5)
    served.wait(lambda: not (served.folder / "jobs" / running).exists(), 5)
    assert not (served.folder / "jobs" / queued).exists()
    assert served.ended(served.create())["status"] == "completed"
    assert served.health()["restarts"] == 0


def test_nothing_of_a_deleted_video_is_left(served: Served) -> None:
    """In the journal, the ranks' log, or anywhere else in the folder; before, its job is named."""
    words = {"prompt": "zq private zq", "negative_prompt": "zq unwanted zq"}
    name = served.create(num_inference_steps=1, **words)
    served.ended(name)
    served.ask(f"/v1/videos/{name}", method="DELETE")
    paths = [path for path in served.folder.rglob("*") if path.is_file()]
    assert not [path for path in paths if b"zq " in path.read_bytes()]
    assert name in (served.folder / "ranks.log").read_text()


def test_a_repeated_request_is_the_same_job(served: Served) -> None:
    body = {"prompt": PROMPT, "num_frames": 5, "num_inference_steps": 1, "seed": 5}
    first = served.ask("/v1/videos", body)[2]["id"]
    again = served.ask("/v1/videos", body, X_Stainless_Retry_Count="1")[2]["id"]
    other = served.ask("/v1/videos", body, X_Stainless_Retry_Count="0")[2]["id"]
    assert first == again != other
    keyed = [served.ask("/v1/videos", body, Idempotency_Key="k")[2]["id"] for _ in range(2)]
    assert keyed[0] == keyed[1] not in (first, other)
    body["seed"] = 6
    status, _, told = served.ask("/v1/videos", body, Idempotency_Key="k")
    assert status == 422 and told["error"]["code"] == "idempotency_key_reused"
    assert served.ended(keyed[0])["status"] == "completed"


@pytest.mark.slow
def test_the_queue_is_bounded(served: Served) -> None:
    long = served.create(num_inference_steps=40, num_frames=17)
    served.wait(lambda: served.status(long) == "in_progress")
    waiting = [served.create() for _ in range(6)]
    status, headers, told = served.ask("/v1/videos", {"prompt": PROMPT, "num_frames": 5})
    assert status == 429 and told["error"]["code"] == "queue_full"
    assert int(headers["Retry-After"]) > 0 and headers["x-should-retry"] == "true"
    for video in (long, *waiting):
        served.ask(f"/v1/videos/{video}", method="DELETE")


def test_synchronous_routes(served: Served) -> None:
    body = {"prompt": PROMPT, "num_frames": 5, "num_inference_steps": 1}
    status, headers, content = served.ask("/v1/videos/sync", body)
    assert status == 200 and content[4:8] == b"ftyp" and float(headers["X-Inference-Time-S"]) > 0
    mlperf = {"negative_prompt": "static", "size": "64x64", "seconds": 0.3, "fps": 16, "seed": 42}
    mlperf |= {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "boundary_ratio": 0.875}
    mlperf |= {"output_format": "mp4", "response_format": "video_path"}
    status, _, told = served.ask("/v1/videos/generations", body | mlperf)
    assert status == 200 and {*told} == {"video_id", "video_path"}, told
    assert Path(told["video_path"]).read_bytes()[4:8] == b"ftyp"


REFUSED = {
    "unknown field": ({"colour": "red"}, "colour is not a known field; remove it.", "colour"),
    "size": ({"size": "17x33"}, "size 17*33 is not in multiples of 16", "size"),
    "frames": ({"num_frames": 6}, "num_frames 6", "num_frames"),
    "steps": ({"num_inference_steps": 0}, "num_inference_steps 0", "num_inference_steps"),
    "twice": ({"seed": 1, "base_seed": 2}, "base_seed says the same as seed", "base_seed"),
    "seconds and frames": ({"seconds": 1, "num_frames": 5}, "num_frames 5 differ: 9", "seconds"),
    "boundary": ({"boundary_ratio": 0.5}, "does not run here; 0.875 does", "boundary_ratio"),
    "image": ({"input_reference": "data:image/png;base64,AAAA"}, "takes no ", None),
    "path": ({"image": "/etc/passwd"}, "image must be an uploaded file", "image"),
    "other path": ({"audio": "/etc/passwd"}, "audio must be an uploaded file", "audio"),
    "other picture": (
        {"src_ref_images": "/etc/passwd"},
        "src_ref_images must be an uploaded file",
        "src_ref_images",
    ),
    "folder": ({"src_root_path": "/etc"}, "src_root_path is not a known field", None),
    "save_file": ({"save_file": "x.mp4"}, "save_file is not taken; the video is fetched", None),
    "latents": ({"latent_path": "x"}, "latent_path is not taken", None),
    "of loading": ({"comm_type": 2}, "comm_type 2 is decided when the service starts", "comm_type"),
    "step cache": ({"step_cache": "mag"}, "step_cache mag is decided when the", None),
    "model": ({"model": "sora-2"}, "model sora-2 does not run here; t2v-A14B does", "model"),
    "guidance": ({"guidance_scale_2": 3}, "add guidance_scale", None),
    "too long": ({"num_frames": 4001}, "4001 frames are too many; give at most 1000.", None),
    "prompt": ({"prompt": "x" * 10_001}, "10001 characters of the prompt are too many", None),
    "null": ({"seed": None}, "seed has no value", None),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: str, served: Served) -> None:
    fields, said, param = REFUSED[kind]
    before = served.health()["queued"]
    status, headers, told = served.ask("/v1/videos", {"prompt": PROMPT} | fields)
    assert status == 400 and said in told["error"]["message"], told
    assert headers["x-should-retry"] == "false"
    assert str(served.folder) not in told["error"]["message"]
    assert param is None or told["error"]["param"] == param
    assert served.health()["queued"] == before


def test_what_is_accepted_under_other_names(served: Served) -> None:
    body = {"model": "t2v-A14B", "comm_type": 1, "seconds": "0.3", "guidance_scale": 4}
    body |= {"guidance_scale_2": 3, "num_inference_steps": "1", "flow_shift": 5, "fps": 16}
    status, _, video = served.ask("/v1/videos", {"prompt": PROMPT} | body)
    assert status == 200 and video["num_frames"] == 5, video
    assert served.ended(video["id"])["status"] == "completed"
    settings = (served.folder / "jobs" / video["id"] / "video.json").read_text()
    assert '"sample_guide_scale": [\n   3.0,\n   4.0' in settings


def test_foreign_pages_and_hosts(served: Served) -> None:
    assert served.ask("/v1/videos", Host="evil.example")[0] == 421
    assert served.ask("/v1/videos", Origin="http://evil.example")[0] == 403
    assert served.ask("/v1/videos", Origin=served.url)[0] == 200
    assert served.ask("/v1/videos/..%2f..%2fjournal.sqlite/content")[0] == 404
    assert served.ask("/v1/videos/video_x/content")[0] == 404
    status, _, told = served.ask("/v1/videos", b"{" * 10)
    assert status == 400 and "no JSON object" in told["error"]["message"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--node_address", "a:1"], "--node_address a:1 is for several machines"),
        (["--nodes", "2", "--ranks", "2"], "--node_address must be HOST:PORT"),
        (["--nodes", "2", "--ranks", "3"], "--ranks 3 must be a multiple of --nodes 2"),
        (["--journal", "JOBS"], "belongs to a service that runs; give another folder."),
        (["--host", "0.0.0.0"], "is reachable from other machines; add --api_key FILE."),
        (["--ranks", "0"], "--ranks 0 must be from 1 to"),
        (["--name", "a/b"], "--name a/b must be of letters, digits and dashes."),
        (["--api_key", "none"], "none cannot be read (No such file or directory)"),
        (["--", "--image", "x.png"], "--image is about one video; drop it."),
        (["--", "--prompt_file", "x"], "--prompt_file is about one video; drop it."),
        (["--", "--ckpt_dir", "none"], "--ckpt_dir none does not exist"),
        (["--", "--ulysses_size", "2"], "ulysses_size"),
        (["--steps", "3"], "--steps"),
    ],
    ids=str,
)
def test_starts_that_are_refused(
    options: list[str],
    said: str,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence and exit code 2."""
    monkeypatch.chdir(tmp_path)
    given = [one.replace("JOBS", str(served.folder)) for one in options]
    assert command.run(given) == 2
    lines = [one for one in capsys.readouterr().err.splitlines() if one.startswith("wan.serve: ")]
    assert len(lines) == 1 and said in lines[0], lines


def test_models_metrics_and_page(served: Served) -> None:
    assert served.ask("/v1/models")[2]["data"][0]["id"] == "t2v-A14B"
    text = served.ask("/metrics")[2].decode()
    assert 'wan_jobs_total{event="completed"}' in text and "wan_step_seconds_bucket" in text
    kept = re.search(r'wan_texts_total{from="cache"} (\S+)', text)
    assert kept is not None and float(kept[1]) > 0  # tests ask for one prompt again and again
    status, headers, page = served.ask("/")
    assert status == 200 and headers.get_content_type() == "text/html" and b"<form" in page
    assert served.ask("/liveness")[2] == {"status": "ok"}


def test_the_board_shows_metrics_that_are_there(served: Served) -> None:
    board = json.loads((REPO / "examples/serve/grafana.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for one in shown for name in re.findall(r"\bwan_\w+", one)}
    text = served.ask("/metrics")[2].decode()
    there = set()
    for name, kind in re.findall(r"(?m)^# TYPE (\w+) (\w+)$", text):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        there |= {name + end for end in ends}
    assert len(named) > 10 and named <= there, named - there


def test_a_killed_rank(served: Served) -> None:
    """Its job is made again by new ranks, and those that wait go on."""
    before = served.health()["restarts"]
    running = served.create(num_inference_steps=20)
    served.wait(lambda: served.ask(f"/v1/videos/{running}")[2]["steps"][0] > 1)
    waiting = served.create()
    os.kill(served.ranks()[-1], signal.SIGKILL)
    for video in (running, waiting):
        assert served.ended(video)["status"] == "completed"
    assert served.health()["restarts"] == before + 1
    assert served.ask(f"/v1/videos/{running}")[2]["attempt"] == 2


@pytest.mark.slow
def test_a_killed_front(served: Served) -> None:
    """What ran and what waited is made after the next start; the ranks do not stay behind."""
    running, ranks = served.create(num_inference_steps=20), served.ranks()
    served.wait(lambda: served.ask(f"/v1/videos/{running}")[2]["steps"][0] > 1)
    waiting = served.create(seed=7)
    served.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    served.start()
    assert served.ended(running)["attempt"] == 2
    assert served.ended(waiting)["status"] == "completed"


@pytest.mark.slow
def test_what_is_uploaded(tmp_path: Path) -> None:
    """An image as a file and as a data URL; a broken one; a body that is too large; a key."""
    (tmp_path / "key").write_text("0123456789abcdef\n")
    options = ["--api_key", tmp_path / "key", "--max_body", 1]
    served = Served(tmp_path / "jobs", 2, options, ["--task", "i2v-A14B"], key="0123456789abcdef")
    try:
        client, image = served.client(), REPO / "examples" / "star.png"
        more = {"num_frames": 5, "num_inference_steps": 1, "seed": 1}
        made = [client.videos.create(prompt=PROMPT, input_reference=image, extra_body=more).id]
        url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
        for given in ({"input_reference": {"image_url": url}}, {"input_reference": url}):
            body = {"prompt": PROMPT} | more | given
            made.append(served.ask("/v1/videos", body)[2]["id"])
        files = [served.folder / "jobs" / one / "video.mp4" for one in made]
        for one in made:
            assert served.ended(one)["status"] == "completed"
        assert all((frames(file) == frames(files[0])).all() for file in files)
        remixed = client.videos.remix(made[0], prompt="it grows")
        assert served.ended(remixed.id)["status"] == "completed"
        with pytest.raises(openai.BadRequestError, match="the uploaded input_reference"):
            client.videos.create(prompt=PROMPT, input_reference=("x.png", b"x" * 99))
        with pytest.raises(openai.BadRequestError, match="starts from an image"):
            client.videos.create(prompt=PROMPT)
        assert served.ask("/v1/videos", b"x" * 2_000_000)[0] == 413
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").videos.list()
        assert served.ask("/v1/videos", Authorization="")[0] == 401
        assert (
            not {*(served.folder / "jobs").iterdir()}
            - {one.parent for one in files}
            - {served.folder / "jobs" / remixed.id}
        )
    finally:
        assert served.stop() == 0


@pytest.mark.slow
def test_a_sound_and_a_character(tmp_path: Path) -> None:
    """Their files are uploads; a list of other files is not opened for them."""
    sound, moves = tmp_path / "s.wav", tmp_path / "moves"
    for tool in (["make_sound.py", sound], ["make_character.py", moves, "--size", "48*32"]):
        subprocess.run([sys.executable, REPO / "tools" / tool[0], *tool[1:]], check=True)
    image = (REPO / "examples" / "star.png").read_bytes()
    tasks = {
        "s2v-14B": (
            ["--infer_frames", 4, "--size", "64*64"],
            {"image": image, "audio": sound.read_bytes()},
        ),
        "animate-14B": (
            ["--frame_num", 5],
            {path.stem: path.read_bytes() for path in moves.iterdir()},
        ),
    }
    for task, (flags, files) in tasks.items():
        served = Served(tmp_path / task, 1, flags=["--task", task, *flags])
        try:
            body = {"num_inference_steps": "1", "seed": "1", "num_clip": "1"} | files
            status, _, video = served.form("/v1/videos", body)
            assert status == 200, video
            assert served.ended(video["id"])["status"] == "completed"
            again = served.client().videos.remix(video["id"], prompt="faster")
            assert served.ended(again.id)["status"] == "completed"
            name = "audio" if task == "s2v-14B" else "src_pose"
            listed = {name: f"ffconcat version 1.0\nfile {sound}\n".encode()}
            status, _, refused = served.form("/v1/videos", body | listed)
            assert status == 400 and "cannot be read" in refused["error"]["message"], refused
        finally:
            served.stop()


@pytest.mark.slow
def test_a_video_its_mask_and_several_pictures(tmp_path: Path) -> None:
    """As a form, as data URLs, and by generate.py; a second attempt finds them again."""
    names = ("v.mp4", "m.mp4", "a.png", "b.png")
    for name in names[:2]:
        write(tmp_path / name)
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (40, 30), colour).save(tmp_path / name)
    files = {name: (tmp_path / name).read_bytes() for name in names}
    urls = {
        name: f"data:application/octet-stream;base64,{base64.b64encode(x).decode()}"
        for name, x in files.items()
    }
    more = {"prompt": PROMPT, "num_frames": 5, "num_inference_steps": 2, "seed": 1}
    flags = ["--task", "vace-1.3B", "--size", "64*48"]
    served = Served(tmp_path / "jobs", 2, flags=flags)
    try:

        def given(of: dict[str, Any], pictures: list[Any]) -> dict[str, Any]:
            return {"src_video": of["v.mp4"], "src_mask": of["m.mp4"], "src_ref_images": pictures}

        form = {name: str(value) for name, value in more.items()}
        both = [files["a.png"], files["b.png"]]
        bodies = [form | given(files, both), form | given(files, both[:1])]
        answers = [served.form("/v1/videos", body) for body in bodies]
        assert [status for status, _, _ in answers] == [200, 200], answers
        made = [answer["id"] for _, _, answer in answers]
        pictures = [urls["a.png"], {"image_url": urls["b.png"]}]
        made.append(served.ask("/v1/videos", more | given(urls, pictures))[2]["id"])
        made.append(served.client().videos.remix(made[0], prompt=PROMPT).id)
        assert [served.ended(one)["status"] for one in made] == ["completed"] * 4
        named = f"{tmp_path / 'a.png'},{tmp_path / 'b.png'}"
        call = [*flags, "--base_seed", 1, "--src_ref_images", named]
        call += ["--src_video", tmp_path / "v.mp4", "--src_mask", tmp_path / "m.mp4"]
        own = generated(tmp_path / "own.mp4", *call, ranks=2)
        shown = [frames(served.folder / "jobs" / one / "video.mp4") for one in made]
        same = [(one == own).all() for one in shown]
        assert same == [True, False, True, True]
        body = bodies[0] | {"num_inference_steps": "40"}
        listed = {n if n != "src_ref_images" else f"{n}[]": x for n, x in body.items()}
        long, again = (served.form("/v1/videos", one)[2]["id"] for one in (body, listed))
        served.wait(lambda: served.ask(f"/v1/videos/{long}")[2]["steps"][0] > 1)
        os.kill(served.ranks()[0], signal.SIGKILL)
        ended = [served.ended(one) for one in (long, again)]
        assert [(one["status"], one["attempt"]) for one in ended] == [
            ("completed", 2),
            ("completed", 1),
        ]
        killed, whole = (
            frames(served.folder / "jobs" / one / "video.mp4") for one in (long, again)
        )
        assert (killed == whole).all()
        status, _, refused = served.form("/v1/videos", form | given(files, [b"x" * 99]))
        assert status == 400 and "the uploaded src_ref_images" in refused["error"]["message"]
    finally:
        served.stop()


@pytest.mark.slow
def test_stopped_with_jobs(tmp_path: Path) -> None:
    """They are made after the next start, each once."""
    served = Served(tmp_path / "jobs", 2)
    try:
        made = [served.create(seed=7, num_inference_steps=n) for n in (30, 2, 2)]
        served.wait(lambda: served.ask(f"/v1/videos/{made[0]}")[2]["steps"][0] > 1)
        begun = time.monotonic()
        assert served.stop() == 0 and time.monotonic() - begun < 15 and not served.ranks()
        left = {path.name for path in (tmp_path / "jobs" / "jobs" / made[0]).iterdir()}
        assert left == set()
        served.start()
        ended = [served.ended(video) for video in made]
        assert [(one["status"], one["attempt"]) for one in ended] == [("completed", 1)] * 3
    finally:
        served.stop()


@pytest.mark.slow
def test_who_leaves_cancels(served: Served) -> None:
    """A client of the synchronous route that is gone."""
    first = served.ask("/v1/videos?limit=1")[2]["first_id"]
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        body = json.dumps({"prompt": PROMPT, "num_inference_steps": 40, "num_frames": 17})
        head = f"POST /v1/videos/sync HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        served.wait(lambda: served.health()["running"] == 1)
    served.wait(lambda: served.health()["running"] == 0, 10)
    assert served.ask("/v1/videos?limit=1")[2]["first_id"] == first
    assert served.ended(served.create())["status"] == "completed"


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """What runs fails with its reason, nothing is taken meanwhile, and then all goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk])
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    served = Served(disk / "jobs", 2)
    try:
        running = served.create(num_inference_steps=20)
        with suppress(OSError), (disk / "fill").open("wb", buffering=0) as fill:
            while True:
                fill.write(bytes(4096))
        video = served.ended(running)
        assert (video["status"], video["error"]["code"]) == ("failed", "disk_full"), video
        status, headers, told = served.ask("/v1/videos", {"prompt": PROMPT, "num_frames": 5})
        assert (status, told["error"]["code"]) == (507, "disk_full"), told
        assert int(headers["Retry-After"]) > 0 and served.health()["status"] == "ok"
        (disk / "fill").unlink()
        assert served.ended(served.create())["status"] == "completed"
        assert served.health()["restarts"] == 0
    finally:
        served.stop()
        subprocess.run(["umount", disk], check=True)


DENOISE, PIPELINE = "wan.pipeline.denoise:", "wan.pipeline.pipeline:Pipeline."
FAULTS = {
    # rank, what fails there, how, whether after it has returned, how the job ends, new groups
    "between": (1, f"{DENOISE}Denoising._check_finite", "raise", False, "internal_error", 0),
    "before an exchange": (1, f"{DENOISE}velocity", "raise", False, None, 1),
    "inside an exchange": (1, "wan.distributed.exchange:_started", "raise", True, None, 1),
    "after an exchange": (1, f"{DENOISE}velocity", "raise", True, None, 1),
    "no memory": (1, f"{DENOISE}velocity", "memory", False, "out_of_memory", 1),
    "killed in text": (1, f"{PIPELINE}texts", "kill", False, None, 1),
    "killed in denoising": (0, f"{DENOISE}velocity", "kill", False, None, 1),
    "killed in decoding": (0, f"{PIPELINE}stream", "kill", False, None, 1),
    "killed in writing": (0, "wan.pipeline.video:Mp4Encoder.put", "kill", False, None, 1),
}


@contextmanager
def second_node(front: Path, port: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the rank of another machine, and starts it again whenever it has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--node_rank=1"]
    command += ["--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    command += ["-m", "wan.serve.ranks", str(front)]
    started: list[subprocess.Popen[bytes]] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.5):
            with Path(f"{front.parent}.node.log").open("ab") as log:
                environment = os.environ | TORCHRUN
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            started[-1].wait()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield started
    finally:
        over.set()
        started[-1].terminate()
        thread.join(60)


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Both on this machine: a rank of the other one is killed, and its job is made again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder, options = tmp_path / "jobs", ["--nodes", 2, "--node_address", f"127.0.0.1:{port}"]
    with second_node(folder / "front.json", port) as node:
        served = Served(folder, 2, options)
        video = served.create(num_frames=5, num_inference_steps=2, seed=7)
        assert served.ended(video)["status"] == "completed"
        made = frames(folder / "jobs" / video / "video.mp4")
        assert np.array_equal(made, generated(tmp_path / "one.mp4", "--ulysses_size", 2, ranks=2))
        running = served.create(num_inference_steps=20)
        served.wait(lambda: served.ask(f"/v1/videos/{running}")[2]["steps"][0] > 1)
        children = Path(f"/proc/{node[-1].pid}/task/{node[-1].pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        found = served.ended(running, 180)
        assert (found["status"], found["attempt"]) == ("completed", 2)
        assert served.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_a_rank(kind: str, ranks: int, tmp_path: Path) -> None:
    """The job fails with its reason, or is made again; the next one is what generate.py makes."""
    rank, at, do, after, code, restarts = FAULTS[kind]
    path = breaking(tmp_path / "path", rank=rank, at=at, do=do, after=after)
    served = Served(tmp_path / "jobs", ranks, path=path)
    try:
        first, second = served.create(num_inference_steps=4), served.create(seed=7)
        video = served.ended(first)
        assert (video["error"] or {"code": None})["code"] == code, video
        assert video["attempt"] == (1 if code else 2)
        if code == "out_of_memory":
            assert "--plan finds that it needs" in video["error"]["message"]
        assert served.ended(second)["status"] == "completed"
        assert served.health()["restarts"] == restarts
        assert not (path / "fault.json").exists()
        left = {path.name for path in (served.folder / "jobs" / first).iterdir()}
        assert left == (set() if code else {"video.mp4", "video.json"})
        own = generated(tmp_path / "own.mp4", "--ulysses_size", ranks, ranks=ranks)
        assert (frames(served.folder / "jobs" / second / "video.mp4") == own).all()
    finally:
        served.stop()
