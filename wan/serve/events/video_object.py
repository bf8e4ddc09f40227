"""The video object of a job, in answers, events and webhooks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wan.serve.events.video_streams import has_stream
from wan.serve.jobs.job import ServiceJob
from wan.serve.queue.service import Service
from wan.serve.requests.fields import FIELD_NAMES
from wan.settings.flags import FLAGS


def make_video_object(service: Service, job: ServiceJob) -> dict[str, Any]:
    """Returns the OpenAI video object of a job, with the additional fields of vllm-omni."""
    progress = 100 if job.state == "completed" else int(99 * job.done / max(job.total, 1))
    prompts = job.settings.get("clip_prompts", ())
    video: dict[str, Any] = {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.state,
        "progress": progress,
        "stage": job.stage or None if job.state == "in_progress" else None,
        "created_at": int(job.created),
        "completed_at": int(job.ended) if job.state == "completed" and job.ended else None,
        "expires_at": None,
        "file_name": make_file_name(job, 0) if job.state == "completed" else None,
        "media_type": "video/mp4",
        "quality": "default",
        "error": job.error,
        "prompt": job.settings.get("prompt") or "\n".join(prompts) or None,
        "remixed_from_video_id": job.remixed_from,
        "seconds": f"{job.frames / (job.fps or 1):.3f}".rstrip("0").rstrip("."),
        "size": f"{job.width}x{job.height}",
        "num_frames": job.frames,
        "fps": job.fps,
        "seed": next(iter(job.seeds), None),
        "guidance": job.guidance or None,
        "lora": job.settings.get("video_lora"),
        "steps": [job.done, job.total],
        "preview_step": job.preview_step,
        "attempt": job.attempt,
        "request": make_request_fields(job),
    }
    names = service.files.list_input_names(job, service.folder_files)
    video |= {"inputs": {field: len(names[field]) for field in names}, "input_names": names}
    records = [
        select_record_fields(service.files.read_record(job, index))
        for index in range(job.num_completed)
    ]
    video["data"] = [
        _make_output_object(service, job, index, records) for index in range(job.num_outputs)
    ]
    if not job.is_ended:
        position, seconds = service.estimates.estimate_end(job)
        seconds_left = None if seconds is None else round(seconds, 1)
        video |= {"queue_position": position, "seconds_left": seconds_left}
    days = service.limits.keep_days
    if days is not None and job.ended is not None:
        video["expires_at"] = int(job.ended + 86400 * days)
    if job.state == "completed":
        video |= {"inference_time_s": job.seconds} | merge_record_fields(records)
    return video


def make_end_object(service: Service, job: ServiceJob) -> dict[str, Any]:
    """Returns the video object of an ended job; of a deleted one, only that it is deleted."""
    if job.state == "deleted":
        return {"id": job.id, "object": "video.deleted", "deleted": True}
    return make_video_object(service, job)


def make_file_name(job: ServiceJob, index: int, suffix: str = ".mp4") -> str:
    """Returns the name under which clients save a file of one of the videos of a job."""
    return f"{job.id}-{index}{suffix}" if index else f"{job.id}{suffix}"


def _make_output_object(
    service: Service, job: ServiceJob, index: int, records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the description of one of the videos of a job.

    records: The record fields of the complete videos.
    """
    is_complete = index < len(records)
    path = f"{service.root_path}/v1/videos/{job.id}/content?index={index}"
    status = "completed" if is_complete else job.state
    if status == "in_progress" and index > len(records):
        status = "queued"
    is_growing = status == "in_progress" and has_stream(service, job)
    return {
        "index": index,
        "seed": job.seeds[index] if job.seeds else None,
        "status": status,
        "file_name": make_file_name(job, index) if is_complete else None,
        "url": path if is_complete else None,
        "stream_url": f"{path}&stream=true" if is_growing else None,
        **(records[index] if is_complete else {}),
    }


def merge_record_fields(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the record fields of a job: sums of seconds, and the largest memory.

    records: Those of its videos, from `select_record_fields`.
    """
    if len(records) == 1:
        return dict(records[0])
    durations: dict[str, float] = {}
    for record in records:
        for stage, seconds in (record["stage_durations"] or {}).items():
            durations[stage] = durations.get(stage, 0.0) + seconds
    peaks = [record["peak_memory_mb"] for record in records if record["peak_memory_mb"]]
    return {"stage_durations": durations or None, "peak_memory_mb": max(peaks, default=None)}


def select_record_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a video object that come from its record; None where it is damaged."""
    values: dict[str, Any] = {"stage_durations": record.get("seconds"), "peak_memory_mb": None}
    try:
        memory = record.get("peak_memory_bytes", {})
        peak_bytes = memory.get("device") or memory.get("host")
        values["peak_memory_mb"] = peak_bytes and round(peak_bytes / 1e6, 1)
        if "power" in record:
            values["power"] = record["power"]
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (AttributeError, TypeError, ValueError, ArithmeticError, RecursionError):
        return {"stage_durations": None, "peak_memory_mb": None}
    return values


def make_request_fields(job: ServiceJob) -> dict[str, Any]:
    """Returns the fields of a job's request without its files; sent again, they make a copy."""
    values: dict[str, Any] = {}
    for setting, value in job.settings.items():
        values[FIELD_NAMES.get(setting, setting)] = value
    if (scales := values.pop("sample_guide_scale", None)) is not None:
        low, high = FLAGS["sample_guide_scale"].reader("`sample_guide_scale`", scales)
        is_single = "dit" in job.guidance
        values |= {"guidance_scale": low} if is_single else {"guidance_high": high}
        values |= {} if is_single else {"guidance_low": low}
    if "size" in values:
        values["size"] = str(values["size"]).replace("*", "x")
    if job.seeds:
        values["seed"] = job.seeds if job.num_outputs > 1 else job.seeds[0]
    return values | ({"priority": job.priority} if job.priority else {})
