"""Properties of every task in one process: the rows of a table whose columns are `TASKS`.

By default a row runs with the tasks that its decorator names, so that each row and each task is
tested; `make test-all` runs the whole table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import failing
from tests.conftest import Tiny, slow
from tests.dist import Ranks
from tests.inputs import changed_contents
from tests.tasks.conftest import Asked, frames, run
from tests.tasks.tasks import TASKS
from wan.cli import flags as command_line
from wan.cli.resolve import resolve_command_line
from wan.pipeline.video import write_video
from wan.planner.measure import Planner
from wan.settings.command import Output
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.torch_private import StorageTracker

pytestmark = pytest.mark.xdist_group("tasks")
Ask = Callable[[str], Asked]


def of(*default: str) -> pytest.MarkDecorator:
    """Parametrizes a test over all tasks; tasks that are not named are slow."""
    each = [name if name in default else slow(name) for name in TASKS]
    return pytest.mark.parametrize("task", each)


@of("t2v", "ti2v", "s2v", "animate", "first and last")
def test_the_files_of_a_run(task: str, asked: Ask) -> None:
    """The run writes a video of the requested size, its record, saved latents, and nothing else."""
    one = asked(task)
    count, height, width = one.task.shape
    shape = one.frames.shape
    assert shape[1:] == (height, width, 3)
    assert shape[0] in ((count - 1, count) if task == "s2v" else (count,))  # the sound ends it
    record = json.loads(one.video.with_suffix(".json").read_text())
    video = {"frames": count, "width": width, "height": height, "fps": one.task.fps}
    assert record["video"] == video and record["seed"] == 7
    settings = record["settings"]
    assert (settings["task"], settings["base_seed"]) == (one.task.checkpoint, 7)
    for flag, path in one.inputs.items():
        assert settings[flag[2:]] in (str(path), [str(path)])
    assert {"text", "conditioning", "denoising", "decoding", "writing"} <= {*record["seconds"]}
    kept = [".latents.safetensors"] if one.task.latents else []
    names = {f"plain{end}" for end in (".mp4", ".json", *kept)}
    assert {path.name for path in one.video.parent.iterdir()} == names


@of("vace", "long")
def test_a_record_repeats_the_video(task: str, asked: Ask, tmp_path: Path) -> None:
    one, again = asked(task), tmp_path / "again.mp4"
    assert run("--from_json", one.video.with_suffix(".json"), "--save_file", again) == 0
    assert (frames(again) == one.frames).all()
    assert again.with_suffix(".latents.safetensors").exists() == one.task.latents


@of("ti2v")
def test_kept_latents_decode_to_the_video(
    task: str, asked: Ask, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tasks that decode clip by clip refuse to save the latents of the whole video."""
    one, out = asked(task), tmp_path / "v.mp4"
    if one.task.latents:
        latents = one.video.with_suffix(".latents.safetensors")
        given = ["--decode_latents", latents, "--ckpt_dir", one.folder]
        assert run(*given, "--save_file", out) == 0
        assert (frames(out) == one.frames).all()
    elif task != "long":  # its clips are kept instead
        assert run(*one.argv, "--save_latents", "--save_file", out) == 2
        assert "--save_latents" in capfd.readouterr().err


@of("i2v", "vace")
def test_moving_each_block_changes_no_bit(task: str, asked: Ask, tmp_path: Path) -> None:
    one = asked(task)
    flags = ["--offload_model", "block", "--text_kv_cache", "false"]
    assert (one.made(tmp_path / "v.mp4", *flags) == one.frames).all()


@of("t2v")
def test_keeping_all_networks_changes_no_bit(task: str, asked: Ask, tmp_path: Path) -> None:
    one = asked(task)
    assert (one.made(tmp_path / "v.mp4", "--offload_model", "false") == one.frames).all()


@of("first and last")
def test_projecting_the_text_anew_changes_no_bit(task: str, asked: Ask, tmp_path: Path) -> None:
    one = asked(task)
    assert (one.made(tmp_path / "v.mp4", "--text_kv_cache", "false") == one.frames).all()


@of("ti2v")
def test_diffusers_files_give_the_same_video(
    task: str, asked: Ask, tiny: Tiny, tmp_path: Path
) -> None:
    one = asked(task)
    if task == "s2v":  # nobody publishes such files
        with pytest.raises(InputError):
            tiny(one.task.checkpoint, "diffusers")
        return
    flags = ["--ckpt_dir", tiny(one.task.checkpoint, "diffusers")]
    assert (one.made(tmp_path / "v.mp4", *flags) == one.frames).all()


@of("vace")
def test_a_step_cache_begins_anew_with_each_video(task: str, asked: Ask, tmp_path: Path) -> None:
    """And with each clip, whose steps the record lists. Each expert computes its first step."""
    one = asked(task)
    flags = ["--step_cache", "steps:1,3", "--sample_steps", "6", "--step_cache_force"]
    one.made(tmp_path / "v.mp4", *flags)
    computed = json.loads((tmp_path / "v.json").read_text())["step_cache"]["computed"]
    steps, experts = computed["cond"], PRESETS[one.task.checkpoint].experts
    assert {0, 1, 3} <= {*steps} and len(steps) == 2 + len(experts)
    assert computed["uncond"] == steps


@of("long")
@pytest.mark.parametrize("grouped", [False, slow(True)])
def test_a_prompt_file(task: str, grouped: bool, asked: Ask, tmp_path: Path) -> None:
    """Between other lines: no state of a video affects the next one."""
    one = asked(task)
    lines = [{**one.task.line, "base_seed": 8}, one.task.line, {**one.task.line, "base_seed": 9}]
    file = tmp_path / "lines.jsonl"
    named = [{**line, "save_file": f"{n}.mp4"} for n, line in enumerate(lines)]
    file.write_text("".join(json.dumps(line) + "\n" for line in named))
    flags = ["--group_by_expert"] if grouped else []
    out = ["--prompt_file", file, "--save_file", tmp_path / "out"]
    if grouped and len(PRESETS[one.task.checkpoint].experts) == 1:
        assert run(*one.start, *flags, *out) == 2
        return
    assert run(*one.start, *flags, *out) == 0
    first, second, third = (frames(tmp_path / "out" / f"{n}.mp4") for n in range(3))
    assert (second == one.frames).all()
    assert (first != second).any() and (third != second).any()


@of("vace")
def test_the_python_class_makes_the_same_video(task: str, asked: Ask, tmp_path: Path) -> None:
    one, out = asked(task), Output(save_file=tmp_path / "v.mp4", fps=asked(task).task.fps)
    model = one.task.python(one.task.checkpoint, one.folder)
    write_video(one.task.call(model, one.inputs), out)
    found, wanted = frames(tmp_path / "v.mp4"), one.frames
    if task in ("s2v", "long"):  # encoded with a sound, or clip by clip
        off = found[: len(wanted)].astype(int) - wanted
        assert len(found) == one.task.shape[0] and np.abs(off).mean() < 1
    else:
        assert (found == wanted).all()


@of("ti2v")
def test_a_run_after_a_killed_one(task: str, asked: Ask, tmp_path: Path) -> None:
    """The same video; no files of the killed run remain."""
    one, out = asked(task), tmp_path / "v.mp4"
    argv = [*one.argv, "--save_file", str(out)]
    with Ranks([{}], failing.main, "kill", "0", *argv) as killed:
        assert killed.ended() == [-9], killed.said()
    assert not out.exists()
    assert run(*argv) == 0
    assert (frames(out) == one.frames).all()
    assert {path.name for path in tmp_path.iterdir()} == {"v.mp4", "v.json"}


@of("t2v", "i2v", "ti2v", "first and last", "vace", "s2v", "animate", "long")
def test_ranks_compare_what_the_video_is_made_from(task: str, asked: Ask, tmp_path: Path) -> None:
    one = asked(task)
    for flag, inner in one.task.compared:
        copies = tmp_path / f"{flag}{inner}"
        copies.mkdir()
        assert changed_contents(one.argv, flag, copies, inner) == {f"the content of {flag}"}
    assert {flag for flag, _ in one.task.compared} == one.inputs.keys()


@of("vace")
def test_a_run_takes_no_more_than_planned(task: str, asked: Ask, tmp_path: Path) -> None:
    """Compares the peak bytes of live tensors, without weights in memory-mapped files."""
    one = asked(task)
    argv = [*one.argv, "--save_file", str(tmp_path / "v.mp4"), "--device", "cpu"]
    live = StorageTracker("cpu")
    with live:
        assert run(*argv) == 0
    plan = resolve_command_line(
        command_line.parse_flags([*argv, "--plan"]), lambda *_: None, plan=True
    )
    planned = Planner(plan.setup, plan.params).compute_peak_bytes()
    assert live.peak_bytes.total() <= planned
