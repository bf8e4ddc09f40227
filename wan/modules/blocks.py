"""The transformer block, its layers and the output head, with the official parameter names.

Legend: B batch, L this rank's tokens, T text tokens, C channels, N heads, D head size, R timestep
segments.

A timestep segment is a span of consecutive tokens with the same timestep. Its tokens share one row
of modulation, which is never expanded per token. Text-to-video has one segment; image-to-video of
the 5B model has two (the first frame at t=0, then the rest).

Matrix products run in the dtype of `context_BTC`, which is the dtype of their weights. The residual
stream, the head, and the elementwise operations and norms (`small_ops`) run in float32. In
inference the residual stream is updated in place, which saves a copy of it at the memory peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.kernels.forward_context import StepInfo
from wan.kernels.linear import Linear
from wan.modules.fused_ops import BlockOps, WriteTokens
from wan.modules.interfaces import FurtherKeys, ModelComponents
from wan.modules.lora_branch import add_lora_branches
from wan.modules.rope import RopeTable
from wan.modules.text_kv_cache import ContextKV
from wan.utils import trace

TimestepSegments = tuple[int, ...]
"""Number of tokens of each timestep segment on this rank."""


@dataclass(frozen=True)
class BlockSizes:
    """Sizes and options that all blocks of a network share."""

    dim: int
    ffn_dim: int
    num_heads: int
    qk_norm: bool = True
    cross_attn_norm: bool = True
    eps: float = 1e-6
    has_image_tokens: bool = False  # CLIP tokens with separate K/V projections (Wan2.1)
    text_len: int = 512


@dataclass(frozen=True)
class SharedInputs:
    """Inputs of a forward pass that all blocks share.

    Attributes:
        rope: Rows of the RoPE table of this rank's tokens.
        valid_len: Number of real tokens in the global sequence.
        step: Sampling step, expert and branch, for attention layers and caches.
        further_keys: To which self-attention attends as well as to the tokens' own.
        second_text: [B,T,C], embedded second text, for guidance in cross-attention.
    """

    timestep_segments: TimestepSegments
    rope: RopeTable
    valid_len: int
    step: StepInfo | None = None
    further_keys: FurtherKeys | None = None
    second_text: Tensor | None = None


class WanAttentionBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward, modulated by the timestep (adaLN)."""

    def __init__(
        self, sizes: BlockSizes, layer: int, components: ModelComponents | None = None
    ) -> None:
        super().__init__()
        components = ModelComponents() if components is None else components
        dim, self.eps, self.ops = sizes.dim, sizes.eps, components.ops
        self.layer, self.attention_cache = layer, components.attention_cache
        self.self_attn = WanSelfAttention(sizes, layer, components)
        self.norm3 = nn.LayerNorm(dim, sizes.eps) if sizes.cross_attn_norm else nn.Identity()
        self.cross_attn = WanCrossAttention(sizes, components)
        self.ffn = FeedForward(dim, sizes.ffn_dim, components.ops)
        self.modulation = nn.Parameter(nn.init.normal_(torch.empty(1, 6, dim), std=dim**-0.5))

    def forward(
        self,
        x_BLC: Tensor,
        e0_BR6C: Tensor,
        context_BTC: Tensor,
        context_kv: ContextKV | None,
        shared_inputs: SharedInputs,
    ) -> tuple[Tensor, ContextKV]:
        """Runs the block.

        Args:
            x_BLC: Residual stream, float32; updated in place in inference.
            e0_BR6C: Modulation of each timestep segment, float32.
            context_BTC: Embedded image tokens, if any, and text, in the dtype of the weights.
            context_kv: Cached keys and values of the context for this layer; None: computed.

        Returns:
            The residual stream, and the keys and values of the context.
        """
        dtype, segments, ops = context_BTC.dtype, shared_inputs.timestep_segments, self.ops
        modulation = self.modulation.float().unsqueeze(1) + e0_BR6C
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(2)

        def attend() -> Tensor:
            y_BLC = ops.modulated_norm(x_BLC, shift1, scale1, segments, self.eps, dtype)
            return self.self_attn(y_BLC, shared_inputs)

        cache = self.attention_cache
        y_BLC = attend() if cache is None else cache(attend, shared_inputs.step, self.layer)
        if isinstance(self.norm3, nn.LayerNorm):
            x_BLC, y_BLC = ops.gated_add_norm(x_BLC, y_BLC, gate1, segments, self.norm3, dtype)
        else:
            x_BLC = ops.gated_add(x_BLC, y_BLC, gate1, segments)
            y_BLC = x_BLC.to(dtype, copy=True)
        with trace.span("cross-attention"):
            context_kv = (
                self.cross_attn.project_context_kv(context_BTC, shared_inputs.second_text)
                if context_kv is None
                else context_kv
            )
            y_BLC = self.cross_attn(y_BLC, context_kv, shared_inputs.step)

        x_BLC, y_BLC = ops.add_modulated_norm(
            x_BLC, y_BLC, shift2, scale2, segments, self.eps, dtype
        )
        with trace.span("feed-forward"):
            y_BLC = self.ffn(y_BLC)
        return ops.gated_add(x_BLC, y_BLC, gate2, segments), context_kv


class FeedForward(nn.Sequential):
    """Two linear layers, `0` and `2`, with GELU between them."""

    def __init__(self, dim: int, hidden_dim: int, ops: BlockOps) -> None:
        super().__init__(Linear(dim, hidden_dim), nn.Identity(), Linear(hidden_dim, dim))
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self.ops.linear_gelu(self[0], x))


class Head(nn.Module):
    """Modulated norm and projection to the values of a patch, in float32."""

    def __init__(self, dim: int, out_features: int, eps: float, ops: BlockOps) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.head = nn.Linear(dim, out_features)
        self.modulation = nn.Parameter(nn.init.normal_(torch.empty(1, 2, dim), std=dim**-0.5))

    def forward(self, x_BLC: Tensor, e_BRC: Tensor, segments: TimestepSegments) -> Tensor:
        shift, scale = (self.modulation.float().unsqueeze(1) + e_BRC.unsqueeze(2)).unbind(2)
        y_BLC = self.ops.modulated_norm(x_BLC, shift, scale, segments, self.eps, torch.float32)
        return fp32_linear(self.head, y_BLC)


class WanAttention(nn.Module):
    """Projections q, k, v, o of self- and cross-attention, with QK-norm over all channels."""

    def __init__(self, sizes: BlockSizes, components: ModelComponents) -> None:
        super().__init__()
        self.num_heads, self.ops, self.eps = sizes.num_heads, components.ops, sizes.eps
        self.q, self.k, self.v, self.o = (Linear(sizes.dim, sizes.dim) for _ in range(4))
        self.norm_q, self.norm_k = (
            nn.RMSNorm(sizes.dim, sizes.eps) if sizes.qk_norm else nn.Identity() for _ in range(2)
        )

    def project_q(
        self, x_BLC: Tensor, rope: RopeTable | None = None, write: WriteTokens | None = None
    ) -> Tensor:
        """Projects, normalizes and rotates queries [B,L,N,D].

        rope: None: no rotation. write: receives the result; the return value is then undefined.
        """
        with trace.span("project", what="q"):
            return self.norm_and_rotate(self.norm_q, self.q(x_BLC), rope, write)

    def project_k(
        self, x_BLC: Tensor, rope: RopeTable | None = None, write: WriteTokens | None = None
    ) -> Tensor:
        """Projects, normalizes and rotates keys; see `project_q`."""
        with trace.span("project", what="k"):
            return self.norm_and_rotate(self.norm_k, self.k(x_BLC), rope, write)

    def project_v(self, x_BLC: Tensor) -> Tensor:
        """Projects values [B,L,N,D]."""
        with trace.span("project", what="v"):
            return self.v(x_BLC).unflatten(-1, (self.num_heads, -1))

    def project_out(self, x_BLND: Tensor) -> Tensor:
        """Projects the attention output [B,L,N,D] to [B,L,C]."""
        with trace.span("project", what="o"):
            return self.o(x_BLND.flatten(2))

    def norm_and_rotate(
        self,
        norm: nn.Module,
        x_BLC: Tensor,
        rope: RopeTable | None = None,
        write: WriteTokens | None = None,
    ) -> Tensor:
        """Applies RMS norm over all channels and RoPE, [B,L,N,D]; may overwrite x."""
        weight_C = norm.weight if isinstance(norm, nn.RMSNorm) else None
        return self.ops.norm_and_rotate(x_BLC, weight_C, self.num_heads, self.eps, rope, write)


class WanSelfAttention(WanAttention):
    """Self-attention over all tokens of the video."""

    def __init__(self, sizes: BlockSizes, layer: int, components: ModelComponents) -> None:
        super().__init__(sizes, components)
        self.attention, self.layer = components.attention(layer), layer

    def forward(self, x_BLC: Tensor, shared_inputs: SharedInputs) -> Tensor:
        further_keys = shared_inputs.further_keys
        call = self.attention.start(
            x_BLC,
            self.num_heads,
            valid_len=shared_inputs.valid_len,
            step=shared_inputs.step,
            further_keys=None if further_keys is None else further_keys.get_layer(self.layer),
        )
        # This frame holds no reference to q, k and v: the call decides when they are freed.
        for index, project in enumerate((self.project_q, self.project_k)):
            if call.takes_slices:
                project(x_BLC, shared_inputs.rope, partial(call.write, index))
            else:
                call.write(index, project(x_BLC, shared_inputs.rope))
        call.write(2, self.project_v(x_BLC))
        return self.project_out(call.finish())


class WanCrossAttention(WanAttention):
    """Cross-attention to the text, including its zero padding as in the official model.

    Attention to the image tokens (Wan2.1) has a separate softmax; the two results are added.
    """

    def __init__(self, sizes: BlockSizes, components: ModelComponents) -> None:
        super().__init__(sizes, components)
        self.kernel, self.text_len = components.cross_attention_kernel, sizes.text_len
        self.k_img: nn.Linear | None = None
        if sizes.has_image_tokens:
            self.k_img, self.v_img = (Linear(sizes.dim, sizes.dim) for _ in range(2))
            self.norm_k_img = nn.RMSNorm(sizes.dim, sizes.eps) if sizes.qk_norm else nn.Identity()

    def project_context_kv(
        self, context_BTC: Tensor, second_text_BTC: Tensor | None = None
    ) -> ContextKV:
        """Projects keys and values of texts and image tokens, which are the same in all steps."""
        text_BTC = context_BTC if self.k_img is None else context_BTC[:, -self.text_len :]
        kv: ContextKV = (self.project_k(text_BTC), self.project_v(text_BTC))
        if self.k_img is not None:
            image = context_BTC[:, : -self.text_len]
            k_img = self.norm_and_rotate(self.norm_k_img, self.k_img(image))
            kv += (k_img, self.v_img(image).unflatten(-1, (self.num_heads, -1)))
        if second_text_BTC is not None:
            kv += (self.project_k(second_text_BTC), self.project_v(second_text_BTC))
        return kv

    def forward(self, x_BLC: Tensor, kv: ContextKV, step: StepInfo | None = None) -> Tensor:
        """Attends to the texts and image tokens; step: has the guidance by a second text."""
        q_BLND = self.project_q(x_BLC)
        out_BLND = self.kernel(q_BLND, *kv[:2])
        if step is not None and step.text_guidance is not None:
            out_BLND = step.text_guidance.combine(out_BLND, self.kernel(q_BLND, *kv[-2:]))
        if self.k_img is not None:
            out_BLND = out_BLND + self.kernel(q_BLND, *kv[2:4])
        return self.project_out(out_BLND)


class ImageEmbedding(nn.Module):
    """Projects CLIP features of one or two images to context tokens, in float32 (Wan2.1).

    Args:
        dim_in: Channels of the features.
        dim: Channels of a token.
        positions: Number of learned position embeddings: the tokens of both images for the
            first-and-last-frame model, else 0.
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

    def forward(self, features_IKC: Tensor) -> Tensor:
        """Converts features of I images, K each, to context tokens [1,I*K,C]."""
        x = features_IKC.float()
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
    """GELU with the tanh approximation."""

    def __init__(self, ops: BlockOps) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.gelu(x)


def fp32_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """Applies a linear layer in float32; its weights may have another dtype."""
    x = x.float()
    return add_lora_branches(linear, x, F.linear(x, linear.weight.float(), linear.bias.float()))
