"""Quantising operators of torch_npu and the products of quantised matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_npu import microscaled
from torch_npu.chip import require, require_chip, require_dtype
from torch_npu.dense import HALF
from torch_npu.log import outputs_alone, record

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
NZ = 29


@outputs_alone
def npu_dynamic_block_quant(
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: torch.dtype = torch.int8,
    row_block_size: int = 1,
    col_block_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """(payload, scale): scale float32 [..., ceil(rows/row block), ceil(columns/col block)].

    scale = max |x| / largest value of dst_type over a block of rows x columns; payload = x / scale.
    A block of zeros: what the real operator gives is not documented; here scale 0, payload 0.
    """
    operation = "npu_dynamic_block_quant"
    record(operation, x, rows=row_block_size, columns=col_block_size, dst_type=str(dst_type))
    require(x.dim() in (2, 3), operation, f"2 or 3 dims are needed, got {x.dim()}.")
    require_dtype(operation, HALF, x=x)
    require(dst_type in LARGEST, operation, f"dst_type {dst_type} is not simulated.")
    require(col_block_size == 128, operation, f"col_block_size {col_block_size}, only 128.")
    require(round_mode == "rint" and min_scale == 0, operation, "rint, min_scale 0 only.")
    if dst_type is not torch.int8:
        require_chip(operation + f" to {dst_type}", "A5")
        allowed = (1, 128, 256, 512)
    else:
        allowed = (1,)
    require(row_block_size in allowed, operation, f"row_block_size {row_block_size}: {allowed}.")
    rows, columns = x.shape[-2:]
    scale = _block_max(x.float().abs(), row_block_size, col_block_size) / LARGEST[dst_type]
    spread = scale.repeat_interleave(row_block_size, -2).repeat_interleave(col_block_size, -1)
    return _rounded(x.float(), spread[..., :rows, :columns], dst_type), scale


def _block_max(x: Tensor, rows: int, columns: int) -> Tensor:
    pad = (-x.shape[-1] % columns, -x.shape[-2] % rows)
    x = torch.nn.functional.pad(x, (0, pad[0], 0, pad[1]))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax((-3, -1))


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.where(scale > 0, x / scale, 0)
    limit = LARGEST[dtype]
    x = x.clamp(-limit, limit)
    return x.round().to(dtype) if dtype is torch.int8 else x.to(dtype)


def npu_dynamic_quant(
    x: Tensor, *, smooth_scales: Tensor | None = None, dst_type: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor]:
    """(payload, scale): one float32 scale per row of the last axis."""
    operation = "npu_dynamic_quant"
    record(operation, x, dst_type=str(dst_type))
    require_dtype(operation, HALF, x=x)
    require(x.dim() >= 2, operation, f"2 dims or more are needed, got {x.dim()}.")
    require(dst_type in LARGEST, operation, f"dst_type {dst_type} is not simulated.")
    require(smooth_scales is None, operation, "smooth_scales are not simulated.")
    if dst_type is not torch.int8:
        require_chip(operation + f" to {dst_type}", "A5")
    scale = x.float().abs().amax(-1) / LARGEST[dst_type]
    return _rounded(x.float(), scale[..., None], dst_type), scale


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    pertoken_scale_dtype: torch.dtype | None = None,
    group_sizes: list[int] | None = None,
) -> Tensor:
    """[M,K] x [K,N] in integers, then scale [N] (or [1]), pertoken_scale [M], a float bias [N].

    group_sizes: MXFP8 instead, see `microscaled`.
    """
    operation = "npu_quant_matmul"
    record(operation, x1, x2)
    if group_sizes is not None:
        dtypes = (scale_dtype, pertoken_scale_dtype)
        return microscaled.product(
            x1, x2, scale, pertoken_scale, bias, output_dtype, dtypes, group_sizes
        )
    require_dtype(operation, (torch.int8,), x1=x1, x2=x2)
    _require_product(operation, x1, x2, scale, pertoken_scale, bias)
    _require_scales(operation, scale, pertoken_scale, bias, output_dtype)
    require(offset is None, operation, "offset is not simulated.")
    # float64 holds the integer sums exactly up to K = 2^37, and multiplies faster than int64
    product = x1.double() @ x2.double()
    assert pertoken_scale is not None
    out = product.float() * scale.float() * pertoken_scale[:, None]
    out = out if bias is None else out + bias.float()
    return out.to(output_dtype)


def _require_product(
    operation: str, x1: Tensor, x2: Tensor, scale: Tensor, rows: Tensor | None, bias: Tensor | None
) -> None:
    require(x1.dim() == x2.dim() == 2, operation, "two matrices are simulated.")
    (m, k), (k2, n) = x1.shape, x2.shape
    require(k <= 65535, operation, f"K {k} is above 65535.")
    require(k == k2, operation, f"inner sizes differ: {tuple(x1.shape)} and {tuple(x2.shape)}.")
    require(tuple(scale.shape) in ((n,), (1,)), operation, f"scale {tuple(scale.shape)}, N {n}.")
    require(rows is not None, operation, "without pertoken_scale it is not simulated.")
    require(tuple(rows.shape) == (m,), operation, f"pertoken_scale {tuple(rows.shape)}, M {m}.")
    if bias is not None:
        require(tuple(bias.shape) == (n,), operation, f"bias {tuple(bias.shape)}, N {n}.")


def _require_scales(
    operation: str, scale: Tensor, rows: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> None:
    """Which dtypes go together, by the operator's own table."""
    require(dtype in HALF, operation, f"output_dtype {dtype} is not simulated.")
    require_chip(operation + " with pertoken_scale", "A2", "A3", "A5")
    require_dtype(operation, (torch.float32,), pertoken_scale=rows)
    more = (torch.bfloat16,) if dtype is torch.bfloat16 else ()
    require_dtype(operation, (torch.float32, *more), scale=scale)
    if bias is not None:
        require_dtype(operation, (dtype, torch.float32), bias=bias)


def npu_format_cast(x: Tensor, acl_format: int, customize_dtype: torch.dtype | None = None):
    """The memory order of the cube unit cannot be seen from outside: the same tensor."""
    record("npu_format_cast", x, format=acl_format)
    require(acl_format in (2, NZ), "npu_format_cast", f"format {acl_format} is not simulated.")
    return x


def get_npu_format(x: Tensor) -> int:
    return 2


def npu_dtype_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    require(isinstance(dtype, torch.dtype), "npu_dtype_cast", f"{dtype} is not simulated.")
    return x.to(dtype)


def dequantised(x: Tensor, scale: Tensor, rows: int) -> Tensor:
    """float32 [B,N,S,D] from payload and scale [B,N,ceil(S/rows),1]."""
    spread = scale.repeat_interleave(rows, 2)[:, :, : x.shape[2]]
    return x.float() * spread


def require_block_scale(operation: str, what: str, x: Tensor, scale: Tensor, rows: int) -> None:
    """scale must be float32 [B,N,ceil(S/rows),1] for x [B,N,S,D]."""
    shape = (*x.shape[:2], math.ceil(x.shape[2] / rows), 1)
    require(scale is not None, operation, f"the scale of {what} is missing.")
    require_dtype(operation, (torch.float32,), **{f"{what} scale": scale})
    require(
        tuple(scale.shape) == shape,
        operation,
        f"the scale of {what} is {tuple(scale.shape)}; needed: {shape}.",
    )
