"""A rank of the service in this process: what it says of its videos, and what it keeps of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wan.cli import flags, main
from wan.device import resolve
from wan.distributed.control import Control
from wan.pipeline import build
from wan.pipeline.denoise import Conditions, Denoising
from wan.serve import ranks
from wan.settings.presets import PRESETS
from wan.settings.request import make_request


class Front:
    """Implements the link to a front: it has commands, and notes what the rank says."""

    def __init__(self, commands: Sequence[dict[str, Any]] = ()) -> None:
        self.cancelled: set[str] = set()
        self.over = threading.Event()
        self.said: list[dict[str, Any]] = []
        self._commands = [*commands, {"do": "stop"}]

    def next(self, seconds: float) -> dict[str, Any]:
        return self._commands.pop(0)

    def say(self, what: str, **more: Any) -> None:
        self.said.append({"is": what, **more})


# Steps.


class Experts:
    """Hands out networks that predict nothing."""

    def get(self, name: str) -> Any:
        def network(x: list[Tensor], *_: Any, **__: Any) -> list[Tensor]:
            return [torch.zeros_like(one) for one in x]

        return network

    def prefetch(self, name: str) -> None: ...


def denoising(steps: int) -> Denoising:
    given = {"prompt": "x", "size": (32, 32), "frame_num": 5, "sample_steps": steps}
    request = make_request(PRESETS["t2v-A14B"], given | {"base_seed": 1})
    text = torch.zeros(1, 4)
    return Denoising(request, Conditions(torch.ones(request.latent_shape), text, text))


@pytest.mark.parametrize("clips", [1, 3])
@pytest.mark.parametrize("phases", [None, 1])
def test_each_step_is_told_once(clips: int, phases: int | None) -> None:
    """Also of a video that is paused between its experts, and over all clips of a long one."""
    front: Any = Front()
    boundary = ranks.SharedBoundary(Control(None), front, "a", clips)
    for _ in range(clips):
        loop = denoising(4)
        assert loop.experts == ["high_noise", "low_noise"]
        while loop.experts:
            loop.advance(Experts(), phases=phases, boundary=boundary)
    assert {one["total"] for one in front.said} == {4 * clips}
    done = [one["done"] for one in front.said]
    assert done == sorted(done) and {*done} == {*range(4 * clips + 1)}


# Texts.


class NoVideo:
    """In place of a video of `wan.cli.videos`, whose texts alone are of interest."""

    alone = False

    def __init__(self, *_: Any) -> None: ...

    def make(self, latents: Any) -> None: ...


def test_the_last_texts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """As many as are allowed, the newest of them; a video says how many of its own were there."""
    monkeypatch.setattr(ranks, "Video", NoVideo)
    argv = ["--size", "32*32", "--frame_num", "5", "--sample_steps", "2", "--device", "cpu"]
    argv += ["--sample_guide_scale", "1", "--save_file", str(tmp_path / "none.mp4")]
    wanted = ["x", "y", "z", "x", "z"]
    commands = []
    for number, prompt in enumerate(wanted):
        job = {"job": str(number), "settings": {"prompt": prompt, "base_seed": 1}}
        commands.append({"do": "make", "jobs": [job | {"file": str(tmp_path / f"{number}.mp4")}]})
    front: Any = Front(commands)
    pipeline = build.pipeline(main.resolved(argv, inputs=False).setup, resolve("cpu"))
    assert ranks.Ranks(flags.parse(argv), pipeline, None, front, 2).serve() == 0
    texts = [one["texts"] for one in front.said if one["is"] == "done"]
    assert [tuple(one) for one in texts] == [(0, 1), (0, 1), (0, 1), (0, 1), (1, 1)]
