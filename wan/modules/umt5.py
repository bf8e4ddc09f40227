"""The encoder of UMT5 (arXiv:2304.09151), with the tensor names of transformers' UMT5EncoderModel.

It has the operations of transformers' eager attention in their order, so its results are bit-equal;
importing transformers takes as long as a short video on a small machine.

Legend: B batch, T tokens, C channels, N heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

_MAX_DISTANCE = 128  # from which on all distances share a bucket
_EPS = 1e-6


class Umt5Encoder(nn.Module):
    """Encodes token ids. Its arguments have the names of transformers' UMT5Config."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        d_kv: int,
        d_ff: int,
        num_layers: int,
        num_heads: int,
        relative_attention_num_buckets: int = 32,
    ) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder: Any = nn.Module()
        self.encoder.block = nn.ModuleList(
            _Block(d_model, d_kv, d_ff, num_heads, relative_attention_num_buckets)
            for _ in range(num_layers)
        )
        self.encoder.final_layer_norm = _RmsNorm(d_model)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Encodes tokens to [B,T,C].

        Args:
            ids_BT: Token ids, int64.
            mask_BT: 1 for tokens, 0 for padding, which is never attended to.
        """
        x_BTC = self.shared(ids_BT)
        mask_B11T = torch.zeros(mask_BT.shape, dtype=x_BTC.dtype, device=x_BTC.device)
        mask_B11T = mask_B11T.masked_fill(mask_BT == 0, torch.finfo(x_BTC.dtype).min)
        mask_B11T = mask_B11T[:, None, None]
        for block in self.encoder.block:
            x_BTC = block(x_BTC, mask_B11T)
        out_BTC: Tensor = self.encoder.final_layer_norm(x_BTC)
        return out_BTC


class _Block(nn.Module):
    def __init__(self, dim: int, head_dim: int, ff_dim: int, heads: int, buckets: int) -> None:
        super().__init__()
        attention = _AttentionLayer(dim, head_dim, heads, buckets)
        self.layer = nn.ModuleList([attention, _FeedForwardLayer(dim, ff_dim)])

    def forward(self, x_BTC: Tensor, mask_B11T: Tensor) -> Tensor:
        attention, feed_forward = self.layer
        return feed_forward(attention(x_BTC, mask_B11T))


class _AttentionLayer(nn.Module):
    def __init__(self, dim: int, head_dim: int, heads: int, buckets: int) -> None:
        super().__init__()
        self.SelfAttention = _RelativeAttention(dim, head_dim, heads, buckets)
        self.layer_norm = _RmsNorm(dim)

    def forward(self, x_BTC: Tensor, mask_B11T: Tensor) -> Tensor:
        return x_BTC + self.SelfAttention(self.layer_norm(x_BTC), mask_B11T)


class _RelativeAttention(nn.Module):
    """Attention without scaling of the products, with a bias for each relative position."""

    def __init__(self, dim: int, head_dim: int, heads: int, buckets: int) -> None:
        super().__init__()
        self.num_heads, self.num_buckets = heads, buckets
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, dim, bias=False)
        self.relative_attention_bias = nn.Embedding(buckets, heads)

    def forward(self, x_BTC: Tensor, mask_B11T: Tensor) -> Tensor:
        q_BNTD, k_BNTD, v_BNTD = (
            linear(x_BTC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        buckets_TT = assign_buckets(x_BTC.shape[1], self.num_buckets, x_BTC.device)
        bias_NTT = self.relative_attention_bias(buckets_TT).permute(2, 0, 1)
        scores_BNTT = q_BNTD @ k_BNTD.transpose(2, 3) + bias_NTT + mask_B11T
        return self.o((scores_BNTT.softmax(-1) @ v_BNTD).transpose(1, 2).flatten(2))


class _FeedForwardLayer(nn.Module):
    def __init__(self, dim: int, ff_dim: int) -> None:
        super().__init__()
        self.DenseReluDense = _GatedGelu(dim, ff_dim)
        self.layer_norm = _RmsNorm(dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC + self.DenseReluDense(self.layer_norm(x_BTC))


class _GatedGelu(nn.Module):
    def __init__(self, dim: int, ff_dim: int) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(dim, ff_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(ff_dim, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate = self.wi_0(x_BTC)
        # Written out: PyTorch's fused approximation rounds differently.
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3.0))
        return self.wo(0.5 * gate * (1.0 + inner.tanh()) * self.wi_1(x_BTC))


class _RmsNorm(nn.Module):
    """Divides by the root mean square over the channels, in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTC: Tensor) -> Tensor:
        mean_square = x_BTC.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x_BTC * torch.rsqrt(mean_square + _EPS)).to(self.weight.dtype)


def assign_buckets(num_tokens: int, num_buckets: int, device: torch.device) -> Tensor:
    """Assigns the distance of each pair of tokens (query, key) to a bucket; int64 [T,T].

    Keys after the query have the upper half of the buckets. In each half, short distances have a
    bucket each, and the longer ones share buckets whose widths grow exponentially.
    """
    positions = torch.arange(num_tokens, device=device)
    offset_TT = positions[None] - positions[:, None]
    distance_TT, half = offset_TT.abs(), num_buckets // 2
    num_exact = half // 2
    log_ratio = torch.log(distance_TT.float() / num_exact) / math.log(_MAX_DISTANCE / num_exact)
    # The logarithm of distance 0 is replaced below.
    shared = (num_exact + (log_ratio * (half - num_exact)).to(torch.int64)).clamp(max=half - 1)
    buckets_TT = torch.where(distance_TT < num_exact, distance_TT, shared)
    return buckets_TT + (offset_TT > 0) * half
