"""Counts bytes and launches of a block's operations other than products, without a device.

    python benchmarks/traffic.py --ranks 1
    python benchmarks/traffic.py --ranks 8 --json results/traffic.json

One block of the 14B networks (40 heads of 128, bfloat16, text passed as keys and values) runs on
meta tensors with the sizes of a GPU run. Every operation that creates or changes a tensor is one
launch. It moves the bytes of the tensors that it reads and writes; a broadcast tensor counts once.
Matrix products, attention kernels, exchanges between ranks, views and allocations do not count.
diffusers' block is counted in the same way, on one rank; it computes the text's keys and values in
each call, and keeps the residual stream in bfloat16. The program prints the totals and the eight
largest operations; the JSON file has all operations. On several ranks it adds a table of each
mode's self-attention with either exchange: its collectives, the bytes that a rank sends in them,
launches and bytes as above, and the peak bytes of live tensors.

"fused" has the small operations of `--fused_ops auto`. For each compiled function it takes the
counts of PyTorch's compiler (Inductor): the bytes of the buffers that its kernels read and write
and the number of these kernels, compiled for this machine's CPU at the same sizes. It needs 6 GB
of memory on one rank.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor
from torch._inductor import config, metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.distributed.ulysses import SINGLE_RANK, Group
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.blocks import BlockSizes, ForwardContext, WanAttentionBlock
from wan.modules.fused_ops import BlockOps
from wan.modules.interfaces import ModelComponents
from wan.settings.attention_modes import MODES
from wan.settings.numerics import keeps_fp32
from wan.settings.parallel import EXCHANGES
from wan.settings.values import integer
from wan.utils.torch_private import (
    DatalessFunctionMode,
    StorageTracker,
    init_fake_process_group,
    use_private_compiler_cache,
)

HEADS, HEAD_DIM, FFN, TEXT = 40, 128, 13824, 512
TOKENS = 75_600  # 1280*720, 81 frames
CHANNELS = HEADS * HEAD_DIM
META = torch.device("meta")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")


class Traffic(TorchDispatchMode):
    """Counts bytes and launches by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.launches = Counter[str](), Counter[str]()
        self.steps: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = []
        self.is_counting = True
        self.collectives, self.sent = 0, 0

    def run(self, step: Callable[..., Tensor], x: Tensor, /, *args: Any) -> Tensor:
        """Implements `wan.modules.fused_ops.OpRunner`: records an op that a run would compile."""
        self.steps.append((step, (x, *args)))
        self.is_counting = False
        try:
            return step(x, *args)
        finally:
            self.is_counting = True

    def count_compiled_steps(self) -> None:
        """Counts the recorded ops as the compiler fuses them."""
        for step, arguments in self.steps:
            size, kernels = count_compiled_traffic(step, arguments)
            self.bytes[f"{step.__name__[1:]}, compiled"] += size
            self.launches[f"{step.__name__[1:]}, compiled"] += kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if "alltoall" in name:
            self.collectives += 1
            self.sent += args[1].nbytes
        left_out = (
            not self.is_counting
            or func.is_view
            or func.namespace == "c10d"
            or name.strip("_") in _PRODUCTS
            or "attention" in name
            or name.startswith(("empty", "_unsafe_view", "detach", "alias"))
        )
        if not left_out:
            outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if name in ("copy_", "fill_", "zero_"):  # the old values are not read
                inputs = inputs[1:]
            self.bytes[name] += sum(_count_bytes(x) for x in (*inputs, *outputs))
            self.launches[name] += 1
        return out


def _count_bytes(x: Tensor) -> int:
    """Returns the bytes of a tensor's distinct elements; broadcast dimensions count once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.dtype.itemsize


def count_compiled_traffic(
    step: Callable[..., Tensor], arguments: tuple[Any, ...]
) -> tuple[int, int]:
    """Compiles an op; returns Inductor's counts of bytes and kernels."""
    use_private_compiler_cache()
    torch._dynamo.reset()
    metrics.reset()
    real = [torch.empty_like(x, device="cpu") if isinstance(x, Tensor) else x for x in arguments]
    with torch.inference_mode(), config.patch(force_disable_caches=True):
        torch.compile(step)(*real)
    return metrics.num_bytes_accessed, len(metrics.nodes_num_elem)


def make_our_call(
    ranks: int, ops: BlockOps, comm_type: int = 0, exchange: str = "split", part: str = "block"
) -> Callable[[], Any]:
    """Makes a call of our block, or of its self-attention, as on rank 0 of `ranks`."""
    group: Group = SINGLE_RANK
    if ranks > 1:
        if not dist.is_initialized():
            init_fake_process_group(0, ranks)
        group = None
    layer = FAPowerCapAttention(comm_type=comm_type, ulysses_pg=group, exchange=exchange)
    tokens = TOKENS // ranks
    with META:
        block = WanAttentionBlock(
            BlockSizes(CHANNELS, FFN, HEADS), 0, ModelComponents(lambda _: layer, ops=ops)
        )
        for name, parameter in block.named_parameters():
            dtype = torch.float32 if keeps_fp32(name) else torch.bfloat16
            parameter.data = parameter.data.to(dtype)
        x_BLC, e0_BR6C = torch.empty(1, tokens, CHANNELS), torch.empty(1, 1, 6, CHANNELS)
        context_BTC = torch.empty(1, TEXT, CHANNELS, dtype=torch.bfloat16)
        rope = (torch.empty(tokens, 1, HEAD_DIM), torch.empty(tokens, 1, HEAD_DIM))
        kv = torch.empty(2, 1, TEXT, HEADS, HEAD_DIM, dtype=torch.bfloat16).unbind(0)
    info = ForwardContext((tokens,), rope, TOKENS)
    if part == "self-attention":
        normed_BLC = x_BLC.bfloat16()
        return lambda: block.self_attn(normed_BLC, info)
    return lambda: block(x_BLC, e0_BR6C, context_BTC, (kv[0], kv[1]), info)


def make_diffusers_call() -> Callable[[], Any]:
    """Makes a call of diffusers' block."""
    with META:
        block: Any = WanTransformerBlock(
            CHANNELS, FFN, HEADS, qk_norm="rms_norm_across_heads", cross_attn_norm=True
        )
        block = block.to(torch.bfloat16)
        x_BLC = torch.empty(1, TOKENS, CHANNELS, dtype=torch.bfloat16)
        text = torch.empty(1, TEXT, CHANNELS, dtype=torch.bfloat16)
        temb = torch.empty(1, 6, CHANNELS)
        rope = [torch.empty(1, TOKENS, 1, HEAD_DIM) for _ in range(2)]
    return lambda: block(x_BLC, text, temb, rope)


def count_call_traffic(call: Callable[[], Any], traffic: Traffic) -> dict[str, Any]:
    with torch.no_grad(), DatalessFunctionMode(), traffic:
        call()
    traffic.count_compiled_steps()
    return {
        "bytes": traffic.bytes.total(),
        "launches": traffic.launches.total(),
        "by_operation": {
            name: {"bytes": size, "launches": traffic.launches[name]}
            for name, size in traffic.bytes.most_common()
        },
    }


def count_exchange_traffic(ranks: int) -> dict[str, Any]:
    """Counts collectives, bytes and peak memory of each mode with either exchange.

    "sent" excludes a rank's part for itself.
    """
    counts: dict[str, Any] = {}
    for mode in MODES:
        for exchange in EXCHANGES:
            traffic, live = Traffic(), StorageTracker("meta")
            call = make_our_call(
                ranks, BlockOps(device_type="cuda"), mode, exchange, "self-attention"
            )
            with live:
                call_counts = count_call_traffic(call, traffic)
            sent = traffic.sent * (ranks - 1) // ranks
            more = {
                "collectives": traffic.collectives,
                "sent": sent,
                "peak": live.peak_bytes.total(),
            }
            counts[f"mode {mode}, {exchange}"] = {
                k: call_counts[k] for k in ("bytes", "launches")
            } | more
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks", type=make_argument_type(integer(1, 64)), default=1, choices=(1, 2, 4, 5, 6, 8)
    )
    parser.add_argument("--json", type=common.results_file)
    options = parser.parse_args(argv)
    metrics_logger = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    metrics_logger.setLevel(logging.INFO)  # else the compiler does not count
    metrics_logger.propagate = False
    plain, fused = Traffic(), Traffic()
    results = {
        "ours, fused": count_call_traffic(
            make_our_call(options.ranks, BlockOps(run_op=fused.run, device_type="cuda")), fused
        ),
        "ours, plain": count_call_traffic(
            make_our_call(options.ranks, BlockOps(device_type="cuda")), plain
        ),
    }
    by_mode = {} if options.ranks == 1 else count_exchange_traffic(options.ranks)
    if options.ranks == 1:
        results["diffusers"] = count_call_traffic(make_diffusers_call(), Traffic())
    for name, result in results.items():
        total = f"{result['bytes'] / 1e9:.1f} GB, {result['launches']} launches"
        print(f"{name}, {options.ranks} ranks, {TOKENS} tokens: {total}")
        for operation, part in list(result["by_operation"].items())[:8]:
            print(f"  {operation:24}{part['bytes'] / 1e9:8.2f} GB {part['launches']:6}")
    for name, row in by_mode.items():
        size, sent, peak = row["bytes"] / 1e9, row["sent"] / 1e6, row["peak"] / 1e9
        print(
            f"self-attention, {name}: {row['collectives']} collectives, sent {sent:.0f} MB; "
            f"{size:.2f} GB in {row['launches']} launches; peak {peak:.3f} GB"
        )
    common.write_json(options.json, torch.device("cpu"), [results, by_mode])


if __name__ == "__main__":
    sys.exit(run_program(main))
