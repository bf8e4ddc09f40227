"""Reuse of files on disk: clips of an earlier run, and videos of a prompt file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.pipelines import resolve_argv
from wan.app import batch_job
from wan.app import job as videos
from wan.app.clip_store import ClipFiles
from wan.app.run import PATH_SETTINGS
from wan.cli import main as generate
from wan.settings.command import Loras
from wan.settings.fields import list_options
from wan.settings.flags import FLAGS
from wan.tasks.base import Clip

Change = Callable[[Path], object]

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
        argv += ["--sample_steps", "2", "--chain", "latent", "--base_seed", "7"]
        argv += [] if "--clip_prompts" in flags else ["--prompt", "x"]
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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> TwoClipRun:
    """A run with both clips. Do not change its files."""
    run = TwoClipRun(tmp_path_factory.mktemp("written") / "here")
    run.write_clips()
    return run


@pytest.fixture
def chain(written: TwoClipRun, tmp_path: Path) -> TwoClipRun:
    """A copy of `written`, whose clips count although its paths are others."""
    run = TwoClipRun(tmp_path / "here")
    shutil.copytree(written.make_clip_files().folder, run.make_clip_files().folder)
    return run


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
    *("--base_seed", 8, "--sample_steps", 3, "--boundary_step", 1, "--prompt", "y"),
    *("--negative_prompt", "y", "--sample_solver", "euler", "--fps", 24),
]


def test_a_setting_that_one_of_two_runs_has_makes_clips_again(
    written: TwoClipRun, chain: TwoClipRun, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the earlier or the later run has the setting."""
    chain.write_clips(*OTHER_SETTINGS)
    assert chain.make_clip_files(*OTHER_SETTINGS).count_finished() == 2
    names = sorted(str(word)[2:] for word in OTHER_SETTINGS[::2])
    message = f"clip 1 is generated again, because it differs in {', '.join(names)}."
    with caplog.at_level("INFO", "wan"):
        for files in (chain.make_clip_files(), written.make_clip_files(*OTHER_SETTINGS)):
            caplog.clear()
            assert files.count_finished() == 0 and message in caplog.text


def test_every_other_setting_makes_clips_again(written: TwoClipRun) -> None:
    """Paths keep clips as well, but not the contents of their files."""
    run, kept = written.make_clip_files()._run, set[str]()
    for name in (name for name, flag in FLAGS.items() if flag.record):
        changed = replace(run, settings=run.settings | {name: "another"})
        if ClipFiles(changed).count_finished():
            kept.add(name)
    kept -= {*PATH_SETTINGS, *list_options(Loras), "src_ref_images"}
    own = {"prompt", "base_seed"}  # each clip has its own
    assert kept == own | {"num_clip", "clip_prompts", "offload_model", "save_latents"}


def test_changes_that_keep_clips(chain: TwoClipRun) -> None:
    """Another folder, number of clips, way to offload, and saved latents."""
    assert chain.make_clip_files("--num_clip", 3).count_finished() == 2
    assert chain.make_clip_files("--num_clip", 1).count_finished() == 1
    assert chain.make_clip_files("--offload_model", "block", "--save_latents").count_finished() == 2


def test_another_file_of_a_lora_makes_clips_again(chain: TwoClipRun) -> None:
    """Also a file of the same name and size, and the same file with another strength."""
    assert chain.make_clip_files(strength=0.6).count_finished() == 0
    chain.write_lora(2.0)
    assert chain.make_clip_files().count_finished() == 0
    chain.write_lora(1.0)
    assert chain.make_clip_files().count_finished() == 2
    assert chain.make_clip_files("--lora_high_noise", chain.lora).count_finished() == 0


def test_another_image_or_prompt_makes_clips_again(
    chain: TwoClipRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wan")
    flags = ["--num_clip", "3", "--clip_prompts", "x", "y", "z"]
    assert chain.make_clip_files(*flags).count_finished() == 1
    assert "clip 2 is generated again, because it differs in prompt." in caplog.text
    Image.new("RGB", (32, 32), "blue").save(chain.image)
    assert chain.make_clip_files().count_finished() == 0
    reason = "because it differs in the content of --image"
    assert f"clip 1 is generated again, {reason}" in caplog.text


def alter_state(change: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> Change:
    """Returns a function that changes the tensors of a clip state and keeps its metadata."""

    def alter(path: Path) -> None:
        with safe_open(path, "pt") as file:
            metadata, end = file.metadata(), file.get_tensor("end")
        save_file(change(end), path, metadata)

    return alter


def replace_by_first_clip(path: Path) -> None:
    shutil.copy(path.with_name(f"0001{path.suffix}"), path)


CHANGES: dict[str, tuple[str, Change]] = {
    "no clip": ("0002.mp4", Path.unlink),
    "another clip": ("0002.mp4", replace_by_first_clip),
    "no state": ("0002.safetensors", Path.unlink),
    "half a state": ("0002.safetensors", lambda x: x.write_bytes(x.read_bytes()[:-8])),
    "another state": ("0002.safetensors", replace_by_first_clip),
    "other values": ("0002.safetensors", alter_state(lambda end: {"end": end + 1e-3})),
    "another shape": ("0002.safetensors", alter_state(lambda end: {"end": end[..., None]})),
    "another dtype": ("0002.safetensors", alter_state(lambda end: {"end": end.int()})),
    "another name": ("0002.safetensors", alter_state(lambda end: {"x": end})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_makes_its_clip_again(change: str, chain: TwoClipRun) -> None:
    """And that of a state from which a third clip cannot start."""
    (name, make), files = CHANGES[change], chain.make_clip_files("--num_clip", 3)
    make(files.folder / name)
    assert files.count_finished() == 1


def test_of_large_states_the_last_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last clip can be continued. Without it, nothing is left from which to continue."""
    monkeypatch.setattr("wan.app.clip_store._MAX_KEPT_STATE", 0)
    run = TwoClipRun(tmp_path / "here")
    run.write_clips()
    files = run.make_clip_files("--num_clip", 3)
    assert [len(load_file(files.folder / f"000{n}.safetensors")) for n in (1, 2)] == [0, 1]
    assert files.count_finished() == 2
    last_state = files.read_state(2)
    assert last_state is not None and (last_state == 2).all()
    (files.folder / "0002.mp4").unlink()
    caplog.set_level("INFO", "wan")
    assert files.count_finished() == 0 and "clips 1 to 1 are generated again" in caplog.text


@pytest.mark.parametrize("name", ["0002.mp4", "0002.safetensors"])
def test_a_clip_replaced_by_one_of_another_run(
    name: str, chain: TwoClipRun, tmp_path: Path
) -> None:
    """Both runs have the same settings, but different clip states after the first clip."""
    other = TwoClipRun(tmp_path / "other")
    other.write_clips(end=5.0)
    theirs, ours = other.make_clip_files().folder, chain.make_clip_files().folder
    if name == "0002.mp4":
        shutil.copy(theirs / "0001.mp4", ours / name)
    else:  # with the video that its digest is of
        shutil.copy(theirs / "0002.mp4", ours)
        shutil.copy(theirs / name, ours)
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

    def log_notices(self, *_: Any) -> None: ...


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


AGAIN: dict[str, tuple[str, dict[str, Any], tuple[str, ...], bool]] = {
    # case -> name of the video, changes of its line, flags, and whether the video is skipped
    "the same": ("plain", {}, (), True),
    "the same with more settings": ("more", {}, (), True),
    "a drawn seed": ("drawn", {}, (), True),
    "a seed that is drawn by its value": ("drawn", {"seed": -1}, (), True),
    "a default": ("plain", {"sample_steps": 2}, (), True),
    "the default precision on a CPU": ("plain", {}, ("--precision", "fp32"), True),
    "a record of a version without the setting": ("old", {}, (), True),
    "no record": ("bare", {"seed": 2}, (), True),
    "no video": ("none", {}, (), False),
    "latents": ("plain", {}, ("--save_latents",), False),
    "another precision": ("plain", {}, ("--precision", "bf16"), False),
    "another seed": ("plain", {"seed": 2}, (), False),
    "other steps": ("plain", {"sample_steps": 3}, (), False),
    "a boundary that only the line has": ("plain", {"boundary_step": 1}, (), False),
    "another prompt": ("drawn", {"prompt": "b"}, (), False),
    "a boundary that only the record has": ("more", {"boundary_step": None}, (), False),
    "a prompt that only the record has": ("more", {"negative_prompt": None}, (), False),
    "boundary 0": ("more", {"boundary_step": 0}, (), False),
}


def test_existing_videos_are_skipped_if_they_would_be_the_same(
    again: Callable[..., bool], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    for name in ("old", "bare"):
        shutil.copy(folder / "plain.mp4", folder / f"{name}.mp4")
    record = json.loads((folder / "plain.json").read_text())
    del record["settings"]["sigmas"]
    (folder / "old.json").write_text(json.dumps(record))
    wrong = []
    for case, (name, change, flags, is_skipped) in AGAIN.items():
        line = {
            k: x for k, x in (LINES.get(name, LINES["plain"]) | change).items() if x is not None
        }
        if again(name, line, *flags) != is_skipped:
            wrong.append(case)
    assert not wrong
