"""A journal that is locked, lost or damaged; finished videos without a job."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.refusals import check_refusals
from tests.serve.jobs import PROMPT, Jobs, running, wait_until
from wan.media.video_writer import write_video
from wan.serve.jobs import journal, journal_file
from wan.settings.command import Output
from wan.settings.errors import InputError

NAME = "journal.sqlite"
PRIVATE_TEXT = "zq private zq"
Damage = Callable[[Path], Any]
HIDDEN = (r"/\S*(?=/journal\.sqlite)", r"(?<=damaged \().*?(?=\);)")  # paths, messages of SQLite


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of --journal; waits are short."""
    for module in (journal, journal_file):
        monkeypatch.setattr(module, "PATIENCE", 0.8)
    monkeypatch.setattr(journal, "CHECK_SECONDS", 0.05)
    return tmp_path / "videos"


@asynccontextmanager
async def service_with_writer(folder: Path) -> AsyncIterator[Jobs]:
    """A service with a running writer of its journal, but without ranks."""
    jobs = Jobs(folder)
    try:
        async with running(jobs.service.journal.run_writer()):
            yield jobs
    finally:
        jobs.service.journal.close()


@contextmanager
def locked_journal(folder: Path) -> Iterator[None]:
    """Locks the journal as another program would."""
    with closing(sqlite3.connect(folder / NAME, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


async def wait_for_health(jobs: Jobs, status: int) -> dict[str, Any]:
    """Waits until /health has a status; returns its answer."""
    # The ranks never start, so /health is 503 for that reason otherwise.
    await wait_until(lambda: (jobs.service.journal.problem is not None) == (status == 503))
    answered, _, health = await jobs.request("/health")
    assert answered == 503 and (health["status"] == "journal_unavailable") == (status == 503)
    return dict(health)


def execute(file: Path, statement: str) -> None:
    """Changes a database as another program would."""
    with closing(sqlite3.connect(file)) as other, other:
        other.execute(statement)


def read_stored_states(folder: Path) -> dict[str, str]:
    """Returns the states on disk."""
    with closing(sqlite3.connect(folder / NAME)) as file:
        return dict(file.execute("SELECT id, state FROM jobs").fetchall())


async def list_states(jobs: Jobs) -> dict[str, str]:
    """Returns the states of all videos, those of an earlier start included."""
    await jobs.service.journal.save()
    data = (await jobs.request("/v1/videos?limit=100"))[2]["data"]
    return {video["id"]: video["status"] for video in data}


async def test_writing_ends_where_a_change_was_just_made(folder: Path) -> None:
    """A stop re-queues running jobs and cancels the writer at the same moment."""
    jobs = Jobs(folder)
    book = jobs.service.journal
    job = await jobs.create()
    with mock.patch.object(journal.asyncio, "timeout", wraps=asyncio.timeout) as begin_wait:
        writer = asyncio.create_task(book.run_writer())
        await wait_until(lambda: begin_wait.called)  # it waits for a change
    book.update_job(jobs.service.find_job(job), done=1)
    writer.cancel()
    finished, _ = await asyncio.wait([writer], timeout=5)
    assert finished and writer.cancelled()
    book.close()
    assert read_stored_states(folder) == {job: "queued"}


# Locked by another program.


async def test_a_short_lock_is_waited_for(folder: Path) -> None:
    """A new job and a deletion are answered when they are on disk; other requests at once."""
    async with service_with_writer(folder) as jobs:
        old = await jobs.create({"prompt": PRIVATE_TEXT})
        with locked_journal(folder):
            new = asyncio.create_task(jobs.request("/v1/videos", {"prompt": PROMPT}))
            gone = asyncio.create_task(jobs.delete(old))
            began, longest = time.monotonic(), 0.0
            while time.monotonic() < began + 0.4:
                request_start = time.monotonic()
                assert (await jobs.request("/health"))[2]["status"] == "starting"
                longest = max(longest, time.monotonic() - request_start)
                await asyncio.sleep(0.02)
            assert longest < 0.2 and not new.done() and not gone.done()
        status, _, video = await new
        assert (status, await gone) == (200, 200)
        assert read_stored_states(folder) == {old: "deleted", video["id"]: "queued"}
        assert not jobs.find_files_with(PRIVATE_TEXT)


async def test_a_long_lock(folder: Path) -> None:
    """New jobs are refused without a trace; changes of other jobs are written afterwards."""
    async with service_with_writer(folder) as jobs:
        completed, deleted, waits = [await jobs.create({"prompt": PRIVATE_TEXT}) for _ in range(3)]
        with locked_journal(folder):
            await jobs.refuse({}, 503)
            health = await wait_for_health(jobs, 503)
            assert "locked" in health["reason"]
            for path in ("/v1/videos", f"/v1/videos/{completed}/remix", "/v1/videos/sync"):
                status, headers, answer = await jobs.request(path, {"prompt": PROMPT})
                assert (status, headers["x-should-retry"]) == (503, "true"), answer
                assert int(headers["retry-after"]) > 0
            jobs.complete(completed)
            assert await jobs.delete(deleted) == 202  # not on disk yet
            states = await list_states(jobs)
            assert states == {completed: "completed", waits: "queued"}
        await wait_for_health(jobs, 200)
        new = await jobs.create()
        stored = read_stored_states(folder)
        refused = stored.keys() - {*states, deleted, new}  # their rows have no content
        assert {stored[name] for name in refused} == {"deleted"}
        expected = states | {deleted: "deleted", new: "queued"}
        assert {name: stored[name] for name in stored if name not in refused} == expected
        assert {path.name for path in (folder / "jobs").iterdir()} == {completed, waits, new}


async def test_a_lock_during_the_start(folder: Path) -> None:
    """The start waits; a lasting lock is refused in one sentence."""
    async with service_with_writer(folder) as jobs:
        await jobs.create()
    with locked_journal(folder):
        start = asyncio.create_task(asyncio.to_thread(Jobs, folder))
        await asyncio.sleep(0.1)
        assert not start.done()
    assert len((await start).service.journal.list_in_state("queued")) == 1
    with locked_journal(folder), pytest.raises(InputError) as refusal:
        Jobs(folder)
    check_refusals("serve: a lock at the start", {"locked": str(refusal.value)}, HIDDEN)


# Removed, replaced or damaged while the service runs.


def remove(*ends: str) -> Damage:
    return lambda file: [file.with_name(file.name + end).unlink() for end in ends]


def replace_by(content: bytes | None) -> Damage:
    """Replaces the file by another one: with some bytes, an empty database, or a folder."""

    def damage(file: Path) -> None:
        other = file.with_name("other")
        if content is None:
            execute(other, "CREATE TABLE notes (text)")
        else:
            other.write_bytes(content)
        other.replace(file)

    return damage


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def overwrite(start: int, size: int) -> Damage:
    def damage(file: Path) -> None:
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(b"\xa5" * size)

    return damage


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


LOSSES: dict[str, Damage] = {
    "removed": remove("", "-wal", "-shm"),
    "removed without its log": remove(""),
    "log removed": remove("-wal"),
    "other database": replace_by(None),
    "other file": replace_by(b"notes of somebody else" * 999),
    "folder": replace_by_folder,
    "earlier copy": lambda file: file.with_name("b").replace(file),
    "tables dropped": lambda file: execute(file, "DROP TABLE jobs"),
    "moved": lambda file: file.parent.rename(file.parent.with_name("moved")),
}


LOSSES_BY_DEFAULT = ("removed", "log removed", "earlier copy", "tables dropped")
LOSS_CASES = [(case, False) for case in LOSSES if case != "tables dropped"]
LOSS_CASES += [(case, True) for case in LOSSES if case != "moved"]


@pytest.mark.parametrize(
    ("case", "is_busy"),
    [
        pytest.param(*case, marks=() if case[0] in LOSSES_BY_DEFAULT else pytest.mark.slow)
        for case in LOSS_CASES
    ],
)
async def test_a_journal_that_is_lost_stops_the_service(
    case: str,
    is_busy: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one sentence in the log; no further job is admitted.

    is_busy: A request comes before the next check of the file.
    """
    jobs = Jobs(folder)
    monkeypatch.setattr(jobs.service.rank_group, "run", asyncio.Event().wait)
    service = asyncio.create_task(jobs.service.serve_forever())
    await jobs.create()
    shutil.copy(folder / NAME, folder / "b")
    await jobs.create()
    if is_busy:
        monkeypatch.setattr(journal, "CHECK_SECONDS", 60.0)
        await asyncio.sleep(0.2)  # the last check has begun
    LOSSES[case](folder / NAME)
    if is_busy:
        assert (await jobs.refuse({}, 503))["code"] == "journal_unavailable"
    await asyncio.wait_for(service, 30)
    assert jobs.service.journal.is_lost
    (line,) = [message for message in caplog.messages if "The service stops" in message]
    assert line.startswith("The journal ") and "\n" not in line


async def test_a_full_disk(tmp_path: Path, folder: Path) -> None:
    """Changes wait in memory until there is room, and no new job is admitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk]).returncode:
        pytest.skip("a small file system can be mounted by root only")
    folder, fill = disk / "jobs", disk / "fill"
    try:
        async with service_with_writer(folder) as jobs:
            job_id = await jobs.create({"prompt": "long " * 1000})
            with suppress(OSError), fill.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            assert (await jobs.refuse({}, 507))["code"] == "disk_full"
            for number in range(0, 99_999, 50):  # SQLite first uses the space that it has
                error = {"code": "x", "message": "y" * number}
                job = jobs.service.find_job(job_id)
                jobs.service.journal.update_job(job, state="failed", error=error, ended=time.time())
                if not await jobs.service.journal.save():
                    break
            assert "full" in (await wait_for_health(jobs, 503))["reason"]
            status, headers, _ = await jobs.request("/v1/videos", {"prompt": PROMPT})
            assert status == 503 and int(headers["retry-after"]) > 0
            fill.unlink()
            await wait_for_health(jobs, 200)
            new = await jobs.create()
        assert read_stored_states(folder) == {job_id: "failed", new: "queued"}
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# The start.


STARTS: dict[str, Damage] = {
    "no database": lambda file: file.write_bytes(b"no database" * 999),
    "cut": cut,
    "head": overwrite(0, 100),
    "middle": overwrite(4096, 4096),
    "folder": replace_by_folder,
    "no table": lambda file: execute(file, "ALTER TABLE jobs RENAME TO other"),
    "other database": replace_by(None),
    "row": lambda file: execute(file, "UPDATE jobs SET settings = '[1]'"),
}


async def test_a_start_with_a_damaged_journal(folder: Path) -> None:
    """The refusal is one sentence with a remedy; after it, finished videos are listed again."""
    async with service_with_writer(folder) as jobs:
        await jobs.create()
    finished = write_finished_video(folder / "jobs" / "video_1")
    messages = {}
    for kind, damage in STARTS.items():
        copy = shutil.copytree(folder, folder.with_name("copy"))
        damage(copy / NAME)
        with pytest.raises(InputError) as refusal:
            Jobs(copy)
        messages[kind] = str(refusal.value)
        (copy / NAME).rename(copy / "aside")
        assert await list_states(Jobs(copy)) == {finished: "completed"}, kind
        shutil.rmtree(copy)
    check_refusals("serve: journals at the start", messages, HIDDEN)


# Finished videos without a job.

RECORD: dict[str, Any] = {
    "settings": {
        "prompt": PROMPT,
        "size": [64, 64],
        "frame_num": 5,
        "task": "t2v-A14B",
        "ckpt_dir": "/elsewhere",
        "sample_steps": 2,
        "sample_guide_scale": [3.0, 4.0],
        "image": "/etc/passwd",
        "save_file": "/elsewhere/video.mp4",
    },
    "seed": 7,
    "video": {"frames": 5, "width": 64, "height": 64, "fps": 8.0},
    "boundary": 0.875,
    "seconds": {"text": 0.5, "denoising": 1.5},
    "versions": {"wan": "0.4.0"},
    "run": {"date": "2026-01-02T03:04:05+00:00"},
}


def write_finished_video(folder: Path, record: Any = RECORD, name: str = "video") -> str:
    """Writes a video and its record into a job's folder; returns its id."""
    folder.mkdir(parents=True, exist_ok=True)
    write_video(torch.zeros(3, 5, 64, 64), Output(save_file=folder / f"{name}.mp4", fps=8))
    (folder / f"{name}.json").write_text(json.dumps(record))
    return folder.name


async def test_a_finished_video_is_a_job_again(folder: Path) -> None:
    name = write_finished_video(folder / "jobs" / "video_1")
    (folder / "jobs" / "video_2").mkdir()  # an unfinished one
    async with service_with_writer(folder) as jobs:
        video = await jobs.get_video(name)
        fields = [video[field] for field in ("status", "progress", "prompt", "seed", "size")]
        assert fields == ["completed", 100, PROMPT, 7, "64x64"]
        assert video["guidance"] == {"high_noise": 4.0, "low_noise": 3.0}
        assert video["completed_at"] == 1767323045 and video["inference_time_s"] == 2.0
        assert (await jobs.request(f"/v1/videos/{name}/content"))[2][4:8] == b"ftyp"
        assert jobs.service.journal.count_bytes() > 1000
        status, _, remix = await jobs.request(f"/v1/videos/{name}/remix", {"prompt": "blue"})
        assert (status, remix["num_frames"], remix["seed"]) == (200, 5, 7)
    assert await list_states(Jobs(folder)) == {name: "completed", remix["id"]: "queued"}


def change_record(**values: Any) -> Damage:
    return lambda folder: (folder / "video.json").write_text(json.dumps(RECORD | values))


def link_away(name: str) -> Damage:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent.parent / name)
        (folder / name).symlink_to(folder.parent.parent / name)

    return change


def truncate(folder: Path) -> None:
    with (folder / "video.mp4").open("r+b") as file:
        file.truncate((folder / "video.mp4").stat().st_size - 100)


UNFINISHED: dict[str, Damage] = {
    "cut video": truncate,
    "other video": lambda folder: (folder / "video.mp4").write_bytes(b"x" * 9999),
    "linked video": link_away("video.mp4"),
    "linked record": link_away("video.json"),
    "cut record": lambda folder: (folder / "video.json").write_text('{"settings": {'),
    "other record": change_record(settings=[1]),
    "no size": change_record(video={"frames": 5}),
    "no frames": change_record(video=RECORD["video"] | {"fps": 0}),
    "no number": change_record(seconds={"text": float("nan")}),
    "no date": change_record(run={"date": "yesterday"}),
}


async def test_unfinished_videos_are_ignored(folder: Path) -> None:
    """A length of 64 bits is as ISO/IEC 14496-12 has it: the size 1, the type, eight bytes."""
    write_finished_video(folder / "whole")
    for number, change in enumerate(UNFINISHED.values()):
        change(shutil.copytree(folder / "whole", folder / "jobs" / f"video_{number}"))
    whole = shutil.copytree(folder / "whole", folder / "jobs" / "video_whole") / "video.mp4"
    whole.write_bytes(whole.read_bytes() + struct.pack(">I4sQ", 1, b"free", 24) + bytes(8))
    files_before = sorted(folder.rglob("video*/*"))
    states = await list_states(Jobs(folder))
    assert not {kind for number, kind in enumerate(UNFINISHED) if f"video_{number}" in states}
    assert states == {"video_whole": "completed"}
    assert sorted(folder.rglob("video*/*")) == files_before


async def test_a_kill_before_the_journal_had_the_end(folder: Path) -> None:
    """A complete video is not made again; the video of a deleted job is removed."""
    async with service_with_writer(folder) as jobs:
        names = [await jobs.create() for _ in range(3)]
        for name in names[:2]:
            job = jobs.service.find_job(name)
            jobs.service.journal.update_job(job, state="in_progress", attempt=1, total=2)
        await jobs.service.journal.save()
        await jobs.delete(names[2])
    write_finished_video(folder / "jobs" / names[0])
    write_finished_video(folder / "jobs" / names[2])
    reopened = Jobs(folder)
    assert await list_states(reopened) == {names[0]: "completed", names[1]: "queued"}
    assert (await reopened.request(f"/v1/videos/{names[0]}/content"))[0] == 200
    assert not (folder / "jobs" / names[2]).exists()
