"""Animate on several ranks predicts what it predicts in one process, at token counts of any kind.

The official sequence parallelism is wrong here, or fails, where padding does not divide by frames.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import slow
from tests.dist import run
from tests.distributed.test_s2v import LAYOUTS, Collectives
from tests.distributed.topology import ROWS, Topology, attention_layer, blocks_of
from tests.distributed.velocities import compare, randomised
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import StepInfo
from wan.modules.animate import WanAnimateModel
from wan.modules.interfaces import Collaborators

pytestmark = pytest.mark.dist

SIZES = {"dim": 96, "ffn_dim": 128, "freq_dim": 32, "num_heads": 12, "num_layers": 10}
TEXT = {"text_dim": 16, "text_len": 20, "image_dim": 24}
GRIDS = {105: (3, 5, 7), 30: (2, 3, 5), 8: (4, 1, 2)}


class Pooled(nn.Module):
    """Stands for the motion encoder, which every rank computes alike and which takes seconds."""

    def forward(self, faces_P3HW: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(faces_P3HW, (1, 171)).flatten(1)[:, :512]


def network(**collaborators: Any) -> WanAnimateModel:
    """The same random weights every time."""
    torch.manual_seed(0)
    given = Collaborators(text_kv_cache=True, **collaborators)
    net = WanAnimateModel(**SIZES, **TEXT, collaborators=given)
    net.motion_encoder = Pooled()
    randomised(net)
    return net


def velocities(net: WanAnimateModel, grid: tuple[int, int, int]) -> Tensor:
    """Of two steps and both branches; what depends on the clip is kept from the first step."""
    random = torch.Generator().manual_seed(math.prod(grid))
    frames, sides = grid[0], (2 * grid[1], 2 * grid[2])

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    scene = {
        "clip_fea": noise(1, 5, 24),
        "y": [noise(20, frames, *sides)],
        "pose_latents": noise(1, 16, frames - 1, *sides),
    }
    faces = noise(1, 3, 4 * (frames - 2) + 1, 1, 512).expand(-1, -1, -1, 512, -1)
    seen = {"cond": faces, "uncond": torch.full_like(faces, -1.0)}
    x, texts = noise(16, frames, *sides), {"cond": noise(7, 16), "uncond": noise(20, 16)}
    found = []
    for index, t in enumerate((900, 300)):
        for branch, face in seen.items():
            step = StepInfo(index, 2, branch, "dit", grid, math.prod(grid))
            more: Any = {**scene, "face_pixel_values": face, "context": [texts[branch]]}
            found += net([x], torch.tensor([t]), seq_len=math.prod(grid), **more, step=step)
    return torch.stack(found)


@pytest.mark.parametrize(
    ("world", "tokens", "modes"),
    [
        (2, [105], ["0", "1"]),
        (4, [30], ["0", "2"]),
        slow(2, [*GRIDS], [*ROWS]),
        slow(3, [*GRIDS], [*ROWS]),
        slow(4, [*GRIDS], [*ROWS]),
        slow(8, [*GRIDS], [*ROWS]),
    ],
)
def test_the_same_velocities(world: int, tokens: list[int], modes: list[str]) -> None:
    chosen = {count: GRIDS[count] for count in tokens}
    for largest in run(
        world, compare, network, velocities, chosen, LAYOUTS[world], modes, "split", timeout=500
    ):
        assert largest > 0.5, "a model that says nothing would always agree"


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 8])
def test_fused_exchanges(world: int) -> None:
    chosen = {count: GRIDS[count] for count in (105, 30)}
    modes, layouts = ["0", "1"], LAYOUTS[world][:1]
    run(world, compare, network, velocities, chosen, layouts, modes, "fused", timeout=300)


@torch.no_grad()
def collectives() -> dict[str, int]:
    """Of two steps with two branches each."""
    layer = attention_layer(Topology(2, 1), "0")
    net = network(attention=blocks_of(layer), tokens=ShardedTokens(None))
    with Collectives() as counted:
        velocities(net, GRIDS[105])
    return dict(counted.found)


def test_seeing_a_face_needs_no_exchange() -> None:
    """Four all-to-alls in each layer and one gathering of velocities in each of four forwards."""
    for found in run(2, collectives):
        assert found == {"alltoall_base_": 4 * SIZES["num_layers"] * 4, "_allgather_base_": 4}
