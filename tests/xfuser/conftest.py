"""Tests are collected only if the rig makes xfuser importable on a CPU: `make test-xfuser`."""

from __future__ import annotations

import multiprocessing
from importlib.util import find_spec
from pathlib import Path

from tests import dist

_SITECUSTOMIZE_SPEC = find_spec("sitecustomize")
_RIG = (
    _SITECUSTOMIZE_SPEC is not None
    and Path(str(_SITECUSTOMIZE_SPEC.origin)).parent == Path(__file__).parent / "rig"
)
collect_ignore_glob = [] if _RIG and find_spec("xfuser") is not None else ["test_*.py"]
if _RIG:  # ranks are forked from a server that has imported xfuser once
    assert dist.run_on_ranks  # importing it sets its preload list first
    preload = ["tests.preload", "tests.xfuser.preload"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
