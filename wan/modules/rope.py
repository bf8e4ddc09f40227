"""Three-axis rotary position embedding (RoPE, arXiv:2104.09864) of the Wan video transformer.

Legend: B batch, S tokens, N heads, D head size. Adjacent channels (2j, 2j+1) form a pair that is
rotated by position * 10000^(-2j/a) inside an axis of a channels. The D channels are split between
frame, height and width as D - 4*(D//6), 2*(D//6), 2*(D//6): 44/42/42 for 128.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

RopeTable = tuple[Tensor, Tensor]
"""(cos, signed sin), both float32 [S, 1, D]; see `make_rope_table`."""


def split_head_dim(head_dim: int) -> tuple[int, int, int]:
    """Splits the channels of a head between frame, height and width."""
    return head_dim - 4 * (head_dim // 6), 2 * (head_dim // 6), 2 * (head_dim // 6)


GridPositions = Sequence[int | Sequence[int]]
"""Token positions along frame, height and width; a number n means 0 to n-1."""


def compute_rope_angles(grid: GridPositions, head_dim: int) -> Tensor:
    """Computes the angles, float64 [S, D/2], of tokens in (frame, height, width) raster order."""
    positions = [range(axis) if isinstance(axis, int) else axis for axis in grid]
    lengths, axis_angles = [len(axis) for axis in positions], []
    for axis, (axis_positions, channels) in enumerate(
        zip(positions, split_head_dim(head_dim), strict=True)
    ):
        exponents = torch.arange(0, channels, 2, dtype=torch.float64) / max(channels, 1)
        angles = torch.outer(torch.tensor(axis_positions, dtype=torch.float64), 10000.0**-exponents)
        shape = [1, 1, 1, angles.shape[1]]
        shape[axis] = lengths[axis]
        axis_angles.append(angles.view(shape).expand(*lengths, angles.shape[1]))
    return torch.cat(axis_angles, dim=-1).flatten(0, 2)


def make_rope_table(grid: GridPositions, head_dim: int) -> RopeTable:
    """Makes the table of a grid: computed in float64, stored in float32 for `apply_rope`."""
    return tabulate_rope_angles(compute_rope_angles(grid, head_dim))


def tabulate_rope_angles(angles: Tensor) -> RopeTable:
    """Makes the table of angles, float64 [S, D/2]."""
    return _make_signed_table(angles.cos(), angles.sin())


def _make_signed_table(cos: Tensor, sin: Tensor) -> RopeTable:
    signed_sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    return cos.repeat_interleave(2, dim=-1).float()[:, None], signed_sin.float()[:, None]


def apply_rope(x_BSND: Tensor, table: RopeTable) -> Tensor:
    """Rotates every channel pair of x by the angles of its token; float32 in, float32 out.

    Real arithmetic: (a, b) -> (a cos - b sin, b cos + a sin), because NPUs have no complex type.
    """
    cos, signed_sin = table
    return torch.addcmul(x_BSND * cos, _swap_pairs(x_BSND), signed_sin)


def _swap_pairs(x_BSND: Tensor) -> Tensor:
    """Swaps every pair of channels, (a, b) to (b, a)."""
    if torch.compiler.is_compiling():  # shifted reads, which a CPU compiler can vectorize
        is_even = torch.arange(x_BSND.shape[-1], device=x_BSND.device) % 2 == 0
        next_channel = F.pad(x_BSND[..., 1:], (0, 1))
        previous_channel = F.pad(x_BSND[..., :-1], (1, 0))
        return torch.where(is_even, next_channel, previous_channel)
    first, second = x_BSND.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((second, first), dim=-1).flatten(-2)  # a flip of an axis of 2 is slow


def rope_params(max_seq_len: int, dim: int, theta: float = 10000) -> Tensor:
    """Computes the official table of one axis, complex128 [max_seq_len, dim/2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles)


def rope_apply(x: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
    """Rotates like the official function; the tokens after those of a sample's grid stay.

    Args:
        x: [B,S,N,D].
        grid_sizes: Tokens along frame, height and width of each sample, [B,3].
        freqs: The tables of the three axes (`rope_params`), concatenated to [positions, D/2].

    Returns:
        float32 [B,S,N,D].
    """
    axes = freqs.split([size // 2 for size in split_head_dim(x.shape[-1])], dim=1)
    out = x.float().clone()
    for sample, grid in zip(out, grid_sizes.tolist(), strict=True):
        shapes = ([grid[i] if i == axis else 1 for i in range(3)] for axis in range(3))
        values = torch.cat(
            [
                table[:length].view(*shape, -1).expand(*grid, -1)
                for table, length, shape in zip(axes, grid, shapes, strict=True)
            ],
            dim=-1,
        ).flatten(0, 2)
        table = _make_signed_table(values.real, values.imag)
        sample[: len(values)] = apply_rope(
            sample[: len(values)], (table[0].to(x.device), table[1].to(x.device))
        )
    return out


class RopeCache:
    """Caches the RoPE table of the last grid and device."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self._key: object = None
        self._table: RopeTable | None = None

    def get(
        self,
        grid: tuple[int, int, int],
        device: torch.device,
        shard: Callable[[Tensor, tuple[int, int, int]], Tensor],
    ) -> RopeTable:
        """Returns the rows of this rank's tokens, which `shard` selects from the grid's table."""
        key = (grid, device, shard)
        if self._table is None or self._key != key:
            if device.type == "meta":  # planning: only the sizes count
                cos = sin = torch.zeros(()).expand(prod(grid), 1, self.head_dim)
            else:
                cos, sin = make_rope_table(grid, self.head_dim)
            cos, sin = (shard(rows[None], grid)[0].to(device) for rows in (cos, sin))
            self._table = (cos, sin)
            self._key = key
        return self._table
