"""A store for finished videos, with fsspec's local and memory file systems."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from tests.refusals import check_refusals
from tests.serve.jobs import PROMPT, Jobs, begin_request, run_due_timers, running, wait_until
from tests.serve.test_archives import read_zip
from tests.serve.test_journal import RECORD, write_finished_video
from wan.serve.queue.service import Limits
from wan.serve.store import videos as store_module
from wan.serve.store.videos import Store, StoreUploads
from wan.settings.errors import InputError

VIDEO = b"video"  # what `Jobs.complete` writes


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store_module, "_LOCAL_SECONDS", 0.0)
    monkeypatch.setattr(store_module, "_LONGEST_PAUSE", 0.05)
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return str(tmp_path / "store")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", read_as_s3fs)
    return "memory://bucket/videos"


def read_as_s3fs(
    self: MemoryFileSystem, path: str, version_id: Any = None, start: Any = None, end: Any = None
) -> bytes:
    """Has the arguments of s3fs in their order."""
    assert version_id is None
    return bytes(self.store[path].getvalue()[start:end])


def list_stored(url: str) -> dict[str, bytes]:
    """Returns the content of each file of the store."""
    files, root = fsspec.core.url_to_fs(url)
    paths = files.find(root) if files.exists(root) else []
    return {path[len(root) :].lstrip("/"): files.cat_file(path) for path in paths}


@asynccontextmanager
async def storing(jobs: Jobs, url: str) -> Any:
    """Uploads in the background; yields the list of the attempts' results."""
    attempts: list[str] = []
    store = Store(url)
    await store.check(jobs.folder / "jobs")
    uploads = StoreUploads(jobs.service, store, attempts.append)
    async with running(uploads.restore_jobs()), running(jobs.service.deliveries.run()):
        yield attempts


async def wait_until_stored(jobs: Jobs) -> None:
    """Waits until no job is left to be stored or removed, and no video is on the local disk."""
    files, count = jobs.service.files, jobs.service.journal.count_deliveries
    await wait_until(lambda: not (count("store") or files.list_jobs_with_video()))


def local_names(jobs: Jobs, name: str) -> set[str]:
    return {path.name for path in (jobs.folder / "jobs" / name).glob("*")}


def make_jobs(tmp_path: Path, url: str, **limits: Any) -> Jobs:
    return Jobs(tmp_path / "jobs", Limits(**limits), store=Store(url))


async def test_an_archive_of_videos_that_move_to_the_store(tmp_path: Path, url: str) -> None:
    """They are on the disk when the first bytes are sent, and in the store before the last ones."""
    jobs, moved, messages = make_jobs(tmp_path, url), asyncio.Event(), list[Any]()
    name, app = await jobs.create({"n": 2}), jobs.app

    async def serve_slowly(scope: Any, receive: Any, send: Any) -> None:
        async def send_slowly(message: Any) -> None:
            await send(message)
            if message.get("body"):
                await moved.wait()

        await app(scope, receive, send_slowly)

    for index in range(2):
        jobs.complete(f"{name}.{index}")
    jobs.app = serve_slowly
    request = jobs.request(f"/v1/videos/{name}/archive", messages=messages)
    task = asyncio.create_task(request)
    await wait_until(lambda: len(messages) > 1)
    async with storing(jobs, url):
        await wait_until_stored(jobs)
        moved.set()
        archive = read_zip((await task)[2])
    assert [archive[f"{name}{end}.mp4"] for end in ("", "-1")] == [VIDEO, VIDEO]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
async def test_several_videos_of_a_job_and_a_lost_journal(tmp_path: Path, url: str) -> None:
    """Without the journal they are found by the local records."""
    jobs = make_jobs(tmp_path, url)
    other, name = [await jobs.create({"seed": [7, 3]}) for _ in range(2)]
    async with storing(jobs, url):
        for job_id in (other, name):
            for index, seed in enumerate((7, 3)):
                jobs.complete(f"{job_id}.{index}", record=RECORD | {"seed": seed})
        await wait_until_stored(jobs)
        assert {*local_names(jobs, name)} == {"video.json", "video-1.json"}
        for query in ("", "?index=1"):
            path = f"/v1/videos/{name}/content{query}"
            assert (await jobs.request(path))[::2] == (200, VIDEO)
        archive = read_zip((await jobs.request(f"/v1/videos/{name}/archive"))[2])
        assert [archive[f"{name}{end}.mp4"] for end in ("", "-1")] == [VIDEO, VIDEO]
    files, root = fsspec.core.url_to_fs(url)
    files.rm_file(f"{root}/{other}/video-1.mp4")  # one of its videos is missing
    jobs.service.journal.close()
    (jobs.folder / "journal.sqlite").unlink()
    reopened = make_jobs(tmp_path, url)
    assert {job.id for job in reopened.service.list_stored_jobs()} == {name, other}
    async with storing(reopened, url):
        videos: list[dict[str, Any]] = []
        while not videos:
            await asyncio.sleep(0.02)
            videos = (await reopened.request("/v1/videos"))[2]["data"]
        assert [video["id"] for video in videos] == [name]
        assert [output["seed"] for output in videos[0]["data"]] == [7, 3]
        path = f"/v1/videos/{name}/content?index=1"
        assert (await reopened.request(path))[::2] == (200, VIDEO)
        await reopened.delete(name)
        await wait_until_stored(reopened)
    assert not [path for path in list_stored(url) if path.startswith(name)]
    assert not local_names(reopened, name)


async def test_content_comes_from_the_store(tmp_path: Path, url: str) -> None:
    """Whole, in ranges, for every route; the local video is removed; a deletion removes all."""
    jobs = make_jobs(tmp_path, url)
    name, other = await jobs.create(Idempotency_Key="k"), await jobs.create()
    path = f"/v1/videos/{name}/content"
    async with storing(jobs, url) as attempts:
        jobs.complete(name)
        jobs.complete(other)
        before = await jobs.request(path)
        await wait_until_stored(jobs)
        assert attempts == ["uploaded"] * 2 and local_names(jobs, name) == {"video.json"}
        stored = list_stored(url)
        assert stored[f"{name}/video.mp4"] == VIDEO and f"{name}/video.json" in stored
        assert len(stored) == 4
        status, headers, content = await jobs.request(path)
        assert (status, content) == (200, VIDEO) == (before[0], before[2])
        assert before[1].keys() - headers.keys() == {"last-modified"}
        for asked, expected, part in (
            ("bytes=1-2", 206, VIDEO[1:3]),
            ("bytes=3-", 206, VIDEO[3:]),
            ("bytes=-2", 206, VIDEO[-2:]),
            ("bytes=-9", 206, VIDEO),
            ("bytes=0-999", 206, VIDEO),
            ("bytes=2-1", 200, VIDEO),
            ("bytes=0-1,-2", 200, VIDEO),
        ):
            assert [*(await jobs.request(path, range=asked))][::2] == [expected, part], asked
        status, part_headers, answer = await jobs.request(path, range="bytes=5-")
        assert (status, part_headers["content-range"]) == (416, "bytes */5")
        assert answer["error"]["code"] == "range_not_satisfiable"
        part_headers = (await jobs.request(path, range="bytes=1-2"))[1]
        assert part_headers["content-range"] == "bytes 1-2/5"
        assert (await jobs.request(path, if_none_match=headers["etag"]))[0] == 304
        resumed = await jobs.request(path, range="bytes=1-2", if_range='"old"')
        assert (resumed[0], resumed[2]) == (200, VIDEO)
        head = await jobs.request(path, method="HEAD")
        assert (head[1]["content-length"], head[2]) == ("5", b"")
        body = {"prompt": "a red star"}
        synchronous = await jobs.request("/v1/videos/sync", body, Idempotency_Key="k")
        assert synchronous[2] == VIDEO
        assert (await jobs.request(f"{path}?variant=thumbnail"))[0] == 410  # VIDEO has no frame
        await jobs.delete(name)
        await wait_until_stored(jobs)
        assert {*list_stored(url)} == {f"{other}/video.mp4", f"{other}/video.json"}
        jobs.service.limits = Limits(keep_days=1e-9)
        expiry = asyncio.create_task(jobs.service._delete_old_jobs())
        await wait_until(lambda: len(attempts) > 3)
        expiry.cancel()
        assert list_stored(url) == {} and attempts[2:] == ["removed"] * 2


async def test_pictures_of_a_stored_video(tmp_path: Path) -> None:
    write_finished_video(tmp_path)
    content, jobs = (tmp_path / "video.mp4").read_bytes(), make_jobs(tmp_path, "memory://bucket")
    async with storing(jobs, "memory://bucket"):
        body = {"prompt": PROMPT}
        name, _, task = await begin_request(jobs, "/v1/videos/sync", body, Idempotency_Key="k")
        jobs.complete(name, video=content)
        assert (await task)[2] == content
        await wait_until_stored(jobs)
        stored = await jobs.request("/v1/videos/sync", body, Idempotency_Key="k")
        assert stored[2] == content
        for variant, width in (("thumbnail", 64), ("spritesheet", 256)):
            query = f"?variant={variant}"
            picture = await jobs.request(f"/v1/videos/{name}/content{query}")
            assert (picture[0], picture[1]["content-type"]) == (200, "image/jpeg")
            assert Image.open(BytesIO(picture[2])).width == width
        assert local_names(jobs, name) == {"video.json"}
    jobs.service.journal.close()
    status, _, answer = await Jobs(tmp_path / "jobs").request(f"/v1/videos/{name}/content")
    assert status == 410 and "--store" in answer["error"]["message"]


async def test_a_store_that_fails(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job stays completed and served; no half video is stored; a restart goes on.

    The second video of each job cannot be stored.
    """
    jobs = make_jobs(tmp_path, url)
    names = [await jobs.create({"n": 2}) for _ in range(2)]
    backend = MemoryFileSystem if "memory" in url else LocalFileSystem
    whole, num_failures = backend.put_file, 0

    def put_half(self: Any, source: str, target: str, **more: Any) -> None:
        nonlocal num_failures
        if "video-1" not in source:
            return whole(self, source, target, **more)
        num_failures += 1
        if backend is LocalFileSystem:  # an object store shows no half object
            Path(target).write_bytes(Path(source).read_bytes()[:2])
        raise ConnectionError("secret")

    monkeypatch.setattr(backend, "put_file", put_half)
    async with storing(jobs, url) as attempts:
        for name in names:
            for index in range(2):
                jobs.complete(f"{name}.{index}")
        await wait_until(lambda: num_failures > 4)
        path = f"/v1/videos/{names[0]}/content"
        assert (await jobs.request(path))[2] == VIDEO
        assert not [name for name in list_stored(url) if not Path(name).name.startswith(".")]
        await jobs.delete(names[1])
        await wait_until(lambda: jobs.service.journal.count_deliveries("store") < 2)
        assert {*attempts} == {"repeated", "removed"}
    jobs.service.journal.close()
    monkeypatch.setattr(backend, "put_file", whole)
    restarted = make_jobs(tmp_path, url)
    async with storing(restarted, url):
        await wait_until_stored(restarted)
        expected = {f"{names[0]}/video{i}.{end}" for i in ("", "-1") for end in ("mp4", "json")}
        assert {*list_stored(url)} == expected
        (restarted.folder / "jobs" / names[0] / "video.mp4").write_bytes(VIDEO)
    async with storing(restarted, url):  # it was killed before it removed its file
        assert local_names(restarted, names[0]) == {"video.json", "video-1.json"}

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("secret")

    monkeypatch.setattr(backend, "info", fail)
    monkeypatch.setattr(backend, "size", fail)
    status, _, answer = await restarted.request(path)
    assert (status, answer["error"]["code"]) == (503, "store_unavailable")
    assert "secret" not in str(answer)


async def test_uploads_that_go_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short file is no stored one; nothing is left of an earlier attempt or of a deleted job."""
    url = "memory://bucket"
    jobs = make_jobs(tmp_path, url)
    name, deleted = await jobs.create(), await jobs.create()
    whole, upload, num_short = MemoryFileSystem.put_file, Store.upload, 0

    def put_file(self: Any, source: str, target: str, **more: Any) -> None:
        nonlocal num_short
        if num_short or not source.endswith("video.mp4"):
            return whole(self, source, target, **more)
        num_short += 1
        self.pipe_file(target, Path(source).read_bytes()[:2])

    async def delete_afterwards(self: Store, job_id: str, files: dict[str, Path]) -> None:
        await upload(self, job_id, files)
        await jobs.delete(job_id)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    fsspec.filesystem("memory").pipe_file(f"/bucket/{name}/thumbnail.jpg", b"of an earlier attempt")
    async with storing(jobs, url) as attempts:
        jobs.complete(name)
        await wait_until_stored(jobs)
        assert attempts == ["repeated", "uploaded"]
        assert {*list_stored(url)} == {f"{name}/video.mp4", f"{name}/video.json"}
        assert list_stored(url)[f"{name}/video.mp4"] == VIDEO
        with pytest.raises(store_module.StoreError, match="shorter"):  # it had six bytes
            [part async for part in Store(url).read(name, "video.mp4", 0, len(VIDEO) + 1)]
        several = await jobs.create({"n": 2})
        jobs.complete(several)
        path = jobs.folder / "jobs" / several / "video.mp4"
        path.unlink()  # one of its videos is gone, and the other one is stored
        jobs.complete(f"{several}.1")
        await wait_until_stored(jobs)
        assert f"{several}/video-1.mp4" in list_stored(url) and attempts[2:] == ["uploaded"]
        await jobs.delete(several)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "upload", delete_afterwards)
            jobs.complete(deleted)
            await wait_until_stored(jobs)
        assert attempts[3:] == ["removed"] * 2
        assert {*list_stored(url)} == {f"{name}/video.mp4", f"{name}/video.json"}
        last, save = await jobs.create(), mock.AsyncMock(return_value=False)

        async def lock_afterwards(self: Store, job_id: str, files: dict[str, Path]) -> None:
            await upload(self, job_id, files)
            monkeypatch.setattr(jobs.service.journal, "save", save)

        monkeypatch.setattr(Store, "upload", lock_afterwards)
        jobs.complete(last)
        await wait_until(lambda: save.await_count > 2)
        await run_due_timers()
        assert "video.mp4" in local_names(jobs, last)  # the journal has not written that it may go


async def test_refused_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence for each; a password is not repeated."""
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    text = "Install absent to use it"
    fsspec.register_implementation("absent", "absent.Files", clobber=True, errtxt=text)
    urls = ["nowhere://x", "absent://x", "file/x", "videos/jobs", "videos/jobs/x"]
    urls += ["ftp://user:secret@127.0.0.1:1/x", ""]
    sentences = {}
    for url in urls:
        with pytest.raises(InputError) as refused:
            await Store(url).check(Path("videos/jobs"))
        assert "secret" not in str(refused.value)
        sentences[url] = str(refused.value)
    check_refusals("serve: --store", sentences, [r"(?<=known protocols: ).*"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
