"""Which ways of attending a run uses, and what a ring holds of other ranks: integers only."""

from __future__ import annotations

from wan.settings.attention import Attention
from wan.settings.parallel import Parallel


def ways(attention: Attention) -> tuple[str, ...]:
    """How the steps of a run attend: "dense" or "fp8", "sparse"."""
    rain = attention.rainfusion
    usual = "dense" if attention.fa_quant is None else "fp8"
    if rain is None:
        return (usual,)
    return ("sparse",) if rain.start_step == 0 else (usual, "sparse")


def ring_blocks(parallel: Parallel) -> int:
    """K/V blocks of other ranks that a rank holds at once: at hand, and arriving."""
    size = parallel.ring_size
    if parallel.ring_type == "ring":
        return min(size - 1, 2)
    most = 0
    for rank in range(size):
        arriving = [(rank >= t) + (rank + t < size) for t in range(1, size)]
        pairs = zip([0, *arriving], [*arriving, 0], strict=True)
        most = max(most, *(held + new for held, new in pairs))
    return most
