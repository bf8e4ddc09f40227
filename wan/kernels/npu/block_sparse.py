"""Block-sparse attention of Ascend NPUs, through mindiesd: the kernels behind RainFusion v2 and v3.

The public mindiesd.sparse_attention would reorder the tokens and plan the masks in every call; here
both are done outside, so its inner functions are called. The vendor's packages are imported when an
object is made, after `wan.device` has imported them in the order they need.

Legend: B batch, S tokens, N heads, D head size, T = S tokens of one sample; q and k in masks:
blocks of queries and of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wan.device import Chip
from wan.kernels.fp8 import Quantised
from wan.kernels.npu.fp8 import head_first
from wan.kernels.rainfusion_masks import select_table

_BLOCK = 128  # rows of a block of queries, and of keys without FP8


class RainKernelV2:
    """rain_fusion_attention with a table of kept blocks; A2 and A3. 128 rows a block."""

    def __init__(self, chip: Chip) -> None:
        if "v2" not in chip.rainfusion:
            raise ValueError(f"{chip.name} chips have no rf_v2 kernel; use RainKernelV3 on A5.")
        from mindiesd.layers.flash_attn import sparse_flash_attn_rf_v2

        self._attend = sparse_flash_attn_rf_v2.rain_fusion_attention

    def __call__(
        self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, mask_BNqk: Tensor, k_rows: int
    ) -> Tensor:
        if k_rows != _BLOCK:
            raise ValueError(f"rf_v2 takes blocks of {_BLOCK} keys, not {k_rows}; use v3.")
        # mindiesd's table describes one sample only, so each has a call of its own.
        outs = [
            self._one(q_TND, k_TND, v_TND, mask_Nqk)
            for q_TND, k_TND, v_TND, mask_Nqk in zip(q_BSND, k_BSND, v_BSND, mask_BNqk, strict=True)
        ]
        return torch.stack(outs)

    def _one(self, q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, mask_Nqk: Tensor) -> Tensor:
        table, number = select_table(mask_Nqk)
        return self._attend(
            q_TND.contiguous(),
            k_TND.contiguous(),
            v_TND.contiguous(),
            scale=q_TND.shape[2] ** -0.5,
            head_num=q_TND.shape[1],
            input_layout="TND",
            select_idx=table,
            select_num_idx=number,
            blockshape=[_BLOCK, _BLOCK],
            actual_seq_lengths=[q_TND.shape[0]],
            actual_seq_lengths_kv=[k_TND.shape[0]],
            inner_precise=0,
        )


class RainKernelV3:
    """Block-sparse attention with a byte mask; A2, A3 and A5, with FP8 numbers A5 only.

    FP8: q, k, v are `Quantised` with 128, 256 and 256 rows a scale, k_rows is 256.
    """

    def __init__(self, chip: Chip) -> None:
        if "v3" not in chip.rainfusion:
            raise ValueError(
                f"{chip.name} chips have no block-sparse attention; use dense attention."
            )
        from mindiesd.layers.flash_attn import sparse_flash_attn_rf_v3

        self._attend = sparse_flash_attn_rf_v3.rain_fusion_attention_v3
        self._precise = chip.sparse_precise

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        mask_BNqk: Tensor,
        k_rows: int,
    ) -> Tensor:
        scales: dict[str, Tensor] = {}
        if isinstance(q, Quantised) and isinstance(k, Quantised) and isinstance(v, Quantised):
            (q, q_scale), (k, k_scale), (v, v_scale) = (head_first(x) for x in (q, k, v))
            scales = {
                "q_dequant_scale": q_scale,
                "k_dequant_scale": k_scale,
                "v_dequant_scale": v_scale,
            }
        else:
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out_BNSD: Tensor = self._attend(
            q,
            k,
            v,
            block_sparse_mask=mask_BNqk.contiguous().view(torch.int8),  # a bool is a byte already
            scale=q.shape[3] ** -0.5,
            head_num=q.shape[1],
            input_layout="BNSD",
            actual_seq_lengths=[q.shape[2]] * q.shape[0],
            actual_seq_lengths_kv=[k.shape[2]] * k.shape[0],
            block_size_q=_BLOCK,
            block_size_kv=k_rows,
            inner_precise=self._precise,
            **scales,
        )
        return out_BNSD.transpose(1, 2)
