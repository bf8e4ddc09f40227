"""Whole runs of animate-14B: clips, records, ranks, and folders that are refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import imageio
import numpy as np
import pytest
import torch

from tests.conftest import slow
from tests.dist import GENERATE, TORCHRUN
from tests.inputs import changed_contents
from tools.make_character import write
from wan.cli import main as generate


def run(*argv: object) -> int:
    return generate.main([str(argument) for argument in argv])


def frames(path: Path) -> np.ndarray:
    return np.stack(list(imageio.get_reader(path).iter_data()))


@pytest.fixture(scope="module")
def moves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight frames: two clips of five."""
    out = tmp_path_factory.mktemp("moves") / "folder"
    write(out, (48, 32), 8)
    return out


@pytest.fixture(scope="module")
def asked(tiny, moves: Path) -> list[str]:
    flags = ["--task", "animate-14B", "--ckpt_dir", tiny("animate-14B"), "--src_root_path", moves]
    flags += ["--frame_num", "5", "--sample_steps", "2", "--base_seed", "7"]
    return [*map(str, flags)]


@pytest.fixture(scope="module")
def plain(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "plain.mp4"
    assert run(*asked, "--save_file", out) == 0
    return out


def test_a_video_as_long_as_the_poses(plain: Path, moves: Path, tmp_path: Path) -> None:
    assert frames(plain).shape == (8, 32, 48, 3)
    record = json.loads(plain.with_suffix(".json").read_text())
    assert record["video"] == {"frames": 8, "width": 48, "height": 32, "fps": 30}
    settings = record["settings"]
    assert (settings["num_clip"], settings["frame_num"], settings["refert_num"]) == (2, 5, 1)
    assert settings["prompt"] == "视频中的人在做动作" and Path(settings["src_root_path"]) == moves
    out = tmp_path / "again.mp4"
    assert run("--from_json", plain.with_suffix(".json"), "--save_file", out) == 0
    assert (frames(out) == frames(plain)).all()


@pytest.mark.parametrize(
    "flags",
    [
        ["--offload_model", "block"],
        slow(["--offload_model", "false"]),
        slow(["--text_kv_cache", "false"]),
        slow(["--offload_model", "block", "--text_kv_cache", "false"]),
    ],
    ids=str,
)
def test_what_changes_no_bit(
    flags: list[str], asked: list[str], plain: Path, tmp_path: Path
) -> None:
    assert run(*asked, *flags, "--save_file", tmp_path / "v.mp4") == 0
    assert (frames(tmp_path / "v.mp4") == frames(plain)).all()


@pytest.mark.slow
def test_its_diffusers_layout(asked: list[str], plain: Path, tiny, tmp_path: Path) -> None:
    folder, out = tiny("animate-14B", "diffusers"), tmp_path / "v.mp4"
    assert run(*asked, "--ckpt_dir", folder, "--save_file", out) == 0
    assert (frames(out) == frames(plain)).all()


@pytest.mark.slow
def test_a_relighting_lora(asked: list[str], plain: Path, tiny, tmp_path: Path) -> None:
    """Of zeros: no bit changes; and it is in the record."""
    folder, out = tmp_path / "checkpoint", tmp_path / "v.mp4"
    shutil.copytree(tiny("animate-14B"), folder)
    pair = {"blocks.0.ffn.0.lora_A.weight": torch.ones(4, 240)}
    pair["blocks.0.ffn.0.lora_B.weight"] = torch.zeros(480, 4)
    torch.save({"state_dict": pair}, folder / "relighting_lora.ckpt")
    asked = [*asked, "--ckpt_dir", str(folder), "--use_relighting_lora"]
    assert run(*asked, "--save_file", out) == 0
    assert (frames(out) == frames(plain)).all()
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["settings"]["use_relighting_lora"]
    assert record["lora"]["dit"][0]["file"] == str(folder / "relighting_lora.ckpt")


@pytest.mark.slow
def test_a_step_cache_begins_anew_with_each_clip(asked: list[str], tmp_path: Path) -> None:
    flags = ["--step_cache", "steps:1,3", "--sample_steps", "6", "--step_cache_force"]
    assert run(*asked, *flags, "--save_file", tmp_path / "v.mp4") == 0
    cache = json.loads((tmp_path / "v.json").read_text())["step_cache"]
    assert cache["computed"]["cond"] == [0, 1, 3]  # of the last clip


@pytest.mark.slow
def test_a_prompt_file(asked: list[str], plain: Path, tiny, moves: Path, tmp_path: Path) -> None:
    """Lines that differ in what moves the character."""
    second = tmp_path / "second"
    write(second, (32, 48), 5)
    lines = [{"src_root_path": str(moves)}, {"src_root_path": str(second), "replace_flag": True}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [*asked[:4], *asked[6:], "--prompt_file", str(tmp_path / "lines.jsonl")]
    assert run(*asked, "--save_file", tmp_path / "out") == 0
    first, other = sorted((tmp_path / "out").glob("*.mp4"))
    assert (frames(first) == frames(plain)).all()
    assert frames(other).shape == (5, 48, 32, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--ulysses_size", "2", "--comm_type", "1"],
        ["--ulysses_size", "2", "--comm_type", "2", "--dit_fsdp", "--t5_fsdp"],
        ["--ulysses_size", "2", "--vae_parallel"],
        ["--ring_size", "2"],
        ["--ulysses_size", "2", "--fa_alltoall_overlap"],
    ],
    ids=str,
)
def test_two_ranks(flags: list[str], asked: list[str], plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.mp4"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run(
        [*torchrun, GENERATE, *asked, *flags, "--save_file", str(out)],
        env=TORCHRUN | {"PATH": "/usr/bin:/bin"},
        check=True,
        timeout=300,
    )
    off = np.abs(frames(out).astype(int) - frames(plain))
    assert off.max() <= 25 and off.mean() < 1


@pytest.mark.slow
def test_a_character_is_put_into_a_scene(asked: list[str], plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.mp4"
    flags = ["--replace_flag", "--sample_guide_scale", "2"]
    assert run(*asked, *flags, "--save_file", out) == 0
    assert frames(out).shape == frames(plain).shape
    assert (frames(out) != frames(plain)).any()


@pytest.mark.slow
def test_the_python_class(plain: Path, tiny, moves: Path, tmp_path: Path) -> None:
    from wan import WanAnimate
    from wan.pipeline.video import save_video
    from wan.settings.command import Output

    model = WanAnimate("animate-14B", tiny("animate-14B"), precision="fp32")
    given = {"clip_len": 5, "sampling_steps": 2, "sample_solver": "unipc", "seed": 7}
    save_video(model.generate(str(moves), **given), Output(save_file=tmp_path / "v.mp4", fps=30))
    assert (frames(tmp_path / "v.mp4") == frames(plain)).all()


def removed(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def redrawn(
    *names: str, size: tuple[int, int] = (48, 32), count: int = 8
) -> Callable[[Path], object]:
    """Some videos are of another size or length than the others."""

    def change(folder: Path) -> None:
        other = folder.parent / "other"
        write(other, size, count)
        for name in names:
            shutil.copy(other / name, folder / name)

    return change


POSE, FACE, REF, BG, MASK = (
    *("src_pose.mp4", "src_face.mp4", "src_ref.png", "src_bg.mp4", "src_mask.mp4"),
)
FOLDERS = {
    "no folder": (lambda folder: shutil.rmtree(folder), "does not exist; give a folder with"),
    "a file": (
        lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
        "is no folder; give a folder with",
    ),
    "empty": (
        removed(POSE, FACE, REF, BG, MASK),
        r"lacks src_ref.png, src_pose.mp4, src_face.mp4, src_bg.mp4 and src_mask.mp4; run the",
    ),
    "no pose": (removed(POSE), "lacks src_pose.mp4; run the preprocessing"),
    "no face": (removed(FACE), "lacks src_face.mp4; run"),
    "no picture": (removed(REF), "lacks src_ref.png; run"),
    "no background": (removed(BG), "lacks src_bg.mp4; run .* with `?--replace_flag it holds"),
    "no mask": (removed(MASK), "lacks src_mask.mp4; run"),
    "empty pose": (replaced(POSE, b""), "src_pose.mp4 is empty"),
    "empty mask": (replaced(MASK, b""), "src_mask.mp4 is empty"),
    "pose is text": (replaced(POSE, b"x" * 999), "src_pose.mp4 cannot be read as a video"),
    "face is text": (replaced(FACE, b"x" * 999), "src_face.mp4 cannot be read as a video"),
    "picture is text": (replaced(REF, b"x" * 999), "src_ref.png"),
    "picture is empty": (replaced(REF, b""), "src_ref.png"),
    "picture is a folder": (
        lambda folder: ((folder / REF).unlink(), (folder / REF).mkdir()),
        "src_ref.png",
    ),
    "sides": (
        redrawn(POSE, size=(48, 16)),
        "src_bg.mp4 has frames of 48x32 pixels, not 48x16",
    ),
    "small mask": (redrawn(MASK, size=(32, 32)), "src_mask.mp4 has frames of 32x32 pixels"),
    "small face": (
        lambda folder: shutil.copy(folder / POSE, folder / FACE),
        "src_face.mp4 has frames of 48x32 pixels, not 512x512",
    ),
    "short face": (redrawn(FACE, count=6), "src_face.mp4 has 6 frames, not 8 as src_pose.mp4"),
    "long background": (redrawn(BG, count=9), "src_bg.mp4 has 9 frames, not 8"),
    "one frame": (
        redrawn(POSE, FACE, BG, MASK, count=1),
        "has videos of 1, and more frames than --refert_num 1 are needed; give a longer pose video",
    ),
    "truncated": (
        lambda folder: (folder / POSE).write_bytes((folder / POSE).read_bytes()[:300]),
        "src_pose.mp4 cannot be read as a video",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders(
    kind: str,
    asked: list[str],
    moves: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence, before any weight is read."""
    change, said = FOLDERS[kind]
    folder = tmp_path / "folder"
    shutil.copytree(moves, folder)
    change(folder)
    monkeypatch.setattr("wan.checkpoint.load.fill", lambda *_, **__: pytest.fail("weights"))
    out = tmp_path / "v.mp4"
    flags = ["--src_root_path", folder, "--replace_flag", "--save_file", out]
    assert run(*asked, *flags) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("generate.py")]
    assert re.search(said, line) and not out.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--size", "64*64"], "--size 64*64 is not that of src_pose.mp4"),
        (["--refert_num", "5"], "--refert_num 5 is not below the 5 frames of a clip"),
        (["--refert_num", "77"], "--refert_num 77 must be 1 or 5"),
        (["--image", "a.png"], "takes no --image"),
        (["--audio", "a.wav"], "takes no --audio"),
        (["--save_latents"], "--save_latents has no effect on animate-14B"),
        (["--infer_frames", "8"], "--infer_frames"),
        (["--use_rainfusion"], "--use_rainfusion masks"),
        (
            ["--use_relighting_lora"],
            "--use_relighting_lora needs relighting_lora.ckpt or relighting_lora/adapter_model.saf",
        ),
    ],
    ids=str,
)
def test_flags(
    flags: list[str], said: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*asked, *flags) == 2
    assert said in capsys.readouterr().err
    other = ["--task", "t2v-1.3B", "--src_root_path", "x"]
    assert run(*other) == 2
    assert "takes no --src_root_path" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["src_ref.png", "src_pose.mp4", "src_face.mp4"])
def test_ranks_compare_the_files(name: str, asked: list[str], tmp_path: Path) -> None:
    flag = "--src_root_path"
    assert changed_contents(asked, flag, tmp_path, name) == {f"the content of {flag}"}
