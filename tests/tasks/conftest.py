"""The video of each task, made once and compared with the videos of other tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import imageio
import numpy as np
import pytest

from tests.conftest import Tiny
from tests.tasks.tasks import QUICK, TASKS, Inputs, Task
from wan.cli import main as generate


def read_frames(path: Path) -> np.ndarray:
    return np.stack(list(imageio.get_reader(path).iter_data()))


def run_generate(*argv: object) -> int:
    return generate.main([str(argument) for argument in argv])


@dataclass(frozen=True)
class TaskRun:
    """A task with its checkpoint, its inputs, and the video that one process generates."""

    task: Task
    folder: Path
    inputs: Inputs
    video: Path

    @property
    def start(self) -> list[str]:
        """The command line without prompts."""
        input_flags = [str(word) for pair in self.inputs.items() for word in pair]
        task = ["--task", self.task.checkpoint, "--ckpt_dir", str(self.folder)]
        return [*task, *self.task.flags, *input_flags, *QUICK]

    @property
    def argv(self) -> list[str]:
        return [*self.start, *self.task.prompt]

    @property
    def frames(self) -> np.ndarray:
        return read_frames(self.video)

    def make_frames(self, out: Path, *flags: object) -> np.ndarray:
        """Returns the frames of the same run with more flags."""
        assert run_generate(*self.argv, *flags, "--save_file", out) == 0
        return read_frames(out)


@pytest.fixture(scope="session")
def asked(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TaskRun]:
    """asked(task): returns the run of a task, whose video is made on the first call."""
    task_runs: dict[str, TaskRun] = {}

    def ask(name: str) -> TaskRun:
        if name not in task_runs:
            task, folder = TASKS[name], tmp_path_factory.mktemp("task")
            inputs = task.inputs(folder)
            video = folder / "out" / "plain.mp4"
            task_run = TaskRun(task, tiny(task.checkpoint), inputs, video)
            latents = ["--save_latents"] if task.latents else []
            assert run_generate(*task_run.argv, *latents, "--save_file", video) == 0
            task_runs[name] = task_run
        return task_runs[name]

    return ask
