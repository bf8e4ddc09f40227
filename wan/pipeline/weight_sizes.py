"""Sums the weights of the networks from the headers of their files; without torch.

The estimate and the planner use the same sums. `TensorSource.stays_mapped` decides which weights
are views of their files when they are loaded; here its rule is applied to the headers, because
views need torch. A test compares the sums with loaded networks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint.config import BLOCK_PREFIXES, match_adapter
from wan.checkpoint.formats.headers import (
    read_file_headers,
    read_folder_headers,
)
from wan.checkpoint.formats.tensor_info import (
    FLOATS,
    FP8,
    GGUF,
    TensorInfo,
    get_tensor_alignment,
    view_as_bytes,
)
from wan.checkpoint.lora.deltas import WeightDelta, list_factor_shapes
from wan.checkpoint.lora.folder import find_lora_files
from wan.checkpoint.lora.resolve import collect_deltas
from wan.checkpoint.names.keymaps import rename_t5_to_transformers, rename_vae_to_diffusers
from wan.checkpoint.quant.metadata import collect_network_tensors
from wan.pipeline.setup import Setup
from wan.settings.numerics import keeps_fp32
from wan.tasks.base import build_dit

Tensors = Mapping[str, TensorInfo]
PRECISION_DTYPES = {"bf16": "BF16", "fp32": "F32"}
_ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I8": 1, "U8": 1, **dict.fromkeys(FP8, 1)}
# Elements of the published networks.
_TEXT_ENCODER_ELEMENTS, _EMBEDDING_ELEMENTS = 5_680_910_336, 1_050_148_864  # stored in bfloat16
VAE_ELEMENTS = {"2.1": 126_892_531, "2.2": 704_688_668}  # stored in float32
_NUM_TEXT_BLOCKS = 24
_EMBEDDING, _TIED_EMBEDDING = "shared.weight", "encoder.embed_tokens.weight"  # one parameter
_W8A8_DTYPES = {"weight": "I8", "weight_scale": "F32", "bias": "F32"}  # of `W8A8Linear`


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a network's weights on the rank that needs the most memory.

    Attributes:
        allocated: Allocated weights. The following sizes but `mapped` are parts of it.
        mapped: Memory-mapped weights, only on a CPU.
        block: A block with its adapter modules, on average.
        all_blocks: All blocks, which `offload_model=block` copies.
        plain_block: The largest block, without its adapter modules.
        adapters: The largest adapter modules of a block.
    """

    allocated: int
    mapped: int = 0
    block: int = 0
    all_blocks: int = 0
    plain_block: int = 0
    adapters: int = 0

    @property
    def largest_block(self) -> int:
        """The largest block with its adapter modules."""
        return self.plain_block + self.adapters


class _TensorSizes:
    """Computes the bytes of loaded tensors.

    Attributes:
        can_map: Tensors of the final dtype that are aligned like a copy are views of their files.
        num_ranks: Number of ranks that shard the rows.
    """

    def __init__(self, can_map: bool, num_ranks: int = 1) -> None:
        self.can_map, self.num_ranks = can_map, num_ranks

    def compute(self, info: TensorInfo, dtype: str, may_map: bool = True) -> tuple[int, int]:
        """Returns the allocated and the mapped bytes of a tensor that is loaded in a dtype."""
        rows, *columns = info.shape or (1,)
        row_bytes = prod(columns) * _ITEMSIZE[dtype]
        if self.can_map and may_map and info.dtype == dtype and not (info.scale or info.chunks):
            offset = info.data_offset + info.first_row * row_bytes
            if offset % get_tensor_alignment(_ITEMSIZE[dtype]) == 0:
                return 0, rows * row_bytes
        return -(-rows // self.num_ranks) * row_bytes, 0


def sum_weights(
    tensors: Tensors, get_dtype: Callable[[TensorInfo], str], can_map: bool
) -> WeightBytes:
    """Sums the weights of a network that is not sharded.

    Args:
        get_dtype: Returns the dtype of a tensor after loading.
        can_map: The network is on a CPU.
    """
    sizes = _TensorSizes(can_map)
    loaded = [sizes.compute(info, get_dtype(info)) for info in tensors.values()]
    return WeightBytes(*(sum(size[i] for size in loaded) for i in (0, 1)))


def sum_vae_weights(setup: Setup, device: str, tensors: Tensors) -> WeightBytes:
    """Sums the weights of the VAE."""
    dtype, has_file = PRECISION_DTYPES[setup.execution.vae_precision], setup.checkpoint.vae
    return sum_weights(tensors, lambda _: dtype, device == "cpu" and has_file is not None)


def sum_dit_weights(setup: Setup, device: str, num_ranks: int) -> WeightBytes:
    """Sums the weights of the first expert's DiT. num_ranks: Number of ranks that shard them."""
    allocated_bytes = mapped_bytes = 0
    blocks, adapters = Counter[str](), Counter[str]()
    for name, allocated, mapped in _iter_dit_weights(setup, device, num_ranks):
        allocated_bytes, mapped_bytes = allocated_bytes + allocated, mapped_bytes + mapped
        if name.startswith("blocks."):
            blocks[name.split(".", 2)[1]] += allocated
        elif match := match_adapter(name):
            adapters[match[1]] += allocated
    all_blocks = blocks.total() + adapters.total()
    return WeightBytes(
        allocated_bytes,
        mapped_bytes,
        -(-all_blocks // setup.checkpoint.config["num_layers"]),
        all_blocks,
        max(blocks.values()),
        max(adapters.values(), default=0),
    )


def _iter_dit_weights(setup: Setup, device: str, num_ranks: int) -> Iterator[tuple[str, int, int]]:
    """Yields each tensor's name and its allocated and mapped bytes."""
    expert, files = next(iter(setup.checkpoint.experts.items()))
    execution, config = setup.execution, setup.checkpoint.config
    compute_dtype = PRECISION_DTYPES[execution.get_dit_precision(device)]
    can_map = device == "cpu" and not setup.parallel.dit_fsdp and bool(files.tensors)
    sizes = _TensorSizes(can_map, num_ranks)
    tensors = files.tensors or list_reference_tensors(tuple(config.items()))
    linears = {} if setup.quantized_dit is None else setup.quantized_dit.experts[expert].linears
    unconverted = find_unconverted_layers(setup, expert, device)
    lora_changes = collect_deltas(setup.loras.get(expert, ()))
    for name, info in tensors.items():
        layer, _, suffix = name.rpartition(".")
        if layer in linears:
            continue
        if suffix == "weight" and layer in unconverted:
            stored, changes = view_as_bytes(info), unconverted[layer][1]
            yield name, *sizes.compute(stored, stored.dtype)
            num_lora = sum(map(prod, list_factor_shapes(changes).values()))
            scale_bytes = 4 * prod(info.scale_shape) if info.dtype in FP8 else 0
            yield name, scale_bytes + num_lora * _ITEMSIZE[compute_dtype], 0
            continue
        is_fp32 = keeps_fp32(name) and not execution.convert_model_dtype
        dtype = "F32" if is_fp32 else compute_dtype
        yield name, *sizes.compute(info, dtype, name not in lora_changes)
    linear_dtypes = {**_W8A8_DTYPES, "mul_scale": compute_dtype}
    for layer, linear in linears.items():
        for suffix, info in linear.tensors.items():
            if device == "npu":  # as stored
                yield layer, info.nbytes, 0
            elif suffix in linear_dtypes:
                may_map = suffix in ("weight", "mul_scale")
                yield layer, *sizes.compute(info, linear_dtypes[suffix], may_map)


def find_unconverted_layers(
    setup: Setup, expert: str, device: str
) -> dict[str, tuple[TensorInfo, list[WeightDelta]]]:
    """Finds the linear layers of the blocks whose weights stay FP8 or GGUF in memory.

    A layer for which a LoRA file contains a full weight is not among them: the weight is merged.

    Returns:
        Layer -> its weight in the file, and its LoRA changes.
    """
    dtypes = setup.unconverted_dtypes(device)
    lora_changes = collect_deltas(setup.loras.get(expert, ()))
    layers = {}
    for name, info in setup.checkpoint.experts[expert].tensors.items() if dtypes else ():
        layer, _, suffix = name.rpartition(".")
        is_linear = suffix == "weight" and len(info.shape) == 2 and name.startswith(BLOCK_PREFIXES)
        if is_linear and info.dtype in dtypes:
            changes = lora_changes.get(name, [])
            has_whole_groups = not info.shape[-1] % GGUF.get(info.dtype, (1, 1))[0]
            if has_whole_groups and all(change.is_separable for change in changes):
                layers[layer] = info, changes
    return layers


@lru_cache(maxsize=4)
def list_reference_tensors(config: tuple[tuple[str, Any], ...]) -> dict[str, TensorInfo]:
    """Lists the tensors of a network without files, which only a plan or a program with torch has.

    Args:
        config: The items of its `DitConfig`.
    """
    from wan.checkpoint.load import build_on_meta_device

    parameters = dict(build_on_meta_device(lambda: build_dit(dict(config))).named_parameters())
    return {
        name: TensorInfo(Path(), name, "", tuple(parameter.shape), 0)
        for name, parameter in parameters.items()
    }


def list_video_lora_factors(
    setup: Setup, expert: str, device: str
) -> list[tuple[str, dict[str, tuple[int, ...]], str]]:
    """Lists layer, shapes of the factors by name, and dtype, for each LoRA of an expert."""
    compute_dtype = PRECISION_DTYPES[setup.execution.get_dit_precision(device)]
    factors = []
    for entry in setup.video_loras.get(expert, ()):
        for parameter, deltas in entry.lora.deltas.items() if entry.scale else ():
            layer, _, suffix = parameter.rpartition(".")
            is_fp32 = keeps_fp32(parameter) and not setup.execution.convert_model_dtype
            shapes: dict[str, tuple[int, ...]] = {suffix: (prod(deltas[0].infos[0].shape),)}
            if suffix == "weight":
                shapes = {**list_factor_shapes(deltas)}
            factors.append((layer, shapes, "F32" if is_fp32 else compute_dtype))
    return factors


def sum_video_loras(setup: Setup, device: str) -> int:
    """Sums the factors of the video's LoRAs that are in memory at once.

    These are one expert's. A CPU's memory also has the cache, with those of the other expert.
    Without LoRAs of this video it is the largest file of `lora_folder`, for other videos.
    """
    if not setup.video_loras:
        folder = setup.lora_options.lora_folder
        files = () if folder is None else find_lora_files(folder).values()
        return max((file.stat().st_size for file in files if file.exists()), default=0)
    sizes = [
        sum(
            _ITEMSIZE[dtype] * sum(map(prod, shapes.values()))
            for _, shapes, dtype in list_video_lora_factors(setup, expert, device)
        )
        for expert in setup.video_loras
    ]
    cached_bytes = int(setup.lora_options.lora_cache * 1e9) if device == "cpu" else 0
    return min(sum(sizes), max(sizes) + cached_bytes)


def sum_text_encoder_weights(
    setup: Setup, device: str, tensors: Tensors, num_ranks: int
) -> WeightBytes:
    """Sums the weights of the text encoder; its blocks are all weights but the embedding.

    Args:
        tensors: By name in transformers.
        num_ranks: Number of ranks that shard the weights.
    """
    has_file, precision = setup.checkpoint.text_encoder, setup.execution.get_precision(device)
    is_sharded = num_ranks > 1 or setup.parallel.t5_fsdp
    can_map = device == "cpu" and has_file is not None and not is_sharded
    sizes = _TensorSizes(can_map, num_ranks)

    def get_dtype(info: TensorInfo) -> str:
        stored_dtype = info.dtype if info.dtype in FLOATS else "F32"
        return stored_dtype if precision == "fp32" else PRECISION_DTYPES[precision]

    tensors = {name: info for name, info in tensors.items() if name != _TIED_EMBEDDING}
    loaded = {name: sizes.compute(info, get_dtype(info)) for name, info in tensors.items()}
    allocated, mapped = (sum(size[i] for size in loaded.values()) for i in (0, 1))
    all_blocks = allocated - loaded.get(_EMBEDDING, (0, 0))[0]
    num_blocks = len({name.split(".")[2] for name in tensors if ".block." in name})
    return WeightBytes(allocated, mapped, all_blocks // max(1, num_blocks), all_blocks)


def read_text_encoder_tensors(setup: Setup) -> Tensors:
    """Returns the tensors of the text encoder.

    Without a file they are an embedding and blocks with the proportions of umt5-xxl.
    """
    path = setup.checkpoint.text_encoder
    if path is not None:
        return _read_component_tensors(path, rename_t5_to_transformers, "text_encoder")
    elements = {_EMBEDDING: _EMBEDDING_ELEMENTS}
    block, other = divmod(_TEXT_ENCODER_ELEMENTS - _EMBEDDING_ELEMENTS, _NUM_TEXT_BLOCKS)
    elements |= {f"encoder.block.{index}.": block for index in range(_NUM_TEXT_BLOCKS)}
    elements["encoder.final_layer_norm.weight"] = other
    return {name: _make_flat_tensor("BF16", count) for name, count in elements.items()}


def read_vae_tensors(setup: Setup) -> Tensors:
    """Returns the tensors of the VAE; without a file, one tensor."""
    path = setup.checkpoint.vae
    if path is not None:
        return _read_component_tensors(path, rename_vae_to_diffusers, "vae")
    return {"": _make_flat_tensor("F32", VAE_ELEMENTS[setup.preset.vae])}


def _read_component_tensors(path: Path, rename: Callable[[str], str], component: str) -> Tensors:
    tensors = read_file_headers(path) if path.is_file() else read_folder_headers(path)
    return collect_network_tensors(tensors or {}, rename, component)


def _make_flat_tensor(dtype: str, elements: int) -> TensorInfo:
    return TensorInfo(Path(), "", dtype, (elements,), elements * _ITEMSIZE[dtype])
