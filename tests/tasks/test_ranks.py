"""Each task on two ranks, with each kind of parallelism, and by the service."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import slow
from tests.dist import Ranks, launcher
from tests.serve.serving import Served
from tests.tasks.conftest import Asked, frames
from tests.tasks.tasks import BODY, TASKS
from wan.cli import main as generate

pytestmark = pytest.mark.dist
WAYS = {
    "baseline": ["--ulysses_size", "2"],
    "InsertComm": ["--ulysses_size", "2", "--comm_type", "1"],
    "BlockAttn, sharded weights": [
        *("--ulysses_size", "2", "--comm_type", "2"),
        *("--dit_fsdp", "--t5_fsdp"),
    ],
    "overlap": ["--ulysses_size", "2", "--fa_alltoall_overlap"],
    "ring, shared VAE": ["--ring_size", "2", "--vae_parallel"],
    "a branch each": ["--cfg_size", "2"],
}
DEFAULT = {
    ("t2v", "BlockAttn, sharded weights"),
    ("i2v", "ring, shared VAE"),
    ("vace", "InsertComm"),
    ("ti2v", "a branch each"),
    ("long", "overlap"),
}


@pytest.mark.parametrize(
    ("task", "way"),
    [pair if pair in DEFAULT else slow(*pair) for pair in itertools.product(TASKS, WAYS)],
)
def test_two_ranks_make_the_video(
    task: str, way: str, asked: Callable[[str], Asked], tmp_path: Path
) -> None:
    """Equals the video of one process except for rounding, which x264 may amplify."""
    one, out = asked(task), tmp_path / "v.mp4"
    argv = [*one.argv, *WAYS[way], "--save_file", str(out)]
    with Ranks(launcher(2), generate.main, argv) as ranks:
        assert ranks.ended(300) == [0, 0], ranks.said()
    off = np.abs(frames(out).astype(int) - one.frames)
    assert off.max() <= 25 and off.mean() < 0.5


FIELDS = {"--image": "input_reference"}


def url(path: Path) -> str:
    kind = {".png": "image/png", ".mp4": "video/mp4", ".wav": "audio/wav"}[path.suffix]
    return f"data:{kind};base64," + base64.b64encode(path.read_bytes()).decode()


@pytest.mark.slow  # tests/serve has the service of t2v
@pytest.mark.parametrize("task", TASKS)
def test_a_service_makes_the_video(
    task: str, asked: Callable[[str], Asked], tmp_path: Path
) -> None:
    one, body = asked(task), dict[str, Any](BODY)
    for flag, path in one.inputs.items():
        given = [path] if path.is_file() else sorted(path.iterdir())
        for file in given:
            name = FIELDS.get(flag, flag[2:]) if path.is_file() else file.stem
            body[name] = url(file)
    served = Served(
        tmp_path / "jobs", flags=["--task", one.task.checkpoint, "--ckpt_dir", one.folder]
    )
    try:
        status, _, made = served.ask("/v1/videos", body | dict(one.task.body))
        assert status == 200, made
        video = served.ended(made["id"])
        assert video["status"] == "completed", video
        (tmp_path / "v.mp4").write_bytes(served.ask(f"/v1/videos/{video['id']}/content")[2])
    finally:
        served.stop()
    assert (frames(tmp_path / "v.mp4") == one.frames).all()
