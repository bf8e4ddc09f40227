"""Loads weights from files into networks: memory-mapped, converted while they are copied.

A network is built on the meta device, where it has no memory, and compared with the headers of its
files by the names and shapes of all tensors (`Blueprint.check`). Then each tensor gets memory on
its device, in its final dtype, and its values from the mapped file (`Blueprint.load`, `fill`). The
host needs no more memory beside the network's own than for a
slice of one tensor. A `Sharding` decides which rows a process keeps, and an `Adapt` what a tensor
is read from: scaled FP8 values, int8 weights, or weights with LoRAs merged into them.
"""

from __future__ import annotations

import mmap
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from wan import host
from wan.checkpoint.files import (
    TensorInfo,
    folder_tensors,
    network_tensors,
    safetensors_header,
    safetensors_places,
)
from wan.checkpoint.lora import Change, Lora
from wan.checkpoint.quantised import FP8_DYNAMIC, Export, QuantisedDit
from wan.log import progress
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32
from wan.settings.values import shown

_SLICE = 1 << 24  # elements that are copied at a time
_TILE = 256  # rows whose LoRAs are summed at a time
_FLOATS = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {
    **{name: dtype for dtype, name in _FLOATS.items()},
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
}

DTypeOf = Callable[[str, torch.dtype], torch.dtype]
"""(name of a parameter, dtype in the file) -> dtype in memory."""


@dataclass(frozen=True)
class Source:
    """Where the values of one tensor come from, and what they become on their way.

    Attributes:
        dtype: as stored.
        shape: as the network has it.
        read: rows on the CPU, in any dtype; a few at a time are asked for, and copied.
        mapped: what is read of the file, for reading ahead.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[slice], Tensor]
    mapped: Tensor | None = None

    def read_ahead(self) -> None:
        """Have the system read all of it from the disk, soon, without waiting."""
        if self.mapped is not None:
            host.read_ahead_mapped(self.mapped.data_ptr(), self.mapped.nbytes)


Sources = Mapping[str, Source]


class Sharding(Protocol):
    """Which rows of each parameter this process keeps (`wan.distributed.fsdp.Sharded`)."""

    def prepare(self, network: nn.Module) -> None:
        """Shard a network that has its dtypes but no memory yet (meta device)."""

    def share(self, parameter: Tensor) -> tuple[Tensor, slice]:
        """What this process keeps of a parameter, to be written to, and which rows that is."""


class Unsharded:
    """One process keeps everything."""

    def prepare(self, network: nn.Module) -> None:
        """Nothing is sharded."""

    def share(self, parameter: Tensor) -> tuple[Tensor, slice]:
        return parameter, slice(None)


UNSHARDED = Unsharded()
N = TypeVar("N", bound=nn.Module)
Adapt = Callable[[nn.Module, Sources], Sources]
"""Changes a network on the meta device that fits its files, or what is read into it: gets it and a
source for each of its tensors, and returns the sources of what is on the meta device afterwards
(and perhaps of more). Quantised layers are one."""


def as_stored(_: nn.Module, sources: Sources) -> Sources:
    """No adaptation."""
    return sources


@dataclass
class Blueprint(Generic[N]):
    """A network and its files: built to be compared with them, filled when it is needed.

    The network that `check` built is the one that `load` fills and hands out; it then belongs to
    the caller, and another `load` builds another one.

    Attributes:
        label: what a progress bar calls it.
        make: makes the network; called with the meta device as torch's default.
        tensors: what the files hold, under the network's names.
        origin: the file or folder, for messages.
    """

    label: str
    make: Callable[[], N]
    tensors: Mapping[str, TensorInfo]
    origin: Path
    _checked: N | None = field(default=None, init=False)

    def check(self) -> None:
        """Compare the network with the files. InputError names the first tensor that differs."""
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
        """The network for inference, with what this process keeps of its weights."""
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
    """Names and shapes must be exactly the network's; a parameter of two names needs its first."""
    expected = dict(network.named_parameters())
    known = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    unknown = [info.name for name, info in tensors.items() if name not in known]
    for kind, names in (
        ("lacks", sorted(expected.keys() - tensors.keys())),
        ("has the unknown", sorted(unknown)),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(f"{origin} {kind} tensor {names[0]}{more}; download it again.")
    for name, parameter in expected.items():
        info = tensors[name]
        if info.shape != tuple(parameter.shape):
            raise InputError(
                f"{info.file}: tensor {info.name} has shape {list(info.shape)}, the network asks "
                f"for {list(parameter.shape)}; download it again."
            )


def fill(
    network: nn.Module,
    sources: Sources,
    *,
    device: torch.device,
    dtype_of: DTypeOf,
    label: str,
    sharding: Sharding = UNSHARDED,
) -> None:
    """Give a network memory and values, for inference; what is not on the meta device stays.

    Buffers keep their dtype and are whole everywhere.
    """
    for name, parameter in network.named_parameters():
        if parameter.is_meta:
            parameter.data = parameter.data.to(dtype_of(name, sources[name].dtype))  # still meta
    sharding.prepare(network.eval().requires_grad_(False))
    empty = {name for name, tensor in _tensors(network).items() if tensor.is_meta}
    for module in reversed(list(network.modules())):  # a sharded one looks at what is inside it
        if all(tensor.is_meta for tensor in _tensors(module, recurse=False).values()):
            module.to_empty(device=device, recurse=False)
    kept = {
        name: sharding.share(tensor) if isinstance(tensor, nn.Parameter) else (tensor, slice(None))
        for name, tensor in _tensors(network).items()
        if name in empty
    }
    total = sum(tensor.nbytes for tensor, _ in kept.values())
    with progress(total, f"loading {label}", "B") as bar, host.on_own_cores():
        for name, (tensor, rows) in kept.items():
            copy(tensor, sources[name], rows, bar.update)


def _tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    parameters = module.named_parameters(recurse=recurse)
    return dict(parameters) | dict(module.named_buffers(recurse=recurse))


@torch.no_grad()
def copy(
    target: Tensor,
    source: Source,
    rows: slice = slice(None),
    done: Callable[[int], object] = int,
) -> None:
    """Rows of a source into the tensor that keeps them, a slice at a time.

    done: is told the bytes of each slice.

    Always a copy: memory that PyTorch allocates is aligned, a tensor inside a mapped file is not,
    and products of differently aligned weights may differ in the last bit. The same tensors must
    give the same video from every file layout.
    """
    start, stop, _ = rows.indices(source.shape[0])
    step = max(1, _SLICE // max(1, prod(source.shape[1:])))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        part = target[first - start : last - start]
        # Brought over as it is stored and converted there: a CPU takes longer than the link. From
        # memory that is not pinned the call returns when the values have been taken.
        part.copy_(source.read(slice(first, last)).to(part.device, non_blocking=True))
        done(part.nbytes)


def stored(path: Path, rename: Callable[[str], str]) -> dict[str, TensorInfo]:
    """The tensors of one network in a file or folder, under its names; no weight is read.

    path: a `.pth` of plain tensors (never unpickled as code), a `.safetensors` file, or a folder in
    the layout of diffusers or transformers. Raises InputError for anything else.
    """
    if path.suffix == ".pth":
        state = in_pth(path)
        dtypes = {name: _FLOATS.get(t.dtype, str(t.dtype)) for name, t in state.items()}
        found = {
            name: TensorInfo(path, name, dtypes[name], tuple(t.shape), t.nbytes)
            for name, t in state.items()
        }
    else:
        found = (safetensors_header(path) if path.is_file() else folder_tensors(path)) or {}
    if not found:
        raise InputError(f"{path} holds no weights; download them.")
    return network_tensors(found, rename)


def in_safetensors(file: Path, infos: Iterable[TensorInfo]) -> dict[str, Tensor]:
    """By their names there; not to be written to.

    The format's own library maps it writable, which Linux refuses for a file larger than memory.
    """
    places = safetensors_places(file)
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    found = {}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of what is not written
        for info in infos:
            dtype, start = places[info.name]
            of = {"dtype": _DTYPES[dtype], "count": prod(info.shape), "offset": start}
            found[info.name] = torch.frombuffer(memory, **of).view(info.shape)
    return found


def in_pth(path: Path) -> dict[str, Tensor]:
    """All tensors of a file that holds nothing else, which is never run as code."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} holds something other than weights and was not opened, because it could run "
            "code; download it again."
        ) from None
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        reason = shown(error, str)
        raise InputError(f"{path} cannot be read ({reason}); download it again.") from None
    entries = state.items() if isinstance(state, dict) else [(type(state).__name__, None)]
    for name, value in entries:
        if not (isinstance(name, str) and _is_plain(value)):
            raise InputError(
                f"{path} holds something other than weights ({shown(name, str)}); download it "
                "again."
            )
    return dict(entries)


def _is_plain(value: Any) -> bool:
    """A dense tensor whose memory is all there."""
    dense = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    return dense and value.untyped_storage().nbytes() >= value.nbytes


def mapped(tensors: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """Where the values of these tensors are; each file is opened once."""
    by_file: dict[Path, list[str]] = {}
    for name, info in tensors.items():
        by_file.setdefault(info.file, []).append(name)
    sources: dict[str, Source] = {}
    for file, names in by_file.items():
        if file.suffix == ".pth":
            state = in_pth(file)
            sources |= {name: _source(state[tensors[name].name]) for name in names}
            continue
        views = in_safetensors(file, {tensors[name] for name in names})
        sources |= {name: _source(views[tensors[name].name]) for name in names}
    scales = {name: info.scale for name, info in tensors.items() if info.scale is not None}
    if scales:
        factors = mapped(scales)
        sources |= {name: _scaled(sources[name], factors[name]) for name in scales}
    return sources


def _source(view: Tensor) -> Source:
    """A view of a mapped file: only the rows that are asked for are read."""
    view = view.reshape(1) if view.dim() == 0 else view
    return Source(view.dtype, tuple(view.shape), view.__getitem__, view)


def _scaled(stored: Source, scale: Source) -> Source:
    """FP8 values times their scale, one number or one for each row; float32."""
    factors, one = scale.read(slice(None)).float().reshape(-1, 1), prod(scale.shape) == 1

    def read(rows: slice) -> Tensor:
        part = stored.read(rows)
        return part.to(torch.float32).mul_(factors if one else factors[rows])

    return Source(torch.float32, stored.shape, read, stored.mapped)


def fp8_sources(kept: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """The buffers of layers that stay in FP8. kept: layer -> its weight."""
    infos = {f"{layer}.weight": replace(info, scale=None) for layer, info in kept.items()}
    scales = {f"{layer}.weight_scale": info.scale for layer, info in kept.items()}
    sources = mapped(infos | {name: info for name, info in scales.items() if info is not None})
    for name, info in scales.items():
        values = torch.ones(1) if info is None else sources[name].read(slice(None)).float()
        values = values.reshape(1) if values.numel() == 1 else values.reshape(-1, 1)
        sources[name] = _source(values)
    return sources


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


def dit_dtypes(compute: torch.dtype, convert_all: bool) -> DTypeOf:
    """The dtype each DiT parameter is kept in.

    compute: dtype of the blocks' matrix products. What the official code computes in float32 stays
    float32, unless convert_all asks for everything in `compute` (as the official
    --convert_model_dtype does); it is then upcast when used.
    """
    return lambda name, _: torch.float32 if keeps_fp32(name) and not convert_all else compute


def int8_sources(export: Export, dtype: torch.dtype) -> dict[str, Source]:
    """The buffers of the int8 layers that an export has instead of its linear layers.

    dtype: what scales and biases are rounded to, as `wan.kernels.int8_linear` says.
    """
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
    """A vector, or a column as a vector, rounded to a dtype."""
    read = stored.read
    return Source(dtype, stored.shape[:1], lambda rows: read(rows).reshape(-1).to(dtype))


Rotation = tuple[Tensor, Tensor]


def rotations(quantised: QuantisedDit) -> dict[tuple[str, int], Rotation]:
    """(expert, block index) -> the exported FP8 rotations of queries and keys, [D,D], on the CPU.

    Empty for an export without entries for attention; else the export keeps the layers that are
    absent in the run's dtype.
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
