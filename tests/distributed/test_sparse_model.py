"""WanModel with tokens in RainFusion's order: with sparsity 0 it is the dense model.

This checks the order of patches, positions and timesteps, its sharding and its inverse for
every kind of model; sparse models on ranks are compared with the sparse model in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist import run_on_ranks
from tests.distributed.methods import make_small_methods
from tests.distributed.test_model import Job
from tests.distributed.topology import ROWS, Topology, attention_layer
from wan.distributed.sequence_shards import ShardedSequence
from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import AttentionBackend
from wan.kernels.rainfusion_masks import make_window_order
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.model import WanModel

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]

JOBS = {
    "t2v": Job(grid=(3, 9, 10)),
    "i2v": Job("i2v", grid=(2, 16, 8)),
    "ti2v": Job("ti2v", grid=(3, 10, 9)),
    "vace": Job("vace", grid=(3, 9, 10)),
    "vace-batch": Job("vace", batch=2, grid=(2, 9, 17), contexts=(7,)),
    "ti2v-batch": Job("ti2v", batch=2, grid=(2, 9, 17)),
}
LAYOUTS = {
    2: [Topology(2, 1), Topology(1, 2)],
    4: [Topology(4, 1), Topology(2, 2, "bidirectional")],
}


def rainfusion(sparsity: float, fp8: bool = False) -> tuple[AttentionBackend, ...]:
    return make_small_methods("v3-fp8" if fp8 else "v3", sparsity)


def velocities(job: Job, methods: tuple[AttentionBackend, ...], **components: Any) -> Tensor:
    """Predict velocities. components: attention and sequence shard of a rank, or none."""
    if not components:
        layer = FAPowerCapAttention(SimpleNamespace(comm_type=0), None, methods=methods)
        components = {
            "attention": layer,
            "sequence_shard": ShardedSequence(None, 1, make_window_order),
        }
    net: WanModel = job.model(**components)
    return torch.stack(job.velocities(net))


@torch.inference_mode()
def test_nothing_left_out_is_the_dense_model() -> None:
    """With sparsity above 0 the result differs."""
    dense = {name: torch.stack(job.velocities(job.model())) for name, job in JOBS.items()}
    errors = {
        name: float((velocities(job, rainfusion(0)) - dense[name]).abs().max())
        for name, job in JOBS.items()
    }
    assert not {name: error for name, error in errors.items() if not error <= 2e-5}
    assert (velocities(JOBS["t2v"], rainfusion(0.6)) - dense["t2v"]).abs().max() > 1e-3


@torch.inference_mode()
def test_timesteps_of_single_tokens_follow_their_tokens() -> None:
    job = Job("ti2v", grid=(2, 9, 10))
    t = torch.full((1, job.tokens), 700).index_fill(1, torch.arange(3, job.tokens, 7), 0)
    x, context = torch.randn(48, 2, 18, 20), torch.randn(5, 16)
    layer = FAPowerCapAttention(SimpleNamespace(comm_type=0), None, methods=rainfusion(0))
    ordered = job.model(attention=layer, sequence_shard=ShardedSequence(None, 1, make_window_order))
    step = StepInfo(0, 2, "cond", "dit", job.grid, job.tokens)
    actual, dense = (
        net([x], t, [context], job.tokens, step=step)[0] for net in (ordered, job.model())
    )
    torch.testing.assert_close(actual, dense, atol=2e-5, rtol=0)


Way = tuple[Topology, str]
"""(ranks, mode)."""


@torch.inference_mode()
def compute_velocities(job: Job, layout_modes: Sequence[Way], fp8: bool) -> dict[Way, Tensor]:
    """On one rank: return the velocities of each layout and mode."""
    results = {}
    for topology, mode in layout_modes:
        layer = attention_layer(topology, mode, methods=rainfusion(0.6, fp8))
        tokens = ShardedSequence(None, 128, make_window_order)
        results[topology, mode] = velocities(job, (), attention=layer, sequence_shard=tokens)
    return results


def check_velocities(job: Job, layout_modes: Sequence[Way], fp8: bool = False) -> None:
    """Compare with one process, and bit for bit with the first mode of the same layout."""
    with torch.inference_mode():
        expected = velocities(job, rainfusion(0.6, fp8))
    firsts = {topology: (topology, mode) for topology, mode in reversed(layout_modes)}
    for results in run_on_ranks(
        layout_modes[0][0].world, compute_velocities, job, layout_modes, fp8
    ):
        errors = {way: float((x - expected).abs().max()) for way, x in results.items()}
        assert not {way: error for way, error in errors.items() if not error <= 2e-5}, job
        assert not [way for way, x in results.items() if not x.equal(results[firsts[way[0]]])], job


def test_ranks_predict_what_one_process_does() -> None:
    """Kinds of models on both layouts in two modes; t2v in FP8 with each mode in one layout."""
    modes = [*ROWS]
    for turn, name in enumerate(("t2v", "i2v", "vace-batch", "ti2v-batch")):
        both = modes[turn], modes[(turn + 1) % 4]
        check_velocities(JOBS[name], list(product(LAYOUTS[2], both)))
    fp8 = [(LAYOUTS[2][turn % 2], mode) for turn, mode in enumerate(modes)]
    check_velocities(JOBS["t2v"], fp8, fp8=True)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_predict_it_in_all_modes(world: int, job: Job) -> None:
    check_velocities(job, list(product(LAYOUTS[world], ROWS)))
