"""WanModel with tokens in RainFusion's order: what leaves nothing out is the dense model.

So the order of patches, positions and timesteps, its sharding and its undoing are right for
every kind of model; sparse models on ranks are compared with the sparse model in one process.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.conftest import slow
from tests.dist import run
from tests.distributed.test_model import Job
from tests.distributed.topology import ROWS, Topology, attention_layer
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import Method, StepInfo
from wan.kernels.fp8 import Fp8Attention, Fp8Quantiser, Rotations, sylvester
from wan.kernels.rainfusion import RainFusionAttention
from wan.kernels.rainfusion_masks import window_order
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.model import WanModel

pytestmark = pytest.mark.dist

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


def rainfusion(sparsity: float, fp8: bool = False) -> tuple[Method, ...]:
    quantiser = Fp8Quantiser(Rotations(8, sylvester)) if fp8 else None
    return (RainFusionAttention("v3", sparsity, 0, quantiser=quantiser),)


def velocities(job: Job, methods: tuple[Method, ...], **where: object) -> Tensor:
    """where: attention and tokens of a rank; else one process."""
    if not where:
        layer = FAPowerCapAttention(SimpleNamespace(comm_type=0), None, methods=methods)
        where = {"attention": layer, "tokens": ShardedTokens(None, 1, window_order)}
    net: WanModel = job.model(**where)
    return torch.stack(job.velocities(net))


@torch.inference_mode()
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_nothing_left_out_is_the_dense_model(job: Job) -> None:
    dense = torch.stack(job.velocities(job.model()))
    torch.testing.assert_close(velocities(job, rainfusion(0)), dense, atol=2e-5, rtol=0)


@torch.inference_mode()
def test_timesteps_of_single_tokens_follow_their_tokens() -> None:
    job = Job("ti2v", grid=(2, 9, 10))
    t = torch.full((1, job.tokens), 700).index_fill(1, torch.arange(3, job.tokens, 7), 0)
    x, context = torch.randn(48, 2, 18, 20), torch.randn(5, 16)
    layer = FAPowerCapAttention(SimpleNamespace(comm_type=0), None, methods=rainfusion(0))
    ordered = job.model(attention=layer, tokens=ShardedTokens(None, 1, window_order))
    step = StepInfo(0, 2, "cond", "dit", job.grid, job.tokens)
    found, dense = (
        net([x], t, [context], job.tokens, step=step)[0] for net in (ordered, job.model())
    )
    torch.testing.assert_close(found, dense, atol=2e-5, rtol=0)


@torch.inference_mode()
def test_something_is_left_out() -> None:
    job = JOBS["t2v"]
    dense = torch.stack(job.velocities(job.model()))
    assert (velocities(job, rainfusion(0.6)) - dense).abs().max() > 1e-3


@torch.inference_mode()
def compare(job: Job, topologies: list[Topology], fp8: bool, expected: Tensor) -> None:
    found = {}
    for topology in topologies:
        for mode in ROWS:
            layer = attention_layer(topology, mode, methods=rainfusion(0.6, fp8))
            tokens = ShardedTokens(None, 128, window_order)
            found[topology, mode] = velocities(job, (), attention=layer, tokens=tokens)
    for case, result in found.items():
        off = (result - expected).abs().max()
        assert off <= 2e-5, f"off by {off} with {case}"
        assert torch.equal(result, found[case[0], "0"])


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("world", [2, slow(4)])
def test_ranks_predict_what_one_process_does(world: int, job: Job) -> None:
    run(world, compare, job, LAYOUTS[world], False, velocities(job, rainfusion(0.6)))


def test_ranks_predict_the_same_in_fp8() -> None:
    job = replace(JOBS["t2v"], heads=12)
    run(2, compare, job, LAYOUTS[2], True, velocities(job, rainfusion(0.6, fp8=True)))


@torch.inference_mode()
def compare_fp8(job: Job, transport: bool, expected: Tensor) -> None:
    for mode in ROWS:
        method = Fp8Attention(Fp8Quantiser(Rotations(8)), torch.float32, before_exchange=transport)
        layer = attention_layer(Topology(2, 1), mode, methods=(method,))
        tokens = ShardedTokens(None, 256 if transport else 1)
        found = velocities(job, (), attention=layer, tokens=tokens)
        assert (found - expected).abs().max() <= 2e-5, mode


@pytest.mark.parametrize("transport", [False, True])
def test_fp8_attention_on_ranks(transport: bool) -> None:
    job = JOBS["t2v"]
    method = Fp8Attention(Fp8Quantiser(Rotations(8)), torch.float32)
    layer = FAPowerCapAttention(SimpleNamespace(comm_type=0), None, methods=(method,))
    with torch.inference_mode():
        expected = torch.stack(job.velocities(job.model(attention=layer)))
    run(2, compare_fp8, job, transport, expected)
