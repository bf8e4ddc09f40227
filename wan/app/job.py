"""Generates one video of the command line from its resolved run."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from wan.app.clip_store import NUMBERED_SAFETENSORS, ClipFiles
from wan.app.output import (
    make_unfinished_paths,
    remove_stale_files,
    report_saved_latents,
    write_to_first_path,
)
from wan.app.record import log_video_summary, make_mp4_comment, write_record
from wan.app.run import Run
from wan.media import audio, video_writer
from wan.media.video_reader import count_stored_frames
from wan.settings import noise_schedule
from wan.settings.errors import InputError, NotFiniteError
from wan.tasks.base import Clip
from wan.utils import env, log, trace
from wan.utils.files import (
    LATENTS_KIND,
    PREVIEW_KIND,
    VIDEO_KIND,
    move_to_free_name,
    remove_output,
    replace_output,
    write_output,
)
from wan.utils.log import logger

if TYPE_CHECKING:
    from torch import Tensor

    from wan.distributed.mesh import ParallelGroups
    from wan.media.video_writer import Mp4Encoder
    from wan.metering.meter import PowerMeasurement, VideoMeter
    from wan.modules.vae.video_vae import LatentBlocks, Sink
    from wan.pipeline.pipeline import Pipeline
    from wan.tasks.base import Clip, Inputs


class VideoJob:
    """Generates one video of the command line and writes its files and record.

    Attributes:
        run: The resolved run of the video.
        latents_file: Path of the denoised latents, once they are on disk.
        is_main_only: Whether only the main rank still works on the video.
    """

    def __init__(
        self,
        run: Run,
        pipeline: Pipeline,
        groups: ParallelGroups | None,
        on_main_only: Callable[[], None] | None = None,
        on_preview: Callable[[], None] | None = None,
    ) -> None:
        """Prepares a video on every rank; computes nothing.

        Args:
            groups: The parallel groups; None for one process.
            on_main_only: Called on every rank when only the main rank still works on the video.
            on_preview: Called on the main rank after each preview is written. None: the path of the
                preview is logged once, and the file is removed when the video is complete.
        """
        self.run, self._pipeline, self._groups = run, pipeline, groups
        self._on_main_only, self._on_preview = on_main_only, on_preview
        self._preview_path: Path | None = None
        self.latents_file, self.is_main_only = run.decode_latents, False
        self._is_main = groups is None or groups.is_main
        self._old_file_identity = _read_file_identity(run.output.save_file)
        self._stream: Mp4Encoder | None = None
        self._clips, self._num_stored_clips = ClipFiles(run), 0

    def make(self, denoise: Callable[[], Tensor] | None = None) -> None:
        """Generates the video and its record.

        Args:
            denoise: Returns the latents, after passing them to `save_denoised_latents`. By default
                they are computed here, or read from `decode_latents`.
        """
        run, pipeline = self.run, self._pipeline
        meter_context: AbstractContextManager[VideoMeter | None] = nullcontext()
        if run.power:
            from wan.metering.meter import VideoMeter

            stages = "text to decoded video" if run.decode_latents is None else "decoding only"
            meter_context = VideoMeter(pipeline.device, stages)
        if run.decode_latents is None:
            logger.info("Prompt: %s", log.format_prompt(run.params.prompt))
        with meter_context as video_meter, self._open_stream(), self._report_stored_clips():
            if run.decode_latents is not None:
                latents = video_writer.load_latents(run.decode_latents)
            elif run.params.has_clips:
                self._generate_clips(video_meter)
                return
            elif run.output.stream and run.params.num_frame_per_block is not None:
                blocks = self._pipeline.generate_blocks(run.params, self.make_inputs())
                with self._record_trace():
                    self._write_video(blocks, video_meter)
                return
            else:
                with self._record_trace():
                    latents = self._denoise() if denoise is None else denoise()
            self._write_video(latents, video_meter)

    @contextmanager
    def _open_stream(self) -> Iterator[None]:
        """Opens the mp4 of `stream` on the main rank, and removes it in the end."""
        if not self._is_main:
            yield
            return
        with video_writer.open_stream(self.run.output, make_mp4_comment(self.run)) as self._stream:
            yield

    def _finish_stream(self) -> None:
        """Completes the mp4 of `stream`; logs an error if that fails."""
        if self._stream is None:
            return
        try:
            self._stream.finish()
        except OSError as error:
            logger.error("The stream is not complete (%s).", error.strerror or error)

    def make_inputs(self) -> Inputs:
        """Returns the pipeline's inputs, with what writes previews and saves each step.

        All ranks call it. Those of a causal video have the finished blocks, and store further ones.
        """
        inputs = replace(self.run.load_inputs(), show_preview=self._write_preview)
        if self.run.params.num_frame_per_block is not None:
            num_done, latents = self._finished_clips
            store = self._store_block if self._is_main else None
            inputs = replace(
                inputs, num_clips_done=num_done, clip_state=latents, callback_on_block_end=store
            )
        if self.run.output.save_latents == "steps" and self._is_main:
            return replace(inputs, callback_on_step_end=self._save_step_latents)
        return inputs

    @cached_property
    def _finished_clips(self) -> tuple[int, Tensor | None]:
        """Clips or blocks of an earlier run, and their state; the main rank broadcasts both."""
        self._clips = clips = ClipFiles(self.run)
        num_done, state = 0, None
        if self._is_main:
            num_done = clips.count_finished()
            state = clips.read_state(num_done)
        if self._groups is not None:
            num_done, state = self._groups.broadcast_object_from_rank0((num_done, state))
        if num_done:
            text = "%d of %d %ss are in %s."
            logger.info(text, num_done, clips.num_clips, clips.unit, clips.folder)
        self._num_stored_clips = num_done
        return num_done, state

    def _store_block(self, index: int, latents: Tensor) -> None:
        """Stores a block of frames on the main rank; after an error, which is logged, no others."""
        if index != self._num_stored_clips:
            return
        try:
            self._clips.write_clip(index, Clip(latents, None, latents))
        except (OSError, InputError) as error:
            logger.error("Blocks from %d on are not stored (%s).", index + 1, error)
        else:
            self._num_stored_clips += 1

    @contextmanager
    def _report_stored_clips(self) -> Iterator[None]:
        """Logs how a video that fails, or is stopped, continues after its stored clips."""
        try:
            yield
        except BaseException:
            clips, params, num_done = self._clips, self.run.params, self._num_stored_clips
            if self._is_main and num_done:
                logger.error(
                    "%d of %d %ss are kept in %s; the same command with --save_file %s "
                    "--base_seed %d continues after them.",
                    *(num_done, clips.num_clips, clips.unit, clips.folder),
                    *(self.run.output.save_file, params.base_seed),
                )
            raise

    def _write_preview(self, frame_3HW: Tensor) -> None:
        """Replaces the picture of the predicted video by a newer one."""
        is_first, self._preview_path = self._preview_path is None, self.run.output.preview_path
        video_writer.save_preview(frame_3HW, self._preview_path)
        if self._on_preview is not None:
            self._on_preview()
        elif is_first:
            num_steps = self.run.params.preview
            interval = "step" if num_steps == 1 else f"{num_steps} steps"
            logger.info("Preview, renewed after every %s: %s", interval, self._preview_path)

    def _save_step_latents(self, num_steps_done: int, latents: Tensor) -> None:
        """Writes the latents after a step; logs an error if that fails."""
        folder = self.run.output.steps_dir
        try:
            folder.mkdir(exist_ok=True)
            for old_file in folder.glob(NUMBERED_SAFETENSORS) if num_steps_done == 1 else ():
                remove_output(old_file, LATENTS_KIND)
            path = folder / f"{num_steps_done:04}.safetensors"
            video_writer.save_latents(latents, path, self.run.settings)
        except OSError as error:
            text = "The latents after step %d are not saved (%s)."
            logger.error(text, num_steps_done, error.strerror or error)

    def log_notices(self, name: str, logged: set[str]) -> None:
        """Logs the notices about the video that are not in `logged`, and adds them to it."""
        for notice in self.run.notices:
            if notice not in logged:
                logger.warning("%s: %s", name, env.make_flag_naming().render(notice))
            logged.add(notice)

    def extend_prompt(self) -> None:
        """Extends the prompt on the main rank, if enabled, and broadcasts it."""
        run, prompt = self.run, self.run.params.prompt
        if run.prompt_extension is None or run.decode_latents is not None:
            return
        with self._pipeline.stage_timer("prompt extension"):
            if self._is_main:
                device = str(self._pipeline.device.torch_device)
                from wan.app import prompt_extend

                arguments = (prompt, run.inputs.image, run.params.base_seed, device)
                prompt = prompt_extend.rewrite_prompt(run.prompt_extension, *arguments)
            if self._groups is not None:
                prompt = self._groups.broadcast_object_from_rank0(prompt)
        self.run = run.with_prompt(prompt)

    def save_denoised_latents(self, latents: Tensor) -> None:
        """Writes the latents to disk on the main rank, before decoding can fail."""
        if not self._is_main:
            return
        self.latents_file = write_to_first_path(
            make_unfinished_paths(self.run.output, ".latents.safetensors"),
            lambda path: video_writer.save_latents(latents, path, self.run.settings),
            "denoised latents",
        )
        is_finite = bool(latents.isfinite().all())
        if is_finite and self.latents_file is None:
            logger.error("Decoding continues from memory; if it fails, the latents are lost.")
        elif not is_finite and self.latents_file is not None:
            text = "The latents, which contain NaN or infinity, are kept in %s."
            logger.error(text, self.latents_file)

    def _denoise(self) -> Tensor:
        with self._saving_latents_of_errors():
            latents = self._pipeline.generate_latents(self.run.params, self.make_inputs())
        self.save_denoised_latents(latents)
        return latents

    @contextmanager
    def _saving_latents_of_errors(self) -> Iterator[None]:
        """Writes latents that contain NaN or infinity to disk on the main rank."""
        try:
            yield
        except NotFiniteError as error:
            self.save_denoised_latents(error.latents)
            raise

    @contextmanager
    def _record_trace(self) -> Iterator[None]:
        """Records the spans for `--trace` and `--log_level debug`."""
        run, pipeline, folder = self.run, self._pipeline, self.run.output.trace
        if folder is None and not run.verbose:
            yield
            return
        from wan.metering.recording import TraceRecording, make_exchange_plan, select_nth_steps

        schedule = noise_schedule.make_noise_schedule(run.params)
        first_step = schedule.first_step
        if run.params.num_frame_per_block is not None:  # finished blocks take no steps
            first_step += self._finished_clips[0] * len(schedule.experts)
        select_steps = partial(select_nth_steps, schedule.experts, first_step=first_step)
        steps = run.output.trace_steps or select_steps(position=1) if folder else ()
        rank = 0 if self._groups is None else self._groups.rank
        recording = TraceRecording(
            make_exchange_plan(
                run.setup, run.params, steps, pipeline.can_return_lse, pipeline.device.type, rank
            ),
            pipeline.device,
            select_steps(position=0) if run.verbose else (),
            None if folder is None else self._groups,
            folder if run.output.trace_kernels else None,
        )
        with trace.use_recorder(recording.recorder):
            yield
        if folder is not None:
            used = {"device": pipeline.device.name(), "kernel": pipeline.kernel_name}
            recording.write_trace_file(folder, used)
            quoted_folder = shlex.quote(str(folder))
            logger.info("Trace: %s  (python -m wan.power report %s)", folder, quoted_folder)

    def _write_video(self, latents: Tensor | LatentBlocks, meter: VideoMeter | None) -> None:
        """Decodes the latents; on the main rank writes the video and its record, logs a summary.

        latents: Those of the video, or blocks that are denoised while earlier ones are decoded.
        """
        from wan.modules.vae.video_vae import LatentBlocks

        release_other_ranks = partial(self._release_other_ranks, meter)
        if not self._is_main:
            self._pipeline.decode_to_sink(latents, NullSink(), release_other_ranks)
            return
        output, comment = self.run.output, make_mp4_comment(self.run)
        file = video_writer.open_mp4_encoder(output, self._move_to_final_name, comment)
        with (
            report_saved_latents(self.latents_file),
            self._pipeline.stage_timer("writing"),
            file as encoder,
        ):
            sinks = [encoder] if self._stream is None else [self._stream, encoder]
            self._pipeline.decode_to_sink(latents, JointSink(sinks), release_other_ranks)
            self._finish_stream()
            power = None if meter is None else meter.stop()
        if isinstance(latents, LatentBlocks) and self.run.output.save_latents:
            self.save_denoised_latents(latents.join())
        if self.run.decode_latents is None:
            self._move_or_remove_latents()
            if self.run.params.num_frame_per_block is not None:
                self._clips.remove_clips()
                self._num_stored_clips = 0
        self._finish_run(encoder.size, power)

    def _release_other_ranks(self, meter: VideoMeter | None) -> None:
        """Releases the ranks other than the main one; called on every rank."""
        if self._groups is not None and meter is not None:
            meter.gather_measurements(self._groups)
        self.is_main_only = True
        if self._on_main_only is not None:
            self._on_main_only()

    def _generate_clips(self, meter: VideoMeter | None) -> None:
        """Generates the clips that are not stored yet, stores each, and writes the video."""
        from wan.pipeline import clips

        run, params = self.run, self.run.params
        num_done, state = self._finished_clips
        files = self._clips
        self._begin_stream_of_clips(num_done)
        inputs = replace(self.make_inputs(), num_clips_done=num_done, clip_state=state)
        clip_iterator = clips.generate_clips(self._pipeline, params, inputs)
        for index in range(num_done, files.num_clips):
            record = self._record_trace() if index == num_done else nullcontext()
            with record, self._saving_latents_of_errors():
                clip = next(clip_iterator)
            if self._is_main:
                self._write_clip(index, clip)
            self._num_stored_clips += 1
            del clip  # before the next one is made
        self._release_other_ranks(meter)
        if not self._is_main:
            return
        self._finish_stream()
        with self._writing():
            files.write_video(self._finish_file, make_mp4_comment(self.run))
        if not run.output.save_latents:
            files.remove_clips()
        width, height = params.video_size
        power = None if meter is None else meter.stop()
        self._finish_run((params.num_frames, height, width), power)

    def _begin_stream_of_clips(self, num_stored: int) -> None:
        """Begins the stream, if any, with the frames of the clips of an earlier run."""
        if self._stream is None:
            return
        self._stream.begin((self.run.params.num_frames, *self.run.params.video_size[::-1]))
        for frame in self._clips.iter_frames(num_stored):
            self._stream.write_rgb_frame(frame)

    def _write_clip(self, index: int, clip: Clip) -> None:
        """Stores a clip, and streams its frames."""
        with self._writing():
            if self._stream is not None and clip.frames is not None:
                self._stream.write_frames(clip.frames)
            self._clips.write_clip(index, clip)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Measures the time of writing, and gives its errors a remedy."""
        path = self.run.output.save_file
        with self._pipeline.stage_timer("writing"), video_writer.wrap_write_errors(path):
            yield

    def _finish_file(self, temporary: Path) -> None:
        """Adds the audio, if any, to a complete mp4, and moves it to its final name."""
        if self.run.inputs.soundtrack is not None:
            self._add_audio(temporary, *self.run.inputs.soundtrack)
        self._move_to_final_name(temporary)

    def _add_audio(self, silent: Path, source: Path, start_seconds: float) -> None:
        """Adds audio to a finished mp4; logs an error if that fails."""
        audio_file = silent.with_name(f"{silent.stem}.sound.mp4")
        try:
            seconds = 0.0
            if self.run.inputs.pads_soundtrack:
                seconds = count_stored_frames(silent) / self.run.output.fps
            audio.add_audio(silent, source, audio_file, start_seconds, seconds)
            audio_file.replace(silent)
        except OSError as error:
            audio_file.unlink(missing_ok=True)
            logger.error("The video has no sound (%s).", error.strerror or error)

    def _move_to_final_name(self, temporary: Path) -> None:
        """Renames the complete video.

        A file that appeared under its name during the run is kept; the video then gets a free name,
        and `run` is updated.
        """
        path = self.run.output.save_file
        identity = self._old_file_identity
        if identity is not None and _read_file_identity(path) == identity:
            replace_output(temporary, path, VIDEO_KIND)
            return
        name = move_to_free_name(temporary, path)
        if name != path:
            logger.warning("%s appeared during this run and is kept.", path)
            self.run = self.run.with_save_file(name)

    def _finish_run(self, size: tuple[int, int, int], power: PowerMeasurement | None) -> None:
        """Writes the record of the complete video, logs a summary, and removes stale files."""
        record_path = write_record(self.run, self._pipeline, size, power)
        log_video_summary(self.run, self._pipeline, record_path, power)
        if self._preview_path is not None and self._on_preview is None:
            remove_output(self._preview_path, PREVIEW_KIND)
        remove_stale_files(self.run)

    def _move_or_remove_latents(self) -> None:
        """Stores the latents under the video's name with `save_latents`; removes them otherwise."""
        path, output = self.latents_file, self.run.output
        if path is None:
            return
        try:
            if output.save_latents:
                with write_output(output.latents_path, LATENTS_KIND) as temporary:
                    shutil.copyfile(path, temporary)
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.error("The latents are still in %s (%s).", path, error.strerror or error)


class JointSink:
    """A `wan.modules.vae.video_vae.Sink` that passes the frames to several sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def begin(self, size: tuple[int, int, int]) -> None:
        for sink in self._sinks:
            sink.begin(size)

    def write_frames(self, frames_3FHW: Tensor) -> None:
        for sink in self._sinks:
            sink.write_frames(frames_3FHW)


class NullSink:
    """Discards the frames, as a `wan.modules.vae.video_vae.Sink` on ranks that write no video."""

    def begin(self, size: tuple[int, int, int]) -> None: ...

    def write_frames(self, frames_3FHW: Tensor) -> None: ...


def _read_file_identity(path: Path) -> tuple[int, int] | None:
    """Returns the inode and modification time of a file; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
