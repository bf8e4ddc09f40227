"""Whole runs of videos of clips: files, stops that are gone on after, ranks, prompt files."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import imageio
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from tests.conftest import slow
from tests.dist import GENERATE, torchrun
from tests.inputs import changed_contents
from wan.cli import main as generate


def run(*argv: object) -> int:
    return generate.main([str(argument) for argument in argv])


def frames(path: Path) -> np.ndarray:
    return np.stack(list(imageio.get_reader(path).iter_data()))


@pytest.fixture(scope="module")
def asked(tiny, image_path: Path) -> list[str]:
    flags = ["--task", "i2v-A14B", "--ckpt_dir", tiny("i2v-A14B"), "--image", image_path]
    flags += ["--size", "48*32", "--frame_num", "9", "--sample_steps", "2", "--base_seed", "7"]
    return [*map(str, flags), "--chain", "latent", "--clip_prompts", "one", "two", "three", "four"]


@pytest.fixture(scope="module")
def whole(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "v.mp4"
    assert run(*asked, "--save_file", out) == 0
    return out


@pytest.fixture(scope="module")
def kept(asked: list[str], whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same video, whose clips stay."""
    out = tmp_path_factory.mktemp("kept") / "v.mp4"
    assert run(*asked, "--save_file", out, "--save_latents") == 0
    assert out.read_bytes() == whole.read_bytes()
    return out


def test_a_video_of_clips(whole: Path, tmp_path: Path) -> None:
    assert frames(whole).shape == (9 + 3 * 4, 32, 48, 3)
    assert sorted(path.name for path in whole.parent.iterdir()) == ["v.json", "v.mp4"]
    record = json.loads(whole.with_suffix(".json").read_text())
    assert record["video"]["frames"] == 21 and record["seed"] == 7
    assert record["settings"]["clip_prompts"] == ["one", "two", "three", "four"]
    assert (record["settings"]["num_clip"], record["settings"]["chain"]) == (4, "latent")
    again = tmp_path / "again.mp4"
    assert run("--from_json", whole.with_suffix(".json"), "--save_file", again) == 0
    assert (frames(again) == frames(whole)).all()


def test_a_killed_run_goes_on_where_it_was(asked: list[str], whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.mp4"
    command = [sys.executable, GENERATE, *asked, "--save_file", out]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    second = out.with_suffix(".clips") / "0002.safetensors"
    end = time.monotonic() + 100
    while not second.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert second.exists() and not out.exists()
    made = {p.name: p.stat().st_mtime_ns for p in second.parent.glob("000[12].*")}
    assert len(made) == 4
    assert run(*asked, "--save_file", out, "--save_latents") == 0
    assert out.read_bytes() == whole.read_bytes()
    after = {p.name: p.stat().st_mtime_ns for p in second.parent.glob("000[12].*")}
    assert after == made  # those were not made again


def test_more_clips_of_a_video_that_is_there(
    asked: list[str], whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, start = (
        tmp_path / "v.mp4",
        [*asked[:-5], "--save_latents", "--save_file", tmp_path / "v.mp4"],
    )
    assert run(*start, "--clip_prompts", "one", "two") == 0
    assert frames(out).shape[0] == 13
    assert run(*start, "--clip_prompts", "one", "two", "three", "four") == 0
    assert "2 of 4 clips are in" in capfd.readouterr().out
    assert (frames(out) == frames(whole)).all()
    assert run(*start, "--clip_prompts", "one", "other", "three") == 0
    assert "clip 2 is made again: it differs in prompt" in capfd.readouterr().out
    assert (frames(out)[:9] == frames(whole)[:9]).all()
    assert (frames(out)[9:] != frames(whole)[9:17]).any()


def test_what_makes_clips_again(
    asked: list[str], image_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another picture under the same name does; where weights lie meanwhile does not."""
    image = tmp_path / "picture.png"
    shutil.copy(image_path, image)
    start = [*asked[:-5], "--image", image, "--save_latents", "--save_file", tmp_path / "v.mp4"]
    start += ["--clip_prompts", "one", "two"]
    assert run(*start) == 0
    assert run(*start, "--offload_model", "block") == 0
    assert "2 of 2 clips are in" in capfd.readouterr().out
    Image.new("RGB", (96, 64), (200, 40, 40)).save(image)
    assert run(*start) == 0
    assert "clip 1 is made again: it differs in the content of --image" in capfd.readouterr().out


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _exchange(path: Path) -> None:
    """Another clip of the same run takes its place."""
    shutil.copy(path.with_name(f"0001{path.suffix}"), path)


def _alter(how: str) -> Callable[[Path], None]:
    """The state with its metadata, but another tensor."""

    def alter(path: Path) -> None:
        with safe_open(path, "pt") as file:
            metadata, end = file.metadata(), file.get_tensor("end")
        tensors = {
            "no end": {"x": end},
            "shape": {"end": torch.zeros(1, 2, 3)},
            "dtype": {"end": end.int()},
            "values": {"end": end + 1e-3},
            "nothing": {"end": torch.zeros(0)},
        }
        save_file(tensors[how], path, metadata=metadata)

    return alter


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "half a state": ("0002.safetensors", _halve),
    "no state": ("0002.safetensors", Path.unlink),
    "no clip": ("0002.mp4", Path.unlink),
    "another state": ("0002.safetensors", _exchange),
    "another clip": ("0002.mp4", _exchange),
    **{how: ("0002.safetensors", _alter(how)) for how in ("no end", "shape", "dtype", "values")},
}


@pytest.mark.parametrize(
    "change", [*list(CHANGES)[:3], "another clip", "values", *map(slow, ("shape", "dtype"))]
)
def test_changed_clips_are_made_again(
    change: str, asked: list[str], whole: Path, kept: Path, tmp_path: Path
) -> None:
    """The video is that of an undisturbed run, whatever was exchanged on disk."""
    out = tmp_path / "v.mp4"
    shutil.copytree(kept.with_suffix(".clips"), out.with_suffix(".clips"))
    name, make = CHANGES[change]
    make(out.with_suffix(".clips") / name)
    assert run(*asked, "--save_file", out) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_suffix(".clips").exists()


@pytest.mark.parametrize("name", ["0002.safetensors", "0001.mp4", "only notes", "a file", "a link"])
def test_a_foreign_folder_of_clips(
    name: str, asked: list[str], kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is refused before the work, and stays as it is."""
    folder = tmp_path / "v.clips"
    if name == "a file":
        folder.write_text("precious")
    elif name == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif name == "only notes":
        folder.mkdir()
        (folder / "notes.txt").write_text("precious")
    else:
        shutil.copytree(kept.with_suffix(".clips"), folder)
        (folder / name).write_text("precious")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run(*asked, "--save_file", tmp_path / "v.mp4") == 2
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_other_files_in_the_folder_of_clips_stay(
    asked: list[str], whole: Path, kept: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "v.mp4", tmp_path / "v.clips"
    shutil.copytree(kept.with_suffix(".clips"), folder)
    (folder / "notes.txt").write_text("precious")
    (folder / "0009.mp4").symlink_to(whole)
    assert run(*asked, "--save_file", out) == 2  # a link where a clip may be written
    (folder / "0009.mp4").unlink()
    assert run(*asked, "--save_file", out) == 0
    assert [path.read_text() for path in folder.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--offload_model", "block"],
        ["--overlap_decoding", "--offload_model", "false"],
        slow(["--overlap_decoding"]),
        slow(["--offload_model", "false"]),
        slow(["--text_kv_cache", "false"]),
    ],
    ids=str,
)
def test_what_changes_no_bit(
    flags: list[str], asked: list[str], whole: Path, tmp_path: Path
) -> None:
    assert run(*asked, *flags, "--save_file", tmp_path / "v.mp4") == 0
    assert (frames(tmp_path / "v.mp4") == frames(whole)).all()


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_make_one_video(asked: list[str], whole: Path, tmp_path: Path) -> None:
    """In every mode and with FSDP; a stopped group's video is continued by another one."""
    ways = {
        "0": [],
        "1": ["--comm_type", "1"],
        "2": ["--comm_type", "2", "--vae_parallel"],
        "beside": ["--overlap_decoding", "--offload_model", "false"],
        "fsdp": ["--dit_fsdp", "--t5_fsdp"],
    }
    made = {}
    for name, flags in ways.items():
        out = tmp_path / f"{name}.mp4"
        done = torchrun(2, *asked, "--ulysses_size", "2", *flags, "--save_file", out)
        assert done.returncode == 0, done.stdout + done.stderr
        made[name] = frames(out)
    for name in ("1", "beside"):
        assert (made[name] == made["0"]).all()
    for name in ("2", "fsdp"):
        assert np.abs(made[name].astype(int) - made["0"]).mean() < 0.05
    assert np.abs(made["0"].astype(int) - frames(whole)).mean() < 0.05
    out = tmp_path / "continued.mp4"
    start = [*asked[:-5], "--save_latents", "--save_file", out]
    assert run(*start, "--clip_prompts", "one", "two") == 0
    both = ["--ulysses_size", "2", "--clip_prompts", "one", "two", "three", "four"]
    done = torchrun(2, *start, *both)
    assert done.returncode == 0 and "2 of 4 clips are in" in done.stdout + done.stderr
    assert np.abs(frames(out).astype(int) - frames(whole)).mean() < 0.05


@pytest.mark.slow
def test_a_step_cache_begins_anew_with_each_clip(asked: list[str], tmp_path: Path) -> None:
    flags = ["--step_cache", "steps:1,3", "--sample_steps", "6", "--step_cache_force"]
    assert run(*asked, *flags, "--save_file", tmp_path / "v.mp4") == 0
    cache = json.loads((tmp_path / "v.json").read_text())["step_cache"]
    assert cache["computed"]["cond"] == [0, 1, 3]


def test_a_prompt_file(asked: list[str], whole: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": ["one", "two", "three", "four"], "save_file": "long.mp4"},
        {"prompt": "one", "clips": 2, "save_file": "two.mp4"},
        {"prompt": ["one", "two"], "clips": 3},
    ]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = [*asked[:-5], "--prompt_file", tmp_path / "l.jsonl", "--save_file", tmp_path / "out"]
    assert run(*shared) == 1  # the third line
    assert (frames(tmp_path / "out" / "long.mp4") == frames(whole)).all()
    assert frames(tmp_path / "out" / "two.mp4").shape[0] == 13
    summary = json.loads((tmp_path / "out" / "l.summary.json").read_text())
    assert "The number of clip_prompts and num_clip 3 differ" in summary["refused"]["3"].replace(
        "--", ""
    )


def test_ranks_compare_the_image(asked: list[str], tmp_path: Path) -> None:
    assert changed_contents(asked, "--image", tmp_path) == {"the content of --image"}
