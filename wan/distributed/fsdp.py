"""Weights sharded over ranks: each keeps its rows, and a block is whole only while it runs.

FSDP2 (`fully_shard`) turns every parameter into a DTensor of rows; names stay, and there is no
wrapper. A block's parameters are gathered in one collective, as bytes where they mix float32 and
bfloat16 (without gradients their dtypes may differ), so what is computed with are the weights
of the files, bit for bit. Nothing is converted on the way: what is upcast is upcast after it
was gathered, in half the traffic of FSDP's own mixed precision.

What follows for the caller of a sharded network: every rank of the mesh must call it, as often as
the others, through `__call__` (the gathering is in hooks). Between calls it holds its share, no
more. On accelerators FSDP moves the arguments of the outermost call to the device.
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
class Sharded:
    """Implements `wan.checkpoint.load.Sharding`: this rank's rows of every parameter.

    mesh: one axis over the ranks that share the weights. blocks: the modules of a network that run
    one after the other and are gathered one at a time; what is in none of them is gathered for the
    whole call. Raises ValueError for a mesh of several axes.
    """

    mesh: DeviceMesh
    blocks: Callable[[Any], Iterable[nn.Module]]

    def __post_init__(self) -> None:
        if self.mesh.ndim != 1:
            raise ValueError(
                f"The mesh {tuple(self.mesh.shape)} has {self.mesh.ndim} axes; weights are "
                "sharded over one: flatten it."
            )

    def prepare(self, network: nn.Module) -> None:
        """Shard a network on the meta device, for inference: its parameters need no gradient."""
        for block in self.blocks(network):
            fully_shard(block, mesh=self.mesh, reshard_after_forward=True)
        # The root too is resharded after each call: what it frees goes to the VAE.
        fully_shard(network, mesh=self.mesh, reshard_after_forward=True)

    def share(self, parameter: Tensor) -> tuple[Tensor, slice]:
        """The tensor that holds this rank's rows, to be written in place, and which rows."""
        assert isinstance(parameter, DTensor), "the network has not been sharded"
        return parameter.to_local(), local_rows(parameter)


def local_rows(parameter: DTensor) -> slice:
    """This rank's rows of a parameter sharded over one axis.

    Ranks get ceil(rows / ranks) consecutive rows in turn: the last ones fewer, or none.
    """
    rows, mesh = parameter.shape[0], parameter.device_mesh
    size = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * size, rows)
    return slice(start, min(start + size, rows))
