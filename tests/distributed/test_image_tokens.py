"""Wan2.1's image tokens on ranks: every rank attends to all of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from tests.conftest import slow
from tests.dist import run_on_ranks
from wan.distributed.sequence_shards import ShardedSequence
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]
HEADS, GRID, TOKENS, FEATURES = 4, (2, 3, 3), 18, 32


def velocity(images: int, sharded: bool) -> tuple[Tensor, Counter[str]]:
    """Return the velocity and the number of gloo operations of the forward by name."""
    components = ModelComponents()
    if sharded:
        layer = FAPowerCapAttention(SimpleNamespace(comm_type=1), dist.group.WORLD)
        components = ModelComponents(
            lambda _: layer, sequence_shard=ShardedSequence(dist.group.WORLD)
        )
    torch.manual_seed(0)
    sizes = {"dim": HEADS * 8, "ffn_dim": 64, "num_heads": HEADS, "num_layers": 2}
    text = {"text_dim": 16, "text_len": 8}
    image_sizes = (
        {"image_dim": FEATURES, "image_positions": 20 if images == 2 else 0} if images else {}
    )
    model = WanModel("i2v", in_dim=36, **sizes, **text, **image_sizes, components=components)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(c, 2, 6, 6, generator=generator) for c in (16, 20))
    text_embeds = torch.randn(8, 16, generator=generator)
    features = torch.randn(max(images, 1), 10, FEATURES, generator=generator)
    image_inputs: dict[str, Any] = {"clip_fea": features} if images else {}
    with torch.no_grad(), profile() as trace:
        output = model([x], torch.tensor([500.0]), [text_embeds], TOKENS, [y], **image_inputs)[0]
    return output, Counter(e.name for e in trace.events() if e.name.startswith("gloo:"))


@pytest.mark.parametrize("images", [slow(1), 2])
def test_no_exchange_more_than_without_them(images: int) -> None:
    expected, _ = velocity(images, False)
    for (output, sent), (_, plain) in zip(
        run_on_ranks(2, velocity, images, True),
        run_on_ranks(2, velocity, 0, True),
        strict=True,
    ):
        assert (output - expected).abs().max() <= 2e-5
        assert sent == plain and sent["gloo:all_to_all"] > 0
