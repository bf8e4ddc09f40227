"""LoRAs merged into weights on their way from the files into a network.

Tiles of rows start at multiples of the tile, wherever a process's own rows begin, and are summed in
float64: so every sharding gets the same bits, those of the exact sum rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wan.checkpoint.load import Source, Sources, mapped
from wan.checkpoint.lora import Change, Lora

_TILE = 256  # rows


def merged(sources: Sources, loras: Sequence[Lora]) -> Sources:
    """The files' values plus what the LoRAs add; float32 where something is."""
    infos = {
        (info.file, info.name): info
        for lora in loras
        for changes in lora.changes.values()
        for change in changes
        for info in (change.up, change.down, change.full)
        if info is not None
    }
    keys = {f"{file}:{name}": info for (file, name), info in infos.items()}
    read = mapped(keys)
    added: dict[str, list[_Added]] = {}
    for lora in loras:
        for name, changes in lora.changes.items():
            added.setdefault(name, []).extend(_Added(change, read) for change in changes)
    return {**sources, **{name: _summed(sources[name], parts) for name, parts in added.items()}}


class _Added:
    """What a file adds to a parameter, rows at a time."""

    def __init__(self, change: Change, read: Mapping[str, Source]) -> None:
        self._factor = change.factor
        found = [
            None if info is None else read[f"{info.file}:{info.name}"]
            for info in (change.up, change.down, change.full)
        ]
        self._up, self._down, self._full = found

    def to(self, total: Tensor, rows: slice) -> None:
        """Add to rows [rows, columns], float64."""
        if self._full is not None:
            full = self._full.read(rows).to(torch.float64)
            total.add_(full.reshape(total.shape), alpha=self._factor)
            return
        assert self._up is not None and self._down is not None
        up, down = self._up.read(rows), self._down.read(slice(None))
        total.addmm_(
            up.to(torch.float64).flatten(1), down.to(torch.float64).flatten(1), alpha=self._factor
        )


def _summed(base: Source, added: Sequence[_Added]) -> Source:
    def tile(start: int) -> Tensor:
        rows = slice(start, min(start + _TILE, base.shape[0]))
        kept = base.read(rows)
        total = kept.to(torch.float64, copy=True).reshape(kept.shape[0], -1)
        for part in added:
            part.to(total, rows)
        return total.reshape(kept.shape)

    def read(rows: slice) -> Tensor:
        start, stop, _ = rows.indices(base.shape[0])
        first = start // _TILE * _TILE
        tiles = [tile(at) for at in range(first, stop, _TILE)]
        return torch.cat(tiles)[start - first : stop - first].float()

    return Source(torch.float32, base.shape, read, base.mapped)
