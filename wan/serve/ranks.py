"""Program of the ranks of the service, started by `wan.serve.group` with torchrun.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan import env, log
from wan.checkpoint.layout import inspect_checkpoint
from wan.cli import failures, flags, main
from wan.cli.prompt_file import merge_line
from wan.cli.resolve import resolve_command_line
from wan.cli.videos import Video
from wan.log import logger
from wan.pipeline.batch import Batch, Job
from wan.run import Run
from wan.serve.link import FrontLink, told_by
from wan.serve.monitor import HEARTBEAT
from wan.settings.errors import (
    EndedError,
    InputError,
    NotFiniteError,
    WriteError,
    get_exit_code,
    is_disk_full,
    is_out_of_memory,
)
from wan.settings.flags import read_settings

if TYPE_CHECKING:
    from torch import Tensor

    from wan.distributed.gloo_group import GlooGroup
    from wan.distributed.mesh import ParallelGroups
    from wan.pipeline.pipeline import Pipeline

_GO, _CANCEL, _FAIL = 0, 1, 2


class SharedBoundary:
    """Implements `wan.pipeline.denoise.CancellationPoint` for one video.

    Attributes:
        ended_on_all_ranks: Whether all ranks have ended the video at the same step.
    """

    def __init__(self, control: GlooGroup, link: FrontLink, job: str, runs: int) -> None:
        """Prepares a video.

        Args:
            job: The id of the job.
            num_clips: Number of clips; each takes all steps.
        """
        self._control, self._link, self._job, self._runs = control, link, job, runs
        self._done = self._last = 0
        self.reached_together = False

    def reached(self, done: int, total: int) -> None:
        """Ends a cancelled video on all ranks; otherwise sends the progress to the front."""
        self.agree()
        if done not in (0, self._last):  # a paused video repeats a step number
            self._done += 1
        self._last = done
        self._link.say(
            "step", job=self._job, done=self._done, total=total * self._runs, follows=done < total
        )

    def agree(self) -> None:
        """Raises `EndedError` on all ranks if the video is cancelled or failed on any rank."""
        unwanted = self._job in self._link.cancelled or self._link.over.is_set()
        verdict = self._control.all_reduce_max(_CANCEL if unwanted else _GO)
        if verdict != _GO:
            self.reached_together = True
            raise EndedError("cancelled" if verdict == _CANCEL else "ended")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Signals an error of this rank to the others, which wait at their next check."""
        try:
            yield
        except Exception:
            self._control.all_reduce_max(_FAIL)
            self.reached_together = True
            raise


@dataclass(eq=False, kw_only=True)
class Served(Job):
    """A job that is being carried out.

    Attributes:
        id: The id of the job in the HTTP interface.
        video: Runs, decodes and writes the video.
        prompt_reuse: Number of prompts with cached embeddings, and number of all prompts.
    """

    id: str
    video: Video
    boundary: SharedBoundary
    reused: tuple[int, int] = (0, 0)


class Ranks:
    """Main loop of a rank: receives commands and generates their videos."""

    def __init__(
        self,
        shared: dict[str, Any],
        pipeline: Pipeline,
        team: ParallelGroups | None,
        link: FrontLink,
        texts: int,
    ) -> None:
        """Prepares a rank.

        Args:
            shared: Settings of all videos.
            team: None for one process.
            max_cached_prompts: Number of prompts whose embeddings stay in host memory.
        """
        from wan.distributed.gloo_group import GlooGroup

        self._shared, self._pipeline, self._team, self._link = shared, pipeline, team, link
        self._control = GlooGroup(team)
        self._is_main = team is None or team.is_main
        make_demo = partial(main.make_demo, lambda make: make())
        self._resolve = partial(
            resolve_command_line, make_demo=make_demo, describe_folder=cache(inspect_checkpoint)
        )
        self._most = texts
        self._embeds: dict[str, Tensor] = {}  # of the last prompts, newest first

    def serve(self) -> int:
        """Generates videos until the front sends "stop" or disconnects; returns the exit code."""
        self._link.say("ready")
        while True:
            command = self._link.next(HEARTBEAT) if self._is_main else None
            command = self._control.broadcast_from_rank0(command)
            if command is None:
                continue
            if command["do"] == "stop":
                return 0
            found = [self._prepared(**wanted) for wanted in command["jobs"]]
            self._make([served for served in found if served is not None])

    def _prepared(self, job: str, settings: dict[str, Any], file: str) -> Served | None:
        """Resolves a job on all ranks; if one refuses it, reports the reason and returns None."""
        run, refused = None, None
        try:
            run = self._resolve(merge_line(self._shared, read_settings(settings))).with_save_file(
                Path(file)
            )
        except Exception as error:
            refused = failures.describe_error(error) or repr(error)
        answers = self._control.gather((refused, None if run is None else _digest(run)))
        reasons = [reason for reason, _ in answers if reason is not None]
        if run is None or reasons or len({digest for _, digest in answers}) > 1:
            reason = reasons[0] if reasons else "The ranks read different files; copy them again."
            self._tell("failed", job=job, code="invalid_request", message=reason)
            return None
        return Served(
            f"Video {job}",
            run.params,
            run.make_inputs(),
            id=job,
            video=Video(run, self._pipeline, self._team),
            boundary=SharedBoundary(self._control, self._link, job, run.params.num_clip or 1),
        )

    def _make(self, jobs: Sequence[Served]) -> None:
        """Generates videos; raises errors that end the group."""

        def make(job: Served, latents: Callable[[], Tensor]) -> Served:
            self._pipeline.device.reset_peak_memory()
            logger.info("%s", job.name)
            if len(jobs) == 1:
                self._embed(jobs)
            else:  # its last step may be long ago
                job.boundary.agree()
            job.video.make(latents)
            return job

        batch = Batch(
            self._pipeline,
            jobs,
            group_by_expert=len(jobs) > 1,
            on_denoised=lambda job, latents: job.video.keep_latents(latents),
            on_failed=self._failed,
        )
        if len(jobs) > 1:
            self._pipeline.stages.seconds = jobs[0].stages
            self._embed(jobs)
        for job in batch.generate_videos(make):
            read = [one.stages.get("loading", 0.0) for one in jobs]
            alone = job.seconds - job.stages.get("loading", 0.0) + sum(read)
            self._link.cancelled.discard(job.id)
            self._tell("done", job=job.id, texts=job.reused, seconds=alone, loading=sum(read))
        newest = [*self._embeds][: self._most]
        self._pipeline.cached_prompt_embeds = {text: self._embeds[text] for text in newest}

    def _failed(self, job: Served, error: Exception) -> None:
        """Reports a failed video to the front; raises errors that not all ranks have seen."""
        together = job.boundary.reached_together
        if not (together or job.video.is_main_only or self._team is None):
            raise error
        code, message = _reason(error)
        if together:  # the error of the rank that failed
            found = self._control.gather((code, message))
            code, message = next((one for one in found if one[0] != "ended"), (code, message))
        self._link.cancelled.discard(job.id)
        self._tell("failed", job=job.id, code=code, message=message)

    def _embed(self, jobs: Sequence[Served]) -> None:
        """Encodes the prompts of jobs, and keeps the embeddings of earlier prompts."""
        there = self._pipeline.cached_prompt_embeds
        for job in jobs:
            needed = job.params.all_prompts
            job.reused = sum(text in there for text in needed), len(needed)
        own = dict.fromkeys(text for job in jobs for text in job.params.all_prompts)
        texts = [*own, *(text for text in self._embeds if text in there and text not in own)]
        self._pipeline.cache_prompt_embeds(texts, jobs[0].params)
        self._embeds = {text: self._pipeline.cached_prompt_embeds[text] for text in texts}

    def _tell(self, what: str, **more: Any) -> None:
        if self._is_main:
            self._link.say(what, **more)


def _reason(error: BaseException) -> tuple[str, str]:
    """Returns the error code and the message for the user."""
    sentence = failures.describe_error(error) or f"{type(error).__name__}: {error}"
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


def _digest(run: Run) -> str:
    """Returns a hash of the run, by which ranks detect that they would make different videos."""
    facts = json.dumps(run.collect_rank_invariants(""), sort_keys=True, default=str)
    return hashlib.sha256(facts.encode()).hexdigest()


def _serve(front: Mapping[str, Any], run: Run, team: ParallelGroups | None) -> int:
    """Builds the pipeline of one rank and serves commands; returns the exit code."""
    main.load_torch()
    from wan import device as devices
    from wan.pipeline import build

    log.set_level(run.output.log_level)
    link = FrontLink(front, env.rank(), env.node_rank())
    try:
        device = devices.select_device(run.setup.execution.device) if team is None else team.device
        pipeline = build.build_pipeline(run.setup, device, team)
        code = Ranks(
            flags.parse_flags(front["flags"]), pipeline, team, link, front["texts"]
        ).serve()
        if team is not None:
            team.close()
        return code
    except BaseException as error:
        code_name, message = _reason(error)
        link.say("lost", code=code_name, message=message)
        raise


def run(front: Path) -> int:
    """Runs one rank.

    Args:
        front: The file front.json.

    Returns:
        The exit codes of `wan.cli.main.main`.
    """
    try:
        with failures.raise_on_sigterm():
            log.set_up_logging(env.rank() == 0)
            log.hide_prompts()
            told = told_by(front)
            return main.execute_command_line(
                told["flags"], partial(_serve, told), require_inputs=False
            )
    except BaseException as error:
        sentence = failures.describe_error(error)
        if sentence is None:
            raise
        failures.print_error(sentence, "wan.serve")
        logger.debug("ended", exc_info=True)
        return get_exit_code(error)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
