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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
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
