"""Loads weights from memory-mapped files into networks, as views or as converted copies.

A network is built on the meta device, without memory, and the names and shapes of its tensors are
compared with the headers of its files (`ModelSpec.check`). Then each tensor is allocated on its
device in its final dtype and filled from the mapped file (`ModelSpec.load`, `load_weights`). On a
CPU a tensor that is stored in its final dtype and layout is not allocated: it is a view of the
file, which must not be written (`materialize_tensors` replaces views by copies). Loading needs host
memory for the network and a slice of one tensor. A `Sharding` selects the rows that each rank
loads. A `WeightTransform` changes the sources of tensors: scaled FP8 values, int8 weights, or
weights merged with LoRAs (`wan.checkpoint.lora.merge`).
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wan.checkpoint.formats.headers import read_weight_headers
from wan.checkpoint.formats.tensor_info import FP8, GGUF, NVFP4, TensorInfo, view_as_bytes
from wan.checkpoint.formats.tensor_source import (
    MappedFile,
    TensorSource,
    TensorSources,
    concat_sources,
    get_named_tensors,
    owns_memory,
    replace_by_mapped_views,
    watch_mapped_files,
)
from wan.checkpoint.quant.dequantise import (
    dequantize_gguf,
    dequantize_nvfp4,
    multiply_by_block_scales,
    untile_scales,
)
from wan.checkpoint.quant.metadata import collect_network_tensors
from wan.checkpoint.quant.w8a8_export import FP8_DYNAMIC, Export, QuantizedDit
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32
from wan.settings.values import format_value, list_names
from wan.utils import system
from wan.utils.log import make_progress_bar

_COPY_ELEMENTS = 1 << 24  # elements per copy
DTYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
}

DtypeRule = Callable[[str, torch.dtype], torch.dtype]
"""Returns a parameter's dtype in memory from its name and its dtype in the file."""


class Sharding(Protocol):
    """Selects the rows of each parameter on this rank (`wan.distributed.fsdp.FsdpSharding`)."""

    def shard(self, network: nn.Module) -> None:
        """Shards a network on the meta device, whose parameters have their final dtypes."""

    def get_local_rows(self, parameter: Tensor) -> tuple[Tensor, slice]:
        """Returns this rank's tensor of a parameter, and the rows of the parameter it holds."""


class Unsharded:
    """Every rank holds all rows."""

    def shard(self, network: nn.Module) -> None:
        """Leaves the network as it is."""

    def get_local_rows(self, parameter: Tensor) -> tuple[Tensor, slice]:
        return parameter, slice(None)


UNSHARDED = Unsharded()
N = TypeVar("N", bound=nn.Module)
WeightTransform = Callable[[nn.Module, TensorSources], TensorSources]
"""Changes a network on the meta device, or the sources of its weights. Called with the network and
a source for each of its tensors; returns sources for all meta tensors of the changed network. Other
sources are ignored."""


def keep_sources(_: nn.Module, sources: TensorSources) -> TensorSources:
    """Returns the sources unchanged."""
    return sources


@dataclass
class ModelSpec(Generic[N]):
    """A network that is built, checked against its files, and loaded on demand.

    `check` builds the network, which the first `load` uses; each further `load` builds a new one.

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
    _network: N | None = field(default=None, init=False)

    def check(self) -> None:
        """Checks the network against the files; InputError names the first tensor that differs."""
        if self._network is None:
            self._network = self.build()

    def load(
        self,
        *,
        device: torch.device,
        dtype_of: DtypeRule,
        sharding: Sharding = UNSHARDED,
        transform: WeightTransform = keep_sources,
    ) -> N:
        """Returns the network for inference, with this rank's weights."""
        network = self.build() if self._network is None else self._network
        self._network = None
        sources = transform(network, open_sources(self.tensors))
        load_weights(
            network, sources, device=device, dtype_of=dtype_of, label=self.label, sharding=sharding
        )
        return network

    def build(self) -> N:
        """Returns the network on the meta device; InputError as for `check`."""
        network = build_on_meta_device(self.make)
        check_names_and_shapes(network, self.tensors, self.origin)
        return network


class _NoInitialValues(TorchFunctionMode):
    """Leaves parameters uninitialized: to draw on the meta device, PyTorch imports its compiler."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_init = getattr(function, "__module__", None) == "torch.nn.init"
        if is_init or function is Tensor.normal_:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def build_on_meta_device(make: Callable[[], N]) -> N:
    """Builds a network whose parameters have shapes and no values."""
    with torch.device("meta"), _NoInitialValues():
        return make()


def check_names_and_shapes(
    network: nn.Module, tensors: Mapping[str, TensorInfo], origin: Path
) -> None:
    """Refuses differing names or shapes; a parameter with two names needs only the first."""
    expected = dict(network.named_parameters())
    all_names = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    unknown = [info.name for name, info in tensors.items() if name not in all_names]
    missing = sorted(expected.keys() - tensors.keys())
    for problem, names, remedy in (
        ("lacks", missing, "give all files of this network"),
        ("has the unknown", sorted(unknown), "give a file of this network, or remove them"),
    ):
        if names:
            why = f"{problem} tensor{'s' if len(names) > 1 else ''} {list_names(names)}"
            raise InputError(f"{origin}", None, why, remedy)
    for name, parameter in expected.items():
        info = tensors[name]
        if info.shape != tuple(parameter.shape):
            why = f"has shape {list(info.shape)}, but the network needs {list(parameter.shape)}"
            remedy = "give files of one network"
            raise InputError(f"{info.file}: tensor {info.name}", None, why, remedy)


def load_weights(
    network: nn.Module,
    sources: TensorSources,
    *,
    device: torch.device,
    dtype_of: DtypeRule,
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
    sharding.shard(network.eval().requires_grad_(False))
    meta_names = {name for name, tensor in get_named_tensors(network).items() if tensor.is_meta}
    for module in reversed(list(network.modules())):  # children first, as FSDP needs
        if all(tensor.is_meta for tensor in get_named_tensors(module, recurse=False).values()):
            if sharding is UNSHARDED:
                _allocate_tensors(module, device)
            else:
                module.to_empty(device=device, recurse=False)
    targets = {}
    for name, tensor in get_named_tensors(network).items():
        if name in meta_names:
            is_buffer = not isinstance(tensor, nn.Parameter)
            targets[name] = (tensor, slice(None)) if is_buffer else sharding.get_local_rows(tensor)
    if device.type == "cpu" and sharding is UNSHARDED:
        pairs = ((tensor, sources[name]) for name, (tensor, _) in targets.items())
        mapped_sources = replace_by_mapped_views(pairs)
        targets = {name: target for name, target in targets.items() if owns_memory(target[0])}
        watch_mapped_files(network, mapped_sources)
    num_bytes = sum(tensor.nbytes for tensor, _ in targets.values())
    with make_progress_bar(num_bytes, f"loading {label}", "B") as bar, system.limit_cpu_threads():
        for name, (tensor, rows) in targets.items():
            copy_rows(tensor, sources[name], rows, bar.update)


def _allocate_tensors(module: nn.Module, device: torch.device) -> None:
    """Replaces a module's tensors on the meta device by uninitialized tensors on a device."""
    for name, tensor in get_named_tensors(module, recurse=False).items():
        # `empty_like`, which `to_empty` calls, imports sympy for tensors on the meta device.
        allocated = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(module, name, nn.Parameter(allocated, False) if is_parameter else allocated)


@torch.no_grad()
def copy_rows(
    target: Tensor,
    source: TensorSource,
    rows: slice = slice(None),
    on_progress: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Copies rows of a source into a tensor, slice by slice.

    Args:
        target: Has as many rows as `rows` selects.
        on_progress: Called with the bytes of each slice.

    Raises:
        FileChangedError: The source's file has changed since it was mapped.
    """
    source.check_unchanged()
    start, stop, _ = rows.indices(source.shape[0])
    rows_per_copy = max(1, _COPY_ELEMENTS // max(1, prod(source.shape[1:])))
    for first_row in range(start, stop, rows_per_copy):
        end_row = min(first_row + rows_per_copy, stop)
        target_slice = target[first_row - start : end_row - start]
        # Moved in the stored dtype and converted on the device: converting on a CPU takes longer
        # than the transfer. From unpinned memory the call returns after the values were read.
        values = source.read(slice(first_row, end_row))
        target_slice.copy_(values.to(target_slice.device, non_blocking=True))
        on_progress(target_slice.nbytes)


def read_headers(
    path: Path, rename: Callable[[str], str], component: str | None = None
) -> dict[str, TensorInfo]:
    """Returns the tensors of one network in a file or folder; weights are at most memory-mapped.

    Args:
        path: A PyTorch file of plain tensors (never unpickled as code), a `.safetensors` or `.gguf`
            file, or a folder in the layout of diffusers or transformers.
        rename: Maps a stored name without prefix to the network's name.
        component: A key of `COMPONENTS`; None: all tensors by their stored names.

    Raises:
        InputError: The path is not one of these, or is damaged.
    """
    tensors = read_weight_headers(path)
    if not tensors:
        raise InputError(f"{path}", None, "holds no weights", "download them")
    return collect_network_tensors(tensors, rename, component)


def describe_mismatch(error: Exception) -> str:
    """Returns why the sizes of a network could not be read from its tensors."""
    if isinstance(error, KeyError) and isinstance(error.args[0], str):
        return f"it lacks {format_value(error.args[0], str)}"
    return "its tensors have the sizes of another network"


def map_tensors(file: Path, infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Returns tensors of a file as views of mapped memory that must not be written.

    The `safetensors` library maps files writable, which Linux refuses for files larger than memory.

    Returns:
        The stored values by the keys of `infos`: of GGUF flat bytes, of NVFP4 bytes [rows, bytes].
    """
    with file.open("rb") as handle:
        memory = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # memory is read-only
        return {name: _map_tensor(memory, info) for name, info in infos.items()}


def _map_tensor(memory: mmap.mmap, info: TensorInfo) -> Tensor:
    shape, offset = info.shape, info.data_offset
    dtype = torch.uint8 if info.dtype in (*GGUF, NVFP4) else DTYPES[info.dtype]
    if info.dtype in GGUF:
        shape = (info.nbytes,)
    elif info.dtype == NVFP4:
        shape = (shape[0], shape[1] // 2)
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    if info.strided is not None:
        stored_shape, strides = info.strided
        span = 1 + sum((n - 1) * step for n, step in zip(stored_shape, strides, strict=True))
        storage = torch.frombuffer(memory, dtype=dtype, count=span, offset=offset)
        rows = storage.as_strided(stored_shape, strides)
        if shape == stored_shape:
            return rows
        return rows.reshape(-1, *shape[1:])[info.first_row : info.first_row + shape[0]]
    if info.dtype not in GGUF:  # the blocks of a slice may begin within a row
        offset += info.first_row * prod(shape[1:]) * dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)


def open_sources(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorSource]:
    """Maps tensors into memory, opening each file once."""
    if not tensors:
        return {}
    by_file: dict[Path, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        if not info.chunks:
            by_file.setdefault(info.file, {})[name] = info
    sources: dict[str, TensorSource] = {}
    for file, infos in by_file.items():
        sources |= _open_file_sources(file, infos)
    scales = open_sources({name: info.scale for name, info in tensors.items() if info.scale})
    block_scales = open_sources({n: i.block_scales for n, i in tensors.items() if i.block_scales})
    for name, info in tensors.items():
        if info.chunks:
            chunks = open_sources({str(i): chunk for i, chunk in enumerate(info.chunks)})
            sources[name] = concat_sources(list(chunks.values()), info.shape)
        elif name in block_scales:
            sources[name] = _make_nvfp4_source(sources[name], scales[name], block_scales[name])
        elif name in scales:
            sources[name] = _make_scaled_source(sources[name], scales[name], info)
    return sources


def _open_file_sources(file: Path, infos: Mapping[str, TensorInfo]) -> dict[str, TensorSource]:
    """Maps tensors of one file; a source of scaled values reads them without their scales."""
    mapped_file = MappedFile.open(file, next(iter(infos.values())).state)
    try:
        views = map_tensors(file, infos)
    except (OSError, LookupError, ValueError):
        mapped_file.check()  # it may have changed since it was opened
        raise
    return {
        name: _make_gguf_source(views[name], info, mapped_file)
        if info.dtype in GGUF
        else _make_view_source(views[name], mapped_file)
        for name, info in infos.items()
    }


def _make_view_source(view: Tensor, file: MappedFile | None = None) -> TensorSource:
    """Returns a source that reads rows of a view of a mapped file."""
    view = view.reshape(1) if view.dim() == 0 else view
    return TensorSource(view.dtype, tuple(view.shape), view.__getitem__, view, file)


def _make_scaled_source(
    quantized: TensorSource, scale: TensorSource, info: TensorInfo
) -> TensorSource:
    """Returns a source of FP8 or int8 values times their scale, float32."""
    num_columns = prod(quantized.shape[1:])
    block_rows, block_columns = info.scale_block or (1, num_columns)
    scales, is_scalar = scale.read(slice(None)).float(), prod(scale.shape) == 1
    scales = scales.reshape(-1, -(-num_columns // max(1, block_columns)))

    def read(rows: slice) -> Tensor:
        values = quantized.read(rows).to(torch.float32, memory_format=torch.contiguous_format)
        if is_scalar:
            return values.mul_(scales.view(()))
        first_row = info.first_row + rows.indices(quantized.shape[0])[0]
        matrix = values.view(len(values), num_columns)
        multiply_by_block_scales(matrix, scales, first_row, (block_rows, block_columns))
        return values

    mapped_tensor, file = quantized.mapped_tensor, quantized.file
    return TensorSource(torch.float32, quantized.shape, read, mapped_tensor, file)


def _make_nvfp4_source(
    packed: TensorSource, scale: TensorSource, block_scales: TensorSource
) -> TensorSource:
    """Returns a source that dequantizes NVFP4."""
    num_rows, columns = packed.shape[0], 2 * packed.shape[1]
    tensor_scale = scale.read(slice(None)).float()

    def read(row_slice: slice) -> Tensor:
        scales = untile_scales(block_scales.read_checked(slice(None)), num_rows)
        return dequantize_nvfp4(packed.read(row_slice), scales[row_slice], tensor_scale)

    return TensorSource(torch.float32, (num_rows, columns), read, packed.mapped_tensor, packed.file)


def _make_gguf_source(data: Tensor, info: TensorInfo, file: MappedFile) -> TensorSource:
    """Returns a source that dequantizes GGUF; blocks may span rows, if the tensor was flattened."""
    block_values, block_bytes = GGUF[info.dtype]
    row_elements, blocks = prod(info.shape[1:]), data.view(-1, block_bytes)

    def read(rows: slice) -> Tensor:
        start, stop = (info.first_row + row for row in rows.indices(info.shape[0])[:2])
        first_block = start * row_elements // block_values
        end_block = -(-stop * row_elements // block_values)
        elements = dequantize_gguf(info.dtype, blocks[first_block:end_block]).view(-1)
        elements = elements[start * row_elements - first_block * block_values :]
        return elements[: (stop - start) * row_elements].view(stop - start, *info.shape[1:])

    return TensorSource(torch.float32, info.shape, read, data, file)


def open_weight_only_sources(weights: Mapping[str, TensorInfo]) -> dict[str, TensorSource]:
    """Returns sources of the buffers of weight-only quantized layers (layer -> its weight)."""
    infos = {f"{layer}.weight": view_as_bytes(info) for layer, info in weights.items()}
    scales = {f"{layer}.weight_scale": i.scale for layer, i in weights.items() if i.dtype in FP8}
    infos |= {name: info for name, info in scales.items() if info is not None}
    sources = open_sources(infos)
    for name, info in scales.items():
        values = torch.ones(1) if info is None else sources[name].read(slice(None)).float()
        weight = weights[name.removesuffix(".weight_scale")]
        sources[name] = _make_view_source(values.reshape(weight.scale_shape))
    return sources


def make_dit_dtype_rule(compute_dtype: torch.dtype, convert_all: bool) -> DtypeRule:
    """Returns the rule for the dtypes of a DiT's parameters, which depends on their names.

    Args:
        compute_dtype: The dtype of the blocks' matrix products.
        convert_all: All parameters have it (`convert_model_dtype`). Otherwise parameters that the
            official code computes with in float32 stay float32.
    """
    return lambda name, _: torch.float32 if keeps_fp32(name) and not convert_all else compute_dtype


def open_int8_sources(export: Export, dtype: torch.dtype) -> dict[str, TensorSource]:
    """Returns sources of the buffers of int8 layers, with scales and biases rounded to a dtype."""
    layers = export.linears.items()
    infos = {f"{name}.{suffix}": i for name, layer in layers for suffix, i in layer.tensors.items()}
    sources = open_sources(infos)
    for name, source in list(sources.items()):
        if name.endswith((".weight_scale", ".bias")):
            sources[name] = _make_rounded_source(source, dtype)
        elif name.endswith(".mul_scale"):
            sources[name.removesuffix("mul_scale") + "factors"] = sources.pop(name)
    return sources


def _make_rounded_source(source: TensorSource, dtype: torch.dtype) -> TensorSource:
    """Returns a source that rounds a vector or a column to a dtype, as a vector."""
    read, shape, file = source.read, source.shape[:1], source.file
    return TensorSource(dtype, shape, lambda rows: read(rows).reshape(-1).to(dtype), file=file)


Rotation = tuple[Tensor, Tensor]


def load_rotations(quantized_dit: QuantizedDit) -> dict[tuple[str, int], Rotation]:
    """Loads the exported rotations of queries and keys for FP8 attention, [D,D] on the CPU.

    Returns:
        (expert, block index) -> rotations; other layers run attention in the run's dtype.
    """
    layers = {
        (expert, index): layer.tensors
        for expert, export in quantized_dit.experts.items()
        for index, layer in export.attentions.items()
        if layer.algorithm == FP8_DYNAMIC
    }
    infos = {f"{key}{name}": i for key, tensors in layers.items() for name, i in tensors.items()}
    sources = open_sources(infos)

    def read_matrix(name: str) -> Tensor:
        return sources[name].read(slice(None)).clone()

    return {key: (read_matrix(f"{key}q_rot"), read_matrix(f"{key}k_rot")) for key in layers}
