"""The exchange as operations of a compiled graph, which keeps them and their order.

Legend: P ranks in the group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wan.torch_private import all_to_all_in_graph


def all_to_all(x_Pxxx: Tensor, after: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
    """Part i of the first axis goes to rank i; not before `after` has been computed."""
    send = x_Pxxx.contiguous() if after is None else _pack_after(x_Pxxx, after)
    return all_to_all_in_graph(send, group)


@torch.library.custom_op("wan::pack_after", mutates_args=())
def _pack_after(x: Tensor, after: Tensor) -> Tensor:
    """x in contiguous memory, by one opaque operation that needs `after`.

    Nothing else keeps a compiler from exchanging all chunks before the first is attended to.
    """
    return x.clone(memory_format=torch.contiguous_format)


@_pack_after.register_fake
def _(x: Tensor, after: Tensor) -> Tensor:
    return x.new_empty(x.shape)
