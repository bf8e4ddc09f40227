"""Dequantizes an FP8 or GGUF weight to bfloat16 in one pass on a CPU, compiled by torch.compile.

The compiler makes one vectorized loop of a GGUF function only if it computes rows of 32 values of
constant shape, and if the scales of the sub-blocks are its arguments. FP8 values are looked up, two
at a time, because the compiler turns conversions between integers and floats into slow scalar
loops. For IQ4_NL compiling gained nothing; it, IQ4_XS and MXFP4 are not compiled.

Legend: B blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from wan.checkpoint.formats.tensor_info import FP8, GGUF
from wan.checkpoint.quant.dequantise import split_scales
from wan.settings.numerics import get_slice_numel
from wan.utils.log import logger, summarize_error
from wan.utils.torch_private import set_up_compiler

MIN_VALUES = 1 << 35
"""Dequantizing so many values eagerly loses as much time as compiling takes, 1 to 5 s."""


class CompiledDequantizer:
    """Compiles a function for each dtype of which `min_values` values have been dequantized.

    So a run of a few steps does not wait for the compiler. If it fails, the error is logged once as
    a warning, and everything runs eagerly.
    """

    def __init__(self, min_values: int = MIN_VALUES) -> None:
        self._min_values = min_values
        self._eager_values: Counter[str] = Counter()
        self._compiled: dict[str, Callable[..., None]] = {}
        self._works = True

    def fill(self, dtype: str, data: Tensor, scale: Tensor | None, out_OI: Tensor) -> bool:
        """Dequantizes a weight, bitwise equal to the eager functions.

        Args:
            dtype: Of the file.
            data: [rows, bytes of a row], or FP8.
            scale: Factor of an FP8 weight; factors of rows or blocks are not computed here.
            out_OI: Is overwritten.

        Returns:
            Whether it was computed.
        """
        is_supported = out_OI.device.type == "cpu" and out_OI.dtype == torch.bfloat16
        if dtype in FP8:
            is_supported &= data.numel() % 2 == data.storage_offset() % 2 == 0
            is_supported &= scale is None or scale.numel() == 1
        if not self._works or not is_supported or dtype not in _FUNCTIONS:
            return False
        if self._eager_values[dtype] < self._min_values:
            self._eager_values[dtype] += out_OI.numel()
            return False
        try:
            if dtype not in self._compiled:
                self._compiled[dtype] = _compile(dtype)
            for arguments in _list_arguments(dtype, data, scale, out_OI):
                self._compiled[dtype](*arguments)
        except Exception as error:  # any of the compiler, or of the folder of its cache
            self._works = False
            logger.warning(
                "Weights are dequantized without a compiler, which costs speed only: %s "
                "(--fused_ops none does not try).",
                summarize_error(error),
            )
        return self._works


def _compile(dtype: str) -> Callable[..., None]:
    """Returns the compiled function of a dtype; the compiler runs in its first call."""
    set_up_compiler()
    logger.info("Compiling the function that dequantizes %s (--fused_ops) ...", dtype)
    options: dict[str, Any] = {"cpp.dynamic_threads": True}  # loading changes their number
    return torch.compile(_FUNCTIONS[dtype], dynamic=True, options=options)


def _list_arguments(
    dtype: str, data: Tensor, scale: Tensor | None, out_OI: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yields the arguments of each call of a dtype's function.

    Where parts are as large as the values, a slice of them stays in the caches.
    """
    if dtype in FP8:
        codes = data.view(-1).view(torch.uint16)
        yield out_OI.view(-1).view(torch.int32), codes, _make_pairs(data.dtype, scale)
        return
    values_per_block, bytes_per_block = GGUF[dtype]
    blocks = data.view(torch.uint8).view(-1, bytes_per_block)
    has_large_parts = dtype in ("Q5_1", "Q5_0", "Q4_1", "Q4_0")
    num_blocks = get_slice_numel("cpu") // values_per_block if has_large_parts else len(blocks)
    outputs = out_OI.view(-1, values_per_block).split(num_blocks)
    for blocks_of_slice, out in zip(blocks.split(num_blocks), outputs, strict=True):
        yield out, *split_scales(dtype, blocks_of_slice)


def _make_pairs(dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Returns the two bfloat16 values of each pair of FP8 codes, as one int32."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values if scale is None else values.mul_(scale.view(-1))
    bits = values.bfloat16().view(torch.int16).int()
    return ((bits & 0xFFFF) | (bits.unsqueeze(1) << 16)).view(-1)


def _fill_fp8(out: Tensor, codes: Tensor, pairs: Tensor) -> None:
    out.copy_(pairs[codes.int()])


def _unpack_bits_in_rows(packed: Tensor, width: int, bits: int) -> Tensor:
    """Unpacks as its eager twin does, from bytes [B,bytes] to uint8 [B,8,32]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1, 1)
    groups = packed.view(-1, packed.shape[1] // width, 1, width // 32, 32)
    return ((groups >> shifts) & ((1 << bits) - 1)).view(-1, 8, 32)


def _repeat_in_rows(factors: Tensor) -> Tensor:
    """Repeats factors of 16 values each, [B,16,1], to [B,8,32]."""
    is_left = torch.arange(32, device=factors.device) < 16
    pairs = factors.view(-1, 8, 2, 1)
    return torch.where(is_left, pairs[:, :, 0], pairs[:, :, 1])


def _fill_scaled(out: Tensor, values: Tensor, scales: Tensor) -> None:
    out.view(-1, 32).copy_(values.view(-1, 32).float() * scales)


def _fill_scaled_and_moved(out: Tensor, values: Tensor, scales: Tensor, minimums: Tensor) -> None:
    out.view(-1, 32).copy_(values.view(-1, 32).float() * scales + minimums)


def _fill_q6_k(out: Tensor, low_bits: Tensor, high_bits: Tensor, scales: Tensor) -> None:
    values = _unpack_bits_in_rows(low_bits, 64, 4) | (_unpack_bits_in_rows(high_bits, 32, 2) << 4)
    out.view(-1, 8, 32).copy_((values.float() - 32) * _repeat_in_rows(scales))


def _fill_q5_k(
    out: Tensor, low_bits: Tensor, high_bits: Tensor, scales: Tensor, offsets: Tensor
) -> None:
    values = _unpack_bits_in_rows(low_bits, 32, 4) | (_unpack_bits_in_rows(high_bits, 32, 1) << 4)
    out.view(-1, 8, 32).copy_(values.float() * scales - offsets)


def _fill_q4_k(out: Tensor, low_bits: Tensor, scales: Tensor, offsets: Tensor) -> None:
    out.view(-1, 8, 32).copy_(_unpack_bits_in_rows(low_bits, 32, 4).float() * scales - offsets)


def _fill_q3_k(out: Tensor, low_bits: Tensor, high_bits: Tensor, scales: Tensor) -> None:
    values = _unpack_bits_in_rows(low_bits, 32, 2) | (_unpack_bits_in_rows(high_bits, 32, 1) << 2)
    out.view(-1, 8, 32).copy_((values.float() - 4) * _repeat_in_rows(scales))


def _fill_q2_k(out: Tensor, low_bits: Tensor, scales: Tensor, offsets: Tensor) -> None:
    values = _unpack_bits_in_rows(low_bits, 32, 2).float() * _repeat_in_rows(scales)
    out.view(-1, 8, 32).copy_(values - _repeat_in_rows(offsets))


_FUNCTIONS: Mapping[str, Callable[..., None]] = {
    "Q8_0": _fill_scaled,
    "Q5_1": _fill_scaled_and_moved,
    "Q5_0": _fill_scaled,
    "Q4_1": _fill_scaled_and_moved,
    "Q4_0": _fill_scaled,
    "Q6_K": _fill_q6_k,
    "Q5_K": _fill_q5_k,
    "Q4_K": _fill_q4_k,
    "Q3_K": _fill_q3_k,
    "Q2_K": _fill_q2_k,
    **dict.fromkeys(FP8, _fill_fp8),
}
"""Dtype -> function of `_list_arguments`; a GGUF type's are the parts of `split_scales`."""
