"""The small float32 operations of a block, which a vendor's fused kernels may replace one by one.

Legend: B batch, S or L tokens, N heads, D head size, C channels. Results are float32 whatever the
input's dtype; weights and modulation too enter the arithmetic as float32.

The small fp32 pieces of a block: norms, modulation, gated residuals, GELU.

Legend: B batch, L tokens, C channels, R runs. Tokens with the same timestep share one row of
modulation, so a row covers a *run* of consecutive tokens and is never expanded per token. A
text-to-video forward has one run; the 5B image mode has two (first frame at t=0, then the rest).

In inference the residual stream is updated in place, which saves one copy of it at the peak, and
the float32 steps between two matrix products run on a slice of tokens at a time (`by_slices`); with
autograd on, every operation returns a new tensor.

The transformer block and the head, with the official parameter names.

Legend: B batch, L this device's tokens, T text tokens, C channels, N heads, D head size, R runs of
tokens that share a timestep.

The blocks' matrix products run in the dtype of `context_BTC`, which is that of their weights; the
residual stream, norms, modulation, RoPE and the head in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.kernels.base import Kernel, StepInfo
from wan.modules.interfaces import Attention
from wan.modules.rope import RopeTable, apply_rope
from wan.modules.textcache import TextKV


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
    # 4 MiB of float32 on a CPU: small enough for memory that is reused without page faults, large
    # enough that threads seldom wait for each other. Accelerators: kernels that outlast a launch.
    elements = 1 << (20 if x_BLC.device.type == "cpu" else 24)
    size = max(1, elements // (x_BLC.shape[0] * x_BLC.shape[2]))
    reuse = overwrite and x_BLC.dtype == dtype
    out_BLC = x_BLC if reuse else torch.empty_like(x_BLC, dtype=dtype)
    for first in range(0, x_BLC.shape[1], size):
        part = slice(first, first + size)
        out_BLC[:, part] = compute(x_BLC[:, part], *(rows[part] for rows in rows_L))
    return out_BLC


class WanRMSNorm(nn.Module):
    """RMS norm over all channels (before heads are split), computed and returned in float32."""

    def __init__(self, dim: int, eps: float, ops: SmallOps = PLAIN) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.ops.rms_norm(x_BLC, self.weight, self.eps)


class WanLayerNorm(nn.LayerNorm):
    """Layer norm computed and returned in float32, whatever the input's dtype."""

    def __init__(self, dim: int, eps: float, ops: SmallOps = PLAIN) -> None:
        super().__init__(dim, eps)
        self.ops = ops

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.ops.layer_norm(x_BLC, self.weight, self.bias, self.eps)


class TanhGELU(nn.Module):
    """GELU in its tanh form; in place in inference, where the input is always ours."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.gelu(x, approximate="tanh")
        return torch.ops.aten.gelu_(x, approximate="tanh")


def fp32_linear(linear: Any, x: Tensor) -> Tensor:
    """The layer applied in float32, also when its weights are stored in bfloat16."""
    return F.linear(x.float(), linear.weight.float(), linear.bias.float())


def modulated_by_runs(
    x_BLC: Tensor,
    shift_BRC: Tensor,
    scale_BRC: Tensor,
    runs: Sequence[int],
    eps: float,
    dtype: torch.dtype,
    ops: SmallOps = PLAIN,
) -> Tensor:
    """layer_norm(x) * (1 + scale) + shift with each run's own row; float32 inside, dtype out."""
    parts = zip(
        x_BLC.split(list(runs), 1), shift_BRC.split(1, 1), scale_BRC.split(1, 1), strict=True
    )

    def one(x_BLC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            return ops.modulated_norm(x, shift_B1C, scale_B1C, eps)

        return by_slices(compute, x_BLC, dtype)

    normed = [one(*part) for part in parts]
    return normed[0] if len(normed) == 1 else torch.cat(normed, dim=1)


def gated_add(x_BLC: Tensor, y_BLC: Tensor, gate_BRC: Tensor, runs: Sequence[int]) -> Tensor:
    """x + gate * y with each run's own gate; x is the float32 residual stream."""
    split = list(runs)
    parts = zip(x_BLC.split(split, 1), y_BLC.split(split, 1), gate_BRC.split(1, 1), strict=True)
    if torch.is_grad_enabled():
        return torch.cat([torch.addcmul(x, y, gate) for x, y, gate in parts], dim=1)
    for x, y, gate in parts:
        x.addcmul_(y, gate)
    return x_BLC


def residual_add(x_BLC: Tensor, y_BLC: Tensor) -> Tensor:
    """x + y, where x is the float32 residual stream."""
    return x_BLC + y_BLC if torch.is_grad_enabled() else x_BLC.add_(y_BLC)


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

        y_BLC = modulated_by_runs(x_BLC, shift1, scale1, runs, self.eps, dtype, self.ops)
        y_BLC = self.self_attn(y_BLC, rope, self.attention, valid_len, step, self.layer)
        x_BLC = gated_add(x_BLC, y_BLC, gate1, runs)

        kv = self.cross_attn.text_kv(context_BTC) if kv is None else kv
        y_BLC = by_slices(self.norm3, x_BLC, dtype)
        x_BLC = residual_add(x_BLC, self.cross_attn(y_BLC, kv, self.kernel))

        y_BLC = modulated_by_runs(x_BLC, shift2, scale2, runs, self.eps, dtype, self.ops)
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
        normed = modulated_by_runs(x_BLC, shift, scale, runs, self.eps, torch.float32, self.ops)
        return fp32_linear(self.head, normed)
