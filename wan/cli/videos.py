"""The story of a video, once it is known what is to be made: denoise, decode, save, sum up."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import wan
from wan import host, log, trace
from wan.checkpoint import lora
from wan.checkpoint.files import whole_file
from wan.cli import extend_prompt
from wan.cli.output import latents_survive
from wan.log import logger
from wan.pipeline import video
from wan.power.recording import Recording, nth_steps, plan_of
from wan.run import Run
from wan.settings import timesteps

if TYPE_CHECKING:
    from torch import Tensor

    from wan.device import Device
    from wan.distributed.mesh import Team
    from wan.pipeline.pipeline import Pipeline
    from wan.power.measured import Measured
    from wan.power.video import VideoMeter

Part = Callable[[], None]
"""Called when the other ranks are not needed any more."""


def _meter(run: Run, device: Device) -> AbstractContextManager[VideoMeter | None]:
    if not run.power:
        return nullcontext()
    from wan.power.video import VideoMeter

    whole = run.decode_latents is None
    return VideoMeter(device, "text to decoded video" if whole else "decoding only")


def make_video(run: Run, pipeline: Pipeline, team: Team | None, part: Part) -> None:
    """One video with its record."""
    kept = run.decode_latents
    pipeline.device.reset_peak_memory()
    if kept is None:
        run = _extended(run, pipeline, team)
        logger.info("Prompt: %s", run.request.prompt)
    with _meter(run, pipeline.device) as meter:
        if kept is not None:
            latents = video.load_latents(kept)
        else:
            with _recorded(run, pipeline, team):
                latents = pipeline.latents(run.request, run.image, last_image=run.last_image)
            kept = save_latents(run, latents, team)
        write_video(run, pipeline, team, part, (latents, kept), meter)


def write_video(
    run: Run,
    pipeline: Pipeline,
    team: Team | None,
    part: Part,
    denoised: tuple[Tensor, Path | None],
    meter: VideoMeter | None = None,
) -> None:
    """Decode and write a video with its record. denoised: latents, and the file they are in."""
    latents, kept = denoised

    def measured_part() -> None:
        if team is not None and meter is not None:
            meter.gather(team)
        part()

    if team is not None and not team.is_main:
        pipeline.stream(latents, Nowhere(), measured_part)
        return
    file = video.video_file(run.output.save_file, run.output.fps)
    with latents_survive(kept), pipeline.stages("writing"), file as encoder:
        pipeline.stream(latents, encoder, measured_part)
        power = None if meter is None else meter.stop()
    if kept is not None and run.decode_latents is None:
        _put_away(run, kept)
    record = _save_record(run, pipeline, encoder.size, power)
    _summary(run, pipeline, record, power)


class Nowhere:
    """Implements `wan.pipeline.vae.Sink` on ranks that get no frames."""

    def begin(self, size: tuple[int, int, int]) -> None: ...

    def put(self, frames_3FHW: Tensor) -> None: ...


def _extended(run: Run, pipeline: Pipeline, team: Team | None) -> Run:
    """The run with its prompt extended, if that was asked for; the record repeats the result."""
    if run.extension is None:
        return run
    request, prompt = run.request, run.request.prompt
    with pipeline.stages("prompt extension"):
        if team is None or team.is_main:
            kind, device = request.preset.kind, str(pipeline.device.torch_device)
            prompt = extend_prompt.extended(
                run.extension, prompt, kind, run.image, request.base_seed, device
            )
        if team is not None:
            prompt = team.value_from_main(prompt)
    return run.with_prompt(prompt)


@contextmanager
def _recorded(run: Run, pipeline: Pipeline, team: Team | None) -> Iterator[None]:
    """What --trace and --log_level debug ask for."""
    folder, verbose = run.output.trace, run.verbose
    if folder is None and not verbose:
        yield
        return
    experts = timesteps.schedule(run.request).experts
    steps = run.output.trace_steps or nth_steps(experts, 1) if folder else ()
    rank = 0 if team is None else team.rank
    plan = plan_of(run.setup, run.request, steps, pipeline.merges, rank)
    device = pipeline.device
    printed = nth_steps(experts, 0) if verbose else ()
    recording = Recording(
        plan,
        device,
        printed,
        None if folder is None else team,
        folder if run.output.trace_kernels else None,
    )
    with trace.recording(recording.recorder):
        yield
    if folder is not None:
        recording.write(folder, {"device": device.name(), "kernel": pipeline.kernel})
        logger.info("Trace: %s  (python -m wan.power report %s)", folder, shlex.quote(str(folder)))


def save_latents(run: Run, latents: Tensor, team: Team | None) -> Path | None:
    """The main rank puts the result of the long part on disk before anything else can fail."""
    if team is not None and not team.is_main:
        return None
    if not bool(latents.isfinite().all()):
        logger.warning("The latents hold NaN or infinity, so the video will be broken.")
    path = _first_written(
        run.output.unfinished(".latents.safetensors"),
        lambda path: video.save_latents(latents, path, run.settings),
        "denoised latents",
    )
    if path is None:
        logger.error("Decoding goes on from memory: if it fails, the run is lost.")
    return path


def _put_away(run: Run, latents: Path) -> None:
    """Keep the latents under the video's name if that was asked for."""
    if not run.output.save_latents:
        latents.unlink(missing_ok=True)
        return
    try:
        with whole_file(run.output.latents) as temporary:
            shutil.copyfile(latents, temporary)
        latents.unlink(missing_ok=True)
    except OSError as error:
        logger.error("The latents stay in %s (%s).", latents, error.strerror or error)


def _save_record(
    run: Run, pipeline: Pipeline, size: tuple[int, int, int], power: Measured | None
) -> Path | None:
    """The JSON record; where it cannot be written beside the video, in the temporary folder."""
    execution, device = run.setup.execution, pipeline.device
    count, height, width = size
    precision, packages = execution.precision_on(device.type), run.setup.attention.packages
    stored_bf16 = execution.convert_model_dtype  # says itself what the DiT computes in
    record = {
        "settings": run.settings | ({} if stored_bf16 else {"precision": precision}),
        "seed": run.request.base_seed,
        "video": {"frames": count, "width": width, "height": height, "fps": run.output.fps},
        "used": {
            "device": device.name(),
            "precision": precision,
            "dit_precision": execution.dit_precision_on(device.type),
            "kernel": pipeline.kernel,
            "vae": pipeline.codec.used,
            **asdict(run.setup.parallel),
        },
        **({"lora": lora.record(run.setup.loras)} if run.setup.loras else {}),
        **({"step_cache": found} if (found := pipeline.caches.record()) else {}),
        "seconds": {name: round(s, 3) for name, s in pipeline.stages.seconds.items()},
        "peak_memory_bytes": {"device": device.peak_memory(), "host": host.peak_memory()},
        **({"power": power.record()} if power is not None else {}),
        "versions": {"wan": wan.__version__} | log.versions(device.type, packages),
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)

    def write(path: Path) -> None:
        with whole_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    places = (run.output.record, *run.output.unfinished(".json"))
    return _first_written(places, write, "record")


def _first_written(paths: Iterable[Path], write: Callable[[Path], None], what: str) -> Path | None:
    """The first of these paths that could be written; None, after saying why, if none could."""
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


def _summary(run: Run, pipeline: Pipeline, record: Path | None, power: Measured | None) -> None:
    device = pipeline.device.peak_memory()
    parts = [f"{name} {seconds:.1f} s" for name, seconds in pipeline.stages.seconds.items()]
    memory = f"host {host.peak_memory() / 2**30:.2f} GiB"
    if device is not None:
        memory = f"device {device / 2**30:.2f} GiB, {memory}"
    logger.info("Seconds: %s. Peak memory: %s.", ", ".join(parts), memory)
    if power is not None:
        logger.info("%s", power.line())
    skipped = pipeline.caches.summary()
    if skipped is not None:
        logger.info("%s", skipped)
    logger.info("Seed %d, noise drawn on the %s.", run.request.base_seed, run.request.noise_device)
    logger.info("Video: %s  Record: %s", run.output.save_file, record or "none")
