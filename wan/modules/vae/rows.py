"""The rows of a video that a rank computes, and the state of the layers; version for one rank.

Legend: B batch (1), C channels, F frames, H rows, W columns, of this rank; L rows x columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class Rows:
    """All rows on one rank. `wan.modules.vae.sharded.ShardedRows` distributes rows over ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this rank returns the result."""
        return True

    def slice_local_rows(self, x_BCFHW: Tensor, scale: int) -> Tensor:
        """Slices this rank's rows of a replicated tensor. scale: rows per row of latents."""
        return x_BCFHW

    def exchange_halo(self, x_BCFHW: Tensor, num_above: int, num_below: int) -> None:
        """Writes the halo: the first `num_above` and the last `num_below` rows (0 or 1 each).

        They are copies of rows of the neighbouring ranks, and zeros at the border of the image.
        """
        if num_above:
            x_BCFHW[..., :num_above, :].zero_()
        if num_below:
            x_BCFHW[..., -num_below:, :].zero_()

    def gather_rows(self, x_FLC: Tensor) -> Tensor:
        """Gathers the rows of all ranks."""
        return x_FLC

    def run_network(self, network: nn.Module, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        """Runs the encoder or decoder; returns all rows on the main rank, none on other ranks.

        Raises:
            MemoryError: On all ranks, if one of several ran out of memory.
        """
        frames: Tensor = network(x_BCFHW, state)
        return frames

    def agree(self, flag: bool) -> bool:
        """Returns whether `flag` is True on all ranks."""
        return flag

    def run_with_memory_agreement(self, make: Callable[[], T]) -> T:
        """Returns make(); raises MemoryError on all ranks if one of several ran out of memory."""
        return make()


ALL_ROWS = Rows()


@dataclass
class VaeState:
    """State of one call of the encoder or decoder, which its layers share.

    Attributes:
        rows: The rows of this rank.
        uses_winograd: Convolutions use Winograd's algorithm; the same decision on all ranks.
        cached_frames: The last input frames of each causal convolution, with their halos.
    """

    rows: Rows
    uses_winograd: bool
    cached_frames: dict[nn.Module, deque[Tensor]] = field(default_factory=dict)
