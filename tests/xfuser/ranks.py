"""Kernels of xfuser's registry as the tests use them, on any rank.

No function of xfuser returns the log-sum-exp on a CPU. Tests that need one register
PyTorch's CPU operator, by xfuser's decorator, instead of the function that calls the CUDA
operator; everything else is as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from xfuser.core.distributed.attention_backend import (
    ATTENTION_FUNCTION_REGISTRY,
    AttentionBackendType,
    register_attention_function,
)

from wan.device import Device
from wan.kernels.interfaces import Target
from wan.kernels.xfuser import XfuserKernel
from wan.kernels.xfuser import build_xfuser_kernel as made
from wan.settings.devices import get_capabilities
from wan.settings.kernels import DENSE_KERNELS

MATH, FLASH = AttentionBackendType.SDPA_MATH, AttentionBackendType.SDPA_FLASH


def flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool) -> Any:
    """The CPU counterpart of the operator that SDPA_FLASH calls on a GPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal)


@contextmanager
def use_function(member: Any, function: Callable[..., Any]) -> Iterator[list[tuple[int, ...]]]:
    """Replace a function of xfuser's registry; yield the list of its calls' q shapes [B,N,S,D]."""
    original, calls = ATTENTION_FUNCTION_REGISTRY[member], list[tuple[int, ...]]()

    def count_call(q: Tensor, *args: Any) -> Any:
        calls.append(tuple(q.shape))
        return function(q, *args)

    register_attention_function(member)(count_call)
    try:
        yield calls
    finally:
        ATTENTION_FUNCTION_REGISTRY[member] = original


def build_kernel(name: str, head: int, dtype: torch.dtype = torch.float32) -> XfuserKernel:
    device = Device(torch.device("cpu"), get_capabilities("cpu"))
    return made(Target(device, head, dtype, dense_row=DENSE_KERNELS[name]))
