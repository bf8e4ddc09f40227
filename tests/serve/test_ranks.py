"""A rank of the service in this process: its messages, and its cached prompt embeddings."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.dist import Ranks, make_rank_envs
from tests.frames import read_frames
from tests.pipelines import resolve_argv
from wan.app.flag_parser import parse_flags
from wan.device import select_device
from wan.distributed.gloo_group import GlooGroup
from wan.pipeline import build, denoise
from wan.pipeline.denoise import DenoisingLoop
from wan.serve import ranks
from wan.serve.rpc import FrontLink
from wan.settings.presets import PRESETS
from wan.tasks.base import DenoiseInputs, make_video_params
from wan.utils import env


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


def test_the_last_texts_are_kept(tmp_path: Path, one_thread: None) -> None:
    """The newest ones, up to the limit; a video reports how many of its prompts were cached."""
    front = Front()
    serve_commands(tmp_path, front, *([(f"{i}", prompt, 1)] for i, prompt in enumerate("xyzxz")))
    texts = [item["texts"] for item in front.messages if item["is"] == "done"]
    assert [tuple(item) for item in texts] == [(0, 1), (0, 1), (0, 1), (0, 1), (1, 1)]


def test_a_video_longer_than_the_training_is_logged(
    tmp_path: Path, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    serve_commands(tmp_path, Front(), [("a", "x", 1)], frame_num=85, size=(16, 16))
    assert [text for text in caplog.messages if text.startswith("Video a: 85 frames are more")]


def test_videos_that_share_the_loads_of_experts(tmp_path: Path, one_thread: None) -> None:
    """One of them is cancelled; another one equals the video that is made alone."""
    front = Front()
    front.cancelled.add("b")
    together = [("a", "x", 1), ("b", "x", 2), ("c", "x", 3)]
    serve_commands(tmp_path, front, together, [("d", "x", 3)])
    ends = {item["job"]: item for item in front.messages if item["is"] in ("done", "failed")}
    assert {name: end["is"] for name, end in ends.items()} == {
        **dict.fromkeys("acd", "done"),
        "b": "failed",
    }
    assert ends["b"]["code"] == "cancelled" and not front.cancelled
    first, shared, alone = (read_frames(tmp_path / f"{name}.mp4") for name in "acd")
    assert (shared == alone).all() and (first != alone).any()
    assert 0 < ends["a"]["loading"] <= ends["c"]["loading"] <= ends["c"]["seconds"]


# Errors.


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


def run_without_memory(front: str) -> int:
    """Runs a rank; the second one runs out of memory in the first step of a video."""

    def velocity(*_: Any, **__: Any) -> Any:
        raise MemoryError

    if env.rank():
        denoise.predict_velocity = velocity
    return ranks.run_rank(Path(front))


@pytest.mark.slow  # two interpreters; tests/distributed/test_launch.py has it without a service
@pytest.mark.dist
@pytest.mark.xdist_group("serve")
def test_a_rank_without_memory_says_so_and_all_end(tmp_path: Path) -> None:
    settings = {"size": "32*32", "frame_num": 5, "sample_steps": 2, "ulysses_size": 2}
    settings["save_file"] = str(tmp_path / "none.mp4")
    job = {"job": "a", "settings": {"prompt": "x"}, "file": str(tmp_path / "a.mp4")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        front = {"host": "127.0.0.1", "port": server.getsockname()[1], "secret": "open"}
        file = tmp_path / "front.json"
        file.write_text(json.dumps(front | {"settings": settings, "texts": 2}))
        with Ranks(make_rank_envs(2), run_without_memory, str(file)) as processes:
            links = {}
            for _ in range(2):
                link = server.accept()[0].makefile("rw")
                hello = json.loads(link.readline())
                assert (hello["is"], hello["secret"], hello["node"]) == ("hello", "open", 0)
                assert hello["pid"] == processes.processes[hello["rank"]].pid
                links[hello["rank"]] = link
            for link in links.values():
                while json.loads(link.readline())["is"] != "ready":
                    pass
            links[0].write(json.dumps({"do": "make", "jobs": [job]}) + "\n")
            links[0].flush()
            messages = [json.loads(line) for line in links[1]]
            (lost,) = [message for message in messages if message["is"] == "lost"]
            assert lost["code"] == "out_of_memory" and all(processes.wait_for_exit())
