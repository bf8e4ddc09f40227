"""Samples that run through a network in lockstep share the weights of each block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.modules.lockstep import BlockIterator, can_run_in_lockstep, run_in_lockstep
from wan.pipeline.denoise import merge_branch_kwargs


def test_blocks_run_for_all_samples_before_the_next_one() -> None:
    """The first sample computes all blocks, the second skips one, the third all but the first."""
    calls: list[str] = []

    def run_sample(name: str, blocks: list[int]) -> BlockIterator[Tensor]:
        for block in blocks:
            yield block
            calls.append(f"{name}{block}")
        return torch.tensor(len(blocks))

    @contextmanager
    def hold() -> Iterator[None]:
        calls.append("(")
        yield
        calls.append(")")

    samples = [run_sample("a", [0, 1, 2]), run_sample("b", [0, 2]), run_sample("c", [0])]
    results = run_in_lockstep(samples, [None] * 3, hold)
    assert [int(result) for result in results] == [3, 2, 1]
    assert "".join(calls) == "()(a0b0c0)(a1)(a2b2)"


def test_more_samples_cost_less_memory_than_a_block() -> None:
    """A block of 5120 channels has 702 MB in bfloat16; 34 304 tokens in float32 have as much."""
    assert can_run_in_lockstep(34_304, 5120, 13_824)
    assert not can_run_in_lockstep(34_305, 5120, 13_824)


def test_two_branches_are_one_call_with_two_samples() -> None:
    """Each sample has its own text, step and condition; they share what is not of a branch."""
    step = StepInfo(0, 4, "cond", "dit", (1, 1, 1), 1)
    shared = {"clip_fea": torch.zeros(2), "drop": True, "y": [torch.zeros(3)]}
    cond = {**shared, "context": [torch.zeros(4)], "step": step, "audio": torch.zeros(5)}
    uncond = {**shared, "context": [torch.ones(4)], "step": step.for_branch("uncond")}
    uncond["audio"] = torch.ones(5)
    merged = merge_branch_kwargs(cond, uncond)
    assert merged["clip_fea"] is shared["clip_fea"] and merged["drop"] is True
    assert merged["y"] == [*shared["y"], *shared["y"]]
    assert merged["context"] == [*cond["context"], *uncond["context"]]
    for name in ("step", "audio"):
        assert merged[name] == [cond[name], uncond[name]], name
