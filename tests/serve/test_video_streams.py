"""Videos that are followed while they are made."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frames import read_frames
from tests.serve.browser import Browser
from tests.serve.jobs import Jobs, wait_for_text, wait_until
from tests.serve.serving import PROMPT, ServiceProcess, generate_frames
from wan.serve.queue.service import Limits

GATE = '''
import time
from pathlib import Path
from wan.modules.vae.network import Decoder

folder, original, count = Path(__file__).parent, Decoder.forward, 0

def forward(self, z, state):
    """Counts the latent frames of a video; waits at the fourth one until the gate is open."""
    global count
    count = count + 1 if state.cached_frames else 1
    (folder / "count").write_text(str(count))
    while count == 4 and not (folder / "open").exists():
        time.sleep(0.02)
    return original(self, z, state)

Decoder.forward = forward
'''
FIELDS = {
    "t2v": {"size": "64x64", "num_inference_steps": 1, "num_frames": 29, "stream": True},
    "causal": {"size": "64x64", "num_inference_steps": 2, "num_frames": 33, "stream": True},
}
"""Eight or nine latent frames, which are decoded, or generated and decoded, in three blocks."""


class Follower:
    """Follows a video of `Jobs` in a task."""

    def __init__(self, jobs: Jobs, name: str, query: str = "", **headers: Any) -> None:
        self.disconnected, self.messages = asyncio.Event(), list[Any]()
        path = f"/v1/videos/{name}/content?stream=true{query}"
        headers |= {"disconnected": self.disconnected, "messages": self.messages}
        self.task = asyncio.create_task(jobs.request(path, **headers))

    async def wait_for(self, text: bytes, count: int = 1) -> None:
        await wait_for_text(self.messages, text, count)

    @property
    def is_whole(self) -> bool:
        """Whether the answer has ended as HTTP demands."""
        return not self.messages[-1].get("more_body", False)


async def test_a_file_is_followed_to_its_end(jobs: Jobs) -> None:
    """From a client that comes before the first byte, to one that comes when it is complete."""
    jobs.start_idle_ranks()
    name = await jobs.create({"n": 2, "stream": True})
    video = await jobs.get_video(name)
    urls = [f"/v1/videos/{name}/content?index=0&stream=true", None]
    assert [output["stream_url"] for output in video["data"]] == urls
    stream = jobs.folder / "jobs" / name / "video.stream.mp4"
    first = Follower(jobs, name)
    status, headers, _ = await jobs.request(urls[0], method="HEAD")
    assert status == 200 and headers["content-type"] == "video/mp4"
    await asyncio.sleep(0.3)
    assert not first.messages  # not even a status before a byte
    with stream.open("wb", buffering=0) as file:
        file.write(b"one ")
        await first.wait_for(b"one ")
        second = Follower(jobs, name)
        await second.wait_for(b"one ")
        file.write(b"two " * 100_000)
        await first.wait_for(b"two ", 100_000)
        file.write(b"three")
    stream.unlink()  # as the rank does before the job is complete
    await asyncio.sleep(0.3)
    assert not first.task.done()
    jobs.complete(name)
    for follower in (first, second):
        status, headers, content = await follower.task
        assert status == 200 and "content-length" not in headers
        assert content == b"one " + b"two " * 100_000 + b"three" and follower.is_whole
    status, headers, content = await jobs.request(urls[0], range="bytes=1-2")
    assert (status, content) == (206, b"id")
    waiting = Follower(jobs, name, "&index=1")
    jobs.complete(f"{name}.1", video=b"the second")
    assert (await waiting.task)[2] == b"the second"


@pytest.mark.parametrize("end", ["failed", "deleted", "decoded again", "stopping", "requeued"])
async def test_an_end_without_a_video(end: str, jobs: Jobs) -> None:
    """A client without a byte gets a status; an answer that has begun is not ended properly."""
    ranks = jobs.start_idle_ranks()
    name = await jobs.create({"stream": True})
    stream = jobs.folder / "jobs" / name / "video.stream.mp4"
    early = Follower(jobs, name)
    await asyncio.sleep(0.1)
    if end in ("failed", "deleted", "stopping"):
        await _end_job(jobs, name, end)
        status, _, answer = await early.task
        assert (status, answer["error"]["code"]) == {
            "failed": (500, "out_of_memory"),
            "deleted": (404, "not_found"),
            "stopping": (503, "stopping"),
        }[end]
        if end == "stopping":
            return
        jobs.handle_rank_message("failed", job=name, code="cancelled", message="")
        name = await jobs.create({"stream": True})
        stream = jobs.folder / "jobs" / name / "video.stream.mp4"
    stream.write_bytes(b"begun")
    late = Follower(jobs, name)
    await late.wait_for(b"begun")
    if end == "decoded again":
        stream.unlink()
        stream.write_bytes(b"begun again")
    else:
        await _end_job(jobs, name, end)
    await late.task
    assert late.messages[0]["status"] == 200 and not late.is_whole
    assert ranks.job_groups
    early.disconnected.set()


async def _end_job(jobs: Jobs, name: str, end: str) -> None:
    if end == "deleted":
        assert await jobs.delete(name) == 200
    elif end == "failed":
        jobs.handle_rank_message("failed", job=name, code="out_of_memory", message="no room")
    elif end == "requeued":
        jobs.handle_rank_message("ended", code="ranks_lost", message="lost")
    else:
        jobs.service.begin_stop()


async def test_requests_that_are_refused(tmp_path: Path) -> None:
    """A video without a stream, a picture, a wrong key, and more clients than allowed."""
    folder, limits = tmp_path / "jobs", Limits(batch_size=1)
    jobs = Jobs(folder, limits, key="k" * 16, flags=("--stream",), max_listeners=1)
    jobs.start_idle_ranks()
    key = {"Authorization": f"Bearer {'k' * 16}"}
    plain, streamed = await jobs.create({"stream": "no"}, **key), await jobs.create(**key)
    cases = {
        f"{plain}/content?stream=true": (404, "stream: true"),
        f"{streamed}/content?stream=true&variant=preview": (400, "variant=video"),
        f"{streamed}/content?stream=maybe": (400, "stream"),
    }
    for path, (expected, text) in cases.items():
        status, _, answer = await jobs.request(f"/v1/videos/{path}", **key)
        assert status == expected and text in answer["error"]["message"], path
    path = f"/v1/videos/{plain}/content?stream=true"
    assert (await jobs.request(path))[0] == 401
    path = f"/v1/videos/{streamed}/content?stream=true"
    client, other = [Follower(jobs, streamed, **key) for _ in range(2)]  # at the same moment
    for status, _, answer in (await other.task, await jobs.request(path, **key)):
        assert (status, answer["error"]["code"]) == (503, "busy")
    assert (await jobs.request(path, method="HEAD", **key))[0] == 503
    client.disconnected.set()
    await client.task
    stream = jobs.folder / "jobs" / streamed / "video.stream.mp4"
    for _ in range(2):  # a client that waits, and one that reads, leave their places to others
        waiting = Follower(jobs, streamed, **key)
        await asyncio.sleep(0.1)
        assert not waiting.messages
        stream.write_bytes(b"begun")
        await waiting.wait_for(b"begun")
        waiting.disconnected.set()
        await waiting.task
        await wait_until(lambda: stream not in list_open_files())
        stream.unlink()
        last = Follower(jobs, streamed, **key)
        await asyncio.sleep(0.1)
        last.disconnected.set()
        await last.task


def list_open_files() -> set[Path]:
    """Returns the files that this process has open, on Linux."""
    links = [*Path("/proc/self/fd").iterdir()]
    return {link.readlink() for link in links if link.is_symlink()}


def decode_prefix(content: bytes, folder: Path) -> np.ndarray:
    """Returns the frames of the first bytes of a video."""
    path = folder / "prefix.mp4"
    path.write_bytes(content)
    return read_frames(path) if len(content) > 2000 else np.empty((0,))


class GatedService(ServiceProcess):
    """A service of two ranks that decodes three latent frames, then waits for `open_gate`.

    Attributes:
        flags: Flags of generate.py.
        fields: Those of a request.
    """

    def __init__(self, folder: Path, flags: Sequence[object], fields: Mapping[str, Any]) -> None:
        folder.mkdir()
        self.flags, self.fields, self.modules = flags, fields, folder / "modules"
        self.modules.mkdir()
        (self.modules / "sitecustomize.py").write_text(GATE)
        super().__init__(folder / "jobs", 2, flags=flags, path=self.modules, is_forked=True)

    def open_gate(self) -> None:
        (self.modules / "open").touch()

    def close_gate(self) -> None:
        (self.modules / "open").unlink()

    def count_latent_frames(self) -> int:
        """Returns the number of latent frames of the last video that were begun."""
        path = self.modules / "count"
        return int(path.read_text() or 0) if path.exists() else 0


@pytest.fixture(scope="module", params=FIELDS)
def gated(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: Any
) -> Iterator[GatedService]:
    flags: list[object] = []
    if request.param == "causal":
        flags = ["--task", "causal-1.3B", "--ckpt_dir", tiny("causal-1.3B")]
    folder = tmp_path_factory.mktemp("gated") / "service"
    with GatedService(folder, flags, FIELDS[request.param]) as service:
        yield service


class HttpFollower(threading.Thread):
    """Follows a video of a real service; `content` grows meanwhile."""

    def __init__(self, service: ServiceProcess, video: str) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
        self._path = f"/v1/videos/{video}/content?stream=true"
        self.content, self.status, self.error = b"", 0, ""
        self.start()

    def run(self) -> None:
        self._connection.request("GET", self._path, headers={"Range": "bytes=0-"})
        answer = self._connection.getresponse()
        self.status = answer.status
        try:
            while part := answer.read1(1 << 16):
                self.content += part
        except http.client.IncompleteRead as error:
            self.error = type(error).__name__


@pytest.mark.dist
@pytest.mark.xdist_group("serve")
def test_frames_come_while_the_rest_is_decoded(gated: GatedService, tmp_path: Path) -> None:
    """The nine frames of the first block, but for the newest one; then all of the video's.

    The rest of a causal video is not generated before. A second video is deleted while its second
    block is decoded: its third one never is.
    """
    video, num_frames = gated.create(**gated.fields, seed=7), gated.fields["num_frames"]
    follower = HttpFollower(gated, video)
    gated.wait(lambda: len(decode_prefix(follower.content, tmp_path)) >= 8, 120)
    gated.wait(lambda: gated.count_latent_frames() == 4, 60)
    assert gated.status(video) == "in_progress"
    first = decode_prefix(follower.content, tmp_path)
    assert len(first) == 8
    steps = gated.request(f"/v1/videos/{video}")[2]["steps"]
    assert steps == ([3, 6] if gated.flags else [1, 1])  # the fourth one is done, too
    gated.open_gate()
    gated.wait_for_video(video, 120)
    follower.join(60)
    assert (follower.status, follower.error) == (200, "")
    (tmp_path / "v.mp4").write_bytes(gated.request(f"/v1/videos/{video}/content?stream=true")[2])
    frames, streamed = read_frames(tmp_path / "v.mp4"), decode_prefix(follower.content, tmp_path)
    assert frames.shape == streamed.shape == (num_frames, 64, 64, 3)
    assert np.array_equal(first, streamed[:8])
    assert np.abs(frames.astype(int) - streamed).mean() < 8  # encoded twice
    argv = ["--prompt", PROMPT, "--size", "64*64", "--frame_num", num_frames, "--base_seed", 7]
    argv += [*gated.flags, "--ulysses_size", 2, "--sample_steps"]
    argv += [gated.fields["num_inference_steps"]]
    assert np.array_equal(frames, generate_frames(tmp_path / "once.mp4", *argv, ranks=2))
    assert [path.name for path in (gated.folder / "jobs" / video).glob("*stream*")] == []
    gated.close_gate()
    deleted = gated.create(**gated.fields)
    follower = HttpFollower(gated, deleted)
    gated.wait(lambda: follower.content and gated.count_latent_frames() == 4, 120)
    assert gated.request(f"/v1/videos/{deleted}", method="DELETE")[0] == 200
    gated.open_gate()
    gated.wait(lambda: not (gated.folder / "jobs" / deleted).exists(), 60)
    follower.join(60)
    assert (follower.status, follower.error) == (200, "IncompleteRead")
    assert gated.count_latent_frames() == 6
    assert gated.count_tracebacks() == 0


@pytest.mark.dist
@pytest.mark.xdist_group("serve")
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_plays_a_video_while_it_is_made(gated: GatedService, tmp_path: Path) -> None:
    """The first block is shown while the gate is closed; in the end the player has all frames.

    Another video is cancelled in the page after its first block: the player stops.
    """
    if (gated.modules / "open").exists():
        gated.close_gate()
    video = gated.create(**gated.fields, fps=8)
    with Browser(tmp_path / "profile") as browser:
        browser.open(gated.url)
        _wait_for_first_block(gated, browser, video)
        gated.open_gate()
        browser.wait("player.ended", 120)
        duration = gated.fields["num_frames"] / 8
        assert browser.evaluate("player.currentTime") == pytest.approx(duration, abs=0.2)
        browser.wait("document.querySelector('.shot button img') !== null", 60)  # the thumbnail
        gated.close_gate()
        cancelled = gated.create(**gated.fields, fps=8)
        _wait_for_first_block(gated, browser, cancelled)
        browser.evaluate("window.confirm = () => true")
        browser.evaluate(
            "[...document.querySelectorAll('button')].find("
            "(button) => button.innerText === 'Cancel').click()"
        )
        browser.wait("player.paused && !player.isConnected", 60)
        assert f"The video was cancelled: {PROMPT}" in browser.evaluate("document.body.innerText")
        gated.open_gate()
        gated.wait(lambda: not (gated.folder / "jobs" / cancelled).exists(), 60)
        assert gated.count_latent_frames() <= 6


def _wait_for_first_block(gated: GatedService, browser: Browser, video: str) -> None:
    """Waits until the page plays the first frames of a video that cannot be complete."""
    browser.wait("!!(player = document.querySelector('.shot video'))", 120)
    browser.wait("player.currentTime > 0.2 && player.videoWidth === 64", 120)
    assert gated.status(video) == "in_progress" and gated.count_latent_frames() <= 4
    assert browser.evaluate("player.buffered.end(0)") <= 9 / 8
