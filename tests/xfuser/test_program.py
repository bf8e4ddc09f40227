"""examples/xfuser_program.py: the layer takes the process groups that xfuser has made."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.dist import REPO, Ranks, make_rank_envs

pytestmark = pytest.mark.dist


def run_program() -> int:
    """On one rank: run the example."""
    runpy.run_path(str(REPO / "examples" / "xfuser_program.py"), run_name="__main__")
    return 0


def test_the_layer_in_a_program_of_xfuser() -> None:
    with Ranks(make_rank_envs(4), run_program) as started:
        assert started.wait_for_exit() == [0] * 4, started.format_outputs()
    for rank, text in enumerate(started.texts):
        match = re.search(rf"rank {rank}: ulysses 2 x ring 2, off by (\S+)", text)
        assert match is not None and float(match[1]) <= 2e-6, text
