"""Generates one video of the command line from its resolved run."""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import wan
from wan import host, log, trace
from wan.checkpoint import lora
from wan.cli.clip_files import FOUR_DIGITS, ClipFiles
from wan.cli.output import latents_survive
from wan.log import logger
from wan.output_files import (
    LATENTS,
    RECORD,
    VIDEO,
    is_left_over,
    place_new,
    process_name,
    remove_output,
    replace_output,
    write_output,
)
from wan.pipeline import media, video
from wan.run import Run
from wan.settings import noise_schedule
from wan.settings.command import Output
from wan.settings.errors import NotFiniteError
from wan.settings.sound import NUM_DROPPED_FRAMES, S2V_FPS

if TYPE_CHECKING:
    from torch import Tensor

    from wan.distributed.mesh import ParallelGroups
    from wan.evidence.meter import PowerMeasurement, VideoMeter
    from wan.pipeline.pipeline import Inputs, Pipeline


class Video:
    """One video of the command line: denoises, saves latents, decodes, writes and logs a summary.

    Attributes:
        run: The resolved run of the video.
        latents_file: Path of the denoised latents, once they are on disk.
        is_main_only: Whether only the main rank still works on the video.
    """

    def __init__(
        self,
        run: Run,
        pipeline: Pipeline,
        team: ParallelGroups | None,
        part: Callable[[], None] | None = None,
    ) -> None:
        """Prepares a video on every rank; computes nothing.

        Args:
            groups: The parallel groups; None for one process.
            on_main_only: Called on every rank when only the main rank still works on the video.
        """
        self.run, self._pipeline, self._team, self._part = run, pipeline, team, part
        self.latents_file, self.alone = run.decode_latents, False
        self._is_main = team is None or team.is_main
        self._replaced = _identity(run.output.save_file)

    def make(self, denoise: Callable[[], Tensor] | None = None) -> None:
        """Generates the video and its record.

        Args:
            denoise: Returns the latents, after passing them to `keep_latents`. By default they are
                computed here, or read from `decode_latents`.
        """
        run, pipeline = self.run, self._pipeline
        meter: AbstractContextManager[VideoMeter | None] = nullcontext()
        if run.power:
            from wan.evidence.meter import VideoMeter

            whole = run.decode_latents is None
            meter = VideoMeter(
                pipeline.device, "text to decoded video" if whole else "decoding only"
            )
        if run.decode_latents is None:
            logger.info("Prompt: %s", log.format_prompt(run.request.prompt))
        with meter as metered:
            if run.request.chain is not None:
                self._write_chain(metered)
                return
            if run.request.has_clips:
                self._write_clips(metered)
                return
            if run.decode_latents is not None:
                latents = video.load_latents(run.decode_latents)
            else:
                with self._recorded():
                    latents = self._denoised() if denoise is None else denoise()
            self._write(latents, metered)

    def inputs(self) -> Inputs:
        """Returns the pipeline's inputs; on the main rank with a callback that saves each step."""
        inputs = self.run.inputs()
        if self.run.output.save_latents == "steps" and self._is_main:
            return replace(inputs, callback_on_step_end=self._keep_step)
        return inputs

    def _keep_step(self, done: int, latents: Tensor) -> None:
        """Writes the latents after a step; logs an error if that fails."""
        folder = self.run.output.steps_dir
        try:
            folder.mkdir(exist_ok=True)
            for left in folder.glob(FOUR_DIGITS) if done == 1 else ():
                remove_output(left, LATENTS)
            video.save_latents(latents, folder / f"{done:04}.safetensors", self.run.settings)
        except OSError as error:
            logger.error(
                "The latents after step %d are not saved (%s).", done, error.strerror or error
            )

    def extend_prompt(self) -> None:
        """Extends the prompt on the main rank, if enabled, and broadcasts it."""
        run, prompt = self.run, self.run.request.prompt
        if run.extension is None or run.decode_latents is not None:
            return
        with self._pipeline.stages("prompt extension"):
            if self._is_main:
                kind, device = run.request.preset.kind, str(self._pipeline.device.torch_device)
                from wan.cli import extend_prompt

                given = (prompt, kind, run.image, run.request.base_seed, device)
                prompt = extend_prompt.extended(run.extension, *given)
            if self._team is not None:
                prompt = self._team.broadcast_object_from_rank0(prompt)
        self.run = run.with_prompt(prompt)

    def keep(self, latents: Tensor) -> None:
        """Writes the latents to disk on the main rank, before decoding can fail."""
        if not self._is_main:
            return
        self.latents_file = _first_written(
            _unfinished(self.run.output, ".latents.safetensors"),
            lambda path: video.save_latents(latents, path, self.run.settings),
            "denoised latents",
        )
        if not bool(latents.isfinite().all()):
            logger.error("The broken latents are kept in %s.", self.latents_file)
        elif self.latents_file is None:
            logger.error("Decoding goes on from memory: if it fails, the run is lost.")

    def _denoised(self) -> Tensor:
        run = self.run
        try:
            latents = self._pipeline.generate_latents(run.request, self.inputs())
        except NotFiniteError as error:
            self.keep(error.latents)
            raise
        self.keep(latents)
        return latents

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Records the spans for `--trace` and `--log_level debug`."""
        run, pipeline, folder = self.run, self._pipeline, self.run.output.trace
        if folder is None and not run.verbose:
            yield
            return
        from wan.evidence.recording import TraceRecording, make_exchange_plan, select_nth_steps

        experts = noise_schedule.make_noise_schedule(run.request).experts
        steps = run.output.trace_steps or select_nth_steps(experts, 1) if folder else ()
        rank = 0 if self._team is None else self._team.rank
        recording = TraceRecording(
            make_exchange_plan(
                run.setup, run.request, steps, pipeline.returns_lse, pipeline.device.type, rank
            ),
            pipeline.device,
            select_nth_steps(experts, 0) if run.verbose else (),
            None if folder is None else self._team,
            folder if run.output.trace_kernels else None,
        )
        with trace.recording(recording.recorder):
            yield
        if folder is not None:
            used = {"device": pipeline.device.name(), "kernel": pipeline.kernel}
            recording.write_trace_file(folder, used)
            shown = shlex.quote(str(folder))
            logger.info("Trace: %s  (python -m wan.power report %s)", folder, shown)

    def _write(self, latents: Tensor, meter: VideoMeter | None) -> None:
        """Decodes the latents; on the main rank writes the video and its record, logs a summary."""
        part = partial(self._part_ways, meter)
        if not self._is_main:
            self._pipeline.stream(latents, NoFrames(), part)
            return
        file = video.open_mp4_encoder(self.run.output, self._place, self._comment())
        with latents_survive(self.latents_file), self._pipeline.stages("writing"), file as encoder:
            self._pipeline.stream(latents, encoder, part)
            power = None if meter is None else meter.stop()
        if self.run.decode_latents is None:
            self._put_latents_away()
        self._sum_up(self._save_record(encoder.size, power), power)
        self._remove_left_over()

    def _part_ways(self, meter: VideoMeter | None) -> None:
        """Releases the ranks other than the main one; called on every rank."""
        if self._team is not None and meter is not None:
            meter.gather_measurements(self._team)
        self.alone = True
        if self._part is not None:
            self._part()

    def _comment(self) -> str:
        """Returns the mp4's comment, JSON of the seed and some settings."""
        about = {
            "wan": wan.__version__,
            "task": self.run.request.preset.task,
            "seed": self.run.request.base_seed,
        }
        settings = self.run.settings
        about |= {name: settings[name] for name in _IN_THE_VIDEO if name in settings}
        return json.dumps(about, ensure_ascii=False, default=str)

    def _write_chain(self, meter: VideoMeter | None) -> None:
        """Generates the clips that are not stored yet, writes each to a file, and joins all."""
        run, files = self.run, ClipFiles(self.run)
        request, count = run.request, run.request.num_clip or 0
        done = files.count_done() if self._is_main else 0
        end = files.read_state(done) if self._is_main else None
        if self._team is not None:
            done, end = self._team.broadcast_object_from_rank0((done, end))
        if done:
            logger.info("%d of %d clips are in %s.", done, count, files.folder)
        made = self._pipeline.generate_clips(
            request, replace(run.inputs(), num_clips_done=done, clip_state=end)
        )
        for index in range(done, count):
            with self._recorded() if index == done else nullcontext():
                try:
                    clip = next(made)
                except BaseException as error:
                    if isinstance(error, NotFiniteError):
                        self.keep(error.latents)
                    if self._is_main and index:
                        logger.error(
                            "%d of %d clips are kept in %s; the same command with --base_seed %d "
                            "continues after them.",
                            *(index, count, files.folder, request.base_seed),
                        )
                    raise
            if self._is_main:
                with (
                    self._pipeline.stages("writing"),
                    video.wrap_write_errors(run.output.save_file),
                ):
                    files.write(index, clip)
            del clip  # before the next one is made
        self._part_ways(meter)
        if not self._is_main:
            return
        whole = write_output(run.output.save_file, VIDEO, self._place)
        with (
            self._pipeline.stages("writing"),
            video.wrap_write_errors(run.output.save_file),
            whole as path,
        ):
            files.join(path, self._comment())
        if not run.output.save_latents:
            files.remove()
        width, height = request.video_size
        frames = sum(map(request.count_clip_frames, range(count)))
        power = None if meter is None else meter.stop()
        self._sum_up(self._save_record((frames, height, width), power), power)
        self._remove_left_over()

    def _write_clips(self, meter: VideoMeter | None) -> None:
        """Generates a video in clips; the main rank writes each clip when it is finished."""
        run, pipeline = self.run, self._pipeline
        request, made = run.request, pipeline.generate_clips(run.request, run.inputs())
        count = request.num_clip or 0

        def clips() -> Iterator[Tensor | None]:
            for index in range(count):
                with self._recorded() if index == 0 else nullcontext():
                    try:
                        clip = next(made)
                    except NotFiniteError as error:
                        self.keep(error.latents)
                        raise
                yield clip.frames
                del clip  # before the next one is made
            self._part_ways(meter)

        if not self._is_main:
            for _ in clips():
                pass
            return
        width, height = request.video_size
        frames = sum(map(request.count_clip_frames, range(count)))
        file = video.open_mp4_encoder(run.output, self._place_with_sound, self._comment())
        with pipeline.stages("writing"), file as encoder:
            encoder.begin((frames, height, width))
            done = 0
            try:
                for clip in clips():
                    assert clip is not None, "the main rank has the frames"
                    encoder.write_frames(clip)
                    del clip
                    done += 1
            except BaseException:
                if 0 < done < count:
                    self._keep_clips(encoder, done, count)
                raise
            power = None if meter is None else meter.stop()
        self._sum_up(self._save_record(encoder.size, power), power)
        self._remove_left_over()

    def _keep_clips(self, encoder: video.Mp4Encoder, done: int, count: int) -> None:
        """Saves the clips before a failure to a separate file, with audio."""
        path = self.run.output.save_file
        _, height, width = encoder.size
        frames = sum(map(self.run.request.count_clip_frames, range(done)))
        encoder.size = (frames, height, width)
        try:
            encoder.finish()
            spoken = self._with_sound(encoder.path)
            name = place_new(spoken, path.with_stem(f"{path.stem}.clips-1-{done}"))
        except OSError as error:
            logger.error("The clips so far could not be kept (%s).", error.strerror or error)
        else:
            logger.error("The video up to clip %d of %d is kept in %s.", done, count, name)

    def _place_with_sound(self, temporary: Path) -> None:
        self._place(self._with_sound(temporary))

    def _with_sound(self, silent: Path) -> Path:
        """Adds the audio, if any, to a finished mp4; logs an error if that fails."""
        run = self.run
        if run.sound is None:
            return silent
        cut = NUM_DROPPED_FRAMES / S2V_FPS if run.settings.get("audio_sync") else 0.0
        spoken = silent.with_name(f"{silent.stem}.sound.mp4")
        try:
            media.add_audio(silent, run.sound.path, spoken, cut)
            spoken.replace(silent)
        except OSError as error:
            spoken.unlink(missing_ok=True)
            logger.error("The video has no sound (%s).", error.strerror or error)
        return silent

    def _place(self, temporary: Path) -> None:
        """Renames the complete video; keeps a file that appeared there during the run."""
        path = self.run.output.save_file
        if self._replaced is not None and _identity(path) == self._replaced:
            replace_output(temporary, path, VIDEO)
            return
        name = place_new(temporary, path)
        if name != path:
            logger.warning("%s appeared during this run and is kept.", path)
            self.run = self.run.saved_to(name)

    def _remove_left_over(self) -> None:
        """Removes temporary files of killed runs of this video from its folder.

        Hidden files are recognised by the name of an ended process alone, since they may be
        incomplete; latents also by their content.
        """
        path = self.run.output.save_file.absolute()
        stem, owner = re.escape(path.stem), r"([\w]+-\d+)"
        hidden = re.compile(rf"\.{owner}-{stem}\.((sound\.)?mp4|json|\S+\.latents\.safetensors)")
        latents = re.compile(rf"{stem}\.{owner}\.latents\.safetensors")
        for found in path.parent.iterdir():
            name = hidden.fullmatch(found.name)
            if name is not None and is_left_over(name[1]) and found.is_file():
                found.unlink(missing_ok=True)
            else:
                name = latents.fullmatch(found.name)
                if name is None or not is_left_over(name[1]) or not remove_output(found, LATENTS):
                    continue
            logger.info("Removed %s, which a run that was killed had left.", found)

    def _put_latents_away(self) -> None:
        """Stores the latents under the video's name with `save_latents`; removes them otherwise."""
        path, output = self.latents_file, self.run.output
        if path is None:
            return
        try:
            if output.save_latents:
                with write_output(output.latents_path, LATENTS) as temporary:
                    shutil.copyfile(path, temporary)
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.error("The latents stay in %s (%s).", path, error.strerror or error)

    def _save_record(
        self, size: tuple[int, int, int], power: PowerMeasurement | None
    ) -> Path | None:
        """Writes the JSON record, to the temporary folder if the video's folder is not writable."""
        run, pipeline = self.run, self._pipeline
        execution, device = run.setup.execution, pipeline.device
        count, height, width = size
        precision, packages = (
            execution.get_precision(device.type),
            run.setup.attention.required_packages,
        )
        stored_bf16 = execution.convert_model_dtype  # determines the DiT's dtype
        record = {
            "settings": run.settings | ({} if stored_bf16 else {"precision": precision}),
            "seed": run.request.base_seed,
            "inputs": [
                {"setting": one.setting, "file": str(one.path.absolute()), "sha256": one.sha256}
                for one in run.input_files
            ],
            "video": {"frames": count, "width": width, "height": height, "fps": run.output.fps},
            "used": {
                "device": device.name(),
                "precision": precision,
                "dit_precision": execution.get_dit_precision(device.type),
                "kernel": pipeline.kernel,
                "vae": pipeline.vae_runner.last_method,
                **asdict(run.setup.parallel),
            },
            **({"boundary": boundary} if (boundary := run.boundary) is not None else {}),
            **({"lora": lora.make_lora_record(run.setup.loras)} if run.setup.loras else {}),
            **({"step_cache": found} if (found := pipeline.step_cache.make_record()) else {}),
            "seconds": {name: round(s, 3) for name, s in pipeline.stages.seconds.items()},
            "peak_memory_bytes": {"device": device.peak_memory(), **host.peak_memory().record()},
            **({"power": power.to_record()} if power is not None else {}),
            "versions": {"wan": wan.__version__} | log.versions(device.type, packages),
            "run": {
                "date": datetime.now().astimezone().isoformat(timespec="seconds"),
                "machine": platform.node(),
                "system": platform.platform(),
                "command": shlex.join(sys.argv),
                "commit": log.commit(),
            },
        }
        text = json.dumps(record, indent=1, ensure_ascii=False)

        def write(path: Path) -> None:
            with write_output(path, RECORD) as temporary:
                temporary.write_text(text, encoding="utf-8")

        paths = (run.output.record_path, *_unfinished(run.output, ".json"))
        return _first_written(paths, write, "record")

    def _sum_up(self, record: Path | None, power: PowerMeasurement | None) -> None:
        run, pipeline = self.run, self._pipeline
        memory = host.peak_memory().line()
        if (peak := pipeline.device.peak_memory()) is not None:
            memory = f"device {peak / 2**30:.2f} GiB, {memory}"
        stages = [f"{name} {seconds:.1f} s" for name, seconds in pipeline.stages.seconds.items()]
        logger.info("Seconds: %s. Peak memory: %s.", ", ".join(stages), memory)
        for line in (None if power is None else power.summary(), pipeline.step_cache.summarize()):
            if line is not None:
                logger.info("%s", line)
        request = run.request
        logger.info("Seed %d, noise drawn on the %s.", request.base_seed, request.noise_device)
        logger.info("Video: %s  Record: %s", run.output.save_file, record or "none")


_IN_THE_VIDEO = ("prompt", "size", "frame_num", "sample_solver", "sample_steps", "sample_shift")
"""Settings in the comment of an mp4; the record has all settings."""


class NoFrames:
    """Implements `wan.pipeline.vae.Sink` on ranks that receive no frames."""

    def begin(self, size: tuple[int, int, int]) -> None: ...

    def put(self, frames_3FHW: Tensor) -> None: ...


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns the inode and modification time of a file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _unfinished(output: Output, suffix: str) -> tuple[Path, Path]:
    """Returns paths unique to this run, in the video's folder and in the temporary folder."""
    beside = output.save_file.with_suffix(f".{process_name()}{suffix}")
    return beside, Path(tempfile.gettempdir()) / beside.name


def _first_written(paths: Iterable[Path], write: Callable[[Path], None], what: str) -> Path | None:
    """Writes to the first writable path and returns it; logs failures; None if all fail."""
    for path in paths:
        try:
            write(path)
        except OSError as error:
            logger.error(
                "The %s could not be saved to %s (%s).", what, path, error.strerror or error
            )
        else:
            return path
    return None
