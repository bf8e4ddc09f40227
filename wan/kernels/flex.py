"""Block-sparse attention on CUDA, through PyTorch's FlexAttention.

The tests run on CPUs, where FlexAttention runs eagerly over all pairs of tokens; the compiled
kernel is checked by `tools/check_device.py`.

Legend: B batch, S tokens, N heads, D head size; q, k in block masks: blocks of queries, of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from wan import torch_private
from wan.kernels.base import Payload, Target
from wan.kernels.rainfusion_masks import kept_first
from wan.settings.numerics import Q_ROWS

_SMALLEST_HEAD = 16  # smallest head size of the compiled kernel
_SHAPES = 256  # recompilation limit, above the shapes of any process
# torch 2.8 always computes the query blocks, which only gradients need.
_CAN_LEAVE_OUT = "compute_q_blocks" in signature(BlockMask.from_kv_blocks).parameters
_WITHOUT_GRADIENTS: dict[str, Any] = {"compute_q_blocks": False} if _CAN_LEAVE_OUT else {}


class FlexBlocks:
    """Implements `wan.kernels.rainfusion.BlockSparseKernel`.

    Quantized values are dequantized to the target's dtype, because FlexAttention has no scales per
    block. flex_attend: FlexAttention; None: compiled on CUDA, eager elsewhere.
    """

    name = "PyTorch FlexAttention"

    def __init__(self, target: Target, attend: Callable[..., Tensor] | None = None) -> None:
        if attend is None:
            is_cuda = target.device.type == "cuda"
            attend = compiled_for_each_shape(flex_attention) if is_cuda else flex_attention
        self._attend, self._dtype = attend, target.dtype

    def __call__(
        self, q: Payload, k: Payload, v: Payload, mask_BNqk: Tensor, k_rows: int, /
    ) -> Tensor:
        q_BNSD, k_BNSD, v_BNSD = (x.dequantised(self._dtype).transpose(1, 2) for x in (q, k, v))
        blocks = flex_mask(mask_BNqk, q_BNSD.shape[2], k_BNSD.shape[2], k_rows)
        head = q_BNSD.shape[3]
        if head < _SMALLEST_HEAD:
            more = 0, _SMALLEST_HEAD - head
            q_BNSD, k_BNSD, v_BNSD = (F.pad(x, more) for x in (q_BNSD, k_BNSD, v_BNSD))
        out_BNSD = self._attend(q_BNSD, k_BNSD, v_BNSD, block_mask=blocks, scale=head**-0.5)
        return out_BNSD[..., :head].transpose(1, 2)


def compiled_for_each_shape(
    function: Callable[..., Tensor], **how: object
) -> Callable[..., Tensor]:
    """Compiles a function so that it never falls back to eager, which would hold all scores.

    PyTorch stops compiling after eight shapes, but a process has more: prompts of two experts,
    several requests, last chunks and blocks. compile_kwargs: for `torch.compile`.
    """
    compiled = torch.compile(function, fullgraph=True, **how)  # type: ignore[call-overload]

    def call(*args: object, **kwargs: object) -> Tensor:
        with torch_private.recompiling(_SHAPES):
            return compiled(*args, **kwargs)

    return call


def flex_mask(mask_BNqk: Tensor, queries: int, keys: int, k_rows: int) -> BlockMask:
    """Converts a block mask to FlexAttention's, for lengths that need not be multiples of blocks.

    Only an incomplete last key block is masked token by token; the others are full blocks.
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
        **_WITHOUT_GRADIENTS,
    )
