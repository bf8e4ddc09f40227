"""VACE on several ranks predicts what it predicts in one process, at token counts of any kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import slow
from tests.dist import run
from tests.distributed.test_s2v import LAYOUTS, Collectives
from tests.distributed.topology import ROWS, Topology, attention_layer, blocks_of
from tests.distributed.velocities import compare, randomised
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import StepInfo
from wan.modules.interfaces import Collaborators
from wan.modules.vace import VaceWanModel

pytestmark = pytest.mark.dist

SIZES = {"dim": 96, "ffn_dim": 128, "freq_dim": 32, "num_heads": 12, "num_layers": 4}
TEXT = {"text_dim": 16, "text_len": 20}
LAYERS = (0, 3)
GRIDS = {105: (3, 5, 7), 30: (2, 3, 5), 3: (3, 1, 1)}


def network(**collaborators: Any) -> VaceWanModel:
    """The same random weights every time."""
    torch.manual_seed(0)
    given = Collaborators(text_kv_cache=True, **collaborators)
    net = VaceWanModel(vace_layers=LAYERS, **SIZES, **TEXT, collaborators=given)
    randomised(net)
    return net


def velocities(net: VaceWanModel, grid: tuple[int, int, int]) -> Tensor:
    """Of two steps and both branches; the text's keys and values are kept from the first step."""
    random = torch.Generator().manual_seed(math.prod(grid))
    frames, sides = grid[0], (2 * grid[1], 2 * grid[2])

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    x, control = noise(16, frames, *sides), noise(96, frames, *sides)
    texts, found = {"cond": noise(7, 16), "uncond": noise(20, 16)}, []
    for index, t in enumerate((900, 300)):
        for branch, text in texts.items():
            step = StepInfo(index, 2, branch, "dit", grid, math.prod(grid))
            found += net(
                *([x], torch.tensor([t]), [control], [text], math.prod(grid), [1.0, 0.5]), step=step
            )
    return torch.stack(found)


@pytest.mark.parametrize(
    ("world", "tokens", "modes"),
    [
        (2, [105, 3], ["0", "1", "2"]),
        slow(2, [*GRIDS], [*ROWS]),
        slow(3, [*GRIDS], [*ROWS]),
        slow(4, [*GRIDS], [*ROWS]),
    ],
)
def test_the_same_velocities(world: int, tokens: list[int], modes: list[str]) -> None:
    chosen = {count: GRIDS[count] for count in tokens}
    for largest in run(
        world, compare, network, velocities, chosen, LAYOUTS[world], modes, "split", timeout=500
    ):
        assert largest > 0.5, "a model that says nothing would always agree"


@torch.no_grad()
def collectives() -> dict[str, int]:
    """Of two steps with two branches each."""
    layer = attention_layer(Topology(2, 1), "0")
    net = network(attention=blocks_of(layer), tokens=ShardedTokens(None))
    with Collectives() as counted:
        velocities(net, GRIDS[105])
    return dict(counted.found)


def test_a_control_block_exchanges_as_any_block() -> None:
    """Four all-to-alls in each block and one gathering of velocities in each of four forwards."""
    blocks = SIZES["num_layers"] + len(LAYERS)
    for found in run(2, collectives):
        assert found == {"alltoall_base_": 4 * blocks * 4, "_allgather_base_": 4}
