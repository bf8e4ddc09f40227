"""The measurements that `benchmarks.attention_modes` runs on each rank: the attention layer, and a
block, eager and compiled.

Legend: B batch, s this rank's tokens, N heads, D head size, C channels, T text tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from wan.distributed.ring import RING_TYPES, Ring
from wan.distributed.ulysses import Group, to_process_group
from wan.kernels.sdpa import SdpaKernel
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.blocks import BlockSizes, SharedInputs, WanAttentionBlock
from wan.modules.interfaces import ModelComponents
from wan.modules.rope import make_rope_table
from wan.settings.attention_modes import MODES, OVERLAP, Mode, list_head_ranges
from wan.settings.parallel import EXCHANGES
from wan.testing import measuring
from wan.testing.measuring import CPU, time_interleaved
from wan.utils.torch_private import use_private_compiler_cache

TEXT = 512
Forward = Callable[[Callable[..., Any]], Tensor]


@dataclass(frozen=True)
class Size:
    """Sizes of one attention call over all ranks (batch 1, float32) and the timed rounds."""

    heads: int
    head_dim: int
    tokens: int
    rounds: int


def measure_added_memory(run: measuring.Work, q: Tensor) -> float:
    """Returns the peak memory that a run adds to the memory before it, in units of q's bytes.

    Sums the CPU allocator's events: every tensor of the layer, of the kernel's scratch and of
    gloo's receive buffers counts with its exact bytes. `measure_exchange_memory` verifies the
    method on every run. The profiler misses frees on other threads, and gloo's thread frees a
    tensor shortly after the exchange is done; hence the pauses.
    """
    dist.barrier()
    with delay_exchanges(0.0, pause=0.02):
        return measuring.measure_peak_bytes(run, CPU) / q.nbytes


def measure_exchange_memory(q: Tensor) -> float:
    """Returns `measure_added_memory` of one exchange into a new tensor: 1 by construction."""
    return measure_added_memory(lambda: dist.all_to_all_single(torch.empty_like(q), q), q)


def make_qkv_BsND(size: Size) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    shape = (1, size.tokens // dist.get_world_size(), size.heads, size.head_dim)
    return [torch.randn(shape) for _ in range(3)]


def make_attention_layer(
    mode: int, overlap: bool = False, **layer_options: Any
) -> FAPowerCapAttention:
    group = layer_options.pop("group", None)
    return FAPowerCapAttention(SimpleNamespace(comm_type=mode), group, overlap, **layer_options)


def count_chunks(size: Size, mode: Mode) -> int:
    return len(list_head_ranges(size.heads, dist.get_world_size(), mode.chunks))


def make_single_rank_group() -> Group:
    ranks = range(dist.get_world_size())
    return [dist.new_group([rank]) for rank in ranks][dist.get_rank()]


def run_modes(size: Size) -> dict[str, Any]:
    """Measures the three modes: seconds, and memory beyond the inputs."""
    qkv = make_qkv_BsND(size)
    runs = {f"mode {mode}": partial(make_attention_layer(mode), *qkv) for mode in MODES}
    held = runs | {"overlap": partial(make_attention_layer(0, overlap=True), *qkv)}
    memory = {name: measure_added_memory(run, qkv[0]) for name, run in held.items()}
    memory["check: an exchange alone"] = measure_exchange_memory(qkv[0])
    return {
        "chunks": count_chunks(size, MODES[1]),
        "added": memory,
        "seconds": time_interleaved(runs, size.rounds),
    }


@contextmanager
def delay_exchanges(delay: float, pause: float = 0.0) -> Iterator[None]:
    """Delays each all-to-all by `delay` seconds; delayed exchanges follow each other.

    A wait sleeps, so that it takes no CPU time from the attention, as on a real link.

    Args:
        pause: Minimum sleep of each `wait` after its exchange, in seconds.
    """
    exchange, free = dist.all_to_all_single, 0.0

    def slow(
        received: Tensor,
        send: Tensor,
        arriving: list[int] | None = None,
        leaving: list[int] | None = None,
        group: Group = None,
        async_op: bool = False,
    ) -> SimpleNamespace | None:
        nonlocal free
        work = exchange(received, send, arriving, leaving, to_process_group(group), async_op=True)
        free = end = max(free, time.perf_counter()) + delay

        def wait() -> None:
            work.wait()
            time.sleep(max(pause, end - time.perf_counter()))

        if async_op:
            return SimpleNamespace(wait=wait)
        wait()
        return None

    with patch.object(dist, "all_to_all_single", slow):
        yield


def run_overlap(size: Size, share: float) -> dict[str, Any]:
    """Times overlap and InsertComm on a link whose exchanges take `share` of InsertComm's time."""
    qkv = make_qkv_BsND(size)
    in_order, pipelined = (partial(make_attention_layer(1, on), *qkv) for on in (False, True))
    in_order()
    dist.barrier()
    num_exchanges = 4 * count_chunks(size, OVERLAP)
    delay = torch.tensor(share * measuring.measure_seconds(in_order, CPU) / num_exchanges)
    dist.broadcast(delay, 0)

    def slowed(run: measuring.Work) -> measuring.Work:
        def slow() -> None:
            with delay_exchanges(delay.item()):
                run()

        return slow

    runs: dict[str, measuring.Work] = {
        "in order": in_order,
        "in order, slow link": slowed(in_order),
        "overlap": pipelined,
        "overlap, slow link": slowed(pipelined),
    }
    return {
        "seconds": time_interleaved(runs, size.rounds),
        "delay": delay.item(),
        "exchanges": num_exchanges,
    }


class WithoutLse(SdpaKernel):
    """A kernel without log-sum-exp: the ring gathers keys and values instead of merging."""

    can_return_lse = False


def run_ring(size: Size) -> dict[str, Any]:
    """Measures all ranks as one ring in mode 0: one way, bidirectional, and with gathered K/V."""
    qkv, alone = make_qkv_BsND(size), make_single_rank_group()
    layers = {
        kind: make_attention_layer(0, group=alone, ring=Ring(None, kind)) for kind in RING_TYPES
    }
    layers["gather"] = make_attention_layer(0, group=alone, ring=Ring(None), kernel=WithoutLse())
    runs = {name: partial(layer, *qkv) for name, layer in layers.items()}
    memory = {name: measure_added_memory(run, qkv[0]) for name, run in runs.items()}
    return {"seconds": time_interleaved(runs, size.rounds), "added": memory}


def make_block(
    size: Size, layer: FAPowerCapAttention, ranks: int
) -> tuple[WanAttentionBlock, Forward]:
    """Makes a block and a function that calls it on this rank's shard of the tokens.

    The feed-forward has the 14B network's ratio to the channels. The function takes the eager or
    the compiled block. The text's keys and values are passed in, as in every step after the first.
    """
    channels, tokens = size.heads * size.head_dim, size.tokens // ranks
    torch.manual_seed(0)
    sizes = BlockSizes(channels, 27 * channels // 10, size.heads)
    module = WanAttentionBlock(sizes, 0, ModelComponents(lambda _: layer))
    local_tokens = slice(*((dist.get_rank() % ranks + i) * tokens for i in (0, 1)))
    x_BsC = torch.randn(1, size.tokens, channels)[:, local_tokens].clone()
    e0_BR6C, context_BTC = torch.randn(1, 1, 6, channels), torch.randn(1, TEXT, channels)
    cos, sin = (
        table[local_tokens] for table in make_rope_table((1, 1, size.tokens), size.head_dim)
    )
    kv = module.cross_attn.project_context_kv(context_BTC)
    other_arguments = (e0_BR6C, context_BTC, kv, SharedInputs((tokens,), (cos, sin), size.tokens))
    return module, lambda forward: forward(x_BsC.clone(), *other_arguments)[0]


def run_scaling(size: Size) -> dict[str, Any]:
    """Times one block on rank 0 while the other ranks wait, and on all ranks."""
    ranks, single = dist.get_world_size(), make_single_rank_group()
    runs: dict[str, measuring.Work] = {}
    for mode in (0, 1):
        module, run = make_block(size, make_attention_layer(mode), ranks)
        runs[f"mode {mode}"] = partial(run, module)
    module, run = make_block(size, make_attention_layer(0, group=single), 1)
    runs["one rank"] = partial(run, module) if dist.get_rank() == 0 else lambda: None
    return {"seconds": time_interleaved(runs, size.rounds)}


def run_exchanges(size: Size) -> dict[str, Any]:
    """Times self-attention with its projections, with one fused exchange and with three."""
    runs: dict[str, measuring.Work] = {}
    for mode in MODES:
        for exchange in EXCHANGES:
            module, _ = make_block(
                size, make_attention_layer(mode, exchange=exchange), dist.get_world_size()
            )
            tokens = size.tokens // dist.get_world_size()
            table = make_rope_table((1, 1, tokens), size.head_dim)
            info = SharedInputs((tokens,), table, size.tokens)
            x_BsC = torch.randn(1, tokens, size.heads * size.head_dim)
            runs[f"mode {mode}, {exchange}"] = partial(module.self_attn, x_BsC, info)
    return {"seconds": time_interleaved(runs, size.rounds)}


def read_call_order(code: str) -> str:
    """Returns the order of exchanges (E) and attention calls (A) in compiled code."""
    calls = code[code.index("def call(") :]
    names = re.findall(r"= torch\.ops\.\w+\.(all_to_all_single|_scaled_dot_product)", calls)
    return "".join("E" if name == "all_to_all_single" else "A" for name in names)


HOISTING: dict[str, Any] = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.compute_estimator": "analytical",
    "aten_distributed_optimizations.custom_runtime_estimation": lambda node, *_: 1.0,
}
"""Inductor options that start collectives as early as the data allow, to test the order."""

BANDWIDTH = patch("torch.utils._runtime_estimation.get_gpu_dram_gbps", lambda: 1000)
"""Replaces a query to triton, which may not be installed; the estimates above do not use it."""


def compile_block(
    module: WanAttentionBlock, run: Forward, **options: Any
) -> tuple[measuring.Work, Tensor, str]:
    """Compiles a block; returns its call, its result, and the call order in its code."""
    use_private_compiler_cache()
    fast = torch.compile(module, fullgraph=True)
    with inductor.patch({"fx_graph_cache": False, **options}), BANDWIDTH:
        result, (code,) = run_and_get_code(run, fast)
    return partial(run, fast), result, read_call_order(code)


def run_compiled_block(size: Size) -> dict[str, Any]:
    """Runs a block of each mode, eager and compiled: seconds, distance, call order in the code."""
    ranks = dist.get_world_size()
    blocks = {f"mode {mode}": make_block(size, make_attention_layer(mode), ranks) for mode in MODES}
    orders: dict[str, str] = {}
    for name in list(blocks)[1:]:
        *_, orders[f"{name}, hoisting"] = compile_block(*blocks[name], **HOISTING)
    torch._dynamo.reset()
    runs: dict[str, measuring.Work] = {}
    distance: dict[str, float] = {}
    for name, (module, run) in blocks.items():
        fast, result, orders[name] = compile_block(module, run)
        expected = run(module)
        distance[name] = ((result - expected).abs().max() / expected.abs().max()).item()
        runs |= {name: partial(run, module), f"{name}, compiled": fast}
    return {
        "seconds": time_interleaved(runs, size.rounds),
        "orders": orders,
        "expected": {
            f"mode {mode}": count_chunks(size, row) * f"EEE{row.blocks * 'A'}E" + "A"
            for mode, row in MODES.items()
        },
        "distance": distance,
    }
