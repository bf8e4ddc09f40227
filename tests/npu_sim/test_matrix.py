"""Every NPU kernel and backend on every layout of ranks: modes agree with each other and oracles.

Legend: B batch, S all tokens, N heads, D head size. Padding that is not exchanged holds NaN,
so a result computed from padding is NaN too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import floor, log2, prod

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import slow
from tests.dist import run_on_ranks
from tests.distributed.topology import ROWS, Topology, topologies
from tests.npu_sim import oracles
from tests.npu_sim.ranks import (
    KINDS,
    Grid,
    Kind,
    make_layer,
    make_ordered_qkv,
    make_raster_qkv,
    make_step_info,
    run_backend,
    select_kernels_for,
)
from wan.settings.attention_modes import TokenPlan
from wan.settings.parallel import EXCHANGES
from wan.utils import trace

pytestmark = pytest.mark.dist

Case = tuple[Topology, Kind, int, Grid]
"""(ranks, kind, heads, grid)."""

HEADS = (8, 12)
# No padding on up to 4 ranks; without tokens for a last rank of blocks; an odd number of tokens.
GRIDS = ((4, 16, 16), (5, 11, 13), (3, 15, 19))
# Each query block of mode 2 has 2048 rows or more; on 1, 2 and 4 ranks of a ring.
LASER_GRIDS = {1: ((4, 32, 32), (3, 37, 37)), 2: ((8, 32, 32), (3, 53, 53)), 4: ((3, 74, 74),)}
# Largest error, root mean square of the error over that of the result: against float64.
BOUNDS = {"dense": (2e-2, 5e-3), "laser": (2e-2, 5e-3), "fp8": (2e-2, 5e-3)}


def ulp(x: Tensor) -> float:
    """Return the spacing of bfloat16 values at the largest value of x."""
    return 2.0 ** (floor(log2(x.float().abs().max().item())) - 7)


def shard(x_BSND: Tensor, plan: TokenPlan, fill: float) -> Tensor:
    first, valid = dist.get_rank() * plan.shard_len, plan.count_valid_tokens(dist.get_rank())
    padding = [0, 0, 0, 0, 0, plan.shard_len - valid]
    return F.pad(x_BSND[:, first : first + valid], padding, value=fill)


def compare_modes(case: Case, expected: Tensor) -> None:
    """On one rank: compare the modes with mode 0, and mode 0 with one process."""
    topology, kind, heads, grid = case
    multiple = kind.attention.row_multiple(topology.ring) if topology.world > 1 else 1
    plan = TokenPlan(prod(grid), topology.world, multiple)
    out, valid = {}, plan.count_valid_tokens(dist.get_rank())
    for mode in ROWS:
        kernels = select_kernels_for(kind)
        local_qkv = [shard(x, plan, torch.nan) for x in make_ordered_qkv(kernels, heads, grid)]
        out[mode] = make_layer(topology, mode, kernels)(
            *local_qkv, valid_len=prod(grid), step=make_step_info(kind, grid), layer=0
        )
    for output in out.values():  # after the last exchange, which another rank would wait for
        assert output.dtype == torch.bfloat16 and not output[:, valid:].any()
    errors = {
        "ranks from one": (out["0"].float() - shard(expected, plan, 0).float()).abs().max().item()
    }
    for mode, row in ROWS.items():
        if row.blocks == 1:
            assert torch.equal(out[mode], out["0"]), f"mode {mode} has other bits at {case}"
        else:
            max_difference = (out[mode].float() - out["0"].float()).abs().max().item()
            errors[f"mode {mode} from 0"] = max_difference
    limit = 2 * ulp(expected) if kind.way in ("dense", "laser") else 0.0
    assert all(error <= limit for error in errors.values()), f"{errors}, {limit} at {case}"


def compute_on_one_process(kind: Kind, heads: int, grid: Grid) -> Tensor:
    """Run the kernel or backend on the full sequence and compare it with the oracle."""
    kernels = select_kernels_for(kind)
    q, k, v = make_ordered_qkv(kernels, heads, grid)
    step = replace(make_step_info(kind, grid), layer=0)
    method = next((m for m in kernels.backends if m.applies_to(step)), None)
    out = kernels.dense_kernel(q, k, v) if method is None else run_backend(method, q, k, v, step)
    if kind.way in BOUNDS:
        expected = (
            oracles.compute_fp8_attention if kind.way == "fp8" else oracles.compute_attention
        )(q, k, v)
    else:
        assert kernels.token_order is not None
        raster_output = oracles.compute_rainfusion(kind, *make_raster_qkv(heads, grid), grid)
        expected = raster_output[:, kernels.token_order(grid)].to(out.dtype)
    largest, share = BOUNDS.get(kind.way, (0.0, 0.0))
    errors = oracles.max_error(out, expected), oracles.relative_rms_error(out, expected)
    assert errors[0] <= largest and errors[1] <= share, (kind.name, grid, errors)
    return out


@cache
def compute_single_process_output(kind: Kind, heads: int, grid: Grid) -> Tensor:
    return run_on_ranks(1, compute_on_one_process, kind, heads, grid)[0]


def check_case(case: Case) -> None:
    topology, kind, heads, grid = case
    run_on_ranks(
        topology.world,
        compare_modes,
        case,
        compute_single_process_output(kind, heads, grid),
        timeout=300,
    )


def is_possible(topology: Topology, kind: Kind) -> bool:
    """Exchange in FP8 needs Ulysses ranks; laser gathers, so one ring type is enough."""
    if kind.name == "laser":
        return topology.ring_type == "ring"
    return not kind.attention.quant_alltoall or topology.ulysses > 1


SHARED = (Topology(2, 2), Topology(2, 2, "bidirectional"))
LINES = [*topologies(2), Topology(4, 1), Topology(1, 4), Topology(1, 4, "bidirectional")]


def list_cases(index: int, kind: Kind) -> Iterator[Case]:
    """List cases of one process, a 2 x 2 layout and a one-dimensional layout; sizes take turns.

    Of kinds that differ from another one in a step or a chip, there is only the second. Laser on a
    ring needs at least 8192 tokens and is tested in the slow test only.
    """
    if kind.name == "laser":
        yield Topology(2, 1), kind, 2, LASER_GRIDS[1][1]
        return
    if kind.name.endswith("-before") or kind.name == "v3":
        yield SHARED[index % 2], kind, 4, GRIDS[1 + index % 2]
        return
    lines = [line for line in LINES if is_possible(line, kind)]
    for i, topology in enumerate((Topology(1, 1), SHARED[index % 2], lines[index % len(lines)])):
        if is_possible(topology, kind):
            heads = HEADS[(index + i) % 2] // (1 if topology.ulysses == 4 else 2)
            yield topology, kind, heads, GRIDS[(index + i) % 3]


@pytest.mark.parametrize("kind", KINDS)
def test_selected_combinations(kind: str) -> None:
    for case in list_cases([*KINDS].index(kind), KINDS[kind]):
        check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "kind"),
    [(t, kind) for t in topologies(1, 2, 4) for kind in KINDS.values() if is_possible(t, kind)],
    ids=lambda x: x.name if isinstance(x, Kind) else str(x),
)
def test_all_combinations(topology: Topology, kind: Kind) -> None:
    laser = kind.name == "laser"
    for heads in (2 * topology.ulysses,) if laser else HEADS:
        for grid in LASER_GRIDS[topology.ring] if laser else GRIDS:
            check_case((topology, kind, heads, grid))


def compare_exchanges(name: str, heads: int) -> list[tuple[str, bool, int]]:
    """Return (mode, whether fused and split exchanges are bit-equal, copies of fused)."""
    kind, grid, results = KINDS[name], GRIDS[0], []
    kernels = select_kernels_for(kind)
    plan = TokenPlan(prod(grid), 2, kind.attention.row_multiple(1))
    local_qkv = [shard(x, plan, torch.nan) for x in make_ordered_qkv(kernels, heads, grid)]
    call_kwargs = {"valid_len": prod(grid), "step": make_step_info(kind, grid), "layer": 0}
    for mode in ROWS:
        split, fused = (
            make_layer(Topology(2, 1), mode, select_kernels_for(kind), exchange)
            for exchange in EXCHANGES
        )
        expected, events = split(*local_qkv, **call_kwargs), list[trace.Event]()
        recorder = trace.Recorder((0,), trace.HostClock(), events.extend)
        with trace.use_recorder(recorder), trace.record_step(0, "dit"):
            out = fused(*local_qkv, **call_kwargs)
        copies = sum(event.operation == "copy" for event in events)
        results.append((mode, torch.equal(out, expected), copies))
    return results


@pytest.mark.parametrize("name", ["dense", slow("fp8"), "fp8-transport", slow("v2"), "v3-fp8"])
def test_one_exchange_gives_operators_what_they_take(name: str) -> None:
    """Each chunk copies q, k, v once; values quantized before the exchange need no copy."""
    tensors = 0 if name == "fp8-transport" else 3
    for heads, chunks in ((8, 4), (5, 2)) if name == "dense" else ((5, 2),):
        for results in run_on_ranks(2, compare_exchanges, name, heads):
            for mode, is_equal, copies in results:
                assert is_equal, f"mode {mode}, {heads} heads"
                assert copies == tensors * (1 if mode == "0" else chunks), (
                    f"mode {mode}, {heads} heads"
                )
