"""What a layer may know about the moment it runs in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One forward pass of one expert, as seen by the attention layers and caches.

    index: 0-based sampling step; count: number of sampling steps.
    branch: "cond" or "uncond", the guidance branch.
    expert: "high_noise", "low_noise" or "dit" (models with a single network).
    grid: tokens along frame, height and width.
    valid_len: number of real tokens; tokens behind it are padding.
    sample: which of the samples that a model computes one after the other.
    """

    index: int
    count: int
    branch: str
    expert: str
    grid: tuple[int, int, int]
    valid_len: int
    sample: int = 0
