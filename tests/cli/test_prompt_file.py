"""--prompt_file: many videos after one load, lines that fail, and a continued run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Refusals, Tiny
from tests.dist import GENERATE, TORCHRUN, Ranks, make_rank_envs
from tests.pipelines import resolve_argv
from tests.refusals import check_refusals
from wan.app import resolve
from wan.checkpoint.layout import inspect_checkpoint
from wan.cli import main as generate
from wan.device import Device
from wan.media import video_writer
from wan.settings.errors import InputError

QUICK = ["--size", "32*32", "--frame_num", "5", "--sample_steps", "2", "--save_latents"]
SMALL = ["--size", "16*16", "--frame_num", "1", "--sample_steps", "1"]
LINES = [
    "a red fox",
    "",
    json.dumps({"prompt": "a blue whale", "seed": 5, "sample_steps": 3}),
    json.dumps({"prompt": "no such length", "frame_num": 8}),
    "a red fox",
    json.dumps({"prompt": "named", "save_file": "own.mp4", "seed": 9}),
]


def write_prompts(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    return path


def resolve_prompts(path: Path, *argv: str) -> Any:
    return resolve_argv(["--prompt_file", path, *argv])


def load_video_latents(video: Path) -> torch.Tensor:
    return load_file(video.with_suffix(".latents.safetensors"))["latents"]


BAD_LINES = [
    '{"prompt": "x"',
    '{"prompt": 3}',
    '{"prompt": null}',
    '{"seed": null}',
    '{"seeds": null}',
    '{"seeds": [null]}',
    '{"seeds": [[1]]}',
    '{"task": "t2v-A14B"}',
    '{"ulysses_size": 2}',
    '{"offload_model": false}',
    '{"lora": ["x"]}',
    '{"colour": "red"}',
    '{"\\ud800": "red"}',
    '{"prompt": "\\ud800"}',
    '{"seed": 1, "base_seed": 2}',
    '{"prompt": "x", "seed": 1, "seed": 1}',
    '{"prompt": "x", "video_lora": [{"name": "a", "name": "b"}]}',
    '{"size": "17*17"}',
    '{"image": "none.png"}',
    '{"save_file": "x.avi"}',
]


def test_invalid_lines(tiny: Tiny, tmp_path: Path) -> None:
    common = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--task", "t2v-1.3B"]
    lines = resolve_prompts(write_prompts(tmp_path, *BAD_LINES, "good"), *common).lines
    check_refusals(
        "prompt file: lines",
        {text: line.error for text, line in zip(BAD_LINES, lines, strict=False)},
    )
    assert len(lines) == len(BAD_LINES) + 1 and not lines[-1].error
    with pytest.raises(InputError, match="has no line that can be carried out; line 1: "):
        resolve_prompts(write_prompts(tmp_path, *BAD_LINES), *common)


def test_a_line_that_the_system_refuses(tiny: Tiny, tmp_path: Path) -> None:
    common = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--task", "t2v-1.3B"]
    lines = [{"prompt": "a", "save_file": f"{tmp_path}/{'n' * 300}.mp4"}]
    lines += [{"prompt": "a", "sample_shift": 5e-324, "sample_solver": "euler"}]
    lines += [{"prompt": "a", "image": f"{'n' * 300}.png"}, {"prompt": "b " * 200_000}]
    file_run = resolve_prompts(write_prompts(tmp_path, *map(json.dumps, lines)), *common)
    for line, part in zip(
        file_run.lines, ("has a name of 304 bytes", "from 0.001 to 1000", "image", ""), strict=True
    ):
        assert part in line.error and bool(part) == bool(line.error)


SINGLE_VIDEO_FLAGS = [
    ["--prompt", "x"],
    ["--trace", "x"],
    ["--plan"],
    ["--group_by_expert", "--task", "t2v-1.3B"],
    ["--group_by_expert", "--offload_model", "false"],
    ["--group_by_expert", "--power"],
    ["--group_by_expert", "--log_level", "debug"],
    ["--group_by_expert", "--step_cache", "first_block"],
]


def test_flags_of_one_video_are_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.chdir(tmp_path)
    cases: dict[str, list[object]] = {}
    for argv in SINGLE_VIDEO_FLAGS:
        task = argv[-1] if "--task" in argv else "t2v-A14B"
        start = ["--prompt_file", write_prompts(tmp_path, "good").name, "--ckpt_dir", tiny(task)]
        cases[" ".join(argv)] = [*start, "--sample_steps", "9", *argv]
    refusals("prompt file: flags of one video", cases)


def test_files_without_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"empty": b"", "blank": b"\n \n", "not text": b"\xff\xfe\x00"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    cases = {name: ["--prompt_file", name] for name in (*files, "none")}
    refusals("prompt file: without lines", {**cases, "no file": ["--skip_existing"]})


def check_against_single_runs(out: Path, common: list[str], tmp_path: Path, limit: float) -> None:
    for name in ("003_a_blue_whale", "own"):
        settings = json.loads((out / f"{name}.json").read_text())["settings"]
        single = tmp_path / f"again_{name}.mp4"
        seed = ["--base_seed", str(settings["base_seed"]), "--prompt", settings["prompt"]]
        steps = ["--sample_steps", str(settings["sample_steps"])]
        assert generate.main([*common, *seed, *steps, "--save_file", str(single)]) == 0
        difference = load_video_latents(out / f"{name}.mp4") - load_video_latents(single)
        assert difference.abs().max() <= limit
        assert limit or (out / f"{name}.mp4").read_bytes() == single.read_bytes()


def test_videos_are_those_of_single_runs(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    common = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK]
    file_argv = ["--prompt_file", str(write_prompts(tmp_path, *LINES)), "--save_file", str(out)]
    assert generate.main([*common, *file_argv]) == 1  # line 4
    assert len(list(out.glob("*.mp4"))) == 4 and not list(out.glob(".*"))
    check_against_single_runs(out, common, tmp_path, 0)
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    (out / "own.mp4").unlink()
    assert generate.main([*common, *file_argv, "--skip_existing"]) == 1
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    assert after.pop("own.mp4") > times.pop("own.mp4") and after == times


def test_a_notice_about_one_line(tiny: Tiny, tmp_path: Path, capfd) -> None:
    """What is said of all lines is logged once."""
    path = write_prompts(tmp_path, "a", json.dumps({"prompt": "b", "frame_num": 85}))
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", str(tiny("t2v-1.3B")), *SMALL]
    assert generate.main([*argv, "--prompt_file", str(path), "--save_file", str(tmp_path)]) == 0
    captured = capfd.readouterr()
    output = captured.out + captured.err
    assert output.count("Line 2: 85 frames are more than the 81") == output.count("85 frames") == 1
    assert output.count("16*16 is not a size") == 1


def test_a_video_that_cannot_be_written_does_not_end_the_others(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, begin = tmp_path / "out", video_writer.Mp4Encoder.begin

    def fail_once(encoder: video_writer.Mp4Encoder, size: tuple[int, int, int]) -> None:
        monkeypatch.setattr(video_writer.Mp4Encoder, "begin", begin)
        raise OSError("disk full")

    monkeypatch.setattr(video_writer.Mp4Encoder, "begin", fail_once)
    argv = ["--prompt_file", write_prompts(tmp_path, "first", "second"), "--save_file", out]
    argv += ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *SMALL]
    assert generate.main([*map(str, argv)]) == 1
    (latents,) = out.glob("001_first.*.latents.safetensors")
    assert {path.name for path in out.iterdir()} == {
        *("002_second.mp4", "002_second.json", "prompts.summary.json", latents.name)
    }
    summary = json.loads((out / "prompts.summary.json").read_text())
    assert "disk full" in summary["failed"]["1"] and [*summary["made"]] == ["2"]
    assert summary["go on with"].endswith("--skip_existing")


def test_the_summary_of_an_interrupted_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """The video at which it was interrupted is denoised, and can be decoded."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(video_writer.Mp4Encoder, "begin", interrupt)
    argv = ["--prompt_file", write_prompts(tmp_path, "first", "second"), "--save_file", tmp_path]
    argv += ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *SMALL]
    assert generate.main([*map(str, argv)]) == 130
    (latents,) = tmp_path.glob("001_first.*.latents.safetensors")
    assert f"The denoised latents are safe in {latents}" in capfd.readouterr().out
    summary = json.loads((tmp_path / "prompts.summary.json").read_text())
    assert summary["not reached"] == ["1", "2"] and not summary["failed"]
    assert summary["go on with"].endswith("--skip_existing")


def test_lines_read_the_checkpoint_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspected: list[Path] = []

    def count_inspections(folder: Path, *more: Any) -> Any:
        inspected.append(folder)
        return inspect_checkpoint(folder, *more)

    monkeypatch.setattr(resolve, "inspect_checkpoint", count_inspections)
    path = write_prompts(tmp_path, *map(str, range(20)))
    file_run = resolve_prompts(path, "--ckpt_dir", str(tiny("t2v-A14B")))
    assert len(file_run.lines) == 20 and inspected == [tiny("t2v-A14B")]


def test_one_line_makes_a_video_of_each_seed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused lines are in the summary; the memory that a record reports is of its own video."""
    out, resets = tmp_path / "out", list[int]()
    monkeypatch.setattr(
        Device, "reset_peak_memory", lambda _: resets.append(len([*out.glob("*.mp4")]))
    )
    lines = ["# my prompts", '{"prompt": "a", "seeds": [3, 4]}', '{"prompt": "b", "seeds": [1, 1]}']
    path = write_prompts(
        tmp_path, *lines, '{"prompt": "c", "seeds": [5], "save_file": "c.mp4"}', "#"
    )
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", str(tiny("t2v-1.3B")), *SMALL]
    assert generate.main([*argv, "--prompt_file", str(path), "--save_file", str(out)]) == 1
    names = {"2 (seed 3)": "002_a_s3.mp4", "2 (seed 4)": "002_a_s4.mp4", "4 (seed 5)": "c_s5.mp4"}
    summary = json.loads((out / "prompts.summary.json").read_text())
    assert summary["made"] == {line: str(out / name) for line, name in names.items()}
    assert "must be a list of different" in summary["refused"]["3"] and not summary["failed"]
    assert summary["go on with"] is None and {*resets} == {0, 1, 2}
    for name, seed in zip(names.values(), (3, 4, 5), strict=True):
        assert json.loads((out / name).with_suffix(".json").read_text())["seed"] == seed


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--cfg_size 2 --vae_parallel", "--comm_type 2 --group_by_expert"]
)
def test_ranks_make_the_same_videos(flags: str, tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    common = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK]
    file_argv = ["--prompt_file", str(write_prompts(tmp_path, *LINES)), "--save_file", str(out)]
    with Ranks(
        make_rank_envs(2), generate.main, [*common, *file_argv, *flags.split()]
    ) as processes:
        assert set(processes.wait_for_exit(180)) == {1}, processes.format_outputs()
        assert "Line 4 is left out" in processes.format_outputs()
    check_against_single_runs(out, common, tmp_path, 1e-4)


@pytest.mark.slow
def test_a_killed_run_is_continued_and_memory_stays(tiny: Tiny, tmp_path: Path) -> None:
    """12 prompts, of which two are invalid; the run is killed in the middle."""
    lines = [f"video number {n}" for n in range(12)]
    lines[3], lines[8] = '{"frame_num": 8}', '{"task": "x"}'
    out = tmp_path / "out"
    command = [sys.executable, GENERATE, "--ckpt_dir", str(tiny("t2v-A14B")), *QUICK]
    command += ["--prompt_file", str(write_prompts(tmp_path, *lines)), "--save_file", str(out)]
    environment = os.environ | TORCHRUN
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while len(list(out.glob("*.json"))) < 4:
        time.sleep(0.05)
    process.kill()
    process.wait()
    mtimes = {path: path.stat().st_mtime_ns for path in out.glob("[0-9]*.mp4")}
    assert 4 <= len(mtimes) < 10
    command.append("--skip_existing")
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and f"{10 - len(mtimes)} videos made" in result.stdout
    assert all(path.stat().st_mtime_ns == at for path, at in mtimes.items())
    videos = sorted(out.glob("[0-9]*.mp4"))
    records = [json.loads(path.with_suffix(".json").read_text()) for path in videos]
    peaks = [
        record["peak_memory_bytes"]["host"]
        for path, record in zip(videos, records, strict=True)
        if path not in mtimes
    ]
    assert len(videos) == 10 and max(peaks) < 1.05 * peaks[0]
