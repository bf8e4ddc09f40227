"""What stored bytes mean: the float32 values of weights in FP8, NVFP4 and GGUF's quantised kinds.

A block of GGUF has a scale in float16, and its values in a few bits each; blocks of 256 values also
have a scale for every 16 or 32 of them. The layouts are those of ggml, and every operation is
rounded as in the `gguf` package, so that the values are the same bit for bit on every device.

Legend: B blocks, V values of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from wan.checkpoint.files import FP8, GGUF


def dequantise(kind: str, stored: Tensor) -> Tensor:
    """Returns the float32 values of whole blocks.

    Args:
        kind: A kind of `GGUF`.
        stored: Bytes [rows, bytes of a row], uint8 or int8, on any device.

    Returns:
        The values, [rows, columns].
    """
    blocks = stored.view(torch.uint8).reshape(-1, GGUF[kind][1])
    return _VALUES[kind](blocks).view(len(stored), -1)


def _parts(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Splits blocks into parts of so many bytes."""
    return blocks.split(sizes, dim=1)


def _float(half: Tensor) -> Tensor:
    """Reads float16 from two bytes, as float32 [B,1]."""
    return half.contiguous().view(torch.float16).float()


def _unpacked(packed: Tensor, width: int, bits: int) -> Tensor:
    """Unpacks values of a few bits, uint8 [B,V].

    Of every `width` bytes the lowest bits come first, each byte's in turn, then the next bits.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    values = packed.reshape(len(packed), -1, 1, width) >> shifts
    return values.bitwise_and_((1 << bits) - 1).view(len(packed), -1)


def _q8_0(blocks: Tensor) -> Tensor:
    scale, values = _parts(blocks, 2, 32)
    return values.contiguous().view(torch.int8).float() * _float(scale)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, low = _parts(blocks, 2, 16)
    return _float(scale) * (_unpacked(low, 16, 4).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least, low = _parts(blocks, 2, 2, 16)
    return _float(scale) * _unpacked(low, 16, 4).float() + _float(least)


def _with_fifth(low: Tensor, fifth: Tensor, width: int) -> Tensor:
    """Joins four bits and a fifth one."""
    return _unpacked(low, max(width, 16), 4) | (_unpacked(fifth, width, 1) << 4)


def _q5_0(blocks: Tensor) -> Tensor:
    scale, fifth, low = _parts(blocks, 2, 4, 16)
    return _float(scale) * (_with_fifth(low, fifth, 1).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least, fifth, low = _parts(blocks, 2, 2, 4, 16)
    return _float(scale) * _with_fifth(low, fifth, 1).float() + _float(least)


def _q2_k(blocks: Tensor) -> Tensor:
    each, low, scale, least = _parts(blocks, 16, 64, 2, 2)
    values = _unpacked(low, 32, 2).view(-1, 16, 16).float()
    scales = (_float(scale) * (each & 15).float()).unsqueeze(-1)
    offsets = (_float(least) * (each >> 4).float()).unsqueeze(-1)
    return (scales * values - offsets).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    third, low, low_scales, high_scales, scale = _parts(blocks, 32, 64, 8, 4, 2)
    each = _unpacked(low_scales, 8, 4) | (_unpacked(high_scales, 4, 2) << 4)
    scales = _float(scale) * (each.float() - 32)
    values = _unpacked(low, 32, 2) | (_unpacked(third, 32, 1) << 2)
    return (scales.unsqueeze(-1) * (values.view(-1, 16, 16).float() - 4)).flatten(1)


def _scales(scale: Tensor, least: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and offsets of the eight parts of a block, [B,8,1] each."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (last & 15) | ((first >> 2) & 48)], dim=1)
    offsets = torch.cat([second & 63, (last >> 4) | ((second >> 2) & 48)], dim=1)
    return (
        (_float(scale) * scales.float()).unsqueeze(-1),
        (_float(least) * offsets.float()).unsqueeze(-1),
    )


def _q4_k(blocks: Tensor) -> Tensor:
    scale, least, packed, low = _parts(blocks, 2, 2, 12, 128)
    scales, offsets = _scales(scale, least, packed)
    return (scales * _unpacked(low, 32, 4).view(-1, 8, 32).float() - offsets).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, least, packed, fifth, low = _parts(blocks, 2, 2, 12, 32, 128)
    scales, offsets = _scales(scale, least, packed)
    values = _with_fifth(low, fifth, 32).view(-1, 8, 32).float()
    return (scales * values - offsets).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, each, scale = _parts(blocks, 128, 64, 16, 2)
    scales = _float(scale) * each.contiguous().view(torch.int8).float()
    values = _unpacked(low, 64, 4) | (_unpacked(high, 32, 2) << 4)
    return (scales.unsqueeze(-1) * (values.view(-1, 16, 16).float() - 32)).flatten(1)


def nvfp4(stored: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """Returns the float32 values of ComfyUI's NVFP4.

    Args:
        stored: Two values of four bits in each byte, the first in the high bits,
            [rows, columns / 2].
        scales: For each 16 values, [rows, columns / 16 or more], in FP8.
        scale: For all, float32 [1].

    Returns:
        The values, [rows, columns].
    """
    values = torch.tensor(_E2M1, device=stored.device)
    bits = torch.stack([stored >> 4, stored & 15], dim=-1).int()
    blocks = values[bits].view(len(stored), -1, 16)
    each = (scale * scales[:, : blocks.shape[1]].float()).unsqueeze(-1)
    return (blocks * each).flatten(1)


def untiled(scales: Tensor, rows: int) -> Tensor:
    """Returns the scales of NVFP4's blocks row by row; the file has them as cuBLAS takes them.

    Those are tiles of 128 rows and 4 columns, one after the other. A tile has 32 parts of 16
    values: the four columns of the rows n, n + 32, n + 64 and n + 96.
    """
    down = -(-rows // 128)
    tiles = scales.reshape(down, -1, 32, 4, 4).transpose(2, 3)  # [down, across, row, row, column]
    return tiles.permute(0, 2, 3, 1, 4).reshape(128 * down, -1)[:rows]


_E2M1 = [sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "Q5_1": _q5_1,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q4_1": _q4_1,
    "Q4_0": _q4_0,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
}
"""Kind -> the values [B,V] of its blocks, uint8 [B,bytes]."""
TO_FLOAT: Mapping[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(FP8, Tensor.float),
    **{kind: partial(dequantise, kind) for kind in _VALUES},
}
"""Kind -> what makes float32 of rows as they are stored; FP8 is then multiplied by its scale."""
