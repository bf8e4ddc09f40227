"""Compiled small operations on ranks: modes, backends and shards agree as without them.

The compiler runs on every rank, so these tests are slow (`make test-all`).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.dist import run_on_ranks
from tests.distributed.methods import make_small_methods
from tests.distributed.test_model import Job
from tests.distributed.topology import ROWS, Topology, attention_layer
from wan.distributed.sequence_shards import ShardedSequence
from wan.kernels.compiled_ops import STEPS_BY_OP, CompiledOps
from wan.kernels.rainfusion_masks import make_window_order
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.fused_ops import BlockOps

pytestmark = [pytest.mark.dist, pytest.mark.slow]
JOB = Job("ti2v", heads=12, grid=(3, 9, 10))
TOPOLOGIES = [Topology(2, 1), Topology(1, 2), Topology(1, 2, "bidirectional")]


def tokens(kind: str, multiple: int) -> ShardedSequence:
    return ShardedSequence(None, multiple, make_window_order if kind[0] == "v" else None)


@torch.inference_mode()
def compare_modes(kind: str, topologies: list[Topology], expected: Tensor) -> None:
    velocities = {}
    torch._dynamo.reset()
    compiled = CompiledOps(STEPS_BY_OP, min_elements=0)
    ops = BlockOps(run_op=compiled)
    for topology in topologies:
        for mode in ROWS:
            layer = attention_layer(topology, mode, methods=make_small_methods(kind))
            net = JOB.model(attention=layer, sequence_shard=tokens(kind, 128), ops=ops)
            velocities[topology, mode] = torch.stack(JOB.velocities(net))
    assert compiled.compiled.keys() == {step for steps in STEPS_BY_OP.values() for step in steps}
    for (topology, mode), result in velocities.items():
        error = (result - expected).abs().max()
        assert error <= 2e-5, f"off by {error} with {topology}, {mode}"
        equal = torch.equal(result, velocities[topology, "0"])
        assert equal or (kind == "dense" and ROWS[mode].blocks > 1), (topology, mode)


@pytest.mark.parametrize("kind", ["dense", "fp8", "v2", "v3", "v3-fp8"])
def test_modes_and_rings_with_compiled_operations(kind: str) -> None:
    """Close to one process without compiled operations; modes agree as without them."""
    layer = FAPowerCapAttention(
        SimpleNamespace(comm_type=0), None, methods=make_small_methods(kind)
    )
    with torch.inference_mode():
        single_model = JOB.model(attention=layer, sequence_shard=tokens(kind, 1))
        expected = torch.stack(JOB.velocities(single_model))
    run_on_ranks(2, compare_modes, kind, TOPOLOGIES, expected, timeout=300)
