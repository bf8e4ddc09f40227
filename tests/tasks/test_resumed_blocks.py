"""Causal videos that were stopped, and continue after their finished blocks of frames."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook

from tests import failing
from tests.conftest import slow
from tests.dist import Ranks, make_rank_envs
from tests.pipelines import resolve_argv
from tests.tasks.conftest import read_frames, run_generate
from wan.app.clip_store import ClipFiles
from wan.cli import main as generate
from wan.media.video_writer import load_latents
from wan.modules.causal import WanCausalModel
from wan.power import report

STEPS, CLEAN, RENEWED = 4, 1, 2  # forward passes of a block, and of two blocks for a new prompt
WHOLE = 4 * (STEPS + CLEAN) - CLEAN - CLEAN + RENEWED  # no clean pass before the new prompt


@pytest.fixture(scope="module")
def argv(tiny: Callable[[str], Path]) -> list[str]:
    """Four blocks of three latent frames in a window of seven, the last two with a new prompt."""
    flags = ["--task", "causal-1.3B", "--ckpt_dir", str(tiny("causal-1.3B")), "--size", "32*32"]
    flags += ["--frame_num", "45", "--local_attn_size", "7", "--base_seed", "3"]
    return [*flags, "--clip_prompts", "a", "b", "--save_latents"]


@pytest.fixture(scope="module")
def unstopped(argv: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unstopped") / "v.mp4"
    with count_forwards() as forwards:
        assert run_generate(*argv, "--save_file", out) == 0
    assert forwards == [WHOLE]
    assert sorted(path.name for path in out.parent.iterdir()) == [
        *("v.json", "v.latents.safetensors", "v.mp4")
    ]
    return out


@contextmanager
def count_forwards() -> Iterator[list[int]]:
    """Yields a list of the number of forward passes of causal networks in the context."""
    count = [0]

    def add(module: Any, _: object) -> None:
        count[0] += isinstance(module, WanCausalModel)

    hook = register_module_forward_pre_hook(add)
    try:
        yield count
    finally:
        hook.remove()


def kill_in_block(argv: list[str], out: Path, forward: int, ranks: int = 1) -> list[str]:
    """Kills a run in this forward pass, from 1; returns the names of the files of its blocks."""
    envs = [{}] if ranks == 1 else make_rank_envs(ranks)
    envs = [env | {"FAIL_AT": str(forward)} for env in envs]
    flags = [*argv, "--save_file", str(out)]
    with Ranks(envs, failing.main, "kill", "0", *flags) as killed:
        codes = killed.wait_for_exit(240)
        assert codes[0] == -signal.SIGKILL and 0 not in codes, killed.format_outputs()
    assert not out.exists()
    return sorted(path.name for path in out.with_suffix(".clips").glob("*"))


def assert_same_video(out: Path, expected: Path) -> None:
    assert out.read_bytes() == expected.read_bytes()
    latents = (path.with_suffix(".latents.safetensors") for path in (out, expected))
    first, second = map(load_latents, latents)
    assert first.equal(second)
    assert not out.with_suffix(".clips").exists()


PASSES = {  # forward pass in which the run is killed -> finished blocks, passes of the second run
    3: (0, WHOLE),
    8: (1, CLEAN + 3 * STEPS + RENEWED + CLEAN),
    12: (2, RENEWED + 2 * STEPS + CLEAN),  # before the keys of the new prompt
    18: (3, RENEWED + CLEAN + STEPS),
}


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_a_killed_video_continues_after_its_blocks(
    stream: list[str], argv: list[str], unstopped: Path, tmp_path: Path
) -> None:
    for forward, (num_blocks, passes) in PASSES.items():
        out = tmp_path / f"{forward}.mp4"
        names = [f"000{block + 1}.safetensors" for block in range(num_blocks)]
        assert kill_in_block([*argv, *stream], out, forward) == names
        with count_forwards() as forwards:
            assert run_generate(*argv, *stream, "--save_file", out) == 0
        assert forwards == [passes], forward
        assert_same_video(out, unstopped)


def test_a_video_whose_blocks_are_finished_is_only_decoded(
    argv: list[str], unstopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The network is not loaded. A failure says how the video continues."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "v.mp4"
    with monkeypatch.context() as patch:
        patch.setattr("wan.pipeline.vae_runner.VaeRunner.decode", fail)
        assert run_generate(*argv, "--save_file", out) == 1
    (latents,) = tmp_path.glob("*.latents.safetensors")
    latents.unlink()
    assert "4 of 4 blocks are kept" in capfd.readouterr().out
    monkeypatch.setattr("wan.pipeline.pipeline.Experts.get", fail)
    assert run_generate(*argv, "--save_file", out) == 0
    assert "4 of 4 blocks are in" in capfd.readouterr().out
    assert_same_video(out, unstopped)


def test_a_video_is_made_although_its_blocks_cannot_be_stored(
    argv: list[str], unstopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The error is logged once; blocks after a missing one would be of no use."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wan.app.clip_store.write_output", fail)
    assert run_generate(*argv, "--save_file", tmp_path / "v.mp4") == 0
    assert capfd.readouterr().out.count("not stored") == 1
    assert_same_video(tmp_path / "v.mp4", unstopped)


@pytest.fixture(scope="module")
def stopped(argv: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the blocks of a video that was killed in its fourth one. Do not change it."""
    out = tmp_path_factory.mktemp("stopped") / "v.mp4"
    assert len(kill_in_block(argv, out, 18)) == 3
    return out.with_suffix(".clips")


def change_values(folder: Path) -> None:
    path = folder / "0002.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({name: x + 1e-3 for name, x in load_file(path).items()}, path, metadata)


def drop_values(folder: Path) -> None:
    path = folder / "0002.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({}, path, metadata)


CHANGES: dict[str, tuple[list[str], Callable[[Path], object], int]] = {
    # case -> flags of the second run, a change of the folder, and blocks that are used
    "the same": ([], lambda _: None, 3),
    "another way to offload": (["--offload_model", "block"], lambda _: None, 3),
    "another seed": (["--base_seed", "4"], lambda _: None, 0),
    "another window": (["--local_attn_size", "8"], lambda _: None, 0),
    "another length": (["--frame_num", "57"], lambda _: None, 0),  # other noise
    "another solver": (["--sample_solver", "euler"], lambda _: None, 0),
    "another second prompt": (["--clip_prompts", "a", "c"], lambda _: None, 2),
    "other values": ([], change_values, 1),
    "no values": ([], drop_values, 1),
    "half a file": ([], lambda x: (x / "0003.safetensors").write_bytes(b"x"), 2),
    "a block is missing": ([], lambda x: (x / "0001.safetensors").unlink(), 0),
    "another block": ([], lambda x: shutil.copy(x / "0001.safetensors", x / "0002.safetensors"), 1),
}


def test_blocks_of_another_video_are_not_used(
    argv: list[str], stopped: Path, unstopped: Path, tmp_path: Path
) -> None:
    wrong = {}
    for case, (flags, change, expected) in CHANGES.items():
        run = resolve_argv([*argv, *flags, "--save_file", tmp_path / case / "v.mp4"])
        shutil.copytree(stopped, run.output.clips_dir)
        change(run.output.clips_dir)
        if (count := ClipFiles(run).count_finished()) != expected:
            wrong[case] = count
    assert not wrong
    out = tmp_path / "other values" / "v.mp4"
    with count_forwards() as forwards:
        assert run_generate(*argv, "--save_file", out) == 0
    assert forwards == [PASSES[8][1]]
    assert_same_video(out, unstopped)


def test_lines_of_a_prompt_file_continue(
    argv: list[str], stopped: Path, unstopped: Path, tmp_path: Path
) -> None:
    lines = [{"prompt": "x", "save_file": "x.mp4"}, {"prompt": ["a", "b"], "save_file": "v.mp4"}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    shutil.copytree(stopped, out / "v.clips")
    flags = [*argv[: argv.index("--clip_prompts")], "--save_latents"]
    files = ["--prompt_file", tmp_path / "lines.jsonl", "--save_file", out]
    with count_forwards() as forwards:
        assert run_generate(*flags, *files) == 0
    assert forwards == [4 * (STEPS + CLEAN) - CLEAN + PASSES[18][1]]
    assert_same_video(out / "v.mp4", unstopped)


def test_a_trace_has_a_step_of_the_first_block_that_is_denoised(
    argv: list[str], stopped: Path, tmp_path: Path
) -> None:
    """Of four blocks the last one has steps 12 to 15; other steps can be named."""
    for steps, expected in (([], {13}), (["--trace_steps", "12,15"], {12, 15})):
        shutil.copytree(stopped, tmp_path / "v.clips")
        trace = tmp_path / f"trace{len(steps)}"
        flags = ["--save_file", tmp_path / "v.mp4", "--trace", trace, *steps]
        assert run_generate(*argv, *flags) == 0
        events = json.loads((trace / "rank0.json").read_text())["traceEvents"]
        found = {event["args"]["step"] for event in events if "step" in event.get("args", {})}
        assert found == expected
        assert report.main([str(trace)]) == 0
    assert run_generate(*argv, *flags[:-1], "16") == 2


def test_files_of_other_origin_stop_the_run(argv: list[str], tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "v.clips").mkdir()
    (tmp_path / "v.clips" / "0001.safetensors").write_text("precious")
    assert run_generate(*argv, "--save_file", tmp_path / "v.mp4") == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert (tmp_path / "v.clips" / "0001.safetensors").read_text() == "precious"


@pytest.mark.dist
@pytest.mark.parametrize("mode", [["--comm_type", "1"], slow(["--fa_alltoall_overlap"])])
def test_ranks_continue_a_video(
    mode: list[str], argv: list[str], stopped: Path, unstopped: Path, tmp_path: Path
) -> None:
    """Two ranks their own, with the bits of an unstopped run; four ranks that of one process."""

    def run(out: Path, ranks: int) -> np.ndarray:
        flags = [*argv, "--ulysses_size", str(ranks), *mode, "--save_file", str(out)]
        with Ranks(make_rank_envs(ranks), generate.main, flags) as started:
            assert started.wait_for_exit(300) == [0] * ranks, started.format_outputs()
            outputs.append("".join(started.texts))
        return read_frames(out)

    outputs, two, plain = list[str](), tmp_path / "two.mp4", tmp_path / "plain.mp4"
    run(plain, 2)
    assert len(kill_in_block([*argv, "--ulysses_size", "2", *mode], two, 12, 2)) == 2
    run(two, 2)
    assert_same_video(two, plain)
    four = tmp_path / "four.mp4"
    shutil.copytree(stopped, four.with_suffix(".clips"))
    difference = np.abs(run(four, 4).astype(int) - read_frames(unstopped))
    assert difference.max() <= 25 and difference.mean() < 0.5
    assert "of 4 blocks are in" not in outputs[0]
    assert "2 of 4 blocks are in" in outputs[1] and "3 of 4 blocks are in" in outputs[2]
