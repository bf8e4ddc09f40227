"""Merges LoRAs into weights on loading, or reads their matrices for layers that apply them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from wan.checkpoint.load import open_sources
from wan.checkpoint.lora import Lora, WeightDelta, collect_deltas
from wan.checkpoint.tensor_info import TensorInfo
from wan.checkpoint.tensor_source import TensorSource, TensorSources
from wan.settings.errors import InputError

_TILE_ROWS = 256  # rows per merge


def open_lora_sources(
    deltas_by_layer: Mapping[str, Sequence[WeightDelta]], dtype: torch.dtype
) -> dict[str, TensorSource]:
    """Returns sources of the LoRA matrices of weight-only quantized layers.

    The matrices are scaled in float64 and rounded once to `dtype`.
    """
    infos = {
        f"{layer}.{index}.{side}": info
        for layer, deltas in deltas_by_layer.items()
        for index, delta in enumerate(deltas)
        for side, info in (("up", delta.up), ("down", delta.down))
        if info is not None
    }
    matrix_sources, sources = open_sources(infos), {}

    def read_matrices(layer: str, side: str, rows: slice) -> Tensor:
        """Returns rows of all "up" matrices joined along dim 1, or all "down" along dim 0."""
        matrices = []
        for index, delta in enumerate(deltas_by_layer[layer]):
            source = matrix_sources[f"{layer}.{index}.{side}"]
            matrix = source.read_checked(slice(None)).to(torch.float64).flatten(1)
            matrices.append(matrix * delta.scale if side == "up" else matrix)
        stacked = torch.cat(matrices, dim=1 if side == "up" else 0)[rows].to(dtype)
        _check_finite(stacked, deltas_by_layer[layer])
        return stacked

    for layer, deltas in deltas_by_layer.items():
        rank = sum(delta.rank for delta in deltas)
        for side in ("up", "down"):
            info = infos[f"{layer}.0.{side}"]
            shape = (info.shape[0], rank) if side == "up" else (rank, prod(info.shape[1:]))
            read = partial(read_matrices, layer, side)
            sources[f"{layer}.lora_{side}"] = TensorSource(dtype, shape, read)
    return sources


def merge_loras(
    sources: TensorSources, loras: Sequence[Lora], skipped_names: Collection[str] = ()
) -> TensorSources:
    """Returns sources that merge LoRAs into weights on reading; merged weights are float32.

    Rows are summed in float64 in tiles that begin at multiples of the tile size, wherever a rank's
    rows begin. So the sum is rounded once and its bits do not depend on the sharding.
    """
    all_deltas = collect_deltas(loras)
    deltas_by_name = {name: all_deltas[name] for name in all_deltas if name not in skipped_names}
    infos = {
        f"{info.file}:{info.name}": info
        for deltas in deltas_by_name.values()
        for delta in deltas
        for info in (delta.up, delta.down, delta.full)
        if info is not None
    }
    delta_sources = open_sources(infos)

    def read_values(info: TensorInfo, rows: slice) -> Tensor:
        return delta_sources[f"{info.file}:{info.name}"].read_checked(rows).to(torch.float64)

    merged_sources = {
        name: _make_merged_source(sources[name], deltas, read_values)
        for name, deltas in deltas_by_name.items()
    }
    return {**sources, **merged_sources}


def _make_merged_source(
    base: TensorSource,
    deltas: Sequence[WeightDelta],
    read_values: Callable[[TensorInfo, slice], Tensor],
) -> TensorSource:
    """Adds deltas to a source; `read_values` reads rows of a LoRA's tensor in float64."""

    def merge_tile(start: int) -> Tensor:
        rows = slice(start, min(start + _TILE_ROWS, base.shape[0]))
        base_rows = base.read(rows)
        total = base_rows.to(torch.float64, copy=True).reshape(base_rows.shape[0], -1)
        for delta in deltas:
            if delta.full is not None:
                full = read_values(delta.full, rows)
                total.add_(full.reshape(total.shape), alpha=delta.scale)
                continue
            assert delta.up is not None and delta.down is not None
            up, down = read_values(delta.up, rows), read_values(delta.down, slice(None))
            total.addmm_(up.flatten(1), down.flatten(1), alpha=delta.scale)
        _check_finite(total.float(), deltas)
        return total.reshape(base_rows.shape)

    def read(rows: slice) -> Tensor:
        start, stop, _ = rows.indices(base.shape[0])
        first_row = start // _TILE_ROWS * _TILE_ROWS
        tiles = [merge_tile(tile_start) for tile_start in range(first_row, stop, _TILE_ROWS)]
        return torch.cat(tiles)[start - first_row : stop - first_row].float()

    return TensorSource(torch.float32, base.shape, read, base.mapped_tensor, base.file)


def _check_finite(values: Tensor, deltas: Sequence[WeightDelta]) -> None:
    if not bool(values.isfinite().all()):
        files = {str(info.file) for delta in deltas if (info := delta.full or delta.up) is not None}
        why, remedy = "makes weights NaN or infinite", "it is damaged, or its strength is too large"
        raise InputError("LoRA", ", ".join(sorted(files)), why, remedy)
