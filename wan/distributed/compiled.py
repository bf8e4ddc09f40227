"""Packs the send buffer of an all-to-all inside a graph of torch.compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wan.distributed import packed_buffer
from wan.distributed.packed_buffer import PackedBuffer, make_tensor_specs


def pack_in_graph(
    tensors: Sequence[Tensor], heads_per_rank: Sequence[int], after: Tensor | None
) -> PackedBuffer:
    """Packs tensors as `pack_tensors` does, but not before `after` has been computed."""
    specs = make_tensor_specs(tensors)
    if after is None and len(specs) == 1 and len(set(heads_per_rank)) == 1:
        # The compiler fuses these operations with those that computed the tensors.
        by_rank = [x.unflatten(2, (len(heads_per_rank), -1)).movedim(2, 0) for x in tensors]
        return PackedBuffer(specs, heads_per_rank, torch.cat(by_rank, dim=-1).contiguous())
    return PackedBuffer(
        specs, heads_per_rank, _pack_opaque(list(tensors), list(heads_per_rank), after)
    )


@torch.library.custom_op("wan::pack", mutates_args=())
def _pack_opaque(tensors: list[Tensor], heads: list[int], after: Tensor | None) -> Tensor:
    """Returns the memory of `pack_tensors`, by one opaque operation that depends on `after`.

    Without this dependency the compiler may exchange all head chunks before it attends to one.
    """
    return packed_buffer.pack_tensors(tensors, heads).memory


@_pack_opaque.register_fake
def _(tensors: list[Tensor], heads: list[int], after: Tensor | None) -> Tensor:
    return PackedBuffer(make_tensor_specs(tensors), heads, tensors[0].device).memory
