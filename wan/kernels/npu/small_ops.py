"""Fused kernels of Ascend NPUs for the small operations of a block, through mindiesd and torch-npu.

Each function returns `ops` with the kernels of one value of fused_ops added. A kernel has the
arguments and, up to rounding, the float32 result of the function with its name in
`wan.modules.fused_ops` or `wan.modules.rope`.

layer_norm also replaces the layer norm inside modulated_norm; scale_shift replaces modulated_norm
by a single kernel.

Legend: B batch, S or L tokens, N heads, D head size, C channels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from wan.kernels.interfaces import Load, SmallOps

_ROTARY_GROUPS_LIMIT = 1000  # npu_rotary_mul's interleave mode takes B * N below this ...
_ROTARY_HEAD_DIM_LIMIT = 896  # ... and D below this


def rms_norm(ops: SmallOps, load: Load) -> SmallOps:
    # The operator of mindiesd.RMSNorm, a module that cannot take the weight as an argument.
    kernel = load("torch_npu:npu_rms_norm")

    def rms_norm(x_BLC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        return kernel(x_BLC.float(), weight_C.float(), epsilon=eps)[0]

    return replace(ops, rms_norm=rms_norm)


def layer_norm(ops: SmallOps, load: Load) -> SmallOps:
    # The operator of mindiesd.fast_layernorm, which takes weight and bias from a module.
    layernorm = load("mindiesd.layers._custom_ops:layernorm")

    def layer_norm(
        x_BLC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float
    ) -> Tensor:
        weight, bias = (None if p is None else p.float() for p in (weight_C, bias_C))
        x = x_BLC.float()
        return layernorm(
            x=x, normalized_shape=[x.shape[-1]], weight=weight, bias=bias, eps=eps, impl_mode=0
        )[0]

    def modulated_norm(x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor, eps: float) -> Tensor:
        if x_BLC.shape[0] == 1:  # one sample: they are a weight and a bias
            return layer_norm(x_BLC, 1 + scale_B1C[0, 0], shift_B1C[0, 0], eps)
        return torch.addcmul(shift_B1C, layer_norm(x_BLC, None, None, eps), 1 + scale_B1C)

    return replace(ops, layer_norm=layer_norm, modulated_norm=modulated_norm)


def scale_shift(ops: SmallOps, load: Load) -> SmallOps:
    layernorm_scale_shift = load("mindiesd:layernorm_scale_shift")
    # mindiesd takes only the number of channels and eps from the module: one serves all layers.
    make_norm = lru_cache(
        lambda num_channels, eps: nn.LayerNorm(num_channels, eps, elementwise_affine=False)
    )

    def modulated_norm(x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor, eps: float) -> Tensor:
        module = make_norm(x_BLC.shape[-1], eps)
        return layernorm_scale_shift(module, x_BLC.float(), scale_B1C, shift_B1C, fused=True)

    return replace(ops, modulated_norm=modulated_norm)


def rope(ops: SmallOps, load: Load) -> SmallOps:
    rotary_position_embedding = load("mindiesd:rotary_position_embedding")

    def rope(x_BSND: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        batch, _, num_heads, head_dim = x_BSND.shape
        if batch * num_heads >= _ROTARY_GROUPS_LIMIT or head_dim >= _ROTARY_HEAD_DIM_LIMIT:
            raise ValueError(
                f"The fused RoPE takes batch * heads below {_ROTARY_GROUPS_LIMIT} and heads below "
                f"{_ROTARY_HEAD_DIM_LIMIT} channels, not {batch * num_heads} and {head_dim}; leave "
                "rope out of --fused_ops."
            )
        cos_S1D, signed_sin_S1D = table
        # mindiesd calls npu_rotary_mul, which rotates channel pairs on every NPU;
        # npu_apply_rotary_pos_emb does so on A5 only. The table has (-sin, sin) for each pair, the
        # kernel takes (sin, sin) and negates the first sine.
        sin_S1D = signed_sin_S1D[..., 1::2].repeat_interleave(2, dim=-1)
        return rotary_position_embedding(
            x_BSND,
            cos_S1D[None],
            sin_S1D[None],
            "rotated_interleaved",
            head_first=False,
            fused=True,
        )

    return replace(ops, rope=rope)
