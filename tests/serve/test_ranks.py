"""A rank of the service in this process: its messages, and its cached prompt embeddings."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.frames import read_frames
from tests.pipelines import resolve_argv
from wan.app.flag_parser import parse_flags
from wan.device import select_device
from wan.distributed.gloo_group import GlooGroup
from wan.pipeline import build
from wan.pipeline.denoise import DenoisingLoop
from wan.serve.ranks import __main__ as ranks
from wan.serve.ranks.__main__ import FrontLink
from wan.settings.presets import PRESETS
from wan.tasks.base import DenoiseInputs, make_video_params


class Front:
    """Implements the link to a front: returns prepared commands, and records messages."""

    def __init__(self) -> None:
        self.cancelled: set[str] = set()
        self.stop_event = threading.Event()
        self.messages: list[dict[str, Any]] = []
        self.commands: list[dict[str, Any]] = [{"do": "stop"}]

    def next_command(self, seconds: float) -> dict[str, Any]:
        return self.commands.pop(0)

    def send(self, kind: str, **payload: Any) -> None:
        self.messages.append({"is": kind, **payload})


# Steps.


class Experts:
    """Returns networks that predict zeros."""

    def get(self, name: str) -> Any:
        def network(x: list[Tensor], *_: Any, **__: Any) -> list[Tensor]:
            return [torch.zeros_like(latents) for latents in x]

        return network

    def prefetch(self, name: str) -> None: ...


def make_denoising_loop(steps: int) -> DenoisingLoop:
    settings = {"prompt": "x", "size": (32, 32), "frame_num": 5, "sample_steps": steps}
    request = make_video_params(PRESETS["t2v-A14B"], settings | {"base_seed": 1})
    text = torch.zeros(1, 4)
    return DenoisingLoop(request, DenoiseInputs(torch.ones(request.latent_shape), text, text))


@pytest.mark.parametrize(("clips", "phases"), [(1, None), (1, 1), (3, None), (3, 1)])
def test_each_step_is_reported_once(clips: int, phases: int | None) -> None:
    """Also for a video that is paused between its experts, and over all clips of a long video."""
    front: Any = Front()
    boundary = ranks.SharedCancellationPoint(GlooGroup(None), front, "a", clips)
    for _ in range(clips):
        loop = make_denoising_loop(4)
        assert loop.remaining_experts == ["high_noise", "low_noise"]
        while loop.remaining_experts:
            loop.advance(Experts(), num_experts=phases, cancellation_point=boundary)
    assert {message["total"] for message in front.messages} == {4 * clips}
    done_counts = [message["done"] for message in front.messages]
    assert done_counts == sorted(done_counts) and {*done_counts} == {*range(4 * clips + 1)}


def test_a_resumed_video_reports_the_steps_of_the_earlier_run() -> None:
    front: Any = Front()
    boundary = ranks.SharedCancellationPoint(GlooGroup(None), front, "a", 1)
    for num_steps_done in (0, 4, 8, 9, 10, 11, 12):
        boundary.check(num_steps_done, 12)
    assert [message["done"] for message in front.messages] == [0, 4, 8, 9, 10, 11, 12]


# Videos.


def serve_commands(
    folder: Path, front: Front, *commands: Sequence[tuple[str, str, int]], **settings: Any
) -> None:
    """Makes videos in this process. commands: Id, prompt and seed of each video of a batch."""
    argv = ["--size", "32*32", "--frame_num", "5", "--sample_steps", "2", "--device", "cpu"]
    argv += ["--sample_guide_scale", "1", "--save_file", str(folder / "none.mp4")]
    for batch in commands:
        jobs = [
            {
                "job": name,
                "settings": {"prompt": prompt, "base_seed": seed, **settings},
                "file": str(folder / f"{name}.mp4"),
            }
            for name, prompt, seed in batch
        ]
        front.commands.insert(-1, {"do": "make", "jobs": jobs})
    setup, link = resolve_argv(argv, require_inputs=False).setup, cast(FrontLink, front)
    pipeline = build.build_pipeline(setup, select_device("cpu"))
    assert ranks.RankWorker(parse_flags(argv), pipeline, None, link, 2).serve() == 0


def test_videos_of_batches(
    tmp_path: Path, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a batch share the loads of experts; one is cancelled, and one equals a lone video.

    The prompts used last are kept, two of them; a video reports how many of its ones were cached.
    """
    front = Front()
    front.cancelled.add("b")
    together = [("a", "x", 1), ("b", "x", 2), ("c", "x", 3)]
    lone = [[(name, prompt, 3)] for name, prompt in zip("defgh", "xyzxz", strict=True)]
    serve_commands(tmp_path, front, together, *lone, frame_num=1)
    ends = {item["job"]: item for item in front.messages if item["is"] in ("done", "failed")}
    assert {name: end["is"] for name, end in ends.items()} == {
        **dict.fromkeys("acdefgh", "done"),
        "b": "failed",
    }
    assert ends["b"]["code"] == "cancelled" and not front.cancelled
    first, shared, alone = (read_frames(tmp_path / f"{name}.mp4") for name in "acd")
    assert (shared == alone).all() and (first != alone).any()
    assert 0 < ends["a"]["loading"] <= ends["c"]["loading"] <= ends["c"]["seconds"]
    texts = [tuple(ends[name]["texts"]) for name in "adefgh"]
    assert texts == [(0, 1), (1, 1), (0, 1), (0, 1), (0, 1), (1, 1)]
    assert not [text for text in caplog.messages if "frames are more" in text]
    serve_commands(tmp_path, Front(), [("i", "x", 1)], frame_num=85, size=(16, 16), sample_steps=1)
    assert [text for text in caplog.messages if text.startswith("Video i: 85 frames are more")]


def test_ranks_that_would_make_different_videos_make_none(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has read other files, or has refused the video; the next one is made."""
    answers = [(None, "the digest of other files"), ("The image is missing.", None)]

    def gather(group: GlooGroup, value: Any) -> list[Any]:
        return [value, answers.pop(0) if answers else value]

    monkeypatch.setattr(GlooGroup, "gather", gather)
    front = Front()
    serve_commands(tmp_path, front, *([(name, "x", 1)] for name in "abc"))
    ends = {item["job"]: item for item in front.messages if item["is"] in ("done", "failed")}
    assert [ends[name]["is"] for name in "abc"] == ["failed", "failed", "done"]
    assert ends["a"]["code"] == ends["b"]["code"] == "invalid_request"
    assert "different files" in ends["a"]["message"] and "missing" in ends["b"]["message"]
    assert [path.name for path in tmp_path.glob("*.mp4")] == ["c.mp4"]
