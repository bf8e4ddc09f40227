"""Weights sharded over ranks by FSDP2: a block is gathered before it runs and freed after it.

`fully_shard` turns every parameter into a DTensor sharded by rows; parameter names do not change,
and there is no wrapper module. The parameters of a block are gathered in one collective, as bytes
if they mix float32 and bfloat16 (allowed without gradients), so the gathered weights equal those
of the files bit for bit. Weights are upcast after the all-gather, which halves the traffic of
FSDP's mixed precision.

Every rank of the mesh must call a sharded network equally often, through `__call__` (the
all-gathers are in hooks). Between two calls a rank holds only its shard. On accelerators FSDP moves
the arguments of the outermost call to the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class FsdpSharding:
    """Implements `wan.checkpoint.load.Sharding`: keeps this rank's rows of every parameter.

    Attributes:
        mesh: One axis; ValueError for several.
        blocks: Returns the submodules that are gathered one at a time. All other parameters are
            gathered for the whole call.
    """

    mesh: DeviceMesh
    blocks: Callable[[Any], Iterable[nn.Module]]

    def __post_init__(self) -> None:
        if self.mesh.ndim != 1:
            raise ValueError(
                f"The mesh {tuple(self.mesh.shape)} has {self.mesh.ndim} axes; weights are "
                "sharded over one: flatten it."
            )

    def shard(self, network: nn.Module) -> None:
        """Shards a network on the meta device, for inference: without gradients."""
        for block in self.blocks(network):
            fully_shard(block, mesh=self.mesh, reshard_after_forward=True)
        # The root is resharded after each call, too: the VAE needs the memory.
        fully_shard(network, mesh=self.mesh, reshard_after_forward=True)

    def get_local_rows(self, parameter: Tensor) -> tuple[Tensor, slice]:
        """Returns the local tensor, to be written in place, and its range of rows."""
        assert isinstance(parameter, DTensor), "the network has not been sharded"
        return parameter.to_local(), compute_row_range(parameter)


def compute_row_range(parameter: DTensor) -> slice:
    """Computes which rows of a parameter, sharded over one axis, this rank holds.

    Each rank gets ceil(rows / ranks) consecutive rows; the last ranks get fewer, or none.
    """
    num_rows, mesh = parameter.shape[0], parameter.device_mesh
    rows_per_rank = -(-num_rows // mesh.size())
    start = min(mesh.get_local_rank() * rows_per_rank, num_rows)
    return slice(start, min(start + rows_per_rank, num_rows))


def shard_model(
    model: nn.Module,
    device_id: int | torch.device,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    buffer_dtype: torch.dtype = torch.float32,
    process_group: dist.ProcessGroup | None = None,
    sharding_strategy: object = None,
    sync_module_states: bool = True,
) -> nn.Module:
    """Shards a network over the ranks like the official function, by FSDP2, and returns it.

    Args:
        model: Its first list of modules holds the blocks, which are gathered one at a time.
        device_id: The device of this rank, on which its rows are kept; no effect on CPUs.
        param_dtype: Of the weights during the computation.
        reduce_dtype, buffer_dtype: No effect in inference.
        process_group: None: the default group.
        sharding_strategy: None; weights are always fully sharded.
        sync_module_states: Send the weights of rank 0 to the other ranks first.

    Raises:
        NotImplementedError: There is a `sharding_strategy`.
    """
    if sharding_strategy is not None:
        raise NotImplementedError("Weights are always fully sharded; drop sharding_strategy.")
    backend = dist.get_backend(process_group)
    device = torch.device("cpu") if backend == "gloo" else torch.device(device_id)
    if sync_module_states:
        for tensor in (*model.parameters(), *model.buffers()):
            sent = tensor.data.to(device)
            dist.broadcast(sent, group=process_group, group_src=0)
            tensor.data = sent.to(tensor.device)
    group = process_group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialized"
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, cast_forward_inputs=False)
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for module in (*blocks, model):
        mesh = DeviceMesh.from_group(group, device.type)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def free_model(model: nn.Module) -> None:
    """Frees the memory of a network's weights on this rank; it cannot be used afterwards."""
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.untyped_storage().resizable():
            local.untyped_storage().resize_(0)
        device = local.device
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
