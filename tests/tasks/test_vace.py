"""Features of VACE only: numbers of inputs and frames, and invalid inputs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tests.conftest import Refusals, Tiny
from tests.pipelines import resolve_plan
from tests.tasks.conftest import run_generate
from tests.tasks.tasks import QUICK, write_moving_box, write_picture
from wan.settings.presets import PRESETS
from wan.tasks.vace import TASK, VaceInputs, make_vace_context, read_vace_files

pytestmark = pytest.mark.xdist_group("tasks")


def test_repeated_pictures(tmp_path: Path) -> None:
    """Each use of the flag adds an image."""
    paths = [write_picture(tmp_path / f"{name}.png", 1) for name in "ab"]
    flags = [word for path in paths for word in ("--src_ref_images", path)]
    run = resolve_plan("--task", "vace-1.3B", *flags, "--conditioning_scale", "0.5")
    assert run.settings["src_ref_images"] == (*map(str, paths),)
    assert run.params.num_reference_images == 2
    assert run.params.conditioning_scale == (0.5,)


def test_a_shorter_and_larger_video_than_the_default(tmp_path: Path) -> None:
    """Without `frame_num` the video is as long as its source, within the area of `size`."""
    source = write_moving_box(tmp_path / "s.mp4", (128, 96), 7, fps=24)
    run = resolve_plan("--task", "vace-1.3B", "--src_video", source, "--size", "48*32")
    actual = run.params.frame_num, run.params.video_size, run.output.fps
    assert actual == (5, (48, 32), 24)


@pytest.mark.parametrize(
    ("source", "requested", "default", "counted"),
    [
        (100, None, None, None),
        (80, None, None, 77),
        (80, 33, None, None),
        (33, None, 17, None),
        (16, None, 17, 13),
        (33, 33, 81, None),
    ],
)
def test_number_of_frames_read_from_a_source(
    source: int, requested: int | None, default: int | None, counted: int | None
) -> None:
    """The requested number, else the default of the checkpoint or task, at most all, 4n + 1."""
    values, defaults, wanted = (
        {} if count is None else {"frame_num": count} for count in (requested, default, counted)
    )
    video: Any = object()  # not read in this test
    sources = VaceInputs(num_frames=source, video_reader=video)
    updates = TASK.complete_settings(PRESETS["vace-1.3B"], values, sources, defaults)
    assert updates == {"num_reference_images": 0, **wanted}


def make_context(video: Path, mask: Path) -> Tensor:
    """Returns the context of 5 frames with a fake VAE, the average of 4 frames and 8 x 8 pixels."""

    def encode(video_3FHW: Tensor) -> Tensor:
        cells_3fhw = F.avg_pool2d(video_3FHW[:, [0, 4]], 8)
        return torch.cat((cells_3fhw, torch.zeros(13, *cells_3fhw.shape[1:])))

    params: Any = SimpleNamespace(video_size=(64, 48), frame_num=5)
    return make_vace_context(params, read_vace_files(video, mask, ()), encode)


def test_a_still_mask_of_any_color(tmp_path: Path) -> None:
    """It is the mask of all frames; luma counts, and a gray value stays what it is."""
    video = write_moving_box(tmp_path / "video.mp4")
    pixels = np.zeros((48, 64, 3), np.uint8)
    for column, color in enumerate(([255] * 3, [128] * 3, [127] * 3, [0, 255, 0], [255, 0, 0])):
        pixels[:, 8 * column : 8 * column + 8] = color
    luma = np.array([255, 128, 127, 0.587 * 255, 0.299 * 255, 0, 0, 0])
    source = make_context(video, video)  # its reactive and inactive parts add up to the video
    frames = source[:3] + source[16:19]
    for name in ("mask.png", "mask.bmp", "mask"):
        path = tmp_path / name
        Image.fromarray(pixels).save(path, format="BMP" if name == "mask.bmp" else "PNG")
        context = make_context(video, path)
        is_reactive = torch.from_numpy(luma > 127)
        assert torch.allclose(context[:3], frames * ~is_reactive, atol=1e-6), name
        assert torch.allclose(context[16:19], frames * is_reactive, atol=1e-6), name
        expected = torch.from_numpy(luma / 255).float().expand(64, 2, 6, 8)
        assert (context[32:] - expected).abs().max() <= 0.5 / 255 + 1e-6, name


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans a video of the published model without any inputs."""
    assert run_generate("--task", "vace-1.3B", "--plan", "--frame_num", 5, "--device", "cpu") == 0
    assert "denoising" in capsys.readouterr().out.lower()


VIDEO = ["--src_video", "v.mp4"]
BAD: dict[str, list[str]] = {
    "nothing": [],
    "small mask": [*VIDEO, "--src_mask", "small.mp4"],
    "long mask": [*VIDEO, "--src_mask", "eight.mp4"],
    "small still mask": [*VIDEO, "--src_mask", "small.png"],
    "damaged still mask": [*VIDEO, "--src_mask", "half.png"],
    "mask alone": ["--src_mask", "eight.mp4"],
    "short video": ["--src_video", "four.mp4"],
    "fast video": ["--src_video", "fast.mp4"],
    "no video": ["--src_video", "absent.mp4"],
    "text": ["--src_video", "text.mp4"],
    "text as mask": [*VIDEO, "--src_mask", "text.mp4"],
    "picture of text": ["--src_ref_images", "text.png"],
    "no picture": ["--src_ref_images", "absent.png"],
    "40 pictures": ["--src_ref_images", ",".join(["absent.png"] * 40)],
    "three scales": [*VIDEO, "--conditioning_scale", "1,0.5,0.2"],
    "a word as scale": [*VIDEO, "--conditioning_scale", "much"],
    "image": ["--image", "a.png"],
}
VACE_FLAGS = {
    "a mask": [*VIDEO, "--src_mask", "v.mp4"],
    "pictures": ["--src_ref_images", "a.png"],
    "a scale": ["--conditioning_scale", "2"],
}


def test_refusals(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.chdir(tmp_path)
    write_moving_box(tmp_path / "v.mp4")
    write_moving_box(tmp_path / "small.mp4", (48, 48))
    write_moving_box(tmp_path / "eight.mp4", count=8)
    write_moving_box(tmp_path / "four.mp4", count=4)
    write_moving_box(tmp_path / "fast.mp4", fps=300)
    picture = write_picture(tmp_path / "small.png").read_bytes()
    (tmp_path / "half.png").write_bytes(picture[: len(picture) // 2])
    for name in ("text.mp4", "text.png"):
        (tmp_path / name).write_bytes(b"x" * 999)
    start = ["--task", "vace-1.3B", "--ckpt_dir", tiny("vace-1.3B"), "--prompt", "a cat walks"]
    start += ["--size", "48*32", "--frame_num", "5", *QUICK]
    refusals("vace", {case: [*start, *flags] for case, flags in BAD.items()})
    weights = {f"{n} of 8 weights": ",".join(["0.5"] * n) for n in (2, 7, 9)}
    plan = ["--plan", "--task", "vace-14B", "--device", "cuda", "--conditioning_scale"]
    refusals("vace: plans", {case: [*plan, scale] for case, scale in weights.items()})
    other_tasks = {case: ["--task", "t2v-1.3B", *flags] for case, flags in VACE_FLAGS.items()}
    refusals("vace: with other tasks", other_tasks)
