"""Runs several samples through a network in lockstep: each block runs for all before the next one.

So a block's weights are dequantized, or copied from host memory, once for all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from wan.utils import trace

if TYPE_CHECKING:
    from torch import Tensor

    from wan.kernels.forward_context import StepInfo

T = TypeVar("T")
BlockIterator = Generator[int, None, T]
"""A forward pass of a sample, or a part of it: yields the index of each block before it runs the
block, and returns the result."""
HoldWeights = Callable[[], AbstractContextManager[object]]
"""Returns a context in which the weights of a block may be used by several samples."""


def run_to_end(iterator: BlockIterator[T]) -> T:
    """Runs all blocks of one sample."""
    while True:
        try:
            next(iterator)
        except StopIteration as stop:
            return stop.value


def run_in_lockstep(
    iterators: Sequence[BlockIterator[Tensor]],
    steps: Sequence[StepInfo | None],
    hold_weights: HoldWeights,
) -> list[Tensor]:
    """Runs all blocks of several samples; a sample whose step cache skips blocks waits.

    Args:
        iterators: The forward pass of each sample.
        steps: The step of each sample, for traces.
        hold_weights: Is entered once for each block.

    Returns:
        The result of each sample.
    """
    results: dict[int, Tensor] = {}
    next_blocks = dict.fromkeys(range(len(iterators)), -1)
    while next_blocks:
        block = min(next_blocks.values())
        with hold_weights():
            for sample in [i for i, index in next_blocks.items() if index == block]:
                step = steps[sample]
                with trace.span("branch", branch=step and step.branch):
                    try:
                        next_blocks[sample] = next(iterators[sample])
                    except StopIteration as stop:
                        results[sample] = stop.value
                        del next_blocks[sample]
    return [results[sample] for sample in range(len(iterators))]


def can_run_in_lockstep(num_tokens: int, dim: int, ffn_dim: int) -> bool:
    """Whether the float32 residual stream of a further sample is smaller than a block's weights.

    All ranks decide alike. With more tokens the weights cost little of a block's time.
    """
    num_weights = 8 * dim * dim + 2 * dim * ffn_dim
    return 4 * num_tokens * dim <= 2 * num_weights
