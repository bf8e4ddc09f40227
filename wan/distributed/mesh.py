"""The device mesh of a run, its process groups, and the collectives over all ranks.

The mesh has the axes (cfg, ring, ulysses). ulysses is innermost, because its all-to-all has the
largest traffic and neighbouring ranks have the fastest links.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wan import host, torch_private
from wan.device import Device

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The process groups of a run: the mesh of all ranks."""

    mesh: DeviceMesh
    device: Device
    rank: int
    timeout: timedelta | None = None  # for every group; None: PyTorch's default

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return this rank's group along one axis, or along several axes joined in order."""
        mesh = self.mesh[axes]
        if len(axes) > 1:
            mesh = torch_private.flatten(mesh, "_".join(axes))
        return self._bounded(mesh).get_group()

    def world_mesh(self) -> DeviceMesh:
        """Return a mesh with one axis over all ranks, for sharded weights."""
        return self._bounded(torch_private.flatten(self.mesh, "world"))

    def _bounded(self, mesh: DeviceMesh) -> DeviceMesh:
        """Set the run's timeout, because DeviceMesh gives its groups PyTorch's default."""
        if self.timeout is not None and self.device.type != "npu":  # HCCL has other limits
            torch_private.set_timeout(mesh.get_group(), self.timeout)
        return mesh

    def connect(self) -> None:
        """Open all connections by one small collective of each kind in every group.

        Communication libraries connect at a group's first use. If ranks reach it at different
        times, because they load weights at different speeds, the connection may time out.
        """
        for axes in (("cfg",), ("ring",), ("ulysses",), ("ring", "ulysses")):
            group = self.group(*axes)
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            if ranks == 1:
                continue
            sent = torch.zeros(ranks, device=self.device.torch_device)
            dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
            torch_private.all_gather(torch.empty_like(sent), sent[:1], group)
            if axes == ("ring",):
                right, left = (rank + 1) % ranks, (rank - 1) % ranks
                each = ((dist.isend, sent, right), (dist.irecv, torch.empty_like(sent), left))
                hops = [dist.P2POp(verb, x, group=group, group_peer=peer) for verb, x, peer in each]
                for work in dist.batch_isend_irecv(hops):
                    work.wait()
        dist.barrier()
        self.device.synchronize()

    def from_main(self, make: Callable[[], Tensor]) -> Tensor:
        """Call compute() on rank 0 only, and return its tensor on the device of every rank."""
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
        """Return the picklable value of rank 0 on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device.torch_device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return the picklable values of all ranks, in rank order, on every rank."""
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def common_time(self) -> tuple[int, float]:
        """Return one point in time for all ranks, as `time.perf_counter_ns` and `time.time`.

        Ranks on the machine of rank 0 use its clock reading; others read theirs after a barrier.
        """
        dist.barrier()
        now = time.perf_counter_ns()
        machine, point, seconds = self.value_from_main((host.machine(), now, time.time()))
        return point if machine == host.machine() else now, seconds

    def both_branches(self, branch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the results of cond and uncond; each half of the ranks computes one branch."""
        group = self.group("cfg")
        own = branch(("cond", "uncond")[dist.get_rank(group)]).contiguous()
        both = torch.empty(2, *own.shape, dtype=own.dtype, device=own.device)
        torch_private.all_gather(both.flatten(0, 1), own, group)
        return both[0], both[1]

    def agree(self, sums: Tensor, threshold: float) -> bool:
        """Return whether sums[0] < threshold * sums[1], with float32 [2] summed over a sequence.

        All ranks return the same: the first rank of each sequence compares. With cfg_size=2 it
        must be true in both guidance branches. It synchronizes with the device once.
        """
        sequence = self.group("ring", "ulysses")
        dist.all_reduce(sums, group=sequence)
        verdict = torch.ones((), dtype=torch.int32, device=sums.device)
        if dist.get_rank(sequence) == 0:
            verdict = (sums[0] < threshold * sums[1]).to(torch.int32)
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        return bool(verdict)

    def release(self) -> None:
        """Destroy the groups of the mesh with their threads, but not the default process group.

        Every rank must call it, and all destroy the groups in the same order.
        """
        axes = (("cfg",), ("ring",), ("ulysses",), ("ring", "ulysses"))
        for group in dict.fromkeys(self.group(*names) for names in axes):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def close(self) -> None:
        """Destroy the process group after a barrier; not called when a run fails."""
        dist.barrier()
        dist.destroy_process_group()


def form(device: Device, sizes: tuple[int, int, int], timeout: timedelta | None = None) -> Team:
    """Make the mesh of (cfg, ring, ulysses) sizes over the initialized process group."""
    axes = ("cfg", "ring", "ulysses")
    first = None
    if device.type == "cuda":
        # Collectives that overlap attention must not wait for all of its blocks. An axis as large
        # as the world also gets a separate communicator: FSDP's all-gathers use the world's.
        first = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    mesh = torch_private.device_mesh(device.type, sizes, axes, first)
    return Team(mesh, device, dist.get_rank(), timeout)


def running() -> int:
    """Return the ranks of the default group; 1 if torch.distributed is not initialized."""
    return dist.get_world_size() if dist.is_initialized() else 1
