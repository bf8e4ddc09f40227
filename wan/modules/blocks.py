"""The transformer block and the head, with the official parameter names, and what they are made of.

Legend: B batch, L this device's tokens, T text tokens, C channels, N heads, D head size, R runs.

A run is a row of consecutive tokens with the same timestep; they share one row of modulation, which
is never expanded per token. A text-to-video forward has one run; the 5B image mode has two (first
frame at t=0, then the rest).

The matrix products run in the dtype of `context_BTC`, which is that of their weights; the residual
stream, the head and what is between two products (`small_ops`) in float32. In inference the
residual stream is updated in place, which saves one copy of it at the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan import trace
from wan.kernels.base import StepInfo
from wan.modules.interfaces import Collaborators, SendsWritten
from wan.modules.rope import RopeTable
from wan.modules.small_ops import BlockOps, Put
from wan.modules.textcache import TextKV

Runs = tuple[int, ...]
"""Lengths of this device's runs of tokens."""


@dataclass(frozen=True)
class BlockSizes:
    """What all blocks of a network have in common."""

    dim: int
    ffn_dim: int
    num_heads: int
    qk_norm: bool = True
    cross_attn_norm: bool = True
    eps: float = 1e-6
    image_tokens: bool = False  # before the text's, with keys and values of their own (Wan2.1)
    text_len: int = 512


@dataclass(frozen=True)
class ForwardInfo:
    """What all blocks of one forward pass get.

    Attributes:
        runs: Lengths of this device's runs of tokens.
        rope: The table's rows of this device's tokens.
        valid_len: Real tokens of the whole sequence.
        step: Where in the run this is, for attention layers.
    """

    runs: Runs
    rope: RopeTable
    valid_len: int
    step: StepInfo | None = None


class WanAttentionBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward; the timestep gates the first and third."""

    def __init__(
        self, sizes: BlockSizes, layer: int, collaborators: Collaborators | None = None
    ) -> None:
        super().__init__()
        given = Collaborators() if collaborators is None else collaborators
        dim, self.eps, self.ops = sizes.dim, sizes.eps, given.ops
        self.layer, self.attention_cache = layer, given.attention_cache
        self.self_attn = WanSelfAttention(sizes, layer, given)
        self.norm3 = nn.LayerNorm(dim, sizes.eps) if sizes.cross_attn_norm else nn.Identity()
        self.cross_attn = WanCrossAttention(sizes, given)
        self.ffn = nn.Sequential(
            nn.Linear(dim, sizes.ffn_dim), TanhGELU(given.ops), nn.Linear(sizes.ffn_dim, dim)
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self,
        x_BLC: Tensor,
        e0_BR6C: Tensor,
        context_BTC: Tensor,
        kv: TextKV | None,
        info: ForwardInfo,
    ) -> tuple[Tensor, TextKV]:
        """One block.

        Args:
            x_BLC: Residual stream, float32; in inference it is updated in place.
            e0_BR6C: Modulation of each run by its timestep, float32.
            context_BTC: Embedded text, behind image tokens if any, in the dtype of the products.
            kv: The text's keys and values of this layer; None: computed here.
            info: What all blocks are told.

        Returns:
            The residual stream, and the text's keys and values.
        """
        dtype, runs, ops = context_BTC.dtype, info.runs, self.ops
        modulation = self.modulation.float().unsqueeze(1) + e0_BR6C
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(2)

        def attend() -> Tensor:
            y_BLC = ops.modulated_norm(x_BLC, shift1, scale1, runs, self.eps, dtype)
            return self.self_attn(y_BLC, info)

        cache = self.attention_cache
        y_BLC = attend() if cache is None else cache(attend, info.step, self.layer)
        if isinstance(self.norm3, nn.LayerNorm):
            x_BLC, y_BLC = ops.gated_add_norm(x_BLC, y_BLC, gate1, runs, self.norm3, dtype)
        else:
            x_BLC = ops.gated_add(x_BLC, y_BLC, gate1, runs)
            y_BLC = x_BLC.to(dtype, copy=True)
        with trace.span("cross-attention"):
            kv = self.cross_attn.text_kv(context_BTC) if kv is None else kv
            y_BLC = self.cross_attn(y_BLC, kv)

        x_BLC, y_BLC = ops.add_modulated_norm(x_BLC, y_BLC, shift2, scale2, runs, self.eps, dtype)
        with trace.span("feed-forward"):
            y_BLC = self.ffn(y_BLC)
        return ops.gated_add(x_BLC, y_BLC, gate2, runs), kv


class Head(nn.Module):
    """Modulated norm and projection to the channels of a patch, in float32."""

    def __init__(self, dim: int, out_features: int, eps: float, ops: BlockOps) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.head = nn.Linear(dim, out_features)
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)

    def forward(self, x_BLC: Tensor, e_BRC: Tensor, runs: Runs) -> Tensor:
        shift, scale = (self.modulation.float().unsqueeze(1) + e_BRC.unsqueeze(2)).unbind(2)
        y_BLC = self.ops.modulated_norm(x_BLC, shift, scale, runs, self.eps, torch.float32)
        return fp32_linear(self.head, y_BLC)


class WanAttention(nn.Module):
    """The projections q, k, v, o of both attentions, and norms of q and k over all channels."""

    def __init__(self, sizes: BlockSizes, given: Collaborators) -> None:
        super().__init__()
        self.num_heads, self.ops, self.eps = sizes.num_heads, given.ops, sizes.eps
        self.q, self.k, self.v, self.o = (nn.Linear(sizes.dim, sizes.dim) for _ in range(4))
        self.norm_q, self.norm_k = (
            nn.RMSNorm(sizes.dim, sizes.eps) if sizes.qk_norm else nn.Identity() for _ in range(2)
        )

    def queries(
        self, x_BLC: Tensor, rope: RopeTable | None = None, put: Put | None = None
    ) -> Tensor:
        """[B,L,N,D], normalised (and rotated); `put` gets them in place of the caller."""
        with trace.span("project", what="q"):
            return self.normed(self.norm_q, self.q(x_BLC), rope, put)

    def keys(self, x_BLC: Tensor, rope: RopeTable | None = None, put: Put | None = None) -> Tensor:
        """As `queries`."""
        with trace.span("project", what="k"):
            return self.normed(self.norm_k, self.k(x_BLC), rope, put)

    def values(self, x_BLC: Tensor) -> Tensor:
        """[B,L,N,D]."""
        with trace.span("project", what="v"):
            return self.v(x_BLC).unflatten(-1, (self.num_heads, -1))

    def out(self, x_BLND: Tensor) -> Tensor:
        """[B,L,C]."""
        with trace.span("project", what="o"):
            return self.o(x_BLND.flatten(2))

    def normed(
        self,
        norm: nn.Module,
        x_BLC: Tensor,
        rope: RopeTable | None = None,
        put: Put | None = None,
    ) -> Tensor:
        """Normalised (and rotated) queries or keys [B,L,N,D]; x is used up."""
        weight_C = norm.weight if isinstance(norm, nn.RMSNorm) else None
        return self.ops.norm_heads(x_BLC, weight_C, self.num_heads, self.eps, rope, put)


class WanSelfAttention(WanAttention):
    """Every token attends to all tokens of the video."""

    def __init__(self, sizes: BlockSizes, layer: int, given: Collaborators) -> None:
        super().__init__(sizes, given)
        self.attention = given.attention(layer)

    def forward(self, x_BLC: Tensor, info: ForwardInfo) -> Tensor:
        known: dict[str, Any] = {"valid_len": info.valid_len, "step": info.step}
        call = None
        if isinstance(self.attention, SendsWritten):
            call = self.attention.begin(x_BLC, self.num_heads, info.step)
        if call is not None:
            self.queries(x_BLC, info.rope, partial(call.put, 0))
            self.keys(x_BLC, info.rope, partial(call.put, 1))
            call.put(2, self.values(x_BLC))
            return self.out(call.attend(**known))
        # The layer's arguments are given without names, so that they are freed when it returns.
        out_BLND = self.attention(
            self.queries(x_BLC, info.rope),
            self.keys(x_BLC, info.rope),
            self.values(x_BLC),
            **known,
        )
        return self.out(out_BLND)


class WanCrossAttention(WanAttention):
    """Every token attends to the text, its zero-padded rows included (as the official model).

    Image tokens, if any, have a softmax of their own, and the two results are added.
    """

    def __init__(self, sizes: BlockSizes, given: Collaborators) -> None:
        super().__init__(sizes, given)
        self.kernel, self.text_len = given.kernel, sizes.text_len
        self.k_img: nn.Linear | None = None
        if sizes.image_tokens:
            self.k_img, self.v_img = (nn.Linear(sizes.dim, sizes.dim) for _ in range(2))
            self.norm_k_img = nn.RMSNorm(sizes.dim, sizes.eps) if sizes.qk_norm else nn.Identity()

    def text_kv(self, context_BTC: Tensor) -> TextKV:
        """Keys and values of the text, and of the image; the same at every step of a prompt."""
        if self.k_img is None:
            return self.keys(context_BTC), self.values(context_BTC)
        text, image = context_BTC[:, -self.text_len :], context_BTC[:, : -self.text_len]
        return (
            self.keys(text),
            self.values(text),
            self.normed(self.norm_k_img, self.k_img(image)),
            self.v_img(image).unflatten(-1, (self.num_heads, -1)),
        )

    def forward(self, x_BLC: Tensor, kv: TextKV) -> Tensor:
        q_BLND = self.queries(x_BLC)
        out_BLND = self.kernel(q_BLND, *kv[:2])
        if len(kv) > 2:
            out_BLND = out_BLND + self.kernel(q_BLND, *kv[2:])
        return self.out(out_BLND)


class ImageEmbedding(nn.Module):
    """CLIP's features of one image, or of the first and the last one, as tokens (Wan2.1).

    It computes in float32.

    Args:
        dim_in: Channels of the features.
        dim: Channels of a token.
        positions: Tokens of both images where these have position embeddings of their own (first
            and last frame), else 0.
    """

    def __init__(self, dim_in: int, dim: int, positions: int = 0) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(dim_in),
            nn.Linear(dim_in, dim_in),
            nn.GELU(),
            nn.Linear(dim_in, dim),
            nn.LayerNorm(dim),
        )
        self.emb_pos = nn.Parameter(torch.zeros(1, positions, dim_in)) if positions else None

    def forward(self, features_NTC: Tensor) -> Tensor:
        """[1,T,C], or [1,2T,C] of two images."""
        x = features_NTC.float()
        if self.emb_pos is not None:
            x = x.reshape(-1, *self.emb_pos.shape[1:]) + self.emb_pos.float()
        for layer in self.proj:
            if isinstance(layer, nn.LayerNorm):
                affine = layer.weight.float(), layer.bias.float()
                x = F.layer_norm(x, layer.normalized_shape, *affine, layer.eps)
            else:
                x = fp32_linear(layer, x) if isinstance(layer, nn.Linear) else layer(x)
        return x


class TanhGELU(nn.Module):
    """GELU in its tanh form."""

    def __init__(self, ops: BlockOps) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.gelu(x)


def fp32_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """The layer applied in float32, also when its weights are stored in bfloat16."""
    return F.linear(x.float(), linear.weight.float(), linear.bias.float())
