"""How self-attention is computed: kernel, quantisation, sparsity, clock. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALGORITHMS = ("fused", "laser")
RAINFUSION_TYPES = ("v1", "v2", "v3")
FUSED_OPS = ("rope", "rms_norm", "layer_norm", "scale_shift")
LASER_ROWS = 2048  # below, mindiesd silently takes its other kernel
BLOCK = 128  # rows of a query block: of an FP8 scale, and of RainFusion's masks
KV_BLOCK = 256  # rows of an FP8 scale of keys or values
RESTORE = 1650  # MHz


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
    """What an attention layer does with q, k, v of one chunk. `attention_flags` makes checked ones.

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
    freq_restore: int = RESTORE

    @property
    def is_plain(self) -> bool:
        """Dense attention in the run's own number format, at every step."""
        return self.fa_quant is None and self.rainfusion is None

    def row_multiple(self, ring_size: int) -> int:
        """A card's tokens are padded to a multiple of this.

        So that blocks end where the rows do that a card attends from: without a ring all of them,
        unless numbers are quantised before they are exchanged.
        """
        if self.quant_alltoall:
            return KV_BLOCK
        return BLOCK if ring_size > 1 and not self.is_plain else 1

    def record(self) -> dict[str, Any]:
        """Under their flags' names, what a repeat of the video needs beside the flags given.

        Also what is off, as a variable may ask for it. RainFusion's first step is not among it: if
        it was not given, it follows the repeat's own steps.
        """
        rain = self.rainfusion
        chosen = {
            "attention_algo": self.algorithm,
            "fa_quant": self.fa_quant or "none",
            "fused_ops": self.fused_ops,
        }
        if rain is None:
            return chosen
        return chosen | {
            "sparsity": rain.sparsity,
            "rainfusion_type": rain.type,
            "mask_refresh_interval": rain.refresh,
        }


def npu_flag(attention: Attention) -> str | None:
    """The first flag given of those that exist on NPUs only."""
    if attention.algorithm == "laser":
        return "--attention_algo laser (or ALGO=1)"
    if attention.fused_ops:
        return "--fused_ops (or FAST_LAYERNORM=1, ROPE_OPT=1)"
    return None if attention.freq_cap is None else "--fa_freq_cap"
