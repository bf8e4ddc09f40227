"""A test checkpoint: t2v-A14B with one layer and a head size that NPU kernels support.

All other sizes are as small as possible.
"""

from __future__ import annotations

from pathlib import Path

from tests.npu_sim.ranks import HEAD_DIM
from wan.settings.presets import FACE_BLOCK_INTERVAL
from wan.testing.random_checkpoint import make_checkpoint

TASK = "t2v-A14B"


def make_rig_checkpoint(
    out: Path, task: str = TASK, heads: int = 8, layers: int = 1, layout: str = "official"
) -> Path:
    """Write the folder `out` and return it."""
    layers = FACE_BLOCK_INTERVAL if task == "animate-14B" else layers
    sizes = {"num_heads": heads, "dim": heads * HEAD_DIM, "num_layers": layers, "ffn_dim": 64}
    return make_checkpoint(task, out, layout=layout, sizes=sizes)
