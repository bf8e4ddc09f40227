"""An int8 linear layer, the bit-exact reference of mindiesd's W8A8_DYNAMIC.

Legend: L tokens, I input channels, O output channels.

Each token is quantized by its largest value (scale = max|x| / 127, rounding half to even). Products
are summed exactly in int32 and scaled in float32: ((sum * weight scale) * token scale) + bias. The
bits of a token's result do not depend on how tokens are divided into calls, ranks or chunks.

On CPUs with AVX-512, large layers quantize and scale in C++, one pass each, with the same bits.
They multiply by a few output channels at a time, whose sums then stay in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.kernels.amx_linear import can_multiply_int8, multiply_int8_with_amx
from wan.kernels.interfaces import divide_exactly
from wan.settings.numerics import get_int8_slice_numel
from wan.utils import torch_private
from wan.utils.cpp_library import CppLibrary

MIN_CPP_NUMEL = 1 << 20  # of a weight: smaller layers do not repay compiling
_CPP_DTYPES = torch.float32, torch.bfloat16
_CPP_ROWS, _CPP_COLUMNS = 2048, 512  # of a product: 4 MiB of sums; tokens and output channels
_AMX_COLUMNS = 2048  # 16 MiB of sums: the kernel packs the tokens once per product
_CUDA_ROWS, _CUDA_MULTIPLE = 32, 8  # CUDA's int8 product needs 17 rows or more, sizes 8n


class W8A8Linear(nn.Module):
    """x W^T + bias with an int8 weight; takes [..., I] in any float dtype, returns [..., O].

    Args:
        weight_OI: int8, on the device that computes, like all tensors.
        weight_scale_O: W = weight * scale; [O] or [O,1].
        factors_I: x is multiplied by them first (smoothing); None: not.
        dtype: x is converted to it, and the result has it. Scale, bias and factors are rounded to
            it, as mindiesd does (bfloat16, float16; with float32 nothing is rounded).
        device_type: Of the device that computes; None: the tensors' device.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    factors: Tensor | None

    def __init__(
        self,
        weight_OI: Tensor,
        weight_scale_O: Tensor,
        bias_O: Tensor | None,
        factors_I: Tensor | None = None,
        *,
        dtype: torch.dtype,
        device_type: str | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.device_type = dtype, device_type
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("weight", weight_OI, persistent=False)
        scale_O = weight_scale_O.reshape(-1).to(dtype).float()
        self.register_buffer("weight_scale", scale_O, persistent=False)
        bias_O = None if bias_O is None else bias_O.to(dtype).float()
        self.register_buffer("bias", bias_O, persistent=False)
        factors_I = None if factors_I is None else factors_I.to(dtype)
        self.register_buffer("factors", factors_I, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x_LI = x.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():  # the compiler fuses the operations
            return self._multiply(x_LI).view(*x.shape[:-1], self.out_features)
        if self._uses_cpp(x):
            return self._apply_in_cpp(x)
        numel = get_int8_slice_numel(self.device_type or x.device.type)
        rows = max(1, numel // self.out_features)
        out_LO = torch.empty(len(x_LI), self.out_features, dtype=self.dtype, device=x.device)
        for first in range(0, len(x_LI), rows):
            token_slice = slice(first, first + rows)
            out_LO[token_slice] = self._multiply(x_LI[token_slice])
        return out_LO.view(*x.shape[:-1], self.out_features)

    def forward_gelu(self, x: Tensor) -> Tensor | None:
        """See `wan.kernels.linear.Linear`; the bits are those of PyTorch's GELU of the result."""
        is_supported = self.dtype == torch.bfloat16 and not torch.compiler.is_compiling()
        if not is_supported or not self._uses_cpp(x):
            return None
        return self._apply_in_cpp(x, _make_gelu_table())

    def _multiply(self, x_LI: Tensor) -> Tensor:
        values_LI, scale_L1 = quantize_per_token(self._smooth(x_LI))
        out_LO = multiply_int8(values_LI, self.weight).float()
        out_LO = out_LO.mul_(self.weight_scale).mul_(scale_L1)
        out_LO = out_LO if self.bias is None else out_LO.add_(self.bias)
        return out_LO.to(self.dtype)

    def _smooth(self, x_LI: Tensor) -> Tensor:
        x_LI = x_LI.to(self.dtype)
        return x_LI if self.factors is None else x_LI * self.factors

    def _uses_cpp(self, x: Tensor) -> bool:
        is_supported = x.device.type == "cpu" and self.dtype in _CPP_DTYPES
        return is_supported and self.weight.numel() >= MIN_CPP_NUMEL and INT8_LIBRARY.is_available()

    def _apply_in_cpp(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        x_LI = x.reshape(-1, self.in_features)
        out_LO = torch.empty(len(x_LI), self.out_features, dtype=self.dtype)
        for x_slice, out in zip(x_LI.split(_CPP_ROWS), out_LO.split(_CPP_ROWS), strict=True):
            self._multiply_in_cpp(x_slice, out, table)
        return out_LO.view(*x.shape[:-1], self.out_features)

    def _multiply_in_cpp(self, x_LI: Tensor, out_LO: Tensor, table: Tensor | None) -> None:
        library, threads = INT8_LIBRARY.load(), torch.get_num_threads()
        x_LI, is_bfloat16 = self._smooth(x_LI).contiguous(), self.dtype == torch.bfloat16
        values_LI = torch.empty(x_LI.shape, dtype=torch.int8)
        scale_L1 = torch.empty(len(x_LI), 1)
        pointers = values_LI.data_ptr(), scale_L1.data_ptr()
        library.quantize_rows(x_LI.data_ptr(), is_bfloat16, *x_LI.shape, *pointers, threads)
        uses_amx = can_multiply_int8(self.in_features, self.out_features)
        step = _AMX_COLUMNS if uses_amx else _CPP_COLUMNS
        memory = torch.empty(len(x_LI) * step, dtype=torch.int32)
        for first in range(0, self.out_features, step):
            columns = slice(first, first + step)
            weight_OI, out = self.weight[columns], out_LO[:, columns]
            sums_LO = memory[: out.numel()].view(out.shape)
            if uses_amx:
                multiply_int8_with_amx(values_LI, weight_OI, sums_LO)
            else:
                torch_private.int8_matmul(values_LI, weight_OI.t(), out=sums_LO)
            library.scale_products(
                sums_LO.data_ptr(),
                self.weight_scale[columns].data_ptr(),
                scale_L1.data_ptr(),
                None if self.bias is None else self.bias[columns].data_ptr(),
                *sums_LO.shape,
                out.data_ptr(),
                self.out_features,
                None if table is None else table.data_ptr(),
                is_bfloat16,
                threads,
            )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, int8 -> {self.dtype}"


def quantize_per_token(x_LI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes to int8 [L,I] with float32 scales [L,1]: x is about values * scale."""
    x_LI = x_LI.float()
    scale_L1 = divide_exactly(x_LI.abs().amax(-1, keepdim=True), 127)
    scale_L1 = torch.where(scale_L1 == 0, 1.0, scale_L1)  # NaN stays, in all of the result
    return (x_LI / scale_L1).round_().to(torch.int8), scale_L1


def multiply_int8(a_LI: Tensor, b_OI: Tensor) -> Tensor:
    """Computes a b^T of int8 matrices exactly, int32 [L,O]."""
    if a_LI.device.type == "cuda":
        return multiply_padded(torch_private.int8_matmul, a_LI, b_OI)
    return torch_private.int8_matmul(a_LI, b_OI.t())


def multiply_padded(
    multiply: Callable[[Tensor, Tensor], Tensor],
    a_LI: Tensor,
    b_OI: Tensor,
    multiple: int = _CUDA_MULTIPLE,
) -> Tensor:
    """Computes a b^T by multiply(a_LI, b_IO), zero-padded to the sizes that CUDA needs.

    multiple: I and O are padded to multiples of it.
    """
    (rows, inner), outer = a_LI.shape, len(b_OI)
    extra_rows, extra_inner = max(0, _CUDA_ROWS - rows), -inner % multiple
    extra_outer = -outer % multiple
    if extra_rows or extra_inner:
        a_LI = F.pad(a_LI, (0, extra_inner, 0, extra_rows))
    if extra_outer or extra_inner:
        b_OI = F.pad(b_OI, (0, extra_inner, 0, extra_outer))
    return multiply(a_LI, b_OI.t())[:rows, :outer]


@cache
def _make_gelu_table() -> Tensor:
    """Makes a table of GELU (tanh) of all bfloat16 values, and one more for reads of two values."""
    values = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    return F.pad(F.gelu(values, approximate="tanh"), (0, 1))


def _declare_int8_functions(library: ctypes.CDLL) -> None:
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.quantize_rows.restype = library.scale_products.restype = None
    library.quantize_rows.argtypes = [pointer, number, *[integer] * 2, *[pointer] * 2, number]
    operands, sizes, out = [pointer] * 4, [integer] * 2, (pointer, integer)
    library.scale_products.argtypes = [*operands, *sizes, *out, pointer, number, number]


INT8_LIBRARY = CppLibrary(
    Path(__file__).with_suffix(".cpp"),
    _declare_int8_functions,
    "int8 layers run without a compiler, which costs speed only",
)
