"""First Block Cache (ParaAttention's): the first block's residual decides in the run."""

from __future__ import annotations

from wan.cache.policy import BRANCHES, Changes, Lists, Policy
from wan.settings.request import Request


class FirstBlock(Policy):
    """Lists no step: the data decide."""

    first = 1
    decides = True

    def own(self, request: Request, changes: Changes | None) -> Lists:
        return dict.fromkeys(BRANCHES, (False,) * request.sample_steps)
