"""What the autoencoder needs of the ranks that share a video's rows, and the version for one rank.

Legend: B batch (1), C channels, F frames, H rows, W columns, of this rank; L rows x columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class Rows(Protocol):
    """Which rows of the frames this rank computes, and what it needs of the others' for that."""

    @property
    def is_main(self) -> bool:
        """This rank gets the result."""
        ...

    def own(self, x_BCFHW: Tensor, scale: int) -> Tensor:
        """This rank's rows of a tensor that every rank has. scale: rows of it to one of latents."""
        ...

    def halo(self, x_BCFHW: Tensor, above: int, below: int) -> None:
        """Write the first and the last rows of a padded tensor, each 0 or 1 of them.

        They are rows of the ranks above and below; where the image ends, zeros.
        """
        ...

    def gather(self, x_FLC: Tensor) -> Tensor:
        """All rows, in order, of the ranks that have some."""
        ...

    def step(self, half: nn.Module, x_BCFHW: Tensor, state: State) -> Tensor:
        """half(x, state): on the main rank all rows, on the others none.

        Raises:
            MemoryError: On all ranks, where one ran out of memory.
        """
        ...

    def together(self, make: Callable[[], T]) -> T:
        """make(); the same error on all ranks, as in `step`."""
        ...


class WholeRows:
    """One rank computes all rows."""

    is_main = True

    def own(self, x_BCFHW: Tensor, scale: int) -> Tensor:
        return x_BCFHW

    def halo(self, x_BCFHW: Tensor, above: int, below: int) -> None:
        if above:
            x_BCFHW[..., :above, :].zero_()
        if below:
            x_BCFHW[..., -below:, :].zero_()

    def gather(self, x_FLC: Tensor) -> Tensor:
        return x_FLC

    def step(self, half: nn.Module, x_BCFHW: Tensor, state: State) -> Tensor:
        frames: Tensor = half(x_BCFHW, state)
        return frames

    def together(self, make: Callable[[], T]) -> T:
        return make()


WHOLE = WholeRows()


@dataclass
class State:
    """What goes through the layers beside the frames.

    Attributes:
        rows: The rows of this rank.
        past: The frames that each causal convolution still needs, with the halo they came with.
    """

    rows: Rows
    past: dict[nn.Module, Tensor] = field(default_factory=dict)
