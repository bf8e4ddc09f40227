"""The rows of a video that a rank computes, and the state of the layers; here for one rank alone.

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
    """One rank computes all rows. `wan.vae.sharded.ShardedRows` shares them with other ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this rank gets the result."""
        return True

    def own(self, x_BCFHW: Tensor, scale: int) -> Tensor:
        """This rank's rows of a tensor that every rank has. scale: its rows per row of latents."""
        return x_BCFHW

    def halo(self, x_BCFHW: Tensor, above: int, below: int) -> None:
        """Write the first and the last rows of a padded tensor, `above` and `below` of them (0, 1).

        They are rows of the ranks above and below; at the border of the image they are zeros.
        """
        if above:
            x_BCFHW[..., :above, :].zero_()
        if below:
            x_BCFHW[..., -below:, :].zero_()

    def gather(self, x_FLC: Tensor) -> Tensor:
        """The rows of all ranks, in order."""
        return x_FLC

    def step(self, half: nn.Module, x_BCFHW: Tensor, state: State) -> Tensor:
        """half(x, state): all rows of it on the main rank, none on the others.

        Raises:
            MemoryError: On all ranks, if one of several ran out of memory.
        """
        frames: Tensor = half(x_BCFHW, state)
        return frames

    def together(self, make: Callable[[], T]) -> T:
        """make(), with the same error on all ranks as in `step`."""
        return make()


WHOLE = Rows()


@dataclass
class State:
    """What the layers of one call share.

    Attributes:
        rows: The rows of this rank.
        past: The last frames that each causal convolution saw, each with its halo.
    """

    rows: Rows
    past: dict[nn.Module, deque[Tensor]] = field(default_factory=dict)
