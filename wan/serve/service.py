"""The job queue of the service: admits, schedules, stores and deletes jobs."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint.files import read_json
from wan.checkpoint.layout import inspect_checkpoint
from wan.cli import main
from wan.cli.prompt_file import merge_line
from wan.cli.resolve import resolve_command_line
from wan.log import logger
from wan.output_files import write_output
from wan.pipeline import memory
from wan.run import Run
from wan.serve import fields, records
from wan.serve.estimates import Estimates
from wan.serve.fields import Asked
from wan.serve.folders import JOB_ID, UPLOAD, UPLOADED, remove_files, remove_orphans
from wan.serve.group import ONE_NODE, Nodes, RankGroup
from wan.serve.journal import ATTEMPTS, ENDS, Journal, QueuedVideo
from wan.serve.journal_file import JournalError
from wan.serve.repeats import RefusedError, Repeats, digest_of
from wan.serve.shapes import can_group, describe_job, may_share
from wan.serve.waiters import Waiters
from wan.settings.errors import InputError, is_disk_full, name_settings
from wan.settings.flags import read_settings

_ESTIMATED = 200  # completed jobs from which durations are estimated
_PASSED = 4  # later jobs with the shape of the last one that may start before a job


@dataclass(frozen=True)
class Limits:
    """Limits of the service.

    Attributes:
        queue: Queued jobs.
        pixels: Pixels of all frames of a video.
        frames: Frames of a video.
        prompt: Characters of a prompt.
        cached_prompts: Prompts whose embeddings stay in host memory.
        group_size: Jobs that are batched by expert.
        keep_days: Days after which an ended job and its files are deleted; None: never.
        quota: Bytes of all jobs' files; the oldest ended jobs are deleted first. None: no limit.
    """

    queue: int = 100
    pixels: int = 1_000_000_000
    frames: int = 1000
    prompt: int = 10_000
    texts: int = 64
    together: int = 8
    keep_days: float | None = None
    quota: int | None = None


class Service:
    """The jobs of one group of ranks; all methods are called in one event loop.

    Attributes:
        run: The run that the ranks were started with.
        model: Name of the model in the HTTP interface.
        stopping: Whether the service is stopping and refuses requests.
    """

    def __init__(
        self,
        argv: Sequence[str],
        given: Mapping[str, Any],
        run: Run,
        folder: Path,
        ranks: int,
        nodes: Nodes = ONE_NODE,
        name: str = "",
        limits: Limits = Limits(),
        seen: Callable[[str, QueuedVideo | None, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        """Opens the journal and cleans the jobs' folders; `start` starts the ranks.

        Args:
            argv: Flags of generate.py.
            user_settings: The parsed flags.
            run: The resolved flags.
            folder: Folder of the journal and the jobs' files.
            ranks: Number of ranks on all machines.
            name: Name of this replica, part of its jobs' ids.
            on_event: Called with each event, its job and its record, for metrics.
        """
        self.run, self.model, self.stopping = run, run.setup.preset.task, False
        self.limits, self._given, self._name, self._seen = limits, given, name, seen
        self._jobs = folder / "jobs"
        self._jobs.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(folder / "journal.sqlite")
        records.take_up(self._jobs, self.journal)
        timeout = 60 * run.setup.parallel.dist_timeout
        self.group = RankGroup(argv, ranks, folder, self._told, nodes, limits.texts, timeout)
        self._running: dict[str, QueuedVideo] = {}
        self._repeats = Repeats(self.journal)
        self.waiters = Waiters(self._abandon)
        self._estimates = Estimates(self.journal.last(_ESTIMATED))
        self._ahead: tuple[object, dict[str, float], float] = (None, {}, 0.0)
        self._last_shape, self._loading = "", 0.0  # seconds to load the weights for one batch
        self._most = limits.together if can_group(run) else 1
        self._changed, self._admitting = asyncio.Event(), asyncio.Lock()
        make_demo = partial(main.make_demo, lambda make: make())
        self._resolve = partial(
            resolve_command_line, make_demo=make_demo, describe_folder=cache(inspect_checkpoint)
        )
        for job in self.journal.recover():
            self._clear(job, goes_on=False)
        for job in self.journal.in_state("queued"):
            self._clear(job)
        remove_orphans(self._jobs, self.journal.state)

    # Requests.

    async def create(
        self, asked: Asked, digest: str, key: str | None = None, repeated: bool = False
    ) -> tuple[QueuedVideo, bool]:
        """Admits a request and queues its job.

        Args:
            digest: Digest of the body.
            key: The request's Idempotency-Key.
            is_repeated: Whether the client marks the request as a retry.

        Returns:
            The job, and whether an earlier request created it.

        Raises:
            RefusedError: The request is refused.
        """
        earlier = self._repeats.find(digest, key, repeated)
        if earlier is not None:
            return earlier, True
        return await self._admit_or_note(asked, digest, key, repeated)

    async def remix(
        self, name: str, prompt: str, key: str | None = None, repeated: bool = False
    ) -> QueuedVideo:
        """Queues a copy of a job with the same settings, seed and files and a new prompt.

        Args:
            name: Id of the job to copy.
            prompt: The new prompt, for all clips.
            key: The request's Idempotency-Key.
            is_repeated: Whether the client marks the request as a retry.
        """
        digest = digest_of({"remix": name, "prompt": prompt})
        earlier = self._repeats.find(digest, key, repeated)
        if earlier is not None:
            return earlier
        job = self.find(name)
        try:
            asked = await asyncio.to_thread(self._remixed, job, prompt)
        except OSError as error:  # deleted meanwhile
            message = f"The files of the video {job.id} are gone."
            raise RefusedError(message, 404, "not_found", "video_id") from error
        self.find(name)
        return (await self._admit_or_note(asked, digest, key, repeated, job.id))[0]

    def _remixed(self, job: QueuedVideo, prompt: str) -> Asked:
        """Returns the request of a job with another prompt."""
        inside = self.folder(job)
        paths = {str(path.relative_to(inside)): path for path in inside.rglob("*")}
        files = {
            name.removeprefix(UPLOAD): path.read_bytes()
            for name, path in paths.items()
            if name.startswith(UPLOAD) and path.is_file()
        }
        settings = {name: x for name, x in job.settings.items() if name != "clip_prompts"}
        if "clip_prompts" in job.settings:
            settings["num_clip"] = len(job.settings["clip_prompts"])
        return Asked(settings | {"prompt": prompt}, files, job.priority, job.names)

    async def _admit_or_note(
        self,
        asked: Asked,
        digest: str,
        key: str | None,
        repeated: bool,
        remixed_from: str | None = None,
    ) -> tuple[QueuedVideo, bool]:
        """Admits a request and returns the result of `create`; stores a refusal."""
        try:
            return await self._admitted(asked, digest, key, repeated, remixed_from)
        except BaseException:
            self._repeats.refuse(digest)
            raise

    def _abandon(self, name: str) -> None:
        """Deletes a job without waiting clients, unless it has ended."""
        job = self.journal.get(name)
        if job is not None and not is_over(job) and not self.stopping:
            self.delete(self._running.get(name, job))

    def delete(self, job: QueuedVideo) -> None:
        """Deletes a job, its files and its texts; cancels it if it is running."""
        running = job.state == "in_progress"
        self.journal.delete(job)
        self.waiters.claim(job)
        if running:  # the ranks still write to its folder
            self.group.cancel(job.id)
        else:
            self._clear(job, all_files=True)
        self._seen("deleted", job, {})
        self._wake()

    def find(self, name: str) -> QueuedVideo:
        """Returns a job by its id; refuses an unknown id."""
        job = self.journal.get(name) if JOB_ID.fullmatch(name) else None
        if job is None:
            raise RefusedError(f"There is no video {name[:100]!r}.", 404, "not_found", "video_id")
        return self._running.get(job.id, job)

    def folder(self, job: QueuedVideo) -> Path:
        """Returns the folder of a job's files."""
        return self._jobs / job.id

    def file(self, job: QueuedVideo, name: str) -> Path:
        """Returns the path of an uploaded file of a job."""
        return self.folder(job) / f"{UPLOAD}{name}"

    def video(self, job: QueuedVideo) -> Path:
        """Returns the path of a job's video."""
        return self.folder(job) / "video.mp4"

    def record(self, job: QueuedVideo) -> dict[str, Any]:
        """Reads the record of a finished video; returns {} if it is missing or damaged."""
        try:
            return read_json(self.folder(job) / "video.json")
        except InputError as error:
            logger.debug("%s has no record (%s)", job.id, error)
            return {}

    async def changed(self) -> None:
        """Waits for the next change of any job."""
        await self._changed.wait()

    def planned_seconds(self, job: QueuedVideo) -> float | None:
        """Returns the estimated duration of a job in seconds; None before any job was completed."""
        return self._estimates.seconds(job)

    def seconds_ahead(self, until: QueuedVideo | None = None) -> float:
        """Returns the estimated seconds until a job starts; None: until the queue is empty."""
        now = time.time()
        running = [job for job in self._running.values() if job.state == "in_progress"]
        planned = sum(self.planned_seconds(job) or 0.0 for job in running)
        begun = min((job.started or now for job in running), default=now)
        ahead, whole = self._queue_seconds()
        waiting = whole if until is None else ahead.get(until.id, whole)
        return max(planned - (now - begun), 0.0) + waiting

    def _queue_seconds(self) -> tuple[dict[str, float], float]:
        """Returns the estimated seconds before each queued job, by id, and of the whole queue.

        The sums are cached until the queue or the estimates change.
        """
        version = (self.journal.version, self._estimates.version)
        if self._ahead[0] != version:
            ahead, seconds = {}, 0.0
            for job in self.journal.in_state("queued"):
                ahead[job.id] = seconds
                seconds += self.planned_seconds(job) or 0.0
            self._ahead = version, ahead, seconds
        return self._ahead[1:]

    # Start, stop and ranks.

    async def start(self) -> None:
        """Runs the ranks, the cleaning of old jobs and the journal until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.group.run())
                tasks.create_task(self._clean())
                tasks.create_task(self.journal.keep())
        finally:
            self.journal.close()

    async def stop(self) -> None:
        """Stops the ranks and requeues the running jobs."""
        self.stopping = True
        await self.group.stop()
        for job in self._running.values():
            if job.state == "in_progress":
                self.journal.change(job, state="queued", done=0, attempt=max(job.attempt - 1, 0))
                self._clear(job)

    def _told(self, said: dict[str, Any]) -> None:
        """Handles a message of the ranks."""
        what, job = said["is"], self._running.get(said.get("job", ""))
        if what == "ready":
            self._next()
        elif what == "ended":
            self._lost(said)
        elif job is None:
            return
        elif what == "step":
            job.done, job.total = said["done"], said["total"]
        elif what == "done":
            self._loading = said["loading"]
            self._done(job, said["texts"], said["seconds"])
        elif what == "failed" and not (self.stopping and said["code"] == "cancelled"):
            self._failed(job, said["code"], said["message"])
        self._wake()

    def _next(self) -> None:
        """Sends the next jobs to the ranks if they are idle."""
        if self._running or self.stopping or not self.group.ready:
            return
        waiting = self.journal.in_state("queued")
        if not waiting:
            return
        first = waiting[0]
        equals = [one for one in waiting if one.priority == first.priority]
        if first.shape != self._last_shape and first.passed < _PASSED:
            first = next((one for one in equals if one.shape == self._last_shape), first)
        for one in waiting[: waiting.index(first)]:
            self.journal.change(one, passed=one.passed + 1)
        chosen = [first]
        if may_share(first):
            others = [one for one in equals if one.id != first.id and may_share(one)]
            chosen += others[: self._together(first, 1 + len(others)) - 1]
        self._last_shape, now, wanted = first.shape, time.time(), []
        for job in chosen:
            begun = {"state": "in_progress", "started": now, "attempt": job.attempt + 1}
            self.journal.change(job, **begun, done=0)
            self._running[job.id] = job
            files = self._uploads(job)
            file = str(self.video(job).absolute())
            wanted.append({"job": job.id, "settings": job.settings | files, "file": file})
        self.group.make(wanted, {job.id: job.shape for job in chosen})

    def _together(self, job: QueuedVideo, waiting: int) -> int:
        """Returns the group size that minimizes the mean waiting time.

        A group of n jobs takes n times the seconds of a job plus the loading time once, and all its
        jobs end with the last one.
        """
        planned = self.planned_seconds(job)
        if planned is None:
            return 1
        own = max(planned - self._loading, 0.0)

        def all_waits(n: int) -> float:
            waits = end = 0.0
            for begun in range(0, waiting, n):
                count = min(n, waiting - begun)
                end += count * own + self._loading
                waits += count * end
            return waits

        return min(range(1, min(self._most, waiting) + 1), key=all_waits)

    def _done(self, job: QueuedVideo, texts: Sequence[int], seconds: float) -> None:
        """Marks a job as completed.

        Args:
            texts: Number of prompts with cached embeddings, and number of all prompts.
            seconds: Duration of the job if run alone.
        """
        if job.state == "deleted" or not self.video(job).exists():
            self._failed(job, "internal_error", "The file of the video is missing.")
            return
        del self._running[job.id]
        stored = sum(path.stat().st_size for path in self.folder(job).rglob("*"))
        ends = {"state": "completed", "ended": time.time(), "seconds": seconds}
        self.journal.change(job, **ends, done=job.total, bytes=stored)
        self._estimates.add(job)
        self._seen("completed", job, self.record(job) | {"texts": texts})
        self._next()

    def _failed(self, job: QueuedVideo, code: str, message: str) -> None:
        self._running.pop(job.id, None)
        self._clear(job, all_files=job.state == "deleted", goes_on=False)
        if job.state != "deleted":
            if code == "out_of_memory":
                message = f"{message} {self._planned_memory(job)}".strip()
            error = {"code": code, "message": message}
            self.journal.change(job, state="failed", ended=time.time(), error=error)
            self._seen("failed", job, {})
        self._next()

    def _lost(self, said: Mapping[str, Any]) -> None:
        """Requeues the running jobs after the ranks have ended, or fails them."""
        self._seen("restart", None, {})
        if self.stopping:
            return
        jobs, self._running = [*self._running.values()], {}
        for job in jobs:
            is_cause = said["code"] in ("out_of_memory", "disk_full") and len(jobs) == 1
            if job.state == "deleted":
                self._clear(job, all_files=True)
            elif is_cause or job.attempt >= ATTEMPTS:
                self._failed(job, said["code"], said["message"])
            else:
                self._clear(job)
                self.journal.change(job, state="queued", done=0)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _admitted(
        self,
        asked: Asked,
        digest: str,
        key: str | None,
        repeated: bool,
        remixed_from: str | None,
    ) -> tuple[QueuedVideo, bool]:
        """Writes the files of a request, resolves its run, and queues its job.

        Other requests are handled while the files are written and checked. If a retry with the same
        key was queued meanwhile, its job is returned.
        """
        self._check_queue()
        wait = None if self.journal.problem is None else 0.0
        if not await self.journal.save(wait, looks=True):
            raise self._unrecorded()
        if not await asyncio.to_thread(self.journal.has_room):
            raise self._no_room()
        name = f"video_{self._name}_" if self._name else "video_"
        job = QueuedVideo(
            name + secrets.token_hex(12),
            {"base_seed": random.SystemRandom().randrange(10**10)} | asked.settings,
            priority=asked.priority,
            created=time.time(),
            model=self.model,
            remixed_from=remixed_from,
            digest=digest,
            key=key,
            names=asked.names,
        )
        try:
            await asyncio.to_thread(self._write, job, asked.files)
            run = await asyncio.to_thread(self._checked, job)
            describe_job(job, run)
            job.bytes = sum(map(len, asked.files.values()))
            async with self._admitting:
                earlier = self._repeats.find(digest, key, repeated)
                if earlier is None:
                    self._check_queue()
                    job.created = time.time()
                    await self.journal.add(job)
        except BaseException as error:
            refusal = self._refusal(error, job) if isinstance(error, InputError) else None
            self._clear(job, all_files=True)
            if refusal is not None:
                raise refusal from error
            if isinstance(error, JournalError):
                raise self._unrecorded() from error
            if is_disk_full(error):
                raise self._no_room() from error
            raise
        if earlier is not None:
            self._clear(job, all_files=True)
            return earlier, True
        self._seen("created", job, {})
        self._next()
        self._wake()
        return job, False

    def _check_queue(self) -> None:
        """Refuses a request if the service stops or the queue is full."""
        if self.stopping:
            raise RefusedError("The service is stopping.", 503, "stopping", wait=30)
        waiting = self.journal.counts().get("queued", 0)
        if waiting >= self.limits.queue:
            message = f"The queue is full with {waiting} jobs; try later."
            raise RefusedError(message, 429, "queue_full", wait=self.seconds_ahead() or 30)

    def _write(self, job: QueuedVideo, files: Mapping[str, bytes]) -> None:
        self.folder(job).mkdir()
        for name, content in files.items():
            with write_output(self.file(job, name), UPLOADED) as temporary:
                temporary.write_bytes(content)

    def _checked(self, job: QueuedVideo) -> Run:
        """Resolves the run of a job as the ranks will, and checks the limits."""
        with name_settings(fields.words(job.names)):
            run = self._resolve(
                merge_line(self._given, read_settings(job.settings | self._uploads(job)))
            )
        request = run.params
        prompts = request.clip_prompts or (request.prompt,)
        frames = request.frame_num * (request.num_clip or 1)
        for what, given, most in (
            ("frames", frames, self.limits.frames),
            ("pixels", frames * prod(request.video_size), self.limits.pixels),
            ("characters of the prompt", len("".join(prompts)), self.limits.prompt),
            ("characters of the negative prompt", len(request.negative_prompt), self.limits.prompt),
        ):
            if given > most:
                raise InputError(f"{given} {what} are too many", remedy=f"give at most {most}")
        return run

    def _unrecorded(self) -> RefusedError:
        message = self.journal.problem or "The journal cannot be written."
        return RefusedError(message, 503, "journal_unavailable", wait=5)

    def _no_room(self) -> RefusedError:
        return RefusedError("The disk is full; delete videos.", 507, "disk_full", wait=60)

    def _refusal(self, error: InputError, job: QueuedVideo) -> RefusedError:
        """Returns the refusal of a request with field names for uploaded files' paths."""
        message = str(error)
        for name in self._uploads(job):
            path = str(self.file(job, name).absolute())
            message = message.replace(path, f"the uploaded {job.names.get(name, name)}")
        named = re.match(r"`(\w+)`", error.what)
        param = job.names.get(named[1], named[1]) if named else None
        return RefusedError(message, param=param)

    def _uploads(self, job: QueuedVideo) -> dict[str, str | list[str]]:
        """Returns the paths of a job's uploads by setting: a folder, a file, or several files."""
        found: dict[str, str | list[str]] = {}
        for name in (*fields.UPLOADS, fields.FOLDER):
            path = self.file(job, name).absolute()
            if path.is_dir() and name != fields.FOLDER:
                found[name] = [str(one) for one in sorted(path.iterdir())]
            elif path.exists():
                found[name] = str(path)
        return found

    def _planned_memory(self, job: QueuedVideo) -> str:
        """Returns a sentence with the planned peak memory of a job; "" if planning fails."""
        try:
            run = self._checked(job)
            sizes = memory.estimate_network_sizes(run.setup, run.params)
            stages = memory.compute_stage_memory(run.setup, run.params, sizes).values()
            most = max(usage.total() for usage in stages)
            return f"--plan finds that it needs {most / 1e9:.1f} GB on each rank."
        except Exception:  # it is only a hint
            logger.debug("no plan", exc_info=True)
            return ""

    def _clear(self, job: QueuedVideo, all_files: bool = False, goes_on: bool = True) -> None:
        """Removes the files of an attempt, or all files of a job.

        Args:
            keep_clips: Whether finished clips stay, with which the next attempt continues.
        """

        def keep(name: str) -> bool:
            is_clip = goes_on and Path(name.partition("/")[0]).suffix == ".clips"
            return name.startswith(UPLOAD) or is_clip

        remove_files(self.folder(job), None if all_files else keep)

    async def _clean(self) -> None:
        """Deletes expired jobs, and the oldest jobs above the quota, every ten seconds."""
        while True:
            if self.limits.keep_days is not None:
                for job in self.journal.ended_before(time.time() - 86400 * self.limits.keep_days):
                    self.delete(job)
            quota = self.limits.quota
            while quota is not None and self.journal.stored_bytes() > quota:
                oldest = self.journal.ended_before(time.time(), 1)
                if not oldest:
                    break
                self.delete(oldest[0])
            self.journal.forget_deleted(lambda name: (self._jobs / name).exists())
            if await self.journal.save():
                await asyncio.to_thread(self.journal.wipe)
            await asyncio.to_thread(self.journal.has_room)
            await asyncio.sleep(10)


def is_over(job: QueuedVideo) -> bool:
    """Returns whether a job is completed, failed or deleted."""
    return job.state in ENDS
