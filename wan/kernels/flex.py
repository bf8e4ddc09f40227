"""Block-sparse attention on CUDA, through PyTorch's FlexAttention.

The tests run on CPUs, where FlexAttention runs eagerly over all pairs of tokens; the compiled
kernel is checked by `tools/check_device.py`.

Legend: B batch, S tokens, N heads, D head size; q, k in block masks: blocks of queries, of keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from wan.kernels.interfaces import AttentionInput, Target
from wan.kernels.rainfusion_masks import pack_block_indices
from wan.settings.numerics import Q_ROWS
from wan.utils import torch_private

_SMALLEST_HEAD = 16  # smallest head size of the compiled kernel
_SHAPES = 256  # recompilation limit, above the shapes of any process


class FlexBlocks:
    """Implements `wan.kernels.rainfusion.BlockSparseKernel`.

    Quantized values are dequantized to the target's dtype, because FlexAttention has no scales per
    block. flex_attend: FlexAttention; None: compiled on CUDA, eager elsewhere.
    """

    name = "PyTorch FlexAttention"

    def __init__(self, target: Target, flex_attend: Callable[..., Tensor] | None = None) -> None:
        if flex_attend is None:
            is_cuda = target.device.type == "cuda"
            flex_attend = compile_per_shape(flex_attention) if is_cuda else flex_attention
        self._flex_attend, self._dtype = flex_attend, target.dtype

    def __call__(
        self,
        q: AttentionInput,
        k: AttentionInput,
        v: AttentionInput,
        mask_BNqk: Tensor,
        k_rows: int,
        /,
    ) -> Tensor:
        q_BNSD, k_BNSD, v_BNSD = (x.dequantize(self._dtype).transpose(1, 2) for x in (q, k, v))
        blocks = make_flex_mask(mask_BNqk, q_BNSD.shape[2], k_BNSD.shape[2], k_rows)
        head_dim = q_BNSD.shape[3]
        if head_dim < _SMALLEST_HEAD:
            padding = 0, _SMALLEST_HEAD - head_dim
            q_BNSD, k_BNSD, v_BNSD = (F.pad(x, padding) for x in (q_BNSD, k_BNSD, v_BNSD))
        out_BNSD = self._flex_attend(
            q_BNSD, k_BNSD, v_BNSD, block_mask=blocks, scale=head_dim**-0.5
        )
        return out_BNSD[..., :head_dim].transpose(1, 2)


def compile_per_shape(
    function: Callable[..., Tensor], **compile_kwargs: object
) -> Callable[..., Tensor]:
    """Compiles a function so that it never falls back to eager, which would hold all scores.

    PyTorch stops compiling after eight shapes, but a process has more: prompts of two experts,
    several requests, last chunks and blocks. compile_kwargs: for `torch.compile`.

    Raises:
        InputError: The folder that the user named for compiled code cannot be used.
    """
    torch_private.use_private_compiler_cache()
    compiled_function = torch.compile(function, fullgraph=True, **compile_kwargs)  # type: ignore[call-overload]

    def call_compiled(*args: object, **kwargs: object) -> Tensor:
        with torch_private.limit_recompiles(_SHAPES):
            return compiled_function(*args, **kwargs)

    return call_compiled


def make_flex_mask(mask_BNqk: Tensor, num_queries: int, num_keys: int, k_rows: int) -> BlockMask:
    """Converts a block mask to FlexAttention's, for lengths that need not be multiples of blocks.

    Only an incomplete last key block is masked token by token; the others are full blocks.
    """
    is_ragged = mask_BNqk.new_zeros(mask_BNqk.shape[-1])
    is_ragged[-1] = num_keys % k_rows != 0
    partial_blocks = pack_block_indices(mask_BNqk & is_ragged)
    full_blocks = pack_block_indices(mask_BNqk & ~is_ragged)

    def mask_mod(b: Tensor, h: Tensor, q_row: Tensor, k_row: Tensor) -> Tensor:
        return mask_BNqk[b, h, q_row // Q_ROWS, k_row // k_rows] & (k_row < num_keys)

    return BlockMask.from_kv_blocks(
        partial_blocks[1],
        partial_blocks[0],
        full_blocks[1],
        full_blocks[0],
        BLOCK_SIZE=(Q_ROWS, k_rows),
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
        compute_q_blocks=False,
    )
