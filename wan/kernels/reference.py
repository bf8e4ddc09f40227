"""Attention in tiles of 128 query rows: the reference of FP8 and block-sparse attention.

Attention modes divide heads and queries differently (at multiples of 128 rows) and must give the
same bits, so all tiles are computed by operations of one shape.

Legend: B batch, S tokens, N heads, D head size; q, k in block masks: blocks of queries, of keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.settings.numerics import Q_ROWS


def attend_in_tiles(
    q_BSND: Tensor,
    k_BSND: Tensor,
    v_BSND: Tensor,
    block_mask_BNqk: Tensor | None = None,
    k_rows: int = Q_ROWS,
) -> Tensor:
    """Computes softmax(q k^T / sqrt(D)) v, contiguous [B,S,N,D] in q's dtype; any floating dtypes.

    block_mask_BNqk: bool [B, N, ceil(Sq / 128), ceil(Sk / k_rows)], True = attend; None: dense.
    Rows without a block are nan.

    Tiles are computed in float32: for 16-bit tensors PyTorch's CPU kernel chooses its matrix
    products, and with them the bits, by the numbers of heads and threads.

    Raises ValueError if the mask's shape does not fit.
    """
    rows, keys = q_BSND.shape[1], k_BSND.shape[1]
    tiles = -(-rows // Q_ROWS)
    _check_block_mask(block_mask_BNqk, tiles, -(-keys // k_rows))
    k_BNSD, v_BNSD = (x.transpose(1, 2).float().contiguous() for x in (k_BSND, v_BSND))
    out_BSND = q_BSND.new_empty(q_BSND.shape[:3] + v_BSND.shape[3:])
    for tile in range(tiles):
        tile_rows = slice(tile * Q_ROWS, min((tile + 1) * Q_ROWS, rows))
        q_BNtD = q_BSND[:, tile_rows].transpose(1, 2).float()
        missing = Q_ROWS - q_BNtD.shape[2]  # the last tile is padded to the shape of the others
        q_BNtD = F.pad(q_BNtD, (0, 0, 0, missing)) if missing else q_BNtD.contiguous()
        attn_mask = None
        if block_mask_BNqk is not None:
            blocks = block_mask_BNqk[:, :, tile : tile + 1]
            attn_mask = blocks.repeat_interleave(k_rows, dim=-1)[..., :keys]
        out_BNtD = F.scaled_dot_product_attention(q_BNtD, k_BNSD, v_BNSD, attn_mask=attn_mask)
        out_BSND[:, tile_rows] = out_BNtD[:, :, : Q_ROWS - missing].transpose(1, 2)
    return out_BSND


def _check_block_mask(block_mask_BNqk: Tensor | None, q_blocks: int, k_blocks: int) -> None:
    if block_mask_BNqk is None:
        return
    if block_mask_BNqk.dtype != torch.bool or block_mask_BNqk.shape[2:] != (q_blocks, k_blocks):
        raise ValueError(
            f"block mask must be bool and end with [{q_blocks}, {k_blocks}] (blocks of queries, of "
            f"keys), but it is {block_mask_BNqk.dtype} {list(block_mask_BNqk.shape)}"
        )
