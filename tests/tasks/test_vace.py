"""Features of VACE only: subsets of the inputs, conditioning scales, and invalid inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Refusals, Tiny, slow
from tests.tasks.conftest import TaskRun, read_frames, run_generate
from tests.tasks.tasks import QUICK, write_moving_box, write_picture
from wan.settings.presets import PRESETS
from wan.tasks.vace import TASK, VaceInputs

pytestmark = pytest.mark.xdist_group("tasks")


@pytest.fixture
def one(asked: Callable[[str], TaskRun]) -> TaskRun:
    return asked("vace")


def drop_flags(task_run: TaskRun, *flags: str) -> list[str]:
    """Returns the command line without some inputs."""
    argv = task_run.argv
    for flag in flags:
        index = argv.index(flag)
        argv = [*argv[:index], *argv[index + 2 :]]
    return argv


@pytest.mark.parametrize(
    "left_out",
    [
        ["--src_mask"],
        slow(["--src_ref_images"]),
        slow(["--src_mask", "--src_ref_images"]),
        ["--src_video", "--src_mask"],
    ],
    ids=str,
)
def test_subsets(left_out: list[str], one: TaskRun, tmp_path: Path) -> None:
    assert run_generate(*drop_flags(one, *left_out), "--save_file", tmp_path / "v.mp4") == 0
    output = read_frames(tmp_path / "v.mp4")
    assert output.shape == (5, 32, 48, 3) and (output != one.frames).any()


@pytest.mark.parametrize(("scale", "same"), [("0.5", False), ("1,1", True)])
def test_scales_of_the_control(scale: str, same: bool, one: TaskRun, tmp_path: Path) -> None:
    output = one.make_frames(tmp_path / "v.mp4", "--conditioning_scale", scale)
    assert (output == one.frames).all() == same


def test_repeated_pictures(one: TaskRun, tmp_path: Path) -> None:
    """Each use of the flag adds an image; the latent frames of the images are not decoded."""
    more = ["--src_ref_images", write_picture(tmp_path / "b.png", 1)]
    output = one.make_frames(tmp_path / "v.mp4", *more)
    assert output.shape == one.frames.shape and (output != one.frames).any()
    record = json.loads((tmp_path / "v.json").read_text())
    images = record["settings"]["src_ref_images"]
    assert images == [str(one.inputs["--src_ref_images"]), str(tmp_path / "b.png")]


def test_a_shorter_and_larger_video_than_the_default(one: TaskRun, tmp_path: Path) -> None:
    """Without `frame_num` the video is as long as its source, within the area of `size`."""
    source = write_moving_box(tmp_path / "s.mp4", (128, 96), 7, fps=24)
    argv = drop_flags(one, "--frame_num", "--src_mask", "--src_ref_images")
    assert run_generate(*argv, "--src_video", source, "--save_file", tmp_path / "v.mp4") == 0
    record = json.loads((tmp_path / "v.json").read_text())
    assert record["video"] == {"frames": 5, "width": 48, "height": 32, "fps": 24}


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


@pytest.mark.slow
def test_two_experts_of_a_prompt_file(one: TaskRun, tiny: Tiny, tmp_path: Path) -> None:
    """Grouped by expert: the control inputs of a paused video are offloaded to the host."""
    lines = [
        {"prompt": name, flag[2:]: str(one.inputs[flag])}
        for name, flag in (("a", "--src_ref_images"), ("b", "--src_video"))
    ]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--task", "vace-A14B", "--ckpt_dir", tiny("vace-A14B"), *one.task.flags, *QUICK]
    argv += ["--prompt_file", tmp_path / "lines.jsonl"]
    assert run_generate(*argv, "--group_by_expert", "--save_file", tmp_path / "grouped") == 0
    assert run_generate(*argv, "--save_file", tmp_path / "single") == 0
    grouped, single = (sorted((tmp_path / name).glob("*.mp4")) for name in ("grouped", "single"))
    for grouped_video, single_video in zip(grouped, single, strict=True):
        assert (read_frames(grouped_video) == read_frames(single_video)).all()


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
    one: TaskRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.chdir(tmp_path)
    write_moving_box(tmp_path / "v.mp4")
    write_moving_box(tmp_path / "small.mp4", (48, 48))
    write_moving_box(tmp_path / "eight.mp4", count=8)
    write_moving_box(tmp_path / "four.mp4", count=4)
    write_moving_box(tmp_path / "fast.mp4", fps=300)
    for name in ("text.mp4", "text.png"):
        (tmp_path / name).write_bytes(b"x" * 999)
    start = drop_flags(one, *one.inputs)
    refusals("vace", {case: [*start, *flags] for case, flags in BAD.items()})
    weights = {f"{n} of 8 weights": ",".join(["0.5"] * n) for n in (2, 7, 9)}
    plan = ["--plan", "--task", "vace-14B", "--device", "cuda", "--conditioning_scale"]
    refusals("vace: plans", {case: [*plan, scale] for case, scale in weights.items()})
    other_tasks = {case: ["--task", "t2v-1.3B", *flags] for case, flags in VACE_FLAGS.items()}
    refusals("vace: with other tasks", other_tasks)
