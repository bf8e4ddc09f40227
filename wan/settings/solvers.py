"""Table of the solvers: their noise schedule and the class that computes their steps.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Solver:
    """A solver, selected by its name.

    Attributes:
        help: Description for `--help` and the documentation.
        factory: Class that computes the steps, as "module:name": a
            `wan.pipeline.scheduler.Stepper`.
        adds_noise: Whether new noise is added between steps.
        forwards_per_step: Forward passes of a step, 1 or 2; the last step has one. The second one
            is at the geometric mean of the step's two sigmas, by the step's expert.
        start_sigma: First sigma before the shift.
        truncates_timesteps: Whether timesteps are truncated to integers, as in the official code.
        takes_any_timesteps: Whether --timesteps can replace its noise schedule.
    """

    help: str
    factory: str
    adds_noise: bool = False
    forwards_per_step: int = 1
    start_sigma: float = 1.0
    truncates_timesteps: bool = False
    takes_any_timesteps: bool = False


_BELOW_ONE = 0.9990000128746033  # the float32 value of 1 - 1/1000, where training starts
SOLVERS = {
    "unipc": Solver(
        "official, multistep",
        "wan.pipeline.scheduler:UniPC",
        start_sigma=_BELOW_ONE,
        truncates_timesteps=True,
    ),
    "dpm++": Solver(
        "official, multistep",
        "wan.pipeline.scheduler:DpmSolver",
        truncates_timesteps=True,
    ),
    "euler": Solver("first order", "wan.pipeline.scheduler:Euler", takes_any_timesteps=True),
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
    "lcm": Solver(
        "stochastic, of LCM's few steps (as dmd)",
        "wan.pipeline.scheduler:Renoise",
        adds_noise=True,
        takes_any_timesteps=True,
    ),
    "euler_ancestral": Solver(
        "stochastic, first order",
        "wan.pipeline.scheduler:AncestralEuler",
        adds_noise=True,
        takes_any_timesteps=True,
    ),
    "dpm++_sde": Solver(
        "stochastic, multistep",
        "wan.pipeline.scheduler:SdeDpmSolver",
        adds_noise=True,
        start_sigma=_BELOW_ONE,
    ),
    "res_multistep": Solver(
        "second order, multistep",
        "wan.pipeline.scheduler:ExponentialMultistep",
        takes_any_timesteps=True,
    ),
    "res_2s": Solver(
        "second order, two forward passes a step",
        "wan.pipeline.scheduler:ExponentialMidpoint",
        forwards_per_step=2,
        takes_any_timesteps=True,
    ),
}
SOLVERS_OF_ANY_TIMESTEPS = tuple(name for name, row in SOLVERS.items() if row.takes_any_timesteps)
