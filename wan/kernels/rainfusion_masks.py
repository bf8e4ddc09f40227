"""RainFusion's token order and block masks, as pure functions.

Equal to rf_v2 / rf_v3 of MindIE-SD 3.1.0 bit for bit on one device, because rounding decides about
blocks near the threshold. Supports three cases in which MindIE-SD fails: grids narrower than a
window, a single frame, and query rows that are a part of the sequence.

Legend: B batch, S tokens, N heads, D head size, nq and nk blocks of queries and of keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.settings.attention_modes import Grid
from wan.settings.numerics import Q_ROWS

WINDOW = 8  # rows and columns of a window


def make_window_order(grid: Grid) -> Tensor:
    """Returns int64 [S], the raster index of the token at each position of RainFusion's order.

    Each frame is ordered by windows of 8 x 8 tokens. If they do not fill a frame, the first frame
    keeps raster order, and each later frame is its windows, then the remaining rows (full width),
    then the remaining columns.
    """
    _, height, width = grid
    raster = torch.arange(math.prod(grid)).view(grid)
    rows, columns = height - height % WINDOW, width - width % WINDOW
    if (rows, columns) == (height, width):
        return _split_windows(raster).flatten()
    later = raster[1:]
    parts = (_split_windows(later[:, :rows, :columns]), later[:, rows:], later[:, :rows, columns:])
    return torch.cat([raster[0].flatten(), torch.cat([x.flatten(1) for x in parts], 1).flatten()])


def _split_windows(x: Tensor) -> Tensor:
    """Splits frames into windows: [t, h, w] -> [t, h/8, w/8, 8, 8]."""
    frames, height, width = x.shape
    windows = x.reshape(frames, height // WINDOW, WINDOW, width // WINDOW, WINDOW)
    return windows.transpose(2, 3)


def mean_pool_blocks(x_BSND: Tensor, rows: int) -> Tensor:
    """Computes means of `rows` consecutive rows (the last of fewer): [B,ceil(S/rows),N,D]."""
    num_full = x_BSND.shape[1] // rows
    full_rows, tail = x_BSND[:, : num_full * rows], x_BSND[:, num_full * rows :]
    means = [full_rows.unflatten(1, (num_full, rows)).mean(2)] if num_full else []
    if tail.shape[1]:
        means.append(tail.unsqueeze(1).mean(2))
    return means[0] if len(means) == 1 else torch.cat(means, 1)


def make_block_mask(q_pool: Tensor, k_pool: Tensor, sparsity: float, scale: float) -> Tensor:
    """Selects each row's ceil(nk * (1 - sparsity)) highest key blocks: bool [B,N,nq,nk].

    q_pool [B,nq,N,D], k_pool [B,nk,N,D]: means of blocks. The scores are a softmax in their dtype.
    Ties with the lowest selected score are selected too. sparsity: 0 <= sparsity < 1.
    """
    scores = torch.einsum("blnd,bsnd->bnls", q_pool, k_pool) * scale
    probabilities = F.softmax(scores, dim=-1)
    num_kept = math.ceil(probabilities.shape[-1] * (1 - sparsity))
    return probabilities >= torch.topk(probabilities, num_kept, dim=-1).values[..., -1:]


def protect_first_frame(
    mask_BNqk: Tensor, grid: Grid, first_block: int = 0, q_rows: int = Q_ROWS, k_rows: int = Q_ROWS
) -> Tensor:
    """Sets the rows and columns of the first frame's blocks in a mask.

    first_block: global index of the mask's first query block.
    """
    nq, nk = mask_BNqk.shape[-2:]
    frame_tokens = grid[1] * grid[2]
    q_first = torch.arange(first_block, first_block + nq, device=mask_BNqk.device)
    k_first = torch.arange(nk, device=mask_BNqk.device)
    q_in = q_first < math.ceil(frame_tokens / q_rows)
    k_in = k_first < math.ceil(frame_tokens / k_rows)
    return mask_BNqk | q_in[:, None] | k_in


def make_rainfusion_mask(
    q_BSND: Tensor, k_BSND: Tensor, grid: Grid, sparsity: float, first_row: int, k_rows: int
) -> Tensor:
    """Returns bool [B,N,nq,nk]: the blocks of k_rows keys that each 128 queries attend to.

    q and k are in the order of `make_window_order`. k is the global sequence; q may be a part of it
    that begins at first_row. Its scores are computed in the shape of the global mask, because
    another shape may round differently.

    Raises ValueError if first_row is not a multiple of 128, q has no row, or q, k and grid do not
    fit together.
    """
    num_keys, num_queries = k_BSND.shape[1], q_BSND.shape[1]
    fits = num_keys == math.prod(grid) and 0 < num_queries <= num_keys - first_row
    if not fits or first_row % Q_ROWS:
        raise ValueError(
            f"RainFusion needs all keys of the grid and queries from a multiple of {Q_ROWS} on: "
            f"got {num_keys} keys for grid {grid}, "
            f"and {num_queries} queries from row {first_row} on"
        )
    q_pool, first_block = mean_pool_blocks(q_BSND, Q_ROWS), first_row // Q_ROWS
    num_blocks = q_pool.shape[1]
    blocks_after = math.ceil(num_keys / Q_ROWS) - first_block - num_blocks
    q_pool = F.pad(q_pool, (0, 0, 0, 0, first_block, blocks_after))
    mask = make_block_mask(
        q_pool, mean_pool_blocks(k_BSND, k_rows), sparsity, q_BSND.shape[-1] ** -0.5
    )
    local_mask = mask[:, :, first_block : first_block + num_blocks]
    return protect_first_frame(local_mask, grid, first_block, Q_ROWS, k_rows)


def pack_block_indices(mask: Tensor, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Converts a bool mask [..., n] to int32 indices [..., n] and counts [...].

    Each row has the indices of its True values, ascending, then `fill`. Uses a scatter instead of a
    sort.
    """
    size = mask.shape[-1]
    indices = torch.arange(size, dtype=torch.int32, device=mask.device).expand(mask.shape)
    slots = torch.where(mask, mask.cumsum(-1) - 1, size)  # False values go to an extra slot
    packed = indices.new_full((*mask.shape[:-1], size + 1), fill).scatter_(-1, slots, indices)
    return packed[..., :-1].contiguous(), mask.sum(-1, dtype=torch.int32)


def make_select_table(mask_Nqk: Tensor) -> tuple[Tensor, Tensor]:
    """Makes rf_v2's table: int64 block indices [nq,N,nk] padded by -1, and counts [nq,N]."""
    blocks, num_kept = pack_block_indices(mask_Nqk.transpose(0, 1), -1)
    return blocks.long(), num_kept.long()
