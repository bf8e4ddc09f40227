"""Solvers: one table, without torch.

A row says how the noise levels of a run follow from its settings, and names what takes the steps
between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Solver:
    """A solver that can be asked for by name.

    Attributes:
        help: What it is, for `--help` and the documents.
        make: The class that takes its steps, as "module:name": a scheduler of diffusers, or one
            that is made of the levels and of a function that draws noise (`draws`).
        options: What the scheduler's constructor takes, so that the network predicts a flow's
            velocity.
        draws: Whether new noise is added between steps.
        start: The first sigma before the shift.
        whole: Whether timesteps are truncated to whole numbers, as officially.
        free: Whether it may step on any timesteps that are given.
    """

    help: str
    make: str
    options: Mapping[str, Any] = field(default_factory=dict)
    draws: bool = False
    start: float = 1.0
    whole: bool = False
    free: bool = False


_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 1.0}
SOLVERS = {
    # UniPC starts just below 1, where training does, at the float32 value of 1 - 1/1000.
    "unipc": Solver(
        "official, multistep (default)",
        "diffusers:UniPCMultistepScheduler",
        _FLOW,
        start=0.9990000128746033,
        whole=True,
    ),
    "dpm++": Solver(
        "official, multistep", "diffusers:DPMSolverMultistepScheduler", _FLOW, whole=True
    ),
    "euler": Solver("first order", "diffusers:FlowMatchEulerDiscreteScheduler", free=True),
    "dmd": Solver(
        "stochastic, of DMD's few steps", "wan.pipeline.solvers:Renoise", draws=True, free=True
    ),
    "rcm": Solver(
        "stochastic, of rCM's few steps", "wan.pipeline.solvers:Renoise", draws=True, free=True
    ),
}
