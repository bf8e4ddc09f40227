"""Table of the solvers: their noise schedule and the class that computes their steps.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Solver:
    """A solver, selected by its name.

    Attributes:
        help: Description for `--help` and the documentation.
        factory: Class that computes the steps, as "module:name": a diffusers scheduler or, with
            `adds_noise`, a class that is built from the sigmas and a function that samples noise.
        scheduler_kwargs: Keyword arguments of the diffusers scheduler for flow prediction.
        adds_noise: Whether new noise is added between steps.
        start_sigma: First sigma before the shift.
        truncates_timesteps: Whether timesteps are truncated to integers, as in the official code.
        takes_any_timesteps: Whether --timesteps can replace its noise schedule.
    """

    help: str
    factory: str
    scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    adds_noise: bool = False
    start_sigma: float = 1.0
    truncates_timesteps: bool = False
    takes_any_timesteps: bool = False


_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 1.0}
SOLVERS = {
    # UniPC starts at the float32 value of 1 - 1/1000, as training does.
    "unipc": Solver(
        "official, multistep (default)",
        "diffusers:UniPCMultistepScheduler",
        _FLOW,
        start_sigma=0.9990000128746033,
        truncates_timesteps=True,
    ),
    "dpm++": Solver(
        "official, multistep",
        "diffusers:DPMSolverMultistepScheduler",
        _FLOW,
        truncates_timesteps=True,
    ),
    "euler": Solver(
        "first order", "diffusers:FlowMatchEulerDiscreteScheduler", takes_any_timesteps=True
    ),
    "dmd": Solver(
        "stochastic, of DMD's few steps",
        "wan.pipeline.scheduler:Renoise",
        adds_noise=True,
        takes_any_timesteps=True,
    ),
    "rcm": Solver(
        "stochastic, of rCM's few steps",
        "wan.pipeline.scheduler:Renoise",
        adds_noise=True,
        takes_any_timesteps=True,
    ),
}
SOLVERS_OF_ANY_TIMESTEPS = tuple(name for name, row in SOLVERS.items() if row.takes_any_timesteps)
