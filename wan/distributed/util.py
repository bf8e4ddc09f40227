"""The official helpers of torch.distributed: ranks and collectives of the default group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan.distributed.mesh import get_num_ranks
from wan.utils import torch_private


def init_distributed_group() -> None:
    """Initializes the default group from torchrun's variables, with the device's backend."""
    if not dist.is_initialized():
        dist.init_process_group()


def get_rank() -> int:
    return dist.get_rank()


def get_world_size() -> int:
    return get_num_ranks()


def all_to_all(
    x: Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None = None, **_: Any
) -> Tensor:
    """Sends a part of `scatter_dim` to each rank, and concatenates the others' on `gather_dim`."""
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if num_ranks == 1:
        return x
    send = torch.stack(x.chunk(num_ranks, scatter_dim))
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return torch.cat(received.unbind(), gather_dim)


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors of all ranks, in their order."""
    if get_world_size() == 1:
        return [tensor]
    received = tensor.new_empty((get_world_size(), *tensor.shape))
    torch_private.all_gather(received.flatten(0, 1), tensor.contiguous(), None)
    return [*received.unbind()]


def gather_forward(input: Tensor, dim: int) -> Tensor:
    """Concatenates the tensors of all ranks along an axis."""
    return torch.cat(all_gather(input), dim)
