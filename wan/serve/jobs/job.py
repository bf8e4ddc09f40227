"""A job of the service, and its conversion to a row of the journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from wan.checkpoint.lora.folder import make_video_lora_record
from wan.settings.removed import update_record

if TYPE_CHECKING:
    from wan.app.run import Run

STATES = ("queued", "in_progress", "completed", "failed")
"""States of a job, unless it is deleted."""
Row = tuple[Any, ...]
"""Values of the columns `COLUMNS`, of SQLite types."""


@dataclass(slots=True)
class ServiceJob:
    """A job of the journal; times are seconds since 1970.

    Attributes:
        settings: Setting -> raw value, with the seed, or a list of the seeds of several videos.
        state: One of `STATES`, or deleted.
        priority: Jobs of higher priority run first.
        attempt: Number of started attempts of the video in progress.
        outputs_done: Videos of the job that are complete, in the order of the seeds.
        done, total: Denoising steps of all its videos.
        preview_step: Steps done at the newest preview; 0: there is none.
        error: {"code": ..., "message": ...} of a failed job.
        shape: JSON of latent shape, steps, branches, clips and LoRAs, if any; equal for jobs that
            take the same time and need no other weights.
        work: Tokens of the network times steps times branches, of one video.
        seconds: Duration from start to end, of the complete videos together.
        guidance: Expert -> guidance scale.
        remixed_from: Id of the job whose settings were copied.
        digest: SHA-256 of a request with a key.
        key: The request's Idempotency-Key.
        passed: How often a later job was started first.
        names: Setting -> field name of the request.
        bytes: Size of all files.
        webhook_url: Address that gets the events of the job.
        webhook_sent: The last state whose event was delivered or given up.
        store_state: "uploading" from the start of an upload, "stored" once --store has the video.
        event_series: Number of starts of the service since the job was created. The ids of its
            events grow within a series.
        clock_ended: Its end by a clock that cannot be set; see `Journal`.
        queued_at: Creation by `clock.now`; not in the journal.
        stage: Present stage of a running job; not in the journal.
        output_started: Start of its present video unless that is the first one of an attempt; not
            in the journal.
    """

    id: str
    settings: dict[str, Any]
    state: str = "queued"
    priority: int = 0
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    attempt: int = 0
    done: int = 0
    total: int = 0
    error: dict[str, str] | None = None
    shape: str = ""
    work: float = 0.0
    seconds: float | None = None
    frames: int = 0
    fps: float = 0.0
    width: int = 0
    height: int = 0
    model: str = ""
    remixed_from: str | None = None
    digest: str = ""
    key: str | None = None
    passed: int = 0
    bytes: int = 0
    preview_step: int = 0
    names: dict[str, str] = field(default_factory=dict)
    guidance: dict[str, float] = field(default_factory=dict)
    webhook_url: str | None = None
    webhook_sent: str = ""
    store_state: str = ""
    event_series: int = 0
    outputs_done: int = 0
    clock_ended: float | None = None
    queued_at: float | None = field(default=None, metadata={"in_journal": False})
    stage: str = field(default="", metadata={"in_journal": False})
    output_started: float = field(default=0.0, metadata={"in_journal": False})

    @property
    def is_ended(self) -> bool:
        """Whether it is completed, failed or deleted."""
        return self.state in ("completed", "failed", "deleted")

    @property
    def receivers(self) -> dict[str, str | None]:
        """Kind of delivery -> its receiver; None: nothing of this kind is left to deliver.

        An end is delivered to the webhook; files are uploaded to a store, or removed there.
        """
        url = self.webhook_url if self.is_ended and self.webhook_sent != self.state else None
        final_states = {"completed": "stored", "deleted": ""}
        has_files = self.store_state != final_states.get(self.state, self.store_state)
        return {"webhook": url and urlsplit(url).netloc, "store": "" if has_files else None}

    @property
    def seeds(self) -> list[int]:
        """The seed of each video; earlier versions stored it as the client wrote it."""
        seeds = self.settings.get("base_seed")
        if seeds is None:
            return []
        return [int(seed) for seed in (seeds if isinstance(seeds, list) else [seeds])]

    @property
    def num_outputs(self) -> int:
        """Number of videos."""
        return max(len(self.seeds), 1)

    @property
    def num_completed(self) -> int:
        """Number of complete videos; earlier versions did not count the only one."""
        return self.num_outputs if self.state == "completed" else self.outputs_done

    @property
    def steps_before(self) -> int:
        """Denoising steps of the complete videos."""
        return self.total // self.num_outputs * self.outputs_done

    def make_output_settings(self, index: int) -> dict[str, Any]:
        """Returns the settings of one of the videos, also of a job of the version before."""
        settings = update_record(self.settings)
        if isinstance(settings.get("base_seed"), list):
            settings["base_seed"] = self.seeds[index]
        return settings

    def set_sizes(self, run: Run) -> None:
        """Sets frames, fps, sizes, steps, guidance, shape and work from the run."""
        params = run.params
        branches, clips = (2 if params.uses_guidance else 1), params.num_clip or 1
        self.frames = params.frame_num
        if params.has_clips:
            self.frames = sum(map(params.count_clip_frames, range(clips)))
        self.fps, (self.width, self.height) = float(run.output.fps), params.video_size
        num_steps = len(params.step_range)
        self.total = num_steps * clips * params.num_blocks * self.num_outputs
        low, high = params.sample_guide_scale
        has_two = params.boundary is not None
        self.guidance = {"high_noise": high, "low_noise": low} if has_two else {"dit": low}
        shape: list[Any] = [params.latent_shape, num_steps, branches, clips]
        if run.inputs.loras:
            shape.append(make_video_lora_record(run.inputs.loras))
        self.shape = json.dumps(shape)
        self.work = float(prod(params.grid) * num_steps * branches * clips)

    @property
    def can_share_experts(self) -> bool:
        """Whether it may run in one batch with others, grouped by expert.

        Videos of several clips may not, since they load their experts for each clip. Neither may a
        second attempt, since the job may have caused the loss of the ranks.
        """
        max_attempt = 1 if self.state == "in_progress" else 0
        return self.attempt <= max_attempt and _read_num_clips(self.shape) == 1


@lru_cache(maxsize=100)
def _read_num_clips(shape: str) -> int:
    """Returns the number of clips of a `ServiceJob.shape`."""
    return int(json.loads(shape)[3])


COLUMNS = tuple(
    column.name for column in fields(ServiceJob) if column.metadata.get("in_journal", True)
)
_JSON = ("settings", "names", "error", "guidance")
_DEFAULTS = {
    column.name: column.default
    for column in fields(ServiceJob)
    if column.name in COLUMNS and column.default is not MISSING and column.default is not None
}


def make_row(job: ServiceJob) -> Row:
    """Returns the row of a job; escapes text that UTF-8 cannot encode."""
    return tuple(_encode_column(name, getattr(job, name)) for name in COLUMNS)


def read_row(row: Row) -> ServiceJob:
    """Returns the job of a row; empty columns of earlier versions get the default.

    Raises:
        ValueError: The row is not a job.
    """
    values = dict(zip(COLUMNS, row, strict=True))
    for name in _JSON:
        values[name] = json.loads(values[name] or "{}") or ({} if name != "error" else None)
        if not isinstance(values[name], dict | None):
            raise ValueError(f"{name} is no JSON object")
    for name, default in _DEFAULTS.items():
        if values[name] is None:
            values[name] = default
    if not isinstance(values["id"], str) or not isinstance(values["state"], str):
        raise ValueError("a job has no id or no state")
    return ServiceJob(**values)


def make_tombstone(job: ServiceJob) -> ServiceJob:
    """Returns a deleted job with only its id, state and times, and its open deliveries.

    Its id may still be the cursor of a list.
    """
    return ServiceJob(
        job.id,
        {},
        "deleted",
        created=job.created,
        started=job.started,
        ended=job.ended,
        clock_ended=job.clock_ended,
        webhook_url=None if job.webhook_sent == "deleted" else job.webhook_url,
        store_state=job.store_state,
        event_series=job.event_series,
    )


def _encode_column(name: str, value: Any) -> Any:
    if name in _JSON:
        value = json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, str):  # an unpaired surrogate would fail in every later write
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def hash_request(body: Mapping[str, Any]) -> str:
    """Returns a SHA-256 digest of the fields and files of a request."""
    hasher = hashlib.sha256()
    for name in sorted(body):
        value = body[name]
        has_files = isinstance(value, list) and any(map(_is_file, value))
        for content in value if has_files else [value]:
            if not _is_file(content):
                content = json.dumps(content, sort_keys=True, default=_digest_file).encode()
            hasher.update(f"{name} {len(content)} ".encode())
            hasher.update(content)
    return hasher.hexdigest()


def _is_file(value: Any) -> bool:
    return isinstance(value, bytes | bytearray)


def _digest_file(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
