"""Whole runs of VACE: subsets of what a video is made from, records, ranks, and bad inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest
from PIL import Image

from tests.conftest import slow
from tests.dist import GENERATE, TORCHRUN
from tests.inputs import changed_contents
from wan.cli import main as generate
from wan.pipeline.following import controlled
from wan.pipeline.sources import ControlSources
from wan.settings.presets import PRESETS

SIZE = (64, 48)


def run(*argv: object) -> int:
    return generate.main([str(argument) for argument in argv])


def frames(path: Path) -> np.ndarray:
    return np.stack(list(imageio.get_reader(path).iter_data()))


def write(path: Path, size: tuple[int, int] = SIZE, count: int = 9, fps: float = 16) -> Path:
    """A video of a bright box that moves over a gradient."""
    rows, columns = np.mgrid[: size[1], : size[0]]
    made = []
    for index in range(count):
        box = (abs(columns - 12 - 3 * index) < 9) & (abs(rows - size[1] // 2) < 11)
        pixels = np.where(box, 255, 2 * columns + rows).clip(0, 255).astype(np.uint8)
        made.append(np.repeat(pixels[..., None], 3, axis=-1))
    imageio.mimwrite(path, made, fps=fps, macro_block_size=8)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write(folder / "video.mp4")
    write(folder / "mask.mp4")
    for name, colour in (("a.png", (200, 40, 40)), ("b.png", (20, 160, 90))):
        Image.new("RGB", (50, 30), colour).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def asked(tiny) -> list[str]:
    flags = ["--task", "vace-1.3B", "--ckpt_dir", tiny("vace-1.3B"), "--size", "64*48"]
    flags += ["--frame_num", "5", "--sample_steps", "2", "--base_seed", "7"]
    return [*map(str, flags)]


def all_of(files: Path) -> list[str]:
    flags = ["--src_video", files / "video.mp4", "--src_mask", files / "mask.mp4"]
    flags += ["--src_ref_images", f"{files / 'a.png'},{files / 'b.png'}"]
    return [*map(str, flags)]


@pytest.fixture(scope="module")
def plain(asked: list[str], files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "plain.mp4"
    assert run(*asked, *all_of(files), "--save_latents", "--save_file", out) == 0
    return out


def test_a_video_its_record_and_its_latents(plain: Path, files: Path, tmp_path: Path) -> None:
    """The pictures' latent frames are not decoded, and the record repeats the video."""
    assert frames(plain).shape == (5, 48, 64, 3)
    record = json.loads(plain.with_suffix(".json").read_text())
    assert record["video"] == {"frames": 5, "width": 64, "height": 48, "fps": 16}
    settings = record["settings"]
    assert settings["src_ref_images"] == [str(files / "a.png"), str(files / "b.png")]
    assert (Path(settings["src_video"]), settings["frame_num"]) == (files / "video.mp4", 5)
    again, decoded = tmp_path / "again.mp4", tmp_path / "decoded.mp4"
    assert run("--from_json", plain.with_suffix(".json"), "--save_file", again) == 0
    assert (frames(again) == frames(plain)).all()
    latents, folder = plain.with_suffix(".latents.safetensors"), settings["ckpt_dir"]
    flags = ["--decode_latents", latents, "--ckpt_dir", folder]
    assert run(*flags, "--save_file", decoded) == 0
    assert (frames(decoded) == frames(plain)).all()


@pytest.mark.parametrize(
    "left_out",
    [
        ["--src_mask"],
        slow(["--src_ref_images"]),
        slow(["--src_mask", "--src_ref_images"]),
        slow(["--src_video", "--src_mask"]),
    ],
    ids=str,
)
def test_subsets(
    left_out: list[str], asked: list[str], plain: Path, files: Path, tmp_path: Path
) -> None:
    pairs = zip(all_of(files)[::2], all_of(files)[1::2], strict=True)
    given = [word for pair in pairs if pair[0] not in left_out for word in pair]
    assert run(*asked, *given, "--save_file", tmp_path / "v.mp4") == 0
    found = frames(tmp_path / "v.mp4")
    assert found.shape == (5, 48, 64, 3) and (found != frames(plain)).any()


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        (["--offload_model", "block"], True),
        (["--conditioning_scale", "0.5"], False),
        slow(["--conditioning_scale", "1,1"], True),
        slow(["--offload_model", "false"], True),
        slow(["--text_kv_cache", "false"], True),
        slow(["--offload_model", "block", "--text_kv_cache", "false"], True),
    ],
    ids=str,
)
def test_what_changes_a_bit(
    flags: list[str], same: bool, asked: list[str], plain: Path, files: Path, tmp_path: Path
) -> None:
    assert run(*asked, *all_of(files), *flags, "--save_file", tmp_path / "v.mp4") == 0
    assert (frames(tmp_path / "v.mp4") == frames(plain)).all() == same


def test_repeated_pictures_and_a_step_cache(asked: list[str], files: Path, tmp_path: Path) -> None:
    """A skipped block's control block is skipped, too; only the first one is computed."""
    flags = ["--src_ref_images", files / "a.png", "--src_ref_images", files / "b.png"]
    flags += ["--step_cache", "steps:0,3", "--sample_steps", "6", "--step_cache_force"]
    assert run(*asked, *flags, "--save_file", tmp_path / "v.mp4") == 0
    record = json.loads((tmp_path / "v.json").read_text())
    assert record["step_cache"]["computed"]["cond"] == [0, 3]
    assert len(record["settings"]["src_ref_images"]) == 2


@pytest.mark.parametrize(
    ("source", "given", "default", "counted"),
    [
        (100, None, None, None),
        (80, None, None, 77),
        (80, 33, None, None),
        (33, None, 17, None),
        (16, None, 17, 13),
        (33, 33, 81, None),
    ],
)
def test_how_many_frames_of_a_source_are_taken(
    source: int, given: int | None, default: int | None, counted: int | None
) -> None:
    """As many as are asked for, by the checkpoint's or the task's default; or all, 4n + 1."""
    values, defaults, wanted = (
        {} if count is None else {"frame_num": count} for count in (given, default, counted)
    )
    video: Any = object()  # which is not read yet
    found = controlled(
        values, PRESETS["vace-1.3B"], ControlSources(frames=source, video=video), defaults
    )
    assert found == {"references": 0, **wanted}


def test_a_shorter_and_larger_video_than_the_default(
    asked: list[str], tiny, tmp_path: Path
) -> None:
    """Without `frame_num` the video is as long as its source, within the area of `size`."""
    source = write(tmp_path / "s.mp4", (128, 96), 7, fps=24)
    at = asked.index("--frame_num")
    short = [*asked[:at], *asked[at + 2 :], "--src_video", str(source)]
    assert run(*short, "--save_file", tmp_path / "v.mp4") == 0
    record = json.loads((tmp_path / "v.json").read_text())
    assert record["video"] == {"frames": 5, "width": 64, "height": 48, "fps": 24}


@pytest.mark.slow
def test_its_diffusers_layout(
    asked: list[str], plain: Path, files: Path, tiny, tmp_path: Path
) -> None:
    flags = [*all_of(files), "--ckpt_dir", tiny("vace-1.3B", "diffusers")]
    assert run(*asked, *flags, "--save_file", tmp_path / "v.mp4") == 0
    assert (frames(tmp_path / "v.mp4") == frames(plain)).all()


@pytest.mark.slow
def test_two_experts_of_a_prompt_file(asked: list[str], files: Path, tiny, tmp_path: Path) -> None:
    """Grouped by expert: a paused video's control waits in host memory."""
    lines = [{"prompt": "a", "src_ref_images": str(files / "a.png")}]
    lines += [{"prompt": "b", "src_video": str(files / "video.mp4")}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [*asked[4:], "--task", "vace-A14B", "--ckpt_dir", tiny("vace-A14B")]
    flags += ["--prompt_file", tmp_path / "lines.jsonl"]
    assert run(*flags, "--group_by_expert", "--save_file", tmp_path / "grouped") == 0
    assert run(*flags, "--save_file", tmp_path / "single") == 0
    pairs = zip(
        *(sorted((tmp_path / one).glob("*.mp4")) for one in ("grouped", "single")), strict=True
    )
    for one, other in pairs:
        assert (frames(one) == frames(other)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--ulysses_size", "2", "--comm_type", "1"],
        ["--ulysses_size", "2", "--comm_type", "2", "--dit_fsdp", "--t5_fsdp"],
        ["--ring_size", "2"],
        ["--cfg_size", "2"],
        ["--ulysses_size", "2", "--vae_parallel"],
    ],
    ids=str,
)
def test_two_ranks(
    flags: list[str], asked: list[str], plain: Path, files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "v.mp4"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run(
        [*torchrun, GENERATE, *asked, *all_of(files), *flags, "--save_file", str(out)],
        env=TORCHRUN | {"PATH": "/usr/bin:/bin"},
        check=True,
        timeout=300,
    )
    off = np.abs(frames(out).astype(int) - frames(plain))
    assert off.max() <= 25 and off.mean() < 1


@pytest.mark.slow
def test_the_python_class(plain: Path, files: Path, tiny, tmp_path: Path) -> None:
    """Pictures in memory are those of the files."""
    from wan import WanVace
    from wan.pipeline.video import save_video
    from wan.settings.command import Output
    from wan.settings.presets import PRESETS

    model = WanVace("vace-1.3B", tiny("vace-1.3B"), precision="fp32")
    video = model.generate(
        PRESETS["vace-1.3B"].prompt,
        str(files / "video.mp4"),
        str(files / "mask.mp4"),
        [Image.open(files / "a.png"), str(files / "b.png")],
        size=SIZE,
        frame_num=5,
        sampling_steps=2,
        shift=16.0,
        seed=7,
    )
    save_video(video, Output(save_file=tmp_path / "v.mp4", fps=16))
    assert (frames(tmp_path / "v.mp4") == frames(plain)).all()


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the published sizes, without anything that the video is made from."""
    assert run("--task", "vace-14B", "--plan", "--device", "cpu") == 0
    assert "denoising" in capsys.readouterr().out.lower()


BAD: dict[str, tuple[Callable[[Path], list[object]], str]] = {
    "nothing": (
        lambda folder: [],
        "vace-1.3B is made from something; give --src_video, --src_ref_images or both",
    ),
    "small mask": (
        lambda folder: [
            *("--src_video", write(folder / "v.mp4")),
            *("--src_mask", write(folder / "m.mp4", (48, 48))),
        ],
        "m.mp4 has frames of 48x48 pixels, not 64x48; give a mask of the same size and length",
    ),
    "long mask": (
        lambda folder: [
            *("--src_video", write(folder / "v.mp4")),
            *("--src_mask", write(folder / "m.mp4", count=8)),
        ],
        "m.mp4 has 8 frames, not 9; give a mask of the same size and length as --src_video",
    ),
    "mask alone": (
        lambda folder: ["--src_mask", write(folder / "m.mp4")],
        "--src_mask",
    ),
    "short video": (
        lambda folder: ["--src_video", write(folder / "v.mp4", count=4)],
        "v.mp4 has 4 frames, and --frame_num is 5; give a longer one, or a smaller --frame_num",
    ),
    "fast video": (
        lambda folder: ["--src_video", write(folder / "v.mp4", fps=300)],
        "v.mp4 has 300 frames a second, and 1 to 240 are taken; convert it to 16",
    ),
    "no video": (
        lambda folder: ["--src_video", folder / "absent.mp4"],
        "absent.mp4 does not exist",
    ),
    "text": (
        lambda folder: ["--src_video", _text(folder / "v.mp4")],
        "v.mp4 cannot be read as a video",
    ),
    "text as mask": (
        lambda folder: [
            *("--src_video", write(folder / "v.mp4")),
            *("--src_mask", _text(folder / "m.mp4")),
        ],
        "m.mp4 cannot be read as a video",
    ),
    "picture of text": (
        lambda folder: ["--src_ref_images", _text(folder / "a.png")],
        "a.png cannot be read as an image",
    ),
    "no picture": (
        lambda folder: ["--src_ref_images", folder / "absent.png"],
        "absent.png does not exist",
    ),
    "40 pictures": (
        lambda folder: ["--src_ref_images", ",".join([str(folder / "absent.png")] * 40)],
        "--src_ref_images names 40 pictures, and at most 16 are taken; choose some of them",
    ),
    "three scales": (
        lambda folder: [
            *("--src_video", write(folder / "v.mp4")),
            *("--conditioning_scale", "1,0.5,0.2"),
        ],
        "--conditioning_scale has 3 numbers, and the network has 2 control blocks; give one number",
    ),
    "a word as scale": (
        lambda folder: [
            *("--src_video", write(folder / "v.mp4")),
            *("--conditioning_scale", "much"),
        ],
        "--conditioning_scale much must be a number",
    ),
    "image": (
        lambda folder: ["--image", folder / "a.png"],
        "takes no --image; give pictures with --src_ref_images, or drop it",
    ),
}


def _text(path: Path) -> Path:
    path.write_bytes(b"x" * 999)
    return path


@pytest.mark.parametrize("kind", BAD)
def test_bad_input(
    kind: str,
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence, before any weight is read."""
    flags, said = BAD[kind]
    monkeypatch.setattr("wan.checkpoint.load.fill", lambda *_, **__: pytest.fail("weights"))
    out = tmp_path / "out.mp4"
    assert run(*asked, *flags(tmp_path), "--save_file", out) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("generate.py")]
    assert said in line and not out.exists()


@pytest.mark.parametrize("count", [2, 7, 9])
def test_a_weight_for_some_control_blocks(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The published network has eight, which take one number or eight."""
    weights = ",".join(["0.5"] * count)
    plan = ("--plan", "--task", "vace-14B", "--device", "cuda")
    assert run(*plan, "--conditioning_scale", weights) == 2
    said = f"has {count} numbers, and the network has 8 control blocks; give one number, or 8"
    assert said in capsys.readouterr().err


def test_other_tasks(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (all_of(files)[:2], "takes no --src_video; use vace-1.3B, vace-14B or vace-A14B"),
        (all_of(files)[4:], "takes no --src_ref_images"),
        (["--conditioning_scale", "2"], "--conditioning_scale has no effect on t2v-1.3B"),
    ):
        assert run("--task", "t2v-1.3B", *flags) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--src_video", "--src_mask", "--src_ref_images"])
def test_ranks_compare_the_files(flag: str, asked: list[str], files: Path, tmp_path: Path) -> None:
    argv = [*asked, *all_of(files)[:4], "--src_ref_images", str(files / "a.png")]
    assert changed_contents(argv, flag, tmp_path) == {f"the content of {flag}"}
