"""Program of the ranks of the service, started by `wan.serve.ranks.group` with torchrun.

Rank 0 receives commands from the front and broadcasts them. Several videos can run each expert's
steps as a batch, so that its weights are loaded once. Before each denoising step all ranks exchange
one byte, so that a video that is cancelled, or fails on one rank, ends on all ranks. This covers
errors that a rank raises while no other rank waits for it. After any other error the group ends,
and the front starts a new one.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.app import failures, launch, resolve
from wan.app.job import VideoJob
from wan.app.run import Run
from wan.pipeline.batch import Batch, Job
from wan.serve.ranks.monitor import HEARTBEAT
from wan.serve.requests import fields
from wan.settings.errors import (
    COMMAND_LINE_NAMING,
    EndedError,
    InputError,
    NotFiniteError,
    WriteError,
    escape_controls,
    get_exit_code,
    is_disk_full,
    is_out_of_memory,
)
from wan.settings.layers import Layer, read_layer
from wan.utils import env, log
from wan.utils.log import logger
from wan.utils.text_streams import set_up_text

if TYPE_CHECKING:
    from torch import Tensor

    from wan.distributed.gloo_group import GlooGroup
    from wan.distributed.mesh import ParallelGroups
    from wan.pipeline.pipeline import Pipeline


import os
import queue
import socket
from contextlib import suppress


def read_front_file(file: Path) -> dict[str, Any]:
    """Reads front.json: host, port, secret, settings, and texts (the number of cached prompts).

    Raises:
        InputError: The file is missing or invalid.
    """
    try:
        front = json.loads(file.read_text())
        return {name: front[name] for name in ("host", "port", "secret", "settings", "texts")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _make_front_error(str(file), error) from error


def _make_front_error(front: str, error: Exception) -> InputError:
    remedy = "start python -m wan.serve, which starts the ranks"
    return InputError(f"The front of {front} does not answer ({error})", remedy=remedy)


class FrontLink:
    """Sends messages of a rank to the front and receives its commands.

    Attributes:
        cancelled: Ids of cancelled jobs.
        stop_event: Set when the front sends "stop" or closes the connection.
    """

    def __init__(self, front: Mapping[str, Any], rank: int, node: int) -> None:
        """Connects to the front.

        Args:
            front: The result of `read_front_file`.
            rank: Rank of this process.
            node: Node of this process; 0 is the machine of the front.

        Raises:
            InputError: The front does not answer.
        """
        self.cancelled: set[str] = set()
        self.stop_event = threading.Event()
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._send_lock = threading.Lock()
        try:
            self._socket = socket.create_connection((front["host"], front["port"]), timeout=10)
        except OSError as error:
            raise _make_front_error(f"{front['host']}:{front['port']}", error) from error
        self._socket.settimeout(None)
        self.send("hello", secret=front["secret"], rank=rank, node=node, pid=os.getpid())
        threading.Thread(target=self._read_commands, daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def next_command(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next command; None if there is none within `seconds`."""
        try:
            return self._commands.get(timeout=seconds)
        except queue.Empty:
            return None

    def send(self, message_type: str, **payload: Any) -> None:
        """Sends a message to the front. A closed connection is detected by the reader."""
        line = json.dumps({"is": message_type, **payload}, ensure_ascii=False, default=str)
        with self._send_lock, suppress(OSError):
            self._socket.sendall(line.encode() + b"\n")

    def _send_heartbeats(self) -> None:
        """Sends heartbeats, with whether the main thread has moved since the last one."""
        last_position = None
        while not self.stop_event.wait(HEARTBEAT):
            position = _get_main_position()
            self.send("alive", moved=position != last_position)
            last_position = position

    def _read_commands(self) -> None:
        with suppress(OSError, ValueError), self._socket.makefile("rb") as file:
            for line in file:
                command = json.loads(line)
                if command["do"] == "cancel":
                    self.cancelled.add(command["job"])
                elif command["do"] == "make":
                    self._commands.put(command)
                else:
                    break
        self.stop_event.set()
        self._commands.put({"do": "stop"})


def _get_main_position() -> list[tuple[int, int]]:
    """Returns code object and instruction of each frame of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    position = []
    while frame is not None:
        position.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return position


_GO, _CANCEL, _FAIL = 0, 1, 2


class SharedCancellationPoint:
    """Implements `wan.pipeline.denoise.CancellationPoint` for one video.

    Attributes:
        ended_on_all_ranks: Whether all ranks have ended the video at the same step.
    """

    def __init__(self, control: GlooGroup, link: FrontLink, job: str, num_clips: int) -> None:
        """Prepares a video.

        Args:
            job: The id of the job.
            num_clips: Number of clips; each takes all steps.
        """
        self._control, self._link, self._job, self._num_clips = control, link, job, num_clips
        self._num_steps_done = self._last = 0
        self.ended_on_all_ranks = False

    def check(self, num_steps_done: int, num_steps: int) -> None:
        """Ends a cancelled video on all ranks; otherwise sends the progress to the front."""
        self.raise_if_cancelled()
        # A paused video repeats a step number, and a resumed one begins with a later one.
        self._num_steps_done += max(num_steps_done - self._last, 0)
        self._last = num_steps_done
        self._link.send(
            "step",
            job=self._job,
            done=self._num_steps_done,
            total=num_steps * self._num_clips,
            follows=num_steps_done < num_steps,
        )

    def raise_if_cancelled(self) -> None:
        """Raises `EndedError` on all ranks if the video is cancelled or failed on any rank."""
        is_unwanted = self._job in self._link.cancelled or self._link.stop_event.is_set()
        decision = self._control.all_reduce_max(_CANCEL if is_unwanted else _GO)
        if decision != _GO:
            self.ended_on_all_ranks = True
            raise EndedError("cancelled" if decision == _CANCEL else "ended")

    @contextmanager
    def local_section(self) -> Iterator[None]:
        """Signals an error of this rank to the others, which wait at their next check."""
        try:
            yield
        except Exception:
            self._control.all_reduce_max(_FAIL)
            self.ended_on_all_ranks = True
            raise


@dataclass(eq=False, kw_only=True)
class RunningJob(Job):
    """A job that is being carried out.

    Attributes:
        id: The id of the job in the HTTP interface.
        video: Runs, decodes and writes the video.
        prompt_reuse: Number of prompts with cached embeddings, and number of all prompts.
    """

    id: str
    video: VideoJob
    cancellation_point: SharedCancellationPoint
    prompt_reuse: tuple[int, int] = (0, 0)


class RankWorker:
    """Main loop of a rank: receives commands and generates their videos."""

    def __init__(
        self,
        shared: Layer,
        pipeline: Pipeline,
        team: ParallelGroups | None,
        link: FrontLink,
        max_cached_prompts: int,
        notices: Sequence[str] = (),
    ) -> None:
        """Prepares a rank.

        Args:
            shared: Settings of all videos.
            team: None for one process.
            max_cached_prompts: Number of prompts whose embeddings stay in host memory.
            notices: Those that the front has logged at its start.
        """
        from wan.distributed.gloo_group import GlooGroup

        self._pipeline, self._team, self._link = pipeline, team, link
        self._jobs: Sequence[RunningJob] = ()
        self._control = GlooGroup(team)
        self._is_main = team is None or team.is_main
        self._resolve_settings = resolve.make_line_resolver(shared)
        self._max_cached_prompts, self._start_notices = max_cached_prompts, notices
        self._embeds: dict[str, Tensor] = {}  # of the last prompts, newest first
        if self._is_main:
            pipeline.stage_timer.on_stage = self._report_stage

    def serve(self) -> int:
        """Generates videos until the front sends "stop" or disconnects; returns the exit code."""
        self._link.send("ready")
        while True:
            command = self._link.next_command(HEARTBEAT) if self._is_main else None
            command = self._control.broadcast_from_rank0(command)
            if command is None:
                continue
            if command["do"] == "stop":
                return 0
            jobs = [self._resolve_job(**request) for request in command["jobs"]]
            self._jobs = [job for job in jobs if job is not None]
            self._make_videos(self._jobs)

    def _resolve_job(self, job: str, settings: dict[str, Any], file: str) -> RunningJob | None:
        """Resolves a job on all ranks; if one refuses it, reports the reason and returns None."""
        run, refusal = None, None
        try:
            layer = fields.read_request_layer(settings, {})
            run = self._resolve_settings(layer).with_save_file(Path(file))
            self._pipeline.video_loras.read_all(run.inputs.loras)
        except Exception as error:
            refusal = failures.describe_error(error) or repr(error)
        answers = self._control.gather((refusal, None if run is None else _hash_run(run)))
        reasons = [reason for reason, _ in answers if reason is not None]
        if run is None or reasons or len({digest for _, digest in answers}) > 1:
            reason = reasons[0] if reasons else "The ranks read different files; copy them again."
            self._send("failed", job=job, code="invalid_request", message=reason)
            return None
        on_preview = partial(self._send, "preview", job=job)
        video = VideoJob(run, self._pipeline, self._team, on_preview=on_preview)
        return RunningJob(
            f"Video {job}",
            run.params,
            video.make_inputs(),
            id=job,
            video=video,
            cancellation_point=SharedCancellationPoint(
                self._control, self._link, job, run.params.num_clip or 1
            ),
        )

    def _make_videos(self, jobs: Sequence[RunningJob]) -> None:
        """Generates videos; raises errors that end the group."""

        def make_video(job: RunningJob, latents: Callable[[], Tensor]) -> RunningJob:
            self._pipeline.device.reset_peak_memory()
            logger.info("%s", job.name)
            job.video.log_notices(job.name, {*self._start_notices})
            if len(jobs) == 1:
                self._embed_prompts(jobs)
            else:  # its last step may be long ago
                job.cancellation_point.raise_if_cancelled()
            job.video.make(latents)
            return job

        batch = Batch(
            self._pipeline,
            jobs,
            group_by_expert=len(jobs) > 1,
            on_denoised=lambda job, latents: job.video.save_denoised_latents(latents),
            on_failed=self._report_failure,
        )
        if len(jobs) > 1:
            self._pipeline.stage_timer.seconds = jobs[0].stages
            self._embed_prompts(jobs)
        for job in batch.generate_videos(make_video):
            loading = [other.stages.get("loading", 0.0) for other in jobs]
            seconds = job.seconds - job.stages.get("loading", 0.0) + sum(loading)
            self._link.cancelled.discard(job.id)
            self._send(
                "done", job=job.id, texts=job.prompt_reuse, seconds=seconds, loading=sum(loading)
            )
        newest = [*self._embeds][: self._max_cached_prompts]
        self._pipeline.cached_prompt_embeds = {text: self._embeds[text] for text in newest}

    def _report_failure(self, job: RunningJob, error: Exception) -> None:
        """Reports a failed video to the front; raises errors that not all ranks have seen."""
        is_collective = job.cancellation_point.ended_on_all_ranks
        if not (is_collective or job.video.is_main_only or self._team is None):
            raise error
        code, message = _classify_error(error)
        if is_collective:  # the error of the rank that failed
            errors = self._control.gather((code, message))
            causes = (pair for pair in errors if pair[0] != "ended")
            code, message = next(causes, (code, message))
        self._link.cancelled.discard(job.id)
        self._send("failed", job=job.id, code=code, message=message)

    def _report_stage(self, name: str) -> None:
        """Sends the stage of the job whose times are measured; not those of other threads."""
        if threading.current_thread() is threading.main_thread():
            seconds = self._pipeline.stage_timer.seconds
            for job in (job for job in self._jobs if job.stages is seconds):
                self._link.send("stage", job=job.id, stage=name)

    def _embed_prompts(self, jobs: Sequence[RunningJob]) -> None:
        """Encodes the prompts of jobs, and keeps the embeddings of earlier prompts."""
        cached = self._pipeline.cached_prompt_embeds
        for job in jobs:
            prompts = job.params.all_prompts
            job.prompt_reuse = sum(text in cached for text in prompts), len(prompts)
        job_prompts = dict.fromkeys(text for job in jobs for text in job.params.all_prompts)
        all_prompts = [
            *job_prompts,
            *(text for text in self._embeds if text in cached and text not in job_prompts),
        ]
        self._pipeline.cache_prompt_embeds(all_prompts, jobs[0].params)
        self._embeds = {text: self._pipeline.cached_prompt_embeds[text] for text in all_prompts}

    def _send(self, message_type: str, **payload: Any) -> None:
        if self._is_main:
            self._link.send(message_type, **payload)


def _classify_error(error: BaseException) -> tuple[str, str]:
    """Returns the error code and the message for the user."""
    sentence = failures.describe_error(error) or escape_controls(f"{type(error).__name__}: {error}")
    if isinstance(error, EndedError):
        return error.code, str(error)
    if isinstance(error, NotFiniteError):
        return "not_finite", sentence
    if isinstance(error, InputError):
        return "invalid_request", sentence
    if is_out_of_memory(error):
        return "out_of_memory", sentence
    is_full = isinstance(error, WriteError) or is_disk_full(error)
    return ("disk_full" if is_full else "internal_error"), sentence


def _hash_run(run: Run) -> str:
    """Returns a hash of the run, by which ranks detect that they would make different videos."""
    description = json.dumps(run.collect_rank_invariants(""), sort_keys=True, default=str)
    return hashlib.sha256(description.encode()).hexdigest()


def _read_flags(front: Mapping[str, Any]) -> Layer:
    """Reads the settings of all videos, which the front has written as JSON."""
    return read_layer(front["settings"], "the command line", COMMAND_LINE_NAMING)


def _serve_rank(front: Mapping[str, Any], run: Run, team: ParallelGroups | None) -> int:
    """Builds the pipeline of one rank and serves commands; returns the exit code."""
    resolve.load_torch()
    from wan import device as devices
    from wan.pipeline import build

    log.set_level(run.output.log_level)
    link = FrontLink(front, env.rank(), env.node_rank())
    try:
        device = devices.select_device(run.setup.execution.device) if team is None else team.device
        pipeline = build.build_pipeline(run.setup, device, team)
        shared = _read_flags(front)
        code = RankWorker(shared, pipeline, team, link, front["texts"], run.notices).serve()
        if team is not None:
            team.close()
        return code
    except BaseException as error:
        code_name, message = _classify_error(error)
        link.send("lost", code=code_name, message=message)
        raise


def run_rank(front: Path) -> int:
    """Runs one rank.

    Args:
        front: The file front.json.

    Returns:
        The exit codes of generate.py.
    """
    set_up_text()
    try:
        with failures.raise_on_sigterm():
            log.set_up_logging(env.rank() == 0)
            log.hide_prompts()
            front_info = read_front_file(front)
            read_shared = partial(_read_flags, front_info)
            execute = partial(_serve_rank, front_info)
            return launch.execute_run(
                read_shared, execute, require_inputs=False, program="wan.serve"
            )
    except BaseException as error:
        sentence = failures.describe_error(error)
        if sentence is None:
            raise
        failures.print_error(sentence, "wan.serve")
        logger.debug("ended", exc_info=True)
        return get_exit_code(error)


if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1])))
