"""A compiled block gives the eager result and keeps the order of exchanges and attention.

Legend: B batch, L tokens of one rank, C channels, T text tokens.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed
from torch._dynamo.backends.common import aot_autograd

from tests import dist
from tests.conftest import slow
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.blocks import BlockSizes, ForwardContext, WanAttentionBlock
from wan.modules.interfaces import ModelComponents
from wan.modules.rope import make_rope_table
from wan.settings.attention_modes import MODES

pytestmark = pytest.mark.dist

RANKS, HEADS, HEAD_DIM, LOCAL, TEXT = 2, 8, 6, 12, 5
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
EXCHANGES = {"split": "EEE", "fused": "E"}


def stages(mode: int, exchange: str, heads: int) -> list[str]:
    row = MODES[mode]
    return min(row.chunks, heads // RANKS) * [EXCHANGES[exchange], row.blocks * "A", "E"]


@pytest.mark.parametrize(
    ("mode", "valid_len", "exchange", "heads"),
    [slow(*case) for case in (*product(MODES, (24, 21), EXCHANGES, (8,)), (1, 24, "fused", 7))],
)
def test_compiled_block(mode: int, valid_len: int, exchange: str, heads: int) -> None:
    for found in dist.run_on_ranks(RANKS, compile_block, mode, valid_len, exchange, heads):
        assert found["graphs"] == 1
        order = "".join(stages(mode, exchange, heads))
        assert found["order"] == f"{order}A", "the last one is the text's"
        assert found["free"] == [], "these events do not wait for all of the stage before"
        assert found["off"] <= 2e-6  # the compiler uses other forms of RoPE and GELU


def compile_block(mode: int, valid_len: int, exchange: str, heads: int) -> dict[str, Any]:
    """On one rank: compile a block for this mode and list the events of its graph."""
    torch._dynamo.reset()
    graphs: list[torch.fx.Graph] = []

    def record(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    block, x_BLC, others = block_and_inputs(mode, valid_len, exchange, heads)
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    with torch.no_grad():
        expected = block(x_BLC.clone(), *others)[0]
        found = compiled(x_BLC.clone(), *others)[0]
    events = [node for node in graphs[0].nodes if node.target in (EXCHANGE, ATTENTION)]
    return {
        "graphs": len(graphs),
        "order": "".join("E" if node.target is EXCHANGE else "A" for node in events),
        "free": not_forced(events, stages(mode, exchange, heads)),
        "off": (found - expected).abs().max().item(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_block_serves_another_length(mode: int) -> None:
    """The second length in the same process is compiled as a symbolic size."""
    assert dist.run_on_ranks(RANKS, compile_for_two_lengths, mode) == [True] * RANKS


def compile_for_two_lengths(mode: int) -> bool:
    torch._dynamo.reset()
    block, x_BLC, others = block_and_inputs(mode, RANKS * LOCAL)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    same = []
    with torch.no_grad():
        for valid_len in (RANKS * LOCAL, RANKS * LOCAL - 3, RANKS * LOCAL - 1):
            called = (*others[:-1], replace(others[-1], valid_len=valid_len))
            expected, found = (make(x_BLC.clone(), *called)[0] for make in (block, compiled))
            same.append(torch.allclose(found, expected, atol=1e-5))
    return all(same)


def not_forced(events: list[torch.fx.Node], stages: list[str]) -> list[tuple[str, str]]:
    """List pairs of events of neighboring stages that no data dependency orders.

    The order of nodes in the graph is not enough: a scheduler may take any order that the data
    dependencies allow.
    """
    taken = iter(events)
    groups = [[next(taken) for _ in stage] for stage in stages]
    return [
        (before.name, after.name)
        for earlier, later in zip(groups, groups[1:], strict=False)
        for after in later
        for before in earlier
        if before not in needed(after)
    ]


def needed(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return all nodes that a node depends on."""
    found: set[torch.fx.Node] = set()
    waiting = [node]
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in found]
        found.update(new)
        waiting.extend(new)
    return found


def block_and_inputs(
    mode: int, valid_len: int, exchange: str = "split", heads: int = HEADS
) -> tuple[WanAttentionBlock, torch.Tensor, Any]:
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    group = torch.distributed.group.WORLD
    attention = FAPowerCapAttention(comm_type=mode, ulysses_pg=group, exchange=exchange)
    channels = heads * HEAD_DIM
    sizes = BlockSizes(channels, 2 * channels, heads)
    block = WanAttentionBlock(sizes, 0, ModelComponents(lambda _: attention))
    e0_BR6C, context_BTC = torch.randn(1, 1, 6, channels), torch.randn(1, TEXT, channels)
    x_BSC = torch.randn(1, RANKS * LOCAL, channels)
    mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
    cos, sin = (table[mine] for table in make_rope_table((1, 4, 6), HEAD_DIM))
    others = (e0_BR6C, context_BTC, None, ForwardContext((LOCAL,), (cos, sin), valid_len))
    return block, x_BSC[:, mine].clone(), others
