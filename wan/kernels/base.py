"""What a dense attention kernel is.

Legend: B batch, S tokens, N heads, D head size. Every kernel takes and returns [B,S,N,D].
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Kernel(Protocol):
    """softmax(q k^T / sqrt(D)) v over whole sequences; q and k may have different lengths."""

    @property
    def name(self) -> str:
        """For logs and records."""
        ...

    @property
    def can_return_lse(self) -> bool:
        """Whether `with_lse` exists, which a real ring needs."""
        ...

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor: ...

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        """The result and the log-sum-exp (natural log, float32 [B,N,S]) of each row's logits."""
        ...
