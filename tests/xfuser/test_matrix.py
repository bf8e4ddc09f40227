"""xfuser's functions in every mode, ring and layout of ranks, against plain attention.

With log-sum-exp a ring merges, without it gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.dist import run_on_ranks
from tests.distributed.test_attention_matrix import HEAD_DIM, Case, compare_modes
from tests.distributed.topology import collect_failures, topologies
from tests.xfuser.ranks import (
    ATTENTION_FUNCTION_REGISTRY,
    FLASH,
    MATH,
    build_kernel,
    flash_on_cpu,
    use_function,
)

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
