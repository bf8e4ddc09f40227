"""Several videos of one request: one job with one id, and a file for each seed."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.bodies import FORM, make_form
from tests.serve.jobs import PROMPT, Jobs, wait_for_text
from tests.serve.test_journal import RECORD, write_finished_video
from wan.serve.queue.service import Limits

SEVERAL: dict[str, tuple[dict[str, Any], list[int]]] = {
    "next seeds": ({"n": 3, "seed": 7}, [7, 8, 9]),
    "vllm-omni": ({"num_outputs_per_prompt": "2", "seed": "7"}, [7, 8]),
    "both names": ({"n": 2, "num_outputs_per_prompt": 2, "seed": [7]}, [7, 8]),
    "seeds": ({"seed": [5, 1, 5]}, [5, 1, 5]),
    "seeds and number": ({"n": 2, "base_seed": [5, 1]}, [5, 1]),
    "text": ({"seed": "5, 1"}, [5, 1]),
    "one": ({"n": 1, "seed": [4]}, [4]),
}


async def test_seeds(jobs: Jobs) -> None:
    """Each request has its seeds, and its fields sent again have the same ones."""
    for fields, seeds in SEVERAL.values():
        video = await jobs.get_video(await jobs.create(fields))
        assert [output["seed"] for output in video["data"]] == seeds and video["seed"] == seeds[0]
        again = await jobs.get_video(await jobs.create(video["request"]))
        assert again["data"][0]["seed"] == seeds[0] and again["request"] == video["request"]
    for field, value, seeds in (("seed[]", ["3", "1"], [3, 1]), ("seed", "[2, 4]", [2, 4])):
        form = make_form({"prompt": PROMPT, field: value})
        _, _, video = await jobs.request("/v1/videos", form, Content_Type=FORM)
        assert [output["seed"] for output in video["data"]] == seeds
    drawn = (await jobs.get_video(await jobs.create({"n": 3})))["data"]
    assert [output["seed"] - drawn[0]["seed"] for output in drawn] == [0, 1, 2]
    mixed = (await jobs.get_video(await jobs.create({"seed": [5, -1]})))["data"]
    assert mixed[0]["seed"] == 5 and mixed[1]["seed"] >= 0


async def test_one_after_the_other(jobs: Jobs) -> None:
    """Progress counts all videos; each can be fetched once it is complete."""
    name = await jobs.create({"n": 3, "seed": 7, "preview": True})
    ranks = jobs.start_idle_ranks()
    other = await jobs.create({"priority": 5})  # waits until the started job has ended
    for index in range(3):
        (command,) = ranks.job_groups[-1]
        assert command["settings"]["base_seed"] == 7 + index
        jobs.handle_rank_message("step", job=command["job"], done=1, total=2)
        video = await jobs.get_video(name)
        assert (video["status"], video["attempt"]) == ("in_progress", 1)
        assert video["steps"] == [2 * index + 1, 6]
        assert video["progress"] == int(99 * (2 * index + 1) / 6)
        states = [output["status"] for output in video["data"]]
        assert states == (["completed"] * index + ["in_progress"] + ["queued"] * 2)[:3]
        path = f"/v1/videos/{name}/content?index={index}"
        assert (await jobs.request(path))[0] == 404
        preview = Path(command["file"]).with_suffix(".preview.jpg")
        preview.write_bytes(b"%d" % index)
        shown = await jobs.request(f"/v1/videos/{name}/content?variant=preview")
        assert shown[2] == b"%d" % index
        jobs.complete(command["job"], seconds=index + 1.0, record=make_record(index))
        status, headers, content = await jobs.request(path)
        assert (status, content) == (200, b"video")
        file_name = f"{name}-{index}.mp4" if index else f"{name}.mp4"
        assert f'filename="{file_name}"' in headers["content-disposition"]
    video = await jobs.get_video(name)
    assert (video["status"], video["progress"], video["inference_time_s"]) == ("completed", 100, 6)
    assert video["stage_durations"] == {"denoising": 3} and video["peak_memory_mb"] == 3
    assert [output["url"] for output in video["data"]] == [
        f"/v1/videos/{name}/content?index={index}" for index in range(3)
    ]
    assert video["data"][1]["stage_durations"] == {"denoising": 1}
    assert (await jobs.request(f"/v1/videos/{name}/content?variant=2"))[0] == 200  # SGLang's
    for query, status in (("index=3", 404), ("index=x", 400), ("variant=3", 404)):
        assert (await jobs.request(f"/v1/videos/{name}/content?{query}"))[0] == status
    assert jobs.get_state(other) == "in_progress"
    await jobs.delete(name)
    assert not (jobs.folder / "jobs" / name).exists()


def make_record(index: int) -> dict[str, Any]:
    """Returns a part of the record of a video."""
    return {"seconds": {"denoising": index}, "peak_memory_bytes": {"host": 1e6 * (3 - index)}}


async def test_events_of_each_video(jobs: Jobs) -> None:
    """Also for a client that listens after the first one is complete."""
    name = await jobs.create({"n": 2})
    ranks = jobs.start_idle_ranks()
    jobs.complete(ranks.job_groups[-1][0]["job"])
    messages: list[Any] = []
    stream = asyncio.create_task(jobs.request(f"/v1/videos/{name}/events", messages=messages))
    await wait_for_text(messages, b"event: stage")
    jobs.complete(ranks.job_groups[-1][0]["job"])
    _, _, text = await stream
    events = [line for line in text.decode().splitlines() if '"completed": 1' in line]
    assert [json.loads(event.removeprefix("data: "))["total"] for event in events] == [2]


async def test_a_remix_and_a_synchronous_request(jobs: Jobs) -> None:
    name = await jobs.create({"seed": [7, 3]})
    remixed = await jobs.remix(name)
    assert [output["seed"] for output in remixed["data"]] == [7, 3]
    status, _, answer = await jobs.request("/v1/videos/sync", {"prompt": PROMPT, "n": 2})
    assert (status, answer["error"]["param"]) == (400, "n")


async def test_videos_are_counted_by_the_queue_and_its_estimates(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", Limits(queue=5, batch_size=1))
    jobs.complete(await jobs.create(), 10.0)
    first = await jobs.create({"n": 3})
    assert (await jobs.refuse({"n": 3}, 429))["code"] == "queue_full"
    assert (await jobs.refuse({"n": 6}))["param"] == "n"
    last = jobs.service.find_job(await jobs.create({"n": 2}))
    estimates = jobs.service.estimates
    assert (estimates.estimate_wait(last), estimates.estimate_wait()) == (30, 50)
    jobs.start_idle_ranks()
    assert estimates.estimate_wait(last) == pytest.approx(30, abs=1)
    job = jobs.service.find_job(first)
    job.started = time.time() - 12  # the time of the first video
    jobs.complete(first, 10.0)
    assert estimates.estimate_wait(last) == pytest.approx(20, abs=1)
    assert estimates.estimate_end(job) == (None, pytest.approx(20, abs=1))


async def test_a_failed_video_keeps_those_before(jobs: Jobs) -> None:
    name = await jobs.create({"n": 3})
    ranks = jobs.start_idle_ranks()
    jobs.complete(name)
    jobs.handle_rank_message("failed", job=f"{name}.1", code="not_finite", message="A NaN.")
    video = await jobs.get_video(name)
    assert video["error"] == {"code": "not_finite", "message": "Video 2 of 3: A NaN."}
    assert [output["status"] for output in video["data"]] == ["completed", "failed", "failed"]
    assert (await jobs.request(f"/v1/videos/{name}/content"))[2] == b"video"
    assert (await jobs.request(f"/v1/videos/{name}/content?index=1"))[0] == 404
    assert len(ranks.job_groups) == 2  # the third video was not made


async def test_each_video_has_its_own_attempts(jobs: Jobs) -> None:
    name = await jobs.create({"n": 2})
    jobs.start_idle_ranks()
    attempts = []
    for completed in ((), (name,), (f"{name}.1",)):
        for output in completed:
            jobs.complete(output)
        jobs.handle_rank_message("ended", code="ranks_lost", message="The ranks have ended.")
        jobs.handle_rank_message("ready")
        video = await jobs.get_video(name)
        attempts.append((video["status"], video["attempt"], video["steps"]))
    assert attempts == [
        ("in_progress", 2, [0, 4]),
        ("in_progress", 2, [2, 4]),
        ("completed", 2, [4, 4]),
    ]


async def test_videos_that_share_the_loads_of_experts(tmp_path: Path) -> None:
    """A batch has videos of several jobs; a deletion or a failure ends all of its job."""
    jobs = Jobs(tmp_path / "jobs", Limits(batch_size=4))
    jobs.complete(await jobs.create(), 11.0, loading=10.0)
    first, second = await jobs.create({"n": 3}), await jobs.create({"n": 3})
    ranks = jobs.start_idle_ranks()
    names = [command["job"] for command in ranks.job_groups[-1]]
    assert names == [first, f"{first}.1", f"{first}.2", second]
    for name in names:
        jobs.handle_rank_message("step", job=name, done=1, total=2)
    assert (await jobs.get_video(first))["steps"] == [3, 6]
    jobs.handle_rank_message("failed", job=f"{first}.1", code="not_finite", message="A NaN.")
    assert ranks.cancelled == [first, f"{first}.2"] and jobs.get_state(first) == "in_progress"
    for name in (first, f"{first}.2"):
        jobs.handle_rank_message("failed", job=name, code="cancelled", message="Cancelled.")
    video = await jobs.get_video(first)
    assert video["error"] == {"code": "not_finite", "message": "Video 2 of 3: A NaN."}
    jobs.complete(second, 11.0, loading=10.0)
    assert [command["job"] for command in ranks.job_groups[-1]] == [f"{second}.1", f"{second}.2"]
    await jobs.delete(second)
    assert ranks.cancelled[2:] == [f"{second}.1", f"{second}.2"]
    for name in ranks.cancelled[2:]:
        assert (jobs.folder / "jobs" / second).exists()
        jobs.handle_rank_message("failed", job=name, code="cancelled", message="Cancelled.")
    assert not (jobs.folder / "jobs" / second).exists()


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_a_restart_continues_with_the_next_video(is_recorded: bool, tmp_path: Path) -> None:
    """Also if the service was killed between the file of a video and its row in the journal."""
    jobs = Jobs(tmp_path / "jobs", Limits(batch_size=1))
    name = await jobs.create({"n": 3, "seed": 7})
    jobs.start_idle_ranks()
    jobs.handle_rank_message("ended", code="ranks_lost", message="The ranks have ended.")
    jobs.handle_rank_message("ready")  # a second attempt, which only counts for the first video
    if is_recorded:
        jobs.complete(name)
    folder = jobs.folder / "jobs" / name
    (folder / "video.mp4").unlink(missing_ok=True)
    write_finished_video(folder)
    (folder / "video-1.preview.jpg").write_bytes(b"\xff\xd8\xff")
    reopened = jobs.restart()
    video = await reopened.get_video(name)
    assert (video["status"], video["steps"]) == ("queued", [2, 6])
    assert {path.name for path in folder.iterdir()} == {"video.mp4", "video.json"}
    ranks = reopened.start_idle_ranks()
    for index in (1, 2):
        assert ranks.job_groups[-1][0]["job"] == f"{name}.{index}"
        reopened.complete(f"{name}.{index}")
    assert (await reopened.get_video(name))["progress"] == 100


async def test_kills_during_the_second_video(tmp_path: Path) -> None:
    """They are attempts of that video, although the first one is complete."""
    jobs = Jobs(tmp_path / "jobs", Limits(batch_size=1))
    name = await jobs.create({"n": 2})
    jobs.start_idle_ranks()
    jobs.complete(name)
    folder = jobs.folder / "jobs" / name
    (folder / "video.mp4").unlink()
    write_finished_video(folder)
    for state, attempt in (("queued", 1), ("failed", 2)):
        jobs = jobs.restart()
        video = await jobs.get_video(name)
        assert (video["status"], video["attempt"]) == (state, attempt)
        jobs.start_idle_ranks()


async def test_a_video_that_is_gone_at_the_start_is_made_again(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", Limits(batch_size=1))
    name = await jobs.create({"n": 3, "seed": 7})
    jobs.start_idle_ranks()
    for index in range(2):
        jobs.complete(f"{name}.{index}" if index else name)
    (jobs.folder / "jobs" / name / "video.mp4").unlink()
    reopened = jobs.restart()
    assert (await reopened.get_video(name))["steps"] == [0, 6]
    assert not [*(jobs.folder / "jobs" / name).iterdir()]
    (command,) = reopened.start_idle_ranks().job_groups[-1]
    assert command["job"] == name


async def test_a_lost_journal(tmp_path: Path) -> None:
    """All videos of a folder become one completed job, which ended with the last one."""
    jobs = Jobs(tmp_path / "jobs")
    name = await jobs.create({"n": 2})
    for number, (stem, seed) in enumerate((("video", 7), ("video-1", 3))):
        record = RECORD | {"seed": seed, "run": {"date": f"2026-01-0{number + 1}T00:00:00+00:00"}}
        write_finished_video(jobs.folder / "jobs" / name, record, stem)
    jobs.service.journal.close()
    (jobs.folder / "journal.sqlite").unlink()
    video = await Jobs(jobs.folder).get_video(name)
    assert (video["status"], video["steps"], video["inference_time_s"]) == ("completed", [4, 4], 4)
    assert video["completed_at"] == 1767312000
    outputs = [(output["seed"], output["status"]) for output in video["data"]]
    assert outputs == [(7, "completed"), (3, "completed")]
