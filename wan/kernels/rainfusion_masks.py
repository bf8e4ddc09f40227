"""RainFusion's plan: the order of the tokens and which blocks attend to which, as pure functions.

Follows rf_v2 / rf_v3 of MindIE-SD 3.1.0, bit for bit on one device, because a block near the
threshold would otherwise be kept here and left out there. Three differences, all where MindIE-SD
fails: grids narrower than a window, a single frame, and rows that are a part of the sequence.

Legend: B batch, S tokens, N heads, D head size, nq and nk blocks of queries and of keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.settings.numerics import Q_ROWS
from wan.settings.schedule import Grid

WINDOW = 8  # rows and columns of a window


def window_order(grid: Grid) -> Tensor:
    """int64 [S]: the raster place of the token that stands at each place of RainFusion's order.

    Neighbours in space become neighbours in the sequence: windows of 8 x 8 tokens of one frame.
    Where they do not fill a frame, the first frame keeps its raster order, and each later frame is
    its windows, then the rows below them (full width), then the columns beside them.

    Raises ValueError for a grid that is not three positive sizes.
    """
    if len(grid) != 3 or min(grid) < 1:
        raise ValueError(f"grid must be three positive sizes (frames, height, width), got {grid}")
    _, height, width = grid
    raster = torch.arange(math.prod(grid)).view(grid)
    rows, columns = height - height % WINDOW, width - width % WINDOW
    if (rows, columns) == (height, width):
        return _windows(raster).flatten()
    later = raster[1:]
    parts = (_windows(later[:, :rows, :columns]), later[:, rows:], later[:, :rows, columns:])
    return torch.cat([raster[0].flatten(), torch.cat([x.flatten(1) for x in parts], 1).flatten()])


def _windows(x: Tensor) -> Tensor:
    """[t, h, w] -> [t, h/8, w/8, 8, 8]."""
    frames, height, width = x.shape
    split = x.reshape(frames, height // WINDOW, WINDOW, width // WINDOW, WINDOW)
    return split.transpose(2, 3)


def pooled(x_BSND: Tensor, rows: int) -> Tensor:
    """[B,ceil(S/rows),N,D] in x's dtype: the mean of each run of rows, of the last what is there.

    Raises ValueError for rows < 1.
    """
    if rows < 1:
        raise ValueError(f"rows of a block must be at least 1, got {rows}")
    full = x_BSND.shape[1] // rows
    whole, tail = x_BSND[:, : full * rows], x_BSND[:, full * rows :]
    means = [whole.unflatten(1, (full, rows)).mean(2)] if full else []
    if tail.shape[1]:
        means.append(tail.unsqueeze(1).mean(2))
    return means[0] if len(means) == 1 else torch.cat(means, 1)


def block_mask(q_pool: Tensor, k_pool: Tensor, sparsity: float, scale: float) -> Tensor:
    """bool [B,N,nq,nk], True = attend: each row's highest ceil(nk * (1 - sparsity)) blocks.

    q_pool [B,nq,N,D], k_pool [B,nk,N,D]: means of blocks. The scores are a softmax in their dtype.
    A block as high as the last one kept is kept too, so a row may keep more.

    Raises ValueError for a sparsity outside 0 <= sparsity < 1.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be at least 0 and below 1, got {sparsity}")
    scores = torch.einsum("blnd,bsnd->bnls", q_pool, k_pool) * scale
    shares = F.softmax(scores, dim=-1)
    kept = math.ceil(shares.shape[-1] * (1 - sparsity))
    return shares >= torch.topk(shares, kept, dim=-1).values[..., -1:]


def protect(
    mask_BNqk: Tensor, grid: Grid, first_block: int = 0, q_rows: int = Q_ROWS, k_rows: int = Q_ROWS
) -> Tensor:
    """The mask with all that the first frame's blocks attend to, and all that attends to them.

    first_block: place of the mask's first row among all blocks of queries.
    """
    nq, nk = mask_BNqk.shape[-2:]
    frame = grid[1] * grid[2]
    q_first = torch.arange(first_block, first_block + nq, device=mask_BNqk.device)
    k_first = torch.arange(nk, device=mask_BNqk.device)
    q_in, k_in = q_first < math.ceil(frame / q_rows), k_first < math.ceil(frame / k_rows)
    return mask_BNqk | q_in[:, None] | k_in


def plan(
    q_BSND: Tensor, k_BSND: Tensor, grid: Grid, sparsity: float, first_row: int, k_rows: int
) -> Tensor:
    """bool [B,N,nq,nk]: which blocks of k_rows keys each block of 128 queries attends to.

    q, k in `window_order`; k is the whole sequence, q may be a part of it that begins at first_row.
    A part gets the rows of the whole's mask: its scores are computed in the whole's shape, since
    another shape may round otherwise.

    Raises ValueError where first_row is no multiple of 128, q has no row, or q, k and grid do not
    fit together.
    """
    total, rows = k_BSND.shape[1], q_BSND.shape[1]
    fits = total == math.prod(grid) and 0 < rows <= total - first_row
    if not fits or first_row % Q_ROWS:
        raise ValueError(
            f"RainFusion needs all keys of the grid and queries from a multiple of {Q_ROWS} on: "
            f"got {total} keys for grid {grid}, and {rows} queries from row {first_row} on"
        )
    q_pool, first_block = pooled(q_BSND, Q_ROWS), first_row // Q_ROWS
    blocks = q_pool.shape[1]
    behind = math.ceil(total / Q_ROWS) - first_block - blocks
    q_pool = F.pad(q_pool, (0, 0, 0, 0, first_block, behind))
    mask = block_mask(q_pool, pooled(k_BSND, k_rows), sparsity, q_BSND.shape[-1] ** -0.5)
    mine = mask[:, :, first_block : first_block + blocks]
    return protect(mine, grid, first_block, Q_ROWS, k_rows)


def kept_first(mask: Tensor, fill: int = 0) -> tuple[Tensor, Tensor]:
    """For a bool mask [..., n]: int32 [..., n], each row's kept places ascending and then `fill`;
    int32 [...], how many are kept.

    No sort: a place is scattered to where it stands among the kept ones.
    """
    size = mask.shape[-1]
    places = torch.arange(size, dtype=torch.int32, device=mask.device).expand(mask.shape)
    rank = torch.where(mask, mask.cumsum(-1) - 1, size)  # what is left out goes behind the end
    kept = places.new_full((*mask.shape[:-1], size + 1), fill).scatter_(-1, rank, places)
    return kept[..., :-1].contiguous(), mask.sum(-1, dtype=torch.int32)


def select_table(mask_Nqk: Tensor) -> tuple[Tensor, Tensor]:
    """rf_v2's table: int64 [nq,N,nk], a row's kept blocks and then -1; int64 [nq,N], how many."""
    blocks, kept = kept_first(mask_Nqk.transpose(0, 1), -1)
    return blocks.long(), kept.long()
