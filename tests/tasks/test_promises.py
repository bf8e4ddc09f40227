"""Properties of every task in one process: the rows of a table whose columns are `TASKS`.

By default a row runs with the tasks that its decorator names, so that each row and each task is
tested; `make test-all` runs the whole table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest
import torch

from tests.conftest import Tiny, slow
from tests.inputs import find_changed_invariants
from tests.pipelines import read_values
from tests.tasks.conftest import TaskRun, read_frames, run_generate
from tests.tasks.tasks import TASKS
from wan.app import flag_parser as command_line
from wan.app.resolve import ResolveContext, resolve_video
from wan.media import video_writer
from wan.media.video_writer import write_video
from wan.modules.fused_ops import BlockOps
from wan.pipeline.pipeline import Pipeline
from wan.planner.measure import Planner
from wan.settings.command import Output
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.tasks.base import TASKS as ROOMS
from wan.tasks.base import get_task
from wan.utils.files import PREVIEW_KIND, is_output
from wan.utils.torch_private import StorageTracker

pytestmark = pytest.mark.xdist_group("tasks")
Ask = Callable[[str], TaskRun]


def parametrize_tasks(*default: str) -> pytest.MarkDecorator:
    """Parametrizes a test over all tasks; tasks that are not named are slow."""
    tasks = [name if name in default else slow(name) for name in TASKS]
    return pytest.mark.parametrize("task", tasks)


@parametrize_tasks("t2v", "ti2v", "s2v", "animate2", "first and last")
def test_the_files_of_a_run(task: str, asked: Ask) -> None:
    """The run writes a video of the requested size, its record, saved latents, and nothing else."""
    task_run = asked(task)
    count, height, width = task_run.task.shape
    shape = task_run.frames.shape
    assert shape[1:] == (height, width, 3)
    assert shape[0] in ((count - 1, count) if task == "s2v" else (count,))  # the sound ends it
    record = json.loads(task_run.video.with_suffix(".json").read_text())
    video = {"frames": count, "width": width, "height": height, "fps": task_run.task.fps}
    assert record["video"] == video and record["seed"] == 7
    settings = record["settings"]
    assert (settings["task"], settings["base_seed"]) == (task_run.task.checkpoint, 7)
    for flag, path in task_run.inputs.items():
        assert settings[flag[2:]] in (str(path), [str(path)])
    assert {"text", "conditioning", "denoising", "decoding", "writing"} <= {*record["seconds"]}
    latents_suffixes = [".latents.safetensors"] if task_run.task.latents else []
    names = {f"plain{end}" for end in (".mp4", ".json", *latents_suffixes)}
    assert {path.name for path in task_run.video.parent.iterdir()} == names


@parametrize_tasks("video to video")
def test_a_record_repeats_the_video(task: str, asked: Ask, tmp_path: Path) -> None:
    task_run, repeated = asked(task), tmp_path / "again.mp4"
    assert (
        run_generate("--from_json", task_run.video.with_suffix(".json"), "--save_file", repeated)
        == 0
    )
    assert (read_frames(repeated) == task_run.frames).all()
    assert repeated.with_suffix(".latents.safetensors").exists() == task_run.task.latents


@parametrize_tasks("ti2v")
def test_kept_latents_decode_to_the_video(
    task: str, asked: Ask, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tasks that decode clip by clip refuse to save the latents of the whole video."""
    task_run, out = asked(task), tmp_path / "v.mp4"
    if task_run.task.latents:
        latents = task_run.video.with_suffix(".latents.safetensors")
        decode_flags = ["--decode_latents", latents, "--ckpt_dir", task_run.checkpoint]
        assert run_generate(*decode_flags, "--save_file", out) == 0
        assert (read_frames(out) == task_run.frames).all()
    elif task != "long":  # its clips are kept instead
        assert run_generate(*task_run.argv, "--save_latents", "--save_file", out) == 2
        assert "--save_latents" in capfd.readouterr().err


UNCHANGED = {
    "blocks are moved": (["--offload_model", "block"], "vace"),
    "all networks are kept": (["--offload_model", "false"], "i2v"),
}


@pytest.mark.parametrize(
    ("flags", "task"),
    [
        pytest.param(flags, task, id=f"{how}-{task}", marks=[pytest.mark.slow] * (task != default))
        for how, (flags, default) in UNCHANGED.items()
        for task in TASKS
    ],
)
def test_placement_changes_no_bit(flags: list[str], task: str, asked: Ask, tmp_path: Path) -> None:
    task_run = asked(task)
    assert (task_run.make_frames(tmp_path / "v.mp4", *flags) == task_run.frames).all()


@parametrize_tasks("t2v")
def test_previews_change_no_bit(
    task: str, asked: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """A picture is written after each step of each clip, and removed with the complete video."""
    task_run, out, pictures = asked(task), tmp_path / "v.mp4", list[np.ndarray]()
    save_preview = video_writer.save_preview

    def record_preview(frame: torch.Tensor, path: Path) -> None:
        save_preview(frame, path)
        assert path == tmp_path / "v.preview.jpg" and is_output(path, PREVIEW_KIND)
        pictures.append(imageio.v3.imread(path))

    monkeypatch.setattr(video_writer, "save_preview", record_preview)
    assert (task_run.make_frames(out, "--preview", 1) == task_run.frames).all()
    assert capfd.readouterr().out.count("Preview, renewed") == 1
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["seconds"]["preview"] > 0 and "preview" not in record["settings"]
    num_steps = record.get("start", {"steps": 2})["steps"] * (2 if task == "causal" else 1)
    assert len(pictures) == num_steps * (record["settings"].get("num_clip") or 1)
    assert {picture.shape for picture in pictures} == {task_run.frames.shape[1:]}
    assert {path.name for path in tmp_path.iterdir()} == {"v.mp4", "v.json"}


@parametrize_tasks("first and last")  # a video of animate takes ten times as long
def test_guidance_of_each_task(task: str, asked: Ask) -> None:
    """NAG without a share of the output changes no bit; with one, and with others, it does."""
    task_run = asked(task)
    if task == "causal":  # it has none
        assert run_generate(*task_run.argv, "--sample_guide_scale", "2") == 2
        return
    model = task_run.task.python(task_run.task.checkpoint, task_run.checkpoint)

    def generate(**settings: Any) -> torch.Tensor:
        shared = {"output_type": "latent", "offload_model": False}
        return task_run.task.generate(model, task_run.inputs, **shared, **settings)

    plain, unguided = generate(), generate(guide_scale=1.0)
    assert torch.equal(generate(nag_scale="11:alpha=0"), plain)
    nag = {"nag_scale": "11:alpha=1"}
    skipped = {"slg_blocks": "0:start=0"}
    for settings in (nag, skipped, {"guider": "cfg_zero"}, {"guider": "apg"}):
        assert not torch.equal(generate(**settings), plain), settings
    assert not torch.equal(generate(**nag, guide_scale=1.0), unguided)


@parametrize_tasks("ti2v")
def test_diffusers_files_give_the_same_video(
    task: str, asked: Ask, tiny: Tiny, tmp_path: Path
) -> None:
    task_run = asked(task)
    if task in ("s2v", "causal"):  # nobody publishes such files
        with pytest.raises(InputError):
            tiny(task_run.task.checkpoint, "diffusers")
        return
    flags = ["--ckpt_dir", tiny(task_run.task.checkpoint, "diffusers")]
    assert (task_run.make_frames(tmp_path / "v.mp4", *flags) == task_run.frames).all()


@parametrize_tasks("vace")
def test_a_step_cache_begins_anew_with_each_video(task: str, asked: Ask, tmp_path: Path) -> None:
    """And with each clip, whose steps the record lists. Each expert computes its first step."""
    task_run = asked(task)
    flags = ["--step_cache", "steps:1,3,force=true", "--sample_steps", "6"]
    if task == "causal":
        assert run_generate(*task_run.argv, *flags) == 2
        return
    task_run.make_frames(tmp_path / "v.mp4", *flags)
    record = json.loads((tmp_path / "v.json").read_text())
    computed, experts = record["step_cache"]["computed"], PRESETS[task_run.task.checkpoint].experts
    first = record.get("start", {"step": 0})["step"]
    steps, expected = computed["cond"], {first, 1, 3} - {*range(first)}
    num_experts = 1 if first else len(experts)  # from the middle there is the low-noise expert only
    assert expected <= {*steps} and len(steps) == len(expected) + num_experts - 1
    assert computed["uncond"] == steps


@parametrize_tasks("t2v")  # of long videos: test_long_videos.py
@pytest.mark.parametrize("grouped", [False, slow(True)])
def test_a_prompt_file(task: str, grouped: bool, asked: Ask, tmp_path: Path) -> None:
    """Between other lines: no state of a video affects the next one."""
    task_run = asked(task)
    lines = [
        {**task_run.task.line, "base_seed": 8},
        task_run.task.line,
        {**task_run.task.line, "base_seed": 9},
    ]
    file = tmp_path / "lines.jsonl"
    named = [{**line, "save_file": f"{n}.mp4"} for n, line in enumerate(lines)]
    file.write_text("".join(json.dumps(line) + "\n" for line in named))
    flags = ["--group_by_expert"] if grouped else []
    out = ["--prompt_file", file, "--save_file", tmp_path / "out"]
    if grouped and len(PRESETS[task_run.task.checkpoint].experts) == 1:
        assert run_generate(*task_run.start, *flags, *out) == 2
        return
    assert run_generate(*task_run.start, *flags, *out) == 0
    first, second, third = (read_frames(tmp_path / "out" / f"{n}.mp4") for n in range(3))
    assert (second == task_run.frames).all()
    assert (first != second).any() and (third != second).any()


@parametrize_tasks("vace")
def test_the_python_class_makes_the_same_video(task: str, asked: Ask, tmp_path: Path) -> None:
    task_run, out = asked(task), Output(save_file=tmp_path / "v.mp4", fps=asked(task).task.fps)
    model = task_run.task.python(task_run.task.checkpoint, task_run.checkpoint)
    write_video(task_run.task.generate(model, task_run.inputs), out)
    output, expected = read_frames(tmp_path / "v.mp4"), task_run.frames
    if task in ("s2v", "long"):  # encoded with a sound, or clip by clip
        difference = output[: len(expected)].astype(int) - expected
        assert len(output) == task_run.task.shape[0] and np.abs(difference).mean() < 1
    else:
        assert (output == expected).all()


@pytest.mark.parametrize("task", [slow("s2v"), slow("animate"), "animate2"])
def test_a_failed_video_of_clips_goes_on(
    task: str, asked: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first clip is not made again, and the video is that of one run.

    Of long videos, and after a kill: test_long_videos.py.
    """
    task_run, out, denoise = asked(task), tmp_path / "v.mp4", Pipeline.denoise
    calls, frames = list[object](), task_run.frames

    def fail_in_the_second_clip(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return denoise(*args, **options)

    monkeypatch.setattr(Pipeline, "denoise", fail_in_the_second_clip)
    assert run_generate(*task_run.argv, "--save_file", out) == 1
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {"0001.mp4", "0001.safetensors"}
    assert (task_run.make_frames(out) == frames).all() and len(calls) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"v.mp4", "v.json"}


@parametrize_tasks("first and last", "vace", "s2v", "animate", "animate2")
def test_ranks_compare_what_the_video_is_made_from(task: str, asked: Ask, tmp_path: Path) -> None:
    task_run = asked(task)
    for flag, path in task_run.inputs.items():
        for inner in ("src_ref.png", "src_pose.mp4") if path.is_dir() else ("",):
            copies = tmp_path / f"{flag}{inner}"
            copies.mkdir()
            changed = find_changed_invariants(task_run.argv, flag, copies, inner)
            assert changed == {f"the content of {flag}"}


@parametrize_tasks("i2v", "ti2v", "first and last", "vace", "s2v", "animate2")
def test_a_plan_counts_the_encoded_latents(task: str, asked: Ask) -> None:
    task_run = asked(task)
    flags = command_line.parse_flags([*task_run.argv, "--plan"])
    params = resolve_video(ResolveContext(plan=True, make_demo=lambda *_: None), flags).params
    assert task_run.num_encoded_latents == params.task.count_encoded_latents(params)


@pytest.mark.parametrize("task", TASKS)
def test_inputs_list_the_files_of_the_video(task: str, tmp_path: Path) -> None:
    """Ranks compare these files in the Python classes, and images by their pixels."""
    files, preset = TASKS[task].inputs(tmp_path), PRESETS[TASKS[task].checkpoint]
    values = read_values({flag[2:]: str(path) for flag, path in files.items()})
    inputs = get_task(preset.kind).read_inputs(preset, values)
    for flag, path in files.items():
        if flag not in ("--image", "--last_image"):
            assert any(path in (file, file.parent) for file in inputs.files), flag


def test_each_kind_of_task_is_tested() -> None:
    assert {PRESETS[task.checkpoint].kind for task in TASKS.values()} == ROOMS.keys()


@parametrize_tasks("vace")
def test_a_run_takes_no_more_than_planned(task: str, asked: Ask, tmp_path: Path) -> None:
    """Compares the peak bytes of live tensors, without weights in memory-mapped files."""
    task_run = asked(task)
    guidance = ["--nag_scale", "5", "--guider", "apg"] if task not in ("t2v", "causal") else []
    argv = [*task_run.argv, *guidance, "--save_file", str(tmp_path / "v.mp4"), "--device", "cpu"]
    live = StorageTracker("cpu")
    with live:
        assert run_generate(*argv) == 0
    plan = resolve_video(
        ResolveContext(plan=True, make_demo=lambda *_: None),
        command_line.parse_flags([*argv, "--plan"]),
    )
    planned = Planner(plan.setup, plan.params).compute_peak_bytes()
    assert live.peak_bytes.total() <= planned


@pytest.mark.parametrize("task", ["t2v", "vace"])
def test_small_operations_are_compiled_if_the_video_repays_it(
    task: str, asked: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is the elements of the residual stream in all calls of the blocks."""
    task_run, elements, compiled = asked(task), list[int](), list[str]()
    compute = BlockOps.add_modulated_norm

    def count_and_compute(ops: BlockOps, x_BLC: torch.Tensor, *args: Any) -> Any:
        elements.append(x_BLC.numel())
        return compute(ops, x_BLC, *args)

    def make_eager(op: Callable[..., torch.Tensor], **_: object) -> Callable[..., torch.Tensor]:
        compiled.append(op.__name__)
        return op

    monkeypatch.setattr(BlockOps, "add_modulated_norm", count_and_compute)
    monkeypatch.setattr(torch, "compile", make_eager)
    monkeypatch.setattr("wan.kernels.registry.MIN_ELEMENTS", 1)
    argv = [*task_run.argv, "--device", "cpu", "--save_file", tmp_path / "v.mp4"]
    assert run_generate(*argv) == 0
    assert not compiled and elements
    work = sum(elements)
    for min_work, is_compiled in ((work, True), (work + 1, False)):
        monkeypatch.setattr("wan.kernels.registry.MIN_WORK", min_work)
        compiled.clear()
        assert run_generate(*argv) == 0
        assert bool(compiled) == is_compiled, work
