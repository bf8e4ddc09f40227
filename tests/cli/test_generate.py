"""Whole runs of generate.py on tiny checkpoints; the tests read the written files."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import imageio
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import slow
from tests.frames import follow_file, read_frames
from tests.pipelines import resolve_argv
from tests.tasks.tasks import write_picture
from tools import compare_latents
from wan.app import notices, prompt_extend, resolve
from wan.cli import main as generate
from wan.media import video_writer
from wan.metering.exchange_order import read_traces
from wan.settings.errors import InputError
from wan.utils.files import make_process_name

REPO = Path(__file__).parents[2]
SMALL = ["--size", "32*32", "--frame_num", "1", "--sample_steps", "1"]
QUICK = ["--size", "64*32", "--frame_num", "5", "--sample_steps", "2", "--base_seed", "7"]
PROMPT = 'A "quoted" prompt,\nwith *?<>| ünïcode 龙'


def run_generate(*argv: object) -> None:
    assert generate.main([str(argument) for argument in argv]) == 0


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The video of t2v-A14B with QUICK; its record and its latents are in the same folder."""
    out = tmp_path_factory.mktemp("plain") / "plain.mp4"
    argv = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--prompt", PROMPT, "--save_latents"]
    run_generate(*argv, "--save_file", out)
    return out


def load_saved_latents(path: Path) -> torch.Tensor:
    return load_file(path.with_suffix(".latents.safetensors"))["latents"]


def test_image_task_without_an_image(tiny, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "video.mp4"
    run_generate("--task", "ti2v-5B", "--ckpt_dir", tiny("ti2v-5B"), "--save_file", out, *QUICK)
    assert imageio.get_reader(out).get_meta_data()["fps"] == 24
    assert len(read_frames(out)) == 5
    assert sorted(path.name for path in out.parent.iterdir()) == ["video.json", "video.mp4"]


def test_names_of_tasks_of_wan21(tiny, tmp_path: Path) -> None:
    """A folder with one network has Wan2.1's preset, a folder with two experts Wan2.2's."""
    guidance = {}
    for task, folder in (
        ("t2v-14B", "t2v-1.3B"),
        ("t2v-1.3B", "t2v-1.3B"),
        ("t2v-14B", "t2v-A14B"),
    ):
        run = resolve_argv(["--task", task, "--ckpt_dir", tiny(folder), *QUICK])
        guidance[task, folder] = run.params.sample_guide_scale
        assert run.settings["task"] == task
    assert guidance == {
        ("t2v-14B", "t2v-1.3B"): (5.0, 5.0),
        ("t2v-1.3B", "t2v-1.3B"): (5.0, 5.0),
        ("t2v-14B", "t2v-A14B"): (3.0, 4.0),
    }


def test_from_json_repeats_the_run(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """The repeat has a name of its own."""
    monkeypatch.chdir(tmp_path)
    run_generate("--from_json", plain.with_suffix(".json"), "--save_latents", "false")
    (repeat,) = tmp_path.glob("*.mp4")
    assert repeat.name.startswith("t2v-A14B_64x32_A_quoted_prompt_with_")
    assert repeat.read_bytes() == plain.read_bytes()
    settings = json.loads(repeat.with_suffix(".json").read_text())["settings"]
    assert settings["prompt"] == PROMPT
    output = capfd.readouterr().out
    assert "64*32 is not a size t2v-A14B was trained on" in output
    assert "Seed 7, noise drawn on the cpu" in output and "Peak memory: host" in output


@pytest.mark.parametrize("stage", ["decode", "write"])
def test_a_failure_after_denoising_loses_nothing(
    stage: str, plain: Path, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """A stream goes with the failed run; later it shows the video, whose bytes it leaves alone."""
    args = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--prompt", PROMPT, "--stream"]
    out = tmp_path / "video.mp4"

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        decoder, writer = "modules.vae.video_vae.VideoVAE.stream", "media.video_writer.to_uint8"
        patch.setattr(f"wan.{decoder if stage == 'decode' else writer}", fail)
        argv = [str(word) for word in (*args, "--save_file", out)]
        if stage == "decode":
            with pytest.raises(OSError, match="disk full"):
                generate.main(argv)
        else:
            assert generate.main(argv) == 1
            (line,) = capfd.readouterr().err.split("generate.py: ")[1:]
            assert line.startswith(f"{out} could not be written (disk full); free space there")
    (latents_file,) = tmp_path.iterdir()
    assert latents_file.name.startswith("video.") and latents_file.name.endswith(
        ".latents.safetensors"
    )
    if stage == "decode":
        assert f"--decode_latents {latents_file}" in capfd.readouterr().out
    monkeypatch.chdir(tmp_path.parent)
    copy = tmp_path.parent / f"{stage}.mp4"
    with follow_file(out.with_suffix(".stream.mp4"), copy):
        run_generate("--decode_latents", latents_file, "--stream")
    assert out.read_bytes() == plain.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {
        latents_file.name,
        "video.mp4",
        "video.json",
    }
    frames, expected = (read_frames(path).astype(int) for path in (copy, out))
    assert frames.shape == expected.shape and np.abs(frames - expected).mean() < 12  # noise


def test_a_dying_encoder_is_noticed(tiny, tmp_path: Path, monkeypatch, capfd) -> None:
    """An ffmpeg that reads all frames, writes a broken file, and exits with 0."""
    import imageio_ffmpeg

    real = imageio_ffmpeg.get_ffmpeg_exe()
    fake = tmp_path / "ffmpeg"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *pipe:0*|*" - "*) cat >/dev/null; for last; do :; done\n'
        f'printf broken > "$last"; exit 0;; esac\nexec {real} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(fake))
    out = tmp_path / "out" / "v.mp4"
    argv = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--save_file", out]
    assert generate.main([str(word) for word in argv]) == 1
    assert "the encoder kept 0 of 5 frames" in capfd.readouterr().err
    (latents_file,) = out.parent.iterdir()
    assert latents_file.name.endswith(".latents.safetensors")


def test_latents_of_each_step(plain: Path, tiny, tmp_path: Path, capfd) -> None:
    """The last step has the video's latents; compare_latents finds the first differing step."""
    steps = tmp_path / "a.steps"
    steps.mkdir()
    stale_file = steps / "0003.safetensors"  # of an earlier run with more steps
    shutil.copy(plain.with_suffix(".latents.safetensors"), stale_file)
    argv = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--save_latents", "steps"]
    run_generate(*argv, "--prompt", PROMPT, "--save_file", tmp_path / "a.mp4")
    files = sorted(steps.iterdir())
    assert [path.name for path in files] == ["0001.safetensors", "0002.safetensors"]
    for path in (files[-1], tmp_path / "a.latents.safetensors"):
        assert torch.equal(load_file(path)["latents"], load_saved_latents(plain))
    json_file = tmp_path / "found.json"
    for other, factor in (("b", 0.0), ("c", 0.1)):
        shutil.copytree(steps, tmp_path / other)
        first = load_file(files[0])["latents"]
        noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(0))
        other_first = first + factor * noise
        save_file({"latents": other_first}, tmp_path / other / files[0].name)
        compare_latents.main([str(steps), str(tmp_path / other), "--json", str(json_file)])
        report = json.loads(json_file.read_text())
        assert (report["departs"] is None) == (other == "b"), report
    cosine = torch.cosine_similarity(first.double().flatten(), other_first.double().flatten(), 0)
    assert report["steps"][0]["cosine"] == pytest.approx(float(cosine), abs=1e-12)
    (tmp_path / "b" / "0002.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no 0002\.safetensors"):
        compare_latents.main([str(steps), str(tmp_path / "b")])


def test_fixed_latents_stand_for_the_noise(plain: Path, tiny, tmp_path: Path, capfd) -> None:
    """The noise of a seed, read from a file, gives the video of that seed under another seed."""
    expected = load_saved_latents(plain)
    assert expected.shape == (16, 2, 4, 8) and expected.dtype == torch.float32
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
    file = tmp_path / "noise.safetensors"
    save_file({"latents": noise}, file)
    argv = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--prompt", PROMPT, "--base_seed", "8"]
    argv += ["--save_latents", "--save_file", tmp_path / "a.mp4"]
    run_generate(*argv, "--fixed_latents", file)
    assert torch.equal(load_saved_latents(tmp_path / "a.mp4"), expected)
    settings = json.loads((tmp_path / "a.json").read_text())["settings"]
    assert settings["fixed_latents"] == str(file)
    save_file({"latents": noise[:, :1].contiguous()}, file)
    assert generate.main([str(arg) for arg in (*argv, "--fixed_latents", file)]) == 2
    message = f"--fixed_latents holds latents of shape {[*noise[:, :1].shape]}; this video's are"
    assert message in capfd.readouterr().err


@pytest.fixture
def before_the_last_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[], object]], None]:
    """Runs an action, as of another program, just before a video is finished."""
    finish = video_writer.Mp4Encoder.finish

    def arrange(action: Callable[[], object]) -> None:
        def finish_late(encoder: video_writer.Mp4Encoder) -> None:
            action()
            finish(encoder)

        monkeypatch.setattr(video_writer.Mp4Encoder, "finish", finish_late)

    return arrange


def test_latents_that_cannot_be_moved_stay(
    tiny, tmp_path: Path, before_the_last_frame, capfd
) -> None:
    """A folder has taken the name of the latents: the file named in the log still exists."""
    out = tmp_path / "v.mp4"
    before_the_last_frame(out.with_suffix(".latents.safetensors").mkdir)
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *SMALL, "--save_latents"]
    run_generate(*argv, "--save_file", out)
    (latents_file,) = (path for path in tmp_path.glob("v.*safetensors") if path.is_file())
    assert f"latents are still in {latents_file}" in capfd.readouterr().out
    assert load_file(latents_file)["latents"].shape == (16, 1, 4, 4)


@pytest.mark.parametrize("flags", [["--precision", "bf16"], slow(["--convert_model_dtype"])])
def test_bf16_is_close(flags: list[str], plain: Path, tiny, tmp_path: Path) -> None:
    argv = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--prompt", PROMPT, *flags, "--save_latents"]
    run_generate(*argv, "--save_file", tmp_path / "bf16.mp4")
    exact, rounded = load_saved_latents(plain), load_saved_latents(tmp_path / "bf16.mp4")
    difference = ((exact - rounded).square().mean() / exact.square().mean()).sqrt()
    assert 0 < difference < 0.05
    repeated = resolve_argv(["--from_json", tmp_path / "bf16.json"]).setup.execution
    assert repeated.get_dit_precision("cpu") == "bf16"


def test_guidance_one_skips_the_unconditional_pass(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wan.modules.model import WanModel

    calls = []
    forward = WanModel.forward

    def record_call(self: WanModel, *args: object, **kwargs: object) -> list[torch.Tensor]:
        calls.append(kwargs["step"])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(WanModel, "forward", record_call)
    args = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--save_file", tmp_path / "v.mp4"]
    run_generate(*args, "--sample_steps", "4", "--sample_guide_scale", "1,4")
    assert [(c.index, c.expert, c.branch) for c in calls] == [
        *((i, "high_noise", branch) for i in range(3) for branch in ("cond", "uncond")),
        (3, "low_noise", "cond"),
    ]
    assert all(c.grid == (2, 2, 4) and c.valid_len == 16 and c.count == 4 for c in calls)


def test_steps_with_colliding_timesteps(tiny, tmp_path: Path) -> None:
    """Their whole numbers are equal."""
    args = ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), "--sample_guide_scale", "1"]
    args += ["--size", "16*16", "--frame_num", "1", "--sample_steps", "12", "--sample_shift", "200"]
    run_generate(*args, "--save_file", tmp_path / "v.mp4", "--save_latents")
    assert load_saved_latents(tmp_path / "v.mp4").isfinite().all()


def test_tiling_is_close_and_leaves_latents_alone(tiny, tmp_path: Path) -> None:
    """The video is larger than one tile of 256 pixels; the image is encoded without tiling."""
    image = write_picture(tmp_path / "wide.png", size=(288, 32))
    args = ["--task", "ti2v-5B", "--image", image, "--ckpt_dir", tiny("ti2v-5B")]
    args += ["--size", "288*32", "--frame_num", "1", "--sample_steps", "1", "--base_seed", "7"]
    outs = tmp_path / "whole.mp4", tmp_path / "tiled.mp4"
    for out, flags in zip(outs, ([], ["--vae_tiling"]), strict=True):
        run_generate(*args, *flags, "--save_latents", "--save_file", out)
    assert torch.equal(*map(load_saved_latents, outs))
    whole, tiled = (read_frames(out).astype(int) for out in outs)
    assert whole.shape == (1, 32, 288, 3) and 0 < np.abs(whole - tiled).mean() < 30


def test_a_trace_counts_the_steps_that_are_left_out(plain: Path, tiny, tmp_path: Path) -> None:
    """A video that starts from another one has the second half of four steps."""
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *SMALL, "--sample_steps", "4"]
    argv += ["--src_video", plain, "--strength", "0.5", "--trace", tmp_path / "trace"]
    run_generate(*argv, "--save_file", tmp_path / "v.mp4")
    assert [*read_traces(tmp_path / "trace")[0].plan.steps] == [3]


def test_a_compiler_cache_that_cannot_be_used(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """--compile computes eagerly then, and one sentence says so."""
    cache = tmp_path / "shared"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *SMALL, "--compile"]
    run_generate(*argv, "--save_file", tmp_path / "v.mp4")
    (line,) = (line for line in capfd.readouterr().out.splitlines() if str(cache) in line)
    assert "TORCHINDUCTOR_CACHE_DIR" in line
    assert not [*cache.iterdir()]


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_what_a_plain_run_imports(ranks: int, tiny, tmp_path: Path) -> None:
    """No compiler, whose cache cannot be used here, and none of the libraries of other tasks.

    A line says what starts before PyTorch is imported, which takes longest.
    """
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "new"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    argv = [*(launcher if ranks > 1 else ()), REPO / "generate.py", "--task", "t2v-1.3B", *SMALL]
    argv += ["--ckpt_dir", tiny("t2v-1.3B"), "--save_file", tmp_path / "v.mp4"]
    result = subprocess.run(
        [sys.executable, *argv],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPROFILEIMPORTTIME": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert str(cache) not in result.stdout
    imported_before, first_line, _ = re.split(
        r"^(\[\d\d:.*)$", result.stdout, maxsplit=1, flags=re.MULTILINE
    )
    assert "Starting" in first_line
    assert ranks > 1 or not re.findall(r"\| +torch\..*", imported_before)
    names = re.findall(r"^import time:[\d |]+ ([\w.]+)$", result.stdout, re.MULTILINE)
    assert "wan.pipeline.build" in names and len({*names}) < 1500
    unused = ("torch._dynamo.", "torch.distributed.fsdp.", "sympy.", "transformers.", "diffusers.")
    assert not [name for name in names if f"{name}.".startswith(unused)]


@pytest.mark.parametrize("task", ["t2v-A14B", "i2v-A14B"])
def test_a_plan_imports_no_compiler(task: str, tmp_path: Path) -> None:
    """Although PyTorch's kernels for tensors without data would import it."""
    script = (
        "import sys\nfrom wan.cli.main import main\n"
        "main(sys.argv[1:])\nprint('torch._dynamo' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "--task", task, "--plan"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        timeout=240,
    )
    assert "Plan: " in result.stdout and result.stdout.endswith("\nFalse\n"), result.stderr


def test_help_begins_with_the_flags_of_every_day(capfd) -> None:
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) < 50 and "--prompt" in "".join(lines) and "--sigma_max" not in "".join(lines)


def test_help_is_light(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom wan.cli.main import main\n"
        "try: main(['--help', 'all'])\nfinally: print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    text = " ".join(result.stdout.split())
    for option in (
        "--sample_guide_scale X[,X] guidance scale",
        "--comm_type {0,1,2} 0: baseline",
        "--sample_solver {unipc,dpm++,euler,dmd,rcm,lcm,",
        "--cfg_size {1,2}",
        "--rainfusion_type {v1,v2,v3}",
        "--use_rainfusion block-sparse",
        "--task {t2v-A14B,",
    ):
        assert option in text
    assert not {"torch", "numpy", "diffusers"} & set(text.split())


def test_the_demo_checkpoint_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    argv = ["--task", "ti2v-5B", *SMALL]
    (notice,) = (text for text in resolve_argv(argv).notices if "demo checkpoint" in text)
    assert "clone" not in notice
    mtime_ns = (tmp_path / "cache/wan/demo-ti2v-5B-v1").stat().st_mtime_ns
    for module in (notices, resolve):
        monkeypatch.setattr(module, "DEMO_FOLDER", tmp_path / "site-packages" / "examples" / "demo")
    (notice,) = (text for text in resolve_argv(argv).notices if "demo checkpoint" in text)
    assert "The trained demo, examples/demo, comes with a clone of the repository." in notice
    assert (tmp_path / "cache/wan/demo-ti2v-5B-v1").stat().st_mtime_ns == mtime_ns


def test_the_official_folder_is_used(tiny, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(tiny("t2v-A14B"), tmp_path / "Wan2.2-T2V-A14B")
    run = resolve_argv(QUICK)
    assert run.setup.checkpoint.folder == Path("Wan2.2-T2V-A14B")
    assert not any("demo" in notice for notice in run.notices)


def test_an_extended_prompt_is_used_and_recorded(
    plain: Path, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record repeats the run without the service."""
    reply = json.dumps({"choices": [{"message": {"content": PROMPT}}]}).encode()
    monkeypatch.setattr(prompt_extend, "urlopen", lambda *_, **__: io.BytesIO(reply))
    monkeypatch.setenv("DASH_API_KEY", "sk-test")
    argv = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--save_file", tmp_path / "extended.mp4"]
    method = ["--use_prompt_extend", "--prompt_extend_method", "dashscope"]
    run_generate(*argv, "--prompt", "short", *method)
    assert (tmp_path / "extended.mp4").read_bytes() == plain.read_bytes()
    monkeypatch.delenv("DASH_API_KEY")
    repeated = resolve_argv(["--from_json", tmp_path / "extended.json"])
    assert repeated.prompt_extension is None and repeated.params.prompt == PROMPT


@pytest.mark.parametrize("kind", ["video", "lines", "clips"])
def test_nan_makes_no_video(kind: str, tiny, tmp_path: Path, image_path: Path, capfd) -> None:
    """Overflowing weights end the run after its first step; the latents are kept."""
    task = "i2v-A14B" if kind == "clips" else "t2v-1.3B"
    folder, out = shutil.copytree(tiny(task), tmp_path / "weights"), tmp_path / "v.mp4"
    pattern = "high_noise_model/*.safetensors" if kind == "clips" else "diffusion*.safetensors"
    files = {file: load_file(file) for file in folder.glob(pattern)}
    ((file, weights),) = ((f, x) for f, x in files.items() if "head.head.bias" in x)
    weights["head.head.bias"][0] = float("inf")
    save_file(weights, file)
    prompt_argv = ["--prompt", "a", "--save_file", out]
    if kind == "clips":
        prompt_argv += ["--image", image_path, "--num_clip", "2"]
    if kind == "lines":
        line = json.dumps({"prompt": "a", "save_file": str(out)})
        (tmp_path / "p.txt").write_text(f"{line}\n")
        prompt_argv = ["--prompt_file", tmp_path / "p.txt", "--save_file", tmp_path]
    argv = ["--task", task, "--ckpt_dir", folder, *QUICK, *prompt_argv]
    assert generate.main([str(word) for word in argv]) == 1
    output = "".join(capfd.readouterr())
    assert "NaN or infinite after step 1 of 2 (" in output and not out.exists()
    (latents_file,) = tmp_path.glob("v.*.latents.safetensors")
    assert f"The latents, which contain NaN or infinity, are kept in {latents_file}." in output
    assert generate.main(["--decode_latents", str(latents_file)]) == 2


@pytest.mark.parametrize("broken", ["nan", "=1e6"])
def test_a_lora_that_breaks_weights(broken: str, tiny, tmp_path: Path, capfd) -> None:
    layer, down = "blocks.0.self_attn.q", torch.full((2, 96), 1e20)
    if broken == "nan":
        down[0, 0] = float("nan")
    pair = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": torch.full((96, 2), 1e20)}
    save_file(pair, tmp_path / "x.safetensors")
    lora_arg = f"{tmp_path}/x.safetensors{broken if broken[0] == '=' else ''}"
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *QUICK, "--lora", lora_arg]
    assert generate.main([str(word) for word in (*argv, "--save_file", tmp_path / "v.mp4")]) == 2
    assert "weights NaN or infinite" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_current_folder_that_cannot_be_used(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Without --save_file the video is written there; refused before any weight is read."""
    argv = ["--prompt", "a", "--ckpt_dir", str(tiny("t2v-A14B"))]
    (tmp_path / "gone").mkdir()
    for folder, message in (
        (Path("/sys"), "/sys cannot be written"),
        (tmp_path / "gone", "does not"),
    ):
        monkeypatch.chdir(folder)
        if folder.name == "gone":
            folder.rmdir()
        assert generate.main(argv) == 2
        captured = capfd.readouterr()
        assert f"The current folder {message}" in captured.err and "oading" not in captured.out


@pytest.mark.slow
def test_a_closed_standard_output(tiny, tmp_path: Path) -> None:
    argv = [sys.executable, str(REPO / "generate.py"), "--task", "t2v-1.3B", "--prompt", "a"]
    argv += ["--ckpt_dir", str(tiny("t2v-1.3B")), *SMALL, "--save_file", str(tmp_path / "v.mp4")]
    result = subprocess.run(["sh", "-c", f"exec {shlex.join(argv)} >&-"], capture_output=True)
    assert result.returncode == 0 and (tmp_path / "v.mp4").stat().st_size


@pytest.mark.parametrize("change", ["new", "replaced", "rewritten"])
def test_a_video_that_appears_meanwhile_is_kept(
    change: str, plain: Path, tiny, tmp_path: Path, before_the_last_frame, capfd
) -> None:
    out = tmp_path / "v.mp4"

    def write_by_another_run() -> None:
        if change == "replaced":
            out.unlink()
        out.write_text("another video")

    if change != "new":
        shutil.copy(plain, out)
    before_the_last_frame(write_by_another_run)
    run_generate("--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *SMALL, "--save_file", out)
    assert out.read_text() == "another video" and not out.with_suffix(".json").exists()
    assert f"{out} appeared during this run and is kept" in "".join(capfd.readouterr())
    record = json.loads((tmp_path / "v-2.json").read_text())
    assert record["settings"]["save_file"] == str(tmp_path / "v-2.mp4")
    assert read_frames(tmp_path / "v-2.mp4").shape == (1, 32, 32, 3)


def test_files_of_a_killed_run_are_removed(plain: Path, tiny, tmp_path: Path) -> None:
    """The next run of the same video removes them, except those of living processes and inputs."""
    latents_bytes = plain.with_suffix(".latents.safetensors").read_bytes()
    host = make_process_name().rpartition("-")[0]
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = [".{}-v.mp4", ".{}-v.json", "v.{}.latents.safetensors", ".{}-other.mp4"]
    owners = [f"{host}-{dead.pid}", f"{host}-{os.getppid()}", f"elsewhere-{dead.pid}"]
    for name in (name.format(owner) for name in names for owner in owners):
        (tmp_path / name).write_bytes(latents_bytes if "latents" in name else b"unfinished")
    source = tmp_path / names[2].format(f"{host}-{2**22 + 1}")  # no process has this ID
    source.write_bytes(latents_bytes)
    argv = [*SMALL, "--src_video", source, "--strength", 1, "--save_file", tmp_path / "v.mp4"]
    run_generate("--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *argv)
    remaining = {path.name for path in tmp_path.iterdir()} - {"v.mp4", "v.json", source.name}
    other_owners_files = {name.format(owner) for name in names for owner in owners[1:]}
    assert remaining == other_owners_files | {names[3].format(owners[0])} and source.exists()
    decoded = tmp_path / names[2].format(owners[0]).replace("v.", "plain.", 1)
    decoded.write_bytes(latents_bytes)
    run_generate("--decode_latents", decoded)
    assert (tmp_path / "plain.mp4").exists() and not decoded.exists()


def test_the_record_and_the_video_hold_the_command(tiny, tmp_path: Path, monkeypatch) -> None:
    out, prompt = tmp_path / "v.mp4", 'a "quoted" fox; \u72d0 = 1'
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", tiny("t2v-1.3B"), *SMALL, "--prompt", prompt]
    argv = [str(word) for word in (*argv, "--save_file", out)]
    monkeypatch.setattr(sys, "argv", ["generate.py", *argv])
    assert generate.main(argv) == 0
    record = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert record["run"]["command"] == shlex.join(["generate.py", *argv])
    assert len(record["run"]["commit"]) == 40 and record["run"]["date"][:2] == "20"
    assert 0 <= record["seed"] < 10**10
    probe = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(out), "-f", "ffmetadata"]
    metadata = subprocess.run([*probe, "-"], capture_output=True, text=True, check=True).stdout
    comment = metadata.split("comment=")[1].split("\nencoder")[0]
    comment_record = json.loads(
        re.sub(r"\\([=;#\\\n])", r"\1", comment)
    )  # undo the escapes of ffmpeg
    assert (comment_record["prompt"], comment_record["seed"]) == (prompt, record["seed"])


@pytest.mark.slow
def test_compiled_blocks_give_the_same_latents(tiny, tmp_path: Path) -> None:
    """--compile with the default compiler, both experts, offload and the text cache."""
    args = ["--ckpt_dir", tiny("t2v-A14B"), *QUICK, "--sample_steps", "4", "--save_latents"]
    for name, flags in (("eager", []), ("compiled", ["--compile"])):
        run_generate(*args, *flags, "--save_file", tmp_path / f"{name}.mp4")
    eager, compiled = (
        load_saved_latents(tmp_path / f"{name}.mp4") for name in ("eager", "compiled")
    )
    torch.testing.assert_close(eager, compiled, atol=1e-4, rtol=0)
