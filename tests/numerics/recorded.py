"""Self-attention that notes which sample of a forward it is told of."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wan.kernels.base import StepInfo
from wan.kernels.sdpa import SdpaKernel
from wan.modules.interfaces import LocalAttention

STEP = StepInfo(1, 4, "cond", "dit", (1, 1, 1), 1)


class Samples:
    """Makes each block's attention; `seen` are the samples, in the order of calls."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, layer: int) -> Any:
        attention = LocalAttention(SdpaKernel())

        def attend(*qkv: Tensor, valid_len: int | None, step: StepInfo) -> Tensor:
            self.seen.append(step.sample)
            return attention(*qkv, valid_len=valid_len)

        return attend
