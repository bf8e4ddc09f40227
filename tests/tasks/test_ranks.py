"""Each task on two ranks, with each kind of parallelism, killed, and by the service."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import failing
from tests.conftest import slow
from tests.dist import Ranks, make_rank_envs
from tests.serve.serving import ServiceProcess
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


@pytest.mark.parametrize(
    ("task", "way"),
    [pair if pair in DEFAULT else slow(*pair) for pair in itertools.product(TASKS, PARALLEL_FLAGS)],
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


FIELDS = {"--image": "input_reference"}


def make_data_url(path: Path) -> str:
    kind = {".png": "image/png", ".mp4": "video/mp4", ".wav": "audio/wav"}[path.suffix]
    return f"data:{kind};base64," + base64.b64encode(path.read_bytes()).decode()


@pytest.mark.slow  # tests/serve has the service of t2v
@pytest.mark.parametrize("task", TASKS)
def test_a_service_makes_the_video(
    task: str, asked: Callable[[str], TaskRun], tmp_path: Path
) -> None:
    task_run = asked(task)
    body = task_run.task.body
    for flag, path in task_run.inputs.items():
        paths = [path] if path.is_file() else sorted(path.iterdir())
        for file in paths:
            name = FIELDS.get(flag, flag[2:]) if path.is_file() else file.stem
            body[name] = make_data_url(file)
    served = ServiceProcess(
        tmp_path / "jobs",
        flags=["--task", task_run.task.checkpoint, "--ckpt_dir", task_run.checkpoint],
    )
    try:
        status, _, created = served.request("/v1/videos", body)
        assert status == 200, created
        video = served.wait_for_video(created["id"])
        assert video["status"] == "completed", video
        (tmp_path / "v.mp4").write_bytes(served.request(f"/v1/videos/{video['id']}/content")[2])
    finally:
        served.stop()
    assert (read_frames(tmp_path / "v.mp4") == task_run.frames).all()
