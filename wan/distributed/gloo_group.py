"""Small collectives of Python values on the CPU, over a separate gloo group.

They never wait for a device, and each waits at most for the run's timeout.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from wan.distributed.mesh import ParallelGroups

T = TypeVar("T")


class GlooGroup:
    """A gloo group of all ranks; with one process its collectives return at once."""

    def __init__(self, groups: ParallelGroups | None) -> None:
        """Makes the group; every rank must call this."""
        self._group = None
        if groups is not None:
            self._group = dist.new_group(backend="gloo", timeout=groups.timeout)

    def broadcast_from_rank0(self, value: T) -> T:
        """Returns the picklable value of rank 0 on every rank."""
        if self._group is None:
            return value
        objects = [value]
        dist.broadcast_object_list(objects, src=0, group=self._group, device=torch.device("cpu"))
        return objects[0]

    def gather(self, value: T) -> list[T]:
        """Returns the picklable values of all ranks, in rank order, on every rank."""
        if self._group is None:
            return [value]
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_reduce_max(self, value: int) -> int:
        """Returns the maximum over all ranks of a value from 0 to 255."""
        if self._group is None:
            return value
        byte = torch.tensor([value], dtype=torch.uint8)
        dist.all_reduce(byte, dist.ReduceOp.MAX, group=self._group)
        return int(byte)
