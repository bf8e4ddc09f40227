"""Tests are collected only if torch_npu is the stand-in: `make test-npu`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_STAND_IN = Path(__file__).parent / "stand_in"
_TORCH_NPU_SPEC = importlib.util.find_spec("torch_npu")
_SIMULATED = _TORCH_NPU_SPEC is not None and Path(str(_TORCH_NPU_SPEC.origin)).is_relative_to(
    _STAND_IN
)
collect_ignore_glob = [] if _SIMULATED else ["test_*.py"]


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """chip("A5") selects the simulated chip for the rest of the test; the default is A2."""
    import mindiesd.layers.adalayernorm as remembers
    from mindiesd.utils import get_platform

    from tests.npu_sim.ranks import SOC

    def choose(name: str) -> None:
        monkeypatch.setenv("NPU_SIM_SOC", SOC[name])
        monkeypatch.setattr(get_platform, "PLATFORM", None)
        monkeypatch.setattr(remembers, "npu_device", get_platform.get_npu_device())

    choose("A2")
    return choose


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A t2v-A14B checkpoint of one layer with 8 heads of 64. Do not write into it."""
    from tests.npu_sim import checkpoint

    return checkpoint.make_rig_checkpoint(tmp_path_factory.mktemp("rig") / "checkpoint")


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    """The stand-in's list of calls, empty at the start of the test."""
    import torch_npu

    torch_npu.calls.clear()
    yield torch_npu.calls
