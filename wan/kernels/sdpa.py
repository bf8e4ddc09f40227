"""PyTorch's scaled dot-product attention: the CPU's kernel and the reference for every other.

On CUDA PyTorch chooses among its flash, cuDNN and memory-efficient kernels by itself.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class SdpaKernel:
    """Implements `wan.kernels.base.Kernel`."""

    name = "sdpa"
    can_return_lse = False

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
