"""Generate a video with Wan2.2: `python generate.py --help`."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan import log, prompt_extend
from wan.log import Stages, logger
from wan.settings import flags
from wan.settings.errors import InputError
from wan.settings.run import Run, resolve

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from wan.pipeline import Pipeline


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 done, 2 refused, 130 interrupted."""
    log.setup()
    try:
        run = resolve(flags.parse(argv), _make_demo, prompt_extend.check_available)
        for notice in run.notices:
            logger.warning(notice)
        generate(run)
    except InputError as error:
        print(f"generate.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("generate.py: interrupted; no video was written.", file=sys.stderr)
        return 130
    return 0


def generate(run: Run) -> Path:
    """Carry out a resolved run; returns the path of the video it wrote."""
    from wan import build, video

    pipeline = build.pipeline(run.checkpoint, run.execution)
    pipeline.device.reset_peak_memory()
    stages = Stages(pipeline.device.synchronize)
    if run.decode_latents is not None:
        kept: Path | None = run.decode_latents
        latents = video.load_latents(run.decode_latents)
    else:
        image = None if run.image is None else video.read_image(run.image)
        run = _extended(run, image, pipeline, stages)
        logger.info("Prompt: %s", run.request.prompt)
        latents = pipeline.latents(run.request, image=image, stages=stages)
        kept = _save_latents(run, latents)
    with _latents_survive(kept):
        frames = pipeline.decode(latents, stages)
        with stages("writing"):
            video.save_video(frames, run.output.save_file, run.output.fps)
        _save_record(run, pipeline, stages, frames)
    if kept is not None and run.decode_latents is None and not run.output.keep_latents:
        kept.unlink()
    _summary(run, pipeline, stages)
    return run.output.save_file


def _make_demo(task: str, folder: Path) -> None:
    from wan import build

    build.demo_checkpoint(task, folder)


def _extended(run: Run, image: Image | None, pipeline: Pipeline, stages: Stages) -> Run:
    """The run with its prompt extended, if that was asked for; the record repeats the result."""
    if run.extension is None:
        return run
    with stages("prompt extension"):
        prompt = prompt_extend.extend_prompt(
            run.request.prompt,
            task_kind=run.request.preset.kind,
            image=image,
            method=run.extension.method,
            model=run.extension.model,
            target_lang=run.extension.target_lang,
            seed=run.request.seed,
            device=str(pipeline.device.torch_device),
        )
    settings = {**run.settings, "prompt": prompt, "use_prompt_extend": False}
    return replace(run, request=replace(run.request, prompt=prompt), settings=settings)


def _save_latents(run: Run, latents: Tensor) -> Path | None:
    """Put the result of the long part on disk; where that fails, decoding goes on from memory."""
    from wan import video

    try:
        video.save_latents(latents, run.output.latents, run.settings)
    except OSError as error:
        logger.warning("The latents could not be saved (%s); decoding them right away.", error)
        return None
    return run.output.latents


@contextmanager
def _latents_survive(path: Path | None) -> Iterator[None]:
    """When decoding or writing fails, say where the result of the long part is."""
    try:
        yield
    except BaseException:
        if path is None:
            raise
        command = f"python generate.py --decode_latents {shlex.quote(str(path))}"
        logger.error("The denoised latents are safe in %s; continue with: %s", path, command)
        raise


def _save_record(run: Run, pipeline: Pipeline, stages: Stages, frames_3FHW: Tensor) -> None:
    from wan import video

    _, count, height, width = frames_3FHW.shape
    record = {
        "settings": run.settings,
        "seed": run.request.seed,
        "video": {"frames": count, "width": width, "height": height, "fps": run.output.fps},
        "device": pipeline.device.name(),
        "noise_device": run.request.noise_device,
        "seconds": {name: round(seconds, 3) for name, seconds in stages.seconds.items()},
        "peak_memory_bytes": {
            "device": pipeline.device.peak_memory(),
            "host": log.peak_host_memory(),
        },
        "versions": _versions(),
    }
    with video.written_whole(run.output.record) as temporary:
        temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    import wan

    names = ("torch", "diffusers", "transformers", "safetensors", "imageio-ffmpeg", "ftfy")
    return {
        "wan": wan.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def _summary(run: Run, pipeline: Pipeline, stages: Stages) -> None:
    device = pipeline.device.peak_memory()
    parts: list[Any] = [f"{name} {seconds:.1f} s" for name, seconds in stages.seconds.items()]
    memory = f"host {log.peak_host_memory() / 2**30:.2f} GiB"
    if device is not None:
        memory = f"device {device / 2**30:.2f} GiB, {memory}"
    logger.info("Seconds: %s. Peak memory: %s.", ", ".join(parts), memory)
    logger.info("Seed %d, noise drawn on the %s.", run.request.seed, run.request.noise_device)
    logger.info("Video: %s  Record: %s", run.output.save_file, run.output.record)


if __name__ == "__main__":
    sys.exit(main())
