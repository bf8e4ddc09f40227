"""Information for the layers about the sampling step that they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from wan.settings.attention_modes import Grid

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CrossAttentionGuidance:
    """Guidance in cross-attention by a second text.

    Attributes:
        context: Embeddings of the negative prompt, [length, text_dim].
        combine: Combines the attention outputs [B,L,N,D] to the prompt and to the second text.
    """

    context: Tensor
    combine: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The forward pass of an expert in which a call happens and, in self-attention, the call.

    Attributes:
        index: Forward pass of a branch in the complete noise schedule, from 0.
        count: Number of forward passes of a branch in the complete noise schedule.
        branch: "cond" or "uncond", the guidance branch.
        expert: "high_noise", "low_noise" or "dit" (models with a single network).
        grid: Tokens along frame, height and width.
        valid_len: Number of tokens without padding, which follows them.
        sample: Index of the sample, of those that are not computed as a batch.
        layer: Index of the block; None outside the blocks.
        first_head: Global index of the first head that this rank attends with.
        first_row: Global index of this rank's first query row.
        skipped_blocks: Blocks that this branch skips.
        text_guidance: Guidance in cross-attention; None: none.
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
    skipped_blocks: tuple[int, ...] = ()
    text_guidance: CrossAttentionGuidance | None = field(default=None, compare=False)

    def for_branch(self, branch: str) -> StepInfo:
        """Returns the step of a branch: uncond skips blocks, cond has guidance in attention."""
        if branch == "cond":
            return replace(self, branch=branch, skipped_blocks=())
        return replace(self, branch=branch, text_guidance=None)
