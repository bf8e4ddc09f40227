"""Every output setting reaches the code that writes the files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.unit.test_settings import CASES
from wan.cli import main as generate
from wan.media import video_writer
from wan.metering import exchange_order
from wan.settings.command import Output
from wan.settings.fields import list_options

SMALL = (
    *("--size", "32*32", "--frame_num", "1", "--sample_steps", "6", "--base_seed", "7"),
    *("--sample_guide_scale", "1"),
)


class Outcome(NamedTuple):
    """The results of a run, except parts that differ between equal runs."""

    encoder: tuple[str, ...]
    num_encoders: int
    files: tuple[str, ...]
    traced: tuple[int, ...]
    debug: bool


Make = Callable[..., Outcome]


@pytest.fixture(scope="module")
def make(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes a video with these flags in a new folder."""
    start, commands = video_writer.start_ffmpeg, list[Sequence[str]]()

    def record_start(args: Sequence[str], **more: Any) -> object:
        commands.append(args)
        return start(args, **more)

    def make_outcome(*flags: str) -> Outcome:
        folder = tmp_path_factory.mktemp("run")
        patch.chdir(folder)
        commands.clear()
        argv = [flag.replace("/tmp/", f"{folder}/") for flag in flags]
        model = ["--task", "t2v-1.3B", "--ckpt_dir", str(tiny("t2v-1.3B"))]
        assert generate.main([*model, *SMALL, *argv]) == 0
        files = (str(path.relative_to(folder)) for path in folder.rglob("*"))
        traced = (
            exchange_order.read_traces(folder / "trace")[0].plan.steps if "--trace" in flags else ()
        )
        return Outcome(
            tuple(part for part in commands[-1] if not re.search(r"\.mp4$|^comment=", part)),
            len(commands),
            tuple(sorted(re.sub(r"_\d{8}_\d{6}", "_date", file) for file in files)),
            tuple(traced),
            logging.getLogger("wan").isEnabledFor(logging.DEBUG),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_writer, "start_ffmpeg", record_start)
        yield cache(make_outcome)


@pytest.mark.parametrize("name", list_options(Output))
@pytest.mark.usefixtures("one_thread")
def test_a_setting_of_the_output_arrives(name: str, make: Make) -> None:
    """In the command or number of encoders, the names of the files, the trace or the log.

    The record and the video's comment do not count: they repeat settings even if unused. A setting
    of the encoder is in the record, and is set for decoding and in a line of a prompt file, too.
    """
    text, _, more = CASES[name]
    outcome, default, option = (
        make(*more, f"--{name}", text),
        make(*more),
        list_options(Output)[name],
    )
    assert outcome != default
    if outcome.encoder != default.encoder:
        assert option.record and option.decoding and option.line
