"""The small float32 operations of a block, which a vendor's fused kernels may replace one by one.

Legend: B batch, S or L tokens, N heads, D head size, C channels. Results are float32 whatever the
input's dtype; weights and modulation too enter the arithmetic as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.modules.rope import RopeTable, apply_rope


def rms_norm(x_BLC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the channels; float32 [B,L,C]."""
    x = x_BLC.float()
    # The norm reduction reads x once; mean(x**2) would materialise x**2 first.
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
    return x * torch.rsqrt(mean_square + eps) * weight_C.float()


def layer_norm(x_BLC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the channels; float32 [B,L,C]."""
    weight, bias = (None if p is None else p.float() for p in (weight_C, bias_C))
    return F.layer_norm(x_BLC.float(), x_BLC.shape[-1:], weight, bias, eps)


def modulated_norm(x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor, eps: float) -> Tensor:
    """layer_norm(x) * (1 + scale) + shift, one row of modulation for all tokens; float32 [B,L,C].

    shift, scale: float32.
    """
    shape = x_BLC.shape[-1:]
    if x_BLC.shape[0] == 1:  # one row: it is the affine part of the norm, one pass over memory
        return F.layer_norm(x_BLC.float(), shape, 1 + scale_B1C[0, 0], shift_B1C[0, 0], eps)
    return torch.addcmul(shift_B1C, F.layer_norm(x_BLC.float(), shape, eps=eps), 1 + scale_B1C)


@dataclass(frozen=True)
class SmallOps:
    """Which functions compute the small operations; the plain ones unless others are given.

    A replacement takes and returns what its plain twin does: it sees a slice of the tokens, any
    float dtype (rope: float32), possibly strided, and must not change its inputs. rope: x [B,S,N,D]
    and the table of `rope_table`, (cos, signed sin) [S,1,D].
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor] = layer_norm
    modulated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = modulated_norm
    rope: Callable[[Tensor, RopeTable], Tensor] = apply_rope


PLAIN = SmallOps()
