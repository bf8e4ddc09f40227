"""Restores the jobs of finished videos that are missing in the journal from their records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from wan.app.run import PATH_SETTINGS
from wan.checkpoint.formats.headers import read_json
from wan.serve.jobs.folders import JOB_ID, make_output_stem
from wan.serve.jobs.job import ServiceJob
from wan.serve.jobs.journal import Journal
from wan.serve.requests.fields import FOLDER, UPLOADS
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS
from wan.settings.values import parse_number
from wan.utils.files import RECORD_KIND, VIDEO_KIND, is_output
from wan.utils.log import logger


def restore_finished_jobs(jobs: Path, journal: Journal) -> None:
    """Adds the finished videos of a folder to the journal as completed jobs.

    A job can be missing because the journal file is new or older, or unfinished because the
    service was killed before it recorded the end.

    Args:
        jobs: The parent of the jobs' folders.
    """
    finished_jobs, num_restored = [], 0
    for folder in jobs.iterdir():
        is_folder = JOB_ID.fullmatch(folder.name) and not folder.is_symlink() and folder.is_dir()
        state = journal.get_state(folder.name) if is_folder else "none"
        if state in (None, "in_progress") and (job := read_finished_job(folder)) is not None:
            finished_jobs.append(job)
    for job in sorted(finished_jobs, key=lambda job: job.created):
        open_job = journal.get(job.id)
        num_restored += open_job is None or job.outputs_done != open_job.outputs_done
        if open_job is None:
            journal.restore_job(job)
            continue
        changes: dict[str, Any] = {"outputs_done": job.outputs_done, "seconds": job.seconds}
        if job.outputs_done == open_job.num_outputs:
            changes |= {"state": "completed", "done": open_job.total, "ended": job.ended}
        elif job.outputs_done == open_job.outputs_done:
            continue
        else:
            changes["attempt"] = 1
        journal.update_job(open_job, **changes, bytes=job.bytes)
    if num_restored:
        message = "%d finished videos were restored from their records in %s."
        logger.warning(message, num_restored, jobs)


def list_stored_jobs(jobs: Path, get_state: Callable[[str], str | None]) -> list[ServiceJob]:
    """Returns the jobs that are missing in the journal and have records, but no local videos.

    Their videos are in a store, unless someone has removed them.

    Args:
        jobs: The parent of the jobs' folders.
        get_state: Returns the state of a job by its id; None: the journal does not know it.
    """
    folders = (path for path in jobs.iterdir() if JOB_ID.fullmatch(path.name))
    unlisted = (path for path in folders if get_state(path.name) is None)
    without_video = (path for path in unlisted if not any(path.glob("*.mp4")))
    stored_jobs = (read_finished_job(path, is_stored=True) for path in without_video)
    return sorted(filter(None, stored_jobs), key=lambda job: job.created)


def read_finished_job(folder: Path, is_stored: bool = False) -> ServiceJob | None:
    """Returns the job of a folder with its complete videos; None without any.

    is_stored: The videos are not in the folder, only their records.
    """
    job: ServiceJob | None = None
    for index in count():
        output = _read_finished_output(folder, index, is_stored)
        if output is None:
            break
        job = output if job is None else _merge_output(job, output)
    if job is not None:
        job.bytes = sum(path.stat().st_size for path in folder.rglob("*"))
    return job


def _read_finished_output(folder: Path, index: int, is_stored: bool) -> ServiceJob | None:
    """Returns a job with one of the videos of a folder; None unless that is complete."""
    video = folder / f"{make_output_stem(index)}.mp4"
    record = video.with_suffix(".json")
    try:
        is_complete = is_stored or (is_output(video, VIDEO_KIND) and _is_complete_mp4(video))
        if is_complete and is_output(record, RECORD_KIND):
            return _make_completed_job(folder.name, read_json(record))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, OSError):
        logger.debug("%s is not a record of a job.", record, exc_info=True)
    return None


def _merge_output(job: ServiceJob, output: ServiceJob) -> ServiceJob:
    """Returns a job with a further video."""
    return replace(
        job,
        settings=job.settings | {"base_seed": [*job.seeds, *output.seeds]},
        ended=output.ended,
        done=job.done + output.done,
        total=job.total + output.total,
        seconds=(job.seconds or 0.0) + (output.seconds or 0.0),
        outputs_done=job.outputs_done + 1,
    )


def _make_completed_job(name: str, record: Mapping[str, Any]) -> ServiceJob:
    """Returns the job of a record; raises any exception if the record is invalid."""
    settings, video = record["settings"], record["video"]
    seconds = sum(_parse_bounded_number(value) for value in record["seconds"].values())
    ended = datetime.fromisoformat(record["run"]["date"]).timestamp()
    steps = record.get("start", record).get("steps") or record.get("forwards")
    steps = int(steps or settings.get("sample_steps") or 0)
    steps *= int(settings.get("num_clip") or 1)
    low, high = map(_parse_bounded_number, settings["sample_guide_scale"])
    has_two = record.get("boundary") is not None
    return ServiceJob(
        name,
        _select_settings(settings) | {"base_seed": int(record["seed"])},
        "completed",
        created=min(ended, time.time()) - seconds,
        started=min(ended, time.time()) - seconds,
        ended=min(ended, time.time()),
        attempt=1,
        done=steps,
        total=steps,
        outputs_done=1,
        seconds=seconds,
        frames=int(_parse_bounded_number(video["frames"], 1)),
        fps=_parse_bounded_number(video["fps"], 0.001),
        width=int(_parse_bounded_number(video["width"], 1)),
        height=int(_parse_bounded_number(video["height"], 1)),
        model=str(settings["task"]),
        guidance={"high_noise": high, "low_noise": low} if has_two else {"dit": low},
    )


def _parse_bounded_number(value: Any, minimum: float = 0.0) -> float:
    """Returns a number; raises ValueError if it is not finite or below `minimum`."""
    number = parse_number(value)
    if number is None or not minimum <= number < 1e12:
        raise ValueError(f"{value} is out of range")
    return number


def _select_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a request may have, without paths."""
    selected: dict[str, Any] = {}
    for name, value in settings.items():
        is_path = name in PATH_SETTINGS or name in UPLOADS or name == FOLDER
        if value is None or is_path or name not in FLAGS or not FLAGS[name].line:
            continue
        try:
            FLAGS[name].reader(name, value)
        except InputError:
            continue
        selected[name] = value
    if isinstance(selected.get("size"), list):
        selected["size"] = "*".join(map(str, selected["size"]))
    return selected


def _is_complete_mp4(video: Path) -> bool:
    """Returns whether the atoms of an mp4 end at the end of the file."""
    end, start = video.stat().st_size, 0
    with video.open("rb") as file:
        while start + 8 <= end:
            file.seek(start)
            size, box_type = int.from_bytes(file.read(4)), file.read(4)
            if size == 1:  # a 64-bit length follows
                size = int.from_bytes(file.read(8))
            if size < 8 or not box_type.isalnum():
                return False
            start += size
    return start == end
