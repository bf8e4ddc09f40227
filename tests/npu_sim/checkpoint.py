"""The rig's checkpoint: a t2v-A14B of one layer, with the real number of heads in a size NPUs take.

Everything else is as small as it can be; the width alone (40 x 64) makes 0.2 GB of each expert.
"""

from __future__ import annotations

from pathlib import Path

from tests.npu_sim.ranks import HEAD_DIM
from wan.pipeline.tiny import make_checkpoint
from wan.settings.presets import FACE_EVERY

TASK = "t2v-A14B"


def make(out: Path, task: str = TASK, heads: int = 40, layout: str = "official") -> Path:
    """Write the folder `out` and return it."""
    layers = FACE_EVERY if task == "animate-14B" else 1
    sizes = {"num_heads": heads, "dim": heads * HEAD_DIM, "num_layers": layers, "ffn_dim": 64}
    return make_checkpoint(task, out, layout=layout, sizes=sizes)
