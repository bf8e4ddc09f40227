"""The order and number of exchanges, ring hops and attention calls of each mode.

Every collective and every kernel call of a rank is executed and recorded. The events are written
as one string:

    A2A  an all-to-all has been started        hop  K/V blocks have been sent along the ring
    scale  an all-to-all of FP8 scales         quantise-q, -k, -v: tensors have become FP8
    got  an earlier all-to-all is complete     in   the blocks of the hop have arrived
    FA   attention                             gather, or another collective's name
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist import run_on_ranks
from tests.distributed.topology import Topology, attention_layer
from wan.kernels.forward_context import StepInfo
from wan.kernels.fp8 import DequantizedAttention, Fp8Attention, Fp8Quantizer, Rotations
from wan.kernels.interfaces import AttentionInput
from wan.kernels.sdpa import SdpaKernel
from wan.settings.attention_modes import TokenPlan

pytestmark = pytest.mark.dist

KINDS = ("all_", "barrier", "broadcast", "gather", "recv", "reduce_s", "scatter", "send")
COLLECTIVES = {
    name: {"all_to_all_single": "A2A", "all_gather_single": "gather"}.get(
        name.replace("into_tensor", "single"), name
    )
    for name in dist.distributed_c10d.__all__
    if name.startswith(KINDS) or name == "reduce"
}


class RecordedWork:
    """A pending collective that records when it is waited for."""

    def __init__(self, work: Any, on_wait: Callable[[], None]) -> None:
        self.work, self.on_wait = work, on_wait

    def wait(self) -> None:
        self.work.wait()
        self.on_wait()


@contextmanager
def record_events(events: list[str]) -> Iterator[None]:
    """Append all of this rank's communication to `events`."""

    def collective(name: str, event: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            scale = event == "A2A" and args[1].shape[-1] == 1
            events.append("scale" if scale else event)
            work = original(*args, **kwargs)
            return work and RecordedWork(work, lambda: events.append("got"))

        return mock.patch.object(dist, name, call)

    original = dist.batch_isend_irecv

    def hop(operations: list[dist.P2POp]) -> list[Any]:
        events.append("hop")
        *works, last = original(operations)
        return [*works, RecordedWork(last, lambda: events.append("in"))]

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
    """The SDPA kernel; `calls` has the rows and heads of each call's queries."""

    def __init__(self, events: list[str], can_return_lse: bool = True) -> None:
        super().__init__()
        self.events, self.can_return_lse = events, can_return_lse
        self.calls: list[tuple[int, int]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        self._record_call(q)
        return super().__call__(q, k, v)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        self._record_call(q)
        return super().with_lse(q, k, v)

    def _record_call(self, q: Tensor) -> None:
        self.events.append("FA")
        self.calls.append((q.shape[1], q.shape[2]))


class Call(NamedTuple):
    """A call of an attention layer. tokens: of all ranks. merges: the kernel has a log-sum-exp."""

    topology: Topology
    mode: str
    heads: int = 24
    tokens: int = 40
    merges: bool = True


RankEvents = tuple[str, list[tuple[int, int]]]
"""(events, rows and heads of each kernel call)."""


def run_attention(calls: Sequence[Call]) -> list[RankEvents]:
    """On one rank."""
    results = []
    for topology, mode, heads, tokens, merges in calls:
        events: list[str] = []
        kernel = RecordedKernel(events, merges)
        layer = attention_layer(topology, mode, kernel)
        qkv = torch.randn(3, 1, TokenPlan(tokens, topology.world).shard_len, heads, 8).unbind(0)
        with record_events(events):
            layer(*qkv, valid_len=tokens)
        results.append((" ".join(events), kernel.calls))
    return results


def collect_events(calls: Sequence[Call]) -> list[list[RankEvents]]:
    """Return the events of each call by rank. calls: all with the same number of ranks."""
    return list(
        map(list, zip(*run_on_ranks(calls[0].topology.world, run_attention, calls), strict=True))
    )


def check_events(expected: Mapping[Call, Sequence[str]]) -> None:
    """Compare the events of each call and rank."""
    events_by_call = [[events for events, _ in ranks] for ranks in collect_events(list(expected))]
    wrong = {
        call: rank_events
        for call, rank_events in zip(expected, events_by_call, strict=True)
        if rank_events != [*expected[call]]
    }
    assert not wrong, {call: expected[call] for call in wrong}


INTO = "A2A A2A A2A"
RINGS = ("ring", "bidirectional")
# mode -> chunks of 24 heads on two ranks, attention to a block of keys
CHUNKS_BY_MODE = {"0": (1, "FA"), "1": (10, "FA"), "2": (10, "FA FA")}


def repeat_per_chunk(chunk_events: str, heads: int = 24) -> dict[str, str]:
    """Repeat the events once per head chunk, by mode. FA: the attention of all query blocks."""
    return {
        mode: " ".join([chunk_events.replace("FA", attention)] * min(chunks, heads // 2))
        for mode, (chunks, attention) in CHUNKS_BY_MODE.items()
    }


def test_a_chunk_is_exchanged_attended_and_sent_back() -> None:
    """Without overlap a chunk starts when the one before is done; no exchange overlaps attention.

    With overlap (three chunks here) exactly one chunk is exchanged ahead of attention.
    """
    pair = Topology(2, 1)
    expected = {Call(pair, mode): [x] * 2 for mode, x in repeat_per_chunk(f"{INTO} FA A2A").items()}
    check_events(expected | {Call(pair, "overlap", heads=6): [write_overlapped_events("FA")] * 2})


def write_overlapped_events(fa: str) -> str:
    arrivals = "got got got"
    first, second = f"{INTO} {INTO} {arrivals} {fa} A2A", f"{INTO} {arrivals} {fa} A2A got"
    return f"{first} {second} {arrivals} {fa} A2A got got"


def test_a_hop_overlaps_attention() -> None:
    """A hop of a chunk starts before attention to the current K/V block and completes after it.

    Ranks with only padding pass blocks on without attention. Where partial results cannot be
    merged, keys and values are gathered once per chunk.
    """
    expected: dict[Call, list[str]] = {}
    for ring_type in RINGS:
        square = Topology(2, 2, ring_type)
        for mode, events in repeat_per_chunk(f"{INTO} hop FA in FA A2A").items():
            expected[Call(square, mode)] = [events] * 4
        valid_events, padding_events = (
            repeat_per_chunk(f"{INTO} hop FA in A2A"),
            repeat_per_chunk(f"{INTO} hop in A2A"),
        )
        for mode in CHUNKS_BY_MODE:
            expected[Call(square, mode, tokens=2)] = [valid_events[mode]] * 2 + [
                padding_events[mode]
            ] * 2
    gathered = repeat_per_chunk(f"{INTO} gather gather FA A2A", heads=8)
    for mode in ("0", "2"):
        expected[Call(Topology(2, 2), mode, heads=8, merges=False)] = [gathered[mode]] * 4
    expected[Call(Topology(2, 2), "overlap", heads=6)] = [
        write_overlapped_events("hop FA in FA")
    ] * 4
    check_events(expected)


def test_hops_of_a_longer_ring() -> None:
    """One way: one block per hop. Both ways: two blocks per hop where both neighbors have one."""
    one_way, both_ways = "hop FA in hop FA in hop FA in FA", "hop FA in hop FA FA in hop FA in"
    ways = {"ring": [one_way] * 4, "bidirectional": [one_way, both_ways, both_ways, one_way]}
    check_events({Call(Topology(1, 4, way), "0"): events for way, events in ways.items()})


def test_rows_and_heads_of_each_attention_call() -> None:
    pair, expected = Topology(2, 1), {}
    for heads, per_chunk in {40: [2] * 10, 24: [2, 2] + [1] * 8, 8: [1] * 4, 2: [1]}.items():
        expected[Call(pair, "0", heads)] = [(40, heads // 2)]
        expected[Call(pair, "1", heads)] = [(40, h) for h in per_chunk]
        expected[Call(pair, "2", heads)] = [(20, h) for h in per_chunk for _ in "12"]
    kernel_calls = [calls for (_, calls), _ in collect_events(list(expected))]
    assert dict(zip(expected, kernel_calls, strict=True)) == expected


class RecordedQuantizer(Fp8Quantizer):
    """The FP8 quantizer, which records its calls."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(Rotations(8))
        self.events = events

    def quantize_q(self, x: Tensor, step: StepInfo | None) -> AttentionInput:
        self.events.append("quantise-q")
        return super().quantize_q(x, step)

    def quantize_k(self, x: Tensor, step: StepInfo | None) -> AttentionInput:
        self.events.append("quantise-k")
        return super().quantize_k(x, step)

    def quantize_v(self, x: Tensor) -> AttentionInput:
        self.events.append("quantise-v")
        return super().quantize_v(x)


def attend_in_fp8(topology: Topology, transport: bool) -> dict[str, str]:
    """On one rank: return the events of one FP8 attention call by mode."""
    events_by_mode = {}
    for mode in CHUNKS_BY_MODE:
        events: list[str] = []

        class Recorded(DequantizedAttention):
            said = events

            def __call__(self, *call: Any) -> Tensor:
                self.said.append("FA")
                return super().__call__(*call)

        method = Fp8Attention(RecordedQuantizer(events), torch.float32, Recorded(), transport)
        layer = attention_layer(topology, mode, methods=(method,))
        qkv = torch.randn(3, 1, 256, 8, 8).unbind(0)
        with record_events(events):
            layer(*qkv, valid_len=256 * topology.world - 7)
        events_by_mode[mode] = " ".join(events)
    return events_by_mode


def test_when_fp8_is_quantized() -> None:
    """Queries are quantized once per block, keys and values once per chunk after the ring's gather.
    With FP8 exchange all are quantized before it, and the scales are sent after the values.
    """
    kv = "quantise-k quantise-v"
    for ring, gathers in ((1, ""), (2, "gather gather ")):
        each = repeat_per_chunk(f"{INTO} {gathers}{kv} FA A2A", heads=8)
        expected = {mode: x.replace("FA", "quantise-q FA") for mode, x in each.items()}
        assert (
            run_on_ranks(2 * ring, attend_in_fp8, Topology(2, ring), False) == [expected] * 2 * ring
        )
    sent = f"quantise-q {kv} {INTO} scale scale scale FA A2A"
    expected = repeat_per_chunk(sent, heads=8)
    assert run_on_ranks(2, attend_in_fp8, Topology(2, 1), True) == [expected] * 2
