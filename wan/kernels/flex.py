"""Block-sparse attention on CUDA, through PyTorch's FlexAttention.

Written for CUDA, tested on CPUs only, where FlexAttention runs eagerly over all pairs of tokens:
what comes out is tested there, the compiled kernel and its speed are not.

Legend: B batch, S tokens, N heads, D head size; q, k in block masks: blocks of queries, of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from wan.kernels.fp8 import Quantised, plain
from wan.kernels.rainfusion_masks import Q_ROWS, kept_first


class FlexBlocks:
    """Implements `wan.kernels.sparse.BlockSparseKernel`.

    device: the kernel is compiled for CUDA, at the first call, and runs eagerly elsewhere. dtype:
    what quantised numbers become, since FlexAttention has no scales per block.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._attend: Any = flex_attention
        if device.type == "cuda":
            self._attend = torch.compile(flex_attention)
        self._dtype = dtype

    def __call__(
        self,
        q: Tensor | Quantised,
        k: Tensor | Quantised,
        v: Tensor | Quantised,
        mask_BNqk: Tensor,
        k_rows: int,
        /,
    ) -> Tensor:
        q, k, v = (plain(x, self._dtype).transpose(1, 2) for x in (q, k, v))
        blocks = flex_mask(mask_BNqk, q.shape[2], k.shape[2], k_rows)
        out: Tensor = self._attend(q, k, v, block_mask=blocks)
        return out.transpose(1, 2)


def flex_mask(mask_BNqk: Tensor, queries: int, keys: int, k_rows: int) -> BlockMask:
    """FlexAttention's form of a block mask, for lengths that need not be multiples of blocks.

    Only a ragged last block of keys is looked at token by token; the others are kept whole.
    """
    ragged = mask_BNqk.new_zeros(mask_BNqk.shape[-1])
    ragged[-1] = keys % k_rows != 0
    partial, full = kept_first(mask_BNqk & ragged), kept_first(mask_BNqk & ~ragged)

    def seen(b: Tensor, h: Tensor, q_row: Tensor, k_row: Tensor) -> Tensor:
        return mask_BNqk[b, h, q_row // Q_ROWS, k_row // k_rows] & (k_row < keys)

    return BlockMask.from_kv_blocks(
        partial[1],
        partial[0],
        full[1],
        full[0],
        BLOCK_SIZE=(Q_ROWS, k_rows),
        mask_mod=seen,
        seq_lengths=(queries, keys),
        compute_q_blocks=False,  # for gradients only
    )
