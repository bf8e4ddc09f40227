"""The job queue of the service: admits, schedules, stores and deletes jobs."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from wan.app import resolve
from wan.app.run import Run
from wan.serve.jobs import records
from wan.serve.jobs.files import JobFiles
from wan.serve.jobs.folders import JOB_ID, remove_orphaned_folders
from wan.serve.jobs.job import ServiceJob, hash_request
from wan.serve.jobs.journal import MAX_ATTEMPTS, Journal
from wan.serve.jobs.journal_file import JournalError
from wan.serve.queue.deliveries import DeliveryQueue
from wan.serve.queue.scheduling import (
    Estimates,
    choose_batch_size,
    choose_first_job,
    describe_planned_memory,
    list_next_outputs,
    make_output_id,
    parse_output_id,
    read_clock,
)
from wan.serve.queue.waiters import Waiters
from wan.serve.ranks.group import ONE_NODE, Nodes, RankGroup
from wan.serve.requests import fields
from wan.serve.requests.fields import FIELD_NAMES, FOLDER, ParsedRequest
from wan.serve.requests.refusals import RefusedError
from wan.serve.requests.webhook_hosts import NO_HOSTS, WebhookHosts
from wan.settings.errors import InputError, is_disk_full
from wan.settings.layers import Layer

_MIN_FREE_BYTES = 16_000_000  # bytes that must be free for the files of a new job and the journal


@dataclass(frozen=True)
class Limits:
    """Limits of the service.

    Attributes:
        queue: Videos of queued jobs.
        pixels: Pixels of all frames of a video.
        prompt: Characters of a prompt.
        cached_prompts: Prompts whose embeddings stay in host memory.
        batch_size: Jobs in a batch, which is grouped by expert.
        keep_days: Days after which an ended job and its files are deleted; None: never.
        quota: Bytes of all jobs' files; the oldest ended jobs are deleted first. None: no limit.
        webhook_hosts: Hosts to which events may be sent.
    """

    queue: int = 100
    pixels: int = 1_000_000_000
    frames: int = 1000
    prompt: int = 10_000
    cached_prompts: int = 64
    batch_size: int = 8
    keep_days: float | None = None
    quota: int | None = None
    webhook_hosts: WebhookHosts = NO_HOSTS


class Service:
    """The jobs of one group of ranks; all methods are called in one event loop.

    Attributes:
        files: The files of the jobs.
        startup_run: The run that the ranks were started with.
        estimates: Durations of jobs, and waiting times.
        models: Names of the model in the HTTP interface; the first is that of responses.
        deliveries: Carries out webhooks and uploads.
        stopping: Whether the service is stopping and refuses requests.
        background_tasks: Further coroutine functions that run until the service ends.
        root_path: Precedes the paths of `url` fields and of the page.
    """

    def __init__(
        self,
        flags: Layer,
        run: Run,
        folder: Path,
        ranks: int,
        nodes: Nodes = ONE_NODE,
        replica_name: str = "",
        model_names: Sequence[str] = (),
        limits: Limits = Limits(),
        on_event: Callable[[str, ServiceJob | None, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        """Opens the journal and cleans the jobs' folders; `serve_forever` starts the ranks.

        Args:
            flags: Settings of all jobs, and of the ranks.
            run: The run of these settings.
            folder: Folder of the journal and the jobs' files.
            ranks: Number of ranks on all machines.
            replica_name: Part of its jobs' ids.
            model_names: Further names of the model; the last one is its task.
            on_event: Called with each event, its job and its record, for metrics.
        """
        self.startup_run, self.stopping, self.root_path = run, False, ""
        self.background_tasks: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.models = tuple(dict.fromkeys((*model_names, run.setup.preset.task)))
        self.limits, self._replica_name = limits, replica_name
        jobs, self._on_event = folder / "jobs", on_event
        self.files = JobFiles(jobs)
        self.journal = Journal(folder / "journal.sqlite")
        self.deliveries = DeliveryQueue(self.journal)
        records.restore_finished_jobs(jobs, self.journal)
        seconds = 60 * run.setup.parallel.dist_timeout
        prompts, handle = limits.cached_prompts, self._handle_message
        self.rank_group = RankGroup(flags, ranks, folder, handle, nodes, prompts, seconds)
        self._running: dict[str, ServiceJob] = {}
        self._batch: dict[str, int] = {}  # video of the ranks' batch -> its steps done
        self._errors: dict[str, dict[str, str]] = {}  # running job -> error of one of its videos
        self.waiters = Waiters(self._delete_unawaited_job)
        self.estimates = Estimates(self.journal, self._running)
        self._last_shape = ""  # `ServiceJob.shape` of the batch that was started last
        self._loading_seconds = 0.0  # to load the weights for one batch
        self._max_batch_size = limits.batch_size if _can_group_by_expert(run) else 1
        self._change_event, self._admission_lock = asyncio.Event(), asyncio.Lock()
        self._resolve_settings = resolve.make_line_resolver(flags)
        for job in self.journal.requeue_interrupted():
            self.files.remove_attempt(job, keep_clips=False)
        for job in self.journal.list_in_state("queued"):
            num_videos = self.files.count_videos(job)
            if num_videos < job.outputs_done:
                self.journal.update_job(job, outputs_done=num_videos)
                self.journal.update_job(job, done=job.steps_before)
            self.files.remove_attempt(job)
        remove_orphaned_folders(jobs, self.journal.get_state)

    @property
    def folder_files(self) -> Mapping[str, str]:
        """Field of a request -> file of the folder of uploaded files."""
        return self.startup_run.params.task.upload_names

    # Requests.

    async def create(
        self,
        parsed_request: ParsedRequest,
        digest: str,
        key: str | None = None,
    ) -> tuple[ServiceJob, bool]:
        """Admits a request and queues its job.

        Args:
            digest: Digest of the body.
            key: The request's Idempotency-Key.

        Returns:
            The job, and whether an earlier request created it.

        Raises:
            RefusedError: The request is refused.
        """
        self.limits.webhook_hosts.check_url(parsed_request.webhook_url)
        earlier = self.journal.find_earlier_job(digest, key)
        if earlier is not None:
            return earlier, True
        return await self._admit(parsed_request, digest, key)

    async def remix(
        self,
        job_id: str,
        prompt: str,
        webhook_url: str | None = None,
        key: str | None = None,
    ) -> ServiceJob:
        """Queues a copy of a job: the same settings, seed and files, a new prompt for all clips.

        Args:
            webhook_url: Gets the events of the copy. That of the job may be another client's.
            key: The request's Idempotency-Key.
        """
        url = {} if webhook_url is None else {"webhook_url": webhook_url}
        digest = hash_request({"remix": job_id, "prompt": prompt} | url)
        self.limits.webhook_hosts.check_url(webhook_url)
        earlier = self.journal.find_earlier_job(digest, key)
        if earlier is not None:
            return earlier
        job = self.find_job(job_id)
        try:
            request = await asyncio.to_thread(self._copy_request, job, prompt, webhook_url)
        except OSError as error:  # deleted meanwhile
            message = f"The files of the video {job.id} are gone."
            raise RefusedError(message, 404, "not_found", "video_id") from error
        self.find_job(job_id)
        return (await self._admit(request, digest, key, job.id))[0]

    def _copy_request(self, job: ServiceJob, prompt: str, webhook_url: str | None) -> ParsedRequest:
        """Returns the request of a job with another prompt, of as many clips, and webhook."""
        settings = {name: x for name, x in job.settings.items() if name != "clip_prompts"}
        if "clip_prompts" in job.settings and self.startup_run.params.num_frame_per_block is None:
            settings["num_clip"] = len(job.settings["clip_prompts"])
        settings["prompt"] = prompt
        files = self.files.read_uploads(job)
        return ParsedRequest(settings, files, job.priority, job.names, webhook_url)

    def _delete_unawaited_job(self, job_id: str) -> None:
        """Deletes a job for which no client waits any more, unless it has ended."""
        job = self.journal.get(job_id)
        if job is not None and not job.is_ended and not self.stopping:
            self.delete(self._running.get(job_id, job))

    def delete(self, job: ServiceJob) -> None:
        """Deletes a job, its files and its prompts; cancels it if it is running."""
        self.journal.delete(job)
        self.waiters.claim(job)
        outputs = self._list_batch_outputs(job)
        for output_id in outputs:  # the ranks still write to its folder
            self.rank_group.cancel(output_id)
        if not outputs:
            self._running.pop(job.id, None)
            self.files.remove_all(job)
        self._on_event("deleted", job, {})
        self._signal_change()

    def find_job(self, job_id: str) -> ServiceJob:
        """Returns a job by its id; refuses an unknown id."""
        job = self.journal.get(job_id) if JOB_ID.fullmatch(job_id) else None
        if job is None:
            raise RefusedError(f"There is no video {job_id[:100]!r}.", 404, "not_found", "video_id")
        return self._running.get(job.id, job)

    def list_stored_jobs(self) -> list[ServiceJob]:
        """Returns the jobs missing in the journal whose videos are in a store."""
        return records.list_stored_jobs(self.files.jobs, self.journal.get_state)

    async def wait_for_change(self) -> None:
        """Waits for the next change of any job."""
        await self._change_event.wait()

    # Start, stop and ranks.

    async def serve_forever(self) -> None:
        """Runs the ranks, and the tasks in the background, until it is cancelled.

        It also ends when the journal is lost, as logged.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.rank_group.run())
                tasks.create_task(self._delete_old_jobs())
                tasks.create_task(self.deliveries.run())
                tasks.create_task(self.journal.run_writer())
                for run in self.background_tasks:
                    tasks.create_task(run())
        except* JournalError:
            if not self.journal.is_lost:
                raise
        finally:
            self.journal.close()

    def begin_stop(self) -> None:
        """Refuses requests from now on, also those that wait for their video."""
        self.stopping = True
        self._signal_change()

    async def stop(self) -> None:
        """Stops the ranks and requeues the running jobs."""
        self.begin_stop()
        await self.rank_group.stop()
        for job in self._running.values():
            if job.state == "in_progress":
                self._requeue(job, attempt=max(job.attempt - 1, 0))

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Handles a message of the ranks."""
        message_type, output_id = message["is"], message.get("job", "")
        job = self._running.get(parse_output_id(output_id)[0])
        if message_type == "ready":
            self._start_next_jobs()
        elif message_type == "ended":
            self._handle_ranks_end(message)
        elif job is None:
            return
        elif message_type == "step":
            self._batch[output_id] = message["done"]
            job.total = message["total"] * job.num_outputs
            steps = (self._batch[output] for output in self._list_batch_outputs(job))
            job.done = job.steps_before + sum(steps)
        elif message_type == "stage":
            job.stage = message["stage"]
        elif message_type == "preview":  # of the step in progress
            job.preview_step = min(job.done + 1, job.total)
        elif message_type == "done":
            self._loading_seconds = message["loading"]
            self._finish_output(job, output_id, message["texts"], message["seconds"])
        elif message_type == "failed" and not (self.stopping and message["code"] == "cancelled"):
            self._fail_output(job, output_id, message["code"], message["message"])
        self._signal_change()

    def _list_batch_outputs(self, job: ServiceJob) -> list[str]:
        """Returns the videos of a job that the ranks make at present."""
        return [output for output in self._batch if parse_output_id(output)[0] == job.id]

    def _start_next_jobs(self) -> None:
        """Sends the next videos to the ranks if they are idle: first those of a started job."""
        if self._batch or self.stopping or not self.rank_group.ready:
            return
        started = [job for job in self._running.values() if job.state == "in_progress"]
        waiting = self.journal.list_in_state("queued")
        if not started and not waiting:
            return
        first = started[0] if started else choose_first_job(waiting, self._last_shape)
        for job in () if started else waiting[: waiting.index(first)]:
            self.journal.update_job(job, passed=job.passed + 1)
        outputs = list_next_outputs(first, [*started, *waiting])
        seconds = self.estimates.estimate_video_seconds(first)
        size = choose_batch_size(seconds, self._loading_seconds, len(outputs), self._max_batch_size)
        self._send_outputs(outputs[:size])

    def _send_outputs(self, outputs: Sequence[tuple[ServiceJob, int]]) -> None:
        """Sends videos of jobs to the ranks, and starts the jobs that have not been started."""
        self._last_shape, now, commands = outputs[0][0].shape, read_clock(), []
        for job, index in outputs:
            job.stage = ""
            if job.state == "queued":
                changes = {"state": "in_progress", "started": now, "attempt": job.attempt + 1}
                self.journal.update_job(job, **changes, done=job.steps_before)
                self._running[job.id] = job
            elif not self._list_batch_outputs(job):
                job.output_started = now
            output_id = make_output_id(job, index)
            self._batch[output_id] = 0
            settings = job.make_output_settings(index) | self.files.list_uploads(job)
            file = str(self.files.video_path(job, index).absolute())
            commands.append({"job": output_id, "settings": settings, "file": file})
        shapes = {make_output_id(job, index): job.shape for job, index in outputs}
        self.rank_group.make_videos(commands, shapes)

    def _finish_output(
        self, job: ServiceJob, output_id: str, prompt_counts: Sequence[int], seconds: float
    ) -> None:
        """Counts a complete video of a job.

        Args:
            prompt_counts: Number of prompts with cached embeddings, and number of all prompts.
            seconds: Duration of the video if it is made alone.
        """
        index = parse_output_id(output_id)[1]
        if job.state == "deleted" or not self.files.video_path(job, index).exists():
            message = "The file of the video is missing."
            self._fail_output(job, output_id, "internal_error", message)
            return
        if job.id not in self._errors:
            self.estimates.add(job, seconds)
            record = self.files.read_record(job, index) | {"texts": prompt_counts}
            self._on_event("video", job, record)
            changes = {"outputs_done": index + 1, "bytes": self.files.count_bytes(job)}
            if index + 1 < job.num_outputs:  # attempts are counted for each video
                changes |= {"attempt": 1, "preview_step": 0}
            self.journal.update_job(job, **changes, seconds=(job.seconds or 0.0) + seconds)
        self._end_output(job, output_id)

    def _fail_output(self, job: ServiceJob, output_id: str, code: str, message: str) -> None:
        """Notes the error of a video of a job, and cancels the other ones."""
        if job.num_outputs > 1:
            number = parse_output_id(output_id)[1] + 1
            message = f"Video {number} of {job.num_outputs}: {message}"
        if job.id not in self._errors:
            self._errors[job.id] = {"code": code, "message": message}
            for other in self._list_batch_outputs(job):
                if other != output_id:
                    self.rank_group.cancel(other)
        self._end_output(job, output_id)

    def _end_output(self, job: ServiceJob, output_id: str) -> None:
        """Ends a job if this was its last video, and starts the next videos."""
        self._batch.pop(output_id, None)
        if not self._list_batch_outputs(job):
            error = self._errors.pop(job.id, None)
            if error is not None:
                self._end_without_video(job, **error)
            elif job.outputs_done == job.num_outputs:
                self._running.pop(job.id, None)
                self.journal.update_job(job, state="completed", ended=time.time(), done=job.total)
                self._on_event("completed", job, {})
        self._start_next_jobs()

    def _end_without_video(self, job: ServiceJob, code: str, message: str) -> None:
        """Ends a job that has failed or was deleted; its complete videos stay if it has failed."""
        self._running.pop(job.id, None)
        if job.state == "deleted":
            self.files.remove_all(job)
            return
        self.files.remove_attempt(job, keep_clips=False)
        if code == "out_of_memory":
            need = describe_planned_memory(lambda: self._resolve_run(job))
            message = f"{message} {need}".strip()
        error = {"code": code, "message": message}
        changes = {"state": "failed", "ended": time.time(), "error": error}
        self.journal.update_job(job, **changes, preview_step=0)
        self._on_event("failed", job, {})

    def _requeue(self, job: ServiceJob, **changes: Any) -> None:
        """Queues a running job again, from its first video that is not complete."""
        self.files.remove_attempt(job)
        changes |= {"state": "queued", "done": job.steps_before, "preview_step": 0}
        self.journal.update_job(job, **changes)

    def _handle_ranks_end(self, message: Mapping[str, Any]) -> None:
        """Requeues the running jobs after the ranks have ended, or fails them."""
        self._on_event("restart", None, {})
        if self.stopping:
            return
        jobs, num_outputs = [*self._running.values()], len(self._batch)
        self._running.clear()
        self._batch.clear()
        for job in jobs:
            is_cause = message["code"] in ("out_of_memory", "disk_full") and num_outputs == 1
            error = self._errors.pop(job.id, None)
            if error is None and (is_cause or job.attempt >= MAX_ATTEMPTS):
                error = {"code": message["code"], "message": message["message"]}
            if job.state == "deleted":
                self.files.remove_all(job)
            elif error is not None:
                self._end_without_video(job, **error)
            else:
                self._requeue(job)

    def _signal_change(self) -> None:
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def _admit(
        self,
        parsed_request: ParsedRequest,
        digest: str,
        key: str | None,
        remixed_from: str | None = None,
    ) -> tuple[ServiceJob, bool]:
        """Writes the files of a request, resolves its run, and queues its job.

        Other requests are handled while the files are written and checked. If a retry with the same
        key was queued meanwhile, its job is returned.
        """
        self._check_queue(parsed_request.num_outputs)
        if not await self.journal.save():
            raise self._make_journal_refusal()
        if (await asyncio.to_thread(shutil.disk_usage, self.files.jobs)).free < _MIN_FREE_BYTES:
            raise self._make_disk_full_refusal()
        id_prefix = f"video_{self._replica_name}_" if self._replica_name else "video_"
        job = ServiceJob(
            id_prefix + secrets.token_hex(12),
            {"base_seed": fields.draw_seed()} | parsed_request.settings,
            priority=parsed_request.priority,
            created=time.time(),
            model=self.models[0],
            remixed_from=remixed_from,
            digest=digest,
            key=key,
            names=parsed_request.names,
            webhook_url=parsed_request.webhook_url,
        )
        try:
            await asyncio.to_thread(self.files.write_uploads, job, parsed_request.files)
            run = await asyncio.to_thread(self._resolve_run, job)
            job.set_sizes(run)
            job.bytes = sum(map(len, parsed_request.files.values()))
            async with self._admission_lock:
                earlier = self.journal.find_earlier_job(digest, key)
                if earlier is None:
                    self._check_queue(job.num_outputs)
                    job.created, job.queued_at = time.time(), read_clock()
                    await self.journal.add(job)
        except BaseException as error:
            refusal = self._make_refusal(error, job) if isinstance(error, InputError) else None
            self.files.remove_all(job)
            if refusal is not None:
                raise refusal from error
            if isinstance(error, JournalError):
                raise self._make_journal_refusal() from error
            if is_disk_full(error):
                raise self._make_disk_full_refusal() from error
            raise
        if earlier is not None:
            self.files.remove_all(job)
            return earlier, True
        self._on_event("created", job, {})
        self._start_next_jobs()
        self._signal_change()
        return job, False

    def refuse_when_stopping(self) -> None:
        """Refuses a request if the service stops."""
        if self.stopping:
            raise RefusedError("The service is stopping.", 503, "stopping", retry_after=30)

    def _check_queue(self, num_outputs: int) -> None:
        """Refuses a request if the service stops or the queue has no place for its videos."""
        self.refuse_when_stopping()
        most = self.limits.queue
        if num_outputs > max(most, 1):
            message = f"The queue takes {most} videos; ask for fewer than {num_outputs}."
            raise RefusedError(message, param="n")
        waiting = sum(job.num_outputs for job in self.journal.list_in_state("queued"))
        if waiting + num_outputs > most:
            message = f"The queue is full with {waiting} videos; try later."
            raise RefusedError(
                message, 429, "queue_full", retry_after=self.estimates.estimate_wait() or 30
            )

    def _resolve_run(self, job: ServiceJob) -> Run:
        """Resolves the run of a job as the ranks will, and checks the limits."""
        settings = job.make_output_settings(0) | self.files.list_uploads(job)
        run = self._resolve_settings(fields.read_request_layer(settings, job.names))
        params = run.params
        prompts = params.clip_prompts or (params.prompt,)
        frames = params.frame_num * (params.num_clip or 1)
        for unit, count, limit in (
            ("frames", frames, self.limits.frames),
            ("pixels", frames * prod(params.video_size), self.limits.pixels),
            ("characters of the prompt", len("".join(prompts)), self.limits.prompt),
            ("characters of the negative prompt", len(params.negative_prompt), self.limits.prompt),
        ):
            if count > limit:
                raise InputError(f"{count} {unit} are too many", remedy=f"give at most {limit}")
        return run

    def _make_journal_refusal(self) -> RefusedError:
        message = self.journal.problem or "The journal cannot be written."
        return RefusedError(message, 503, "journal_unavailable", retry_after=5)

    def _make_disk_full_refusal(self) -> RefusedError:
        return RefusedError("The disk is full; delete videos.", 507, "disk_full", retry_after=60)

    def _make_refusal(self, error: InputError, job: ServiceJob) -> RefusedError:
        """Returns the refusal of a request with field names for uploaded files' paths."""
        message = self.files.describe_refusal(error, job, self.folder_files)
        # A missing input is named where the sentence has the remedy.
        settings = re.findall(r"`(\w+)`", f"{error.subject} {error.remedy}")
        setting = next((name for name in settings if name != "task"), None)
        param = setting and job.names.get(setting, FIELD_NAMES.get(setting, setting))
        if param == FOLDER:
            files, text = self.folder_files, f"{error.value} {error.why}"
            param = next((name for name in files if files[name] in text), next(iter(files)))
        return RefusedError(message, param=param)

    async def _delete_old_jobs(self) -> None:
        """Deletes expired jobs, and the oldest jobs above the quota: some every ten seconds."""
        journal, days, quota = self.journal, self.limits.keep_days, self.limits.quota
        while True:
            with suppress(JournalError):  # which `/health` has
                if days is not None:
                    await self._delete_ended(await journal.list_ended(86400 * days), -1)
                if quota is not None:
                    await self._delete_ended(await journal.list_ended(), quota)
                await journal.forget_deleted(self.files.has_folder)
                if await journal.save():
                    await asyncio.to_thread(journal.vacuum)
            await asyncio.sleep(10)

    async def _delete_ended(self, names: Sequence[str], quota: int) -> None:
        """Deletes jobs while the files of all jobs have more bytes than a quota."""
        for name in names:
            job = self.journal.get(name)
            if job is not None and self.journal.count_bytes() > quota:
                self.delete(job)
            await asyncio.sleep(0)


def _can_group_by_expert(run: Run) -> bool:
    """Returns whether batches of videos can be grouped by expert in this run."""
    with suppress(InputError):
        run.setup.check_grouping()
        return True
    return False
