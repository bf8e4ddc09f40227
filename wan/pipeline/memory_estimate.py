"""Estimates the memory of each stage of a run, and compares it with the free memory; without torch.

`compute_stage_memory` is the only function that adds up the memory in use at the same time, and
`wan.pipeline.weight_sizes` the only module that computes weights. Activations have two sources,
since running layers on tensors without data, as `wan.planner.measure` does, takes torch:
`estimate_network_sizes` applies formulas, which take milliseconds and are never too high.

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

from wan.modules.lockstep import can_run_in_lockstep
from wan.pipeline import weight_sizes
from wan.pipeline.preview import count_preview_latents
from wan.pipeline.setup import Setup
from wan.pipeline.weight_sizes import WeightBytes
from wan.settings import devices
from wan.settings.devices import Capabilities
from wan.settings.errors import InputError
from wan.settings.execution import count_block_buffers
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.parallel import Parallel
from wan.tasks.base import VideoParams
from wan.utils import system

Usage = Counter[str]
"""Bytes by purpose: "DiT weights", "latents", ... (printed by `--plan`)."""

# Copies of the latents that the solver and both branches hold during a forward, as a test measures.
RESERVED_BYTES = 1 << 30  # of a device, for kernels and fragmentation
LATENT_COPIES = 6
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
class NetworkSize:
    """Bytes of the text encoder or a DiT on the rank that needs the most memory.

    Attributes:
        cached: State that is kept between forwards (text K/V, step cache, masks).
        activations: Everything else at the peak of a forward.
        per_clip: State that is kept between the forwards of a clip (kept K/V), of all layers.
    """

    weights: WeightBytes
    cached: Usage = field(default_factory=Usage)
    activations: Usage = field(default_factory=Usage)
    per_clip: Usage = field(default_factory=Usage)


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
        preview_activations: Activations of the VAE between two steps; empty without previews.
    """

    text: NetworkSize | None
    clip: WeightBytes
    vae: WeightBytes
    encoding_activations: Usage
    decoding_activations: Usage
    dit: NetworkSize
    preview_activations: Usage = field(default_factory=Usage)


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
            count_block_buffers(device) * sizes.text.weights.block
            if is_streamed
            else sizes.text.weights.allocated
        )
        add_stage("text encoder", Usage({"text encoder weights": weights}), sizes.text.activations)
    if keeps_all:  # otherwise CLIP is released before the VAE is loaded
        retained_usage.update({"CLIP weights": sizes.clip.allocated})
    vae = Usage({"VAE weights": sizes.vae.allocated})
    if sizes.encoding_activations:
        add_stage("image encoder", vae, sizes.encoding_activations)
    dit_weights, layers = sizes.dit.weights, setup.checkpoint.config["num_layers"]
    dit_bytes = dit_weights.allocated
    if num_blocks := layers - execution.count_blocks_on_device(layers, device):
        surplus = dit_weights.largest_block - dit_weights.block  # of each buffer
        dit_bytes += count_block_buffers(device) * surplus - num_blocks * dit_weights.block
    num_networks = len(setup.preset.experts) if keeps_all else 1
    dit_usage = sizes.dit.cached + Usage({"DiT weights": dit_bytes})
    dit_usage = Usage({name: num_networks * size for name, size in dit_usage.items()})
    previous_clip = Usage(params.task.estimate_host_bytes(params) if device == "cpu" else {})
    # A preview is decoded after the forwards of a step.
    activations = max(sizes.dit.activations, sizes.preview_activations, key=Usage.total)
    denoising = activations + _get_usage_per_clip(setup, sizes.dit, device)
    denoising += _estimate_denoising_inputs(params)
    denoising += previous_clip
    is_overlapped = is_decoding_overlapped(setup, params)
    if is_overlapped or params.preview:
        denoising += vae - retained_usage
    if is_overlapped:
        denoising += sizes.decoding_activations
    loras = Usage({"LoRAs": weight_sizes.sum_video_loras(setup, device)})
    add_stage("denoising", dit_usage, denoising + loras)
    decoding = sizes.decoding_activations + previous_clip
    if device == "cpu":
        decoding += loras  # they stay cached
    add_stage("decoding", vae - retained_usage, decoding)
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
        "text encoder": Usage(
            {"text encoder weights": sizes.text.weights.mapped if sizes.text else 0}
        ),
        "image encoder": Usage(
            {"VAE weights": sizes.vae.mapped if sizes.encoding_activations else 0}
        ),
        "denoising": Usage(
            {
                "DiT weights": sizes.dit.weights.mapped,
                "VAE weights": sizes.vae.mapped if sizes.preview_activations else 0,
            }
        ),
        "decoding": Usage({"VAE weights": sizes.vae.mapped}),
    }
    return {stage: +usage for stage, usage in usage_by_stage.items() if +usage}


def _estimate_denoising_inputs(params: VideoParams) -> Usage:
    latents = LATENT_COPIES * prod(params.latent_shape) * 4
    return Usage({"latents": latents, **params.task.estimate_denoise_bytes(params)})


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
    of it. The formulas leave out CLIP, the activations of a VAE that decodes in tiles, and those of
    LoRAs of single videos.
    """
    execution, device = setup.execution, find_planned_capabilities(setup).type
    is_on_device = device == "cpu" or not execution.t5_cpu
    encoded_frames = params.task.count_encoded_latents(params)
    size = encoded_frames, *params.video_size[::-1]
    encoding_bytes = estimate_vae_activations(setup, "encode", size) // _count_vae_ranks(setup)
    return NetworkSizes(
        text=_estimate_text_encoder(setup, device) if is_on_device else None,
        clip=WeightBytes(0),
        vae=weight_sizes.sum_vae_weights(setup, device, weight_sizes.read_vae_tensors(setup)),
        encoding_activations=+Usage(activations=encoding_bytes),
        decoding_activations=_estimate_decoding(setup, params),
        dit=_estimate_dit(setup, params, device),
        preview_activations=_estimate_preview(setup, params),
    )


def _count_vae_ranks(setup: Setup) -> int:
    return setup.parallel.world_size if setup.execution.vae_parallel else 1


def _estimate_decoding(setup: Setup, params: VideoParams) -> Usage:
    """Estimates the video, which is complete on the first rank, and the activations."""
    frames, (width, height) = params.task.count_decoded_latents(params), params.video_size
    pixel_frames = 1 + (frames - 1) * params.preset.vae_stride[0]
    video_bytes = 3 * pixel_frames * width * height * 4
    if setup.execution.vae_tiling:
        return Usage(activations=video_bytes)
    other_bytes = estimate_vae_activations(setup, "decode", (frames, height, width)) - video_bytes
    return Usage(activations=video_bytes + other_bytes // _count_vae_ranks(setup))


def _estimate_preview(setup: Setup, params: VideoParams) -> Usage:
    """Estimates the activations of the VAE that decodes a preview."""
    if setup.execution.vae_tiling:
        return Usage()
    size = count_preview_latents(params), *params.video_size[::-1]
    return +Usage(preview=estimate_vae_activations(setup, "decode", size))


def _estimate_text_encoder(setup: Setup, device: str) -> NetworkSize:
    """Estimates the text encoder. FSDP gathers a sharded embedding twice."""
    tensors, gathered_bytes = weight_sizes.read_text_encoder_tensors(setup), 0
    weights = unsharded = weight_sizes.sum_text_encoder_weights(setup, device, tensors, 1)
    if setup.parallel.t5_fsdp:
        gathered_bytes = 2 * (unsharded.allocated - unsharded.all_blocks)
        num_ranks = setup.parallel.world_size
        weights = weight_sizes.sum_text_encoder_weights(setup, device, tensors, num_ranks)
    return NetworkSize(weights, activations=Usage({"gathered weights": gathered_bytes}))


def count_branches(params: VideoParams, parallel: Parallel) -> int:
    """Returns the number of guidance branches that a rank computes."""
    return 2 if params.uses_guidance and parallel.cfg_size == 1 else 1


def count_block_elements(setup: Setup, params: VideoParams) -> int:
    """Returns elements of the residual stream on a rank * blocks * forward passes of a video.

    Of a video of clips, one counts: a later run may add clips, and all are computed alike.
    """
    checkpoint, parallel = setup.checkpoint, setup.parallel
    num_local_tokens = -(-params.count_clip_tokens(1) // parallel.sequence_size)
    num_blocks = checkpoint.config["num_layers"] + checkpoint.num_control_blocks
    forward_latents = params.task.make_forward_params(params).latent_shape[1]
    num_passes = len(make_noise_schedule(params).experts) * count_branches(params, parallel)
    num_passes *= params.latent_shape[1] // forward_latents
    return num_local_tokens * checkpoint.config["dim"] * num_blocks * num_passes


def runs_in_lockstep(setup: Setup, params: VideoParams, device: str) -> bool:
    """Whether both guidance branches use a block's weights together; see `wan.modules.lockstep`."""
    config, (expert, *_) = setup.checkpoint.config, setup.checkpoint.experts
    return (
        params.task.runs_in_lockstep
        and count_branches(params, setup.parallel) == 2
        and can_run_in_lockstep(params.max_clip_tokens, config["dim"], config["ffn_dim"])
        and (
            setup.execution.offload_model == "block"
            or bool(weight_sizes.find_unconverted_layers(setup, expert, device))
        )
    )


def _estimate_dit(setup: Setup, params: VideoParams, device: str) -> NetworkSize:
    """Estimates a DiT from its weights, the text K/V and the residual stream.

    At the peak the residual stream is in memory together with q, k and v or with the activations of
    the feed-forward. FSDP also gathers two blocks and the weights outside the blocks; the latter
    exist twice while they are gathered.
    """
    config, execution, parallel = setup.checkpoint.config, setup.execution, setup.parallel
    c, f, num_control = config["dim"], config["ffn_dim"], setup.checkpoint.num_control_blocks
    e = _ITEMSIZE[execution.get_dit_precision(device)]
    num_texts = count_branches(params, parallel) + (params.nag_scale is not None)
    text_bytes = num_texts * config["text_len"] * c * e
    kept_tokens = params.task.count_kept_latents(params) * prod(params.grid[1:])
    kept_bytes = config["num_layers"] * 2 * kept_tokens * c * e // parallel.sequence_size
    tokens = -(-params.max_clip_tokens // parallel.sequence_size)
    num_streams = 2 if num_control else 1  # the video stream and the control stream
    num_streams *= 1 + runs_in_lockstep(setup, params, device)
    activations = tokens * (num_streams * 4 * c + e * max(5 * c, 2 * c + f))
    gathered_bytes = 0
    weights = unsharded = weight_sizes.sum_dit_weights(setup, device, 1)
    if parallel.dit_fsdp:
        weights = weight_sizes.sum_dit_weights(setup, device, parallel.world_size)
        outside_blocks = unsharded.allocated - unsharded.all_blocks
        activations = max(outside_blocks, activations)
        gathered_bytes = outside_blocks + 2 * unsharded.plain_block
    num_layers = config["num_layers"] + num_control
    return NetworkSize(
        weights,
        cached=Usage({"text": text_bytes, "text K/V": 2 * num_layers * text_bytes}),
        activations=Usage({"activations": activations, "gathered weights": gathered_bytes}),
        per_clip=Usage({"kept K/V": kept_bytes}),
    )


def count_kv_layers_on_device(setup: Setup, device: str) -> int:
    """Counts the layers whose kept keys and values are on the device.

    Those of a reference video with streamed blocks, and those of a causal video that do not fit,
    are in host memory, but for those of two blocks and of a third whose memory is not reused yet.
    """
    num_layers: int = setup.checkpoint.config["num_layers"]
    streams_reference = setup.execution.offload_model == "block" and setup.preset.has_reference_kv
    is_streamed = device != "cpu" and (streams_reference or setup.keeps_kv_in_host_memory)
    return min(3, num_layers) if is_streamed else num_layers


def place_kept_kv(
    setup: Setup, params: VideoParams, device: str, free: int, host_memory: int | None
) -> Setup:
    """Returns the setup, with kept keys and values in host memory if they only fit there.

    Args:
        free: Bytes of the device for the whole stage of denoising, with its weights.
        host_memory: Available bytes of the host; None if unknown.
    """
    if not setup.preset.keeps_kv or device == "cpu":
        return setup
    in_host_memory = replace(setup, keeps_kv_in_host_memory=True)
    needs = [
        find_fullest_stage(x, params, only_stage="denoising", device=device)[1]
        for x in (setup, in_host_memory)
    ]
    # PyTorch rounds each page-locked tensor up to a power of two.
    host_bytes = 2 * _estimate_dit(setup, params, device).per_clip["kept K/V"]
    fits_host = host_memory is None or host_bytes * system.count_local_ranks() <= host_memory
    fits_device = needs[0] + RESERVED_BYTES <= free
    return in_host_memory if needs[1] <= free and not fits_device and fits_host else setup


def _get_usage_per_clip(setup: Setup, size: NetworkSize, device: str) -> Usage:
    """Returns the part of `NetworkSize.per_clip` on the device."""
    num_held, num_layers = (
        count_kv_layers_on_device(setup, device),
        setup.checkpoint.config["num_layers"],
    )
    return +Usage({name: x * num_held // num_layers for name, x in size.per_clip.items()})


def estimate_denoising_bytes_without_blocks(setup: Setup, params: VideoParams) -> int:
    """Estimates the bytes of denoising without the weights of the DiT's blocks.

    They are the other weights, caches, activations, latents, the VAE of previews, and the LoRAs of
    this video or the largest one of `lora_folder`, for the videos after it.
    """
    device, sizes = find_planned_capabilities(setup).type, estimate_network_sizes(setup, params)
    usage, weights = compute_stage_memory(setup, params, sizes)["denoising"], sizes.dit.weights
    next_loras = weight_sizes.sum_video_loras(replace(setup, video_loras={}), device)
    usage["LoRAs"] = max(usage["LoRAs"], next_loras)
    usage["DiT weights"] = weights.allocated - weights.all_blocks
    return usage.total()


def estimate_vae_activations(setup: Setup, direction: str, size: tuple[int, int, int]) -> int:
    """Estimates the bytes of the VAE's activations, summed over the ranks that share its rows.

    Args:
        direction: "encode" or "decode".
        size: Number of latent frames, then height and width in pixels.
    """
    version, (frames, height, width) = setup.preset.vae, size
    if frames == 0:
        return 0
    elements = sum(prod(info.shape) for info in weight_sizes.read_vae_tensors(setup).values())
    # Relative to the published VAE.
    width_ratio = min(1.0, (elements / weight_sizes.VAE_ELEMENTS[version]) ** 0.5)
    *few_frames, per_further_frame = _VAE_BYTES_PER_PIXEL[version, direction]
    bytes_per_pixel = (
        few_frames[min(frames, 3) - 1] * width_ratio * _ITEMSIZE[setup.execution.vae_precision] / 4
    )
    return int((bytes_per_pixel + max(0, frames - 3) * per_further_frame) * height * width)


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
    host_memory = system.read_available_memory()
    setup = place_kept_kv(setup, params, device, free, host_memory)
    stage, need = find_fullest_stage(setup, params, ranks_here, only_stage, device=device)
    if need <= free:
        return None
    owner = "this machine has" if device == "cpu" else "a GPU has"
    why, smaller = f"needs at least {need / 1e9:.1f} GB ({stage})", "`size` or `frame_num`"
    if setup.preset.keeps_kv and stage == "denoising":
        kept_bytes = _estimate_dit(setup, params, device).per_clip["kept K/V"]
        why += f", {kept_bytes / 1e9:.1f} GB of it for kept keys and values"
        smaller = "`size` or `local_attn_size`"
    why += f", and {owner} {free / 1e9:.1f} GB free"
    if only_stage is not None:
        return InputError("The run", why=why, remedy="use a larger machine")
    remedy = f"choose a smaller {smaller}"
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

    Decoding is estimated in tiles, since a run changes to tiles when memory runs out, and without
    previews, since a run continues without them.

    Args:
        ranks_here: Number of ranks that share the memory; on a CPU all ranks denoise, one decodes.
        only_stage: The only stage that runs; None: all stages.
        **execution: Fields of `Execution` to change.
    """
    setup = replace(setup, execution=replace(setup.execution, **execution))
    params = replace(params, preview=0)
    tiling = replace(setup.execution, vae_tiling=True, vae_parallel=False, overlap_decoding=False)
    tiled_setup = replace(setup, execution=tiling)
    sizes = estimate_network_sizes(setup, params)
    tiled_sizes = replace(sizes, decoding_activations=_estimate_decoding(tiled_setup, params))
    usage_by_stage = compute_stage_memory(setup, params, sizes)
    tiled_usage_by_stage = compute_stage_memory(tiled_setup, params, tiled_sizes)
    usage_by_stage["decoding"] = tiled_usage_by_stage["decoding"]
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
