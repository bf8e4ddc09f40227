"""Clips of S2V and Animate: what each is given and hands on, by the official recipe, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from wan.log import Stages
from wan.pipeline import characters, clips
from wan.pipeline.driving import DrivingVideos
from wan.pipeline.driving import clips as count_clips
from wan.pipeline.pipeline import Inputs, Sharing
from wan.settings.presets import PRESETS
from wan.settings.request import make_request

TEXTS = torch.full((2, 4), 1.0), torch.full((3, 4), -1.0)
SAMPLING = {"prompt": "", "base_seed": 7, "sample_steps": 2, "sample_guide_scale": (2.0, 2.0)}


def encoded(video_3FHW: Tensor) -> Tensor:
    """Stands for the VAE: means over time, first frame apart, and over cells of 8 x 8 pixels."""
    ends = range(1, video_3FHW.shape[1] + 1, 4)
    means = torch.stack([video_3FHW[:, max(0, i - 4) : i].mean(dim=1) for i in ends], dim=1)
    return F.pad(F.avg_pool2d(means, 8), (0, 0) * 3 + (0, 13))


class Loop:
    """Stands for a pipeline; its network says nothing, and keeps what it is given.

    Attributes:
        calls: Of each forward its branch and what it is given by name; "x": the latents.
        decoded: Latents and frames of each decoding; the frames are random.
        looked: What CLIP has seen.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.decoded: list[tuple[Tensor, Tensor]] = []
        self.looked: list[Tensor] = []
        self.stages, self.sharing, self.vae = Stages(lambda: None), Sharing(), object()
        self.device, self.experts = SimpleNamespace(torch_device=torch.device("cpu")), self
        self.encode = encoded

    def texts(self, *_: object) -> tuple[Tensor, Tensor]:
        return TEXTS

    def sound_rows(self, sound: Tensor, count: int) -> Tensor:
        return sound[..., :count]

    def look(self, images: list[Tensor]) -> Tensor:
        self.looked += images
        return torch.ones(1, 5, 6)

    def advanced(self, video: Any) -> Tensor:
        return video.advance(self)

    def get(self, _: str) -> Any:
        return self._forward

    def _forward(self, x: list[Tensor], t: Tensor, *, step: Any, **more: Any) -> list[Tensor]:
        self.calls.append((step.branch, {**more, "x": x[0].clone()}))
        return [torch.zeros_like(x[0])]

    def prefetch(self, _: str) -> None: ...

    def done(self, _: object) -> None: ...

    def decode(self, latents: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(len(self.decoded))
        _, f, h, w = latents.shape
        frames = torch.rand(3, 4 * f - 3, 8 * h, 8 * w, generator=draw) * 2 - 1
        self.decoded.append((latents.clone(), frames))
        return frames.clone()

    def of_clip(self, index: int, branch: str) -> list[dict[str, Any]]:
        """What the network was given in both steps of a clip."""
        own = self.calls[4 * index : 4 * index + 4]
        return [given for name, given in own if name == branch]


def same(found: Tensor, expected: Tensor, what: str = "") -> None:
    assert found.shape == expected.shape, what
    assert (found - expected).abs().max() <= 1e-6, what


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def levels(pixels: Any) -> Tensor:
    """Bytes [...,3] as [3,...] in [-1, 1]."""
    return torch.from_numpy(np.array(pixels)).movedim(-1, 0).float().div(127.5).sub(1)


@pytest.mark.parametrize("from_picture", [False, True])
@pytest.mark.parametrize("posed", [False, True])
def test_clips_that_follow_a_sound(from_picture: bool, posed: bool) -> None:
    """Three clips of 8 frames; the poses end in the second one."""
    image, poses = picture(64, 64), np.random.default_rng(2).integers(0, 256, (11, 64, 64, 3))
    poses = poses.astype(np.uint8)
    values = {**SAMPLING, "infer_frames": 8, "num_clip": 3, "start_from_ref": from_picture}
    request = make_request(PRESETS["s2v-14B"], {**values, "max_area": 64 * 64}, (64, 64))
    sound = torch.randn(1, 25, 6, 24)
    pose = SimpleNamespace(frames=lambda: iter(poses)) if posed else None
    loop: Any = Loop()
    done = list(clips.made(loop, request, Inputs(image, sound=sound, pose=pose)))  # type: ignore[arg-type]
    assert len(done) == 3 and len(loop.calls) == 3 * 2 * 2
    reference, history = encoded(levels(image)[:, None]), torch.zeros(3, 73, 64, 64)
    if from_picture:
        history[:, -6:] = levels(image)[:, None]
    shown = torch.cat((levels(poses), torch.full((3, 13, 64, 64), -1.0)), dim=1)
    for index, clip in enumerate(done):
        alone = index == 0 and not from_picture
        noise = torch.randn(16, 2, 8, 8, generator=torch.Generator().manual_seed(7 + index))
        same(loop.of_clip(index, "cond")[0]["x"], noise, "noise")
        motion, own = encoded(history), slice(8 * index, 8 * index + 8)
        for branch, text, heard in (
            ("cond", TEXTS[0], sound[..., own]),
            ("uncond", TEXTS[1], torch.zeros(1, 25, 6, 8)),
        ):
            for given in loop.of_clip(index, branch):
                assert given["context"][0] is text and given["drop_motion_frames"] == alone
                same(given["audio_input"], heard, branch)
                same(given["ref_latents"][0], reference)
                if not alone:
                    same(given["motion_latents"][0], motion, "end of the clip before")
                if not posed:
                    assert given["cond_states"] is None
                    continue
                frames = shown[:, own]
                repeated = torch.cat((frames[:, :1], frames), dim=1)
                same(given["cond_states"][0], encoded(repeated)[:, 1:], "poses")
        latents, frames = loop.decoded[index]
        same(latents, torch.cat((reference if alone else motion, clip.latents), dim=1))
        new = frames[:, -5 if alone else -8 :]
        assert clip.frames is not None and torch.equal(clip.frames, new)
        history = torch.cat((history, new), dim=1)[:, -73:]


@pytest.mark.parametrize(("replaces", "again"), [(False, 1), (True, 1), (False, 5), (True, 5)])
def test_clips_of_a_character(replaces: bool, again: int) -> None:
    """Poses of 23 frames, in clips of 13; behind their end they run back."""
    random, size = np.random.default_rng(3), (64, 48)
    sides = {"pose": (48, 64), "face": (512, 1), "background": (48, 64), "mask": (48, 64)}
    videos = {n: random.integers(0, 256, (23, *s, 3), dtype=np.uint8) for n, s in sides.items()}
    videos["face"] = np.broadcast_to(videos["face"], (23, 512, 512, 3))
    takes: Any = {name: lambda at, x=x: x[list(at)] for name, x in videos.items()}
    driving = DrivingVideos(picture(64, 48), size, 23, 30.0, takes)
    count = count_clips(23, 13, again)
    values = {**SAMPLING, "frame_num": 13, "refert_num": again, "replace_flag": replaces}
    values |= {"size": size, "source_frames": 23, "num_clip": count}
    request, loop = make_request(PRESETS["animate-14B"], values), Loop()
    assert count == {1: 2, 5: 3}[again]
    made: Any = characters.made(loop, request, Inputs(driving=driving))  # type: ignore[arg-type]
    done, draw = list(made), torch.Generator().manual_seed(7)
    shown, order = levels(driving.picture), [*range(23), *range(21, 0, -1)]
    same(loop.looked[0], shown)
    before: Tensor | None = None
    for index, clip in enumerate(done):
        start = index * (13 - again)
        taken = order[start : start + 13]
        own = {name: levels(x[taken]) for name, x in videos.items()}
        noise = torch.randn(16, 5, 6, 8, generator=draw)
        same(loop.of_clip(index, "cond")[0]["x"], noise, "noise")
        known, keep = torch.zeros(3, 13, 48, 64), torch.zeros(13, 6, 8)
        if replaces:
            known = own["background"].clone()
            keep = 1 - torch.from_numpy(videos["mask"][taken, ::8, ::8, 0] / 255).float()
        if before is not None:
            known[:, :again], keep[:again] = before, 1
        folded = torch.empty(4, 4, 6, 8)
        for channel in range(4):
            folded[channel, 0] = keep[0]
            for frame in (1, 2, 3):
                folded[channel, frame] = keep[4 * frame - 3 + channel]
        reference = torch.cat((torch.ones(4, 1, 6, 8), encoded(shown[:, None])))
        y = torch.cat((reference, torch.cat((folded, encoded(known)))), dim=1)
        faces = {"cond": own["face"], "uncond": torch.full((3, 13, 512, 512), -1.0)}
        for (branch, face), text in zip(faces.items(), TEXTS, strict=True):
            for given in loop.of_clip(index, branch):
                assert given["context"][0] is text
                same(given["face_pixel_values"][0], face, branch)
                same(given["pose_latents"][0], encoded(own["pose"]))
                same(given["y"][0], y, "what is known")
                same(given["clip_fea"], torch.ones(1, 5, 6))
        latents, frames = loop.decoded[index]
        same(latents, clip.latents[:, 1:])
        frames = frames[:, again if index else 0 :]
        before = frames[:, -again:]
        last = 23 - start - again if index + 1 == count else 13
        assert clip.frames is not None and torch.equal(clip.frames, frames[:, :last])
    assert sum(clip.frames.shape[1] for clip in done) == 23
