"""What each rank of `benchmarks.attention_modes` runs: a whole block, eager and compiled.

Legend: B batch, s this rank's tokens, C channels, T text tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from benchmarks import common
from benchmarks.attention_runs import Size, attention, chunks, group_of_one
from benchmarks.ranks import interleave
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.blocks import BlockSizes, ForwardInfo, WanAttentionBlock
from wan.modules.interfaces import Collaborators
from wan.modules.rope import rope_table
from wan.settings.schedule import MODES

TEXT = 512
Forward = Callable[[Callable[..., Any]], Tensor]


def block(size: Size, layer: FAPowerCapAttention, ranks: int) -> tuple[WanAttentionBlock, Forward]:
    """A block, its feed-forward as wide as in the 14B network, and a call of it on one of `ranks`.

    The second takes the block as it is or compiled. The text's keys and values are given, as in
    every step of a run but the first.
    """
    channels, tokens = size.heads * size.head_dim, size.tokens // ranks
    torch.manual_seed(0)
    sizes = BlockSizes(channels, 27 * channels // 10, size.heads)
    module = WanAttentionBlock(sizes, 0, Collaborators(lambda _: layer))
    mine = slice(*((dist.get_rank() % ranks + i) * tokens for i in (0, 1)))
    x_BsC = torch.randn(1, size.tokens, channels)[:, mine].clone()
    e0_BR6C, context_BTC = torch.randn(1, 1, 6, channels), torch.randn(1, TEXT, channels)
    cos, sin = (table[mine] for table in rope_table((1, 1, size.tokens), size.head_dim))
    kv = module.cross_attn.text_kv(context_BTC)
    others = (e0_BR6C, context_BTC, kv, ForwardInfo((tokens,), (cos, sin), size.tokens))
    return module, lambda forward: forward(x_BsC.clone(), *others)[0]


def scaling(size: Size) -> dict[str, Any]:
    """One block on the first rank alone, the others waiting, and on all ranks."""
    ranks, single = dist.get_world_size(), group_of_one()
    runs: dict[str, common.Run] = {}
    for mode in (0, 1):
        module, run = block(size, attention(mode), ranks)
        runs[f"mode {mode}"] = partial(run, module)
    module, run = block(size, attention(0, group=single), 1)
    runs["one rank"] = partial(run, module) if dist.get_rank() == 0 else lambda: None
    return {"seconds": interleave(runs, size.rounds)}


def order_in(code: str) -> str:
    """Exchanges (E) and attention calls (A) as compiled code makes them."""
    calls = code[code.index("def call(") :]
    names = re.findall(r"= torch\.ops\.\w+\.(all_to_all_single|_scaled_dot_product)", calls)
    return "".join("E" if name == "all_to_all_single" else "A" for name in names)


HOISTING: dict[str, Any] = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.compute_estimator": "analytical",
    "aten_distributed_optimizations.custom_runtime_estimation": lambda node, *_: 1.0,
}
"""Inductor made to start collectives as early as data allow: a stern test of what keeps order."""

BANDWIDTH = patch("torch.utils._runtime_estimation.get_gpu_dram_gbps", lambda: 1000)
"""It would be asked of triton, which need not be installed; the estimates above replace its use."""


def compile_block(
    module: WanAttentionBlock, run: Forward, **options: Any
) -> tuple[common.Run, Tensor, str]:
    """The compiled block's call, its result, and the order in its code."""
    fast = torch.compile(module, fullgraph=True)
    with inductor.patch({"fx_graph_cache": False, **options}), BANDWIDTH:
        result, (code,) = run_and_get_code(run, fast)
    return partial(run, fast), result, order_in(code)


def compiled(size: Size) -> dict[str, Any]:
    """One block of each mode, eager and compiled: seconds, distance, order in the code."""
    ranks = dist.get_world_size()
    blocks = {f"mode {mode}": block(size, attention(mode), ranks) for mode in MODES}
    orders: dict[str, str] = {}
    for name in list(blocks)[1:]:
        *_, orders[f"{name}, hoisting"] = compile_block(*blocks[name], **HOISTING)
    torch._dynamo.reset()
    runs: dict[str, common.Run] = {}
    distance: dict[str, float] = {}
    for name, (module, run) in blocks.items():
        fast, result, orders[name] = compile_block(module, run)
        expected = run(module)
        distance[name] = ((result - expected).abs().max() / expected.abs().max()).item()
        runs |= {name: partial(run, module), f"{name}, compiled": fast}
    return {
        "seconds": interleave(runs, size.rounds),
        "orders": orders,
        "expected": {
            f"mode {mode}": chunks(size, row) * f"EEE{row.blocks * 'A'}E" + "A"
            for mode, row in MODES.items()
        },
        "distance": distance,
    }
