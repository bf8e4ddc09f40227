"""xfuser's functions in every mode, ring and layout of ranks, against plain attention.

With log-sum-exp a ring merges, without it gathers; the numbers of calls tell which.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from tests.dist import run_on_ranks
from tests.distributed.test_attention_matrix import (
    HEAD_DIM,
    Case,
    compare_modes,
    make_qkv_and_reference,
)
from tests.distributed.topology import (
    ROWS,
    Topology,
    attention_layer,
    collect_failures,
    shard,
    topologies,
)
from tests.xfuser.ranks import (
    ATTENTION_FUNCTION_REGISTRY,
    FLASH,
    MATH,
    build_kernel,
    flash_on_cpu,
    use_function,
)
from wan.settings import attention_modes
from wan.settings.attention_modes import TokenPlan

pytestmark = pytest.mark.dist
TOKENS = (67, 9)
FUNCTIONS = {
    "sdpa_flash": (FLASH, flash_on_cpu, True),  # with the log-sum-exp
    # xfuser's own; the bits of its products depend on the number of heads
    "sdpa_math": (MATH, ATTENTION_FUNCTION_REGISTRY[MATH], False),
}


def compare(case_and_backend: tuple[Case, str]) -> None:
    """On one rank: compare all modes with plain attention."""
    case, backend = case_and_backend
    member, function, has_lse = FUNCTIONS[backend]

    def make_kernel() -> Any:
        xfuser_kernel = build_kernel(backend, HEAD_DIM, getattr(torch, case[3]))
        assert xfuser_kernel.can_return_lse == has_lse
        return xfuser_kernel

    with use_function(member, function):
        compare_modes(case, make_kernel, same_bits=has_lse)


def find_differences(cases: Sequence[tuple[Case, str]]) -> dict[str, str]:
    return collect_failures(cases, compare)


def list_cases() -> list[tuple[Case, str]]:
    """List every layout of 1, 2 and 4 ranks with every function; dtypes and lengths take turns."""
    return [
        ((topology, 24, TOKENS[i % 2], ("float32", "bfloat16")[(i + j) % 2]), backend)
        for i, topology in enumerate(topologies(1, 2, 4))
        for j, backend in enumerate(FUNCTIONS)
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_modes(world: int) -> None:
    world_cases = [(case, backend) for case, backend in list_cases() if case[0].world == world]
    assert run_on_ranks(world, find_differences, world_cases) == [{}] * world


def record_calls(
    topology: Topology, mode: str, backend: str
) -> tuple[list[tuple[int, ...]], float]:
    """Return the query shapes of all calls of one layer, and its error."""
    member, function, _ = FUNCTIONS[backend]
    tokens, plan = 64, TokenPlan(64, topology.world)
    global_qkv, expected, _ = make_qkv_and_reference(24, tokens, "float32")
    with use_function(member, function) as call_shapes:
        layer = attention_layer(topology, mode, build_kernel(backend, HEAD_DIM))
        call_shapes.clear()
        output = layer(*(shard(x, plan, 0) for x in global_qkv))
    return call_shapes, float((output - shard(expected, plan, 0)).abs().max())


def test_which_function_computes_and_how_often() -> None:
    """One call per chunk and query block, times the number of ranks of a ring that merges."""
    layouts = Topology(1, 1), Topology(2, 1), Topology(1, 2), Topology(2, 2, "bidirectional")
    for topology, mode, backend in product(layouts, ROWS, FUNCTIONS):
        row, ulysses = ROWS[mode], topology.ulysses
        chunks = attention_modes.list_head_ranges(24, ulysses, row.chunks)
        merged = topology.ring if FUNCTIONS[backend][2] else 1
        heads = sorted((b - a) // ulysses for a, b in chunks for _ in range(row.blocks * merged))
        for call_shapes, error in run_on_ranks(
            topology.world, record_calls, topology, mode, backend
        ):
            case = topology, mode, backend
            assert sorted(shape[1] for shape in call_shapes) == heads and error <= 2e-5, case
            assert {shape[2] for shape in call_shapes} == {64 // topology.ring // row.blocks}, case
