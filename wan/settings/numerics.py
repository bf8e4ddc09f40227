"""Sizes and dtypes on which results or kernels depend, shared by settings, kernels and planner.

Does not import torch; device types are PyTorch's ("cpu", "cuda", "npu").
"""

from __future__ import annotations

Q_ROWS = 128  # queries per FP8 scale, per RainFusion mask block and per reference tile
KV_ROWS = 256  # keys or values per FP8 scale
LASER_ROWS = 2048  # minimum of queries and keys; below, mindiesd silently uses another kernel
LASER_HEAD = 128  # maximum of channels of a head; the laser kernel pads smaller heads

_FP32_PREFIXES = ("time_embedding.", "time_projection.", "head.", "img_emb.")

# CPU: 4 MiB of float32 are small enough that the allocator reuses the memory without page faults,
# and large enough that threads rarely wait for each other. Accelerators: a slice takes longer than
# its kernel launch.
_SLICE = {"cpu": 1 << 20}
_SLICE_ELSEWHERE = 1 << 24
_INT8_SLICE = {"cpu": 1 << 22}  # the float32 output is written and read several times
_INT8_SLICE_ELSEWHERE = 1 << 26


def keeps_fp32(name: str) -> bool:
    """Whether the official code computes with this DiT parameter (or layer) in float32."""
    return name.startswith(_FP32_PREFIXES) or name.endswith("modulation") or "norm" in name


def get_slice_numel(device_type: str) -> int:
    """Returns the number of elements per slice of a block's element-wise float32 operations."""
    return _SLICE.get(device_type, _SLICE_ELSEWHERE)


def get_int8_slice_numel(device_type: str) -> int:
    """Returns the number of output elements per slice of an int8 linear layer."""
    return _INT8_SLICE.get(device_type, _INT8_SLICE_ELSEWHERE)
