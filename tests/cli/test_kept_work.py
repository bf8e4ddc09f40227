"""Reuse of files on disk: clips of an earlier run, and videos of a prompt file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from tests.pipelines import resolve_argv
from wan.app import batch_job
from wan.app import job as videos
from wan.app.clip_store import ClipFiles
from wan.cli import main as generate
from wan.media.video_writer import save_latents
from wan.tasks.base import Clip

# Clips. A run reuses the clips of another run if it would generate the same.


class TwoClipRun:
    """Two clips of a run whose image and LoRA are files in a folder."""

    def __init__(self, folder: Path, value: float = 1.0) -> None:
        """Writes the files. value: Of all elements of the LoRA's factor lora_up."""
        folder.mkdir()
        self.folder, self.image, self.lora = folder, folder / "x.png", folder / "x.safetensors"
        Image.new("RGB", (32, 32), "red").save(self.image)
        self.write_lora(value)

    def write_lora(self, value: float) -> None:
        """Rewrites the LoRA with the same number of bytes."""
        name = "blocks.0.self_attn.q.lora_{}.weight"
        up, down = torch.full((192, 1), value), torch.ones(1, 192)
        save_file({name.format("up"): up, name.format("down"): down}, self.lora)

    def make_clip_files(self, *flags: object, strength: float = 0.5) -> ClipFiles:
        """Returns the clips of the run; the last of repeated flags counts."""
        argv = ["--task", "i2v-A14B", "--size", "32*32", "--frame_num", "9", "--num_clip", "2"]
        argv += ["--sample_steps", "2", "--chain", "latent", "--base_seed", "7", "--prompt", "x"]
        argv += ["--lora", f"{self.lora}={strength}", "--image", str(self.image)]
        argv += ["--save_file", str(self.folder / "v.mp4")]
        return ClipFiles(resolve_argv([*argv, *flags]))

    def write_clips(self, *flags: object, end: float = 1.0) -> None:
        """Writes the clips. end: Value of the state that the first clip passes on."""
        files = self.make_clip_files(*flags)
        files.folder.mkdir(exist_ok=True)
        for index, value in enumerate((end, 2.0)):
            frames = torch.full((3, 9 if index == 0 else 4, 32, 32), index / 2)
            latent = torch.full((16, 1, 4, 4), value)
            files.write_clip(index, Clip(latent.expand(16, 3, 4, 4), frames, latent))


@pytest.fixture
def chain(tmp_path: Path) -> TwoClipRun:
    return TwoClipRun(tmp_path / "here")


def test_latents_that_could_not_be_saved_are_not_called_kept(
    chain: TwoClipRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No path can be written; only finite latents are decoded from memory."""
    messages: list[str] = []

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("wan.media.video_writer.save_latents", fail)
    monkeypatch.setattr(videos.logger, "error", lambda text, *args: messages.append(text % args))
    for value, continues in ((0.0, True), (float("nan"), False)):
        messages.clear()
        job = videos.VideoJob(chain.make_clip_files()._run, cast(Any, None), None)
        job.save_denoised_latents(torch.full((16, 3, 4, 4), value))
        assert job.latents_file is None and not any("kept" in message for message in messages)
        assert any("continues from memory" in message for message in messages) == continues


OTHER_SETTINGS = [
    "--base_seed 8",
    "--sample_steps 3",
    "--boundary_step 1",
    "--prompt y",
    "--negative_prompt y",
    "--sample_solver euler",
    "--fps 24",
]


def test_a_setting_that_one_of_two_runs_has_makes_clips_again(chain: TwoClipRun) -> None:
    """Whether the earlier or the later run has the setting."""
    wrong, all_flags = [], [flags.split() for flags in OTHER_SETTINGS]
    chain.write_clips()
    assert chain.make_clip_files().count_finished() == 2
    wrong += [flags for flags in all_flags if chain.make_clip_files(*flags).count_finished()]
    for flags in all_flags:
        chain.write_clips(*flags)
        wrong += [flags] if chain.make_clip_files().count_finished() else []
    assert chain.make_clip_files(*all_flags[-1]).count_finished() == 2 and not wrong


def test_changes_that_keep_clips(chain: TwoClipRun, tmp_path: Path) -> None:
    """Another number of clips, offload, saved latents, and input files with the same content."""
    chain.write_clips()
    assert chain.make_clip_files("--num_clip", 3).count_finished() == 2
    assert chain.make_clip_files("--num_clip", 1).count_finished() == 1
    assert chain.make_clip_files("--offload_model", "block", "--save_latents").count_finished() == 2
    copied_run = TwoClipRun(tmp_path / "there")
    shutil.copytree(chain.make_clip_files().folder, copied_run.make_clip_files().folder)
    assert copied_run.make_clip_files().count_finished() == 2


def test_another_file_of_a_lora_makes_clips_again(chain: TwoClipRun) -> None:
    """Also a file of the same name and size, and the same file with another strength."""
    chain.write_clips()
    assert chain.make_clip_files(strength=0.6).count_finished() == 0
    chain.write_lora(2.0)
    assert chain.make_clip_files().count_finished() == 0
    chain.write_lora(1.0)
    assert chain.make_clip_files().count_finished() == 2
    assert chain.make_clip_files("--lora_high_noise", chain.lora).count_finished() == 0


def test_a_changed_state_makes_its_clip_again(chain: TwoClipRun) -> None:
    """Its metadata are those of the clip."""
    chain.write_clips()
    path = chain.make_clip_files().folder / "0002.safetensors"
    with safe_open(path, "pt") as file:
        metadata, end = file.metadata(), file.get_tensor("end")
    save_file({"end": end + 1e-3}, path, metadata)
    assert chain.make_clip_files().count_finished() == 1


@pytest.mark.parametrize("name", ["0002.mp4", "0002.safetensors"])
def test_a_clip_replaced_by_one_of_another_run(
    name: str, chain: TwoClipRun, tmp_path: Path
) -> None:
    """Both runs have the same settings, but different clip states after the first clip."""
    other = TwoClipRun(tmp_path / "other")
    chain.write_clips()
    other.write_clips(end=5.0)
    if name == "0002.safetensors":  # whose state matches its own video
        shutil.copy(other.make_clip_files().folder / "0002.mp4", chain.make_clip_files().folder)
    else:
        (other.make_clip_files().folder / name).write_bytes(
            (other.make_clip_files().folder / "0001.mp4").read_bytes()
        )
    shutil.copy(other.make_clip_files().folder / name, chain.make_clip_files().folder)
    assert chain.make_clip_files().count_finished() == 1


# Videos of a prompt file. --skip_existing skips lines whose video exists.

LINES: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "a", "seed": 1},
    "more": {"prompt": "a", "seed": 1, "boundary_step": 1, "negative_prompt": "b"},
    "drawn": {"prompt": "a"},
}
COMMON = ["--task", "t2v-A14B", "--size", "32*32", "--frame_num", "5", "--sample_steps", "2"]


def make_videos(folder: Path, lines: dict[str, dict[str, Any]], *flags: str) -> dict[str, Any]:
    """Makes a video of each line; returns the summary, which lists the numbers of the lines."""
    text = [json.dumps(line | {"save_file": f"{name}.mp4"}) for name, line in lines.items()]
    (folder / "lines.jsonl").write_text("\n".join(text))
    argv = [*COMMON, *flags, "--prompt_file", str(folder / "lines.jsonl"), "--save_file"]
    assert generate.main([*argv, str(folder)]) == 0
    return dict(json.loads((folder / "lines.summary.json").read_text()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the videos of all lines."""
    folder = tmp_path_factory.mktemp("made")
    make_videos(folder, LINES)
    return folder


class UnmadeVideo:
    """Replaces `wan.app.job.VideoJob`: makes no video."""

    def __init__(self, run: Any, *_: Any) -> None:
        self.run = run

    def make_inputs(self) -> Any:
        return self.run.load_inputs()

    def make(self, latents: Any) -> None: ...


@pytest.fixture
def again(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, bool]]:
    """Requests one video again, with other settings and flags; returns whether it was skipped."""
    monkeypatch.setattr(batch_job, "VideoJob", UnmadeVideo)
    shutil.copytree(made, tmp_path / "out")

    def is_there(name: str, settings: dict[str, Any], *flags: str) -> bool:
        summary = make_videos(tmp_path / "out", {name: settings}, "--skip_existing", *flags)
        return list(summary["there already"]) == ["1"]

    return is_there


def test_existing_videos_are_skipped(again: Callable[..., bool]) -> None:
    """A drawn seed and default values do not count as differences."""
    for name, line in LINES.items():
        assert again(name, line)
    assert again("drawn", LINES["drawn"] | {"seed": -1})
    assert again("plain", LINES["plain"] | {"sample_steps": 2})
    assert again("plain", LINES["plain"], "--save_latents") is False
    assert not again("none", LINES["plain"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", {"seed": 2}),
        ("plain", {"sample_steps": 3}),
        ("plain", {"boundary_step": 1}),
        ("drawn", {"prompt": "b"}),
        ("more", {"boundary_step": None}),
        ("more", {"negative_prompt": None}),
        ("more", {"boundary_step": 0}),
    ],
    ids=str,
)
def test_a_video_of_other_settings_is_made_again(
    name: str, change: dict[str, Any], again: Callable[..., bool]
) -> None:
    """Whether only the line or only the record of the video has the setting."""
    line = {key: value for key, value in (LINES[name] | change).items() if value is not None}
    assert not again(name, line)


def test_a_video_of_another_precision_is_made_again(again: Callable[..., bool]) -> None:
    """The default precision on the CPU is float32."""
    assert again("plain", LINES["plain"], "--precision", "fp32")
    assert not again("plain", LINES["plain"], "--precision", "bf16")


# Latents that are decoded again. The new video gets an unused name.


@pytest.mark.parametrize(
    ("existing", "name"),
    [
        ([], "v.mp4"),
        (["v.mp4"], "v-2.mp4"),
        (["v.json"], "v-2.mp4"),
        (["v.mp4", "v-2.json"], "v-3.mp4"),
    ],
)
def test_decoding_writes_over_no_video_and_no_record(
    existing: list[str], name: str, tmp_path: Path
) -> None:
    """Also if a video was moved away and only its record exists."""
    run = resolve_argv([*COMMON, "--save_file", str(tmp_path / "v.mp4")])
    latents = tmp_path / "x.safetensors"
    save_latents(torch.zeros(run.params.latent_shape), latents, run.settings)
    for file in existing:
        (tmp_path / file).touch()
    decode_run = resolve_argv(["--decode_latents", str(latents)])
    assert decode_run.output.save_file == tmp_path / name
