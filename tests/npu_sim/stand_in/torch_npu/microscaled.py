"""MXFP8: E4M3 values with one power of two per 32 of them (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.chip import require, require_chip, require_dtype, require_shape
from torch_npu.dense import HALF
from torch_npu.log import record

GROUP = 32
BIAS = 127  # of E8M0
LARGEST_EXPONENT = 8  # of E4M3: 448 = 1.75 * 2^8


def npu_dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: torch.dtype | int = 296,
    block_size: int = GROUP,
    scale_alg: int = 0,
) -> tuple[Tensor, Tensor]:
    """(payload, scale): scale E8M0 as uint8 [..., groups / 2, 2], an odd last group beside a 0."""
    operation = "npu_dynamic_mx_quant"
    record(operation, input, dst_type=str(dst_type))
    require_chip(operation, "A5")
    require_dtype(operation, (*HALF, torch.float32), input=input)
    require(dst_type is torch.float8_e4m3fn, operation, f"dst_type {dst_type} is not simulated.")
    last = axis in (-1, input.dim() - 1)
    plain = last and round_mode == "rint" and block_size == GROUP and scale_alg == 0
    require(plain, operation, "other than the defaults is not simulated.")
    x = torch.nn.functional.pad(input.float(), (0, -input.shape[-1] % (2 * GROUP)))
    x = x.unflatten(-1, (-1, GROUP))
    largest = x.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT
    exponent = torch.where(largest > 0, exponent, -BIAS).clamp(-BIAS, BIAS)
    payload = torch.ldexp(x, -exponent[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = (exponent + BIAS).to(torch.uint8).unflatten(-1, (-1, 2))
    return payload.flatten(-2)[..., : input.shape[-1]], scale


def _widened(payload: Tensor, scale: Tensor) -> Tensor:
    """float32 [rows,K] from payload [rows,K] and scale [rows,K/64,2]."""
    powers = torch.ldexp(torch.ones(()), scale.to(torch.int32) - BIAS)
    spread = powers.flatten(-2).repeat_interleave(GROUP, -1)
    return payload.float() * spread[:, : payload.shape[1]]


def product(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: torch.dtype | None,
    dtypes: tuple,
    group_sizes: list[int] | None,
) -> Tensor:
    """npu_quant_matmul of [M,K] x [K,N], scales [K/64,N,2] and [M,K/64,2], bias float32 [N]."""
    operation = "npu_quant_matmul MXFP8"
    require_chip(operation, "A5")
    require_dtype(operation, (torch.float8_e4m3fn,), x1=x1, x2=x2)
    require(dtypes == 2 * (torch.float8_e8m0fnu,), operation, f"scale dtypes {dtypes}: E8M0.")
    require(group_sizes == [1, 1, GROUP], operation, f"group_sizes {group_sizes}: [1, 1, 32].")
    require(output_dtype in HALF, operation, f"output_dtype {output_dtype} is not simulated.")
    require(pertoken_scale is not None, operation, "pertoken_scale is needed.")
    require_dtype(operation, (torch.uint8,), scale=scale, pertoken_scale=pertoken_scale)
    (m, k), n = x1.shape, x2.shape[1]
    pairs = -(-k // (2 * GROUP))
    require_shape(operation, "x2", x2, (k, n))
    require_shape(operation, "scale", scale, (pairs, n, 2))
    require_shape(operation, "pertoken_scale", pertoken_scale, (m, pairs, 2))
    out = _widened(x1, pertoken_scale) @ _widened(x2.T, scale.transpose(0, 1)).T
    if bias is not None:
        require_dtype(operation, (torch.float32,), bias=bias)
        require_shape(operation, "bias", bias, (n,))
        out = out + bias
    return out.to(output_dtype)
