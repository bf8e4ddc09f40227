"""Large tensors of the official test vectors, computed from their names instead of stored."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix_bits(z: np.ndarray) -> np.ndarray:
    """Mixes the bits of each number in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def make_procedural_tensor(seed: int, name: str, shape: Sequence[int], log2_scale: int) -> Tensor:
    """Compute a float32 tensor whose values are exact in bfloat16."""
    key = _mix_bits(np.array([(seed << 32) | zlib.crc32(name.encode())], np.uint64) + _STEP)
    z = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    z *= _STEP
    z += key
    z = _mix_bits(z)
    z >>= np.uint64(56)
    values = ((2 * np.arange(256) - 255) / 256 * 2.0**log2_scale).astype(np.float32)
    return torch.from_numpy(values[z]).reshape(tuple(shape))
