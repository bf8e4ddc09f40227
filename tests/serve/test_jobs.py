"""Jobs: repeated requests, disconnecting clients, deletion, remaining data, and routes."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.dist import REPO
from tests.refusals import check_refusals
from tests.serve.jobs import PROMPT, Jobs, begin_request, run_due_timers, running, wait_until
from tests.serve.test_webhooks import LOCAL
from wan.serve.jobs import journal as journal_module
from wan.serve.jobs.job import ServiceJob, hash_request
from wan.serve.queue import waiters
from wan.serve.queue.service import Limits

# Repeated requests.


@pytest.mark.parametrize("is_remix", [False, True], ids=["create", "remix"])
async def test_repeated_requests(is_remix: bool, jobs: Jobs) -> None:
    """A key makes them one, also after a restart; without one, a retry may be another client's."""
    path = f"/v1/videos/{await jobs.create({'seed': 99})}/remix" if is_remix else "/v1/videos"
    retry: dict[str, Any] = {"x_stainless_retry_count": "1"}

    async def send(**headers: str) -> str:
        return str((await jobs.request(path, {"prompt": "a blue star"}, **headers))[2]["id"])

    first, keyed = await send(), await send(Idempotency_Key="k")
    for headers in ({}, retry, retry | {"Idempotency_Key": ""}, {"Idempotency_Key": "other"}):
        other = await send(**headers)
        assert other not in (first, keyed) and await jobs.delete(other) == 200
    assert jobs.get_state(first) == "queued"
    jobs.complete(keyed)
    assert await send(Idempotency_Key="k") == keyed
    jobs = jobs.restart()
    assert await send(Idempotency_Key="k") == keyed
    error = await jobs.refuse({"prompt": "x"}, 422, Idempotency_Key="k")
    assert error["code"] == "idempotency_key_reused"
    await jobs.delete(keyed)
    assert await send(Idempotency_Key="k") != keyed


def test_the_hash_of_a_request() -> None:
    """It includes the boundaries between fields, and not their order."""
    equal = {"prompt": "a", "lora": {"name": "b", "scale": 1}}, {"prompt": "a", "image": b"1"}
    for body in equal:
        assert hash_request(body) == hash_request(dict(reversed(body.items())))
    lora = {"prompt": "a", "lora": {"scale": 1, "name": "b"}}
    assert hash_request(equal[0]) == hash_request(lora)
    for first, second in (
        ({"image": b"1last_image2"}, {"image": b"1", "last_image": b"2"}),
        ({"image": b"1last_image 1 2"}, {"image": b"1", "last_image": b"2"}),
        ({"image": [b"12", b"3"]}, {"image": [b"1", b"23"]}),
        ({"image": [b"1image 2"]}, {"image": [b"1", b"2"]}),
        ({"prompt": "1"}, {"prompt": 1}),
        ({"lora": [{"image": b"1"}]}, {"lora": [{"image": b"2"}]}),
    ):
        assert hash_request(first) != hash_request(second), (first, second)


# Clients of the synchronous routes that disconnect.


async def test_a_disconnect_cancels_unless_another_client_has_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client may have created the job with the same key on another route."""
    monkeypatch.setattr(waiters, "REJOIN", 0.0)

    async def leave_after(creates: str) -> str | None:
        jobs = Jobs(tmp_path / f"jobs-{creates}")
        key: dict[str, Any] = {"Idempotency_Key": "k"} if creates else {}
        if creates == "before":
            await jobs.create(**key)
        name, disconnected, task = await begin_request(jobs, "/v1/videos/sync", **key)
        if creates == "after":
            assert await jobs.create(**key) == name
        disconnected.set()
        while not task.done():
            jobs.service._signal_change()  # the request looks whether its client is connected
            await asyncio.sleep(0.001)
        await run_due_timers()
        return jobs.get_state(name)

    cases = ("", "before", "after")
    states = await asyncio.gather(*map(leave_after, cases))
    assert dict(zip(cases, states, strict=True)) == {
        case: "queued" if case else "deleted" for case in cases
    }


GRACES: dict[str, tuple[tuple[float | None, ...], list[str]]] = {
    # seconds that each client has to connect again (None: it still waits); cancelled jobs
    "all have left": ((0.0, 0.0), ["a"]),
    "the last one has time": ((0.0, 60.0), []),
    "one waits": ((0.0, None), []),
    "an earlier one waits": ((None, 0.0), []),
}


@pytest.mark.parametrize("case", GRACES)
async def test_each_disconnect_has_its_own_grace(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graces, cancelled = GRACES[case]
    job, names = ServiceJob("a", {}, key="k"), list[str]()
    clients = waiters.Waiters(names.append)
    connections = [clients.wait(job, is_existing) for is_existing in (False, True)]
    notes = [connection.__enter__() for connection in connections]
    for seconds, note_disconnect, connection in zip(graces, notes, connections, strict=True):
        if seconds is not None:
            monkeypatch.setattr(waiters, "REJOIN", seconds)
            note_disconnect()
            connection.__exit__(None, None, None)
    await run_due_timers()
    assert names == cancelled


async def test_who_waits_gets_the_video_until_the_service_stops(jobs: Jobs) -> None:
    name, _, task = await begin_request(jobs, "/v1/videos/sync")
    jobs.complete(name, 2.5, record=RECORD)
    status, headers, answer = await task
    expected = {"x-request-id": name, "x-model": "t2v-A14B", "x-inference-time-s": "2.500"}
    expected |= {"x-stage-durations": json.dumps(RECORD["seconds"]), "x-peak-memory-mb": "5.0"}
    assert (status, answer) == (200, b"video")
    assert {key: headers[key] for key in expected} == expected
    _, _, video = await jobs.request(f"/v1/videos/{name}")
    expected = {"file_name": f"{name}.mp4", "media_type": "video/mp4", "quality": "default"}
    assert {key: video[key] for key in expected} == expected
    name, _, task = await begin_request(jobs, "/v1/videos/sync")
    jobs.service.begin_stop()
    for answering in (task, jobs.request("/v1/videos", {"prompt": PROMPT})):
        status, headers, answer = await answering
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "stopping", "30")
    assert jobs.get_state(name) == "queued"
    assert (await jobs.request("/health"))[2]["status"] == "stopping"


# Remaining data of a deleted job.


async def run_cleanup(jobs: Jobs, until: Callable[[], object] = lambda: True) -> None:
    """Runs the cleanup of the service once or more, until a condition holds."""
    journal = jobs.service.journal
    assert await journal.save()
    with mock.patch.object(journal, "vacuum", wraps=journal.vacuum) as last_step:
        async with running(jobs.service._delete_old_jobs()):
            await wait_until(lambda: last_step.called and until())


@pytest.mark.parametrize("limits", [Limits(keep_days=1), Limits(quota=0)], ids=["days", "quota"])
async def test_nothing_of_an_expired_job_is_left(
    limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "TRUST_SECONDS", 0.0)
    jobs = Jobs(tmp_path / "jobs", limits)
    name, newer = await jobs.create({"prompt": "zq private zq"}), await jobs.create()
    jobs.complete(newer, ended=time.time() - 0.9 * 86400)
    jobs.complete(name, ended=time.time() - 2 * 86400)
    await run_cleanup(jobs, lambda: not jobs.find_files_with("zq private zq"))
    assert jobs.get_state(name) == "deleted"
    assert jobs.get_state(newer) == ("completed" if limits.quota is None else "deleted")


@pytest.mark.parametrize("jump", [-400.0, 400.0])
async def test_a_clock_that_is_set_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """By days, while the service runs or before it starts; the quota takes the first ends."""
    jobs, real = Jobs(tmp_path / "jobs", Limits(keep_days=7, queue=9)), time.time

    def set_clock(days: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + 86400 * days)

    last, first = [await jobs.create() for _ in range(2)]
    jobs.complete(first)
    set_clock(jump)
    jobs.complete(last)
    await run_cleanup(jobs)
    assert await jobs.service.journal.list_ended() == [first, last]
    restarted = Jobs(jobs.folder, jobs.service.limits)
    await run_cleanup(restarted)
    monkeypatch.setattr("wan.serve.jobs.journal.TRUST_SECONDS", 0.0)  # they have passed
    set_clock(0)
    await run_cleanup(restarted)
    assert [restarted.get_state(name) for name in (first, last)] == ["completed"] * 2
    set_clock(400)
    await run_cleanup(restarted)
    assert restarted.get_state(first) == ("deleted" if jump > 0 else "completed")


@pytest.mark.parametrize("end", ["vacuum", "close"])
async def test_nothing_is_left_in_pages_that_were_split(end: str, jobs: Jobs) -> None:
    """Many jobs with rows of random lengths, of which half are deleted in random order."""
    rng, journal = random.Random(3), jobs.service.journal
    await jobs.create()
    (first,) = journal.list_in_state("queued")
    alive: list[ServiceJob] = [first]
    dead: list[ServiceJob] = []
    for number in range(100):
        text = f"zq{number:05}zq " * rng.choice([1, 2, 9, 99, 900])
        job = ServiceJob(f"video_{rng.getrandbits(96):024x}", {"prompt": text}, key=text[:9])
        await journal.add(job)
        alive.append(job)
        changed = rng.choice(alive)
        journal.update_job(changed, error={"message": f"{changed.key}" * rng.choice([1, 9, 99])})
        if rng.random() < 0.5:
            dead.append(alive.pop(rng.randrange(1, len(alive))))
            journal.delete(dead[-1])
    assert await journal.save()
    getattr(journal, end)()
    content = b"".join(path.read_bytes() for path in jobs.folder.glob("journal.sqlite*"))
    assert not [job.id for job in dead if job.settings["prompt"][:9].encode() in content]
    assert all(job.settings["prompt"][:9].encode() in content for job in alive[1:])


async def test_nothing_is_left_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite begins its write-ahead log again, and leaves what follows the last change.

    Unless it is told to do so, it does not overwrite deleted content; some builds always do.
    """
    open_database = sqlite3.connect

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = open_database(*args, **kwargs)
        connection.execute("PRAGMA secure_delete=OFF")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    jobs = Jobs(tmp_path / "jobs")
    prompts = [f"{text} " * 700 for text in ("a star", "a moon", "zq private zq")]
    names = await asyncio.gather(*(jobs.create({"prompt": prompt}) for prompt in prompts))
    assert jobs.find_files_with("zq private zq")
    assert await jobs.delete(names[2]) == 200
    assert jobs.find_files_with("zq private zq") == []
    last = await jobs.create({"prompt": "zq secret zq " * 700})
    with closing(sqlite3.connect(jobs.folder / "journal.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN")  # another program that reads keeps the log
        other.execute("SELECT * FROM jobs").fetchall()
        assert await jobs.delete(last) == 200
        jobs.service.journal.vacuum()
    jobs.service.journal.vacuum()
    assert jobs.find_files_with("zq secret zq") == []


async def test_forgotten_jobs(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day after its deletion a job is forgotten, unless its webhook or files are left."""
    journal, names = jobs.service.journal, [await jobs.create() for _ in range(4)]
    real, days = SimpleNamespace(time=time.time, monotonic=time.monotonic), 0.0
    clock = {name: lambda read=read: read() + 86400 * days for name, read in vars(real).items()}
    monkeypatch.setattr(journal_module, "time", SimpleNamespace(**clock))
    for name in names:
        if name == names[3]:
            days = 1.1
        journal.delete(jobs.service.find_job(name))
    journal.update_ended(names[1], webhook_url="http://localhost/")
    days = 2.0
    for has_files, known in ((lambda name: name == names[2], names[1:]), (lambda _: False, [])):
        assert await journal.save()
        await journal.forget_deleted(has_files)
        assert await journal.save()
        assert [name for name in names if journal.get_state(name)] == known
        journal.update_ended(names[1], webhook_sent="deleted")
        days = 2.2


async def test_a_journal_of_an_earlier_version(tmp_path: Path) -> None:
    """Newer columns and the deliveries are missing; the folder of a deleted job is removed."""
    jobs = Jobs(tmp_path / "jobs", Limits(webhook_hosts=LOCAL))
    hook = {"webhook_url": "http://localhost/"}
    kept_id, name, completed = [await jobs.create(fields) for fields in ({}, {}, hook)]
    jobs.complete(completed)
    await jobs.delete(name)
    jobs.service.journal.close()
    with closing(sqlite3.connect(jobs.folder / "journal.sqlite")) as file, file:
        file.execute("DROP INDEX jobs_by_end")
        for column in ("guidance", "clock_ended"):
            file.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
        file.execute("DELETE FROM deliveries")
        file.execute("PRAGMA user_version = 1234567890")
    (jobs.folder / "jobs" / name).mkdir()
    (jobs.folder / "jobs" / name / "upload-image").write_bytes(b"zq private zq")
    (jobs.folder / "jobs" / name / "notes.txt").touch()  # of somebody else
    reopened = Jobs(tmp_path / "jobs")
    journal = reopened.service.journal
    assert [journal.count_deliveries(kind) for kind in ("webhook", "store")] == [1, 1]
    assert await journal.list_ended() == [completed]
    assert [path.name for path in (jobs.folder / "jobs" / name).iterdir()] == ["notes.txt"]
    assert (await reopened.get_video(kept_id))["guidance"] is None
    new = await reopened.get_video(await reopened.create())
    assert new["guidance"] == {"high_noise": 3.0, "low_noise": 3.0}


ORPHANS = {
    # files of a folder -> whether it is kept
    "unfinished": (["upload-image", ".host-12-video.mp4", "video.clips/0001.mp4"], False),
    "pictures": (["upload-src_ref_images/000", "upload-src_root_path/src_pose.mp4"], False),
    "latents": (["video.host-12.latents.safetensors", "thumbnail.jpg"], False),
    "finished": (["video.mp4", "video.json", "upload-image"], True),
    "foreign": (["upload-image", "notes.txt"], True),
    "foreign below": (["video.clips/notes/a"], True),
    "linked": (["upload-image"], False),
}


def test_folders_without_a_job(tmp_path: Path) -> None:
    """Foreign files and the targets of links are kept."""
    folder, target = tmp_path / "jobs" / "jobs", tmp_path / "elsewhere" / "video.mp4"
    for number, (names, _) in enumerate(ORPHANS.values()):
        for name in names:
            path = folder / f"video_{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
    (folder / "mine").mkdir()
    target.parent.mkdir()
    target.write_text("precious")
    (folder / f"video_{len(ORPHANS) - 1}" / "video.steps").symlink_to(target.parent)
    Jobs(tmp_path / "jobs")
    stays = [(folder / f"video_{number}").exists() for number in range(len(ORPHANS))]
    assert dict(zip(ORPHANS, stays, strict=True)) == {kind: x for kind, (_, x) in ORPHANS.items()}
    assert (folder / "mine").exists() and target.exists()


# Prompts and guidance.


async def test_a_causal_video_has_the_steps_and_seconds_of_whole_blocks(tmp_path: Path) -> None:
    """A remix has the settings of the video, and one prompt in place of those of its blocks."""
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "causal-1.3B", "--frame_num", "33"])
    name = await jobs.create({"n": 2, "prompt": ["a star", "a moon"], "num_inference_steps": 4})
    assert (await jobs.get_video(name))["steps"] == [0, 2 * 3 * 4]
    for seconds, size, frames in ((4, None, 69), (0.1, None, 9), (4, 1, 65), (5, 3, 81)):
        video = await jobs.create({"seconds": seconds, "num_frame_per_block": size})
        assert (await jobs.get_video(video))["num_frames"] == frames, seconds
    remix = await jobs.remix(name)
    expected = (await jobs.get_video(name))["request"] | {"prompt": "a blue star"}
    assert remix["request"] == {n: x for n, x in expected.items() if n != "clip_prompts"}


async def test_a_prompt_is_required(jobs: Jobs) -> None:
    bodies: list[Any] = [b"", {}, {"seed": 3}]
    bodies += [{"prompt": x} for x in ("", " \n\u200b", None, [], ["a", ""])]
    name, wrong = await jobs.create(), []
    for route in ("", "/sync", f"/{name}/remix"):
        for body in bodies:
            status, _, answer = await jobs.request(f"/v1/videos{route}", body)
            if (status, answer["error"]["param"]) != (400, "prompt"):
                wrong.append((route, body, answer))
    assert not wrong and len(jobs.service.journal.list_in_state("queued")) == 1


async def test_guidance_of_each_expert(jobs: Jobs) -> None:
    for guidance_fields, high, low in (
        ({"guidance_high": 6, "guidance_low": 2}, 6.0, 2.0),
        ({"guidance_high": "6"}, 6.0, 3.0),
        ({"guidance_low": 2.5}, 3.0, 2.5),
        ({"guidance_scale": 6, "guidance_scale_2": 2}, 6.0, 2.0),
        ({"guidance_scale": 6}, 6.0, 6.0),
        ({"sample_guide_scale": "2,6"}, 6.0, 2.0),
    ):
        video = await jobs.get_video(await jobs.create(guidance_fields))
        assert video["guidance"] == {"high_noise": high, "low_noise": low}, guidance_fields
    for other in ("guidance_scale", "sample_guide_scale"):
        error = await jobs.refuse({"guidance_low": 3, other: 4})
        assert error["param"] == "guidance_low", error


# Fields of videos, and metrics.

RECORD: dict[str, Any] = {
    "seconds": {"text": 1.0, "denoising": 4.0},
    "peak_memory_bytes": {"device": 5e6, "host": 1e6},
    "power": {
        "joules": 70.0,
        "devices": [
            {"mean_w": 30.0, "mean_mhz": 900.0, "throttled": 0.5, "seconds": 4.0},
            {"mean_w": 40.0},
        ],
    },
}


async def test_fields_of_a_video(tmp_path: Path) -> None:
    """While it is queued, in progress, completed, with a damaged record, and without its file."""
    jobs = Jobs(tmp_path / "jobs", Limits(keep_days=2, batch_size=1))
    names = [await jobs.create() for _ in range(2)]
    video_route, poll = f"/v1/videos/{names[0]}", "openai-poll-after-ms"
    _, headers, video = await jobs.request(video_route)
    assert headers[poll] == "1000" and abs(video["created_at"] - time.time()) < 60
    assert (video["status"], video["completed_at"], video["expires_at"]) == ("queued", None, None)
    jobs.start_idle_ranks()
    jobs.handle_rank_message("step", job=names[0], done=1, total=2, follows=True)
    _, headers, video = await jobs.request(video_route)
    assert (video["progress"], video["steps"], headers[poll]) == (49, [1, 2], "1000")
    jobs.complete(names[0], 100.0, 1e9, RECORD)
    _, headers, video = await jobs.request(video_route)
    expected: dict[str, Any] = {"progress": 100, "completed_at": 10**9, "error": None}
    expected |= {"expires_at": 10**9 + 2 * 86400, "inference_time_s": 100.0}
    expected |= {"stage_durations": RECORD["seconds"], "peak_memory_mb": 5.0}
    expected |= {"power": RECORD["power"]}
    assert {name: video[name] for name in expected} == expected and poll not in headers
    waiting = await jobs.create()
    _, headers, _ = await jobs.request(f"/v1/videos/{waiting}")  # 100 s of the running job
    assert 45_000 < int(headers[poll]) <= 50_000
    for limit, more in ((2, True), (3, False)):
        page = (await jobs.request(f"/v1/videos?limit={limit}"))[2]
        ids = [video["id"] for video in page["data"]]
        assert (ids, page["has_more"]) == ([waiting, *names[::-1]][:limit], more)
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
    folder = jobs.folder / "jobs" / names[0]
    status, headers, _ = await jobs.request(f"{video_route}/content")
    assert status == 200 and headers["content-disposition"].startswith("inline;")
    (folder / "video.json").write_text(json.dumps({"peak_memory_bytes": {"device": "x"}}))
    video = (await jobs.request(video_route))[2]
    assert (video["stage_durations"], video["peak_memory_mb"]) == (None, None)
    messages = {}
    for change in ("unreadable", "gone", "no file"):
        (folder / "video.mp4").unlink(missing_ok=True)
        if change == "unreadable":
            (folder / "video.mp4").write_bytes(b"x")
        if change == "no file":
            (folder / "video.mp4").mkdir()
        variant = "?variant=thumbnail" if change == "unreadable" else ""
        status, _, answer = await jobs.request(f"{video_route}/content{variant}")
        assert (status, answer["error"]["code"]) == (410, "gone")
        messages[change] = answer["error"]["message"]
    check_refusals("serve: lost videos", messages)


async def test_previews_of_a_job(jobs: Jobs) -> None:
    """The step of the newest one; an attempt that is lost has none."""
    ranks, name = jobs.start_idle_ranks(), await jobs.create({"preview": True})
    assert ranks.job_groups[0][0]["settings"]["preview"] is True
    path = f"/v1/videos/{name}"
    status, _, answer = await jobs.request(f"{path}/content?variant=preview")
    assert status == 404 and "preview: true" in answer["error"]["message"]
    for done in (0, 1):
        jobs.handle_rank_message("step", job=name, done=done, total=2, follows=True)
        assert (await jobs.request(path))[2]["preview_step"] == done
        (jobs.folder / "jobs" / name / "video.preview.jpg").write_bytes(b"picture %d" % done)
        jobs.handle_rank_message("preview", job=name)
        assert (await jobs.request(path))[2]["preview_step"] == done + 1
    assert (await jobs.request(f"{path}/content?variant=preview"))[2] == b"picture 1"
    jobs.handle_rank_message("ended", code="ranks_lost", message="")
    assert (await jobs.request(path))[2]["preview_step"] == 0
    assert (await jobs.request(f"{path}/content?variant=preview"))[0] == 404
    for value in (-1, "often", 1.5):
        assert (await jobs.refuse({"preview": value}))["param"] == "preview", value


async def test_metrics(jobs: Jobs) -> None:
    completed, *others = [await jobs.create({"n": n}) for n in (2, 1, 1, 1)]
    failed, gone, waiting = others
    for name in (completed, f"{completed}.1"):
        jobs.complete(name, 5.0, record=RECORD)
    jobs.start_idle_ranks()
    jobs.handle_rank_message("failed", job=failed, code="not_finite", message="It is black.")
    await jobs.delete(gone)
    jobs.handle_rank_message("ended", code="ranks_lost", message="They have ended.")
    text = (await jobs.request("/metrics"))[2].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    expected = {
        'wan_jobs_total{event="created"}': 4,
        'wan_jobs_total{event="completed"}': 1,
        'wan_jobs_total{event="failed"}': 1,
        'wan_jobs_total{event="deleted"}': 1,
        'wan_failures_total{code="not_finite"}': 1,
        "wan_restarts_total": 1,
        "wan_job_seconds_sum": 10,
        "wan_queue_seconds_count": 2,
        'wan_stage_seconds_sum{stage="text"}': 2,
        "wan_step_seconds_sum": 4,
        'wan_texts_total{from="cache"}': 0,
        'wan_texts_total{from="encoder"}': 2,
        "wan_energy_joules_total": 140,
        "wan_joules_per_video": 70,
        'wan_power_watts{rank="0"}': 30,
        'wan_power_watts{rank="1"}': 40,
        'wan_clock_mhz{rank="0"}': 900,
        "wan_clock_limited_seconds_total": 4,
        'wan_peak_memory_bytes{kind="device"}': 5e6,
        "wan_jobs_waiting": 1,
        "wan_jobs_running": 0,
        "wan_ranks_ready": 1,
        "wan_seconds_ahead": 5,
        "wan_stored_bytes": jobs.service.journal.count_bytes(),
    }
    assert {name: float(values.get(name, "nan")) for name in expected} == expected
    assert jobs.get_state(waiting) == "queued"
    board = json.loads((REPO / "examples/serve/grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = {name for text in expressions for name in re.findall(r"\bwan_\w+", text)}
    exported = {name.partition("{")[0] for name in values}
    exported |= {*re.findall(r"(?m)^# TYPE (\w+) gauge$", text)}  # those without a value, too
    assert len(shown) > 10 and shown <= exported, shown - exported
