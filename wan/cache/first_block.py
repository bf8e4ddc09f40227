"""ParaAttention's First Block Cache, and a fixed list of steps that repeats such a run."""

from __future__ import annotations

from wan.cache.policy import BRANCHES, Changes, Lists, Policy
from wan.settings.errors import InputError
from wan.settings.request import Request


class FirstBlock(Policy):
    """Lists no step: the residual of the first block decides in every step."""

    first = 1
    decides = True

    def own(self, request: Request, changes: Changes | None) -> Lists:
        return dict.fromkeys(BRANCHES, (False,) * request.sample_steps)


class Steps(Policy):
    """Computes a given list of steps, such as those computed by a First Block Cache run."""

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
