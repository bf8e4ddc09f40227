"""What ranks tell each other beside the exchanges of a video, over a gloo group of its own.

Nothing in here waits for a device, and every wait is as long as the run's timeout at most.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from wan.distributed.mesh import Team

T = TypeVar("T")


class Control:
    """The ranks' control group; with one process everything is answered at once."""

    def __init__(self, team: Team | None) -> None:
        """Makes the group; every rank calls this."""
        self._group = None
        if team is not None:
            self._group = dist.new_group(backend="gloo", timeout=team.timeout)

    def from_main(self, value: T) -> T:
        """Returns the main rank's picklable value on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Returns the picklable values of all ranks, in their order, on every rank."""
        if self._group is None:
            return [value]
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def highest(self, value: int) -> int:
        """Returns the highest value of all ranks, each from 0 to 255, on every rank."""
        if self._group is None:
            return value
        byte = torch.tensor([value], dtype=torch.uint8)
        dist.all_reduce(byte, dist.ReduceOp.MAX, group=self._group)
        return int(byte)
