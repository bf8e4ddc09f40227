"""The order of exchanges, quantization and kernels on an NPU.

The stand-in logs every collective and operator call of a rank. Mask planning and rotation, which
are no operators, are added, and the log is written as one string:

    A2A, s-A2A        an all-to-all of values, of scales            plan   a mask is planned
    gather, s-gather  the same over the ring                        rot    a rotation
    hop               K/V blocks have been sent along the ring      q8     queries to FP8
    FA                attention                                     kv8    keys or values to FP8
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any
from unittest import mock

import pytest

from tests.dist import run_on_ranks
from tests.distributed.topology import ROWS, Topology
from tests.npu_sim.ranks import (
    KINDS,
    Grid,
    Kind,
    make_layer,
    make_ordered_qkv,
    make_step_info,
    select_kernels_for,
)
from wan.kernels import fp8 as quant
from wan.kernels import rainfusion as sparse
from wan.kernels.forward_context import StepInfo
from wan.settings.attention_modes import TokenPlan, count_heads_per_chunk

pytestmark = pytest.mark.dist

GRID = (4, 16, 16)
HEADS = 4  # 2 chunks on the 2 ranks of a Ulysses group
ATTENTION = (
    "npu_fusion_attention",
    "mindiesd.la",
    "mindiesd.fused_infer_attention_score_v2",
    "mindiesd.rainfusionattention",
    "mindiesd.block_sparse_attention",
)
EVENTS = {"all_to_all_single": "A2A", "all_gather_single": "gather", "batch_isend_irecv": "hop"}
EVENTS |= dict.fromkeys(ATTENTION, "FA") | {"plan": "plan", "rotate": "rot"}


def name_event(call: Any) -> str:
    if call.name == "npu_dynamic_block_quant":
        return {128: "q8", 256: "kv8"}[call.facts["rows"]]
    scales = call.name.startswith("all_") and call.dtypes[0] == "float32"
    return ("s-" if scales else "") + EVENTS.get(call.name, call.name)


@contextmanager
def record_events(events: list[str]) -> Iterator[None]:
    """Append this rank's calls to `events`, with mask planning and rotation."""
    import torch_npu
    from torch_npu.log import record

    def record_name(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            record(name)
            return function(*args)

        return call

    torch_npu.calls.clear()
    with (
        mock.patch.object(
            sparse, "make_rainfusion_mask", record_name("plan", sparse.make_rainfusion_mask)
        ),
        mock.patch.object(quant, "rotate_heads", record_name("rotate", quant.rotate_heads)),
    ):
        yield
    events += map(name_event, torch_npu.calls)


def run_attention(topology: Topology, kind: Kind, grids: dict[str, Grid]) -> dict[str, str]:
    """On one rank: return the events of each mode, with its grid."""
    return {mode: run_mode(topology, mode, kind, grid) for mode, grid in grids.items()}


def run_mode(topology: Topology, mode: str, kind: Kind, grid: Grid) -> str:
    plan = TokenPlan(prod(grid), topology.world, kind.attention.row_multiple(topology.ring))
    kernels, events = select_kernels_for(kind), []
    layer = make_layer(topology, mode, kernels)
    local_qkv = [x[:, : plan.shard_len] for x in make_ordered_qkv(kernels, HEADS, grid)]
    with record_events(events):
        layer(*local_qkv, valid_len=prod(grid), step=make_step_info(kind, grid), layer=0)
    return " ".join(events)


EXCHANGE_QKV = "A2A A2A A2A"
PREPARE_KV = {"fp8": "rot kv8 kv8", "v2": "plan", "v3": "plan", "v3-fp8": "plan rot kv8 kv8"}
BLOCK = {"fp8": "rot q8 FA", "v3-fp8": "rot q8 FA"}


def list_chunk_events(kind: Kind, ring: int, blocks: int) -> tuple[str, str]:
    """List the events of a chunk up to its exchange, and from there to its result."""
    if kind.attention.quant_alltoall:
        gathers = "gather s-gather gather s-gather " if ring > 1 else ""
        return f"rot q8 rot kv8 kv8 {EXCHANGE_QKV} s-A2A s-A2A s-A2A", gathers + " ".join(
            ["FA"] * blocks
        )
    if kind.way == "dense" and ring > 1:  # K/V hop along the ring
        return EXCHANGE_QKV, " ".join(["hop", *["FA"] * blocks * ring])
    gathers = "gather gather" if ring > 1 else ""
    parts = [gathers, PREPARE_KV.get(kind.way, ""), *[BLOCK.get(kind.way, "FA")] * blocks]
    return EXCHANGE_QKV, " ".join(filter(None, parts))


def list_expected_events(kind: Kind, ring: int, mode: str) -> str:
    row = ROWS[mode]
    exchange_events, attention_events = list_chunk_events(kind, ring, row.blocks)
    if row.overlaps:  # one chunk ahead, of two
        return f"{exchange_events} {exchange_events} {attention_events} A2A {attention_events} A2A"
    return " ".join(
        [f"{exchange_events} {attention_events} A2A"]
        * len(count_heads_per_chunk(HEADS, 2, row.chunks))
    )


def choose_grid(kind: Kind, ring: int, mode: str) -> Grid:
    """Choose the grid; laser needs at least 2048 rows in each call."""
    if kind.way != "laser":
        return GRID
    return (2 * ring * ROWS[mode].blocks, 32, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_every_kind_and_mode(kind: str) -> None:
    """K/V are quantized and masks planned once per chunk, queries quantized once per block."""
    spec = KINDS[kind]
    for ring in (1, 2):
        grids = {mode: choose_grid(spec, ring, mode) for mode in ROWS}
        if spec.way == "laser":
            grids = {m: x for m, x in grids.items() if prod(x) <= (2048, 4096)[m in "02"]}
        expected = {mode: list_expected_events(spec, ring, mode) for mode in grids}
        for events in run_on_ranks(2 * ring, run_attention, Topology(2, ring), spec, grids):
            assert events == expected, ring


def attend_at_steps(kind: Kind, mode: str) -> list[str]:
    """Run the same layer at four successive steps."""
    plan, kernels = TokenPlan(prod(GRID), 2, 128), select_kernels_for(kind)
    layer, events_by_step = make_layer(Topology(2, 1), mode, kernels), []
    local_qkv = [x[:, : plan.shard_len] for x in make_ordered_qkv(kernels, HEADS, GRID)]
    for index in range(4):
        events: list[str] = []
        with record_events(events):
            info = StepInfo(index, 8, "cond", "dit", GRID, prod(GRID))
            layer(*local_qkv, valid_len=prod(GRID), step=info, layer=0)
        events_by_step.append(" ".join(events))
    return events_by_step


def test_masks_of_later_steps() -> None:
    """RainFusion begins at step 1 and plans at every second step from there."""
    kind = KINDS["v3"]
    assert kind.attention.sparse_start_step == 1
    kind = kind._replace(attention=replace(kind.attention, mask_refresh_interval=2))
    for mode in ROWS:
        dense, planned = (
            list_expected_events(KINDS["v3-before"], 1, mode),
            list_expected_events(kind, 1, mode),
        )
        steps = [dense, planned, planned.replace("plan ", ""), planned]
        assert run_on_ranks(2, attend_at_steps, kind, mode) == [steps] * 2, mode
