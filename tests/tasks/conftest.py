"""The video of each task, made once and compared with the videos of other tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from tests.conftest import Tiny, lock_file
from tests.frames import read_frames
from tests.tasks.tasks import QUICK, TASKS, Inputs, Task
from wan.cli import main as generate
from wan.pipeline.pipeline import Pipeline


def run_generate(*argv: object) -> int:
    return generate.main([str(argument) for argument in argv])


@dataclass(frozen=True)
class TaskRun:
    """A task with its checkpoint, its inputs, and the video that one process generates.

    The video is made on first use, once for all workers.
    """

    task: Task
    checkpoint: Path
    inputs: Inputs
    folder: Path

    @property
    def start(self) -> list[str]:
        """The command line without prompts."""
        input_flags = [str(word) for pair in self.inputs.items() for word in pair]
        task = ["--task", self.task.checkpoint, "--ckpt_dir", str(self.checkpoint)]
        return [*task, *QUICK, *self.task.flags, *input_flags]

    @property
    def argv(self) -> list[str]:
        return [*self.start, *self.task.prompt_flags]

    @property
    def video(self) -> Path:
        path, encoded = self.folder / "out" / "plain.mp4", self.folder / "encoded"
        with lock_file(self.folder.with_suffix(".lock")):
            if not encoded.exists():
                latents = ["--save_latents"] if self.task.latents else []
                with record_encoded_latents(encoded):
                    assert run_generate(*self.argv, *latents, "--save_file", path) == 0
        return path

    @property
    def num_encoded_latents(self) -> int:
        """The most latent frames that the run of the video encoded at once."""
        return int((self.video.parents[1] / "encoded").read_text())

    @property
    def frames(self) -> np.ndarray:
        return read_frames(self.video)

    def make_frames(self, out: Path, *flags: object) -> np.ndarray:
        """Returns the frames of the same run with more flags."""
        assert run_generate(*self.argv, *flags, "--save_file", out) == 0
        return read_frames(out)


@contextmanager
def record_encoded_latents(path: Path) -> Iterator[None]:
    """Writes the most latent frames that a pipeline encodes at once."""
    counts, encode_video = [0], Pipeline.encode_video

    def encode_and_count(pipeline: Pipeline, video_3FHW: Tensor) -> Tensor:
        latents = encode_video(pipeline, video_3FHW)
        counts.append(latents.shape[1])
        return latents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "encode_video", encode_and_count)
        yield
    path.write_text(str(max(counts)))


@pytest.fixture(scope="session")
def asked(tiny: Tiny, shared_folder: Path) -> Callable[[str], TaskRun]:
    """asked(task): returns the run of a task."""

    def ask(name: str) -> TaskRun:
        task, folder = TASKS[name], shared_folder / "tasks" / name
        folder.mkdir(parents=True, exist_ok=True)
        inputs = folder / "inputs.json"
        with lock_file(folder.with_suffix(".lock")):
            if not inputs.exists():
                paths = task.inputs(folder)
                inputs.write_text(json.dumps({flag: str(path) for flag, path in paths.items()}))
        files = {flag: Path(path) for flag, path in json.loads(inputs.read_text()).items()}
        return TaskRun(task, tiny(task.checkpoint), files, folder)

    return ask
