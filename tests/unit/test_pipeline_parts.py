"""Conditioning, sampling, memory policy and files, each tested without a whole run."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imageio
import imageio_ffmpeg
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPVisionModel

from tests.frames import read_frames
from tests.pipelines import build_cpu_pipeline, make_experts
from tests.refusals import check_refusals, get_refusal
from wan.guidance.guider import combine_linearly
from wan.kernels.forward_context import StepInfo
from wan.media import images
from wan.media.video_writer import (
    load_latents,
    open_mp4_encoder,
    read_latents_shape,
    save_latents,
    to_uint8,
    write_video,
)
from wan.modules import clip
from wan.pipeline.denoise import DenoisingLoop, StepPrediction
from wan.pipeline.pipeline import make_base_inputs
from wan.settings.command import Output
from wan.settings.errors import InputError, NotFiniteError
from wan.settings.noise_schedule import make_noise_schedule, select_expert
from wan.settings.presets import PRESETS
from wan.tasks import base, textimage2video
from wan.tasks.base import DenoiseInputs, VideoParams, make_video_params
from wan.testing.random_checkpoint import make_checkpoint
from wan.utils import log


def request(
    task: str, image_size: tuple[int, int] | None = None, frame_num: int = 9
) -> VideoParams:
    values = {"prompt": "", "size": (96, 64), "frame_num": frame_num, "base_seed": 3}
    return make_video_params(PRESETS[task], values, image_size)


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prepare(
    r: VideoParams, image: Image.Image | None, encode, start: torch.Tensor | None = None
) -> DenoiseInputs:
    contexts = (torch.zeros(1, 4), torch.zeros(1, 4))
    shared = make_base_inputs(r, contexts, torch.device("cpu"), start)
    encoders: Any = SimpleNamespace(encode_video=encode, torch_device=torch.device("cpu"))
    return r.task.make_denoise_inputs(r, shared, base.Inputs(image=image), encoders)


def test_noise_is_that_of_the_seed() -> None:
    """Also the later noise, whatever a video begins with."""
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(16, 3, 8, 12, generator=generator) for _ in range(2))
    r, start = request("t2v-A14B"), torch.ones(16, 3, 8, 12)
    for latents, expected in ((None, first), (start, start)):
        inputs = prepare(r, None, None, latents)
        assert torch.equal(inputs.initial_latents, expected)
        assert torch.equal(inputs.sample_noise(), second)


def test_clip_features_are_those_of_transformers(tiny, tmp_path: Path) -> None:
    """The features before the last block, to the bit; the epsilon of its norms shows in them.

    The official file holds queries, keys and values in one tensor.
    """
    folder = tiny("i2v-14B", "diffusers") / "image_encoder"
    pictures = [images.convert_image_to_tensor(noise(*size)) for size in ((96, 64), (40, 90))]
    official = next(tiny("i2v-14B").glob("models_clip*.pth"))
    save_file(torch.load(official), tmp_path / "clip.safetensors")
    results = [
        clip.ClipVision(
            clip.make_clip_spec(path).load(
                device=torch.device("cpu"),
                dtype_of=lambda *_: torch.float32,
                transform=clip.add_clip_position_ids,
            )
        )(pictures)
        for path in (folder, official, tmp_path / "clip.safetensors")
    ]
    network = CLIPVisionModel.from_pretrained(folder, dtype=torch.float32, layer_norm_eps=1e-5)
    pixels = torch.cat([clip.preprocess_clip_image(image) for image in pictures])
    with torch.no_grad():
        expected = network(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    assert all(torch.equal(features, expected) for features in results)


def test_damaged_clip_files_are_refused(tiny, tmp_path: Path) -> None:
    """A layer without a number, and sizes that no network has."""
    state = torch.load(next(tiny("i2v-14B").glob("models_clip*.pth")))
    patches, path = "visual.patch_embedding.weight", tmp_path / "clip.safetensors"
    shapes = ((160, 3, 0, 0), (0, 3, 14, 14), (250, 3, 14, 14))
    cases = [{patches: torch.zeros(shape)} for shape in shapes]
    for changed in ({"visual.transformer.x.norm1.bias": torch.zeros(160)}, *cases):
        save_file(state | changed, path)
        assert "no CLIP vision network" in get_refusal(clip.make_clip_spec, path), changed.keys()


def test_i2v_channels() -> None:
    """4 mask channels, then the encoded [image, grey, grey, ...]."""
    r, image, videos = request("i2v-A14B", image_size=(200, 150)), noise(200, 150), []

    def encode(video: torch.Tensor) -> torch.Tensor:
        videos.append(video)
        width, height = r.video_size
        return torch.full((16, 3, height // 8, width // 8), 0.5)

    y = prepare(r, image, encode).y
    width, height = r.video_size
    assert r.video_size == (80, 64)
    assert y.shape == (20, 3, height // 8, width // 8)
    (video,) = videos
    assert video.shape == (3, 9, height, width) and (video[:, 1:] == 0).all()
    source = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 * 2 - 1
    expected = F.interpolate(source[None], size=(height, width), mode="bicubic")[0]
    torch.testing.assert_close(video[:, 0], expected, atol=1e-6, rtol=0)


def test_ti2v_covers_and_crops() -> None:
    """The image is scaled by the larger ratio with Lanczos and cropped to the centre."""
    image = noise(100, 100)
    frame = textimage2video.make_first_frame(image, (96, 64))
    resized = np.array(image.resize((96, 96), Image.Resampling.LANCZOS))[16:80]
    expected = torch.from_numpy(resized).permute(2, 0, 1).float() / 255 * 2 - 1
    assert frame.shape == (3, 1, 64, 96)
    torch.testing.assert_close(frame[:, 0], expected, atol=1e-6, rtol=0)


def test_official_share_of_the_experts() -> None:
    """A timestep at the boundary itself is high noise."""
    for (task, high), solver in product((("t2v-A14B", 26), ("i2v-A14B", 15)), ("unipc", "dpm++")):
        values = {"prompt": "", "sample_solver": solver, "sample_steps": 40}
        params = make_video_params(PRESETS[task], values, (96, 64) if high == 15 else None)
        expected = ("high_noise",) * high + ("low_noise",) * (40 - high)
        assert make_noise_schedule(params).experts == expected, (task, solver)
    assert select_expert(875, 0.875) == "high_noise" and select_expert(874, 0.875) == "low_noise"
    assert select_expert(999, None) == "dit"


def test_without_guidance_the_other_branch_is_not_computed() -> None:
    """At any step, with and without a function that runs both branches."""
    latents, step = torch.zeros(2), StepInfo(0, 1, "cond", "dit", (1, 1, 1), 1)
    inputs = DenoiseInputs(latents, latents, latents)

    def network(x: list[torch.Tensor], *_: object, step: StepInfo, **__: object) -> Any:
        assert step.branch == "cond"
        return [x[0] + 2]

    for run_branches in (None, lambda branch: (branch("cond"), branch("uncond"))):
        prediction = StepPrediction(network, latents, torch.zeros(1), inputs, step, run_branches)
        assert prediction.guide(1, combine_linearly).tolist() == [2, 2]


@pytest.mark.parametrize(("broken_step", "reported_step"), [(0, 1), (1, 3), (2, 3)])
def test_latents_that_are_not_finite_make_no_video(broken_step: int, reported_step: int) -> None:
    """Latents are checked after the first and the last step; each check waits for the device."""
    params = replace(request("t2v-1.3B"), sample_steps=3)

    def network(x: list[torch.Tensor], *_: object, step: StepInfo, **__: object) -> Any:
        return [torch.full_like(x[0], torch.nan if step.index == broken_step else 0.0)]

    with pytest.raises(NotFiniteError, match=f"after step {reported_step} of 3"):
        DenoisingLoop(params, prepare(params, None, None)).advance(make_experts(network))


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Finds the tensors in objects of this package and of diffusers, and in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from find_tensors(item)
    elif type(value).__module__.startswith(("wan.", "diffusers.")) and hasattr(value, "__dict__"):
        yield from find_tensors(vars(value))


@pytest.mark.parametrize(
    ("solver", "last_step"), [("unipc", 2), ("dpm++", 2), ("res_multistep", 2), ("res_2s", 1)]
)
def test_a_paused_loop_leaves_the_device(solver: str, last_step: int) -> None:
    """Latents, inputs, and what solver and guidance keep between steps; shared tensors stay so."""
    values = {
        "prompt": "",
        "size": (96, 64),
        "frame_num": 9,
        "guider": "apg:momentum=0.5",
        "sample_steps": 3,
    }
    values |= {"sample_solver": solver}
    params, shared = make_video_params(PRESETS["t2v-1.3B"], values), torch.ones(2, 3)
    kwargs = {name: {"hints": [shared, torch.ones(2, 4)]} for name in ("cond", "uncond")}
    latents = torch.ones(params.latent_shape)
    texts = (torch.ones(5, 6), torch.ones(4, 6))
    inputs = DenoiseInputs(latents, *texts, latents.clone(), torch.ones(1, 7, 8))
    loop = DenoisingLoop(params, replace(inputs, model_kwargs=kwargs))

    def network(x: list[torch.Tensor], *_: object, step: StepInfo, **__: object) -> Any:
        if step.index == last_step:
            raise InterruptedError
        return [x[0] * (0.1 if step.branch == "cond" else 0.2)]

    with pytest.raises(InterruptedError):
        loop.advance(make_experts(network))
    assert len([x for x in find_tensors(loop) if x.shape == latents.shape]) > 3
    loop.to(torch.device("meta"))
    tensors = [x for x in find_tensors(loop) if x.dim() > 1]
    assert {x.device.type for x in tensors} == {"meta"}
    assert len({id(x) for x in tensors if x.shape == shared.shape}) == 1


def test_networks_stay_while_the_kind_of_offloading_is_the_same(tiny) -> None:
    pipeline = build_cpu_pipeline("t2v-1.3B", tiny("t2v-1.3B"))
    network = pipeline.text_encoder.get()
    for offload, stays in ((False, True), (True, True), ("cpu", False), ("cpu", True)):
        pipeline.set_offload(offload)
        assert (pipeline.text_encoder.get() is network) == stays, offload
        network = pipeline.text_encoder.get()


CLIP = torch.rand(3, 5, 32, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1


def decode_planes(path: Path) -> bytes:
    """The planes of all frames, as ffmpeg decodes them."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-f", "rawvideo", "-"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def test_a_video_is_encoded_as_officially(tmp_path: Path) -> None:
    """The official code's imageio call gives the same frames, before any conversion to RGB."""
    write_video(CLIP, Output(tmp_path / "ours.mp4", fps=24))
    official_path = tmp_path / "theirs.mp4"
    with imageio.get_writer(official_path, fps=24, codec="libx264", quality=8) as writer:
        for frame in to_uint8(CLIP):
            writer.append_data(frame.numpy())
    planes, official_planes = map(decode_planes, (tmp_path / "ours.mp4", official_path))
    assert planes == official_planes and len(planes) == 5 * 32 * 64 * 3 // 2


def test_a_video_that_is_begun_again(tmp_path: Path) -> None:
    """As after a lack of memory in the VAE; the first frames are those of the second attempt."""
    video = CLIP.repeat(1, 20, 1, 1)

    def encode() -> None:
        with open_mp4_encoder(Output(tmp_path / "v.mp4", fps=8), lossless=True) as encoder:
            encoder.begin((100, 32, 64))
            encoder.write_frames(CLIP[:, 3:])
            encoder.begin((100, 32, 64))
            encoder.write_frames(video)

    thread = threading.Thread(target=encode, daemon=True)
    thread.start()
    thread.join(20)  # two encoders would wait for each other's frames
    assert (read_frames(tmp_path / "v.mp4") == to_uint8(video).numpy()).all()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limits the size of files, as a full disk does: further writes get SIGXFSZ or EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_while_frames_are_written(tmp_path: Path) -> None:
    """An earlier video stays."""
    path, noise = tmp_path / "v.mp4", torch.rand(3, 40, 64, 128) * 2 - 1
    sentence = r"v\.mp4 could not be written \(File too large\); raise .* \(ulimit -f\), or give an"
    for earlier in ([], [b"an earlier video"]):
        for content in earlier:
            path.write_bytes(content)
        with files_of_at_most(20_000), pytest.raises(OSError, match=sentence):
            write_video(noise, Output(path, fps=8))
        assert [p.read_bytes() for p in tmp_path.iterdir()] == earlier


ENCODERS = (  # scripts that replace ffmpeg
    "cat > /dev/null; exit 3",
    "head -c 9 > /dev/null; exit 4",
    "echo '[out#0 @ 0x5] Error: No space left' >&2; exit 1",
    "kill -9 $$",
    "cat > /dev/null",
)


def test_an_encoder_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, path, messages = tmp_path / "ffmpeg", tmp_path / "out" / "v.mp4", {}
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    for script in ENCODERS:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        messages[script] = get_refusal(write_video, CLIP, Output(path, fps=8), kind=OSError)
        assert not list(path.parent.iterdir()), script
    check_refusals("video: encoders that fail", messages)


def test_a_video_without_frames_or_in_no_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"\(the encoder .*\); free"):
        write_video(CLIP[:, :0], Output(tmp_path / "v.mp4", fps=8))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"could not be written \((File exists|Not a directory)\)"):
        write_video(CLIP, Output(tmp_path / "file" / "v.mp4", fps=8))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_latents_come_back(tmp_path: Path) -> None:
    latents, path = torch.randn(16, 2, 4, 8), tmp_path / "x.safetensors"
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        save_latents(latents, path, {})
    assert not list(tmp_path.iterdir())
    save_latents(latents, path, {"task": "t2v-A14B"})
    assert torch.equal(load_latents(path), latents)
    save_latents(latents[:, :0], path, {})
    with pytest.raises(InputError, match="each at least 1"):
        read_latents_shape(path)
    latents[0, 0, 0, 0] = float("nan")
    save_latents(latents, path, {})
    with pytest.raises(InputError, match="holds NaN or infinity; make the latents again"):
        load_latents(path)


def test_stages_inside_stages_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    stages, names = log.StageTimer(), list[str]()
    stages.on_stage = names.append
    with stages("text"), stages("loading"):
        pass
    assert names == ["text", "loading", "text"]
    assert stages.seconds == {"loading": 3.0, "text": 7.0}


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of the process is restored afterwards."""
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(log.logger, name, getattr(log.logger, name))


@pytest.mark.usefixtures("own_log")
def test_messages_to_who_left_early(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """A closed pipe, as with `| head`, neither stops the run nor hides other errors."""
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        log.set_up_logging()
        log.logger.info("lost")
        lost = capfd.readouterr().err
        log.logger.info("%d", "no number")
    assert not lost and "TypeError" in capfd.readouterr().err


@pytest.mark.usefixtures("own_log")
def test_a_logged_bar_has_no_rest_before_the_first_step(capfd: pytest.CaptureFixture[str]) -> None:
    log.set_up_logging()
    with log.make_step_bar(2, "text") as bar:
        bar.refresh()
        bar.update()
        bar.refresh()
    lines = capfd.readouterr().out.splitlines()
    first, last = lines[0], lines[-1]
    assert first.endswith("sampling: 0/2 steps, text")
    assert "1/2 steps, about 00:00 left" in last and "?" not in first + last


@pytest.mark.usefixtures("own_log")
def test_silence_is_that_of_one_thread(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread that measures a plan in a service logs warnings only."""
    log.set_up_logging()
    with log.silence_thread():
        other = threading.Thread(target=log.logger.info, args=("other thread",))
        other.start()
        other.join()
        log.logger.info("silent thread")
        log.logger.warning("a warning")
        with log.make_progress_bar(3, "sampling", "step") as bar:
            assert bar.disable
    log.logger.info("afterwards")
    messages = [line.split("] ")[1] for line in capfd.readouterr().out.splitlines()]
    assert messages == ["other thread", "a warning", "afterwards"]


def test_a_line_names_bfloat16_where_it_is_faster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On CPUs with such units, for a network of ordinary size, if no precision is given."""
    cpu = Path("/proc/cpuinfo")
    features = cpu.read_text() if cpu.exists() else ""
    has_units = "amx_bf16" in features or "avx512_bf16" in features
    folders = {}
    for dim in (256, 1024):
        sizes = {"dim": dim, "num_heads": 8, "ffn_dim": 64, "num_layers": 1}
        folders[dim] = make_checkpoint("t2v-1.3B", tmp_path / str(dim), sizes=sizes)
    lines = {}
    for dim, values in (
        (1024, {}),
        (1024, {"precision": "fp32"}),
        (1024, {"precision": "bf16"}),
        (1024, {"vae_precision": "bf16"}),
        (1024, {"convert_model_dtype": True}),
        (256, {}),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            build_cpu_pipeline("t2v-1.3B", folders[dim], **values)
        lines[dim, *values] = "--precision bf16 --vae_precision bf16" in caplog.text
    assert [case for case, is_shown in lines.items() if is_shown] == [(1024,)] * has_units
