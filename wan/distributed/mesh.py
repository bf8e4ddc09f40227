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

from wan.device import Device
from wan.utils import system, torch_private

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
T = TypeVar("T")


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of a run: the mesh of all ranks."""

    mesh: DeviceMesh
    device: Device
    rank: int
    timeout: timedelta | None = None  # for every group; None: PyTorch's default

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Returns this rank's group along one axis, or along several axes joined in order."""
        mesh = self.mesh[axes]
        if len(axes) > 1:
            mesh = torch_private.flatten_mesh(mesh, "_".join(axes))
        return self._set_timeout(mesh).get_group()

    def world_mesh(self) -> DeviceMesh:
        """Returns a mesh with one axis over all ranks, for sharded weights."""
        return self._set_timeout(torch_private.flatten_mesh(self.mesh, "world"))

    def _set_timeout(self, mesh: DeviceMesh) -> DeviceMesh:
        """Sets the run's timeout, because DeviceMesh gives its groups PyTorch's default."""
        if self.timeout is not None and self.device.type != "npu":  # HCCL has other limits
            torch_private.set_group_timeout(mesh.get_group(), self.timeout)
        return mesh

    def warm_up(self) -> None:
        """Opens all connections by one small collective of each kind in every group.

        Communication libraries connect at a group's first use. If ranks reach it at different
        times, because they load weights at different speeds, the connection may time out.
        """
        for axes in (("cfg",), ("ring",), ("ulysses",), ("ring", "ulysses")):
            group = self.group(*axes)
            num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            if num_ranks == 1:
                continue
            buffer = torch.zeros(num_ranks, device=self.device.torch_device)
            dist.all_to_all_single(torch.empty_like(buffer), buffer, group=group)
            torch_private.all_gather(torch.empty_like(buffer), buffer[:1], group)
            if axes == ("ring",):
                next_rank, previous_rank = (rank + 1) % num_ranks, (rank - 1) % num_ranks
                operations = (
                    (dist.isend, buffer, next_rank),
                    (dist.irecv, torch.empty_like(buffer), previous_rank),
                )
                p2p_ops = [
                    dist.P2POp(p2p_op, x, group=group, group_peer=peer)
                    for p2p_op, x, peer in operations
                ]
                for work in dist.batch_isend_irecv(p2p_ops):
                    work.wait()
        dist.barrier()
        self.device.synchronize()

    def broadcast_from_rank0(self, compute: Callable[[], Tensor]) -> Tensor:
        """Calls compute() on rank 0 only, and returns its tensor on the device of every rank."""
        device = self.device.torch_device
        header = torch.zeros(10, dtype=torch.int64, device=device)
        tensor = None
        if self.is_main:
            tensor = compute().to(device).contiguous()
            dtype_and_shape = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            header[: len(dtype_and_shape)] = torch.tensor(dtype_and_shape)
        dist.broadcast(header, src=0)
        dtype, num_dims, *shape = header.tolist()
        if tensor is None:
            tensor = torch.empty(shape[:num_dims], dtype=_DTYPES[dtype], device=device)
        dist.broadcast(tensor, src=0)
        return tensor

    def broadcast_object_from_rank0(self, value: T) -> T:
        """Returns the picklable value of rank 0 on every rank."""
        objects = [value]
        dist.broadcast_object_list(objects, src=0, device=self.device.torch_device)
        return objects[0]

    def gather(self, value: T) -> list[T]:
        """Returns the picklable values of all ranks, in rank order, on every rank."""
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def get_common_time(self) -> tuple[int, float]:
        """Returns one point in time for all ranks, as `time.perf_counter_ns` and `time.time`.

        Ranks on the machine of rank 0 use its clock reading; others read theirs after a barrier.
        """
        dist.barrier()
        now = time.perf_counter_ns()
        machine, rank0_now, seconds = self.broadcast_object_from_rank0(
            (system.read_machine_id(), now, time.time())
        )
        return rank0_now if machine == system.read_machine_id() else now, seconds

    def compute_branches(self, compute_branch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the results of cond and uncond; each half of the ranks computes one branch."""
        group = self.group("cfg")
        result = compute_branch(("cond", "uncond")[dist.get_rank(group)]).contiguous()
        results = torch.empty(2, *result.shape, dtype=result.dtype, device=result.device)
        torch_private.all_gather(results.flatten(0, 1), result, group)
        return results[0], results[1]

    def all_agree(self, sums: Tensor, threshold: float) -> bool:
        """Returns whether sums[0] < threshold * sums[1], with float32 [2] summed over a sequence.

        All ranks return the same: the first rank of each sequence compares. With cfg_size=2 it
        must be true in both guidance branches. It synchronizes with the device once.
        """
        sequence_group = self.group("ring", "ulysses")
        dist.all_reduce(sums, group=sequence_group)
        is_below = torch.ones((), dtype=torch.int32, device=sums.device)
        if dist.get_rank(sequence_group) == 0:
            is_below = (sums[0] < threshold * sums[1]).to(torch.int32)
        dist.all_reduce(is_below, dist.ReduceOp.MIN)
        return bool(is_below)

    def release(self) -> None:
        """Destroys the groups of the mesh with their threads, but not the default process group.

        Every rank must call it, and all destroy the groups in the same order.
        """
        axes = (("cfg",), ("ring",), ("ulysses",), ("ring", "ulysses"))
        for group in dict.fromkeys(self.group(*names) for names in axes):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def close(self) -> None:
        """Destroys the process group after a barrier; not called when a run fails."""
        dist.barrier()
        dist.destroy_process_group()


def make_parallel_groups(
    device: Device, sizes: tuple[int, int, int], timeout: timedelta | None = None
) -> ParallelGroups:
    """Makes the mesh of (cfg, ring, ulysses) sizes over the initialized process group."""
    axes = ("cfg", "ring", "ulysses")
    options = None
    if device.type == "cuda":
        # Collectives that overlap attention must not wait for all of its blocks. An axis as large
        # as the world also gets a separate communicator: FSDP's all-gathers use the world's.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    mesh = torch_private.make_device_mesh(device.type, sizes, axes, options)
    return ParallelGroups(mesh, device, dist.get_rank(), timeout)


def get_num_ranks() -> int:
    """Returns the ranks of the default group; 1 if torch.distributed is not initialized."""
    return dist.get_world_size() if dist.is_initialized() else 1
