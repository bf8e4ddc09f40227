"""--prompt_file: many videos after one load, lines that fail, and a continued run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Refusals, Tiny, slow
from tests.dist import GENERATE, TORCHRUN, Ranks, make_rank_envs
from tests.pipelines import resolve_argv
from tests.refusals import check_refusals
from wan.app import resolve
from wan.checkpoint.layout import inspect_checkpoint
from wan.cli import main as generate
from wan.modules.model import WanModel
from wan.settings.errors import InputError

QUICK = ["--size", "64*32", "--frame_num", "5", "--sample_steps", "2", "--save_latents"]
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


def test_lines(tiny: Tiny, tmp_path: Path) -> None:
    common = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--task", "t2v-1.3B", *QUICK]
    file_run = resolve_prompts(
        write_prompts(tmp_path, *LINES), *common, "--save_file", str(tmp_path / "out")
    )
    assert [line.number for line in file_run.lines] == [1, 3, 4, 5, 6]
    assert [line.run is None for line in file_run.lines] == [False, False, True, False, False]
    assert "frame_num 8 must be 4n+1" in file_run.lines[2].error
    runs = {line.number: line.run for line in file_run.lines if line.run}
    names = {n: run.output.save_file.name for n, run in runs.items()}
    assert names == {1: "001_a_red_fox.mp4", 3: "003_a_blue_whale.mp4", 5: "005_a_red_fox.mp4"} | {
        6: "own.mp4"
    }
    assert runs[3].params.base_seed == 5 and runs[3].params.sample_steps == 3
    assert runs[1].params.sample_steps == 2
    assert all(run.settings["save_file"] == str(run.output.save_file) for run in runs.values())
    drawn = file_run.with_seed(100)
    seeds = {line.number: line.run.params.base_seed for line in drawn.lines if line.run}
    assert seeds == {1: 101, 3: 5, 5: 105, 6: 9}


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
    '{"seed": 1, "base_seed": 2}',
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


def test_two_lines_do_not_write_one_file(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    same, linked = (str(tmp_path / name / "same.mp4") for name in ("folder", "link"))
    names = {"a": same, "b": f"{tmp_path}/of/../folder/same.mp4", "c": linked}
    names["d"] = same.replace(".mp4", ".MP4")
    lines = [json.dumps({"prompt": p, "save_file": name}) for p, name in names.items()]
    common = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--task", "t2v-1.3B"]
    file_run = resolve_prompts(write_prompts(tmp_path, *lines), *common)
    assert not file_run.lines[0].error
    assert all("is the video of line 1 already" in line.error for line in file_run.lines[1:])


def test_lines_end_where_editors_end_them(tiny: Tiny, tmp_path: Path) -> None:
    text = json.dumps({"prompt": "a red\u2028star\x85"}, ensure_ascii=False)
    file_run = resolve_prompts(
        write_prompts(tmp_path, f"one\r\n{text}"), "--ckpt_dir", str(tiny("t2v-A14B"))
    )
    assert [line.run.params.prompt for line in file_run.lines] == ["one", "a red\u2028star\x85"]


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


def check_against_single_runs(out: Path, common: list[str], tmp_path: Path) -> None:
    for name in ("003_a_blue_whale", "own", "001_a_red_fox"):
        settings = json.loads((out / f"{name}.json").read_text())["settings"]
        single = tmp_path / f"again_{name}.mp4"
        seed = ["--base_seed", str(settings["base_seed"]), "--prompt", settings["prompt"]]
        steps = ["--sample_steps", str(settings["sample_steps"])]
        assert generate.main([*common, *seed, *steps, "--save_file", str(single)]) == 0
        assert torch.equal(load_video_latents(out / f"{name}.mp4"), load_video_latents(single))
        assert (out / f"{name}.mp4").read_bytes() == single.read_bytes()


@pytest.mark.parametrize(
    "offload", ["true", slow("false"), slow("block")], ids=lambda value: f"offload {value}"
)
def test_videos_are_those_of_single_runs(offload: str, tiny: Tiny, tmp_path: Path, caplog) -> None:
    out = tmp_path / "out"
    common = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK, "--offload_model", offload]
    file_argv = ["--prompt_file", str(write_prompts(tmp_path, *LINES)), "--save_file", str(out)]
    assert generate.main([*common, *file_argv]) == 1  # line 4
    assert len(list(out.glob("*.mp4"))) == 4 and not list(out.glob(".*"))
    check_against_single_runs(out, common, tmp_path)
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    (out / "own.mp4").unlink()
    assert generate.main([*common, *file_argv, "--skip_existing"]) == 1
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    assert after.pop("own.mp4") > times.pop("own.mp4") and after == times


@pytest.mark.slow
def test_experts_are_loaded_once(tiny: Tiny, tmp_path: Path, monkeypatch) -> None:
    """With --group_by_expert: the same videos; a failing line does not end the others."""
    ungrouped, grouped, built = tmp_path / "each", tmp_path / "made", []
    construct = WanModel.__init__

    def count_constructions(self: WanModel, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        built.append(self)

    def raise_out_of_memory(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, WanModel) and inputs[0][0].shape[1] == 3:
            torch.empty(1 << 60)

    lines = ["one", json.dumps({"prompt": "two", "boundary_step": 0, "base_seed": 3}), "three"]
    lines += [json.dumps({"prompt": "too long", "frame_num": 9})]
    common = ["--ckpt_dir", str(tiny("t2v-A14B")), *QUICK, "--base_seed", "4"]
    common += ["--boundary_step", "1", "--prompt_file", str(write_prompts(tmp_path, *lines))]
    hook = torch.nn.modules.module.register_module_forward_pre_hook(raise_out_of_memory)
    try:
        assert generate.main([*common, "--save_file", str(ungrouped)]) == 1
        monkeypatch.setattr(WanModel, "__init__", count_constructions)
        assert generate.main([*common, "--save_file", str(grouped), "--group_by_expert"]) == 1
    finally:
        hook.remove()
    assert len(built) == 2
    for path in ungrouped.glob("*.safetensors"):
        assert torch.equal(load_file(path)["latents"], load_file(grouped / path.name)["latents"])
    videos = {path.name: path.read_bytes() for path in grouped.glob("*.mp4")}
    assert len(videos) == 3 and videos == {p.name: p.read_bytes() for p in ungrouped.glob("*.mp4")}


def test_a_video_that_cannot_be_written_does_not_end_the_others(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "001_first.mp4").mkdir(parents=True)  # in the way of the renamed file
    file_argv = [
        "--prompt_file",
        str(write_prompts(tmp_path, "first", "second")),
        "--save_file",
        str(out),
    ]
    common = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--task", "t2v-1.3B", *QUICK]
    assert generate.main([*common, *file_argv]) == 1
    assert (out / "002_second.mp4").is_file() and (out / "002_second.json").is_file()
    assert list(out.glob("*.latents.safetensors"))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--comm_type 1", "--cfg_size 2", "--vae_parallel", "--comm_type 2 --group_by_expert"]
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
    for name in ("003_a_blue_whale", "001_a_red_fox"):
        settings = json.loads((out / f"{name}.json").read_text())["settings"]
        single = tmp_path / f"again_{name}.mp4"
        seed = ["--base_seed", str(settings["base_seed"]), "--prompt", settings["prompt"]]
        steps = ["--sample_steps", str(settings["sample_steps"])]
        assert generate.main([*common, *seed, *steps, "--save_file", str(single)]) == 0
        assert (
            load_video_latents(out / f"{name}.mp4") - load_video_latents(single)
        ).abs().max() < 1e-4


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
    process.send_signal(signal.SIGKILL)
    process.wait()
    mtimes = {path: path.stat().st_mtime_ns for path in out.glob("*.mp4") if path.name[0] != "."}
    assert 4 <= len(mtimes) < 10
    result = subprocess.run(
        [*command, "--skip_existing"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1 and f"{10 - len(mtimes)} videos made" in result.stdout, (
        result.stdout
    )
    assert all(path.stat().st_mtime_ns == at for path, at in mtimes.items())
    records = sorted(out.glob("[0-9]*.json"))
    assert len(records) == len(list(out.glob("[0-9]*.mp4"))) == 10
    peaks = [
        json.loads(path.read_text())["peak_memory_bytes"]["host"]
        for path in records
        if path.with_suffix(".mp4") not in mtimes
    ]
    assert max(peaks) < 1.05 * peaks[0]


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


def test_seeds_and_comments(tiny: Tiny, tmp_path: Path) -> None:
    """One line gives a video for each of its seeds; refused lines are in the summary."""
    out = tmp_path / "out"
    lines = ["# my prompts", '{"prompt": "a", "seeds": [3, 4]}', '{"prompt": "b", "seeds": [1, 1]}']
    path = write_prompts(
        tmp_path, *lines, '{"prompt": "c", "seeds": [5], "save_file": "c.mp4"}', "#"
    )
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", str(tiny("t2v-1.3B")), *QUICK]
    assert generate.main([*argv, "--prompt_file", str(path), "--save_file", str(out)]) == 1
    names = {"2 (seed 3)": "002_a_s3.mp4", "2 (seed 4)": "002_a_s4.mp4", "4 (seed 5)": "c_s5.mp4"}
    summary = json.loads((out / "prompts.summary.json").read_text())
    assert summary["made"] == {line: str(out / name) for line, name in names.items()}
    assert "must be a list of different" in summary["refused"]["3"] and not summary["failed"]
    for name, seed in zip(names.values(), (3, 4, 5), strict=True):
        assert json.loads((out / name).with_suffix(".json").read_text())["seed"] == seed


def test_a_refusal_names_the_seed_as_written(tiny: Tiny, tmp_path: Path) -> None:
    lines = ['{"prompt": "a", "seed": "x"}', "good"]
    file_run = resolve_prompts(write_prompts(tmp_path, *lines), "--ckpt_dir", str(tiny("t2v-A14B")))
    assert file_run.lines[0].error == "seed x must be a whole number."


def test_videos_of_other_settings_are_made_again(tiny: Tiny, tmp_path: Path, capfd) -> None:
    """--skip_existing compares the line with the record of the video, also of a version before."""
    out, same = tmp_path / "out", {"prompt": "a", "seed": 1, "save_file": "a.mp4"}
    lines = [same, {"prompt": "b", "seed": 1, "save_file": "b.mp4"}, "drawn seed"]
    common = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--task", "t2v-1.3B", *QUICK]
    common += ["--save_file", str(out), "--skip_existing", "--prompt_file"]
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    assert generate.main([*common, str(write_prompts(tmp_path, *texts))]) == 0
    first = {path.name: path.read_bytes() for path in out.glob("*.mp4")}
    record = json.loads((out / "a.json").read_text())
    del record["settings"]["sigmas"]
    (out / "a.json").write_text(json.dumps(record))
    texts[1] = json.dumps({"prompt": "b", "seed": 2, "sample_steps": 3, "save_file": "b.mp4"})
    capfd.readouterr()
    assert generate.main([*common, str(write_prompts(tmp_path, *texts))]) == 0
    output = capfd.readouterr().out
    assert "b.mp4 is made again: it differs in sample_steps, base_seed" in output.replace("\n", "")
    assert "1 video made; 2 there already" in output
    second = {path.name: path.read_bytes() for path in out.glob("*.mp4")}
    assert {name for name in first if first[name] != second[name]} == {"b.mp4"}
