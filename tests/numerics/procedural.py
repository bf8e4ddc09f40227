"""Large tensors of the official test vectors, computed from their names instead of stored."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix_bits(z: np.ndarray | np.uint64) -> np.ndarray | np.uint64:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))


def make_procedural_tensor(seed: int, name: str, shape: Sequence[int], log2_scale: int) -> Tensor:
    """Compute a float32 tensor whose values are exact in bfloat16."""
    with np.errstate(over="ignore"):
        key = _mix_bits(np.uint64((seed << 32) | zlib.crc32(name.encode())) + _STEP)
        counts = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
        bytes_ = (_mix_bits(key + counts * _STEP) >> np.uint64(56)).astype(np.int64)
    values = (2 * bytes_ - 255) / 256 * 2.0**log2_scale
    return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape))
