"""Estimates the memory of each stage of a run, and compares it with the free memory; without torch.

`compute_stage_memory` is the only function that adds up the memory in use at the same time. The
sizes of the networks have two sources: `estimate_network_sizes` applies formulas to the shapes in
the checkpoint, which takes milliseconds and is never too high; `wan.planner.measure` runs the
layers on tensors without data and measures them.

Legend: c channels, f channels of the feed-forward, e bytes of an element in the matrix products.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint.config import BLOCK_PREFIXES
from wan.checkpoint.headers import read_folder_headers, read_safetensors_offsets
from wan.checkpoint.tensor_info import get_tensor_alignment
from wan.pipeline.setup import Setup
from wan.settings import devices
from wan.settings.devices import Capabilities
from wan.settings.errors import InputError
from wan.settings.execution import count_block_buffers
from wan.settings.numerics import keeps_fp32
from wan.tasks.base import VideoParams
from wan.utils import system

Usage = Counter[str]
"""Bytes by purpose: "DiT weights", "latents", ... (printed by `--plan`)."""

# Copies of the latents that the solver and both branches hold during a forward, as a test measures.
LATENT_COPIES = 6
_TEXT_ENCODER_BYTES, _EMBEDDING_BYTES = 11_361_820_672, 2_100_297_728  # umt5-xxl in bfloat16
_VAE_BYTES = {"2.1": 507_570_124, "2.2": 2_818_754_672}  # float32
# Bytes per pixel of the published VAEs in float32 with one, two and three latent frames, and for
# each further latent frame, as the planner measures them for very large frames. Small frames take
# up to 7 % more, since convolutions pad them. A test compares this table with the planner.
_VAE_BYTES_PER_PIXEL = {
    ("2.1", "decode"): (6_860, 13_040, 13_125, 50),
    ("2.2", "decode"): (5_380, 11_370, 11_455, 50),
    ("2.1", "encode"): (3_860, 8_440, 9_050, 50),
    ("2.2", "encode"): (1_630, 3_600, 3_890, 49),
}
_ITEMSIZE = {"bf16": 2, "fp32": 4}
_NPU_DRIVER = Path("/dev/davinci_manager")  # present with a driver; free memory is not read from it


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a network's weights on the rank that needs the most memory.

    Attributes:
        weights: Allocated weights.
        mapped: Memory-mapped weights, only on a CPU.
    """

    weights: int
    mapped: int = 0


@dataclass(frozen=True)
class NetworkSize:
    """Bytes of the text encoder or a DiT on the rank that needs the most memory.

    Attributes:
        weights: Allocated weights of this rank.
        block_bytes: Weights of a block with its adapter modules, on average.
        all_blocks_bytes: Weights of all blocks, which `offload_model=block` copies.
        cached: State that is kept between forwards (text K/V, step cache, masks).
        activations: Everything else at the peak of a forward.
        mapped: Memory-mapped weights, only on a CPU.
        largest_block_bytes: Weights of the largest block if blocks differ, else 0.
    """

    weights: int
    block_bytes: int
    all_blocks_bytes: int
    cached: Usage = field(default_factory=Usage)
    activations: Usage = field(default_factory=Usage)
    mapped: int = 0
    largest_block_bytes: int = 0


@dataclass(frozen=True)
class NetworkSizes:
    """Bytes of all networks of a run on the rank that needs the most memory.

    Attributes:
        text: The text encoder; None if it is not on the device.
        clip: The weights of CLIP.
        vae: The weights of the VAE.
        encoding_activations: Activations of the VAE while it encodes; empty if nothing is encoded.
        decoding_activations: Activations of the VAE and the video while it decodes.
        dit: One DiT.
    """

    text: NetworkSize | None
    clip: WeightBytes
    vae: WeightBytes
    encoding_activations: Usage
    decoding_activations: Usage
    dit: NetworkSize


def compute_stage_memory(
    setup: Setup, params: VideoParams, sizes: NetworkSizes
) -> dict[str, Usage]:
    """Computes the peak memory of each stage on the rank that needs the most memory.

    Args:
        sizes: The networks of this setup, estimated or measured.

    Returns:
        "text encoder" if it runs on the device, "image encoder" if an image is encoded, "denoising"
        and "decoding".
    """
    execution, device = setup.execution, find_planned_capabilities(setup).type
    keeps_all = execution.offload_model is False
    retained_usage, usage_by_stage = Usage(), dict[str, Usage]()

    def add_stage(name: str, weights: Usage, activations: Usage) -> None:
        usage_by_stage[name] = retained_usage + weights + activations
        if keeps_all:
            retained_usage.update(weights)

    if sizes.text is not None:
        is_streamed = execution.offload_model == "block"
        weights = (
            count_block_buffers(device) * sizes.text.block_bytes
            if is_streamed
            else sizes.text.weights
        )
        add_stage("text encoder", Usage({"text encoder weights": weights}), sizes.text.activations)
    if keeps_all:  # otherwise CLIP is released before the VAE is loaded
        retained_usage.update({"CLIP weights": sizes.clip.weights})
    vae = Usage({"VAE weights": sizes.vae.weights})
    if sizes.encoding_activations:
        add_stage("image encoder", vae, sizes.encoding_activations)
    dit, layers = sizes.dit, setup.checkpoint.config["num_layers"]
    num_blocks = layers - execution.count_blocks_on_device(layers, device)
    largest_block_surplus = (
        count_block_buffers(device) * max(dit.largest_block_bytes - dit.block_bytes, 0)
        if num_blocks
        else 0
    )
    num_networks = len(setup.preset.experts) if keeps_all else 1
    dit_usage = dit.cached + Usage(
        {"DiT weights": dit.weights - num_blocks * dit.block_bytes + largest_block_surplus}
    )
    dit_usage = Usage({name: num_networks * size for name, size in dit_usage.items()})
    previous_clip = Usage(params.task.estimate_host_bytes(params) if device == "cpu" else {})
    overlapped_decoding = (
        vae - retained_usage + sizes.decoding_activations
        if is_decoding_overlapped(setup, params)
        else Usage()
    )
    denoising = (
        dit.activations
        + _estimate_latents(params)
        + Usage(params.task.estimate_denoise_bytes(params))
        + previous_clip
    )
    add_stage("denoising", dit_usage, denoising + overlapped_decoding)
    add_stage("decoding", vae - retained_usage, sizes.decoding_activations + previous_clip)
    return usage_by_stage


def is_decoding_overlapped(setup: Setup, params: VideoParams) -> bool:
    """Returns whether a clip is decoded while the next clip is denoised."""
    has_several_clips = params.chain == "latent" and (params.num_clip or 0) > 1
    return setup.execution.overlap_decoding and has_several_clips


def get_mapped_weights_by_stage(sizes: NetworkSizes) -> dict[str, Usage]:
    """Returns the memory-mapped weights that each stage uses.

    They are not allocated by a process. The operating system caches their pages while memory is
    free, and reads them from the disk again otherwise.
    """
    usage_by_stage = {
        "text encoder": Usage({"text encoder weights": sizes.text.mapped if sizes.text else 0}),
        "image encoder": Usage(
            {"VAE weights": sizes.vae.mapped if sizes.encoding_activations else 0}
        ),
        "denoising": Usage({"DiT weights": sizes.dit.mapped}),
        "decoding": Usage({"VAE weights": sizes.vae.mapped}),
    }
    return {stage: +usage for stage, usage in usage_by_stage.items() if +usage}


def _estimate_latents(params: VideoParams) -> Usage:
    return Usage(latents=LATENT_COPIES * prod(params.latent_shape) * 4)


def find_planned_capabilities(setup: Setup) -> Capabilities:
    """Finds the capabilities of the device that the settings `device` and `chip` select.

    "auto" selects the first accelerator that can run the setup, or a CPU if none can.
    """
    candidates = devices.list_candidate_devices(setup.execution.device, setup.chip)
    for candidate in sorted(candidates, key=lambda candidate: candidate.type == "cpu"):
        try:
            setup.check_device(candidate)
        except InputError:
            continue
        return candidate
    return candidates[-1]


def estimate_network_sizes(setup: Setup, params: VideoParams) -> NetworkSizes:
    """Estimates the sizes of all networks with formulas.

    No estimate is above the planner's measurement, and that of the fullest stage is at least 85 %
    of it. Weights count with the size of their files, except weights that a CPU can memory-map.
    The formulas leave out CLIP, and the activations of a VAE that decodes in tiles.
    """
    execution, decoded_frames = setup.execution, params.task.count_decoded_latents(params)
    width, height = params.video_size
    is_on_device = find_planned_capabilities(setup).type == "cpu" or not execution.t5_cpu
    encoded_frames = params.task.count_encoded_latents(params)
    vae_itemsize = _ITEMSIZE[execution.vae_precision]
    ranks = setup.parallel.world_size if execution.vae_parallel else 1
    can_map_vae = _can_map_weights(setup, setup.checkpoint.vae) and vae_itemsize == 4
    encoding_bytes = (
        estimate_vae_activations(setup, "encode", (encoded_frames, height, width)) // ranks
    )
    pixel_frames = 1 + (decoded_frames - 1) * params.preset.vae_stride[0]
    video_bytes = 3 * pixel_frames * width * height * 4  # complete on the first rank
    decoding_bytes = (
        estimate_vae_activations(setup, "decode", (decoded_frames, height, width)) - video_bytes
    )
    return NetworkSizes(
        text=_estimate_text_encoder(setup) if is_on_device else None,
        clip=WeightBytes(0),
        vae=WeightBytes(
            0 if can_map_vae else int(_count_vae_weight_bytes(setup) * vae_itemsize / 4)
        ),
        encoding_activations=+Usage(activations=encoding_bytes),
        decoding_activations=Usage(
            activations=video_bytes + (0 if execution.vae_tiling else decoding_bytes // ranks)
        ),
        dit=_estimate_dit(setup, params),
    )


def _estimate_text_encoder(setup: Setup) -> NetworkSize:
    """Estimates the text encoder. FSDP gathers a sharded embedding twice."""
    path, parallel = setup.checkpoint.text_encoder, setup.parallel
    size = _TEXT_ENCODER_BYTES if path is None else _count_stored_bytes(path)
    embedding_bytes = _EMBEDDING_BYTES * size // _TEXT_ENCODER_BYTES
    ranks = parallel.world_size if parallel.t5_fsdp else 1
    gathered_usage = Usage({"gathered weights": 2 * embedding_bytes if parallel.t5_fsdp else 0})
    blocks = (size - embedding_bytes) // ranks
    if ranks == 1 and _can_map_weights(setup, path):
        size, blocks = 0, 0
    return NetworkSize(size // ranks, blocks // 24, blocks, activations=gathered_usage)


def _estimate_dit(setup: Setup, params: VideoParams) -> NetworkSize:
    """Estimates a DiT from its matrices, the text K/V and the residual stream.

    At the peak the residual stream is in memory together with q, k and v or with the activations of
    the feed-forward. FSDP also gathers two blocks and the weights outside the blocks; the latter
    exist twice while they are gathered.
    """
    config, execution, parallel = setup.checkpoint.config, setup.execution, setup.parallel
    c, f, layers = config["dim"], config["ffn_dim"], config["num_layers"]
    device = find_planned_capabilities(setup).type
    e = _ITEMSIZE[execution.get_dit_precision(device)]
    fp32_param_itemsize = e if execution.convert_model_dtype else 4
    # Each control block of VACE is copied together with a block.
    num_control = setup.checkpoint.num_control_blocks
    kv_channels = 2 * c if config["image_dim"] else 0  # K and V projections of the image's tokens
    block_bytes_without_control, largest_block_bytes = (8 * c + 2 * f + kv_channels) * c * e, 0
    block_bytes = (
        block_bytes_without_control * (layers + num_control) + c * c * e * num_control
    ) // layers
    if (
        num_control
        and device != "cpu"
        and setup.quantized_dit is None
        and not setup.unconverted_dtypes(device)
    ):
        largest_block_bytes = 2 * block_bytes_without_control + c * c * e
    if setup.quantized_dit is not None:
        block_bytes = (
            sum(next(iter(setup.quantized_dit.experts.values())).linear_bytes.values()) // layers
        )
    elif unconverted_dtypes := setup.unconverted_dtypes(device):
        tensors = next(iter(setup.checkpoint.experts.values())).tensors
        sizes = [
            info.nbytes if info.dtype in unconverted_dtypes else prod(info.shape) * e
            for name, info in tensors.items()
            if name.startswith(BLOCK_PREFIXES) and len(info.shape) == 2
        ]
        block_bytes = sum(sizes) // layers
    # Adapter modules, copied together with a block.
    block_bytes += params.task.count_adapter_matrices(config) * c * c * e // layers
    outside_block_bytes = (config["text_dim"] + c) * c * e + (
        config["freq_dim"] + 7 * c
    ) * c * fp32_param_itemsize
    if device == "cpu" and not parallel.dit_fsdp:
        mapped_in_blocks, mapped_outside = _estimate_mapped_dit(setup)
        mapped_in_blocks += max(0, mapped_outside - outside_block_bytes)  # adapter modules
        block_bytes = max(0, block_bytes - mapped_in_blocks // layers)
        outside_block_bytes = max(0, outside_block_bytes - mapped_outside)
    branches = 2 if params.uses_guidance and parallel.cfg_size == 1 else 1
    text_bytes = branches * execution.text_kv_cache * config["text_len"] * c * e
    tokens = -(-params.max_clip_tokens // parallel.sequence_size)
    num_streams = 2 if num_control else 1  # the video stream and the control stream
    activations = tokens * (num_streams * 4 * c + e * max(5 * c, 2 * c + f))
    gathered_bytes, ranks = 0, 1
    if parallel.dit_fsdp:
        activations, ranks = max(outside_block_bytes, activations), parallel.world_size
        gathered_bytes = outside_block_bytes + 2 * block_bytes
    return NetworkSize(
        weights=(outside_block_bytes + layers * block_bytes) // ranks,
        block_bytes=block_bytes // ranks,
        all_blocks_bytes=layers * block_bytes // ranks,
        cached=Usage({"text": text_bytes, "text K/V": 2 * (layers + num_control) * text_bytes}),
        activations=Usage({"activations": activations, "gathered weights": gathered_bytes}),
        largest_block_bytes=largest_block_bytes // ranks,
    )


def _estimate_mapped_dit(setup: Setup) -> tuple[int, int]:
    """Estimates the memory-mapped bytes of a DiT on a CPU, in its blocks and outside."""
    expert, files = next(iter(setup.checkpoint.experts.items()))
    execution, mapped_bytes = setup.execution, Counter[bool]()
    compute_dtype = {"bf16": "BF16", "fp32": "F32"}[execution.get_dit_precision("cpu")]
    dtypes = setup.unconverted_dtypes("cpu")
    names = {name for lora in setup.loras.get(expert, ()) for name in lora.deltas}
    tensors = {n: x for n, x in files.tensors.items() if n not in names or x.dtype in dtypes}
    if setup.quantized_dit is not None:
        for layer, linear in setup.quantized_dit.experts[expert].linears.items():
            tensors[f"{layer}.weight"] = linear.tensors["weight"]
    weight_files = {info.file for info in tensors.values() if info.file.suffix == ".safetensors"}
    layouts = {file: read_safetensors_offsets(file) for file in weight_files}
    for name, info in tensors.items():
        dtype = "F32" if keeps_fp32(name) and not execution.convert_model_dtype else compute_dtype
        offset = layouts[info.file][info.name][2] if info.file in layouts else info.data_offset
        itemsize = info.nbytes // max(1, prod(info.shape)) or 1  # GGUF is stored as bytes
        is_ready = (info.scale is None and info.dtype in (dtype, "I8")) or info.dtype in dtypes
        if is_ready and (info.dtype in dtypes or offset % get_tensor_alignment(itemsize) == 0):
            mapped_bytes[name.startswith(BLOCK_PREFIXES)] += info.nbytes
    return mapped_bytes[True], mapped_bytes[False]


def _can_map_weights(setup: Setup, path: Path | None) -> bool:
    """Returns whether weights may be memory-mapped: those of a file, on a CPU."""
    return path is not None and find_planned_capabilities(setup).type == "cpu"


def estimate_denoising_bytes_without_blocks(setup: Setup, params: VideoParams) -> int:
    """Estimates the bytes of denoising without the weights of the DiT's blocks.

    They are the other weights, caches, activations and latents.
    """
    dit = _estimate_dit(setup, params)
    return (
        dit.weights
        - dit.all_blocks_bytes
        + (dit.cached + dit.activations + _estimate_latents(params)).total()
    )


def estimate_vae_activations(setup: Setup, direction: str, size: tuple[int, int, int]) -> int:
    """Estimates the bytes of the VAE's activations, summed over the ranks that share its rows.

    Args:
        direction: "encode" or "decode".
        size: Number of latent frames, then height and width in pixels.
    """
    version, (frames, height, width) = setup.preset.vae, size
    if frames == 0:
        return 0
    # Relative to the published VAE.
    width_ratio = min(1.0, (_count_vae_weight_bytes(setup) / _VAE_BYTES[version]) ** 0.5)
    *few_frames, per_further_frame = _VAE_BYTES_PER_PIXEL[version, direction]
    bytes_per_pixel = (
        few_frames[min(frames, 3) - 1] * width_ratio * _ITEMSIZE[setup.execution.vae_precision] / 4
    )
    return int((bytes_per_pixel + max(0, frames - 3) * per_further_frame) * height * width)


def _count_vae_weight_bytes(setup: Setup) -> int:
    """Counts the bytes of the VAE's weights in float32."""
    path = setup.checkpoint.vae
    return _VAE_BYTES[setup.preset.vae] if path is None else _count_stored_bytes(path)


def _count_stored_bytes(path: Path) -> int:
    """Counts the bytes of the weights in a file or folder; a .pth stores them uncompressed."""
    if path.is_file():
        return path.stat().st_size
    return sum(info.nbytes for info in (read_folder_headers(path) or {}).values())


def check_memory(
    setup: Setup, params: VideoParams, ranks_here: int, stage: str | None = None
) -> None:
    """Refuses a run that needs more memory than is free, as far as both are known.

    The device "auto" is resolved later, by torch. Such a run is refused here if it fits neither on
    the accelerator nor on the CPU.

    Args:
        ranks_here: Number of ranks that share this machine's memory.
        stage: The only stage that runs, a key of `compute_stage_memory`; None: all stages.

    Raises:
        InputError: The run does not fit.
    """
    types: tuple[str, ...] = (setup.execution.device,)
    if types == ("auto",) and _NPU_DRIVER.exists():
        types = ("npu", "cpu")
    elif types == ("auto",):
        types = ("cuda", "cpu") if query_gpu_memory("free") else ("cpu",)
    refusals = [_find_memory_refusal(setup, params, ranks_here, stage, device) for device in types]
    if refusals[0] is not None and None not in refusals:
        raise refusals[0]


def _find_memory_refusal(
    setup: Setup, params: VideoParams, ranks_here: int, only_stage: str | None, device: str
) -> InputError | None:
    """Returns the refusal of a run that does not fit on this type of device, or None."""
    free = get_free_memory(device)
    if free is None:
        return None
    stage, need = find_fullest_stage(setup, params, ranks_here, only_stage, device=device)
    if need <= free:
        return None
    owner = "this machine has" if device == "cpu" else "a GPU has"
    why = f"needs at least {need / 1e9:.1f} GB ({stage}), and {owner} {free / 1e9:.1f} GB free"
    if only_stage is not None:
        return InputError("The run", why=why, remedy="use a larger machine")
    remedy = "choose a smaller `size` or `frame_num`"
    with suppress(InputError):  # a setting of the run may exclude `offload_model=block`
        _, streamed_need = find_fullest_stage(
            setup, params, ranks_here, device=device, offload_model="block"
        )
        if streamed_need <= free:
            remedy = f"use `offload_model=block` ({streamed_need / 1e9:.1f} GB)"
    return InputError("The run", why=why, remedy=f"{remedy}, or see what fits with `plan`")


def find_fullest_stage(
    setup: Setup,
    params: VideoParams,
    ranks_here: int = 1,
    only_stage: str | None = None,
    **execution: Any,
) -> tuple[str, int]:
    """Finds the stage with the highest estimate, and its bytes.

    Decoding is estimated in tiles, since a run changes to tiles when memory runs out.

    Args:
        ranks_here: Number of ranks that share the memory; on a CPU all ranks denoise, one decodes.
        only_stage: The only stage that runs; None: all stages.
        **execution: Fields of `Execution` to change.
    """
    setup = replace(setup, execution=replace(setup.execution, **execution))
    tiling = replace(setup.execution, vae_tiling=True, vae_parallel=False, overlap_decoding=False)
    tiled_setup = replace(setup, execution=tiling)
    usage_by_stage = compute_stage_memory(setup, params, estimate_network_sizes(setup, params))
    usage_by_stage["decoding"] = compute_stage_memory(
        tiled_setup, params, estimate_network_sizes(tiled_setup, params)
    )["decoding"]
    bytes_by_stage = {
        name: usage.total() for name, usage in usage_by_stage.items() if only_stage in (None, name)
    }
    if setup.execution.device == "cpu" and "denoising" in bytes_by_stage:
        bytes_by_stage["denoising"] *= ranks_here
    return max(bytes_by_stage.items(), key=lambda item: item[1])


def get_free_memory(device_type: str) -> int | None:
    """Returns the free bytes on this type of device, or None if they are unknown.

    With several GPUs it is the GPU with the most free memory.
    """
    if device_type == "cuda":
        return max(query_gpu_memory("free"), default=None)
    return system.read_available_memory() if device_type == "cpu" else None


def query_gpu_memory(kind: str) -> list[int]:
    """Queries `nvidia-smi` for the bytes of each GPU's memory; kind: "free" or "total".

    The list is empty if the program is missing, fails, lists no GPU, or takes more than five
    seconds. A result is cached for ten seconds, because each line of a prompt file needs it.
    """
    return _run_nvidia_smi(kind, int(time.monotonic()) // 10)


@lru_cache(maxsize=2)
def _run_nvidia_smi(kind: str, _: int) -> list[int]:
    command = ["nvidia-smi", f"--query-gpu=memory.{kind}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return [int(line) * 2**20 for line in result.stdout.split("\n") if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
