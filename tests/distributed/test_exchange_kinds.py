"""Split, fused and written exchanges, and heads not divisible by ranks, give the same bits.

Legend: B batch, S all tokens, N heads, D head size. Padding that is not exchanged holds NaN.
"""

from __future__ import annotations

import time
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import slow
from tests.dist import run_on_ranks
from tests.distributed.methods import HEAD_DIM, KINDS, Kind, make_methods
from tests.distributed.topology import ROWS, Collectives, Topology, attention_layer, shard
from wan.kernels.forward_context import StepInfo
from wan.kernels.sdpa import SdpaKernel
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.blocks import BlockSizes, SharedInputs, WanAttentionBlock
from wan.modules.interfaces import ModelComponents
from wan.modules.rope import make_rope_table
from wan.settings.attention_modes import TokenPlan
from wan.utils.torch_private import StorageTracker

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]

GRID = (3, 16, 10)
TOKENS = prod(GRID)
DENSE = Kind("dense")
QUERY_BYTES = 6 * 32 * 4  # where memory is measured


def make_qkv(heads: int, batch: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads)
    return list(torch.randn(3, batch, TOKENS, heads, HEAD_DIM, generator=generator).to(dtype))


def attend_written(
    layer: FAPowerCapAttention, local_qkv: list[Tensor], **call_kwargs: Any
) -> Tensor | None:
    """Write q, k and v in two slices of tokens; None where the layer keeps tensors."""
    with torch.no_grad():
        call = layer.start(local_qkv[0].flatten(2), local_qkv[0].shape[2], **call_kwargs)
        if not call.takes_slices:
            return None
        for index, x in enumerate(local_qkv):
            call.write(index, x[:, :7])
            call.write(index, x[:, 7:], 7)
        return call.finish()


def run_all_modes(
    topology: Topology, kind: Kind, heads: int, batch: int, dtype: torch.dtype
) -> Any:
    """Return this rank's rows and number of all-to-alls for every mode and exchange."""
    plan = TokenPlan(TOKENS, topology.world, 1 if kind == DENSE else kind.multiple)
    local_qkv = [shard(x, plan, torch.nan) for x in make_qkv(heads, batch, dtype)]
    step = StepInfo(3, 8, "cond", "dit", GRID, TOKENS, layer=0)
    outputs, counts, was_written = {}, {}, False
    for mode in ROWS:
        for exchange in ("split", "fused", "written"):
            layer = attention_layer(
                topology,
                mode,
                methods=make_methods(kind, dtype),
                exchange="split" if exchange == "split" else "fused",
            )
            layer.layer = 0
            call_kwargs: dict[str, Any] = {"valid_len": TOKENS, "step": step}
            with Collectives() as collectives:
                if exchange == "written":
                    out = attend_written(layer, local_qkv, **call_kwargs)
                    was_written = was_written or out is not None
                else:
                    out = layer(*local_qkv, **call_kwargs)
            if out is not None:
                outputs[mode, exchange] = out
                counts[mode, exchange] = collectives.counts["alltoall_base_"]
    return outputs, counts, was_written, plan.count_valid_tokens(dist.get_rank())


def check_exchanges(topology: Topology, kind: Kind, *sizes: Any) -> None:
    for outputs, counts, was_written, _ in run_on_ranks(
        topology.world, run_all_modes, topology, kind, *sizes
    ):
        assert was_written == (not kind.transport)
        chunks = counts["1", "fused"] // 2
        for (mode, exchange), out in outputs.items():
            way = f"mode {mode}, {exchange}, {kind}"
            assert torch.equal(out, outputs["0", "split"]), way
            number = 1 if mode == "0" else chunks
            calls_per_chunk = 2 if exchange != "split" else 7 if kind.transport else 4
            assert counts[mode, exchange] == calls_per_chunk * number, way


def test_no_way_changes_a_bit() -> None:
    for kind in (DENSE, Kind("fp8", transport=True), Kind("v3-fp8")):
        check_exchanges(Topology(2, 1), kind, 5, 1, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DENSE, *KINDS], ids=str)
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (3, 1), (2, 2)])
def test_no_way_changes_a_bit_on_any_layout(sizes: tuple[int, int], kind: Kind) -> None:
    check_exchanges(Topology(*sizes), kind, 5, 1, torch.float32)
    if kind == DENSE:
        check_exchanges(Topology(*sizes), kind, 12, 2, torch.bfloat16)


@pytest.mark.parametrize(
    ("ranks", "heads"),
    [(3, 40), slow(3, 4), slow(5, 12), slow(5, 24), slow(6, 40), slow(7, 12), slow(7, 40)],
)
def test_heads_that_ranks_do_not_divide(ranks: int, heads: int) -> None:
    q, k, v = (x.transpose(1, 2) for x in make_qkv(heads, 1, torch.float32))
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    shares = run_on_ranks(ranks, run_all_modes, Topology(ranks, 1), DENSE, heads, 1, torch.float32)
    for way in shares[0][0]:
        parts = [outputs[way][:, :valid] for outputs, _, _, valid in shares]
        assert (torch.cat(parts, 1) - expected).abs().max() <= 2e-5
        assert all(torch.equal(outputs[way], outputs["0", "split"]) for outputs, *_ in shares)


class MeasuredKernel(SdpaKernel):
    """The SDPA kernel; `live` has the bytes of all tensors in each of a call's kernels."""

    def __init__(self, tracker: StorageTracker, num_calls: int) -> None:
        super().__init__()
        self.tracker, self.num_calls = tracker, num_calls
        self.live: list[int] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        deadline = time.monotonic() + 5  # gloo's thread frees its own references a little later
        if len(self.live) == self.num_calls - 1:
            limit = self.live[0] - 2 * QUERY_BYTES if self.live else 3 * QUERY_BYTES
            while self.tracker.live_bytes.total() > limit and time.monotonic() < deadline:
                time.sleep(0.001)
        self.live.append(self.tracker.live_bytes.total())
        return super().__call__(q, k, v)


@torch.no_grad()
def measure_live_bytes(exchange: str) -> dict[str, list[float]]:
    """On one rank: by mode, the bytes in each attention call, as multiples of those of q."""
    multiples = {}
    for mode in ROWS:
        with StorageTracker("cpu") as tracker:
            chunks = None if mode == "0" else 3
            kernel = MeasuredKernel(tracker, (chunks or 1) * ROWS[mode].blocks)
            layer = attention_layer(Topology(2, 1), mode, kernel, exchange=exchange, chunks=chunks)
            call = layer.start(torch.empty(1, 6, 32), 8)
            for index in range(3):
                call.write(index, torch.randn(1, 6, 8, 4))
            call.finish()
        multiples[mode] = [live / QUERY_BYTES for live in kernel.live]
    return multiples


@pytest.mark.parametrize("exchange", ["split", "fused"])
def test_q_k_and_v_are_freed_when_their_last_chunk_is_sent(exchange: str) -> None:
    """Later the memory of q, k and v, or of the send buffer, is that of the result."""
    for multiples in run_on_ranks(2, measure_live_bytes, exchange):
        assert multiples.pop("0") == [3], "what has been received"
        for mode, (first, *_, last) in multiples.items():
            assert last <= first - 2, mode


def compute_gradients(exchange: str) -> list[Tensor]:
    """Return a block's output with gradients enabled, and the gradients of its weights."""
    torch.manual_seed(0)
    layer = attention_layer(Topology(2, 1), "1", exchange=exchange)
    components = ModelComponents(attention=lambda _: layer)
    block = WanAttentionBlock(BlockSizes(32, 48, 4, text_len=3), 0, components)
    info = SharedInputs((6,), make_rope_table((1, 2, 3), 8), 12)
    assert not layer.start(torch.randn(1, 6, 32), 4).takes_slices, "nothing is written in place"
    x, text = torch.randn(1, 6, 32), torch.randn(1, 3, 32)
    out, _ = block(x, torch.randn(1, 1, 6, 32), text, None, info)
    weights = [weight for name, weight in block.named_parameters() if "self_attn" not in name]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), weights)]


def test_gradients_take_the_same_path() -> None:
    """With gradients q, k and v are not views of a send buffer that is written in place."""
    split, fused = (
        run_on_ranks(2, compute_gradients, exchange)[0] for exchange in ("split", "fused")
    )
    assert len(split) > 10 and all(map(torch.equal, split, fused))
