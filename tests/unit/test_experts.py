"""The switch between the two networks, and devices that are not there."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from wan import device
from wan.pipeline.conditioning import prepare
from wan.pipeline.denoise import denoise
from wan.pipeline.pipeline import Experts
from wan.pipeline.solvers import sigma_table
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.settings.request import make_request


class Recorder:
    """An expert source whose networks predict zeros; `calls` is what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get(self, name: str) -> Any:
        self.calls.append(name)
        return lambda x, *args, **kwargs: [torch.zeros_like(x[0])]

    def prefetch(self, name: str) -> None:
        self.calls.append(f"prefetch {name}")


def six_steps(source: Any) -> None:
    values = {"prompt": "", "size": (32, 32), "frame_num": 1, "sample_steps": 6}
    values |= {"sample_shift": 12.0, "sample_guide_scale": (1.0, 1.0)}
    request = make_request(PRESETS["t2v-A14B"], values)
    context = torch.zeros(1, 4)
    conditions = prepare(request, (context, context), None, lambda v: v, torch.device("cpu"))
    denoise(request, conditions, source)


class Network(torch.nn.Module):
    def forward(self, x: list[torch.Tensor], *_: Any, **__: Any) -> list[torch.Tensor]:
        return [torch.zeros_like(x[0])]


@pytest.mark.parametrize("offload", [True, False])
def test_one_network_has_gone_before_the_next_is_loaded(offload: bool) -> None:
    made: list[weakref.ref[Network]] = []
    there: list[int] = []

    def load(_: str) -> Any:
        there.append(sum(network() is not None for network in made))
        network = Network()
        made.append(weakref.ref(network))
        return network

    experts = Experts(load, offload=offload)
    six_steps(experts)
    assert there == [0, 0 if offload else 1]


def test_the_next_expert_is_announced_one_step_before_the_switch() -> None:
    source = Recorder()
    six_steps(source)
    _, timesteps = sigma_table("unipc", 6, 12.0)
    high = int((timesteps >= 875).sum())
    assert 0 < high < 6
    steps = ["high_noise"] * (high - 1) + ["prefetch low_noise", "high_noise"]
    assert source.calls == ["high_noise", *steps, *["low_noise"] * (6 - high)]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise on this system")
def test_prefetch_reads_the_files_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of a network that is not in memory, once each; none of one that is."""
    asked: list[str] = []

    def fadvise(fd: int, *rest: int) -> None:
        assert rest == (0, 0, os.POSIX_FADV_WILLNEED)
        asked.append(Path(f"/proc/self/fd/{fd}").resolve().name)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_bytes(b"x")
    load: Any = lambda name: torch.nn.Identity()  # noqa: E731
    experts = Experts(load, offload=True, files={"high_noise": files[:1], "low_noise": files * 2})
    experts.get("high_noise")
    before = set(threading.enumerate())
    experts.prefetch("high_noise")
    experts.prefetch("low_noise")
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert asked == ["a", "b"]


def test_a_local_rank_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="CUDA device 2 does not exist; 2 do"):
        device.resolve("cuda", 2)
