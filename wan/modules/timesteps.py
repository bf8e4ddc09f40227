"""Timesteps as a network sees them (pure, on the host)."""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoidal_embedding(t: Tensor, dim: int) -> Tensor:
    """[..., dim] float32 features (cos block, sin block) of timesteps t.

    Computed in float64, on the host: NPUs have no float64, and the official values need it.
    """
    half = dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = t.to("cpu", torch.float64).unsqueeze(-1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def timestep_runs(t: Tensor, tokens: int) -> tuple[Tensor, tuple[int, ...]]:
    """Timesteps [B] or [1, >= tokens] as values [B or 1, R] and the R lengths of their runs."""
    if t.dim() == 1:
        return t.unsqueeze(1), (tokens,)
    values, counts = torch.unique_consecutive(t[0, :tokens].cpu(), return_counts=True)
    return values.unsqueeze(0), tuple(counts.tolist())
