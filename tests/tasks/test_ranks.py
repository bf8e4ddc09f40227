"""Each task on two ranks, with each kind of parallelism, killed, and by the service."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import failing
from tests.conftest import slow
from tests.dist import Ranks, make_rank_envs
from tests.tasks.conftest import TaskRun, read_frames
from tests.tasks.tasks import TASKS
from wan.cli import main as generate

pytestmark = pytest.mark.dist
PARALLEL_FLAGS = {
    "baseline": ["--ulysses_size", "2"],
    "InsertComm": ["--ulysses_size", "2", "--comm_type", "1"],
    "BlockAttn, sharded weights": [
        *("--ulysses_size", "2", "--comm_type", "2"),
        *("--dit_fsdp", "--t5_fsdp"),
    ],
    # A second clip finds cached values, which all ranks must find alike.
    "sharded weights that stay": ["--ulysses_size", "2", "--dit_fsdp", "--offload_model", "false"],
    "overlap": ["--ulysses_size", "2", "--fa_alltoall_overlap"],
    "ring, shared VAE": ["--ring_size", "2", "--vae_parallel"],
    "a branch each": ["--cfg_size", "2"],
}
DEFAULT = {
    ("t2v", "BlockAttn, sharded weights"),
    ("i2v", "ring, shared VAE"),
    ("vace", "InsertComm"),
    ("ti2v", "a branch each"),
    ("long", "sharded weights that stay"),
}


REFUSED = {("causal", "ring, shared VAE"), ("causal", "a branch each")}
PAIRS = [pair for pair in itertools.product(TASKS, PARALLEL_FLAGS) if pair not in REFUSED]


@pytest.mark.parametrize(
    ("task", "way"), [pair if pair in DEFAULT else slow(*pair) for pair in PAIRS]
)
def test_two_ranks_make_the_video(
    task: str, way: str, asked: Callable[[str], TaskRun], tmp_path: Path
) -> None:
    """Equals the video of one process except for rounding, which x264 may amplify."""
    task_run, out = asked(task), tmp_path / "v.mp4"
    argv = [*task_run.argv, *PARALLEL_FLAGS[way], "--save_file", str(out)]
    with Ranks(make_rank_envs(2), generate.main, argv) as ranks:
        assert ranks.wait_for_exit(300) == [0, 0], ranks.format_outputs()
    difference = np.abs(read_frames(out).astype(int) - task_run.frames)
    assert difference.max() <= 25 and difference.mean() < 0.5


@pytest.mark.parametrize("task", ["t2v", *(slow(task) for task in TASKS if task != "t2v")])
def test_a_run_after_a_killed_one(
    task: str, asked: Callable[[str], TaskRun], tmp_path: Path
) -> None:
    """No files of the killed run remain, and the video is that of one run."""
    task_run, out = asked(task), tmp_path / "v.mp4"
    more = ["--sample_steps", "4"]  # half of them are two, and it fails in the second
    argv = [*task_run.argv, *more, "--save_file", str(out)]
    with Ranks([{}], failing.main, "kill", "0", *argv) as killed:
        assert killed.wait_for_exit() == [-9], killed.format_outputs()
    assert not out.exists()
    assert (task_run.make_frames(out) == task_run.frames).all()
    assert {path.name for path in tmp_path.iterdir()} == {"v.mp4", "v.json"}
