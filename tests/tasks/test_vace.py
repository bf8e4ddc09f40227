"""Features of VACE only: numbers of inputs and frames, and invalid inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Refusals, Tiny
from tests.pipelines import resolve_plan
from tests.tasks.conftest import run_generate
from tests.tasks.tasks import QUICK, write_moving_box, write_picture
from wan.settings.presets import PRESETS
from wan.tasks.vace import TASK, VaceInputs

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


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans a video of the published model without any inputs."""
    assert run_generate("--task", "vace-1.3B", "--plan", "--frame_num", 5, "--device", "cpu") == 0
    assert "denoising" in capsys.readouterr().out.lower()


VIDEO = ["--src_video", "v.mp4"]
BAD: dict[str, list[str]] = {
    "nothing": [],
    "small mask": [*VIDEO, "--src_mask", "small.mp4"],
    "long mask": [*VIDEO, "--src_mask", "eight.mp4"],
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
