"""PyTorch's scaled dot-product attention: the kernel of CPUs and CUDA GPUs, the default anywhere.

The public function does not return the log-sum-exp, so its operators are called directly. On CUDA
one operator is selected when the kernel is made and used with and without log-sum-exp: cuDNN on
Hopper and later, FlashAttention from Ampere on, both for 16-bit tensors, otherwise the
memory-efficient one. Other devices use the public function, and for the log-sum-exp PyTorch's flash
attention for CPUs, or npu_fusion_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels.interfaces import Target
from wan.kernels.npu.dense import attend_fused_with_lse
from wan.settings.errors import InputError
from wan.utils.torch_private import (
    cudnn_attention_on_cuda,
    efficient_attention_on_cuda,
    flash_attention_on_cpu,
    flash_attention_on_cuda,
)

Attend = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""attend(q, k, v, scale): the result and the log-sum-exp of [B,N,S,D], heads of 8n channels."""


@dataclass(frozen=True)
class CudaOperator:
    """One of PyTorch's CUDA attention operators. name: for logs and records."""

    name: str
    attend: Attend


CUDNN = CudaOperator("PyTorch cuDNN attention", cudnn_attention_on_cuda)
FLASH = CudaOperator("PyTorch FlashAttention", flash_attention_on_cuda)
EFFICIENT = CudaOperator("PyTorch memory-efficient attention", efficient_attention_on_cuda)

_MIN_CUDNN = 91600  # before 9.16, lengths that are not multiples of 128 could give wrong results
_CUDNN_HEAD, _FLASH_HEAD = 128, 256  # largest head sizes on every supported GPU


def select_cuda_operator(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, cudnn: int | None
) -> CudaOperator:
    """Selects the fastest of PyTorch's operators that supports these arguments.

    Args:
        capability: Compute capability of the device.
        cudnn: cuDNN's version as in PyTorch, 91600 for 9.16.0; None: cuDNN is not used.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return EFFICIENT
    has_cudnn = cudnn is not None and cudnn >= _MIN_CUDNN
    if has_cudnn and capability >= (9, 0) and head_dim <= _CUDNN_HEAD:
        return CUDNN
    return FLASH if capability >= (8, 0) and head_dim <= _FLASH_HEAD else EFFICIENT


def check_cudnn(capability: tuple[int, int], head_dim: int, cudnn: int | None) -> None:
    """Raises InputError if cuDNN's kernel does not support the arguments."""
    why = None
    if cudnn is None:
        why = "needs cuDNN, which this PyTorch does not have"
    elif cudnn < _MIN_CUDNN:
        why = f"needs cuDNN 9.16 or later ({_MIN_CUDNN}); here it is {cudnn}"
    elif capability < (8, 0):
        why = f"needs compute capability 8.0; this GPU has {capability[0]}.{capability[1]}"
    elif head_dim > _CUDNN_HEAD:
        why = f"takes heads of at most {_CUDNN_HEAD} channels, not {head_dim}"
    if why is not None:
        raise InputError("`attention_backend=cudnn`", None, why, "use `attention_backend=auto`")


class CudaKernel:
    """Implements `wan.kernels.interfaces.Kernel` by one operator, with and without log-sum-exp."""

    can_return_lse = True

    def __init__(self, operator: CudaOperator) -> None:
        self.name, self._attend = operator.name, operator.attend

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        return self.with_lse(q_BSND, k_BSND, v_BSND)[0]

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        out, lse = attend_with_padded_heads(self._attend, q, k, v)
        return out.transpose(1, 2), lse


@cache
def _make_fastest_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, with_cudnn: bool = True
) -> CudaKernel:
    """Makes the kernel of the fastest operator for such tensors on a device; cached."""
    capability, cudnn = torch.cuda.get_device_capability(device), get_cudnn_version()
    return CudaKernel(
        select_cuda_operator(capability, dtype, head_dim, cudnn if with_cudnn else None)
    )


def make_cuda_kernel(target: Target) -> CudaKernel:
    """Makes the fastest of PyTorch's kernels on a GPU."""
    return _make_fastest_kernel(target.device.torch_device, target.dtype, target.head_dim)


def make_cuda_sdpa_kernel(target: Target) -> CudaKernel:
    """Makes the fastest of PyTorch's kernels on a GPU, without cuDNN."""
    return _make_fastest_kernel(
        target.device.torch_device, target.dtype, target.head_dim, with_cudnn=False
    )


def make_cudnn_kernel(target: Target) -> CudaKernel:
    """Makes cuDNN's kernel; InputError if the device does not support it."""
    capability = torch.cuda.get_device_capability(target.device.torch_device)
    check_cudnn(capability, target.head_dim, get_cudnn_version())
    return CudaKernel(CUDNN)


def get_cudnn_version() -> int | None:
    """Returns cuDNN's version; None without. On AMD GPUs PyTorch reports MIOpen's instead."""
    return torch.backends.cudnn.version() if torch.version.hip is None else None


class SdpaKernel:
    """Implements `wan.kernels.interfaces.Kernel` on the device of the tensors.

    target: only for the name; None: any device.
    """

    can_return_lse = True

    def __init__(self, target: Target | None = None) -> None:
        self.name = "PyTorch SDPA" + ("" if target is None else f" on {target.device.type}")

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        if q_BSND.device.type == "cuda":
            return _make_fastest_kernel(q_BSND.device, q_BSND.dtype, q_BSND.shape[-1])(
                q_BSND, k_BSND, v_BSND
            )
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        if q_BSND.device.type == "npu":
            return attend_fused_with_lse(q_BSND, k_BSND, v_BSND)
        if q_BSND.device.type == "cuda":
            kernel = _make_fastest_kernel(q_BSND.device, q_BSND.dtype, q_BSND.shape[-1])
            return kernel.with_lse(q_BSND, k_BSND, v_BSND)
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        out, lse = flash_attention_on_cpu(q, k, v)  # also on the meta device
        return out.transpose(1, 2), lse


def attend_with_padded_heads(
    attend: Attend, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor
) -> tuple[Tensor, Tensor]:
    """Calls attend(q, k, v, scale) with heads padded to a multiple of 8 channels, as CUDA needs.

    Other head sizes are copied.
    """
    head_dim = q_BNSD.shape[-1]
    scale = head_dim**-0.5
    if head_dim % 8 == 0:
        return attend(q_BNSD, k_BNSD, v_BNSD, scale)
    q, k, v = (F.pad(x, (0, -head_dim % 8)) for x in (q_BNSD, k_BNSD, v_BNSD))
    out, lse = attend(q, k, v, scale)
    return out[..., :head_dim], lse
