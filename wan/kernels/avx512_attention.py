"""Attention in bfloat16 on CPUs with AVX512-BF16 and without AMX (AMD's since Zen 4).

There PyTorch 2.13 converts bfloat16 to float32 before both products. This kernel multiplies
bfloat16 and adds in float32, as PyTorch's kernel does on CPUs with AMX: about twice as fast, with
the same rounding of the weights (see docs/attention_backends.md).

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from wan.kernels.interfaces import Kernel, Target
from wan.kernels.sdpa import SdpaKernel
from wan.utils.cpp_library import CppLibrary
from wan.utils.torch_private import has_amx, has_avx512_bf16

_COLUMNS, _MAX_HEAD = 64, 256  # head sizes are multiples; packed keys are padded to a multiple
_PACKED_VALUES = 1 << 22  # of the heads that are computed together, or of one long head
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


def make_cpu_kernel(target: Target) -> Kernel:
    """Makes the fastest kernel on this CPU; PyTorch's if the other one does not compile."""
    is_supported = target.dtype == torch.bfloat16 and is_supported_head(target.head_dim)
    if is_supported and has_avx512_bf16() and not has_amx() and LIBRARY.is_available():
        return Avx512Kernel()
    return SdpaKernel(target)


def is_supported_head(head_dim: int) -> bool:
    """Whether the kernel computes heads of this size."""
    return head_dim % _COLUMNS == 0 and head_dim <= _MAX_HEAD


class Avx512Kernel:
    """Implements `wan.kernels.interfaces.Kernel`. A row's result is the same in every call."""

    name = "attention with AVX512-BF16"
    can_return_lse = True

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        return self.with_lse(q_BSND, k_BSND, v_BSND)[0]

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        return _attend(q_BSND, k_BSND, v_BSND)


@torch.library.custom_op("wan::attend_avx512", mutates_args=())
def _attend(q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor) -> tuple[Tensor, Tensor]:
    """Calls the C++ function; an operator, so that `--compile` can contain it."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q_BSND, k_BSND, v_BSND))
    (batch, q_len, heads, dim), k_len = q.shape, k.shape[1]
    threads, library = torch.get_num_threads(), LIBRARY.load()
    out_BSND, lse_BNS = _allocate_result(q, k, v)
    padded_len = -(-k_len // _COLUMNS) * _COLUMNS
    group = min(batch * heads, max(1, _PACKED_VALUES // (2 * padded_len * dim)))
    packed = q.new_empty(group, 2, padded_len, dim)
    workspaces = q.new_empty(threads, library.count_workspace_bytes(), dtype=torch.uint8)
    strides = [stride for x in (q, k, v, out_BSND) for stride in x.stride()[:3]]
    tensors = q, k, v, out_BSND, lse_BNS
    library.attend(
        *(x.data_ptr() for x in tensors),
        (_INT * len(strides))(*strides),
        packed.data_ptr(),
        workspaces.data_ptr(),
        *(batch, q_len, k_len, heads, dim, group, dim**-0.5, threads),
    )
    return out_BSND, lse_BNS


@_attend.register_fake
def _allocate_result(q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor) -> tuple[Tensor, Tensor]:
    batch, q_len, heads, _ = q_BSND.shape
    out_BSND = q_BSND.new_empty(q_BSND.shape)
    return out_BSND, q_BSND.new_empty((batch, heads, q_len), dtype=torch.float32)


def _declare_attention(library: ctypes.CDLL) -> None:
    library.count_workspace_bytes.restype = _INT
    library.attend.restype = None
    library.attend.argtypes = [_POINTER] * 8 + [_INT] * 6 + [ctypes.c_float, ctypes.c_int]


LIBRARY = CppLibrary(
    Path(__file__).with_suffix(".cpp"),
    _declare_attention,
    "Attention is PyTorch's (as with --attention_backend sdpa), because the faster kernel of this "
    "CPU does not compile",
)
