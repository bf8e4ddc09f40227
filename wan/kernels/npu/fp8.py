"""FP8 tensors and FP8 attention of Ascend NPUs (A5), through mindiesd.

The vendor's operators are imported when an object is made, after `wan.device` has imported the
packages in the order they need. Both objects are callables, to be given to `Fp8Quantiser` and
`Fp8Attention`; they exist on A5 only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan.kernels.base import Payload, Target
from wan.settings.kernels import FP8

_ALL = 2**31 - 1  # "every token before and after"
_PER_BLOCK = 7  # quant_mode of one scale per head and block of rows


class NpuBlockQuantise:
    """quantise(x [B,S,N,D] 16-bit, rows) -> Payload, one scale per head and `rows` rows.

    Values and scales are views of [B,N,S,D] memory, which is what the attention kernels take.
    """

    def __init__(self, target: Target) -> None:
        _check(target)
        self._quantise = target.load("mindiesd.layers.quant.block_quant:fa_block_quant_preprocess")
        self._dtype = target.load("torch_npu:float8_e4m3fn")

    def __call__(self, x_BSND: Tensor, rows: int) -> Payload:
        # Only BNSD means the same to every release of mindiesd, and the operator drops the batch.
        # What it makes of a block of zeros is not documented: only padding has them, and whatever
        # it becomes is cut away before it is attended to.
        done = [
            self._quantise(
                x_BSND[b : b + 1].transpose(1, 2).contiguous(),
                block_size=rows,
                dst_type=self._dtype,
                layout="BNSD",
            )
            for b in range(x_BSND.shape[0])
        ]
        values, scale = done[0] if len(done) == 1 else map(torch.cat, zip(*done, strict=True))
        return Payload(values.transpose(1, 2), scale.transpose(1, 2), rows)


class NpuFp8Attention:
    """Implements `wan.kernels.fp8.Fp8Kernel` through fused_infer_attention_score_v2.

    q: one scale per 128 rows; k and v: per 256 rows. Heads of 64 or 128 channels; no log-sum-exp.
    """

    name = "npu fused_infer_attention_score_v2"

    def __init__(self, target: Target) -> None:
        _check(target)
        module = "mindiesd.layers.flash_attn.fused_infer_attention_score"
        self._attend = target.load(f"{module}:fused_infer_attention_score_v2")

    def __call__(self, q: Payload, k: Payload, v: Payload, dtype: torch.dtype, /) -> Tensor:
        parts = (head_first(x).parts for x in (q, k, v))
        (q_BNSD, q_scale), (k_BNSD, k_scale), (v_BNSD, v_scale) = parts
        heads, rows, size = q_BNSD.shape[1:]
        out_BNSD = self._attend(
            q_BNSD,
            k_BNSD,
            v_BNSD,
            input_layout="BNSD",
            num_query_heads=heads,
            softmax_scale=size**-0.5,
            pre_tokens=_ALL,
            next_tokens=_ALL,
            query_quant_mode=_PER_BLOCK,
            key_quant_mode=_PER_BLOCK,
            value_quant_mode=_PER_BLOCK,
            dequant_scale_query=q_scale,
            dequant_scale_key=k_scale,
            dequant_scale_value=v_scale,
            out_dtype=dtype,
        )[0]
        return out_BNSD[:, :, :rows].transpose(1, 2)  # mindiesd reckons with rows behind the last


def placed_head_first(x: Payload) -> Payload:
    """x lying in memory as [B,N,S,D], which the kernels take, and seen as [B,S,N,D]."""
    return head_first(x).map(lambda part: part.transpose(1, 2))


def head_first(x: Payload) -> Payload:
    """Contiguous values [B,N,S,D] and scales [B,N,blocks,1]; copied only if they lie otherwise."""
    return x.map(lambda part: part.transpose(1, 2).contiguous())


def _check(target: Target) -> None:
    can = target.device.can
    assert can.has(FP8), f"{can.name} has no FP8 attention"
