"""Block-sparse attention on Ascend NPUs: the mindiesd kernels for RainFusion v2 and v3.

The public mindiesd.sparse_attention reorders the tokens and computes the masks in every call. The
kernels here call its inner functions, because RainFusion orders the tokens once and caches masks.
Each constructor imports its operator, after `wan.device` has imported torch_npu and mindiesd in the
required order.

Legend: B batch, S tokens, N heads, D head size, T tokens of one sample; in masks q blocks of
queries, k blocks of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan.kernels.interfaces import AttentionInput, Target
from wan.kernels.npu.fp8 import transpose_to_bnsd
from wan.kernels.rainfusion_masks import make_select_table
from wan.settings.kernels import RAINFUSION
from wan.settings.numerics import Q_ROWS


class RainKernelV2:
    """Implements `wan.kernels.rainfusion.BlockSparseKernel` by rain_fusion_attention; A2 and A3.

    Blocks have 128 rows of queries and of keys. q, k and v must not be quantized.
    """

    name = "npu rain_fusion_attention"

    def __init__(self, target: Target) -> None:
        capabilities = target.device.capabilities
        assert capabilities.has_kernel(RAINFUSION["v2"]), f"{capabilities.name} has no rf_v2 kernel"
        module = "mindiesd.layers.flash_attn.sparse_flash_attn_rf_v2"
        self._attend = target.load(f"{module}:rain_fusion_attention")

    def __call__(
        self,
        q: AttentionInput,
        k: AttentionInput,
        v: AttentionInput,
        mask_BNqk: Tensor,
        k_rows: int,
        /,
    ) -> Tensor:
        if k_rows != Q_ROWS:
            raise ValueError(f"rf_v2 takes blocks of {Q_ROWS} keys, not {k_rows}; use v3.")
        # mindiesd's select table describes a single sample: one call per sample.
        outputs = [
            self._attend_sample(q_TND, k_TND, v_TND, mask_Nqk)
            for q_TND, k_TND, v_TND, mask_Nqk in zip(
                q.values, k.values, v.values, mask_BNqk, strict=True
            )
        ]
        return torch.stack(outputs)

    def _attend_sample(
        self, q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, mask_Nqk: Tensor
    ) -> Tensor:
        block_indices, block_counts = make_select_table(mask_Nqk)
        return self._attend(
            q_TND.contiguous(),
            k_TND.contiguous(),
            v_TND.contiguous(),
            scale=q_TND.shape[2] ** -0.5,
            head_num=q_TND.shape[1],
            input_layout="TND",
            select_idx=block_indices,
            select_num_idx=block_counts,
            blockshape=[Q_ROWS, Q_ROWS],
            actual_seq_lengths=[q_TND.shape[0]],
            actual_seq_lengths_kv=[k_TND.shape[0]],
            inner_precise=0,
        )


class RainKernelV3:
    """Implements `wan.kernels.rainfusion.BlockSparseKernel` by rain_fusion_attention_v3.

    Runs on A2, A3 and A5, in FP8 on A5 only. In FP8, q has a scale per 128 rows, k and v per 256
    rows, and k_rows is 256.
    """

    name = "npu block_sparse_attention"

    def __init__(self, target: Target) -> None:
        capabilities = target.device.capabilities
        assert capabilities.has_kernel(RAINFUSION["v3"]), (
            f"{capabilities.name} has no block-sparse attention"
        )
        module = "mindiesd.layers.flash_attn.sparse_flash_attn_rf_v3"
        self._attend = target.load(f"{module}:rain_fusion_attention_v3")
        self._inner_precise = capabilities.sparse_inner_precise

    def __call__(
        self,
        q: AttentionInput,
        k: AttentionInput,
        v: AttentionInput,
        mask_BNqk: Tensor,
        k_rows: int,
        /,
    ) -> Tensor:
        q, k, v = (transpose_to_bnsd(x) for x in (q, k, v))
        num_queries, num_keys = q.values.shape[2], k.values.shape[2]
        scales = {
            f"{name}_dequant_scale": x.scale
            for name, x in (("q", q), ("k", k), ("v", v))
            if x.scale is not None
        }
        out_BNSD: Tensor = self._attend(
            q.values,
            k.values,
            v.values,
            block_sparse_mask=mask_BNqk.contiguous().view(torch.int8),  # a bool has 1 byte
            scale=q.values.shape[3] ** -0.5,
            head_num=q.values.shape[1],
            input_layout="BNSD",
            actual_seq_lengths=[num_queries] * len(q.values),
            actual_seq_lengths_kv=[num_keys] * len(k.values),
            block_size_q=Q_ROWS,
            block_size_kv=k_rows,
            inner_precise=self._inner_precise,
            **scales,
        )
        return out_BNSD.transpose(1, 2)
