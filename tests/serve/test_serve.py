"""The service with real processes: answers to clients, and recovery from failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest

from tests.conftest import slow
from tests.dist import TORCHRUN, free_port
from tests.serve.serving import (
    PROMPT,
    Faults,
    ServiceProcess,
    generate_frames,
    make_post_request,
    open_connection,
    read_frames,
)

pytestmark = [
    pytest.mark.dist,
    pytest.mark.xdist_group("serve"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

GENERATE_ARGS = ("--frame_num", 5, "--sample_steps", 2, "--base_seed", 7, "--prompt", PROMPT)
LONG = {"num_inference_steps": 1000, "num_frames": 17}  # deleted before it is complete
DENOISE, PIPELINE = "wan.pipeline.denoise:", "wan.pipeline.pipeline:Pipeline."
PREDICT = f"{DENOISE}StepPrediction.predict_velocity"
WRITER = "wan.media.video_writer:Mp4Encoder."
FAULTS: dict[str, tuple[int, str, str, bool, str | None, int]] = {
    # rank, failing function, fault, whether after its return, error of the job, restarts
    "between": (1, f"{DENOISE}DenoisingLoop._check_finite", "raise", False, "internal_error", 0),
    "before an exchange": (1, PREDICT, "raise", False, None, 1),
    "inside an exchange": (1, "wan.distributed.ulysses:_start_exchange", "raise", True, None, 1),
    "after an exchange": (1, PREDICT, "raise", True, None, 1),
    "no memory": (1, PREDICT, "memory", False, "out_of_memory", 1),
    "killed in text": (1, f"{PIPELINE}encode_prompt", "kill", False, None, 1),
    "killed in denoising": (0, PREDICT, "kill", False, None, 1),
    "killed in decoding": (0, f"{PIPELINE}decode_to_sink", "kill", False, None, 1),
    "killed in writing": (0, f"{WRITER}write_frames", "kill", False, None, 1),
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
    """A service of two ranks with InsertComm."""
    folder = tmp_path_factory.mktemp("serve") / "jobs"
    flags = ["--comm_type", 1]
    with ServiceProcess(folder, 2, flags=flags, path=faults.path, is_forked=True) as service:
        yield service


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The frames of `GENERATE_ARGS` by generate.py, which `served` must reproduce."""
    path = tmp_path_factory.mktemp("own") / "own.mp4"
    return generate_frames(path, *GENERATE_ARGS, "--ulysses_size", 2, "--comm_type", 1, ranks=2)


def read_events(text: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Returns the kind and the data of each event of a stream."""
    blocks = [
        dict(line.split(": ", 1) for line in block.splitlines() if line)
        for block in text.decode().strip().split("\n\n")
    ]
    return [(block["event"], json.loads(block["data"])) for block in blocks if "event" in block]


def test_several_videos_of_one_job(served: ServiceProcess, own: np.ndarray, tmp_path: Path) -> None:
    """Created, followed, and fetched; one of them has the seed of generate.py's video."""
    client = served.client()
    more = {"num_frames": 5, "num_inference_steps": 2, "seed": [6, 7], "preview": 2}
    created = client.videos.create(prompt=PROMPT, size="64x64", extra_body=more)
    status, headers, text = served.request(f"/v1/videos/{created.id}/events")
    assert status == 200 and headers.get_content_type() == "text/event-stream"
    events = read_events(text)
    video = served.request(f"/v1/videos/{created.id}")[2]
    assert events[-1] == ("end", video) and video["status"] == "completed"
    stages = [event["stage"] for kind, event in events if kind == "stage"]
    assert {"denoising", "decoding", "writing"} <= {*stages}
    assert stages.index("denoising") < stages.index("decoding")
    steps = [(event["done"], event["total"]) for kind, event in events if kind == "step"]
    assert steps == [(done, 4) for done in (1, 2, 3, 4)]
    assert [event["step"] for kind, event in events if kind == "preview"] == [2, 0, 4]
    assert all(row["stage_durations"]["preview"] > 0 for row in video["data"])
    path, frames = f"/v1/videos/{created.id}/content", []
    for index in (0, 1):
        content = served.request(f"{path}?index={index}")[2]
        (tmp_path / "v.mp4").write_bytes(content)
        frames.append(read_frames(tmp_path / "v.mp4"))
    assert (frames[1] == own).all() and (frames[0] != own).any()
    for variant, width in (("thumbnail", 64), ("spritesheet", 256), ("preview", 64)):
        picture = client.videos.download_content(created.id, variant=variant).read()
        assert imageio.v3.imread(picture).shape[1] == width
    cached = re.search(rb'wan_texts_total{from="cache"} (\S+)', served.request("/metrics")[2])
    assert cached is not None and float(cached[1]) > 0  # the second video has the same prompts


def test_deleted_and_abandoned_videos_end(served: ServiceProcess) -> None:
    """Videos deleted while queued or running, and one whose synchronous client disconnects.

    No prompt of a deleted one is in any file; the log has its id.
    """
    texts = {"prompt": "zq private zq", "negative_prompt": "zq unwanted zq"}
    running, queued = served.create(**LONG, **texts), served.create(**texts)
    served.wait(lambda: has_finished_steps(served, running))
    for video in (running, queued):
        assert served.request(f"/v1/videos/{video}", method="DELETE")[0] == 200
    folder = served.folder / "jobs"
    served.wait(lambda: not (folder / running).exists() and not (folder / queued).exists(), 10)
    assert served.health()["running"] == 0  # the queued one may have been started meanwhile
    paths = [path for path in served.folder.rglob("*") if path.is_file()]
    assert not [path for path in paths if b"zq " in path.read_bytes()]
    assert running in (served.folder / "ranks.log").read_text()
    folders_before = {*folder.iterdir()}
    body = json.dumps({"prompt": PROMPT, **LONG}).encode()
    with open_connection(served.port, make_post_request(len(body), body, "/v1/videos/sync")):
        served.wait(lambda: served.health()["running"] == 1)
    served.wait(
        lambda: {*folder.iterdir()} == folders_before and served.health()["running"] == 0, 10
    )
    assert served.health()["restarts"] == 0


@pytest.mark.parametrize("kind", ["between", *map(slow, [*FAULTS][1:])])
def test_faults_of_a_rank(
    kind: str, served: ServiceProcess, faults: Faults, own: np.ndarray
) -> None:
    """The job fails with its reason, or is retried; the next video equals that of generate.py."""
    rank, at, do, after, code, restarts = FAULTS[kind]
    restarts_before = served.health()["restarts"]
    faults.arm(rank, at, do, after)
    first, second = served.create(), served.create(seed=7)
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
