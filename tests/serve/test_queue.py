"""The queue: its order and limits, the jobs sent to ranks, and the state of a second attempt."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.refusals import check_refusals
from tests.serve.bodies import FORM, make_data_url, make_form, make_picture
from tests.serve.jobs import PROMPT, IdleRanks, Jobs
from wan.serve.queue.service import Limits

RANKS_LOST: dict[str, Any] = {"code": "ranks_lost", "message": "The ranks have ended."}


def list_group_ids(ranks: IdleRanks) -> list[list[str]]:
    """Returns the ids of the jobs that ranks have accepted, by group."""
    return [[job["job"] for job in group] for group in ranks.job_groups]


def complete_all(jobs: Jobs, ranks: IdleRanks) -> list[str]:
    """Completes all jobs one by one; returns their ids in the order of their starts."""
    while jobs.service.journal.count_states()["in_progress"]:
        for name in list_group_ids(ranks)[-1]:
            jobs.complete(name)
    return [name for group in list_group_ids(ranks) for name in group]


# Order.

STEPS = {"num_inference_steps": 3}  # of another shape
ORDERS: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    # the fields of jobs that wait while one of the usual shape runs; their order
    "higher priorities, then earlier requests": (
        [{"priority": priority} for priority in (0, 5, -3, 5, 0, 100)],
        [5, 1, 3, 0, 4, 2],
    ),
    "four of the last shape may pass one": ([STEPS, *[{}] * 6], [1, 2, 3, 4, 0, 5, 6]),
    "none passes one of more priority": ([{"priority": -1}, STEPS], [1, 0]),
}


@pytest.mark.parametrize("case", ORDERS)
async def test_order(case: str, jobs: Jobs) -> None:
    waiting, order = ORDERS[case]
    first, ranks = await jobs.create(), jobs.start_idle_ranks()
    names = [await jobs.create(fields) for fields in waiting]
    assert complete_all(jobs, ranks) == [first, *(names[index] for index in order)]


async def test_the_wait_is_that_of_the_jobs_before(jobs: Jobs) -> None:
    """A job of 10 s has run for 4 s; a job with a higher priority takes 10 s more."""
    jobs.complete(await jobs.create(), 10.0)
    ranks = jobs.start_idle_ranks()
    running, last = await jobs.create(), await jobs.create()
    first = await jobs.create({"priority": 1})
    assert list_group_ids(ranks) == [[running]]
    job = jobs.service.find_job(running)
    job.started = (job.started or 0) - 4
    for name, seconds in ((first, 6), (last, 16), (None, 26)):
        until = None if name is None else jobs.service.find_job(name)
        assert jobs.service.estimates.estimate_wait(until) == pytest.approx(seconds, abs=1)
    job.started = (job.started or 0) - 60  # it takes longer than estimated
    assert jobs.service.estimates.estimate_wait(jobs.service.find_job(last)) == pytest.approx(10)


async def test_estimates_after_a_restart_are_of_the_newest_jobs(jobs: Jobs) -> None:
    """The median of the last five: of 1, ..., 8 s for each of two videos it is 6."""
    for seconds in range(1, 9):
        name = await jobs.create({"n": 2})
        jobs.complete(name, float(seconds))
        jobs.complete(f"{name}.1", float(seconds), ended=1e9 + seconds)
    reopened = jobs.restart()
    job = reopened.service.find_job(await reopened.create())
    assert reopened.service.estimates.estimate_seconds(job) == 6.0


LONG: dict[str, Any] = {"num_inference_steps": 40}
ESTIMATES: dict[str, tuple[list[tuple[dict[str, Any], float]], dict[str, Any], float]] = {
    # completed jobs with their seconds; another one, and its estimated seconds
    "a constant part": (
        [({"num_inference_steps": steps}, 10.0 + 2 * steps) for steps in (1, 2, 4)],
        LONG,
        90,
    ),
    "half as long without guidance": ([({}, 10.0)], {"guidance_scale": 1}, 5),
    "the median rate if more steps took less time": (
        [({"num_inference_steps": 1}, 20.0), ({"num_inference_steps": 2}, 10.0)],
        LONG,
        40 * (20 / 1 + 10 / 2) / 2,
    ),
    "all clips": ([({}, 10.0)], {"prompt": ["a"] * 3, "input_reference": make_data_url()}, 30),
}


@pytest.mark.parametrize("case", ESTIMATES)
async def test_an_estimate_of_other_work(case: str, tmp_path: Path) -> None:
    completed, other, seconds = ESTIMATES[case]
    image = {"input_reference": make_data_url()} if "prompt" in other else {}
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "i2v-A14B"] if image else [])
    for fields, duration in completed:
        jobs.complete(await jobs.create(fields | image), duration)
    job = jobs.service.find_job(await jobs.create(other))
    last = jobs.service.find_job(await jobs.create(image))
    estimates = jobs.service.estimates
    assert estimates.estimate_seconds(job) == pytest.approx(seconds)
    assert estimates.estimate_wait(last) == pytest.approx(seconds)
    jobs.service.delete(job)
    assert estimates.estimate_wait(last) == pytest.approx(0)


# Limits.


async def test_as_many_jobs_wait_as_the_limit_says(tmp_path: Path) -> None:
    """A job that runs does not count, and neither does one that was deleted.

    There is room for two requests that come at once, and for one when their files are checked.
    """
    jobs = Jobs(tmp_path / "jobs", Limits(queue=2, batch_size=1))
    waiting, body = await jobs.create(), {"prompt": PROMPT}
    answers = await asyncio.gather(*(jobs.request("/v1/videos", body) for _ in range(2)))
    assert sorted(status for status, _, _ in answers) == [200, 429]
    status, headers, answer = await jobs.request("/v1/videos", body)
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) > 0 and headers["x-should-retry"] == "true"
    await jobs.delete(waiting)
    await jobs.create()
    await jobs.refuse({}, 429)
    jobs.start_idle_ranks()
    await jobs.create()
    await jobs.refuse({}, 429)


async def test_a_full_disk(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a job, while its files are written, and while its video is made."""
    job_files, name = jobs.folder / "jobs", await jobs.create()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for function, stand_in in (
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=999_999)),
        ("wan.serve.jobs.files.JobFiles.write_uploads", fail),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(function, stand_in)
            status, headers, answer = await jobs.request("/v1/videos", {"prompt": PROMPT})
        assert (status, answer["error"]["code"]) == (507, "disk_full")
        assert int(headers["retry-after"]) > 0
        assert [path.name for path in job_files.iterdir()] == [name]
    jobs.start_idle_ranks()
    jobs.handle_rank_message("ended", code="disk_full", message="The disk is full.")
    video = await jobs.get_video(name)
    assert (video["status"], video["error"]["code"]) == ("failed", "disk_full")


LIMITS: list[tuple[Limits, dict[str, Any], bool]] = [
    (Limits(frames=5), {"num_frames": 5}, True),
    (Limits(frames=8), {"num_frames": 9}, False),
    (Limits(pixels=5 * 64 * 64), {"num_frames": 5}, True),
    (Limits(pixels=5 * 64 * 64 - 1), {"num_frames": 5}, False),
    (Limits(frames=10), {"num_frames": 5, "prompt": ["a", "b"]}, True),
    (Limits(frames=9), {"num_frames": 5, "prompt": ["a", "b"]}, False),
    (Limits(prompt=10), {"prompt": "a" * 10, "negative_prompt": "b" * 10}, True),
    (Limits(prompt=10), {"prompt": "a" * 11, "negative_prompt": "b"}, False),
    (Limits(prompt=10), {"prompt": "a", "negative_prompt": "b" * 11}, False),
    (Limits(prompt=10), {"prompt": ["a" * 6, "b" * 5], "negative_prompt": "b"}, False),
]


async def test_limits_of_a_request(tmp_path: Path) -> None:
    """The frames and prompts of all clips of a long video count."""
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "i2v-A14B"])
    common = {"prompt": PROMPT, "input_reference": make_data_url()}
    wrong, messages = {}, {}
    for number, (limits, body, is_taken) in enumerate(LIMITS):
        jobs.service.limits, bytes_before = limits, jobs.service.journal.count_bytes()
        status, _, answer = await jobs.request("/v1/videos", common | body)
        num_bytes = jobs.service.journal.count_bytes() - bytes_before
        if (status == 200, num_bytes) != (is_taken, is_taken * len(make_picture())):
            wrong[number] = limits, body, answer
        if not is_taken:
            messages[f"{number}: {body}"] = answer["error"]["message"]
    assert not wrong
    check_refusals("serve: limits", messages)


async def test_seconds_are_the_nearest_number_of_frames(jobs: Jobs) -> None:
    """Of 1, 5, 9, ... frames; the default of the demo is 8 frames per second."""
    rows = {(1, 8): 9, (0.6, 8): 5, (1, 16): 17, (0.5, 24): 13, (0.01, 8): 1}
    frame_counts = {}
    for seconds, fps in rows:
        more = {} if fps == 8 else {"fps": fps}
        body = {"prompt": PROMPT, "seconds": seconds, **more}
        frame_counts[seconds, fps] = (await jobs.request("/v1/videos", body))[2]["num_frames"]
    assert frame_counts == rows


async def test_as_many_jobs_share_a_load_as_the_limit_says(tmp_path: Path) -> None:
    """If loading takes all the time; jobs of lower priority do not share it."""
    jobs = Jobs(tmp_path / "jobs", Limits(batch_size=2))
    ranks = jobs.start_idle_ranks()
    first = await jobs.create()
    others = [await jobs.create() for _ in range(3)]
    low = await jobs.create({"priority": -1})
    for name in (first, *others, low):
        jobs.complete(name, 10.0, loading=10.0)
    assert list_group_ids(ranks) == [[first], others[:2], others[2:], [low]]


# Images.


async def test_more_than_ten_pictures_stay_in_order(tmp_path: Path) -> None:
    """The ranks get the images in the order of the request."""
    pictures = [make_picture(number) for number in range(12)]
    form = make_form({"prompt": PROMPT, "src_ref_images": pictures})
    jobs = Jobs(tmp_path / "jobs", Limits(batch_size=1), flags=["--task", "vace-A14B"])
    ranks = jobs.start_idle_ranks()
    status, _, video = await jobs.request("/v1/videos", form, Content_Type=FORM)
    assert status == 200, video
    ((job,),) = ranks.job_groups
    files = map(Path, job["settings"]["src_ref_images"])
    assert [file.read_bytes() for file in files] == pictures


# The state of a second attempt.


def write_attempt_files(jobs: Jobs, name: str) -> set[str]:
    """Writes the files of an attempt and an upload; returns the names of those a retry keeps."""
    folder = jobs.service.files.job_folder(jobs.service.find_job(name))
    kept_files = ("upload-image", "video.clips/0001.mp4", "video.clips/0001.safetensors")
    for file in (*kept_files, "video.json", "video.1.latents.safetensors", ".host-12-video.mp4"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"x")
    return {*kept_files}


def list_job_files(jobs: Jobs, name: str) -> set[str]:
    """Returns the files of a job."""
    folder = jobs.folder / "jobs" / name
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in paths}


async def begin_job(jobs: Jobs) -> str:
    """Returns a job that ranks have started, with four of ten steps done."""
    name = await jobs.create({"num_inference_steps": 10})
    jobs.handle_rank_message("step", job=name, done=4, total=10, follows=True)
    assert jobs.get_state(name) == "in_progress"
    return name


async def test_a_job_whose_ranks_were_lost_goes_on_after_its_clips(jobs: Jobs) -> None:
    """The retry starts at step 0; the second loss fails the job and removes its files."""
    jobs.start_idle_ranks()
    name = await begin_job(jobs)
    expected_files = write_attempt_files(jobs, name)
    jobs.service.find_job(name).started = 1.0  # long ago
    jobs.handle_rank_message("ended", **RANKS_LOST)
    video = await jobs.get_video(name)
    assert (video["status"], video["progress"]) == ("queued", 0)
    assert list_job_files(jobs, name) == expected_files
    jobs.handle_rank_message("ready")
    video = await jobs.get_video(name)
    assert (video["status"], video["progress"], video["attempt"]) == ("in_progress", 0, 2)
    assert jobs.service.find_job(name).started == pytest.approx(time.time(), abs=60)
    jobs.handle_rank_message("ended", **RANKS_LOST)
    video = await jobs.get_video(name)
    assert (video["status"], video["error"]["code"]) == ("failed", "ranks_lost")
    assert list_job_files(jobs, name) == {"upload-image"}


async def test_a_job_that_ran_when_the_front_was_killed(jobs: Jobs) -> None:
    """It is queued again with its clips, at step 0; after a second kill it has failed."""
    jobs.start_idle_ranks()
    name = await begin_job(jobs)
    expected_files = write_attempt_files(jobs, name)
    await jobs.service.journal.save()
    reopened = jobs.restart()
    video = await reopened.get_video(name)
    assert (video["status"], video["progress"]) == ("queued", 0)
    assert list_job_files(jobs, name) == expected_files
    reopened.start_idle_ranks()
    write_attempt_files(reopened, name)
    await reopened.service.journal.save()
    video = await reopened.restart().get_video(name)
    assert (video["status"], video["error"]["code"]) == ("failed", "interrupted")
    assert list_job_files(jobs, name) == {"upload-image"}


async def test_a_job_that_is_deleted_while_it_runs(jobs: Jobs) -> None:
    """When the ranks have ended it, its files are removed and the next job starts."""
    ranks = jobs.start_idle_ranks()
    name = await begin_job(jobs)
    next_id = await jobs.create()
    write_attempt_files(jobs, name)
    await jobs.delete(name)
    assert (ranks.cancelled, list_group_ids(ranks)) == ([name], [[name]])
    jobs.handle_rank_message(
        "failed", job=name, code="cancelled", message="The video was cancelled."
    )
    assert list_group_ids(ranks) == [[name], [next_id]]
    assert not (jobs.folder / "jobs" / name).exists()
    # late messages of the cancelled job
    jobs.handle_rank_message("step", job=name, done=5, total=10, follows=True)
    jobs.handle_rank_message("done", job=name, texts=[0, 1], seconds=1.0, loading=0.0)
    assert jobs.get_state(name) == "deleted" and jobs.get_state(next_id) == "in_progress"


async def test_a_stop_is_no_attempt(jobs: Jobs) -> None:
    """After any number of stops, the running job is resumed at the next start."""
    current = jobs
    current.start_idle_ranks()
    name = await begin_job(current)
    expected_files = write_attempt_files(current, name)
    for _ in range(3):
        await current.service.stop()
        assert list_job_files(current, name) == expected_files
        current = current.restart()
        video = await current.get_video(name)
        assert (video["status"], video["progress"], video["attempt"]) == ("queued", 0, 0)
        current.start_idle_ranks()
        assert current.get_state(name) == "in_progress"


async def test_jobs_that_lost_memory_are_made_one_by_one(tmp_path: Path) -> None:
    """Jobs that together ran out of memory do not fail; they are retried one by one."""
    jobs = Jobs(tmp_path / "jobs", Limits(batch_size=2))
    ranks = jobs.start_idle_ranks()
    first = await jobs.create()
    both = [await jobs.create() for _ in range(2)]
    jobs.complete(first, 10.0, loading=10.0)
    assert list_group_ids(ranks)[1:] == [both]
    jobs.handle_rank_message("ended", code="out_of_memory", message="No memory is left.")
    assert [jobs.get_state(name) for name in both] == ["queued", "queued"]
    jobs.handle_rank_message("ready")
    assert list_group_ids(ranks)[2:] == [both[:1]]
    jobs.handle_rank_message("ended", code="out_of_memory", message="No memory is left.")
    assert jobs.get_state(both[0]) == "failed"


async def test_a_remix(tmp_path: Path) -> None:
    """It has the image, the priority, the settings and as many clips as the other one."""
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "i2v-A14B"])
    fields = {"priority": 7, "seed": 5, "guidance_scale": 2, "input_reference": make_data_url()}
    for prompt, num_clip in (("a", None), (["a", "b", "c"], 3)):
        name = await jobs.create({"prompt": prompt, **fields})
        video, remix = await jobs.get_video(name), await jobs.remix(name)
        assert [remix[key] for key in ("num_frames", "guidance")] == [
            video[key] for key in ("num_frames", "guidance")
        ]
        one, two = (jobs.service.find_job(job_id) for job_id in (name, remix["id"]))
        assert (two.priority, two.settings["base_seed"]) == (7, 5) and one.shape == two.shape
        assert (two.settings["prompt"], two.settings.get("num_clip")) == ("a blue star", num_clip)
        assert jobs.service.files.upload_path(two, "image").read_bytes() == make_picture()
