"""PyTorch's scaled dot-product attention: the kernel of CPUs and CUDA GPUs.

For the result alone PyTorch chooses among its kernels. The log-sum-exp is no part of that public
function, so the operators under it are called by name: on the CPU flash attention, on CUDA flash
attention for 16-bit numbers and the memory-efficient kernel for float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class SdpaKernel:
    """Implements `wan.kernels.base.Kernel`."""

    name = "sdpa"
    can_return_lse = True

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        aten = torch.ops.aten
        if q.device.type == "cpu":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        elif q.dtype == torch.float32:
            found = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
            out, lse = found[0], found[1][..., : q.shape[2]]  # the kernel pads rows to 32
        else:
            out, lse = aten._scaled_dot_product_flash_attention(q, k, v)[:2]
        return out.transpose(1, 2), lse
