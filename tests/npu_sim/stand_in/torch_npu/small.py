"""Norms, rotary embedding and activations of torch_npu."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.chip import require, require_chip, require_dtype, require_same_dtype
from torch_npu.dense import HALF
from torch_npu.log import outputs_alone, record

FLOATS = (*HALF, torch.float32)


@outputs_alone
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(normalised over gamma's axes, reciprocal of the root mean square): computed in float32."""
    operation = "npu_rms_norm"
    record(operation, x, gamma)
    require_dtype(operation, FLOATS, x=x)
    require_same_dtype(operation, x=x, gamma=gamma)
    axes = tuple(range(-gamma.dim(), 0))
    require(x.shape[-gamma.dim() :] == gamma.shape, operation, f"gamma {tuple(gamma.shape)}.")
    rstd = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def _rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-odd, even], -1).flatten(-2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    turned = x.float() * cos.float() + _rotated(x.float(), mode) * sin.float()
    return turned.to(x.dtype)


@outputs_alone
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """x cos + rotated(x) sin, with r1 = cos and r2 = sin, of x's dtype.

    D even and below 896. interleave: B * N below 1000, and r1 varies over the sequence only.
    half: B and N below 1000 each, r1 may vary over the batch and the heads too.
    """
    operation = "npu_rotary_mul"
    record(operation, input, r1, mode=rotary_mode)
    require_chip(operation, "A2", "A3", "A5")
    require(rotary_mode in ("half", "interleave"), operation, f"unknown mode {rotary_mode}.")
    require_dtype(operation, FLOATS, input=input)
    require_same_dtype(operation, input=input, r1=r1, r2=r2)
    require(input.dim() == r1.dim() == r2.dim() == 4, operation, "4 dims are needed.")
    size = input.shape[-1]
    require(size % 2 == 0 and size < 896, operation, f"D {size} must be even and below 896.")
    require(r1.shape == r2.shape and r1.shape[-1] == size, operation, f"r1 {tuple(r1.shape)}.")
    long = [axis for axis in range(3) if r1.shape[axis] != 1]
    fits = all(r1.shape[axis] == input.shape[axis] for axis in long)
    require(fits, operation, f"r1 {tuple(r1.shape)} does not fit x {tuple(input.shape)}.")
    if rotary_mode == "interleave":
        require(len(long) <= 1, operation, f"r1 {tuple(r1.shape)}: 11SD, 1S1D or S11D.")
        others = input.shape[:3].numel() // max(r1.shape[:3])
        require(others < 1000, operation, f"B * N is {others}, must be below 1000.")
    return _rotate(input, r1, r2, rotary_mode)
