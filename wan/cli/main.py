"""Generate a video with Wan2.2: `python generate.py --help`."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wan
from wan import log
from wan.checkpoint.files import fingerprint
from wan.cli import env, failures, flags
from wan.cli import extend_prompt as prompt_extend
from wan.cli.resolve import Run, resolve
from wan.log import logger
from wan.settings.errors import InputError, exit_code

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from wan.distributed.launch import Once, Prepared
    from wan.distributed.mesh import Team
    from wan.pipeline.pipeline import Pipeline

_OWN = ("ckpt_dir", "quant_dit_path", "save_file", "image", "base_seed")  # may differ between ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Exit codes: 0 done, 1 failed, 2 refused, 130 interrupted, 143 terminated.
    """
    speaks = True
    try:
        with failures.terminable():
            speaks = env.rank() == 0
            log.setup(speaks)
            if "--plan" in (sys.argv if argv is None else argv):
                return _plan(argv)
            if env.world_size() > 1:
                return _launch(argv)
            generate(_resolved(argv, _alone))
    except BaseException as error:
        sentence = failures.describe(error)
        if sentence is None:
            raise
        if speaks or isinstance(error, InputError):
            failures.say(sentence)
        return exit_code(error)
    return 0


def _launch(argv: Sequence[str] | None) -> int:
    """One rank of several."""
    _load_torch()
    from wan.distributed import launch

    return launch.run(lambda once: _prepared(argv, once), generate, failures.describe, failures.say)


def _prepared(argv: Sequence[str] | None, once: Once) -> Prepared[Run]:
    from wan import device as devices
    from wan.distributed.launch import Prepared
    from wan.settings import devices as on_device

    run = _resolved(argv, once)
    device = devices.resolve(run.execution.device, env.local_rank())
    on_device.check(
        run.execution,
        run.attention,
        run.quantised,
        run.checkpoint.head_dim,
        device.type,
        device.chip,
    )
    p = run.parallel
    return Prepared(
        seed=run.request.seed,
        seeded=partial(_seeded, run),
        device=device,
        sizes=(p.cfg_size, p.ring_size, p.ulysses_size),
        timeout=timedelta(minutes=p.dist_timeout),
        facts=_facts(run, device.type),
    )


def _seeded(run: Run, seed: int) -> Run:
    request = replace(run.request, seed=seed)
    return replace(run, request=request, settings=run.settings | {"base_seed": seed})


def _facts(run: Run, device: str) -> dict[str, Any]:
    """What has to be equal on all ranks, under the names a user knows."""
    settings = run.settings | asdict(run.parallel)
    quantised = None if run.quantised is None else run.quantised.files()
    return {
        **{f"--{name}": value for name, value in settings.items() if name not in _OWN},
        "--quant_alltoall": run.attention.quant_alltoall,
        "--fa_freq_cap": run.attention.freq_cap,
        "--fa_freq_restore": run.attention.freq_restore,
        "the content of --quant_dit_path": quantised and fingerprint(quantised),
        "the video's size": run.request.video_size,
        "the device": device,
        "the checkpoint's content": fingerprint(run.checkpoint.files()),
        "the version of wan": wan.__version__,
    }


def _resolved(argv: Sequence[str] | None, once: Once) -> Run:
    with _paths_refused():
        return resolve(flags.parse(argv), partial(_make_demo, once), prompt_extend.check_available)


def _alone(make: Callable[[], None]) -> None:
    make()


def _plan(argv: Sequence[str] | None) -> int:
    """Say what a run would take; under torchrun the main rank speaks for all."""
    from wan.cli import planned
    from wan.planner import report as plan_report
    from wan.planner.planner import Planner

    if env.rank() > 0:
        return 0
    with _paths_refused():
        planner = Planner(planned.resolve(flags.parse(argv)))
    print(*planner.planned.notices, *plan_report.lines(planner), sep="\n")
    print(plan_report.check(planner))
    return 0


@contextmanager
def _paths_refused() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a path that the system itself refuses: too long, no permission, ...
        path = error.filename or "A path"
        raise InputError(f"{path} cannot be used ({error.strerror}); give another one.") from error


def generate(run: Run, team: Team | None = None) -> None:
    """Carry out a resolved run. Of a team, the main rank decodes and writes the video."""
    _load_torch()
    from wan.pipeline import build, video

    for notice in run.notices:
        logger.warning(notice)
    pipeline = build.pipeline(
        run.checkpoint,
        run.execution,
        parallel=run.parallel,
        attention=run.attention,
        quantised=run.quantised,
        team=team,
    )
    pipeline.device.reset_peak_memory()
    kept: Path | None
    if run.decode_latents is not None:
        latents, kept = video.load_latents(run.decode_latents), run.decode_latents
    else:
        image = None if run.image is None else video.read_image(run.image)
        run = _extended(run, image, pipeline, team)
        logger.info("Prompt: %s", run.request.prompt)
        latents = pipeline.latents(run.request, image=image)
        if team is not None:
            team.close()
            if not team.is_main:
                return
        kept = _save_latents(run, latents)
    with _latents_survive(kept):
        frames = pipeline.decode(latents)
        with pipeline.stages("writing"):
            video.save_video(frames, run.output.save_file, run.output.fps)
        _save_record(run, pipeline, frames)
    if kept is not None and run.decode_latents is None:
        if run.output.keep_latents:
            shutil.move(kept, run.output.latents)
        else:
            kept.unlink(missing_ok=True)
    _summary(run, pipeline)


def _load_torch() -> None:
    """torch loads torch-npu where that is installed, and fails where CANN then is not."""
    try:
        import torch  # noqa: F401
    except RuntimeError as error:
        raise InputError(
            f"PyTorch does not load ({str(error).splitlines()[0]}); if torch-npu is installed, "
            "install CANN and source its set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run "
            "without NPUs."
        ) from error


def _make_demo(once: Once, task: str, folder: Path) -> None:
    """One rank per machine makes the demo checkpoint; the others wait for it."""
    _load_torch()
    from wan.pipeline import build

    once(lambda: build.demo_checkpoint(task, folder))


def _extended(run: Run, image: Image | None, pipeline: Pipeline, team: Team | None) -> Run:
    """The run with its prompt extended, if that was asked for; the record repeats the result."""
    if run.extension is None:
        return run
    prompt = run.request.prompt
    with pipeline.stages("prompt extension"):
        if team is None or team.is_main:
            prompt = prompt_extend.extend_prompt(
                prompt,
                task_kind=run.request.preset.kind,
                image=image,
                method=run.extension.method,
                model=run.extension.model,
                target_lang=run.extension.target_lang,
                seed=run.request.seed,
                device=str(pipeline.device.torch_device),
            )
        if team is not None:
            prompt = team.value_from_main(prompt)
    settings = {**run.settings, "prompt": prompt, "use_prompt_extend": False}
    return replace(run, request=replace(run.request, prompt=prompt), settings=settings)


def _save_latents(run: Run, latents: Tensor) -> Path | None:
    """Put the result of the long part on disk before anything else can fail.

    Beside the video, else in the system's folder for temporary files; None where neither takes it.
    """
    from wan.pipeline import video

    if not bool(latents.isfinite().all()):
        logger.warning("The latents hold NaN or infinity, so the video will be broken.")
    beside = run.output.unfinished
    for path in (beside, Path(tempfile.gettempdir()) / beside.name):
        try:
            video.save_latents(latents, path, run.settings)
        except OSError as error:
            logger.error("The denoised latents could not be saved to %s (%s).", path, error)
        else:
            return path
    logger.error("Decoding goes on from memory: if it fails, the run is lost.")
    return None


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


def _save_record(run: Run, pipeline: Pipeline, frames_3FHW: Tensor) -> None:
    from wan.pipeline import build, video

    _, count, height, width = frames_3FHW.shape
    used = build.resolved(run.execution, pipeline) | asdict(run.parallel)
    stored_bf16 = run.execution.convert_model_dtype  # says itself what the DiT computes in
    record = {
        "settings": run.settings | ({} if stored_bf16 else {"precision": used["precision"]}),
        "seed": run.request.seed,
        "video": {"frames": count, "width": width, "height": height, "fps": run.output.fps},
        "used": used,
        "seconds": {name: round(s, 3) for name, s in pipeline.stages.seconds.items()},
        "peak_memory_bytes": {
            "device": pipeline.device.peak_memory(),
            "host": log.peak_host_memory(),
        },
        "versions": {"wan": wan.__version__} | log.versions(pipeline.device.type == "npu"),
    }
    with video.written_whole(run.output.record) as temporary:
        temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")


def _summary(run: Run, pipeline: Pipeline) -> None:
    device = pipeline.device.peak_memory()
    parts = [f"{name} {seconds:.1f} s" for name, seconds in pipeline.stages.seconds.items()]
    memory = f"host {log.peak_host_memory() / 2**30:.2f} GiB"
    if device is not None:
        memory = f"device {device / 2**30:.2f} GiB, {memory}"
    logger.info("Seconds: %s. Peak memory: %s.", ", ".join(parts), memory)
    logger.info("Seed %d, noise drawn on the %s.", run.request.seed, run.request.noise_device)
    logger.info("Video: %s  Record: %s", run.output.save_file, run.output.record)


if __name__ == "__main__":
    sys.exit(main())
