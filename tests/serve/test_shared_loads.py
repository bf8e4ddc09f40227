"""Jobs that share the loading of experts, and still end independently."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.serving import PROMPT, ServiceProcess, generate_frames, read_frames

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("serve"), pytest.mark.slow]

_SLOW_LOADS = """
import importlib, os, sys, time

if os.environ.get("RANK", "0") == "0" and "wan.serve.ranks" in sys.orig_argv:
    owner = importlib.import_module("wan.pipeline.build").NetworkLoader
    load = owner.load_dit

    def slow(self, name, **more):
        with open(os.path.join(os.path.dirname(__file__), "loads"), "a") as file:
            file.write(name + "\\n")
        time.sleep(2)
        return load(self, name, **more)

    owner.load_dit = slow
"""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[ServiceProcess, Path]]:
    """A service of two ranks whose experts load in two seconds each, and the list of loads."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(_SLOW_LOADS)
    options = ["--together", 3]
    with ServiceProcess(tmp_path / "jobs", 2, options, ["--comm_type", 1], path=modules) as served:
        yield served, modules / "loads"


def _read_loads(file: Path) -> list[str]:
    names = file.read_text().split()
    file.write_text("")
    return names


def test_experts_are_loaded_once_for_several_jobs(
    slow: tuple[ServiceProcess, Path], tmp_path: Path
) -> None:
    """The videos equal those of generate.py; a deletion or a lost rank ends no other job."""
    served, loads = slow
    both = ["high_noise", "low_noise"]
    served.wait_for_video(served.create(num_inference_steps=8))
    assert _read_loads(loads) == both
    first = served.create(num_inference_steps=8)
    ids = [served.create(seed=seed, num_inference_steps=8) for seed in range(4)]
    deleted_id = ids.pop(1)
    served.wait(lambda: served.status(deleted_id) == "in_progress")
    served.request(f"/v1/videos/{deleted_id}", method="DELETE")
    for video in (first, *ids):
        result = served.wait_for_video(video)
        assert (result["status"], result["attempt"]) == ("completed", 1)
    assert _read_loads(loads) == 3 * both  # the first job, the next jobs together, and the last
    assert not (served.folder / "jobs" / deleted_id).exists()
    generate_args = ["--frame_num", 5, "--sample_steps", 8, "--prompt", PROMPT, "--comm_type", 1]
    generate_args += ["--ulysses_size", 2, "--base_seed", 2]
    expected = generate_frames(tmp_path / "own.mp4", *generate_args, ranks=2)
    assert (read_frames(served.folder / "jobs" / ids[1] / "video.mp4") == expected).all()
    several = served.wait_for_video(served.create(seed=1, n=3, num_inference_steps=8))
    assert several["status"] == "completed" and _read_loads(loads) == both
    assert (read_frames(served.folder / "jobs" / several["id"] / "video-1.mp4") == expected).all()
    retried_ids = [served.create(seed=seed, num_inference_steps=8) for seed in range(4)]
    served.wait(lambda: served.health()["running"] == 3)
    os.kill(served.list_rank_pids()[-1], signal.SIGKILL)
    ends = [served.wait_for_video(video, 180) for video in retried_ids]
    assert [end["status"] for end in ends] == 4 * ["completed"]
    assert max(end["attempt"] for end in ends) == 2
