"""What the layers must know about the sampling step that they compute."""

from __future__ import annotations

from dataclasses import dataclass

from wan.settings.attention_modes import Grid


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The forward pass of an expert in which a call happens and, in self-attention, the call.

    Attributes:
        index: Sampling step, from 0.
        count: Number of sampling steps.
        branch: "cond" or "uncond", the guidance branch.
        expert: "high_noise", "low_noise" or "dit" (models with a single network).
        grid: Tokens along frame, height and width.
        valid_len: Number of tokens without padding, which follows them.
        sample: Index in the batch; samples are computed one after the other.
        layer: Index of the block; None outside the blocks.
        first_head: Global index of the first head that this rank attends with.
        first_row: Global index of this rank's first query row.
    """

    index: int
    count: int
    branch: str
    expert: str
    grid: Grid
    valid_len: int
    sample: int = 0
    layer: int | None = None
    first_head: int = 0
    first_row: int = 0
