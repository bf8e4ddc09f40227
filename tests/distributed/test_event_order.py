"""Exchanges, hops and attention happen in the promised order and number: the device's rests.

Every collective and every kernel call of a rank is recorded while it runs for real. The list of
events is written as one string:

    A2A  an all-to-all has been started        hop  K/V blocks have been sent round the ring
    scale  the same, of scales of FP8          quantise-q, -k, -v: tensors have become FP8
    got  an all-to-all started before is in    in   the blocks of the hop have arrived
    FA   attention                             gather, or another collective's name
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist import run
from tests.distributed.topology import ROWS, Topology, attention_layer, blocks_of
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import Payload, StepInfo
from wan.kernels.fp8 import DequantisedAttention, Fp8Attention, Fp8Quantiser, Rotations
from wan.kernels.sdpa import SdpaKernel
from wan.modules.interfaces import Collaborators
from wan.modules.model import WanModel
from wan.settings.schedule import TokenPlan, heads_per_chunk, q_ranges

pytestmark = pytest.mark.dist

KINDS = ("all_", "barrier", "broadcast", "gather", "recv", "reduce_s", "scatter", "send")
COLLECTIVES = {
    name: {"all_to_all_single": "A2A", "all_gather_single": "gather"}.get(
        name.replace("into_tensor", "single"), name
    )
    for name in dist.distributed_c10d.__all__
    if name.startswith(KINDS) or name == "reduce"
}
RINGS = ("ring", "bidirectional")


class Waited:
    """A collective under way that says when it is waited for."""

    def __init__(self, work: Any, say: Callable[[], None]) -> None:
        self.work, self.say = work, say

    def wait(self) -> None:
        self.work.wait()
        self.say()


@contextmanager
def recorded(events: list[str]) -> Iterator[None]:
    """All of this rank's communication goes into `events`."""

    def collective(name: str, event: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            scale = event == "A2A" and args[1].shape[-1] == 1
            events.append("scale" if scale else event)
            work = original(*args, **kwargs)
            return work and Waited(work, lambda: events.append("got"))

        return mock.patch.object(dist, name, call)

    original = dist.batch_isend_irecv

    def hop(operations: list[dist.P2POp]) -> list[Any]:
        events.append("hop")
        *works, last = original(operations)
        return [*works, Waited(last, lambda: events.append("in"))]

    patches = [collective(*pair) for pair in COLLECTIVES.items()]
    patches.append(mock.patch.object(dist, "batch_isend_irecv", hop))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


class RecordedKernel(SdpaKernel):
    """The real kernel; `calls` has the rows and heads of each call's queries."""

    def __init__(self, events: list[str], can_return_lse: bool = True) -> None:
        super().__init__()
        self.events, self.can_return_lse = events, can_return_lse
        self.calls: list[tuple[int, int]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        self._say(q)
        return super().__call__(q, k, v)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        self._say(q)
        return super().with_lse(q, k, v)

    def _say(self, q: Tensor) -> None:
        self.events.append("FA")
        self.calls.append((q.shape[1], q.shape[2]))


def attend(
    topology: Topology, mode: str, heads: int, tokens: int, can_return_lse: bool
) -> tuple[str, list[tuple[int, int]]]:
    events: list[str] = []
    kernel = RecordedKernel(events, can_return_lse)
    layer = attention_layer(topology, mode, kernel)
    shard_len = TokenPlan(tokens, topology.world).shard_len
    qkv = torch.randn(3, 1, shard_len, heads, 8).unbind(0)
    with recorded(events):
        layer(*qkv, valid_len=tokens)
    return " ".join(events), kernel.calls


def events_of(
    topology: Topology, mode: str, *, heads: int = 24, tokens: int = 40, lse: bool = True
) -> tuple[list[str], list[tuple[int, int]]]:
    """(events of each rank, rows and heads of each kernel call of rank 0)."""
    answers = run(topology.world, attend, topology, mode, heads, tokens, lse)
    return [events for events, _ in answers], answers[0][1]


def joined(chunks: int, events: str) -> str:
    return " ".join([events] * chunks)


@pytest.mark.parametrize(
    ("mode", "chunks", "events"),
    [
        ("0", 1, "A2A A2A A2A FA A2A"),
        ("1", 10, "A2A A2A A2A FA A2A"),
        ("2", 10, "A2A A2A A2A FA FA A2A"),
    ],
)
def test_a_chunk_is_exchanged_attended_and_sent_back(mode: str, chunks: int, events: str) -> None:
    """The next begins when it is done; no exchange runs beside attention."""
    ranks, _ = events_of(Topology(2, 1), mode)
    assert ranks == [joined(chunks, events)] * 2


@pytest.mark.parametrize(
    ("heads", "per_chunk"), [(40, [2] * 10), (24, [2, 2] + [1] * 8), (8, [1] * 4), (2, [1])]
)
def test_rows_and_heads_of_each_attention_call(heads: int, per_chunk: list[int]) -> None:
    assert events_of(Topology(2, 1), "0", heads=heads)[1] == [(40, heads // 2)]
    assert events_of(Topology(2, 1), "1", heads=heads)[1] == [(40, h) for h in per_chunk]
    assert events_of(Topology(2, 1), "2", heads=heads)[1] == [
        (20, h) for h in per_chunk for _ in "12"
    ]


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("heads", [8, 24])
def test_a_call_does_what_its_row_says(mode: str, heads: int) -> None:
    """For every mode there is, also one that is new."""
    row, rows = ROWS[mode], 40
    (events, _), calls = events_of(Topology(2, 1), mode, heads=heads, tokens=rows)
    chunks = heads_per_chunk(heads, 2, row.chunks)
    assert events.split().count("A2A") == 4 * len(chunks)
    blocks = [b - a for a, b in q_ranges(rows, row.blocks)]
    attended = [chunks[chunk] for verb, chunk in row.order(len(chunks)) if verb == "attend"]
    assert calls == [(block, heads) for heads in attended for block in blocks]
    assert ("got" in events) == row.overlaps


@pytest.mark.parametrize("ring_type", RINGS)
@pytest.mark.parametrize(
    ("mode", "chunks", "events"),
    [
        ("0", 1, "A2A A2A A2A hop FA in FA A2A"),
        ("1", 10, "A2A A2A A2A hop FA in FA A2A"),
        ("2", 10, "A2A A2A A2A hop FA FA in FA FA A2A"),
    ],
)
def test_a_hop_runs_beside_attention(ring_type: str, mode: str, chunks: int, events: str) -> None:
    """Hops are inside the chunk; started before the block at hand is attended to, in after it."""
    ranks, _ = events_of(Topology(2, 2, ring_type), mode)
    assert ranks == [joined(chunks, events)] * 4


def test_hops_of_a_longer_ring() -> None:
    """One way: a hop per block. Both ways: two blocks per hop where both neighbours have one."""
    ranks, _ = events_of(Topology(1, 4), "0")
    assert ranks == ["hop FA in hop FA in hop FA in FA"] * 4
    ranks, _ = events_of(Topology(1, 4, "bidirectional"), "0")
    assert ranks[0] == ranks[3] == "hop FA in hop FA in hop FA in FA"
    assert ranks[1] == ranks[2] == "hop FA in hop FA FA in hop FA in"


@pytest.mark.parametrize("ring_type", RINGS)
@pytest.mark.parametrize(
    ("mode", "chunks", "fa"), [("0", 1, "FA"), ("1", 10, "FA"), ("2", 10, "FA FA")]
)
def test_blocks_of_padding_cost_no_attention(
    ring_type: str, mode: str, chunks: int, fa: str
) -> None:
    """2 tokens on 2 x 2 ranks: the second half of the ring has none, but passes blocks on."""
    ranks, _ = events_of(Topology(2, 2, ring_type), mode, tokens=2)
    assert ranks[:2] == [joined(chunks, f"A2A A2A A2A hop {fa} in A2A")] * 2
    assert ranks[2:] == [joined(chunks, "A2A A2A A2A hop in A2A")] * 2


@pytest.mark.parametrize(("mode", "fa"), [("0", "FA"), ("2", "FA FA")])
def test_kernels_without_lse_gather(mode: str, fa: str) -> None:
    """Keys and values once per chunk, not once per query block."""
    ranks, _ = events_of(Topology(2, 2), mode, heads=8, lse=False)
    chunks = 1 if mode == "0" else 4
    assert ranks == [joined(chunks, f"A2A A2A A2A gather gather {fa} A2A")] * 4


@pytest.mark.parametrize("ring", [1, 2])
def test_overlap_exchanges_the_next_chunk_under_attention(ring: int) -> None:
    """Three chunks: in with the first and second, attend, out; one chunk ahead, no more."""
    into, got = "A2A A2A A2A", "got got got"
    fa = "FA" if ring == 1 else "hop FA in FA"
    ranks, _ = events_of(Topology(2, ring), "overlap", heads=6)
    expected = [
        f"{into} {into} {got} {fa} A2A",
        f"{into} {got} {fa} A2A got",
        f"{got} {fa} A2A got",
        "got",
    ]
    assert ranks == [" ".join(expected)] * (2 * ring)


def forward_a_model(mode: str, layers: int) -> str:
    events: list[str] = []
    torch.manual_seed(0)
    net = WanModel(
        dim=192,
        ffn_dim=64,
        num_heads=24,
        num_layers=layers,
        text_dim=16,
        text_len=8,
        collaborators=Collaborators(
            blocks_of(attention_layer(Topology(2, 1), mode, RecordedKernel(events))),
            tokens=ShardedTokens(None),
        ),
    )
    for block in net.blocks:
        block.cross_attn.register_forward_pre_hook(lambda *_: events.append("text"))
        block.register_forward_hook(lambda *_: events.append("end"))
    with torch.inference_mode(), recorded(events):
        net([torch.randn(16, 3, 6, 6)], torch.tensor([500]), [torch.randn(5, 16)], 27)
    return " ".join(events)


@pytest.mark.parametrize(
    ("mode", "chunks", "fa"), [("0", 1, "FA"), ("1", 10, "FA"), ("2", 10, "FA FA")]
)
def test_a_model_communicates_in_self_attention_alone(mode: str, chunks: int, fa: str) -> None:
    """Nothing for the text; the velocities are gathered once."""
    block = joined(chunks, f"A2A A2A A2A {fa} A2A") + " text end"
    assert run(2, forward_a_model, mode, 3) == [f"{joined(3, block)} gather"] * 2


class RecordedQuantiser(Fp8Quantiser):
    """The real quantiser, heard of."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(Rotations(8))
        self.events = events

    def q(self, x: Tensor, step: StepInfo | None) -> Payload:
        self.events.append("quantise-q")
        return super().q(x, step)

    def k(self, x: Tensor, step: StepInfo | None) -> Payload:
        self.events.append("quantise-k")
        return super().k(x, step)

    def v(self, x: Tensor) -> Payload:
        self.events.append("quantise-v")
        return super().v(x)


def attend_in_fp8(topology: Topology, mode: str, transport: bool) -> str:
    events: list[str] = []

    class Recorded(DequantisedAttention):
        def __call__(self, *call: Any) -> Tensor:
            events.append("FA")
            return super().__call__(*call)

    method = Fp8Attention(RecordedQuantiser(events), torch.float32, Recorded(), transport)
    layer = attention_layer(topology, mode, methods=(method,))
    qkv = torch.randn(3, 1, 256, 8, 8).unbind(0)
    with recorded(events):
        layer(*qkv, valid_len=256 * topology.world - 7)
    return " ".join(events)


KV, Q = "quantise-k quantise-v", "quantise-q FA"


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize(("mode", "chunks", "fa"), [("0", 1, Q), ("1", 4, Q), ("2", 4, f"{Q} {Q}")])
def test_queries_are_quantised_between_pieces_of_attention(
    ring: int, mode: str, chunks: int, fa: str
) -> None:
    """Keys and values once per chunk, after the ring has gathered them."""
    whole = "" if ring == 1 else "gather gather "
    ranks = run(2 * ring, attend_in_fp8, Topology(2, ring), mode, False)
    assert ranks == [joined(chunks, f"A2A A2A A2A {whole}{KV} {fa} A2A")] * (2 * ring)


@pytest.mark.parametrize(("mode", "chunks", "fa"), [("1", 4, "FA"), ("2", 4, "FA FA")])
def test_scales_are_sent_behind_all_values(mode: str, chunks: int, fa: str) -> None:
    """Quantised once, before the exchange; nothing is quantised after it."""
    ranks = run(2, attend_in_fp8, Topology(2, 1), mode, True)
    sent = "quantise-q quantise-k quantise-v A2A A2A A2A scale scale scale"
    assert ranks == [joined(chunks, f"{sent} {fa} A2A")] * 2
