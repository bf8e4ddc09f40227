"""The rig's checkpoint: a t2v-A14B of one layer, with the real number of heads in a size NPUs take.

Everything else is as small as it can be; the width alone (40 x 64) makes 0.2 GB of each expert.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.npu_sim.ranks import HEAD_DIM
from wan.pipeline import tiny as tiny_networks
from wan.pipeline.tiny import make_checkpoint

TASK = "t2v-A14B"


class OneLayer(tiny_networks.TinyTask):
    """A recipe whose DiT has one layer and a narrow feed-forward."""

    @property
    def config(self) -> dict[str, Any]:
        return super().config | {"num_layers": 1, "ffn_dim": 64}


def make(out: Path, task: str = TASK, heads: int = 40, layout: str = "official") -> Path:
    """Write the folder `out` and return it."""
    sizes = replace(tiny_networks.TASKS[task], num_heads=heads, head_dim=HEAD_DIM)
    recipe = OneLayer(**{field.name: getattr(sizes, field.name) for field in fields(sizes)})
    with mock.patch.dict(tiny_networks.TASKS, {task: recipe}):
        return make_checkpoint(task, out, layout=layout)
