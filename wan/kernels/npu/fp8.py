"""FP8 quantization and FP8 attention on Ascend NPUs (A5 only), through mindiesd.

Each constructor imports its operator, after `wan.device` has imported torch_npu and mindiesd in the
required order.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan.kernels.interfaces import AttentionInput, Target
from wan.settings.kernels import FP8

_ALL_TOKENS = 2**31 - 1  # an unlimited window
_PER_BLOCK = 7  # the quant_mode with one scale per head and block of rows


class NpuBlockQuantizer:
    """Implements `wan.kernels.fp8.QuantizeBlocks` for 16-bit tensors.

    Values and scales are views of contiguous [B,N,S,D] tensors, the layout of the FP8 attention
    kernels.
    """

    def __init__(self, target: Target) -> None:
        _check_fp8_support(target)
        self._quantize = target.load("mindiesd.layers.quant.block_quant:fa_block_quant_preprocess")
        self._dtype = target.load("torch_npu:float8_e4m3fn")

    def __call__(self, x_BSND: Tensor, rows: int) -> AttentionInput:
        # One call per sample, because the operator drops the batch dimension; BNSD is the only
        # layout with the same meaning in all releases of mindiesd. Its result for a block of zeros
        # is not documented, but such blocks are padding, which is removed before attention.
        samples = [
            self._quantize(
                x_BSND[b : b + 1].transpose(1, 2).contiguous(),
                block_size=rows,
                dst_type=self._dtype,
                layout="BNSD",
            )
            for b in range(x_BSND.shape[0])
        ]
        values, scale = (
            samples[0] if len(samples) == 1 else map(torch.cat, zip(*samples, strict=True))
        )
        return AttentionInput(values.transpose(1, 2), scale.transpose(1, 2), rows)


class NpuFp8Attention:
    """Implements `wan.kernels.fp8.Fp8Kernel` by fused_infer_attention_score_v2.

    q has one scale per 128 rows, k and v one per 256 rows. Heads have 64 or 128 channels.
    """

    name = "npu fused_infer_attention_score_v2"

    def __init__(self, target: Target) -> None:
        _check_fp8_support(target)
        module = "mindiesd.layers.flash_attn.fused_infer_attention_score"
        self._attend = target.load(f"{module}:fused_infer_attention_score_v2")

    def __call__(
        self, q: AttentionInput, k: AttentionInput, v: AttentionInput, dtype: torch.dtype, /
    ) -> Tensor:
        qkv_tensors = (transpose_to_bnsd(x).tensors for x in (q, k, v))
        (q_BNSD, q_scale), (k_BNSD, k_scale), (v_BNSD, v_scale) = qkv_tensors
        num_heads, num_queries, head_dim = q_BNSD.shape[1:]
        out_BNSD = self._attend(
            q_BNSD,
            k_BNSD,
            v_BNSD,
            input_layout="BNSD",
            num_query_heads=num_heads,
            softmax_scale=head_dim**-0.5,
            pre_tokens=_ALL_TOKENS,
            next_tokens=_ALL_TOKENS,
            query_quant_mode=_PER_BLOCK,
            key_quant_mode=_PER_BLOCK,
            value_quant_mode=_PER_BLOCK,
            dequant_scale_query=q_scale,
            dequant_scale_key=k_scale,
            dequant_scale_value=v_scale,
            out_dtype=dtype,
        )[0]
        return out_BNSD[:, :, :num_queries].transpose(1, 2)  # mindiesd may append padding rows


def make_bnsd_contiguous(x: AttentionInput) -> AttentionInput:
    """Returns x [B,S,N,D] as views of contiguous [B,N,S,D] tensors; the `ConvertLayout` of NPUs."""
    return transpose_to_bnsd(x).map(lambda tensor: tensor.transpose(1, 2))


def transpose_to_bnsd(x: AttentionInput) -> AttentionInput:
    """Returns contiguous values [B,N,S,D] and scales [B,N,blocks,1]; copies only if needed."""
    return x.map(lambda tensor: tensor.transpose(1, 2).contiguous())


def _check_fp8_support(target: Target) -> None:
    capabilities = target.device.capabilities
    assert capabilities.has_kernel(FP8), f"{capabilities.name} has no FP8 attention"
