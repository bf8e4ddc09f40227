"""`RunOptions`: the settings of a run as typed groups, built once from the merged settings."""

from __future__ import annotations

from dataclasses import dataclass

from wan.settings.attention import Attention
from wan.settings.command import (
    CheckpointOptions,
    Loras,
    NetworkFiles,
    PlanOptions,
    VideoLoraOptions,
)
from wan.settings.execution import Execution
from wan.settings.fields import build_from_values
from wan.settings.rules import Values
from wan.settings.step_cache import StepCache


@dataclass(frozen=True)
class RunOptions:
    """What loads and runs the networks.

    `Parallel` needs the number of ranks (`resolve_topology`), `VideoParams` the inputs and the
    checkpoint (`make_video_params`), `Output` the video's name: they are built from the settings
    later.

    Attributes:
        values: Flag -> value of every setting that a layer gives, for rules about what was chosen.
    """

    checkpoint: CheckpointOptions
    files: NetworkFiles
    loras: Loras
    video_loras: VideoLoraOptions
    execution: Execution
    attention: Attention
    cache: StepCache
    plan: PlanOptions
    values: Values


def read_run_options(values: Values) -> RunOptions:
    """Builds the groups from checked settings; what no layer sets has its default."""
    return RunOptions(
        checkpoint=build_from_values(CheckpointOptions, values),
        files=build_from_values(NetworkFiles, values),
        loras=build_from_values(Loras, values),
        video_loras=build_from_values(VideoLoraOptions, values),
        execution=build_from_values(Execution, values),
        attention=build_from_values(Attention, values),
        cache=build_from_values(StepCache, values),
        plan=build_from_values(PlanOptions, values),
        values=values,
    )
