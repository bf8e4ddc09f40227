"""Merges LoRAs into weights on loading, or reads their matrices for layers that apply them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.checkpoint.formats.tensor_source import TensorSource, TensorSources
from wan.checkpoint.load import DtypeRule, open_sources
from wan.checkpoint.lora.deltas import (
    LowRankMatrix,
    Matrix,
    WeightDelta,
    list_factor_shapes,
    list_kroneckers,
)
from wan.checkpoint.lora.resolve import Lora, collect_deltas
from wan.settings.errors import InputError

_TILE_ROWS = 256  # rows per merge

ReadValues = Callable[[TensorInfo, slice], Tensor]
"""Reads rows of a LoRA's tensor in float64."""


def open_lora_sources(
    deltas_by_layer: Mapping[str, Sequence[WeightDelta]],
    dtype: torch.dtype,
    weights: TensorSources,
) -> dict[str, TensorSource]:
    """Returns sources of the LoRA matrices of weight-only quantized layers.

    The matrices are scaled in float64 and rounded once to `dtype`.

    Args:
        weights: The sources of the network; a GLoRA reads its layer's weight.
    """
    read_values = _open_tensors(delta for deltas in deltas_by_layer.values() for delta in deltas)

    def read_factor(layer: str, name: str, rows: slice) -> Tensor:
        """Returns rows of a buffer of a layer (`list_factor_shapes`)."""
        deltas = deltas_by_layer[layer]
        factor = (
            _join_pairs(read_values, deltas, name, weights.get(f"{layer}.weight"))
            if name in ("lora_up", "lora_down")
            else _read_kronecker_factor(read_values, list_kroneckers(deltas), name)
        )
        values = factor[rows].to(dtype)
        _check_finite(values, deltas)
        return values

    return {
        f"{layer}.{name}": TensorSource(dtype, shape, partial(read_factor, layer, name))
        for layer, deltas in deltas_by_layer.items()
        for name, shape in list_factor_shapes(deltas).items()
    }


def read_lora_factors(lora: Lora, dtype_of: DtypeRule) -> dict[str, dict[str, Tensor]]:
    """Returns the factors of a LoRA by layer and name, as in `open_lora_sources`, and its biases.

    Args:
        lora: All its deltas of weights are separable, and none needs the weight.
        dtype_of: Chooses the dtype of a parameter, which its factors get.
    """
    factors: dict[str, dict[str, Tensor]] = {}
    deltas_by_dtype: dict[torch.dtype, dict[str, Sequence[WeightDelta]]] = {}
    for parameter, deltas in lora.deltas.items():
        layer, _, suffix = parameter.rpartition(".")
        dtype = dtype_of(parameter, torch.float32)
        if suffix == "weight":
            deltas_by_dtype.setdefault(dtype, {})[layer] = deltas
            continue
        read_values = _open_tensors(deltas)
        matrices = (_read_matrix(read_values, delta.matrices[0], slice(None)) for delta in deltas)
        values = sum(m * delta.scale for m, delta in zip(matrices, deltas, strict=True))
        assert isinstance(values, Tensor)
        factors.setdefault(layer, {})[suffix] = values.reshape(-1).to(dtype)
        _check_finite(factors[layer][suffix], deltas)
    for dtype, deltas_by_layer in deltas_by_dtype.items():
        for name, source in open_lora_sources(deltas_by_layer, dtype, {}).items():
            layer, _, factor = name.rpartition(".")
            factors.setdefault(layer, {})[factor] = source.read(slice(None)).contiguous()
    return factors


def _join_pairs(
    read_values: ReadValues, deltas: Sequence[WeightDelta], name: str, base: TensorSource | None
) -> Tensor:
    """Returns all "up" matrices joined along dim 1, or all "down" along dim 0."""
    matrices = []
    for delta in deltas:
        if delta.operation == "kronecker":
            continue
        pairs = [matrix for matrix in delta.matrices if isinstance(matrix, LowRankMatrix)]
        infos = [pair.up if name == "lora_up" else pair.down for pair in pairs]
        matrix, *factors = [read_values(info, slice(None)).flatten(1) for info in infos]
        for factor in factors:  # a product by elements is a pair of all products of the factors
            if name == "lora_up":
                matrix = torch.einsum("or,os->ors", matrix, factor).flatten(1)
            else:
                matrix = torch.einsum("ri,si->rsi", matrix, factor).flatten(0, 1)
        if delta.operation == "multiply" and name == "lora_up":
            assert base is not None
            tiles = _iter_tiles(0, base.shape[0], base.shape[0])
            matrix = torch.cat([base.read(tile).to(torch.float64) @ matrix for tile in tiles])
        matrices.append(matrix * delta.scale if name == "lora_up" else matrix)
    return torch.cat(matrices, dim=1 if name == "lora_up" else 0)


def _read_kronecker_factor(
    read_values: ReadValues, deltas: Sequence[WeightDelta], name: str
) -> Tensor:
    """Returns the matrix of a buffer `lora_left_I`, which is scaled, or `lora_right_I`."""
    side, _, index = name.removeprefix("lora_").partition("_")
    delta = deltas[int(index)]
    matrix = _read_matrix(read_values, delta.matrices[side == "right"], slice(None))
    return matrix * delta.scale if side == "left" else matrix


def merge_loras(
    sources: TensorSources, loras: Sequence[Lora], skipped_names: Collection[str] = ()
) -> TensorSources:
    """Returns sources that merge LoRAs into weights on reading; merged weights are float32.

    Rows are summed in float64 in tiles that begin at multiples of the tile size, wherever a rank's
    rows begin. So the sum is rounded once and its bits do not depend on the sharding. Each delta
    is that of the unchanged weight, in any order of the files.
    """
    all_deltas = collect_deltas(loras)
    deltas_by_name = {name: all_deltas[name] for name in all_deltas if name not in skipped_names}
    read_values = _open_tensors(delta for deltas in deltas_by_name.values() for delta in deltas)
    merged_sources = {
        name: _make_merged_source(sources[name], deltas, read_values)
        for name, deltas in deltas_by_name.items()
    }
    return {**sources, **merged_sources}


def _open_tensors(deltas: Iterable[WeightDelta]) -> ReadValues:
    """Opens the tensors of deltas; returns a function that reads rows of one in float64."""
    infos = {f"{info.file}:{info.name}": info for delta in deltas for info in delta.infos}
    sources = open_sources(infos)

    def read_values(info: TensorInfo, rows: slice) -> Tensor:
        return sources[f"{info.file}:{info.name}"].read_checked(rows).to(torch.float64)

    return read_values


def _make_merged_source(
    base: TensorSource, deltas: Sequence[WeightDelta], read_values: ReadValues
) -> TensorSource:
    """Adds deltas to a source."""

    def read_base(rows: slice) -> Tensor:
        values = base.read(rows)
        return values.to(torch.float64, copy=True).reshape(values.shape[0], -1)

    def merge_tile(rows: slice) -> Tensor:
        total = read_base(rows)
        weight = total.clone() if any(delta.needs_base for delta in deltas) else total
        for delta in deltas:
            if delta.magnitude is None:
                _add_delta(total, weight, delta, rows, read_values)
                continue
            changed = weight.clone()
            _add_delta(changed, weight, delta, rows, read_values)
            magnitude = read_values(delta.magnitude, slice(None)).reshape(-1)
            norms = changed.norm(dim=1)
            # a row of zeros stays one
            factor = (magnitude[rows] / torch.where(norms > 0, norms, 1.0)).unsqueeze(1)
            total.add_(changed * factor - weight, alpha=delta.strength)
        _check_finite(total.float(), deltas)
        return total.reshape(-1, *base.shape[1:])

    def read(rows: slice) -> Tensor:
        start, stop, _ = rows.indices(base.shape[0])
        tiles = list(_iter_tiles(start, stop, base.shape[0]))
        first_row = tiles[0].start if tiles else start
        return torch.cat([merge_tile(tile) for tile in tiles])[
            start - first_row : stop - first_row
        ].float()

    return TensorSource(torch.float32, base.shape, read, base.mapped_tensor, base.file)


def _iter_tiles(start: int, stop: int, num_rows: int) -> Iterator[slice]:
    """Yields the tiles that contain these rows."""
    for first_row in range(start // _TILE_ROWS * _TILE_ROWS, stop, _TILE_ROWS):
        yield slice(first_row, min(first_row + _TILE_ROWS, num_rows))


def _add_delta(
    total: Tensor, weight: Tensor, delta: WeightDelta, rows: slice, read_values: ReadValues
) -> None:
    """Adds rows of a delta, without its magnitude, to `total`; `weight` is the unchanged one."""
    first = delta.matrices[0]
    if delta.operation == "kronecker":
        values = _read_kronecker_rows(read_values, delta, rows)
    elif delta.operation == "multiply":
        up, down = (read_values(info, slice(None)).flatten(1) for info in first.infos)
        channels = weight.view(len(weight), len(up), -1)
        values = torch.einsum("oik,ir,rj->ojk", channels, up, down)
    elif delta.operation == "add" and isinstance(first, LowRankMatrix):
        up, down = read_values(first.up, rows), read_values(first.down, slice(None))
        total.addmm_(up.flatten(1), down.flatten(1), alpha=delta.scale)
        return
    else:
        values = _read_matrix(read_values, first, rows)
        if delta.operation == "hadamard":
            values = values * _read_matrix(read_values, delta.matrices[1], rows)
        elif delta.operation == "replace":
            values = values - weight
    total.add_(values.reshape(total.shape), alpha=delta.scale)


def _read_matrix(read_values: ReadValues, matrix: Matrix, rows: slice) -> Tensor:
    """Returns rows of a matrix."""
    if not isinstance(matrix, LowRankMatrix):
        values = read_values(matrix.info, rows)
        return values.reshape(len(values), -1)
    up = read_values(matrix.up, rows).flatten(1)
    return up @ read_values(matrix.down, slice(None)).flatten(1)


def _read_kronecker_rows(read_values: ReadValues, delta: WeightDelta, rows: slice) -> Tensor:
    """Returns rows of a Kronecker product, without computing the others."""
    w1, w2 = (_read_matrix(read_values, matrix, slice(None)) for matrix in delta.matrices)
    indices = torch.arange(rows.start, rows.stop)
    w1_rows, w2_rows = w1[indices // len(w2)], w2[indices % len(w2)]
    return (w1_rows.unsqueeze(2) * w2_rows.unsqueeze(1)).flatten(1)


def _check_finite(values: Tensor, deltas: Sequence[WeightDelta]) -> None:
    if not bool(values.isfinite().all()):
        files = {str(delta.file) for delta in deltas}
        why, remedy = "makes weights NaN or infinite", "it is damaged, or its strength is too large"
        raise InputError("LoRA", ", ".join(sorted(files)), why, remedy)
