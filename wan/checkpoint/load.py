"""Loads weights from memory-mapped files into networks, as views or as converted copies.

A network is built on the meta device, without memory, and the names and shapes of its tensors are
compared with the headers of its files (`ModelSpec.check`). Then each tensor is allocated on its
device in its final dtype and filled from the mapped file (`ModelSpec.load`, `load_weights`). On a
CPU a tensor that is stored in its final dtype and layout is not allocated: it is a view of the
file, which must not be written (`materialize_tensors` replaces views by copies). Loading needs host
memory for the network and a slice of one tensor. A `Sharding` selects the rows that each rank
loads. A `WeightTransform` changes the sources of tensors: scaled FP8 values, int8 weights, or
weights merged with LoRAs.
"""

from __future__ import annotations

import mmap
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from wan import host
from wan.checkpoint.dequantise import dequantise, nvfp4, untiled
from wan.checkpoint.files import (
    FP8,
    GGUF,
    NVFP4,
    TensorInfo,
    as_bytes,
    file_state,
    file_tensors,
    folder_tensors,
    safetensors_places,
)
from wan.checkpoint.lora import Change, Lora, changes_of
from wan.checkpoint.marks import network_tensors
from wan.checkpoint.quantised import FP8_DYNAMIC, Export, QuantisedDit
from wan.checkpoint.source import (
    MappedFile,
    Source,
    Sources,
    is_own,
    joined,
    tensors_of,
    use_mapped,
    watch,
)
from wan.log import progress
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32
from wan.settings.values import shown

_PICKLED = (".pth", ".ckpt")
_SLICE = 1 << 24  # elements per copy
_TILE = 256  # rows per LoRA merge
_FLOATS = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = {
    **{name: dtype for dtype, name in _FLOATS.items()},
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
}

DTypeOf = Callable[[str, torch.dtype], torch.dtype]
"""Returns a parameter's dtype in memory from its name and its dtype in the file."""


class Sharding(Protocol):
    """Selects the rows of each parameter on this rank (`wan.distributed.fsdp.FsdpSharding`)."""

    def prepare(self, network: nn.Module) -> None:
        """Shards a network on the meta device, whose parameters have their final dtypes."""

    def share(self, parameter: Tensor) -> tuple[Tensor, slice]:
        """Returns this rank's tensor of a parameter, and the rows of the parameter it holds."""


class Unsharded:
    """Every rank holds all rows."""

    def prepare(self, network: nn.Module) -> None:
        """Leaves the network as it is."""

    def share(self, parameter: Tensor) -> tuple[Tensor, slice]:
        return parameter, slice(None)


UNSHARDED = Unsharded()
N = TypeVar("N", bound=nn.Module)
Adapt = Callable[[nn.Module, Sources], Sources]
"""Changes a network on the meta device, or the sources of its weights. Called with the network and
a source for each of its tensors; returns sources for all tensors that the network has on the meta
device afterwards, and possibly more."""


def as_stored(_: nn.Module, sources: Sources) -> Sources:
    """Returns the sources unchanged."""
    return sources


@dataclass
class Blueprint(Generic[N]):
    """A network that is built, checked against its files, and loaded on demand.

    The first `load` uses the network that `check` has built; each further `load` builds a new one.

    Attributes:
        label: The network's name in progress bars.
        make: Builds the network; called with the meta device as torch's default device.
        tensors: The tensors in the files, by the network's names.
        origin: The file or folder, for error messages.
    """

    label: str
    make: Callable[[], N]
    tensors: Mapping[str, TensorInfo]
    origin: Path
    _checked: N | None = field(default=None, init=False)

    def check(self) -> None:
        """Checks the network against the files; InputError names the first tensor that differs."""
        if self._checked is None:
            self._checked = self._built()

    def load(
        self,
        *,
        device: torch.device,
        dtype_of: DTypeOf,
        sharding: Sharding = UNSHARDED,
        adapt: Adapt = as_stored,
    ) -> N:
        """Returns the network for inference, with this rank's weights."""
        network = self._built() if self._checked is None else self._checked
        self._checked = None
        sources = adapt(network, mapped(self.tensors))
        fill(
            network, sources, device=device, dtype_of=dtype_of, label=self.label, sharding=sharding
        )
        return network

    def _built(self) -> N:
        with torch.device("meta"):
            network = self.make()
        _compare(network, self.tensors, self.origin)
        return network


def _compare(network: nn.Module, tensors: Mapping[str, TensorInfo], origin: Path) -> None:
    """Refuses differing names or shapes; a parameter with two names needs only the first."""
    expected = dict(network.named_parameters())
    known = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    unknown = [info.name for name, info in tensors.items() if name not in known]
    for kind, names in (
        ("lacks", sorted(expected.keys() - tensors.keys())),
        ("has the unknown", sorted(unknown)),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            why = f"{kind} tensor {names[0]}{more}"
            raise InputError(f"{origin}", None, why, "download it again")
    for name, parameter in expected.items():
        info = tensors[name]
        if info.shape != tuple(parameter.shape):
            why = f"has shape {list(info.shape)}, but the network needs {list(parameter.shape)}"
            raise InputError(f"{info.file}: tensor {info.name}", None, why, "download it again")


def fill(
    network: nn.Module,
    sources: Sources,
    *,
    device: torch.device,
    dtype_of: DTypeOf,
    label: str,
    sharding: Sharding = UNSHARDED,
) -> None:
    """Allocates and fills all tensors that a network has on the meta device, for inference.

    Buffers keep their dtype and are not sharded. Memory-mapped tensors are prefetched from disk in
    the background if the memory suffices; each call of the network or one of its children first
    checks that their files are unchanged.
    """
    for name, parameter in network.named_parameters():
        if parameter.is_meta:
            parameter.data = parameter.data.to(dtype_of(name, sources[name].dtype))  # still meta
    sharding.prepare(network.eval().requires_grad_(False))
    empty = {name for name, tensor in tensors_of(network).items() if tensor.is_meta}
    for module in reversed(list(network.modules())):  # a sharded module reads its children
        if all(tensor.is_meta for tensor in tensors_of(module, recurse=False).values()):
            module.to_empty(device=device, recurse=False)
    kept = {
        name: sharding.share(tensor) if isinstance(tensor, nn.Parameter) else (tensor, slice(None))
        for name, tensor in tensors_of(network).items()
        if name in empty
    }
    if device.type == "cpu" and sharding is UNSHARDED:
        used = use_mapped((tensor, sources[name]) for name, (tensor, _) in kept.items())
        kept = {name: found for name, found in kept.items() if is_own(found[0])}
        watch(network, used)
    total = sum(tensor.nbytes for tensor, _ in kept.values())
    with progress(total, f"loading {label}", "B") as bar, host.on_own_cores():
        for name, (tensor, rows) in kept.items():
            copy(tensor, sources[name], rows, bar.update)


@torch.no_grad()
def copy(
    target: Tensor,
    source: Source,
    rows: slice = slice(None),
    done: Callable[[int], object] = int,
) -> None:
    """Copies rows of a source into a tensor, slice by slice.

    Args:
        target: Has as many rows as `rows` selects.
        on_progress: Called with the bytes of each slice.

    Raises:
        FileChangedError: The source's file has changed since it was mapped.
    """
    source.check()
    start, stop, _ = rows.indices(source.shape[0])
    step = max(1, _SLICE // max(1, prod(source.shape[1:])))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        part = target[first - start : last - start]
        # Moved in the stored dtype and converted on the device: converting on a CPU takes longer
        # than the transfer. From unpinned memory the call returns after the values were read.
        part.copy_(source.read(slice(first, last)).to(part.device, non_blocking=True))
        done(part.nbytes)


def stored(path: Path, rename: Callable[[str], str]) -> dict[str, TensorInfo]:
    """Returns the tensors of one network in a file or folder, without reading weights.

    Args:
        path: A `.pth` or `.ckpt` of plain tensors (never unpickled as code), a `.safetensors` or
            `.gguf` file, or a folder in the layout of diffusers or transformers.
        rename: Maps a stored name to the network's name.

    Raises:
        InputError: The path is not one of these, or is damaged.
    """
    if path.suffix in _PICKLED:
        state = in_pth(path)
        dtypes = {name: _FLOATS.get(t.dtype, str(t.dtype)) for name, t in state.items()}
        at = file_state(path)
        found = {
            name: TensorInfo(path, name, dtypes[name], tuple(t.shape), t.nbytes, state=at)
            for name, t in state.items()
        }
    else:
        found = (file_tensors(path) if path.is_file() else folder_tensors(path)) or {}
    if not found:
        raise InputError(f"{path}", None, "holds no weights", "download them")
    return network_tensors(found, rename)


def in_safetensors(file: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns tensors of a file by name, as views of mapped memory that must not be written.

    The `safetensors` library maps files writable, which Linux refuses for files larger than memory.
    """
    places = safetensors_places(file)
    return _views(file, {name: places[name] for name in names})


def in_gguf(file: Path, tensors: Iterable[TensorInfo]) -> dict[str, Tensor]:
    """Returns tensors of a file by name, as read-only views; quantized ones are uint8 [bytes]."""
    places = {}
    for info in tensors:
        plain = info.dtype not in GGUF
        shape = list(info.shape) if plain else [info.nbytes]
        places[info.name] = info.dtype if plain else "U8", shape, info.start
    return _views(file, places)


def _views(file: Path, places: Mapping[str, tuple[str, list[int], int]]) -> dict[str, Tensor]:
    """Maps a file and returns views at the given locations: name -> (dtype, shape, offset)."""
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    found = {}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # memory is read-only
        for name, (dtype, shape, start) in places.items():
            of = {"dtype": DTYPES[dtype], "count": prod(shape), "offset": start}
            found[name] = torch.frombuffer(memory, **of).view(shape)
    return found


def in_pth(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a file, or of its entry `state_dict`, without unpickling code.

    Raises:
        InputError: The file contains anything but tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        why = "holds something other than weights and was not opened, because it could run code"
        raise InputError(f"{path}", None, why, "download it again") from None
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        why = f"cannot be read ({shown(error, str)})"
        raise InputError(f"{path}", None, why, "download it again") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]  # training code saves its state too
    entries: Iterable[tuple[Any, Any]]
    entries = state.items() if isinstance(state, dict) else [(type(state).__name__, None)]
    for name, value in entries:
        plain = isinstance(name, str) and type(value) in (Tensor, nn.Parameter)
        # A damaged view may extend past the end of its storage.
        if not (
            plain
            and value.layout == torch.strided
            and value.device.type == "cpu"
            and value.untyped_storage().nbytes() >= value.nbytes
        ):
            why = f"holds something other than weights ({shown(name, str)})"
            raise InputError(f"{path}", None, why, "download it again")
    return dict(entries)


def mapped(tensors: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """Maps tensors into memory, opening each file once."""
    by_file: dict[Path, list[str]] = {}
    for name, info in tensors.items():
        if not info.parts:
            by_file.setdefault(info.file, []).append(name)
    sources: dict[str, Source] = {}
    for file, names in by_file.items():
        infos = [tensors[name] for name in names]
        opened = MappedFile.open(file, infos[0].state)
        try:
            if file.suffix == ".gguf":
                views = in_gguf(file, infos)
            elif file.suffix in _PICKLED:
                views = in_pth(file)
            else:
                views = in_safetensors(file, {info.name for info in infos})
        except (OSError, LookupError, ValueError):
            opened.check()  # it may have changed since it was opened
            raise
        for name, info in zip(names, infos, strict=True):
            view = views[info.name]
            if info.dtype in GGUF:
                sources[name] = _dequantised(view, info, opened)
                continue
            if info.dtype != NVFP4 and view.shape != info.shape:
                rows = view.reshape(-1, *info.shape[1:])
                view = rows[info.first : info.first + info.shape[0]]
            sources[name] = _source(view, opened)
    scales = {name: info.scale for name, info in tensors.items() if info.scale is not None}
    if scales:
        blocks = {name: i.blocks for name, i in tensors.items() if i.blocks is not None}
        factors, of_blocks = mapped(scales), mapped(blocks)
        for name in scales:
            stored, scale = sources[name], factors[name]
            if name in blocks:
                sources[name] = _nvfp4(stored, scale, of_blocks[name])
            else:
                sources[name] = _scaled(stored, scale)
    for name, info in tensors.items():
        if info.parts:
            parts = mapped({str(i): part for i, part in enumerate(info.parts)})
            sources[name] = joined(list(parts.values()), info.shape)
    return sources


def _source(view: Tensor, file: MappedFile | None = None) -> Source:
    """Returns a source that reads rows of a view of a mapped file."""
    view = view.reshape(1) if view.dim() == 0 else view
    return Source(view.dtype, tuple(view.shape), view.__getitem__, view, file)


def _scaled(stored: Source, scale: Source) -> Source:
    """Returns a source of FP8 or int8 values times their scale (per tensor or row), float32."""
    factors, one = scale.read(slice(None)).float().reshape(-1, 1), prod(scale.shape) == 1

    def read(rows: slice) -> Tensor:
        part = stored.read(rows)
        return part.to(torch.float32).mul_(factors if one else factors[rows])

    return Source(torch.float32, stored.shape, read, stored.mapped, stored.file)


def _nvfp4(stored: Source, scale: Source, blocks: Source) -> Source:
    """Returns a source that dequantizes NVFP4."""
    rows, columns = stored.shape[0], 2 * stored.shape[1]
    one = scale.read(slice(None)).float()

    def read(wanted: slice) -> Tensor:
        return nvfp4(
            stored.read(wanted), untiled(blocks.read_checked(slice(None)), rows)[wanted], one
        )

    return Source(torch.float32, (rows, columns), read, stored.mapped, stored.file)


def _dequantised(stored: Tensor, info: TensorInfo, file: MappedFile) -> Source:
    """Returns a source that dequantizes GGUF; blocks may span rows, if the tensor was flattened."""
    values, size = GGUF[info.dtype]
    columns, blocks = prod(info.shape[1:]), stored.view(-1, size)

    def read(rows: slice) -> Tensor:
        start, stop, _ = rows.indices(info.shape[0])
        first, last = start * columns // values, -(-stop * columns // values)
        part = dequantise(info.dtype, blocks[first:last]).view(-1)[
            start * columns - first * values :
        ]
        return part[: (stop - start) * columns].view(stop - start, *info.shape[1:])

    return Source(torch.float32, info.shape, read, stored, file)


def kept_sources(kept: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """Returns sources of the buffers of weight-only quantized layers, from layer -> weight."""
    infos = {f"{layer}.weight": as_bytes(info) for layer, info in kept.items()}
    scales = {f"{layer}.weight_scale": i.scale for layer, i in kept.items() if i.dtype in FP8}
    sources = mapped(infos | {name: info for name, info in scales.items() if info is not None})
    for name, info in scales.items():
        values = torch.ones(1) if info is None else sources[name].read(slice(None)).float()
        values = values.reshape(1) if values.numel() == 1 else values.reshape(-1, 1)
        sources[name] = _source(values)
    return sources


def lora_sources(pairs: Mapping[str, Sequence[Change]], dtype: torch.dtype) -> dict[str, Source]:
    """Returns sources of the low-rank factors of weight-only quantized layers.

    Args:
        deltas_by_layer: Low-rank deltas of each layer's weight.
        dtype: The factors are rounded to it once.
    """
    infos = {
        f"{layer}.{index}.{part}": info
        for layer, changes in pairs.items()
        for index, change in enumerate(changes)
        for part, info in (("up", change.up), ("down", change.down))
        if info is not None
    }
    read, found = mapped(infos), {}

    def values(layer: str, part: str, rows: slice) -> Tensor:
        """Returns rows of all ups concatenated along dim 1, or all downs along dim 0."""
        tensors = []
        for index, change in enumerate(pairs[layer]):
            one = (
                read[f"{layer}.{index}.{part}"]
                .read_checked(slice(None))
                .to(torch.float64)
                .flatten(1)
            )
            tensors.append(one * change.factor if part == "up" else one)
        whole = torch.cat(tensors, dim=1 if part == "up" else 0)[rows].to(dtype)
        _check_finite(whole, pairs[layer])
        return whole

    for layer, changes in pairs.items():
        rank = sum(change.rank for change in changes)
        for part in ("up", "down"):
            info = infos[f"{layer}.0.{part}"]
            shape = (info.shape[0], rank) if part == "up" else (rank, prod(info.shape[1:]))
            found[f"{layer}.lora_{part}"] = Source(dtype, shape, partial(values, layer, part))
    return found


def _check_finite(values: Tensor, changes: Sequence[Change]) -> None:
    if not bool(values.isfinite().all()):
        files = {str(info.file) for c in changes if (info := c.full or c.up) is not None}
        why = "makes weights NaN or infinite"
        remedy = "it is damaged, or its strength is too large"
        raise InputError("LoRA", ", ".join(sorted(files)), why, remedy)


def merged(sources: Sources, loras: Sequence[Lora], beside: Collection[str] = ()) -> Sources:
    """Returns sources that merge LoRAs into weights on reading; merged weights are float32.

    Rows are summed in float64 in tiles that begin at multiples of the tile size, wherever a rank's
    rows begin. So the sum is rounded once and its bits do not depend on the sharding.

    Args:
        skipped_names: Weights that are not changed.
    """
    changes = {name: c for name, c in changes_of(loras).items() if name not in beside}
    infos = {
        f"{info.file}:{info.name}": info
        for added in changes.values()
        for change in added
        for info in (change.up, change.down, change.full)
        if info is not None
    }
    read = mapped(infos)

    def values(info: TensorInfo, rows: slice) -> Tensor:
        return read[f"{info.file}:{info.name}"].read_checked(rows).to(torch.float64)

    return {
        **sources,
        **{name: _summed(sources[name], added, values) for name, added in changes.items()},
    }


def _summed(
    base: Source, changes: Sequence[Change], values: Callable[[TensorInfo, slice], Tensor]
) -> Source:
    """Adds deltas to a source; `read_values` reads rows of a LoRA's tensor in float64."""

    def tile(start: int) -> Tensor:
        rows = slice(start, min(start + _TILE, base.shape[0]))
        kept = base.read(rows)
        total = kept.to(torch.float64, copy=True).reshape(kept.shape[0], -1)
        for change in changes:
            if change.full is not None:
                full = values(change.full, rows)
                total.add_(full.reshape(total.shape), alpha=change.factor)
                continue
            assert change.up is not None and change.down is not None
            up, down = values(change.up, rows), values(change.down, slice(None))
            total.addmm_(up.flatten(1), down.flatten(1), alpha=change.factor)
        _check_finite(total.float(), changes)
        return total.reshape(kept.shape)

    def read(rows: slice) -> Tensor:
        start, stop, _ = rows.indices(base.shape[0])
        first = start // _TILE * _TILE
        tiles = [tile(at) for at in range(first, stop, _TILE)]
        return torch.cat(tiles)[start - first : stop - first].float()

    return Source(torch.float32, base.shape, read, base.mapped, base.file)


def dit_dtypes(compute: torch.dtype, convert_all: bool) -> DTypeOf:
    """Returns the rule for the dtypes of a DiT's parameters.

    Args:
        compute_dtype: The dtype of the blocks' matrix products.
        convert_all: All parameters have it (`convert_model_dtype`). Otherwise parameters that the
            official code computes with in float32 stay float32.
    """
    return lambda name, _: torch.float32 if keeps_fp32(name) and not convert_all else compute


def int8_sources(export: Export, dtype: torch.dtype) -> dict[str, Source]:
    """Returns sources of the buffers of int8 layers, with scales and biases rounded to a dtype."""
    layers = export.linears.items()
    infos = {f"{name}.{part}": i for name, layer in layers for part, i in layer.tensors.items()}
    sources = mapped(infos)
    for name, source in list(sources.items()):
        if name.endswith((".weight_scale", ".bias")):
            sources[name] = _rounded(source, dtype)
        elif name.endswith(".mul_scale"):
            sources[name.removesuffix("mul_scale") + "factors"] = sources.pop(name)
    return sources


def _rounded(stored: Source, dtype: torch.dtype) -> Source:
    """Returns a source that rounds a vector or a column to a dtype, as a vector."""
    read = stored.read
    shape, file = stored.shape[:1], stored.file
    return Source(dtype, shape, lambda rows: read(rows).reshape(-1).to(dtype), file=file)


Rotation = tuple[Tensor, Tensor]


def rotations(quantised: QuantisedDit) -> dict[tuple[str, int], Rotation]:
    """Loads the exported rotations of queries and keys for FP8 attention, [D,D] on the CPU.

    Returns:
        (expert, block index) -> rotations; layers without an entry run attention in the run's
        dtype.
    """
    layers = {
        (expert, index): layer.tensors
        for expert, export in quantised.experts.items()
        for index, layer in export.attentions.items()
        if layer.algorithm == FP8_DYNAMIC
    }
    sources = mapped(
        {f"{key}{p}": info for key, parts in layers.items() for p, info in parts.items()}
    )

    def read(name: str) -> Tensor:
        return sources[name].read(slice(None)).clone()

    return {key: (read(f"{key}q_rot"), read(f"{key}k_rot")) for key in layers}
