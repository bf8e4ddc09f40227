"""The transformer block and the head, with the official parameter names.

Legend: B batch, L this device's tokens, T text tokens, C channels, N heads, D head size, R runs of
tokens that share a timestep.

The blocks' matrix products run in the dtype of `context_BTC`, which is that of their weights; the
residual stream, norms, modulation, RoPE and the head in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wan.kernels.base import Kernel
from wan.modules.layers import (
    TanhGELU,
    WanLayerNorm,
    WanRMSNorm,
    by_slices,
    fp32_linear,
    gated_add,
    modulated_norm,
    residual_add,
)
from wan.modules.local import Attention
from wan.modules.ops import PLAIN, SmallOps
from wan.modules.rope import RopeTable
from wan.modules.step import StepInfo
from wan.modules.textcache import TextKV


class WanAttention(nn.Module):
    """The projections both attentions have: q, k, v, o, and norms of q and k over all channels."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool, eps: float, ops: SmallOps) -> None:
        super().__init__()
        self.num_heads, self.ops = num_heads, ops
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = (
            WanRMSNorm(dim, eps, ops) if qk_norm else nn.Identity() for _ in range(2)
        )

    def heads(self, x_BLC: Tensor) -> Tensor:
        """[B,L,C] -> [B,L,N,D]."""
        return x_BLC.unflatten(-1, (self.num_heads, -1))


class WanSelfAttention(WanAttention):
    """Every token attends to all tokens of the video."""

    def forward(
        self,
        x_BLC: Tensor,
        rope: RopeTable,
        attention: Attention,
        valid_len: int,
        step: StepInfo | None,
        layer: int,
    ) -> Tensor:
        # The kernel's arguments are given without names, so that they are freed when it returns.
        out_BLND = attention(
            self.norm_rope(self.norm_q, self.q(x_BLC), rope),
            self.norm_rope(self.norm_k, self.k(x_BLC), rope),
            self.heads(self.v(x_BLC)),
            valid_len=valid_len,
            step=step,
            layer=layer,
        )
        return self.o(out_BLND.flatten(2))

    def norm_rope(self, norm: nn.Module, x_BLC: Tensor, rope: RopeTable) -> Tensor:
        """Normalised and rotated queries or keys [B,L,N,D], in float32 on the way; x is used up."""

        def compute(x_BLC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return self.ops.rope(self.heads(norm(x_BLC).float()), (cos, sin)).flatten(2)

        return self.heads(by_slices(compute, x_BLC, x_BLC.dtype, *rope, overwrite=True))


class WanCrossAttention(WanAttention):
    """Every token attends to the text, its zero-padded rows included (as the official model)."""

    def text_kv(self, context_BTC: Tensor) -> TextKV:
        """The text's keys and values; the same at every step of a prompt."""
        k = by_slices(self.norm_k, self.k(context_BTC), context_BTC.dtype, overwrite=True)
        return self.heads(k), self.heads(self.v(context_BTC))

    def forward(self, x_BLC: Tensor, kv: TextKV, kernel: Kernel) -> Tensor:
        q_BLND = self.heads(by_slices(self.norm_q, self.q(x_BLC), x_BLC.dtype, overwrite=True))
        return self.o(kernel(q_BLND, *kv).flatten(2))


class WanAttentionBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward; the timestep gates the first and last."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        num_heads: int,
        *,
        qk_norm: bool,
        cross_attn_norm: bool,
        eps: float,
        layer: int,
        attention: Attention,
        kernel: Kernel,
        ops: SmallOps = PLAIN,
    ) -> None:
        super().__init__()
        self.layer, self.eps, self.ops = layer, eps, ops
        self.attention, self.kernel = attention, kernel
        self.self_attn = WanSelfAttention(dim, num_heads, qk_norm, eps, ops)
        self.norm3 = WanLayerNorm(dim, eps, ops) if cross_attn_norm else nn.Identity()
        self.cross_attn = WanCrossAttention(dim, num_heads, qk_norm, eps, ops)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), TanhGELU(), nn.Linear(ffn_dim, dim))
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self,
        x_BLC: Tensor,
        e0_BR6C: Tensor,
        runs: tuple[int, ...],
        context_BTC: Tensor,
        kv: TextKV | None,
        rope: RopeTable,
        valid_len: int,
        step: StepInfo | None,
    ) -> tuple[Tensor, TextKV]:
        """The new float32 residual stream (x itself in inference) and the text K/V it used."""
        dtype = context_BTC.dtype
        modulation = self.modulation.float().unsqueeze(1) + e0_BR6C
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(2)

        y_BLC = modulated_norm(x_BLC, shift1, scale1, runs, self.eps, dtype, self.ops)
        y_BLC = self.self_attn(y_BLC, rope, self.attention, valid_len, step, self.layer)
        x_BLC = gated_add(x_BLC, y_BLC, gate1, runs)

        kv = self.cross_attn.text_kv(context_BTC) if kv is None else kv
        y_BLC = by_slices(self.norm3, x_BLC, dtype)
        x_BLC = residual_add(x_BLC, self.cross_attn(y_BLC, kv, self.kernel))

        y_BLC = modulated_norm(x_BLC, shift2, scale2, runs, self.eps, dtype, self.ops)
        return gated_add(x_BLC, self.ffn(y_BLC), gate2, runs), kv


class Head(nn.Module):
    """Modulated norm and projection to the channels of a patch, in float32."""

    def __init__(self, dim: int, out_features: int, eps: float, ops: SmallOps) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.head = nn.Linear(dim, out_features)
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)

    def forward(self, x_BLC: Tensor, e_BRC: Tensor, runs: tuple[int, ...]) -> Tensor:
        shift, scale = (self.modulation.float().unsqueeze(1) + e_BRC.unsqueeze(2)).unbind(2)
        normed = modulated_norm(x_BLC, shift, scale, runs, self.eps, torch.float32, self.ops)
        return fp32_linear(self.head, normed)
