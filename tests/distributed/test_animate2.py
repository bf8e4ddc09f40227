"""Animate-2's network gives the same velocities on several ranks as in one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.animate2_network import CASES, SKIPPED, Case, compute_velocity, make_network
from tests.conftest import slow
from tests.dist import run_on_ranks
from tests.distributed.topology import (
    ROWS,
    Topology,
    attention_layer,
    make_block_attention,
    topologies,
)
from wan.distributed.fsdp import FsdpSharding
from wan.distributed.sequence_shards import ShardedSequence

pytestmark = pytest.mark.dist

LOG_SCALE = -1.3


@torch.inference_mode()
def compute_on_rank(
    case: Case, ways: list[tuple[Topology, str, str]]
) -> dict[tuple[Topology, str, str], Tensor]:
    velocities = {}
    for topology, mode, exchange in ways:
        layer = attention_layer(topology, mode, exchange=exchange)
        model = make_network(
            attention=make_block_attention(layer), sequence_shard=ShardedSequence(None)
        )
        velocities[topology, mode, exchange] = compute_velocity(model, case, (SKIPPED,), LOG_SCALE)
    return velocities


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["short clip, other grid"]),
        (4, ["smaller reference"]),  # of 18 tokens: the last rank has padding
        *(slow(world, ["equal grids", "short clip, other grid"]) for world in (1, 2, 3, 4)),
        slow(8, ["equal grids"]),
    ],
)
def test_velocity_on_ranks(world: int, names: list[str], request: pytest.FixtureRequest) -> None:
    """By default every second layout has one mode besides the baseline, in turn."""
    whole = "slow" in request.keywords
    for name in names:
        case, layouts = CASES[name], topologies(world)[:: 1 if whole else world // 2]
        modes = [ROWS if whole else ("0", [*ROWS][1 + n % 3]) for n in range(len(layouts))]
        pairs = zip(layouts, modes, strict=True)
        ways = [(layout, mode, "split") for layout, row in pairs for mode in row]
        ways += product(layouts if whole else layouts[:1], ("1",), ("fused",))
        expected = compute_velocity(make_network(), case, (SKIPPED,), LOG_SCALE)
        for velocities in run_on_ranks(world, compute_on_rank, case, ways):
            for way, velocity in velocities.items():
                assert (velocity - expected).abs().max() <= 2e-5, (name, way)
                baseline = velocities[way[0], "0", "split"]
                assert torch.equal(velocity, baseline) or way[1] == "2", (name, way)
                assert (velocity - baseline).abs().max() <= 1e-6 * expected.abs().max(), (name, way)


@torch.inference_mode()
def compute_with_sharded_weights() -> Tensor:
    model = make_network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    FsdpSharding(mesh, lambda network: network.blocks_and_adapters()).shard(model)
    skip_blocks = (SKIPPED,) if dist.get_rank() else ()
    return compute_velocity(model, CASES["equal grids"], skip_blocks)


def test_sharded_weights_of_a_block_that_one_guidance_branch_skips() -> None:
    """With a rank for each branch, one skips the block, and both gather its weights."""
    for rank, velocity in enumerate(run_on_ranks(2, compute_with_sharded_weights)):
        skip_blocks = (SKIPPED,) if rank else ()
        expected = compute_velocity(make_network(), CASES["equal grids"], skip_blocks)
        assert torch.equal(velocity, expected)
