"""What memory a run takes, stage by stage, and whether this machine has so much; without torch.

`stages` is the one account of what lives beside what. It is given the sizes of each network, which
have two sources: `estimate` has formulas of the tensors in the checkpoint, which take milliseconds
and are never too high; `wan.planner.measure` runs the layers and measures them.

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
"""Bytes by what they are for."""

LATENTS = 6  # of the solver and of both branches, when the network is called; a test counts them
_TEXT_ENCODER, _WORDS = 11_361_820_672, 2_100_297_728  # umt5-xxl in bfloat16, and its word table
_VAE = {"2.1": 507_570_124, "2.2": 2_818_754_672}  # float32
# Bytes for each pixel of the published VAEs in float32 with one, two and three latent frames, and
# for each further one: what the planner measures of very large frames; small ones take up to 7 %
# more, since convolutions pad them. A test compares both.
_VAE_ACTIVATIONS = {
    ("2.1", "decode"): (6_860, 13_040, 13_125, 50),
    ("2.2", "decode"): (5_380, 11_370, 11_455, 50),
    ("2.1", "encode"): (3_860, 8_440, 9_050, 50),
    ("2.2", "encode"): (1_630, 3_600, 3_890, 49),
}
_ITEMSIZE = {"bf16": 2, "fp32": 4}
_NPU_DRIVER = Path("/dev/davinci_manager")  # it does not say how much memory is free


@dataclass(frozen=True)
class Weights:
    """Bytes of a network's weights on the rank that holds the most.

    Attributes:
        weights: Those that take memory.
        mapped: Those that a CPU uses where their files are mapped.
    """

    weights: int
    mapped: int = 0


@dataclass(frozen=True)
class NetworkSize:
    """Bytes of the text encoder or a DiT on the rank that holds the most.

    Attributes:
        weights: This rank's weights that take memory.
        block: Those of one block, and of what moves with it, on an average.
        blocks: Those that `offload_model=block` copies: those of all blocks.
        kept: What lives from one call to the next.
        activations: What lives beside the weights and `kept` when the most does.
        mapped: The weights that a CPU uses where their files are mapped.
        largest: Those of the largest block where blocks differ, else 0.
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
    """Bytes of all networks of a run on the rank that holds the most.

    Attributes:
        text: The text encoder; None where it is not on the device.
        clip: CLIP's weights.
        vae: The VAE's weights.
        encoding: What lives beside them while an image is encoded; empty where none is.
        decoding: What lives beside them while the video is decoded.
        dit: One DiT.
    """

    text: NetworkSize | None
    clip: Weights
    vae: Weights
    encoding: Usage
    decoding: Usage
    dit: NetworkSize


def stages(setup: Setup, request: Request, sizes: Sizes) -> dict[str, Usage]:
    """Adds up what lives on the fullest rank when the most does, in each stage of a run.

    Args:
        setup: The checkpoint and the settings.
        request: The video.
        sizes: The networks of this setup, estimated or measured.

    Returns:
        "text encoder" where it runs on the device, "image encoder" where an image is encoded,
        "denoising" and "decoding".
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
    if keeps_all:  # otherwise CLIP is released before the VAE works
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
    """Whether a clip is decoded while the next one is denoised."""
    several = request.chain == "latent" and (request.num_clip or 0) > 1
    return setup.execution.overlap_decoding and several


def mapped(sizes: Sizes) -> dict[str, Usage]:
    """Adds up the weights that each stage uses where their files are mapped.

    They take no memory of a process. The system keeps their pages while memory is free, and reads
    them from the disk again where it is not.
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
    """What a clip's faces take where a character is moved."""
    pictures = request.frame_num if request.preset.kind == "animate" else 0
    return +Usage({"pictures of the face": 3 * pictures * FACE_SIDE**2 * 4})


def _clip_before(request: Request) -> Usage:
    """What is kept in host memory of the clip before."""
    if request.infer_frames is None:
        return Usage()
    width, height = request.video_size
    return Usage({"frames of the clip before": 3 * MOTION_FRAMES * height * width * 4})


def planned_device(setup: Setup) -> Capabilities:
    """Finds the device that `device` and `chip` mean.

    "auto" means the first accelerator that can run the setup, and a CPU where none can.
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
    """Estimates the sizes by formulas.

    No size is above what the planner measures, and the fullest stage is at least 85 % of that.
    Weights have the size of their files, without those that a CPU may use where they are mapped.
    The formulas leave out CLIP, and what a VAE takes beside the video while it decodes in tiles.
    """
    execution, frames = setup.execution, decoded_frames(request)
    width, height = request.video_size
    is_on_device = planned_device(setup).type == "cpu" or not execution.t5_cpu
    encoded, vae_size = encoded_frames(request), _ITEMSIZE[execution.vae_precision]
    ranks = setup.parallel.world_size if execution.vae_parallel else 1
    may_stay = _may_stay(setup, setup.checkpoint.vae) and vae_size == 4
    encoding = vae_activations(setup, "encode", (encoded, height, width)) // ranks
    pixel_frames = 1 + (frames - 1) * request.preset.vae_stride[0]
    video = 3 * pixel_frames * width * height * 4  # whole on the first rank
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
    """Returns how many latent frames the VAE encodes: i2v's whole video, or an image.

    Of a video that follows a sound it is the end of the clip before, of a character's a clip.
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
    """Returns how many latent frames the VAE decodes at once; those of clips follow others."""
    if request.preset.kind == "animate":
        return request.latent_shape[1] - 1
    before = encoded_frames(request) if request.preset.kind == "s2v" else 0
    return before + request.latent_shape[1] - request.references


def _text_encoder(setup: Setup) -> NetworkSize:
    """Estimates the text encoder. FSDP gathers the word table of sharded weights twice."""
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
    """Estimates a DiT from its matrices, the text's keys and values, and the residual stream.

    The stream lives beside q, k and v, or beside the feed-forward. FSDP also gathers two blocks and
    what is outside the blocks, which lives once more while it is gathered.
    """
    config, execution, parallel = setup.checkpoint.config, setup.execution, setup.parallel
    c, f, layers = config["dim"], config["ffn_dim"], config["num_layers"]
    device = planned_device(setup).type
    e = _ITEMSIZE[execution.dit_precision_on(device)]
    fp32 = e if execution.convert_model_dtype else 4
    control = setup.checkpoint.control_blocks  # of VACE; each moves with a block
    image = 2 * c if config["image_dim"] else 0  # keys and values of an image's tokens
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
    if "audio_inject_layers" in config:  # of S2V; each moves with a block
        injected = len(cast(SoundConfig, config)["audio_inject_layers"])
        block += injected * 6 * c * c * e // layers
    if setup.preset.kind == "animate":  # every fifth block attends to the face
        block += -(-layers // FACE_EVERY) * 4 * c * c * e // layers
    outside = (config["text_dim"] + c) * c * e + (config["freq_dim"] + 7 * c) * c * fp32
    if device == "cpu" and not parallel.dit_fsdp:
        in_blocks, elsewhere = _mapped_dit(setup)
        in_blocks += max(0, elsewhere - outside)  # of what moves with blocks under other names
        block, outside = max(0, block - in_blocks // layers), max(0, outside - elsewhere)
    branches = 2 if request.guided and parallel.cfg_size == 1 else 1
    text = branches * execution.text_kv_cache * config["text_len"] * c * e
    tokens = -(-request.tokens // parallel.sequence_size)
    streams = 2 if control else 1  # the video's and the control's
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
    """Returns the bytes of a DiT that a CPU uses where they are mapped: in the blocks, and not."""
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
        itemsize = info.nbytes // max(1, prod(info.shape)) or 1  # GGUF is kept as bytes
        is_as_used = (info.scale is None and info.dtype in (held, "I8")) or info.dtype in kinds
        if is_as_used and (info.dtype in kinds or start % alignment(itemsize) == 0):
            found[name.startswith(IN_BLOCKS)] += info.nbytes
    return found[True], found[False]


def _may_stay(setup: Setup, path: Path | None) -> bool:
    """Returns whether weights in a file may be used there; only torch can tell for a .pth."""
    return path is not None and planned_device(setup).type == "cpu"


def beside_blocks(setup: Setup, request: Request) -> int:
    """Estimates the bytes that live on a device beside the blocks of the DiT that runs."""
    dit = _transformer(setup, request)
    return dit.weights - dit.blocks + (dit.kept + dit.activations + _latents(request)).total()


def vae_activations(setup: Setup, verb: str, size: tuple[int, int, int]) -> int:
    """Estimates what lives beside the VAE's weights, on all ranks that share the rows together.

    Args:
        setup: The checkpoint and the settings.
        verb: "encode" or "decode".
        size: Latent frames, pixels of a column and of a row.

    Returns:
        Bytes.
    """
    version, (frames, height, width) = setup.preset.vae, size
    if frames == 0:
        return 0
    width_ratio = min(1.0, (_vae_weights(setup) / _VAE[version]) ** 0.5)  # to the published VAE
    *first, further = _VAE_ACTIVATIONS[version, verb]
    each = first[min(frames, 3) - 1] * width_ratio * _ITEMSIZE[setup.execution.vae_precision] / 4
    return int((each + max(0, frames - 3) * further) * height * width)


def _vae_weights(setup: Setup) -> int:
    """Returns the bytes of the VAE's weights in float32."""
    path = setup.checkpoint.vae
    return _VAE[setup.preset.vae] if path is None else _stored(path)


def _stored(path: Path) -> int:
    """Returns the bytes of the weights in a file or folder; a .pth archives them uncompressed."""
    if path.is_file():
        return path.stat().st_size
    return sum(info.nbytes for info in (folder_tensors(path) or {}).values())


def check(setup: Setup, request: Request, ranks_here: int, stage: str | None = None) -> None:
    """Refuses a run that needs more memory than is free, as far as both are known.

    Only torch can tell which device "auto" is. Such a run is refused where it fits on none of the
    devices that are here.

    Args:
        setup: The checkpoint and the settings.
        request: The video.
        ranks_here: How many ranks share this machine's memory.
        stage: The only stage of the run, a key of `stages`; None: all of them.

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
    """Says why the run does not fit into this type of device's memory; None where it may."""
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
    """Finds the stage that is estimated to take the most, and its bytes.

    The VAE is taken to decode in tiles, which a run does by itself where memory is short.

    Args:
        setup: The checkpoint and the settings.
        request: The video.
        ranks_here: How many ranks share the memory; on a CPU all of them denoise and one decodes.
        only: The only stage of the run; None: all of them.
        **execution: Settings of `Execution` that differ from the run's.
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
    """Returns the bytes that a run on this type of device may take, or None if that is unknown.

    Of several GPUs the one with the most free memory counts.
    """
    if device_type == "cuda":
        return max(gpu_memory("free"), default=None)
    return host.available_memory() if device_type == "cpu" else None


def gpu_memory(kind: str) -> list[int]:
    """Returns the bytes of each NVIDIA GPU, "free" or in "total", as `nvidia-smi` reports them.

    The list is empty where there is no such program, no GPU, or no answer within five seconds. An
    answer holds for ten seconds, because the lines of a prompt file ask one after the other.
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
