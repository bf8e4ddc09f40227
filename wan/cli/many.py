"""The videos of a --prompt_file, one after the other, with the networks of one load."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wan.cli import failures
from wan.cli.prompt_file import Line
from wan.cli.resolve import Run
from wan.log import logger

if TYPE_CHECKING:
    from wan.distributed.mesh import Team
    from wan.pipeline.pipeline import Pipeline

MakeVideo = Callable[[Run, "Pipeline", "Team | None", Callable[[], None]], None]
AHEAD = 64  # lines whose texts are embedded at once, and then kept


@dataclass
class Told:
    """What became of the lines, for the summary."""

    failed: list[int] = field(default_factory=list)
    there: int = 0
    seconds: list[float] = field(default_factory=list)
    loading: list[float] = field(default_factory=list)

    def say(self) -> None:
        made = len(self.seconds)
        parts = [f"{made} video{'' if made == 1 else 's'} made"]
        parts += [f"{self.there} there already"] if self.there else []
        if self.failed:
            parts.append(f"failed: line {', '.join(map(str, self.failed))}")
        text = "; ".join(parts)
        if made:
            text += f". {statistics.median(self.seconds):.1f} s each (median)"
        if made > 1:
            first, *others = self.loading
            saved = max(len(others) * first - sum(others), 0.0)
            text += (
                f"; loading took {first:.1f} s of the first, which saved the others {saved:.1f} s"
            )
        logger.log(logging.ERROR if self.failed else logging.INFO, "%s.", text)


def make(run: Run, pipeline: Pipeline, team: Team | None, one: MakeVideo) -> bool:
    """Whether a line failed. one: makes a video; every rank calls this.

    With one process a line that fails is reported and the others go on. So do several ranks where
    the main one alone is concerned (decoding, writing); else all of them end, and the same command
    with --skip_existing goes on.
    """
    told, is_main = Told(), team is None or team.is_main
    for line in run.lines:
        if line.error and is_main:
            logger.error("Line %d is left out: %s", line.number, line.error)
        told.failed += [line.number] if line.error else []
    good = [line for line in run.lines if line.run is not None and not line.error]
    chosen = {
        line.number
        for line in good
        if line.run and not (run.skip_existing and line.run.output.save_file.exists())
    }
    told.there = len(good) - len(chosen)
    # The main rank decides: it alone looks at the folder.
    chosen = chosen if team is None else team.value_from_main(chosen)
    todo = [line for line in run.lines if line.number in chosen]
    for first in range(0, len(todo), AHEAD):
        some = todo[first : first + AHEAD]
        pipeline.keep_texts([line.run.request for line in some if line.run is not None])
        for line in some:
            _line(line, pipeline, team, one, told)
    if is_main:
        told.say()
    return bool(told.failed)


def _line(line: Line, pipeline: Pipeline, team: Team | None, one: MakeVideo, told: Told) -> None:
    assert line.run is not None
    left: list[bool] = []
    logger.info("Line %d: %s", line.number, line.run.output.save_file)
    begun = time.perf_counter()
    try:
        one(line.run, pipeline, team, lambda: left.append(True))
    except Exception as error:
        if team is not None and not left:
            raise
        sentence = failures.describe(error)
        words = sentence or repr(error)
        logger.error("Line %d failed: %s", line.number, words, exc_info=sentence is None)
        told.failed.append(line.number)
    else:
        told.seconds.append(time.perf_counter() - begun)
        told.loading.append(pipeline.stages.seconds.get("loading", 0.0))
    pipeline.stages.seconds.clear()  # each record has its own video's, the first what all need
    if told.failed[-1:] == [line.number]:
        pipeline.abandon()
        gc.collect()  # what the error held
        pipeline.device.empty_cache()
