"""The transformer block and the head, with the official parameter names, and what they are made of.

Legend: B batch, L this device's tokens, T text tokens, C channels, N heads, D head size, R runs.

A run is a row of consecutive tokens with the same timestep; they share one row of modulation, which
is never expanded per token. A text-to-video forward has one run; the 5B image mode has two (first
frame at t=0, then the rest).

The matrix products run in the dtype of `context_BTC`, which is that of their weights; the residual
stream, norms, modulation, RoPE and the head in float32. In inference the residual stream is updated
in place, which saves one copy of it at the peak, and the float32 steps between two matrix products
run on a slice of tokens at a time (`by_slices`); with autograd on, every operation returns a new
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.kernels.base import PLAIN, SmallOps, StepInfo
from wan.modules.interfaces import Collaborators
from wan.modules.rope import RopeTable, apply_rope
from wan.modules.textcache import TextKV
from wan.settings.numerics import acts_as, slice_elements
from wan.torch_private import gelu_in_place

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


@dataclass(frozen=True)
class ForwardInfo:
    """What all blocks of one forward pass are told.

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
    """Self-attention, cross-attention, feed-forward; the timestep gates the first and last."""

    def __init__(
        self, sizes: BlockSizes, layer: int, collaborators: Collaborators | None = None
    ) -> None:
        super().__init__()
        given = Collaborators() if collaborators is None else collaborators
        dim, eps, ops = sizes.dim, sizes.eps, given.ops
        self.norm1, self.norm2 = ModulatedNorm(eps, ops), ModulatedNorm(eps, ops)
        self.self_attn = WanSelfAttention(sizes, layer, given)
        self.norm3 = WanLayerNorm(dim, eps, ops) if sizes.cross_attn_norm else nn.Identity()
        self.cross_attn = WanCrossAttention(sizes, given)
        self.ffn = nn.Sequential(
            nn.Linear(dim, sizes.ffn_dim), TanhGELU(), nn.Linear(sizes.ffn_dim, dim)
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
            context_BTC: Embedded text, in the dtype of the matrix products.
            kv: The text's keys and values of this layer; None: computed here.
            info: What all blocks are told.

        Returns:
            The residual stream, and the text's keys and values.
        """
        dtype, runs = context_BTC.dtype, info.runs
        modulation = self.modulation.float().unsqueeze(1) + e0_BR6C
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(2)

        y_BLC = self.norm1(x_BLC, shift1, scale1, runs, dtype)
        y_BLC = self.self_attn(y_BLC, info)
        x_BLC = gated_add(x_BLC, y_BLC, gate1, runs)

        kv = self.cross_attn.text_kv(context_BTC) if kv is None else kv
        y_BLC = by_slices(self.norm3, x_BLC, dtype)
        x_BLC = residual_add(x_BLC, self.cross_attn(y_BLC, kv))

        y_BLC = self.norm2(x_BLC, shift2, scale2, runs, dtype)
        return gated_add(x_BLC, self.ffn(y_BLC), gate2, runs), kv


class Head(nn.Module):
    """Modulated norm and projection to the channels of a patch, in float32."""

    def __init__(self, dim: int, out_features: int, eps: float, ops: SmallOps = PLAIN) -> None:
        super().__init__()
        self.norm = ModulatedNorm(eps, ops)
        self.head = nn.Linear(dim, out_features)
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)

    def forward(self, x_BLC: Tensor, e_BRC: Tensor, runs: Runs) -> Tensor:
        shift, scale = (self.modulation.float().unsqueeze(1) + e_BRC.unsqueeze(2)).unbind(2)
        return fp32_linear(self.head, self.norm(x_BLC, shift, scale, runs, torch.float32))


class WanAttention(nn.Module):
    """The projections both attentions have: q, k, v, o, and norms of q and k over all channels."""

    def __init__(self, sizes: BlockSizes, ops: SmallOps) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(sizes.dim, sizes.dim) for _ in range(4))
        self.norm_q, self.norm_k = (
            WanRMSNorm(sizes.dim, sizes.eps, ops) if sizes.qk_norm else nn.Identity()
            for _ in range(2)
        )

    def heads(self, x_BLC: Tensor) -> Tensor:
        """[B,L,C] -> [B,L,N,D]."""
        return x_BLC.unflatten(-1, (self.num_heads, -1))


class WanSelfAttention(WanAttention):
    """Every token attends to all tokens of the video."""

    def __init__(self, sizes: BlockSizes, layer: int, given: Collaborators) -> None:
        super().__init__(sizes, given.ops)
        self.layer, self.attention = layer, given.attention
        self.rope = given.ops.rope or apply_rope

    def forward(self, x_BLC: Tensor, info: ForwardInfo) -> Tensor:
        # The layer's arguments are given without names, so that they are freed when it returns.
        out_BLND = self.attention(
            self.norm_rope(self.norm_q, self.q(x_BLC), info.rope),
            self.norm_rope(self.norm_k, self.k(x_BLC), info.rope),
            self.heads(self.v(x_BLC)),
            valid_len=info.valid_len,
            step=info.step,
            layer=self.layer,
        )
        return self.o(out_BLND.flatten(2))

    def norm_rope(self, norm: nn.Module, x_BLC: Tensor, rope: RopeTable) -> Tensor:
        """Normalised and rotated queries or keys [B,L,N,D], in float32 on the way; x is used up."""

        def compute(x_BLC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return self.rope(self.heads(norm(x_BLC).float()), (cos, sin)).flatten(2)

        return self.heads(by_slices(compute, x_BLC, x_BLC.dtype, *rope, overwrite=True))


class WanCrossAttention(WanAttention):
    """Every token attends to the text, its zero-padded rows included (as the official model)."""

    def __init__(self, sizes: BlockSizes, given: Collaborators) -> None:
        super().__init__(sizes, given.ops)
        self.kernel = given.kernel

    def text_kv(self, context_BTC: Tensor) -> TextKV:
        """The text's keys and values; the same at every step of a prompt."""
        k = by_slices(self.norm_k, self.k(context_BTC), context_BTC.dtype, overwrite=True)
        return self.heads(k), self.heads(self.v(context_BTC))

    def forward(self, x_BLC: Tensor, kv: TextKV) -> Tensor:
        q_BLND = self.heads(by_slices(self.norm_q, self.q(x_BLC), x_BLC.dtype, overwrite=True))
        return self.o(self.kernel(q_BLND, *kv).flatten(2))


class ModulatedNorm(nn.Module):
    """layer_norm(x) * (1 + scale) + shift with each run's own row; float32 inside, dtype out."""

    def __init__(self, eps: float, ops: SmallOps = PLAIN) -> None:
        super().__init__()
        self.eps, self.compute = eps, ops.modulated_norm or modulated_norm

    def forward(
        self,
        x_BLC: Tensor,
        shift_BRC: Tensor,
        scale_BRC: Tensor,
        runs: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        def normed(x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor) -> Tensor:
            return by_slices(
                lambda part: self.compute(part, shift_B1C, scale_B1C, self.eps), x_BLC, dtype
            )

        rows = shift_BRC.split(1, 1), scale_BRC.split(1, 1)
        parts = [normed(*run) for run in zip(x_BLC.split(list(runs), 1), *rows, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class WanRMSNorm(nn.Module):
    """RMS norm over all channels (before heads are split), computed and returned in float32."""

    def __init__(self, dim: int, eps: float, ops: SmallOps = PLAIN) -> None:
        super().__init__()
        self.eps, self.compute = eps, ops.rms_norm or rms_norm
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.compute(x_BLC, self.weight, self.eps)


class WanLayerNorm(nn.LayerNorm):
    """Layer norm computed and returned in float32, whatever the input's dtype."""

    def __init__(self, dim: int, eps: float, ops: SmallOps = PLAIN) -> None:
        super().__init__(dim, eps)
        self.compute = ops.layer_norm or layer_norm

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.compute(x_BLC, self.weight, self.bias, self.eps)


class TanhGELU(nn.Module):
    """GELU in its tanh form; in place in inference, where the input is always ours."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.gelu(x, approximate="tanh")
        return gelu_in_place(x)


def gated_add(x_BLC: Tensor, y_BLC: Tensor, gate_BRC: Tensor, runs: Sequence[int]) -> Tensor:
    """x + gate * y with each run's own gate; x is the float32 residual stream."""
    split = list(runs)
    parts = zip(x_BLC.split(split, 1), y_BLC.split(split, 1), gate_BRC.split(1, 1), strict=True)
    if torch.is_grad_enabled():
        return torch.cat([torch.addcmul(x, y, gate) for x, y, gate in parts], dim=1)
    for x, y, gate in parts:
        for x_part, y_part in in_place(x, y):
            x_part.addcmul_(y_part, gate)
    return x_BLC


def residual_add(x_BLC: Tensor, y_BLC: Tensor) -> Tensor:
    """x + y, where x is the float32 residual stream."""
    if torch.is_grad_enabled():
        return x_BLC + y_BLC
    for x_part, y_part in in_place(x_BLC, y_BLC):
        x_part.add_(y_part)
    return x_BLC


def in_place(x_BLC: Tensor, y_BLC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both, to change x by y; in slices with y converted where PyTorch would convert all of it."""
    whole = x_BLC.dtype == y_BLC.dtype or acts_as(x_BLC.device.type) != "cpu"
    if whole or torch.compiler.is_compiling():
        yield x_BLC, y_BLC
        return
    size = slice_tokens(x_BLC)
    for first in range(0, x_BLC.shape[1], size):
        part = slice(first, first + size)
        yield x_BLC[:, part], y_BLC[:, part].to(x_BLC.dtype)


def slice_tokens(x_BLC: Tensor) -> int:
    """How many tokens are handled at a time."""
    return max(1, slice_elements(x_BLC.device.type) // (x_BLC.shape[0] * x_BLC.shape[2]))


def by_slices(
    compute: Callable[..., Tensor],
    x_BLC: Tensor,
    dtype: torch.dtype,
    *rows_L: Tensor,
    overwrite: bool = False,
) -> Tensor:
    """compute(x, *rows) in dtype, for a computation that sees each token alone.

    overwrite: x is used only here, so the result may take its memory (hooks that keep x must copy).

    Float32 copies of all tokens are the memory peak of a bfloat16 model and, on a CPU, cost more
    time than the arithmetic; a slice's copies are small and stay in the cache. The compiler, which
    fuses them away, and autograd, which keeps them, get all tokens at once.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return compute(x_BLC, *rows_L).to(dtype)
    size = slice_tokens(x_BLC)
    reuse = overwrite and x_BLC.dtype == dtype
    out_BLC = x_BLC if reuse else torch.empty_like(x_BLC, dtype=dtype)
    for first in range(0, x_BLC.shape[1], size):
        part = slice(first, first + size)
        out_BLC[:, part] = compute(x_BLC[:, part], *(rows[part] for rows in rows_L))
    return out_BLC


def fp32_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """The layer applied in float32, also when its weights are stored in bfloat16."""
    return F.linear(x.float(), linear.weight.float(), linear.bias.float())


# The small operations, which a vendor's fused kernels may replace one by one (`SmallOps`; the
# fourth is `rope.apply_rope`). Results are float32 whatever the input's dtype; weights and
# modulation too enter the arithmetic as float32.


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
