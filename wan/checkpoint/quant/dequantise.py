"""Dequantizes FP8, NVFP4 and GGUF weights to float32.

A GGUF block has a float16 scale and values of a few bits each; blocks of 256 values (the K types)
also have a scale per 16 or 32 values. The memory layouts are ggml's. Every operation rounds as in
the `gguf` package, so the values are bitwise equal on every device.

Legend: B blocks, V values of a block, R rows, I input channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from wan.checkpoint.formats.tensor_info import E4M3, E5M2, GGUF


def dequantize_gguf(qtype: str, data: Tensor) -> Tensor:
    """Dequantizes whole GGUF blocks.

    Args:
        qtype: A key of `GGUF`.
        data: [rows, bytes of a row], uint8 or int8, on any device.

    Returns:
        The values, float32 [rows, columns].
    """
    blocks = data.view(torch.uint8).reshape(-1, GGUF[qtype][1])
    parts = split_scales(qtype, blocks) if qtype in _SPLITTERS else (blocks,)
    return _DEQUANTIZERS[qtype](*parts).view(len(data), -1)


def split_scales(qtype: str, blocks: Tensor) -> tuple[Tensor, ...]:
    """Splits blocks [B,bytes] into values and computed factors; not of IQ4_NL, IQ4_XS and MXFP4.

    Returns:
        For K types the low bits, the high bits if there are any, the scale of each sub-block, and
        the offset that is subtracted from its values, if any; for other types the values as
        integers [B,V], their scale, and the added offset, if any.
    """
    return _SPLITTERS[qtype](blocks)


def _split_blocks(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Splits blocks [B,bytes] along their bytes."""
    return blocks.split(sizes, dim=1)


def _read_float16(data: Tensor) -> Tensor:
    """Converts float16 stored as two bytes [B,2] to float32 [B,1]."""
    return data.contiguous().view(torch.float16).float()


def _unpack_bits(packed: Tensor, width: int, bits: int) -> Tensor:
    """Unpacks values of 1, 2 or 4 bits to uint8 [B,V].

    Each group of `width` bytes holds first the values in the lowest bits of all its bytes, then
    those in the next higher bits. Up to eight bytes are computed at once, as one integer.
    """
    dtype = next(dtype for dtype in _INTEGERS if width % dtype.itemsize == 0)
    integers = packed.clone(memory_format=torch.contiguous_format).view(dtype)
    integers = integers.view(len(packed), -1, width // dtype.itemsize)
    mask = int.from_bytes(bytes([(1 << bits) - 1]) * dtype.itemsize)
    parts = [(integers >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=2).view(torch.uint8).view(len(packed), -1)


def _to_float(values: Tensor, offset: int = 0) -> Tensor:
    """Returns values - offset as float32, for uint8 values and differences below 128."""
    return values.view(torch.int8).sub_(offset).float() if offset else values.float()


def _split_q8_0(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, values = _split_blocks(blocks.view(torch.int8), 2, 32)
    return values, _read_float16(scale)


def _split_q4_0(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, low_bits = _split_blocks(blocks, 2, 16)
    return _unpack_bits(low_bits, 16, 4).view(torch.int8).sub_(8), _read_float16(scale)


def _split_q4_1(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, minimum, low_bits = _split_blocks(blocks, 2, 2, 16)
    return _unpack_bits(low_bits, 16, 4), _read_float16(scale), _read_float16(minimum)


def _scale_values(values: Tensor, scales: Tensor, minimums: Tensor | None = None) -> Tensor:
    scaled = values.float().mul_(scales)
    return scaled if minimums is None else scaled.add_(minimums)


def _unpack_5_bits(low_bits: Tensor, high_bits: Tensor, width: int) -> Tensor:
    """Combines the low four bits and the fifth bit of each value, uint8 [B,V]."""
    values = _unpack_bits(low_bits, max(width, 16), 4)
    return values.bitwise_or_(_unpack_bits(high_bits, width, 1).bitwise_left_shift_(4))


def _split_q5_0(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, high_bits, low_bits = _split_blocks(blocks, 2, 4, 16)
    values = _unpack_5_bits(low_bits, high_bits, 1).view(torch.int8).sub_(16)
    return values, _read_float16(scale)


def _split_q5_1(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, minimum, high_bits, low_bits = _split_blocks(blocks, 2, 2, 4, 16)
    values = _unpack_5_bits(low_bits, high_bits, 1)
    return values, _read_float16(scale), _read_float16(minimum)


def _split_q2_k(blocks: Tensor) -> tuple[Tensor, ...]:
    packed, low_bits, scale, min_scale = _split_blocks(blocks, 16, 64, 2, 2)
    scales = _read_float16(scale) * (packed & 15).float()
    offsets = _read_float16(min_scale) * (packed >> 4).float()
    return low_bits, scales.unsqueeze(-1), offsets.unsqueeze(-1)


def _dequantize_q2_k(low_bits: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    values = _to_float(_unpack_bits(low_bits, 32, 2)).view(-1, 16, 16)
    return values.mul_(scales).sub_(offsets).flatten(1)


def _split_q3_k(blocks: Tensor) -> tuple[Tensor, ...]:
    high_bits, low_bits, low_scales, high_scales, scale = _split_blocks(blocks, 32, 64, 8, 4, 2)
    sub_scales = _unpack_bits(low_scales, 8, 4) | (_unpack_bits(high_scales, 4, 2) << 4)
    scales = _read_float16(scale) * (sub_scales.float() - 32)
    return low_bits, high_bits, scales.unsqueeze(-1)


def _dequantize_q3_k(low_bits: Tensor, high_bits: Tensor, scales: Tensor) -> Tensor:
    values = _unpack_bits(low_bits, 32, 2)
    values.bitwise_or_(_unpack_bits(high_bits, 32, 1).bitwise_left_shift_(2))
    return _to_float(values, 4).view(-1, 16, 16).mul_(scales).flatten(1)


def _unpack_k_scales(scale: Tensor, min_scale: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks the scales and offsets of the eight sub-blocks of Q4_K and Q5_K, [B,8,1] each.

    Four bytes are computed at once, as one integer.
    """
    first, second, last = packed.contiguous().view(torch.int32).unbind(1)
    scales = first & 0x3F3F3F3F, (last & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
    offsets = second & 0x3F3F3F3F, ((last >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)
    return (
        (_read_float16(scale) * _join_bytes(scales)).unsqueeze(-1),
        (_read_float16(min_scale) * _join_bytes(offsets)).unsqueeze(-1),
    )


def _join_bytes(integers: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the bytes of two int32 [B] as float32 [B,8]."""
    return torch.stack(integers, dim=1).view(torch.uint8).float()


def _split_q4_k(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, min_scale, packed_scales, low_bits = _split_blocks(blocks, 2, 2, 12, 128)
    return low_bits, *_unpack_k_scales(scale, min_scale, packed_scales)


def _dequantize_q4_k(low_bits: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    values = _to_float(_unpack_bits(low_bits, 32, 4)).view(-1, 8, 32)
    return values.mul_(scales).sub_(offsets).flatten(1)


def _split_q5_k(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, min_scale, packed_scales, high_bits, low_bits = _split_blocks(blocks, 2, 2, 12, 32, 128)
    return low_bits, high_bits, *_unpack_k_scales(scale, min_scale, packed_scales)


def _dequantize_q5_k(
    low_bits: Tensor, high_bits: Tensor, scales: Tensor, offsets: Tensor
) -> Tensor:
    values = _to_float(_unpack_5_bits(low_bits, high_bits, 32)).view(-1, 8, 32)
    return values.mul_(scales).sub_(offsets).flatten(1)


def _split_q6_k(blocks: Tensor) -> tuple[Tensor, ...]:
    low_bits, high_bits, sub_scales, scale = _split_blocks(blocks, 128, 64, 16, 2)
    scales = _read_float16(scale) * sub_scales.contiguous().view(torch.int8).float()
    return low_bits, high_bits, scales.unsqueeze(-1)


def _dequantize_q6_k(low_bits: Tensor, high_bits: Tensor, scales: Tensor) -> Tensor:
    values = _unpack_bits(low_bits, 64, 4)
    values.bitwise_or_(_unpack_bits(high_bits, 32, 2).bitwise_left_shift_(4))
    return _to_float(values, 32).view(-1, 16, 16).mul_(scales).flatten(1)


def _look_up(values: list[int], low_bits: Tensor) -> Tensor:
    """Returns the float32 values of 4-bit codes, [B,V]; looks up both codes of a byte at once."""
    table = torch.tensor(values, dtype=torch.float32, device=low_bits.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1)
    looked_up = pairs.view(torch.int64).flatten().index_select(0, low_bits.flatten().int())
    looked_up = looked_up.view(torch.float32).view(len(low_bits), -1, 16, 2)
    return looked_up.transpose(2, 3).flatten(1)


def _dequantize_iq4_nl(blocks: Tensor) -> Tensor:
    scale, low_bits = _split_blocks(blocks, 2, 16)
    return _look_up(_IQ4, low_bits).mul_(_read_float16(scale))


def _dequantize_iq4_xs(blocks: Tensor) -> Tensor:
    scale, high_scales, low_scales, low_bits = _split_blocks(blocks, 2, 2, 4, 128)
    sub_scales = _unpack_bits(low_scales, 1, 4) | (_unpack_bits(high_scales, 1, 2) << 4)
    scales = (_read_float16(scale) * (sub_scales.float() - 32)).unsqueeze(-1)
    return _look_up(_IQ4, low_bits).view(-1, 8, 32).mul_(scales).flatten(1)


def _dequantize_mxfp4(blocks: Tensor) -> Tensor:
    exponents, low_bits = _split_blocks(blocks, 1, 16)
    exponents = exponents.int()
    # Half of 2^(exponent - 127), since the table has twice the values; subnormal below 2.
    bits = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return _look_up(_DOUBLED_E2M1, low_bits).mul_(bits.view(torch.float32))


def dequantize_nvfp4(packed: Tensor, block_scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """Dequantizes ComfyUI's NVFP4.

    Args:
        packed: uint8 [rows, columns / 2]: two 4-bit values per byte, the first in the high bits.
        block_scales: FP8 [rows, columns / 16 or more], one per 16 values.
        tensor_scale: float32 [1].

    Returns:
        The values, float32 [rows, columns].
    """
    values = torch.tensor(_E2M1, device=packed.device)
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).int()
    blocks = values[codes].view(len(packed), -1, 16)
    factors = (tensor_scale * block_scales[:, : blocks.shape[1]].float()).unsqueeze(-1)
    return (blocks * factors).flatten(1)


def multiply_by_block_scales(
    values_RI: Tensor, scales: Tensor, first_row: int, block: tuple[int, int]
) -> Tensor:
    """Multiplies rows of a weight in place by the scales of their blocks, and returns them.

    Args:
        values_RI: Float32, contiguous.
        scales: Float32 [blocks of rows, blocks of columns]; the last ones may be smaller.
        first_row: Row of the weight that is the first one here.
        block: Rows and columns of a block.
    """
    num_rows, columns = values_RI.shape
    rows = torch.arange(first_row, first_row + num_rows, device=scales.device)
    scales_RB = scales[rows // block[0]]
    if columns % block[1]:
        return values_RI.mul_(scales_RB.repeat_interleave(block[1], dim=1)[:, :columns])
    values_RI.view(num_rows, columns // block[1], block[1]).mul_(scales_RB.unsqueeze(-1))
    return values_RI


def convert_e4m3(values: Tensor) -> Tensor:
    """Converts E4M3 to float32; on CPUs through float16, for which there are vector instructions.

    Shifted to its place in float16, the exponent is too small by 8.
    """
    codes = values.view(torch.int8)
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return values.float()
    if codes.numel() and codes.bitwise_or(-128).max() == -1:  # NaN, all bits but the sign
        return values.float()
    bits = codes.short().bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign is extended
    return bits.view(torch.float16).float().mul_(256)


def untile_scales(scales: Tensor, num_rows: int) -> Tensor:
    """Converts NVFP4 block scales from the tiled layout of cuBLAS, as stored, to row-major.

    Tiles have 128 rows and 4 columns. A tile is 32 groups of 16 scales: the four columns of the
    rows n, n + 32, n + 64 and n + 96.
    """
    num_row_tiles = -(-num_rows // 128)
    # [down, across, row, row, column]
    tiles = scales.reshape(num_row_tiles, -1, 32, 4, 4).transpose(2, 3)
    return tiles.permute(0, 2, 3, 1, 4).reshape(128 * num_row_tiles, -1)[:num_rows]


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_E2M1 = [sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_DOUBLED_E2M1 = [sign * value for sign in (1, -1) for value in (0, 1, 2, 3, 4, 6, 8, 12)]
_IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
_SPLITTERS: Mapping[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "Q8_0": _split_q8_0,
    "Q6_K": _split_q6_k,
    "Q5_K": _split_q5_k,
    "Q5_1": _split_q5_1,
    "Q5_0": _split_q5_0,
    "Q4_K": _split_q4_k,
    "Q4_1": _split_q4_1,
    "Q4_0": _split_q4_0,
    "Q3_K": _split_q3_k,
    "Q2_K": _split_q2_k,
}
_DEQUANTIZERS: Mapping[str, Callable[..., Tensor]] = {
    "Q8_0": _scale_values,
    "Q6_K": _dequantize_q6_k,
    "Q5_K": _dequantize_q5_k,
    "Q5_1": _scale_values,
    "Q5_0": _scale_values,
    "Q4_K": _dequantize_q4_k,
    "Q4_1": _scale_values,
    "Q4_0": _scale_values,
    "Q3_K": _dequantize_q3_k,
    "Q2_K": _dequantize_q2_k,
    "IQ4_NL": _dequantize_iq4_nl,
    "IQ4_XS": _dequantize_iq4_xs,
    "MXFP4": _dequantize_mxfp4,
}
"""GGUF type -> function from blocks, uint8 [B,bytes], or their parts to float32 values [B,V]."""
TO_FLOAT: Mapping[str, Callable[[Tensor], Tensor]] = {
    E4M3: convert_e4m3,
    E5M2: Tensor.float,
    **{qtype: partial(dequantize_gguf, qtype) for qtype in _DEQUANTIZERS},
}
"""Dtype -> function from stored rows to float32; FP8 is multiplied by its scale afterwards."""
