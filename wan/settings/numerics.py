"""Sizes and dtypes on which results or kernels depend: each fact once, for settings, kernels, plan.

Nothing here needs torch; device types are PyTorch's ("cpu", "cuda", "npu").
"""

from __future__ import annotations

Q_ROWS = 128  # queries of a block: of an FP8 scale, of RainFusion's masks, of a reference tile
KV_ROWS = 256  # keys or values that share an FP8 scale
LASER_ROWS = 2048  # fewest queries and keys; below, mindiesd silently takes its other kernel
LASER_HEAD = 128  # channels of the laser kernel's heads: smaller heads are padded, none is cut

_FP32_PREFIXES = ("time_embedding.", "time_projection.", "head.", "img_emb.")

# 4 MiB of float32 on a CPU: small enough for memory that is reused without page faults, large
# enough that threads seldom wait for each other. Accelerators: kernels that outlast a launch.
_SLICE = {"cpu": 1 << 20}
_SLICE_ELSEWHERE = 1 << 24
_INT8_SLICE = {"cpu": 1 << 22}  # its float32 output is written and read a few times
_INT8_SLICE_ELSEWHERE = 1 << 26


def keeps_fp32(name: str) -> bool:
    """Whether the official code computes with this DiT parameter (or layer) in float32."""
    return name.startswith(_FP32_PREFIXES) or name.endswith("modulation") or "norm" in name


def slice_elements(device_type: str) -> int:
    """Elements that a block's element-wise float32 steps handle at a time."""
    return _SLICE.get(device_type, _SLICE_ELSEWHERE)


def int8_slice_elements(device_type: str) -> int:
    """Output elements that an int8 linear layer computes at a time."""
    return _INT8_SLICE.get(device_type, _INT8_SLICE_ELSEWHERE)
