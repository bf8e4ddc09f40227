"""Video to video: its sources, its steps, refinement, and bad input."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import imageio
import pytest
import torch
from safetensors.torch import save_file

import wan
from tests.conftest import Refusals, Tiny
from tests.pipelines import resolve_argv, resolve_plan
from tests.refusals import check_refusals, get_refusal
from tests.tasks.conftest import run_generate
from tests.tasks.tasks import QUICK, write_moving_box, write_picture
from tools import make_character, make_sound
from wan.media.video_writer import save_latents, save_preview, write_video
from wan.pipeline.pipeline import Experts
from wan.serve.jobs.job import ServiceJob
from wan.settings.command import Output

SMALL = ["--size", "64*64", "--frame_num", "5"]
TEN = ["--sample_steps", "10", "--sample_shift", "5", "--size", "64*48"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moving_box(tmp_path_factory.mktemp("source") / "box.mp4")


def write_latents(path: Path, *shape: int) -> Path:
    save_latents(torch.zeros(shape), path, {})
    return path


def test_frames_and_size_follow_the_source(source: Path, tmp_path: Path) -> None:
    """By default the size of the source in whole tokens, and its frames down to 4n+1."""
    odd = write_moving_box(tmp_path / "odd.mp4", (104, 72), 12, 12)
    latents = write_latents(tmp_path / "x", 16, 4, 20, 30)
    cases = {
        ("--src_video", source): (64, 48, 9, 16),
        ("--src_video", odd): (96, 64, 9, 12),
        ("--src_video", odd, "--frame_num", 5, "--size", "128*80"): (128, 80, 5, 12),
        ("--src_video", latents): (240, 160, 13, 16),
        ("--src_video", latents, "--size", "480*320"): (480, 320, 13, 16),
        ("--src_video", source, "--task", "ti2v-5B"): (64, 32, 9, 16),
    }
    for argv, expected in cases.items():
        run = resolve_plan(*argv)
        actual = (*run.params.video_size, run.params.frame_num, run.output.fps)
        assert actual == expected, argv
        assert run.params.strength == 0.8 and run.settings["src_video"] == str(argv[1])


def test_what_is_said_of_a_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That frames are left out, or that the rate is not the network's: 16, and 24 of ti2v-5B."""
    for count, fps, flags, is_cut, is_untrained in (
        (9, 16, (), False, False),
        (10, 16, (), True, False),
        (9, 16, ("--frame_num", 5), True, False),
        (9, 15, (), False, True),
        (9, 17, (), False, True),
        (9, 24, (), False, True),
        (9, 24, ("--task", "ti2v-5B"), False, False),
    ):
        caplog.clear()
        video = write_moving_box(tmp_path / f"{count}_{fps}.mp4", (64, 48), count, fps)
        with caplog.at_level(logging.INFO):
            run = resolve_plan("--src_video", video, *flags)
        cut = f"has {count} frames; the first {run.params.frame_num} are used" in caplog.text
        untrained = f"has {fps} frames per second; the network was trained" in caplog.text
        assert (cut, untrained) == (is_cut, is_untrained), (count, fps, flags)


def test_a_plan_counts_the_steps(source: Path) -> None:
    """So do the service's estimates."""
    run = resolve_plan("--src_video", source, "--strength", "0.3")
    notices = [notice for notice in run.notices if notice.startswith("Video to video")]
    text = "Video to video: 12 of 40 steps (low_noise), from a noise share (sigma) of 0.837."
    assert notices == [text]
    jobs = [ServiceJob(name, {}) for name in ("cut", "all")]
    jobs[0].set_sizes(run)
    jobs[1].set_sizes(resolve_plan("--size", "64*48", "--frame_num", 9))
    assert [job.total for job in jobs] == [12, 40]
    assert jobs[0].work / jobs[1].work == pytest.approx(0.3)


@pytest.mark.parametrize(
    "cache", ["steps:0,1,20-30", "mag", "cfg", "attention", "tea:coefficients=1,0,threshold=2"]
)
def test_a_step_cache_computes_the_first_step(cache: str, source: Path) -> None:
    """Its other steps are those of the whole schedule, by their indices in it."""
    argv = ["--step_cache", cache]
    masks = []
    for start in (["--src_video", source, "--strength", "0.5"], []):
        run = resolve_plan(*start, "--size", "64*48", "--frame_num", "9", *argv)
        assert run.setup.policy is not None
        run.setup.policy.describe(run.params, sync_branches=False)
        steps = run.setup.policy.list_steps(run.params, compute_changes=lambda _, t: [1.0] * len(t))
        assert steps is not None
        masks.append(steps["uncond"])
    cut, whole = masks
    assert cut == ((False,) * 20 + (True,) + whole[21:]) and not all(whole[21:])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the experts that runs load."""
    names, get = list[str](), Experts.get
    monkeypatch.setattr(Experts, "get", lambda self, name: (names.append(name), get(self, name))[1])
    monkeypatch.setattr(Experts, "prefetch", lambda _, name: names.append(name))
    return names


def test_refining_loads_the_low_noise_expert_only(
    tiny: Tiny, source: Path, tmp_path: Path, loaded: list[str]
) -> None:
    """Kept latents are refined at twice their size; the record has the first sigma."""
    start = ["--task", "t2v-A14B", "--ckpt_dir", tiny("t2v-A14B"), *QUICK, *TEN[:4]]
    draft, out = tmp_path / "draft.mp4", tmp_path / "v.mp4"
    first = [*start, "--src_video", source, "--strength", "0.3", "--frame_num", "5"]
    assert run_generate(*first, "--save_latents", "--save_file", draft) == 0
    record = json.loads(draft.with_suffix(".json").read_text())
    u = 0.9990000128746033 * 0.3
    assert record["start"] == {"step": 7, "steps": 3, "sigma": pytest.approx(5 * u / (1 + 4 * u))}
    latents = draft.with_suffix(".latents.safetensors")
    refined = [*start, "--src_video", latents, "--refine", "--size", "128*96"]
    assert run_generate(*refined, "--save_file", out) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["start"]["steps"] == 5 and record["settings"]["refine"] is True
    assert record["video"] == {"frames": 5, "width": 128, "height": 96, "fps": 16}
    assert set(loaded) == {"low_noise"}


def test_the_image_of_ti2v_stays(tiny: Tiny, source: Path) -> None:
    """Its latent frame is that of a video without a source."""
    model = wan.WanTI2V("ti2v-5B", tiny("ti2v-5B"))
    image = imageio.v3.imread(source, index=0)[:32]
    call = {"img": image, "max_area": 64 * 32, "frame_num": 5, "seed": 1, "sampling_steps": 4}
    plain = model.generate("x", **call, output_type="latent")
    changed = model.generate("x", **call, output_type="latent", src_video=str(source), strength=0.5)
    assert torch.equal(plain[:, 0], changed[:, 0]) and not torch.equal(plain[:, 1], changed[:, 1])


BAD = {
    "no source": ["--strength", "0.5"],
    "refining nothing": ["--refine"],
    "no such file": ["--src_video", "nowhere.mp4"],
    "a folder": ["--src_video", "."],
    "no video": ["--src_video", "text.mp4"],
    "an empty file": ["--src_video", "empty.mp4"],
    "strength zero": ["--src_video", "box.mp4", "--strength", "0"],
    "strength above 1": ["--src_video", "box.mp4", "--strength", "1.5"],
    "strength words": ["--src_video", "box.mp4", "--strength", "weak"],
    "strength nan": ["--src_video", "box.mp4", "--strength", "nan"],
    "no step left": ["--src_video", "box.mp4", "--strength", "0.2", "--sample_steps", "4"],
    "no low-noise step": [
        *("--src_video", "box.mp4", "--refine", "--sample_steps", "4", "--boundary_step", "4"),
    ],
    "s2v": ["--task", "s2v-14B", "--image", "a.png", "--audio", "a.wav", "--src_video", "box.mp4"],
    "animate": ["--task", "animate-14B", "--src_root_path", "moves", "--src_video", "box.mp4"],
    "i2v": ["--task", "i2v-A14B", "--image", "a.png", "--src_video", "box.mp4"],
    "strength of vace": ["--task", "vace-1.3B", "--src_video", "box.mp4", "--strength", "0.5"],
    "refining with one network": ["--task", "ti2v-5B", "--src_video", "box.mp4", "--refine"],
    "too few frames": ["--src_video", "box.mp4", "--frame_num", "13"],
    "fewer latents": ["--src_video", "x.safetensors", "--frame_num", "13"],
    "latents of another VAE": ["--task", "ti2v-5B", "--src_video", "x.safetensors"],
    "weights": ["--src_video", "weights.safetensors"],
    "truncated latents": ["--src_video", "short.safetensors"],
    "fixed latents": ["--src_video", "box.mp4", "--fixed_latents", "x.safetensors"],
    "traced before": [
        *("--src_video", "box.mp4", "--strength", "0.5", "--trace", "trace", "--trace_steps", "0"),
    ],
    "cached": ["--src_video", "box.mp4", "--strength", "0.1", "--step_cache", "first_block"],
    "size": ["--src_video", "box.mp4", "--size", "100*100"],
    "decoded": ["--decode_latents", "x.safetensors", "--strength", "0.5"],
}


def test_bad_input(
    refusals: Refusals, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.mp4").symlink_to(source)
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty.mp4").touch()
    write_picture(tmp_path / "a.png")
    make_sound.write_wav(tmp_path / "a.wav", 1.0)
    make_character.write_character_folder(tmp_path / "moves", (48, 32), 8)
    latents = write_latents(tmp_path / "x.safetensors", 16, 2, 8, 8).read_bytes()
    (tmp_path / "short.safetensors").write_bytes(latents[:-100])
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    refusals("video to video", BAD)


def test_no_input_is_replaced(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input is neither an output, nor in a folder of outputs, nor a line's of a prompt file."""
    monkeypatch.chdir(tmp_path)
    shape = (16, 2, 8, 8)
    write_latents(tmp_path / "v.latents.safetensors", *shape)
    (tmp_path / "link").symlink_to("v.latents.safetensors")
    for folder in ("v.steps", "v.clips"):
        (tmp_path / folder).mkdir()
    write_latents(tmp_path / "v.steps" / "0001.safetensors", *shape)
    (tmp_path / "link to a step").symlink_to("v.steps/0001.safetensors")
    for name in ("v.mp4", "v.clips/0001.mp4"):
        write_video(torch.zeros(3, 5, 64, 64), Output(Path(name), fps=16))
    write_picture(tmp_path / "v.clips" / "picture.png")
    save_preview(torch.zeros(3, 64, 64), tmp_path / "v.preview.jpg")
    common = ["--task", "t2v-1.3B", "--ckpt_dir", str(tiny("t2v-1.3B")), "--device", "cpu"]
    one = [*common, "--prompt", "x", "--save_file", "v.mp4"]
    image_task = ["--task", "i2v-A14B", "--ckpt_dir", str(tiny("i2v-A14B")), *SMALL]
    cases = {
        "its latents": ["--src_video", "v.latents.safetensors", "--save_latents"],
        "a link to them": ["--src_video", "link", "--save_latents"],
        "fixed": ["--fixed_latents", "link", "--save_latents", *SMALL],
        "steps": ["--src_video", "v.steps/0001.safetensors", "--save_latents", "steps"],
        "a link to a step": ["--src_video", "link to a step", "--save_latents", "steps"],
        "itself": ["--src_video", "v.mp4"],
        "a clip": [*image_task, "--image", "v.clips/picture.png", "--num_clip", "2"],
        "a preview": [*image_task, "--image", "v.preview.jpg", "--preview", "1"],
    }
    refusals = {name: get_refusal(resolve_argv, [*one, *argv]) for name, argv in cases.items()}
    lines = [{"prompt": "a", "src_video": "link", "save_file": "other.mp4"}]
    lines += [{"prompt": "b", "save_file": f"{tmp_path}/v.mp4", "save_latents": True}]
    (tmp_path / "lines.txt").write_text("\n".join(map(json.dumps, lines)))
    of_lines = resolve_argv([*common, "--prompt_file", "lines.txt"]).lines
    assert not of_lines[0].error
    check_refusals("inputs as outputs", refusals | {"another line": of_lines[1].error})
    resolve_argv([*one, "--src_video", "link"])  # writes no latents
    for argv in (cases["a clip"][:-2], cases["a preview"][:-2]):  # no clips, no preview
        resolve_argv([*one, *argv])
