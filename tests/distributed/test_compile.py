"""A compiled block gives the eager result and keeps the order of exchanges and attention.

Legend: B batch, L tokens of one rank, C channels, T text tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed
from torch._dynamo.backends.common import aot_autograd

from tests import dist
from tests.conftest import slow
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.blocks import BlockSizes, SharedInputs, WanAttentionBlock
from wan.modules.interfaces import ModelComponents
from wan.modules.rope import make_rope_table
from wan.settings.attention_modes import MODES

pytestmark = pytest.mark.dist

RANKS, HEADS, HEAD_DIM, LOCAL, TEXT = 2, 8, 6, 12, 5
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
EXCHANGES = {"split": "EEE", "fused": "E"}


def list_stages(mode: int, exchange: str, heads: int) -> list[str]:
    row = MODES[mode]
    return min(row.chunks, heads // RANKS) * [EXCHANGES[exchange], row.blocks * "A", "E"]


@pytest.mark.parametrize(
    ("mode", "valid_len", "exchange", "heads"),
    [
        (1, 21, "fused", 4),
        slow(0, 24, "split", 8),
        slow(1, 21, "split", 8),
        slow(1, 24, "fused", 7),
        slow(2, 24, "fused", 8),
    ],
)
def test_compiled_block(mode: int, valid_len: int, exchange: str, heads: int) -> None:
    report, _ = dist.run_on_ranks(RANKS, compile_block, mode, valid_len, exchange, heads)
    assert report["graphs"] == 1
    order = "".join(list_stages(mode, exchange, heads))
    assert report["order"] == f"{order}A", "the last one is the text's"
    assert report["free"] == [], "these events do not wait for all of the stage before"
    assert report["off"] <= 2e-6  # the compiler uses other forms of RoPE and GELU


def compile_block(mode: int, valid_len: int, exchange: str, heads: int) -> dict[str, Any]:
    """Compile a block for this mode on rank 0, with an eager rank 1; list the graph's events."""
    torch._dynamo.reset()
    graphs: list[torch.fx.Graph] = []

    def record(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    block, x_BLC, other_inputs = make_block_and_inputs(mode, valid_len, exchange, heads)
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    if torch.distributed.get_rank():
        compiled = block
    with torch.no_grad():
        expected = block(x_BLC.clone(), *other_inputs)[0]
        actual = compiled(x_BLC.clone(), *other_inputs)[0]
    if compiled is block:
        return {}
    events = [node for node in graphs[0].nodes if node.target in (EXCHANGE, ATTENTION)]
    return {
        "graphs": len(graphs),
        "order": "".join("E" if node.target is EXCHANGE else "A" for node in events),
        "free": find_unordered_pairs(events, list_stages(mode, exchange, heads)),
        "off": (actual - expected).abs().max().item(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", [1, 2])
def test_a_compiled_block_serves_another_length(mode: int) -> None:
    """The second length in the same process is compiled as a symbolic size."""
    assert dist.run_on_ranks(RANKS, compile_for_two_lengths, mode) == [True] * RANKS


def compile_for_two_lengths(mode: int) -> bool:
    torch._dynamo.reset()
    block, x_BLC, other_inputs = make_block_and_inputs(mode, RANKS * LOCAL)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    are_close = []
    with torch.no_grad():
        for valid_len in (RANKS * LOCAL, RANKS * LOCAL - 3, RANKS * LOCAL - 1):
            call_inputs = (*other_inputs[:-1], replace(other_inputs[-1], valid_len=valid_len))
            expected, actual = (
                run_block(x_BLC.clone(), *call_inputs)[0] for run_block in (block, compiled)
            )
            are_close.append(torch.allclose(actual, expected, atol=1e-5))
    return all(are_close)


def find_unordered_pairs(events: list[torch.fx.Node], stages: list[str]) -> list[tuple[str, str]]:
    """List pairs of events of neighboring stages that no data dependency orders.

    The order of nodes in the graph is not enough: a scheduler may take any order that the data
    dependencies allow.
    """
    event_iter = iter(events)
    groups = [[next(event_iter) for _ in stage] for stage in stages]
    return [
        (earlier_event.name, later_event.name)
        for earlier, later in zip(groups, groups[1:], strict=False)
        for later_event in later
        for earlier_event in earlier
        if earlier_event not in find_dependencies(later_event)
    ]


def find_dependencies(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return all nodes that a node depends on."""
    dependencies: set[torch.fx.Node] = set()
    pending = [node]
    while pending:
        unvisited = [n for n in pending.pop().all_input_nodes if n not in dependencies]
        dependencies.update(unvisited)
        pending.extend(unvisited)
    return dependencies


def make_block_and_inputs(
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
    local_rows = slice(rank * LOCAL, (rank + 1) * LOCAL)
    cos, sin = (table[local_rows] for table in make_rope_table((1, 4, 6), HEAD_DIM))
    other_inputs = (e0_BR6C, context_BTC, None, SharedInputs((LOCAL,), (cos, sin), valid_len))
    return block, x_BSC[:, local_rows].clone(), other_inputs
