"""The lines of a prompt file before generation: seeds, file names, settings."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.pipelines import resolve_argv
from wan.app import batch_job
from wan.app.run import Run
from wan.media.video_writer import write_video
from wan.settings.command import Output
from wan.settings.errors import NotFiniteError

SIZE = ["--task", "t2v-A14B", "--size", "32*32", "--frame_num", "5"]


def resolve_lines(folder: Path, lines: list[str | dict[str, Any]], *flags: str) -> Run:
    """Resolves the run of a prompt file's lines with the demo checkpoint."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "lines.txt").write_text("\n".join(texts))
    argv = [*SIZE, *flags, "--prompt_file", str(folder / "lines.txt")]
    return resolve_argv([*argv, "--save_file", str(folder / "out")])


def test_each_line_has_a_seed_of_its_own(tmp_path: Path) -> None:
    """Derived from one drawn seed; a line with a seed of its own keeps it, also in its record."""
    lines = ["a", "a", {"prompt": "a", "seed": 5}, {"prompt": "a", "seed": -1}]
    run = resolve_lines(tmp_path, [*lines, {"prompt": "a", "seeds": [8, 9]}])
    assert len({line.run.params.base_seed for line in run.lines if line.run}) == 6
    for seed in (100, 2**63 - 1):
        runs = [line.run for line in run.with_seed(seed).lines if line.run is not None]
        seeds = [entry.params.base_seed for entry in runs]
        assert len({*seeds}) == 6 and all(0 <= entry < 2**63 for entry in seeds)
        assert (seeds[2], *seeds[4:]) == (5, 8, 9)
        assert [entry.settings["base_seed"] for entry in runs] == seeds


def test_lines_keep_the_seed_of_a_record(tmp_path: Path) -> None:
    record = tmp_path / "earlier.json"
    record.write_text(json.dumps({"settings": {"base_seed": 7}}))
    lines: list[str | dict[str, Any]] = ["a", {"prompt": "b", "seed": 5}]
    run = resolve_lines(tmp_path, lines, "--from_json", str(record))
    runs = [line.run for line in run.with_seed(100).lines if line.run is not None]
    assert [entry.params.base_seed for entry in runs] == [7, 5]
    refused = resolve_lines(tmp_path, ["a", {"prompt": "b", "seed": "x"}]).lines[1]
    assert refused.error == "seed x must be a whole number.", "as it is written"


def test_lines_of_text(tmp_path: Path) -> None:
    """A comment begins with "# "; lines end where editors end them; numbers count all lines."""
    star = "a red\u2028star\x85"
    texts = ["# a note", "#1 on the grid", "#", " # another", "b\r", "", json.dumps(star)[1:-1]]
    texts.append(json.dumps({"prompt": star}, ensure_ascii=False))
    run = resolve_lines(tmp_path, [*texts])
    found = {line.number: line.run.params.prompt for line in run.lines if line.run}
    assert found == {2: "#1 on the grid", 5: "b", 7: r"a red\u2028star\u0085", 8: star}


def test_names_of_long_prompts_fit_into_a_file_system(tmp_path: Path) -> None:
    """A prompt gives up to 40 bytes of the name, in whole letters of any alphabet."""
    run = resolve_lines(tmp_path, ["a" * 300, "дом " * 90, "猫" * 90])
    names = [line.run.output.save_file.stem for line in run.lines if line.run]
    assert names == ["001_" + "a" * 40, "002_дом_дом_дом_дом_дом_до", "003_" + "猫" * 13]
    assert all(
        line.run.settings["save_file"] == str(line.run.output.save_file)
        for line in run.lines
        if line.run
    )


def test_the_name_of_one_video_fits_into_a_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt gives up to 50 bytes of it."""
    monkeypatch.chdir(tmp_path)
    for letter, count in (("q", 50), ("д", 25), ("猫", 16), ("𠀀", 12)):
        name = resolve_argv([*SIZE, "--prompt", letter * 90]).output.save_file.name
        assert name.count(letter) == count, name


def test_ranks_may_draw_other_seeds_and_name_no_other(tmp_path: Path) -> None:
    """Their rank invariants differ only if a seed in a line differs, not if it is drawn."""
    lines: list[str | dict[str, Any]] = ["a", {"prompt": "b", "seed": 5}]
    drawn = [resolve_lines(tmp_path, lines) for _ in range(2)]
    seeds = [run.lines[0].run.params.base_seed for run in drawn if run.lines[0].run]
    assert seeds[0] != seeds[1]
    first, second = (run.collect_rank_invariants("cpu") for run in drawn)
    assert first == second
    for other in (["a", {"prompt": "b", "seed": 6}], ["a", {"prompt": "c", "seed": 5}]):
        invariants = resolve_lines(tmp_path, other).collect_rank_invariants("cpu")
        assert {name for name in first if first[name] != invariants[name]} == {
            "line 2 of --prompt_file"
        }


class FailingVideo:
    """Replaces `VideoJob`; the first line's video fails."""

    error: Exception
    is_main_only = False
    latents_file = None
    made: list[str]

    def __init__(self, run: Any, *_: Any) -> None:
        self.run = run

    def make_inputs(self) -> Any:
        return self.run.load_inputs()

    def log_notices(self, *_: Any) -> None: ...

    def save_denoised_latents(self, latents: Any) -> None: ...

    def make(self, latents: Any) -> None:
        if self.run.params.prompt == "a":
            raise self.error
        self.made.append(self.run.params.prompt)


@pytest.mark.parametrize("several_ranks", [False, True])
def test_which_failures_end_all_ranks(
    several_ranks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that all ranks have seen, nor those of the main rank after decoding."""
    monkeypatch.setattr(batch_job, "VideoJob", FailingVideo)
    groups: Any = SimpleNamespace(is_main=True, broadcast_object_from_rank0=lambda x: x)
    errors = RuntimeError("x"), OSError("x"), NotFiniteError("x", torch.zeros(1))
    for error, is_main_only in product(errors, (False, True)):
        FailingVideo.error, FailingVideo.is_main_only, FailingVideo.made = error, is_main_only, []
        run = resolve_lines(tmp_path, ["a", "b"])
        ends = several_ranks and not is_main_only and not isinstance(error, NotFiniteError)
        with pytest.raises(type(error)) if ends else nullcontext():
            has_failed = batch_job.make_videos(run, MagicMock(), groups if several_ranks else None)
            assert has_failed
        assert FailingVideo.made == ([] if ends else ["b"]), (error, is_main_only)


SCHEDULE = ["--sample_solver", "euler"]


@pytest.mark.parametrize(
    ("flags", "line", "expected"),
    [
        (["--sample_steps", "4"], {"timesteps": [900, 300]}, {"sample_steps": 2}),
        (["--timesteps", "900,300"], {"timesteps": [900, 500, 300]}, {"sample_steps": 3}),
        (
            ["--sample_steps", "4", "--boundary_step", "3"],
            {"timesteps": [900, 300]},
            {"boundary_step": None},
        ),
        (["--sample_steps", "4"], {}, {"sample_steps": 4}),
        (["--sample_steps", "4"], {"sample_steps": 3}, {"sample_steps": 3}),
        (["--negative_prompt", "x"], {"negative_prompt": "y"}, {"negative_prompt": "y"}),
    ],
    ids=str,
)
def test_a_line_wins_over_the_command(
    flags: list[str], line: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Timesteps in a line replace the whole noise schedule of the command."""
    run = resolve_lines(tmp_path, [{"prompt": "a", **line}], *SCHEDULE, *flags)
    request = run.lines[0].run.params if run.lines[0].run else None
    assert {name: getattr(request, name) for name in expected} == expected


def test_two_lines_of_one_record(tmp_path: Path) -> None:
    """Names that differ only in the case of .mp4, or by a link, are the same video or record.

    The refusal names the line that has the video.
    """
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "b").symlink_to(tmp_path / "out" / "a")
    names = ["x.mp4", "x.MP4", "../out/x.mp4", "a/y.mp4", "b/y.mp4", "b/z.mp4", "y.mp4"]
    run = resolve_lines(tmp_path, [{"prompt": "a", "save_file": name} for name in names])
    refused = {names[line.number - 1]: line.error for line in run.lines if line.error}
    first_lines = {"x.MP4": 1, "../out/x.mp4": 1, "b/y.mp4": 4}
    assert refused.keys() == first_lines.keys()
    assert all(f"video of line {first_lines[name]} already" in refused[name] for name in refused)


def test_a_line_may_continue_the_video_of_an_earlier_line(tmp_path: Path) -> None:
    """With --skip_existing, which keeps a finished video; else that would replace the input."""
    (tmp_path / "out").mkdir()
    source = tmp_path / "out" / "a.mp4"
    write_video(torch.zeros(3, 5, 32, 32), Output(source, fps=16), json.dumps({"wan": "1"}))
    lines = [{"prompt": "a", "save_file": "a.mp4"}, {"prompt": "b", "src_video": str(source)}]
    refused, kept = (
        resolve_lines(tmp_path, [*lines], *more) for more in ((), ("--skip_existing",))
    )
    (error,) = (line.error for line in refused.lines if line.error)
    assert f"would replace {source} (src_video of line 2)" in error
    assert refused.lines[0].error and not any(line.error for line in kept.lines)
