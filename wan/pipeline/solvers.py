"""Noise schedules and solvers: the official sigma tables, stepped on by diffusers' solvers.

Legend: N steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wan.pipeline import timesteps


@dataclass(frozen=True)
class Solver:
    """A row of SOLVERS.

    Attributes:
        scheduler: The class of diffusers that takes its steps.
        options: What its constructor is told, so that the network predicts a flow's velocity.
    """

    scheduler: str
    options: Mapping[str, Any] = field(default_factory=dict)


_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 1.0}
SOLVERS = {
    "unipc": Solver("UniPCMultistepScheduler", _FLOW),
    "dpm++": Solver("DPMSolverMultistepScheduler", _FLOW),
}


def sigma_table(solver: str, steps: int, shift: float) -> tuple[Tensor, Tensor]:
    """Sigmas, float32 [N+1] ending in 0, and timesteps, int64 [N]: the official grids.

    The model is given the truncated timesteps, the solver the exact sigmas.
    """
    sigmas = np.array([*timesteps.sigmas(solver, steps, shift), 0.0]).astype(np.float32)
    told = torch.tensor(timesteps.timesteps(solver, steps, shift))
    return torch.from_numpy(sigmas), told


def make_solver(name: str, steps: int, shift: float) -> Any:
    """A scheduler of diffusers on the official table (their own tables differ)."""
    import diffusers

    row = SOLVERS[name]
    solver = getattr(diffusers, row.scheduler)(**row.options)
    solver.set_timesteps(steps)
    solver.sigmas, solver.timesteps = sigma_table(name, steps, shift)
    # Steps are counted, not looked up: with many steps neighbouring timesteps truncate to the same
    # integer, and a look-up would start one step late.
    solver.set_begin_index(0)
    return solver
