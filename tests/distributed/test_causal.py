"""A causal video on several ranks is that of one process, and the same bits in modes 0, 1, overlap.

Each rank keeps the keys and values of its own heads, by head chunk.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.causal_network import CASES, Case, make_network
from tests.conftest import slow
from tests.dist import run_on_ranks
from tests.distributed.topology import (
    ROWS,
    Topology,
    attention_layer,
    make_block_attention,
)
from tests.pipelines import make_experts
from tests.unit.test_block_loop import make_inputs, make_params
from wan.distributed.sequence_shards import ShardedSequence
from wan.pipeline.block_loop import BlockLoop

pytestmark = pytest.mark.dist

Way = tuple[str, str]
"""Mode and exchange."""


@torch.inference_mode()
def generate(case: Case, **components: object) -> tuple[Tensor, int]:
    """Returns the latents, and the bytes of the kept keys and values."""
    params = make_params(case)
    loop, num_bytes = BlockLoop(params, make_inputs(params)), 0
    blocks = list[Tensor]()
    for block in loop.iterate_blocks(make_experts(make_network(**components))):
        blocks.append(block)
        num_bytes = loop.kv_cache.nbytes
    return torch.cat(blocks, dim=1), num_bytes


def generate_on_rank(case: Case, ways: list[Way], world: int) -> dict[Way, tuple[Tensor, int]]:
    videos = {}
    for mode, exchange in ways:
        layer = attention_layer(Topology(world, 1), mode, exchange=exchange)
        videos[mode, exchange] = generate(
            case,
            attention=make_block_attention(layer),
            sequence_shard=ShardedSequence(None),
        )
    return videos


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["window and sink"]),
        (4, ["prompt change in a window"]),  # 18 tokens of a block: the last rank has padding
        *(slow(world, [*CASES]) for world in (1, 2, 3, 4)),
        slow(8, ["window and sink", "prompt change with a sink"]),
    ],
)
def test_a_video_on_ranks(world: int, names: list[str]) -> None:
    ways = [(mode, "split") for mode in ROWS] + [("1", "fused")]
    for name in names:
        expected, num_bytes = generate(CASES[name])
        results = run_on_ranks(world, generate_on_rank, CASES[name], ways, world, timeout=600)
        for videos in results:
            baseline, _ = videos["0", "split"]
            for way, (latents, _) in videos.items():
                assert (latents - expected).abs().max() <= 1e-5 * expected.abs().max(), (name, way)
                assert torch.equal(latents, baseline) or way[0] == "2", (name, way)
                assert (latents - baseline).abs().max() <= 1e-5 * expected.abs().max(), (name, way)
        for way in ways:  # no rank keeps what another one keeps
            assert sum(videos[way][1] for videos in results) == num_bytes, (name, way)
