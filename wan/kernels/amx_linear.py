"""Matrix products in float32 and int8 on CPUs with matrix instructions (AMX).

Each float32 value is exactly the sum of three bfloat16 values, whose products AMX adds in float32:
about 0.7 of the time of PyTorch's product (0.55 with weights that bfloat16 represents) at half its
error against float64. A row's bits do not depend on other rows or on the number of threads.
Int8 products are exact, in about 0.7 of the time of PyTorch's.

Legend: L tokens, I input channels, O output channels.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from wan.utils.cpp_library import CppLibrary
from wan.utils.log import logger
from wan.utils.torch_private import has_amx

_MULTIPLE, _INT8_MULTIPLE = 32, 64  # of channels; int8's output channels are multiples of 32, too
_MIN_ROWS = 16  # fewer cannot repay splitting the weight
_MIN_WEIGHT = 1 << 20  # values: smaller layers do not repay compiling


def uses_amx(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Whether `multiply_with_amx` takes these tensors."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    tensors = (x, weight_OI) if bias_O is None else (x, weight_OI, bias_O)
    if not all(y.device.type == "cpu" and y.dtype == torch.float32 for y in tensors):
        return False
    out_channels, in_channels = weight_OI.shape
    is_whole = out_channels % _MULTIPLE == in_channels % _MULTIPLE == 0
    is_large = weight_OI.numel() >= _MIN_WEIGHT and x.numel() >= _MIN_ROWS * in_channels
    return is_whole and is_large and is_amx_available()


@cache
def is_amx_available() -> bool:
    """Whether the CPU has AMX, the kernel compiles, and Linux lets this process use the tiles."""
    if not (has_amx() and AMX_LIBRARY.is_available()):
        return False
    is_allowed = AMX_LIBRARY.load().request_tiles() == 0
    if not is_allowed:
        logger.warning("Products in float32 and int8 are PyTorch's: Linux refuses AMX here.")
    return is_allowed


@torch.library.custom_op("wan::linear_amx", mutates_args=())
def multiply_with_amx(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Computes x W^T + bias in float32: [..., O] of x [..., I].

    It is an operator, so that profiles show it.
    """
    library, threads = AMX_LIBRARY.load(), torch.get_num_threads()
    x, weight_OI = x.contiguous(), weight_OI.contiguous()
    bias_O = None if bias_O is None else bias_O.contiguous()
    out_channels, in_channels = weight_OI.shape
    out = _allocate_product(x, weight_OI, bias_O)
    workspace = x.new_empty(library.count_workspace_bytes(threads), dtype=torch.uint8)
    library.multiply_float32(
        x.data_ptr(),
        weight_OI.data_ptr(),
        None if bias_O is None else bias_O.data_ptr(),
        out.data_ptr(),
        *(x.numel() // in_channels, in_channels, out_channels),
        workspace.data_ptr(),
        threads,
    )
    return out


@multiply_with_amx.register_fake
def _allocate_product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight_OI))


def can_multiply_int8(in_channels: int, out_channels: int) -> bool:
    """Whether `multiply_int8_with_amx` takes a weight of these sizes."""
    is_whole = in_channels % _INT8_MULTIPLE == out_channels % _MULTIPLE == 0
    return is_whole and is_amx_available()


def multiply_int8_with_amx(a_LI: Tensor, b_OI: Tensor, out_LO: Tensor) -> None:
    """Writes a b^T of int8 matrices exactly to a contiguous int32 matrix."""
    library, threads = AMX_LIBRARY.load(), torch.get_num_threads()
    a_LI, b_OI = a_LI.contiguous(), b_OI.contiguous()
    workspace = a_LI.new_empty(library.count_workspace_bytes(threads))
    pointers = (x.data_ptr() for x in (a_LI, b_OI, out_LO))
    library.multiply_int8(*pointers, *a_LI.shape, len(b_OI), workspace.data_ptr(), threads)


LINEAR_AMX = torch.ops.wan.linear_amx.default  # as profilers see it


def _declare_functions(library: ctypes.CDLL) -> None:
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.count_workspace_bytes.restype = integer
    library.count_workspace_bytes.argtypes = [number]
    library.request_tiles.restype, library.request_tiles.argtypes = number, []
    library.multiply_float32.restype = library.multiply_int8.restype = None
    library.multiply_float32.argtypes = [*[pointer] * 4, *[integer] * 3, pointer, number]
    library.multiply_int8.argtypes = [*[pointer] * 3, *[integer] * 3, pointer, number]


AMX_LIBRARY = CppLibrary(
    Path(__file__).with_suffix(".cpp"),
    _declare_functions,
    "Matrix products in float32 and int8 are PyTorch's: this CPU's faster ones do not compile",
)
