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

from wan.settings.presets import TRAIN_TIMESTEPS


@dataclass(frozen=True)
class Solver:
    """A row of SOLVERS.

    Attributes:
        scheduler: The class of diffusers that takes its steps.
        start: The first sigma before the shift: UniPC starts just below 1, where training does.
        options: What its constructor is told, so that the network predicts a flow's velocity.
    """

    scheduler: str
    start: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 1.0}
SOLVERS = {
    "unipc": Solver("UniPCMultistepScheduler", float(np.float32(1 - 1 / TRAIN_TIMESTEPS)), _FLOW),
    "dpm++": Solver("DPMSolverMultistepScheduler", options=_FLOW),
}


def sigma_table(solver: str, steps: int, shift: float) -> tuple[Tensor, Tensor]:
    """Sigmas, float32 [N+1] ending in 0, and timesteps, int64 [N]: the official grids.

    The model is given the truncated timesteps, the solver the exact sigmas.
    """
    ratios = np.linspace(SOLVERS[solver].start, 0, steps + 1)[:-1]
    sigmas = shift * ratios / (1 + (shift - 1) * ratios)
    timesteps = torch.from_numpy(sigmas * TRAIN_TIMESTEPS).to(torch.int64)
    return torch.from_numpy(np.append(sigmas, 0.0).astype(np.float32)), timesteps


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
