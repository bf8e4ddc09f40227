"""Processes started by torchrun: their store, their groups, and what passes between whole ranks.

Ranks form a mesh (cfg, ring, ulysses), ulysses innermost: its all-to-all is the largest traffic and
gets the neighbouring, fastest links.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wan.device import Device
from wan.torch_private import set_group_timeout

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
T = TypeVar("T")


def open_store(timeout: timedelta) -> dist.Store:
    """The key-value store under torchrun's MASTER_ADDR and MASTER_PORT.

    Raises RuntimeError or ValueError where it cannot be reached or the port is taken.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))
    store.set_timeout(timeout)
    return store


@dataclass(frozen=True)
class Team:
    """All processes of a run, in their topology."""

    mesh: DeviceMesh
    device: Device
    rank: int
    timeout: timedelta | None = None  # for every group; None: PyTorch's own

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def group(self, *axes: str) -> dist.ProcessGroup:
        """This rank's group along one axis, or along several together (their order kept)."""
        mesh = self.mesh[axes]
        return self._bounded(mesh if len(axes) == 1 else mesh._flatten("_".join(axes))).get_group()

    def world_mesh(self) -> DeviceMesh:
        """All ranks in one row, for sharded weights."""
        return self._bounded(self.mesh._flatten("world"))

    def _bounded(self, mesh: DeviceMesh) -> DeviceMesh:
        """DeviceMesh gives its groups PyTorch's default timeout, not that of the whole group."""
        if self.timeout is not None:
            set_group_timeout(self.timeout, mesh.get_group())
        return mesh

    def from_main(self, make: Callable[[], Tensor]) -> Tensor:
        """The main rank's make() on every rank and on its device; the others do not call theirs."""
        device = self.device.torch_device
        header = torch.zeros(10, dtype=torch.int64, device=device)
        tensor = None
        if self.is_main:
            tensor = make().to(device).contiguous()
            sizes = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            header[: len(sizes)] = torch.tensor(sizes)
        dist.broadcast(header, src=0)
        dtype, dims, *shape = header.tolist()
        if tensor is None:
            tensor = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
        dist.broadcast(tensor, src=0)
        return tensor

    def value_from_main(self, value: T) -> T:
        """The main rank's picklable value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device.torch_device)
        return box[0]

    def both_branches(self, branch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """(conditional, unconditional) results: each half of the ranks computes one of them."""
        group = self.group("cfg")
        own = branch(("cond", "uncond")[dist.get_rank(group)]).contiguous()
        both = torch.empty(2, *own.shape, dtype=own.dtype, device=own.device)
        dist.all_gather_single(both.flatten(0, 1), own, group)
        return both[0], both[1]

    def close(self) -> None:
        """The orderly end: all ranks have come this far. Never called on a failing path."""
        dist.barrier()
        dist.destroy_process_group()


def join(
    store: dist.Store, device: Device, sizes: tuple[int, int, int], timeout: timedelta
) -> Team:
    """Form the process group and the mesh of (cfg, ring, ulysses) sizes; every rank calls it."""
    dist.init_process_group(
        BACKENDS[device.type],
        store=dist.PrefixStore("wan", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=device.torch_device if device.type == "cuda" else None,
    )
    return form(device, sizes, timeout)


def form(device: Device, sizes: tuple[int, int, int], timeout: timedelta | None = None) -> Team:
    """The mesh of (cfg, ring, ulysses) sizes over a process group that exists."""
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("cfg", "ring", "ulysses"))
    return Team(mesh, device, dist.get_rank(), timeout)


def running() -> int:
    """Processes in the default group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1
