"""PyTorch's scaled dot-product attention: the kernel of CPUs and CUDA GPUs, the default anywhere.

For the result alone PyTorch chooses among its kernels. The log-sum-exp is no part of that public
function, so the operators under it are called by name: on the CPU flash attention, on CUDA flash
attention for 16-bit tensors (from Ampere on) and else the memory-efficient kernel, on NPUs the
operator behind PyTorch's function there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.torch_private import (
    efficient_attention_on_cuda,
    flash_attention_on_cpu,
    flash_attention_on_cuda,
)


class SdpaKernel:
    """Implements `wan.kernels.base.Kernel`. device_type: named where it is known beforehand."""

    can_return_lse = True

    def __init__(self, device_type: str | None = None) -> None:
        where = "" if device_type is None else f" on {device_type}"
        self.name = f"PyTorch SDPA{where}"

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        if q_BSND.device.type == "npu":
            from wan.kernels.npu.dense import fusion_with_lse

            return fusion_with_lse(q_BSND, k_BSND, v_BSND)
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        if q.device.type in ("cpu", "meta"):  # nothing is computed of the latter
            out, lse = flash_attention_on_cpu(q, k, v)
        else:
            out, lse = padded_heads(_cuda_with_lse, q, k, v)
        return out.transpose(1, 2), lse


def padded_heads(
    attend: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]],
    q_BNSD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
) -> tuple[Tensor, Tensor]:
    """attend(q, k, v, scale) with heads padded to a multiple of 8, which CUDA's operators need."""
    head = q_BNSD.shape[-1]
    q, k, v = (F.pad(x, (0, -head % 8)) for x in (q_BNSD, k_BNSD, v_BNSD))
    out, lse = attend(q, k, v, head**-0.5)
    return out[..., :head], lse


def _cuda_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if q.dtype == torch.float32 or torch.cuda.get_device_capability(q.device) < (8, 0):
        return efficient_attention_on_cuda(q, k, v, scale)
    return flash_attention_on_cuda(q, k, v, scale)
