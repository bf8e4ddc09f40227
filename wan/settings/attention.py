"""How self-attention is computed: kernel, quantisation, sparsity, clock. Values only."""

from __future__ import annotations

from dataclasses import dataclass

ALGORITHMS = ("fused", "laser")
RAINFUSION_TYPES = ("v1", "v2", "v3")
FUSED_OPS = ("rope", "rms_norm", "layer_norm", "scale_shift")
LASER_ROWS = 2048  # below, mindiesd silently takes its other kernel
BLOCK = 128  # rows of a query block: of an FP8 scale, and of RainFusion's masks
KV_BLOCK = 256  # rows of an FP8 scale of keys or values


@dataclass(frozen=True)
class RainFusion:
    """Block-sparse attention (MindIE-SD's RainFusion) from sampling step `start_step` on.

    sparsity: share of each row's blocks that is left out, 0 <= sparsity < 1. refresh: a mask is
    used for that many steps.
    """

    type: str
    sparsity: float
    start_step: int
    refresh: int = 1


@dataclass(frozen=True)
class Attention:
    """What an attention layer does with the q, k, v of one chunk.

    algorithm: which dense kernel of an NPU. fa_quant: None or "fp8". quant_alltoall: FP8 numbers
    travel in the exchanges. fused_ops: which small operations run as fused vendor kernels.
    freq_cap, freq_restore: clock in MHz around self-attention, and after it; None: not touched.
    """

    algorithm: str = "fused"
    fa_quant: str | None = None
    quant_alltoall: bool = False
    rainfusion: RainFusion | None = None
    fused_ops: tuple[str, ...] = ()
    freq_cap: int | None = None
    freq_restore: int = 1650

    @property
    def is_plain(self) -> bool:
        """Dense attention in the run's own number format, at every step."""
        return self.fa_quant is None and self.rainfusion is None

    def row_multiple(self, ring_size: int) -> int:
        """A card's tokens are padded to a multiple of this, so that blocks end where shards do."""
        if self.quant_alltoall:
            return KV_BLOCK
        blocks = self.rainfusion is not None or (self.fa_quant is not None and ring_size > 1)
        return BLOCK if blocks else 1
