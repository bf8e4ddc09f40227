"""Which dtype the parts of a DiT are computed in; the whole table is in docs/numerics.md."""

from __future__ import annotations

_FP32_PREFIXES = ("time_embedding.", "time_projection.", "head.")


def keeps_fp32(name: str) -> bool:
    """Whether the official code computes with this parameter of a DiT in float32."""
    return name.startswith(_FP32_PREFIXES) or name.endswith("modulation") or "norm" in name
