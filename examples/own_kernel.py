"""Uses a custom attention kernel in the attention layer: `python examples/own_kernel.py`.

A kernel is an object with these members; a kernel that returns the log-sum-exp also works in a
ring. docs/extending.md describes how to add a kernel with a flag to the repository.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.modules.attnlayer import FAPowerCapAttention


class Float64Kernel:
    """Attention in float64, to measure the error of a faster kernel."""

    name = "float64"
    can_return_lse = True

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        return self.with_lse(q_BSND, k_BSND, v_BSND)[0]

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2).double() for x in (q_BSND, k_BSND, v_BSND))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        out = (scores.softmax(-1) @ v).transpose(1, 2).to(q_BSND.dtype)
        return out, scores.logsumexp(-1).float()


def main() -> None:
    q, k, v = torch.randn(3, 1, 256, 8, 64)
    layer = FAPowerCapAttention(comm_type=2, kernel=Float64Kernel())
    plain = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    print(f"PyTorch's attention is off by {(layer(q, k, v) - plain).abs().max():.1e}")


if __name__ == "__main__":
    main()
