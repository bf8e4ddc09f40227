"""Random inputs and reference attention, computed without `wan`'s kernels and quantizers.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.npu_sim.ranks import HEAD_DIM, SPARSITY, Grid, Kind


def make_random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_qkv(
    rows: int,
    keys: int,
    heads: int = 2,
    size: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make random q, k, v, [B,S,N,D] each."""
    q, k, v = (
        make_random(batch, s, heads, size, seed=i, dtype=dtype)
        for i, s in enumerate((rows, keys, keys))
    )
    return q, k, v


def compute_attention(
    q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Compute dense attention in float64; without a mask 512 rows at a time."""
    q, k, v = (x.double().transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
    attend = F.scaled_dot_product_attention
    if mask is not None:
        return attend(q, k, v, mask).transpose(1, 2)
    return torch.cat([attend(part, k, v) for part in q.split(512, dim=2)], 2).transpose(1, 2)


def log_sum_exp(q_BSND: Tensor, k_BSND: Tensor) -> Tensor:
    """Compute the log-sum-exp [B,N,S] in float64."""
    q, k = (x.double().transpose(1, 2) for x in (q_BSND, k_BSND))
    return (q @ k.mT * q.shape[-1] ** -0.5).logsumexp(-1)


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference."""
    return (actual.double() - expected.double()).abs().max().item()


def relative_rms_error(actual: Tensor, expected: Tensor) -> float:
    """Return the rms of the difference divided by the rms of the expected values."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()


def round_to_fp8(x_BSND: Tensor, rows: int) -> Tensor:
    """Round blocks of rows of each head to E4M3 with one scale, and dequantize to float64."""
    runs = []
    for run in x_BSND.float().split(rows, dim=1):
        scale = run.abs().amax((1, 3), keepdim=True) / 448
        runs.append((run / scale).to(torch.float8_e4m3fn).double() * scale.double())
    return torch.cat(runs, 1)


def make_rotation(size: int) -> Tensor:
    """Make mindiesd's Hadamard rotation, with random signs of rows (seed 1234)."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    flips = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(1234))
    return (2.0 * flips - 1) * torch.tensor(signs) / size**0.5


def compute_fp8_attention(q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor) -> Tensor:
    """Compute float64 attention of the FP8-rounded values."""
    rotation_matrix = make_rotation(HEAD_DIM).to(q_BSND.dtype)
    q, k = (round_to_fp8(x @ rotation_matrix, rows) for x, rows in ((q_BSND, 128), (k_BSND, 256)))
    return compute_attention(q, k, round_to_fp8(v_BSND, 256))


def compute_rainfusion(
    kind: Kind,
    q_BSND: Tensor,
    k_BSND: Tensor,
    v_BSND: Tensor,
    grid: Grid,
    sparsity: float = SPARSITY,
) -> Tensor:
    """Run mindiesd's sparse_attention on tokens in raster order."""
    import mindiesd

    precision_kwargs: dict[str, Any] = {"precision": "fp8"} if kind.way == "v3-fp8" else {}
    precision_kwargs |= {"inner_precise": 4} if kind.chip == "A5" else {}
    return mindiesd.sparse_attention(
        q_BSND, k_BSND, v_BSND, head_num=q_BSND.shape[2], input_layout="BSND",
        sparse_type=f"rf_{kind.way[:2]}", sparsity=sparsity,
        latent_shape_q=list(grid), latent_shape_k=list(grid), **precision_kwargs,
    )  # fmt: skip
