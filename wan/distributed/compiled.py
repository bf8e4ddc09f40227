"""Packs the send buffer of an all-to-all inside a graph of torch.compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wan.distributed import pieces
from wan.distributed.pieces import Pieces, parts_of


def packed(tensors: Sequence[Tensor], heads: Sequence[int], after: Tensor | None) -> Pieces:
    """Packs tensors as `pack_tensors` does, but not before `after` has been computed."""
    parts = parts_of(tensors)
    if after is None and len(parts) == 1 and len(set(heads)) == 1:
        # The compiler fuses these operations with those that computed the tensors.
        by_rank = [x.unflatten(2, (len(heads), -1)).movedim(2, 0) for x in tensors]
        return Pieces(parts, heads, torch.cat(by_rank, dim=-1).contiguous())
    return Pieces(parts, heads, _pack(list(tensors), list(heads), after))


@torch.library.custom_op("wan::pack", mutates_args=())
def _pack(tensors: list[Tensor], heads: list[int], after: Tensor | None) -> Tensor:
    """Returns the memory of `pack_tensors`, by one opaque operation that depends on `after`.

    Without this dependency the compiler may exchange all head chunks before it attends to one.
    """
    return pieces.packed(tensors, heads).memory


@_pack.register_fake
def _(tensors: list[Tensor], heads: list[int], after: Tensor | None) -> Tensor:
    return Pieces(parts_of(tensors), heads, tensors[0].device).memory
