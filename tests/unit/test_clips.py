"""Inputs of each clip of S2V and Animate, and the frames it passes on, by the official recipe."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import Wav2Vec2FeatureExtractor, Wav2Vec2Model

from wan.media.audio import Audio
from wan.modules import audio_encoder as sound
from wan.pipeline.clips import generate_clips
from wan.pipeline.pipeline import run_locally
from wan.settings.errors import FileChangedError
from wan.settings.presets import PRESETS
from wan.tasks import speech2video
from wan.tasks.animate import AnimateInputs, letterbox_image, make_ping_pong_indices
from wan.tasks.animate import count_overlapping_clips as count_clips
from wan.tasks.base import Clip, Inputs, VideoParams, make_video_params
from wan.tasks.image2video import ChainedClips
from wan.tasks.speech2video import PoseVideo
from wan.utils.log import StageTimer

TEXTS = torch.full((2, 4), 1.0), torch.full((3, 4), -1.0)
SAMPLING = {"prompt": "", "base_seed": 7, "sample_steps": 2, "sample_guide_scale": (2.0, 2.0)}


def encode_by_averages(video_3FHW: Tensor) -> Tensor:
    """A fake VAE: average over 4 frames (the first frame alone) and over cells of 8 x 8 pixels."""
    ends = range(1, video_3FHW.shape[1] + 1, 4)
    means = torch.stack([video_3FHW[:, max(0, i - 4) : i].mean(dim=1) for i in ends], dim=1)
    return F.pad(F.avg_pool2d(means, 8), (0, 0) * 3 + (0, 13))


class FakePipeline:
    """A fake pipeline whose network predicts zeros and records its inputs.

    Attributes:
        calls: The branch and the keyword arguments of each forward; "x": the latents.
        decoded: Latents and (random) frames of each decoding.
        clip_images: The images that CLIP encoded.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.decoded: list[tuple[Tensor, Tensor]] = []
        self.clip_images: list[Tensor] = []
        self.stage_timer, self.vae = StageTimer(), object()
        self.torch_device, self.experts, self.overlap_decoding = torch.device("cpu"), self, False
        self.cached_prompt_embeds: dict[str, Tensor] = {}
        self.run_on_rank0 = run_locally
        self.encode_video = encode_by_averages

    def encode_prompt(self, *_: object) -> tuple[Tensor, Tensor]:
        return TEXTS

    def sample_audio_features(self, sound: Tensor, count: int) -> Tensor:
        return sound[..., :count]

    def encode_image(self, images: list[Tensor]) -> Tensor:
        self.clip_images += images
        return torch.ones(1, 5, 6)

    def denoise(self, video: Any, **_: Any) -> Tensor:
        return video.advance(self)

    def get(self, _: str) -> Any:
        return self._forward

    def _forward(self, x: list[Tensor], t: Tensor, *, step: Any, **kwargs: Any) -> list[Tensor]:
        self.calls.append((step.branch, {**kwargs, "x": x[0].clone()}))
        return [torch.zeros_like(x[0])]

    def prefetch(self, _: str) -> None: ...

    def release(self, _: object) -> None: ...

    def release_vae(self) -> None: ...

    def make_preview(self, *_: object) -> None: ...

    def decode(self, latents: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(len(self.decoded))
        _, f, h, w = latents.shape
        frames = torch.rand(3, 4 * f - 3, 8 * h, 8 * w, generator=draw) * 2 - 1
        self.decoded.append((latents.clone(), frames))
        return frames.clone()

    def of_clip(self, index: int, branch: str) -> list[dict[str, Any]]:
        """Keyword arguments of the network in both steps of a clip."""
        clip_calls = self.calls[4 * index : 4 * index + 4]
        return [kwargs for name, kwargs in clip_calls if name == branch]


def assert_same(actual: Tensor, expected: Tensor, message: str = "") -> None:
    assert actual.shape == expected.shape, message
    assert (actual - expected).abs().max() <= 1e-5, message


def assert_resumes(
    whole: FakePipeline, clips: Sequence[Clip], params: VideoParams, inputs: Inputs
) -> None:
    """After a kill behind the first clip, the others are those of a video without one."""
    pipeline: Any = FakePipeline()
    pipeline.decoded = whole.decoded[:1]
    state = None if clips[0].state is None else clips[0].state.clone()
    resumed = replace(inputs, num_clips_done=1, clip_state=state)
    for clip, expected in zip(generate_clips(pipeline, params, resumed), clips[1:], strict=True):
        assert_same(clip.frames, expected.frames)
    for (_, call), (_, expected_call) in zip(pipeline.calls, whole.calls[4:], strict=True):
        for name, value in expected_call.items():
            values, expected_values = (
                [x] if isinstance(x, Tensor) else x for x in (call[name], value)
            )
            if isinstance(value, Tensor | list):
                assert all(map(torch.equal, values, expected_values)), name


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def levels(pixels: Any) -> Tensor:
    """Bytes [...,3] as [3,...] in [-1, 1]."""
    return torch.from_numpy(np.array(pixels)).movedim(-1, 0).float().div(127.5).sub(1)


def resize_antialiased(frame: np.ndarray, side: int) -> Tensor:
    """A square frame scaled by Pillow in floats, [3,side,side] in [-1, 1]."""
    planes = [Image.fromarray(plane.astype(np.float32)) for plane in np.moveaxis(frame, -1, 0)]
    scaled_planes = [plane.resize((side, side), Image.Resampling.BILINEAR) for plane in planes]
    return torch.from_numpy(np.stack([np.asarray(plane) for plane in scaled_planes])) / 127.5 - 1


@pytest.mark.parametrize(("from_picture", "posed"), [(False, True), (True, False)])
def test_clips_that_follow_a_sound(from_picture: bool, posed: bool) -> None:
    """Three clips of 8 frames; the poses end in the second, and are narrower than the video."""
    image, poses = picture(128, 64), np.random.default_rng(2).integers(0, 256, (11, 96, 96, 3))
    poses = poses.astype(np.uint8)
    values = {**SAMPLING, "infer_frames": 8, "num_clip": 3, "start_from_ref": from_picture}
    request = make_video_params(PRESETS["s2v-14B"], {**values, "max_area": 128 * 64}, (128, 64))
    rows = torch.randn(1, 25, 6, 24)
    pose = SimpleNamespace(iter_poses=lambda: iter(poses)) if posed else None
    pipeline: Any = FakePipeline()
    inputs: Any = speech2video.SpeechInputs(image=image, audio=rows, pose=pose)  # type: ignore[arg-type]
    all_clips = list(generate_clips(pipeline, request, inputs))
    assert len(all_clips) == 3 and len(pipeline.calls) == 3 * 2 * 2
    reference, history = encode_by_averages(levels(image)[:, None]), torch.zeros(3, 73, 64, 128)
    if from_picture:
        history[:, -6:] = levels(image)[:, None]
    scaled = torch.stack([resize_antialiased(frame, 64) for frame in poses], dim=1)
    pose_frames = torch.cat((F.pad(scaled, (32, 32)), torch.full((3, 13, 64, 128), -1.0)), dim=1)
    for index, clip in enumerate(all_clips):
        alone = index == 0 and not from_picture
        noise = torch.randn(16, 2, 8, 16, generator=torch.Generator().manual_seed(7 + index))
        assert_same(pipeline.of_clip(index, "cond")[0]["x"], noise, "noise")
        motion, clip_range = encode_by_averages(history), slice(8 * index, 8 * index + 8)
        for branch, text, audio_rows in (
            ("cond", TEXTS[0], rows[..., clip_range]),
            ("uncond", TEXTS[1], torch.zeros(1, 25, 6, 8)),
        ):
            for kwargs in pipeline.of_clip(index, branch):
                assert kwargs["context"][0] is text and kwargs["drop_motion_frames"] == alone
                assert_same(kwargs["audio_input"], audio_rows, branch)
                assert_same(kwargs["ref_latents"][0], reference)
                if not alone:
                    assert_same(kwargs["motion_latents"][0], motion, "end of the clip before")
                if not posed:
                    assert kwargs["cond_states"] is None
                    continue
                frames = pose_frames[:, clip_range]
                repeated = torch.cat((frames[:, :1], frames), dim=1)
                assert_same(kwargs["cond_states"][0], encode_by_averages(repeated)[:, 1:], "poses")
        latents, frames = pipeline.decoded[index]
        assert_same(latents, torch.cat((reference if alone else motion, clip.latents), dim=1))
        new = frames[:, -5 if alone else -8 :]
        assert clip.frames is not None and torch.equal(clip.frames, new)
        history = torch.cat((history, new), dim=1)[:, -73:]
    assert_resumes(pipeline, all_clips, request, inputs)


@pytest.mark.parametrize(
    ("replaces", "overlap", "length"),
    [(False, 1, 13), (True, 5, 13), (True, 1, 5), (False, 5, 9)],
)
def test_clips_of_a_character(replaces: bool, overlap: int, length: int) -> None:
    """Poses of 23 frames, in clips; after the last frame, the poses run backwards.

    Clips of 9 frames have four of their own, and hand over five.
    """
    random, size = np.random.default_rng(3), (64, 48)
    sides = {"pose": (48, 64), "face": (32, 32), "background": (48, 64), "mask": (48, 64)}
    videos = {n: random.integers(0, 256, (23, *s, 3), dtype=np.uint8) for n, s in sides.items()}
    takes: Any = {name: lambda at, x=x: x[list(at)] for name, x in videos.items()}
    animate_inputs = AnimateInputs(
        reference_image=picture(31, 48), pose_size=size, num_frames=23, fps=30.0, readers=takes
    )
    count = count_clips(23, length, overlap)
    values = {**SAMPLING, "frame_num": length, "refert_num": overlap, "replace_flag": replaces}
    values |= {"size": size, "num_source_frames": 23, "num_clip": count}
    request, pipeline = make_video_params(PRESETS["animate-14B"], values), FakePipeline()
    assert count == {(1, 13): 2, (5, 13): 3, (1, 5): 6, (5, 9): 5}[overlap, length]
    clip_iterator: Any = generate_clips(pipeline, request, animate_inputs)  # type: ignore[arg-type]
    all_clips, draw = list(clip_iterator), torch.Generator().manual_seed(7)
    order = [*range(23), *range(21, 0, -1)]
    padded_reference = F.pad(levels(animate_inputs.reference_image), (16, 17), value=-1)
    assert_same(pipeline.clip_images[0], padded_reference)
    previous_frames, num_latents = None, (length + 3) // 4
    for index, clip in enumerate(all_clips):
        start = index * (length - overlap)
        frame_indices = order[start : start + length]
        clip_inputs = {name: levels(x[frame_indices]) for name, x in videos.items()}
        noise = torch.randn(16, 1 + num_latents, 6, 8, generator=draw)
        assert_same(pipeline.of_clip(index, "cond")[0]["x"], noise, "noise")
        known_frames, keep = torch.zeros(3, length, 48, 64), torch.zeros(length, 6, 8)
        if replaces:
            known_frames = clip_inputs["background"].clone()
            keep = 1 - torch.from_numpy(videos["mask"][frame_indices, ::8, ::8, 0] / 255).float()
        if previous_frames is not None:
            known_frames[:, :overlap], keep[:overlap] = previous_frames, 1
        folded = torch.empty(4, num_latents, 6, 8)
        for channel in range(4):
            folded[channel, 0] = keep[0]
            for frame in range(1, num_latents):
                folded[channel, frame] = keep[4 * frame - 3 + channel]
        reference = torch.cat(
            (torch.ones(4, 1, 6, 8), encode_by_averages(padded_reference[:, None]))
        )
        y = torch.cat((reference, torch.cat((folded, encode_by_averages(known_frames)))), dim=1)
        faces = {
            "cond": clip_inputs["face"],
            "uncond": torch.tensor(-1.0).expand(3, length, 512, 512),
        }
        for (branch, face), text in zip(faces.items(), TEXTS, strict=True):
            for kwargs in pipeline.of_clip(index, branch):
                assert kwargs["context"][0] is text
                assert_same(kwargs["face_pixel_values"][0], face, branch)
                assert_same(kwargs["pose_latents"][0], encode_by_averages(clip_inputs["pose"]))
                assert_same(kwargs["y"][0], y, "what is known")
                assert_same(kwargs["clip_fea"], torch.ones(1, 5, 6))
        latents, frames = pipeline.decoded[index]
        assert_same(latents, clip.latents[:, 1:])
        previous_frames = frames[:, -overlap:]
        frames = frames[:, overlap if index else 0 :]
        last = 23 - start - overlap if index + 1 == count else length
        assert clip.frames is not None and torch.equal(clip.frames, frames[:, :last])
    assert sum(clip.frames.shape[1] for clip in all_clips) == 23
    stored: Any = {"num_clips_done": 1, "clip_state": torch.zeros(3, overlap - 1, 48, 64)}
    with pytest.raises(FileChangedError, match=f"{overlap - 1} frames"):
        next(generate_clips(pipeline, request, replace(animate_inputs, **stored)))  # type: ignore[arg-type]
    assert_resumes(pipeline, all_clips, request, animate_inputs)
    if count == 2 and not replaces:  # a solver that adds noise between the steps
        request = make_video_params(PRESETS["animate-14B"], values | {"sample_solver": "lcm"})
        pipeline = FakePipeline()
        all_clips = list(generate_clips(pipeline, request, animate_inputs))  # type: ignore[arg-type]
        assert_resumes(pipeline, all_clips, request, animate_inputs)


def make_chain(chain: str, num_clips: int = 2, **values: Any) -> VideoParams:
    """The parameters of a chain of clips of an image, 5 frames each."""
    values |= {"chain": chain, "num_clip": num_clips, "frame_num": 5, "max_area": 64 * 48}
    return make_video_params(PRESETS["i2v-A14B"], SAMPLING | values, (64, 48))


CHAIN_INPUTS = Inputs(image=picture(64, 48))


@pytest.fixture
def changed_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a task that does not decode the latents as they are."""
    monkeypatch.setattr(
        ChainedClips, "select_latents", lambda maker, index, latents: latents * (index + 2)
    )


@pytest.mark.usefixtures("changed_latents")
@pytest.mark.parametrize(("is_main", "failed"), [(False, False), (False, True), (True, True)])
def test_all_ranks_decode_again_what_the_main_rank_could_not(is_main: bool, failed: bool) -> None:
    """A rank that decodes nothing in the background hears of the failure, and takes part."""
    pipeline: Any = FakePipeline()
    pipeline.is_main, pipeline.overlap_decoding = is_main, True
    pipeline.device = SimpleNamespace(torch_device=pipeline.torch_device)
    pipeline.vae_runner = SimpleNamespace()  # decoding in the background fails
    if not is_main:
        pipeline.run_on_rank0 = lambda _: torch.tensor([float(failed)])
    first, last = generate_clips(pipeline, make_chain("latent"), CHAIN_INPUTS)
    decoded = [latents for latents, _ in pipeline.decoded]
    expected = [2 * first.latents, 3 * last.latents] if failed else [3 * last.latents]
    assert len(decoded) == len(expected) and all(map(torch.equal, decoded, expected))


@pytest.mark.parametrize("chain", ["frame", "latent"])
def test_a_long_video_may_go_on_after_its_last_clip(chain: str) -> None:
    states = []
    for num_clips in (1, 2):
        pipeline: Any = FakePipeline()
        first, *_ = generate_clips(pipeline, make_chain(chain, num_clips), CHAIN_INPUTS)
        states.append(first.state)
    assert torch.equal(*states)


def test_the_log_has_the_prompt_of_each_clip(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for prompts, expected in ((("one", "two"), ["one", "two"]), (None, ["three", "three"])):
        caplog.clear()
        pipeline: Any = FakePipeline()
        pipeline.cache_prompt_embeds = lambda *_: None
        params = make_chain("frame", clip_prompts=prompts, prompt="three")
        list(generate_clips(pipeline, params, CHAIN_INPUTS))
        lines = [line for line in caplog.messages if line.startswith("Clip ")]
        assert lines == [f"Clip {i + 1} of 2: {prompt}" for i, prompt in enumerate(expected)]


@pytest.mark.usefixtures("changed_latents")
def test_a_failure_waits_for_the_clip_that_is_decoded_meanwhile() -> None:
    """The next attempt may need the VAE."""
    pipeline: Any = FakePipeline()
    pipeline.is_main = pipeline.overlap_decoding = True
    pipeline.device = SimpleNamespace(torch_device=pipeline.torch_device)
    failed, decoded = Event(), Event()
    all_latents = list[Tensor]()  # those of the clip, then those that are decoded

    def decode_alone(latents: Tensor, _: object) -> None:
        all_latents.append(latents)
        failed.wait(10)
        time.sleep(0.02)
        decoded.set()

    def denoise(loop: Any, **_: Any) -> Tensor:
        if pipeline.calls:
            failed.set()
            raise MemoryError
        all_latents.append(loop.advance(pipeline))
        return all_latents[0]

    pipeline.vae_runner, pipeline.denoise = SimpleNamespace(decode_alone=decode_alone), denoise
    with pytest.raises(MemoryError):
        list(generate_clips(pipeline, make_chain("latent"), CHAIN_INPUTS))
    assert decoded.is_set() and torch.equal(all_latents[1], 2 * all_latents[0])


def test_frames_past_the_end_of_a_video() -> None:
    """The frames run back and forth; neither the last nor the first frame comes twice in a row."""
    assert make_ping_pong_indices(0, 4, 4) == [0, 1, 2, 3]
    assert make_ping_pong_indices(2, 11, 4) == [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0]
    assert make_ping_pong_indices(5, 4, 2) == [1, 0, 1, 0]
    assert make_ping_pong_indices(2, 3, 1) == [0, 0, 0]
    table = {(9, 9, 1): 1, (10, 9, 1): 2, (17, 9, 1): 2, (18, 9, 1): 3, (13, 9, 5): 2, (3, 9, 1): 1}
    assert {arguments: count_clips(*arguments) for arguments in table} == table


def test_as_many_clips_as_the_sound_fills_and_one_more() -> None:
    """The official rule: a sound of whole clips, here of 150 features, has another clip, too."""
    table = {1: 1, 149: 1, 150: 2, 151: 2, 299: 2, 300: 3}
    sounds: Any = {count: SimpleNamespace(num_features=count) for count in table}
    assert {count: speech2video.count_clips(sounds[count], 80) for count in table} == table


def letterbox_by_pixel(source: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """OpenCV's bilinear interpolation pixel by pixel, in whole numbers, between black bars."""
    (columns, rows), (height, width, _) = size, source.shape
    scale = rows / height if height / width > rows / columns else columns / width
    inner = int(width * scale), int(height * scale)
    expected = np.zeros((rows, columns, 3), int)
    left_margin, top_margin = (columns - inner[0]) // 2, (rows - inner[1]) // 2

    def weights(index: int, source_size: int, target_size: int) -> tuple[int, int, int]:
        centre = np.float32((index + 0.5) * source_size / target_size - 0.5)
        first = int(np.floor(centre))
        return first, round(2048 * (1 - (centre - first))), round(2048 * (centre - first))

    for row in range(inner[1]):
        y, b0, b1 = weights(row, height, inner[1])
        upper, lower = source[max(y, 0)], source[min(y + 1, height - 1)]
        for column in range(inner[0]):
            x, a0, a1 = weights(column, width, inner[0])
            if x < 0 or x >= width - 1:
                x, a0, a1 = min(max(x, 0), width - 1), 2048, 0
            next_x = min(x + 1, width - 1)
            upper_value, lower_value = (a0 * line[x] + a1 * line[next_x] for line in (upper, lower))
            value = ((b0 * (upper_value >> 4)) >> 16) + ((b1 * (lower_value >> 4)) >> 16) + 2 >> 2
            expected[top_margin + row, left_margin + column] = value
    if inner == (width, height):
        expected[top_margin : top_margin + height, left_margin : left_margin + width] = source
    return expected


def test_a_character_between_bars() -> None:
    source = np.asarray(picture(12, 6))
    for size in ((24, 10), (7, 30), (9, 5), (20, 10)):
        expected = letterbox_by_pixel(source.astype(int), size)
        assert (letterbox_image(source, size) == expected).all(), size


def test_the_picture_of_a_speaker() -> None:
    """The shorter side is scaled to the video's, the middle is cropped, and the rest is black."""
    wide = speech2video.fit_image_to_size(Image.new("RGB", (832, 480), "white"), (832, 448))
    lit = np.asarray(wide)[..., 0] > 0
    assert lit.shape == (448, 832) and lit[:, 28:-28].all()
    assert not lit[:, :28].any() and not lit[:, -28:].any()
    image = picture(100, 64)
    square = np.asarray(speech2video.fit_image_to_size(image, (64, 64)))
    assert (square == np.asarray(image)[:, 18:82]).all()
    turned = image.transpose(Image.Transpose.ROTATE_90)
    high = speech2video.fit_image_to_size(turned, (128, 64)).convert("L")
    assert (np.asarray(high)[:, 31:97] > 0).mean() > 0.95 and not np.asarray(high)[:, :30].any()


def test_pose_frame_steps() -> None:
    """Halves are rounded to even numbers, as in the official code."""
    table = {8: 1, 16: 1, 24: 2, 25: 2, 30: 2, 40: 2, 56: 4, 60: 4}
    steps = {fps: PoseVideo(Path("x"), (8, 8), fps, [], []).step for fps in table}
    assert steps == table


def test_the_sound_of_each_frame() -> None:
    """Each of 16 frames takes the nearest of 30 features a second (halves to even), then zeros."""
    features = torch.arange(1.0, 25).expand(2, 3, 24)
    frame_features = sound.sample_features_per_frame(features, 16)
    assert frame_features.shape == (1, 2, 3, 16)
    expected = [0, 2, 4, 6, 8, 9, 11, 13, 15, 17, 19, 21, 22]
    assert frame_features[0, 1, 2].tolist() == [index + 1.0 for index in expected] + [0.0] * 3


@torch.no_grad()
def test_the_features_of_a_sound(tiny) -> None:
    """Hidden states of transformers' network, normed, interpolated from 50 to 30 a second."""
    folder = tiny("s2v-14B") / "wav2vec2-large-xlsr-53-english"
    samples = np.random.default_rng(4).standard_normal(9000).astype(np.float32) * 0.02 + 0.1
    audio = Audio(Path("x"), samples)
    network: Any = Wav2Vec2Model.from_pretrained(folder, attn_implementation="eager").eval()
    raw: list[Tensor] = []
    network.encoder.layers[-1].register_forward_hook(
        lambda _, __, out: raw.append(out[0] if isinstance(out, tuple) else out)
    )
    prepared = Wav2Vec2FeatureExtractor(do_normalize=True)(samples, sampling_rate=16000)
    values = torch.from_numpy(np.array(prepared["input_values"]))
    states = network(values, output_hidden_states=True).hidden_states[:-1]
    states = torch.cat((*states, network.encoder.layer_norm(raw[0])))
    count = int(states.shape[1] / 50 * 30)
    positions = np.linspace(0, states.shape[1] - 1, count)
    features = sound.extract_audio_features(folder, audio)
    assert features.shape == (25, states.shape[2], count) and audio.num_features == count
    for layer, channel in ((0, 0), (12, 3), (24, 1), (24, 7)):
        line = np.interp(positions, np.arange(states.shape[1]), states[layer, :, channel].numpy())
        assert np.abs(features[layer, channel].numpy() - line).max() <= 1e-4
