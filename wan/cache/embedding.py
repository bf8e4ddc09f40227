"""What TeaCache looks at: how much the time embedding changes from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.modules.model import sinusoidal_embedding


def changes(weights: Mapping[str, Tensor], timesteps: Sequence[float]) -> list[float]:
    """mean |e - e_prev| / mean |e_prev| of each timestep's embedding e; 0 of the first.

    weights: the two layers of the network's `time_embedding`, float32, under their names.
    """
    in_weight, in_bias, out_weight, out_bias = (
        weights[f"time_embedding.{layer}.{part}"] for layer in (0, 2) for part in ("weight", "bias")
    )
    features = sinusoidal_embedding(torch.tensor(timesteps), in_weight.shape[1])
    hidden = F.silu(F.linear(features, in_weight, in_bias))
    e = F.linear(hidden, out_weight, out_bias)
    size = e.abs().mean(-1)[:-1]
    return [0.0, *((e[1:] - e[:-1]).abs().mean(-1) / size).tolist()]
