"""Estimates the memory of each stage of a run, and compares it with the free memory; without torch.

`compute_stage_memory` is the only function that adds up the memory in use at the same time. The
sizes of the networks have two sources: `estimate_network_sizes` applies formulas to the shapes in
the checkpoint, which takes milliseconds and is never too high; `wan.planner.measure` runs the
layers on tensors without data and measures them.

Legend: C channels, F channels of the feed-forward, e bytes of an element in the matrix products.
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
from typing import Any, cast

from wan import host
from wan.checkpoint.config import IN_BLOCKS, SoundConfig
from wan.checkpoint.files import alignment, folder_tensors, safetensors_places
from wan.pipeline.setup import Setup
from wan.settings import devices
from wan.settings.devices import Capabilities
from wan.settings.errors import InputError
from wan.settings.execution import buffers
from wan.settings.numerics import keeps_fp32
from wan.settings.presets import FACE_EVERY, FACE_SIDE
from wan.settings.request import Request
from wan.settings.sound import MOTION_FRAMES, MOTION_LATENTS

Usage = Counter[str]
"""Bytes by purpose: "DiT weights", "latents", ... (printed by `--plan`)."""

LATENTS = 6  # copies that the solver and both branches hold during a forward; counted in a test
_TEXT_ENCODER, _WORDS = 11_361_820_672, 2_100_297_728  # umt5-xxl in bfloat16, and its embedding
_VAE = {"2.1": 507_570_124, "2.2": 2_818_754_672}  # float32
# Bytes per pixel of the published VAEs in float32 with one, two and three latent frames, and for
# each further latent frame, as the planner measures them for very large frames. Small frames take
# up to 7 % more, since convolutions pad them. A test compares both.
_VAE_ACTIVATIONS = {
    ("2.1", "decode"): (6_860, 13_040, 13_125, 50),
    ("2.2", "decode"): (5_380, 11_370, 11_455, 50),
    ("2.1", "encode"): (3_860, 8_440, 9_050, 50),
    ("2.2", "encode"): (1_630, 3_600, 3_890, 49),
}
_ITEMSIZE = {"bf16": 2, "fp32": 4}
_NPU_DRIVER = Path("/dev/davinci_manager")  # present with a driver; free memory is not read from it


@dataclass(frozen=True)
class Weights:
    """Bytes of a network's weights on the rank with the most memory.

    Attributes:
        weights: Allocated weights.
        mapped: Memory-mapped weights, only on a CPU.
    """

    weights: int
    mapped: int = 0


@dataclass(frozen=True)
class NetworkSize:
    """Bytes of the text encoder or a DiT on the rank with the most memory.

    Attributes:
        weights: Allocated weights of this rank.
        block: Weights of a block with its adapter modules, on average.
        blocks: Weights of all blocks, which `offload_model=block` copies.
        cached: State that is kept between forwards (text K/V, step cache, masks).
        activations: Everything else at the peak of a forward.
        mapped: Memory-mapped weights, only on a CPU.
        largest_block: Weights of the largest block if blocks differ, else 0.
    """

    weights: int
    block: int
    blocks: int
    kept: Usage = field(default_factory=Usage)
    activations: Usage = field(default_factory=Usage)
    mapped: int = 0
    largest: int = 0


@dataclass(frozen=True)
class Sizes:
    """Bytes of all networks of a run on the rank with the most memory.

    Attributes:
        text: The text encoder; None if it is not on the device.
        clip: The weights of CLIP.
        vae: The weights of the VAE.
        encoding: Activations of the VAE while it encodes; empty if nothing is encoded.
        decoding: Activations of the VAE and the video while it decodes.
        dit: One DiT.
    """

    text: NetworkSize | None
    clip: Weights
    vae: Weights
    encoding: Usage
    decoding: Usage
    dit: NetworkSize


def stages(setup: Setup, request: Request, sizes: Sizes) -> dict[str, Usage]:
    """Computes the peak memory of each stage on the rank with the most memory.

    Args:
        sizes: The networks of this setup, estimated or measured.

    Returns:
        "text encoder" if it runs on the device, "image encoder" if an image is encoded, "denoising"
        and "decoding".
    """
    execution, device = setup.execution, planned_device(setup).type
    keeps_all = execution.offload_model is False
    stays, found = Usage(), dict[str, Usage]()

    def stage(name: str, weights: Usage, activations: Usage) -> None:
        found[name] = stays + weights + activations
        if keeps_all:
            stays.update(weights)

    if sizes.text is not None:
        streams = execution.offload_model == "block"
        weights = buffers(device) * sizes.text.block if streams else sizes.text.weights
        stage("text encoder", Usage({"text encoder weights": weights}), sizes.text.activations)
    if keeps_all:  # otherwise CLIP is released before the VAE is loaded
        stays.update({"CLIP weights": sizes.clip.weights})
    vae = Usage({"VAE weights": sizes.vae.weights})
    if sizes.encoding:
        stage("image encoder", vae, sizes.encoding)
    dit, layers = sizes.dit, setup.checkpoint.config["num_layers"]
    absent = layers - execution.blocks_held(layers, device)
    more = buffers(device) * max(dit.largest - dit.block, 0) if absent else 0
    networks = len(setup.preset.experts) if keeps_all else 1
    resident = dit.kept + Usage({"DiT weights": dit.weights - absent * dit.block + more})
    resident = Usage({name: networks * size for name, size in resident.items()})
    before = _clip_before(request) if device == "cpu" else Usage()
    beside = vae - stays + sizes.decoding if overlaps(setup, request) else Usage()
    denoising = dit.activations + _latents(request) + _faces(request) + before
    stage("denoising", resident, denoising + beside)
    stage("decoding", vae - stays, sizes.decoding + before)
    return found


def overlaps(setup: Setup, request: Request) -> bool:
    """Returns whether a clip is decoded while the next clip is denoised."""
    several = request.chain == "latent" and (request.num_clip or 0) > 1
    return setup.execution.overlap_decoding and several


def mapped(sizes: Sizes) -> dict[str, Usage]:
    """Sums the memory-mapped weights of each stage.

    They are not allocated by a process. The operating system caches their pages while memory is
    free, and reads them from the disk again otherwise.
    """
    found = {
        "text encoder": Usage({"text encoder weights": sizes.text.mapped if sizes.text else 0}),
        "image encoder": Usage({"VAE weights": sizes.vae.mapped if sizes.encoding else 0}),
        "denoising": Usage({"DiT weights": sizes.dit.mapped}),
        "decoding": Usage({"VAE weights": sizes.vae.mapped}),
    }
    return {stage: +usage for stage, usage in found.items() if +usage}


def _latents(request: Request) -> Usage:
    return Usage(latents=LATENTS * prod(request.latent_shape) * 4)


def _faces(request: Request) -> Usage:
    """Estimates the face images of a clip of Animate."""
    pictures = request.frame_num if request.preset.kind == "animate" else 0
    return +Usage({"pictures of the face": 3 * pictures * FACE_SIDE**2 * 4})


def _clip_before(request: Request) -> Usage:
    """Estimates the frames of the previous clip that are kept in host memory."""
    if request.infer_frames is None:
        return Usage()
    width, height = request.video_size
    return Usage({"frames of the clip before": 3 * MOTION_FRAMES * height * width * 4})


def planned_device(setup: Setup) -> Capabilities:
    """Finds the device that the settings `device` and `chip` select.

    "auto" selects the first accelerator that can run the setup, or a CPU if none can.
    """
    rows = devices.candidates(setup.execution.device, setup.chip)
    for row in sorted(rows, key=lambda row: row.type == "cpu"):
        try:
            setup.check_device(row)
        except InputError:
            continue
        return row
    return rows[-1]


def estimate(setup: Setup, request: Request) -> Sizes:
    """Estimates the sizes of all networks with formulas.

    No estimate is above the planner's measurement, and that of the fullest stage is at least 85 %
    of it. Weights count with the size of their files, except weights that a CPU can memory-map.
    The formulas leave out CLIP, and the activations of a VAE that decodes in tiles.
    """
    execution, frames = setup.execution, decoded_frames(request)
    width, height = request.video_size
    is_on_device = planned_device(setup).type == "cpu" or not execution.t5_cpu
    encoded, vae_size = encoded_frames(request), _ITEMSIZE[execution.vae_precision]
    ranks = setup.parallel.world_size if execution.vae_parallel else 1
    may_stay = _may_stay(setup, setup.checkpoint.vae) and vae_size == 4
    encoding = vae_activations(setup, "encode", (encoded, height, width)) // ranks
    pixel_frames = 1 + (frames - 1) * request.preset.vae_stride[0]
    video = 3 * pixel_frames * width * height * 4  # complete on the first rank
    decoding = vae_activations(setup, "decode", (frames, height, width)) - video
    return Sizes(
        text=_text_encoder(setup) if is_on_device else None,
        clip=Weights(0),
        vae=Weights(0 if may_stay else int(_vae_weights(setup) * vae_size / 4)),
        encoding=+Usage(activations=encoding),
        decoding=Usage(activations=video + (0 if execution.vae_tiling else decoding // ranks)),
        dit=_transformer(setup, request),
    )


def encoded_frames(request: Request) -> int:
    """Counts the latent frames that the VAE encodes at once.

    They are a padded video (i2v), an image (ti2v, latent clip transition), the end of the previous
    clip (s2v), a clip (animate) or a control video (vace).
    """
    if request.preset.kind == "animate":
        return request.latent_shape[1] - 1
    if request.infer_frames is not None:
        return 1 if request.num_clip == 1 and not request.start_from_ref else MOTION_LATENTS
    if request.preset.kind == "vace":
        return request.latent_shape[1] - request.references
    if request.preset.kind == "i2v":
        return 1 if request.chain == "latent" else request.latent_shape[1]
    return int(request.preset.kind == "ti2v" and request.image_size is not None)


def decoded_frames(request: Request) -> int:
    """Counts the latent frames that the VAE decodes at once.

    A clip of s2v is decoded together with the encoded end of the previous clip.
    """
    if request.preset.kind == "animate":
        return request.latent_shape[1] - 1
    before = encoded_frames(request) if request.preset.kind == "s2v" else 0
    return before + request.latent_shape[1] - request.references


def _text_encoder(setup: Setup) -> NetworkSize:
    """Estimates the text encoder. FSDP gathers a sharded embedding twice."""
    path, parallel = setup.checkpoint.text_encoder, setup.parallel
    size = _TEXT_ENCODER if path is None else _stored(path)
    words = _WORDS * size // _TEXT_ENCODER
    ranks = parallel.world_size if parallel.t5_fsdp else 1
    gathered = Usage({"gathered weights": 2 * words if parallel.t5_fsdp else 0})
    blocks = (size - words) // ranks
    if ranks == 1 and _may_stay(setup, path):
        size, blocks = 0, 0
    return NetworkSize(size // ranks, blocks // 24, blocks, activations=gathered)


def _transformer(setup: Setup, request: Request) -> NetworkSize:
    """Estimates a DiT from its matrices, the text K/V and the residual stream.

    At the peak the residual stream is in memory together with q, k and v or with the activations of
    the feed-forward. FSDP also gathers two blocks and the weights outside the blocks; the latter
    exist twice while they are gathered.
    """
    config, execution, parallel = setup.checkpoint.config, setup.execution, setup.parallel
    c, f, layers = config["dim"], config["ffn_dim"], config["num_layers"]
    device = planned_device(setup).type
    e = _ITEMSIZE[execution.dit_precision_on(device)]
    fp32 = e if execution.convert_model_dtype else 4
    control = setup.checkpoint.control_blocks  # of VACE; each is copied together with a block
    image = 2 * c if config["image_dim"] else 0  # K and V projections of the image's tokens
    one, largest = (8 * c + 2 * f + image) * c * e, 0
    block = (one * (layers + control) + c * c * e * control) // layers
    if control and device != "cpu" and setup.quantised is None and not setup.kept(device):
        largest = 2 * one + c * c * e
    if setup.quantised is not None:
        block = sum(next(iter(setup.quantised.experts.values())).sizes.values()) // layers
    elif kinds := setup.kept(device):
        tensors = next(iter(setup.checkpoint.experts.values())).tensors
        sizes = [
            info.nbytes if info.dtype in kinds else prod(info.shape) * e
            for name, info in tensors.items()
            if name.startswith(IN_BLOCKS) and len(info.shape) == 2
        ]
        block = sum(sizes) // layers
    if "audio_inject_layers" in config:  # audio attention of S2V, copied together with a block
        injected = len(cast(SoundConfig, config)["audio_inject_layers"])
        block += injected * 6 * c * c * e // layers
    if setup.preset.kind == "animate":  # every fifth block has attention to the face
        block += -(-layers // FACE_EVERY) * 4 * c * c * e // layers
    outside = (config["text_dim"] + c) * c * e + (config["freq_dim"] + 7 * c) * c * fp32
    if device == "cpu" and not parallel.dit_fsdp:
        in_blocks, elsewhere = _mapped_dit(setup)
        in_blocks += max(0, elsewhere - outside)  # adapter modules
        block, outside = max(0, block - in_blocks // layers), max(0, outside - elsewhere)
    branches = 2 if request.guided and parallel.cfg_size == 1 else 1
    text = branches * execution.text_kv_cache * config["text_len"] * c * e
    tokens = -(-request.tokens // parallel.sequence_size)
    streams = 2 if control else 1  # the video stream and the control stream
    activations = tokens * (streams * 4 * c + e * max(5 * c, 2 * c + f))
    gathered, ranks = 0, 1
    if parallel.dit_fsdp:
        activations, ranks = max(outside, activations), parallel.world_size
        gathered = outside + 2 * block
    return NetworkSize(
        weights=(outside + layers * block) // ranks,
        block=block // ranks,
        blocks=layers * block // ranks,
        kept=Usage({"text": text, "text K/V": 2 * (layers + control) * text}),
        activations=Usage({"activations": activations, "gathered weights": gathered}),
        largest=largest // ranks,
    )


def _mapped_dit(setup: Setup) -> tuple[int, int]:
    """Estimates the memory-mapped bytes of a DiT on a CPU, in its blocks and outside."""
    expert, files = next(iter(setup.checkpoint.experts.items()))
    execution, found = setup.execution, Counter[bool]()
    compute = {"bf16": "BF16", "fp32": "F32"}[execution.dit_precision_on("cpu")]
    kinds = setup.kept("cpu")
    changed = {name for lora in setup.loras.get(expert, ()) for name in lora.changes}
    tensors = {n: x for n, x in files.tensors.items() if n not in changed or x.dtype in kinds}
    if setup.quantised is not None:
        for layer, linear in setup.quantised.experts[expert].linears.items():
            tensors[f"{layer}.weight"] = linear.tensors["weight"]
    used = {info.file for info in tensors.values() if info.file.suffix == ".safetensors"}
    places = {file: safetensors_places(file) for file in used}
    for name, info in tensors.items():
        held = "F32" if keeps_fp32(name) and not execution.convert_model_dtype else compute
        start = places[info.file][info.name][2] if info.file in places else info.start
        itemsize = info.nbytes // max(1, prod(info.shape)) or 1  # GGUF is stored as bytes
        is_as_used = (info.scale is None and info.dtype in (held, "I8")) or info.dtype in kinds
        if is_as_used and (info.dtype in kinds or start % alignment(itemsize) == 0):
            found[name.startswith(IN_BLOCKS)] += info.nbytes
    return found[True], found[False]


def _may_stay(setup: Setup, path: Path | None) -> bool:
    """Returns whether weights can be memory-mapped; a .pth is only inspected with torch."""
    return path is not None and planned_device(setup).type == "cpu"


def beside_blocks(setup: Setup, request: Request) -> int:
    """Estimates the device memory of a forward without the weights of the DiT's blocks."""
    dit = _transformer(setup, request)
    return dit.weights - dit.blocks + (dit.kept + dit.activations + _latents(request)).total()


def vae_activations(setup: Setup, verb: str, size: tuple[int, int, int]) -> int:
    """Estimates the bytes of the VAE's activations, summed over the ranks that share its rows.

    Args:
        direction: "encode" or "decode".
        size: Latent frames, height and width in pixels.
    """
    version, (frames, height, width) = setup.preset.vae, size
    if frames == 0:
        return 0
    width_ratio = min(1.0, (_vae_weights(setup) / _VAE[version]) ** 0.5)  # to the published VAE
    *first, further = _VAE_ACTIVATIONS[version, verb]
    each = first[min(frames, 3) - 1] * width_ratio * _ITEMSIZE[setup.execution.vae_precision] / 4
    return int((each + max(0, frames - 3) * further) * height * width)


def _vae_weights(setup: Setup) -> int:
    """Counts the bytes of the VAE's weights in float32."""
    path = setup.checkpoint.vae
    return _VAE[setup.preset.vae] if path is None else _stored(path)


def _stored(path: Path) -> int:
    """Counts the bytes of the weights in a file or folder; a .pth stores them uncompressed."""
    if path.is_file():
        return path.stat().st_size
    return sum(info.nbytes for info in (folder_tensors(path) or {}).values())


def check(setup: Setup, request: Request, ranks_here: int, stage: str | None = None) -> None:
    """Refuses a run that needs more memory than is free, as far as both are known.

    Only torch resolves the device "auto". Such a run is refused if it fits on no device of this
    machine.

    Args:
        ranks_here: Number of ranks that share this machine's memory.
        stage: The only stage that runs, a key of `compute_stage_memory`; None: all stages.

    Raises:
        InputError: The run does not fit.
    """
    device_types: tuple[str, ...] = (setup.execution.device,)
    if device_types == ("auto",) and _NPU_DRIVER.exists():
        device_types = ("npu", "cpu")
    elif device_types == ("auto",):
        device_types = ("cuda", "cpu") if gpu_memory("free") else ("cpu",)
    refusals = [_refusal(setup, request, ranks_here, stage, device) for device in device_types]
    if refusals[0] is not None and None not in refusals:
        raise refusals[0]


def _refusal(
    setup: Setup, request: Request, ranks_here: int, only: str | None, device: str
) -> InputError | None:
    """Returns the refusal of a run that does not fit on this type of device, or None."""
    free = free_memory(device)
    if free is None:
        return None
    stage, need = fullest(setup, request, ranks_here, only, device=device)
    if need <= free:
        return None
    remedy = "choose a smaller `size` or `frame_num`"
    with suppress(InputError):  # a setting of the run may exclude it
        _, less = fullest(setup, request, ranks_here, only, device=device, offload_model="block")
        if less <= free:
            remedy = f"use `offload_model=block` ({less / 1e9:.1f} GB)"
    where = "this machine has" if device == "cpu" else "a GPU has"
    why = f"needs at least {need / 1e9:.1f} GB ({stage}), and {where} {free / 1e9:.1f} GB free"
    remedy = f"{remedy}, or see what fits with `plan`" if only is None else "use a larger machine"
    return InputError("The run", why=why, remedy=remedy)


def fullest(
    setup: Setup, request: Request, ranks_here: int = 1, only: str | None = None, **execution: Any
) -> tuple[str, int]:
    """Finds the stage with the highest estimate, and its bytes.

    Decoding is estimated in tiles, since a run changes to tiles when memory runs out.

    Args:
        ranks_here: Number of ranks that share the memory; on a CPU all ranks denoise, one decodes.
        only_stage: The only stage that runs; None: all stages.
        **execution: Fields of `Execution` to change.
    """
    setup = replace(setup, execution=replace(setup.execution, **execution))
    tiles = replace(setup.execution, vae_tiling=True, vae_parallel=False, overlap_decoding=False)
    in_tiles = replace(setup, execution=tiles)
    needs = stages(setup, request, estimate(setup, request))
    needs["decoding"] = stages(in_tiles, request, estimate(in_tiles, request))["decoding"]
    found = {name: usage.total() for name, usage in needs.items() if only in (None, name)}
    if setup.execution.device == "cpu" and "denoising" in found:
        found["denoising"] *= ranks_here
    return max(found.items(), key=lambda item: item[1])


def free_memory(device_type: str) -> int | None:
    """Returns the free bytes on this type of device, or None if they are unknown.

    With several GPUs it is the GPU with the most free memory.
    """
    if device_type == "cuda":
        return max(gpu_memory("free"), default=None)
    return host.available_memory() if device_type == "cpu" else None


def gpu_memory(kind: str) -> list[int]:
    """Queries `nvidia-smi` for the bytes of each GPU's memory; kind: "free" or "total".

    The list is empty without the program, without a GPU, or if it takes more than five seconds. A
    result is cached for ten seconds, because each line of a prompt file needs it.
    """
    return _gpu_memory(kind, int(time.monotonic()) // 10)


@lru_cache(maxsize=2)
def _gpu_memory(kind: str, _: int) -> list[int]:
    command = ["nvidia-smi", f"--query-gpu=memory.{kind}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return [int(line) * 2**20 for line in done.stdout.split("\n") if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
