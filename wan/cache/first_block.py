"""First Block Cache (ParaAttention's), and a list of steps that repeats a run of it."""

from __future__ import annotations

from wan.cache.policy import BRANCHES, Changes, Lists, Policy
from wan.settings.errors import InputError
from wan.settings.request import Request


class FirstBlock(Policy):
    """Lists no step, since the first block's residual decides in the run."""

    first = 1
    decides = True

    def own(self, request: Request, changes: Changes | None) -> Lists:
        return dict.fromkeys(BRANCHES, (False,) * request.sample_steps)


class Steps(Policy):
    """Computes the listed steps, such as those that First Block Cache has computed."""

    first = 1

    def check(self, request: Request) -> tuple[str, ...]:
        found, last = super().check(request), max(self.settings.argument)
        if last >= request.sample_steps:
            raise InputError(
                "`step_cache=steps:`",
                why=f"names step {last}, but there are {request.sample_steps} (`sample_steps`)",
                remedy=f"name steps from 0 to {request.sample_steps - 1}",
            )
        return found

    def own(self, request: Request, changes: Changes | None) -> Lists:
        listed = self.settings.argument
        return dict.fromkeys(BRANCHES, tuple(s in listed for s in range(request.sample_steps)))
