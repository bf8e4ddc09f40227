"""Jobs that share the loading of experts, and still end independently."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.serving import PROMPT, Served, frames, generated

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("serve"), pytest.mark.slow]

_SLOW_LOADS = """
import importlib, os, sys, time

if os.environ.get("RANK", "0") == "0" and "wan.serve.ranks" in sys.orig_argv:
    owner = importlib.import_module("wan.pipeline.build").NetworkLoader
    load = owner.dit

    def slow(self, name, **more):
        with open(os.path.join(os.path.dirname(__file__), "loads"), "a") as file:
            file.write(name + "\\n")
        time.sleep(2)
        return load(self, name, **more)

    owner.dit = slow
"""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    """A service of two ranks whose experts load in two seconds each, and the list of loads."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(_SLOW_LOADS)
    options = ["--together", 3]
    with Served(tmp_path / "jobs", 2, options, ["--comm_type", 1], path=modules) as served:
        yield served, modules / "loads"


def _loads(file: Path) -> list[str]:
    names = file.read_text().split()
    file.write_text("")
    return names


def test_experts_are_loaded_once_for_several_jobs(
    slow: tuple[Served, Path], tmp_path: Path
) -> None:
    """The videos equal those of generate.py; a deletion or a lost rank ends no other job."""
    served, loads = slow
    both = ["high_noise", "low_noise"]
    served.ended(served.create(num_inference_steps=8))
    assert _loads(loads) == both
    first = served.create(num_inference_steps=8)
    made = [served.create(seed=seed, num_inference_steps=8) for seed in range(4)]
    gone = made.pop(1)
    served.wait(lambda: served.status(gone) == "in_progress")
    served.ask(f"/v1/videos/{gone}", method="DELETE")
    for video in (first, *made):
        found = served.ended(video)
        assert (found["status"], found["attempt"]) == ("completed", 1)
    assert _loads(loads) == 3 * both  # the first job, the next jobs together, and the last
    assert not (served.folder / "jobs" / gone).exists()
    given = ["--frame_num", 5, "--sample_steps", 8, "--prompt", PROMPT, "--comm_type", 1]
    given += ["--ulysses_size", 2, "--base_seed", 2]
    own = generated(tmp_path / "own.mp4", *given, ranks=2)
    assert (frames(served.folder / "jobs" / made[1] / "video.mp4") == own).all()
    again = [served.create(seed=seed, num_inference_steps=8) for seed in range(4)]
    served.wait(lambda: served.health()["running"] == 3)
    os.kill(served.ranks()[-1], signal.SIGKILL)
    ends = [served.ended(video, 180) for video in again]
    assert [one["status"] for one in ends] == 4 * ["completed"]
    assert max(one["attempt"] for one in ends) == 2
