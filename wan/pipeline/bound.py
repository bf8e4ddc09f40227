"""What a run takes at least, in closed form: no torch, some milliseconds, at most 15 % too little.

A run that needs more than is free is refused before a weight is read; `--plan` measures.

Legend: C channels, F channels of the feed-forward, e bytes of an element in the matrix products.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

from wan.checkpoint.files import folder_tensors
from wan.pipeline.setup import Setup
from wan.settings import devices
from wan.settings.devices import Capabilities
from wan.settings.errors import InputError
from wan.settings.execution import buffers
from wan.settings.request import Request

_TEXT_ENCODER, _WORDS = 11_361_820_672, 2_100_297_728  # umt5-xxl in bfloat16, and its word table
_VAE = {"2.1": 507_570_124, "2.2": 2_818_754_672}  # float32
# Bytes per pixel of one, two, three latent frames, and what each further one adds: as measured.
_DECODE = {"2.1": (11_100, 17_300, 17_390, 50), "2.2": (8_550, 15_550, 15_640, 50)}
_ENCODE = {"2.1": (5_800, 11_880, 11_930, 49), "2.2": (2_460, 5_670, 5_720, 48)}


def stages(setup: Setup, request: Request) -> dict[str, int]:
    """What the fullest rank holds at least in each stage, named as by `wan.planner.measure`."""
    keeps = setup.execution.offload_model is False
    networks = len(setup.preset.experts) if keeps else 1
    text, gathered = _text_encoder(setup)
    outside, blocks, running = _dit(setup, request)
    weights = outside + blocks
    vae, encoding, decoding = _vae(setup, request)
    found, stays = {"text encoder": text + gathered}, keeps * text
    if encoding:
        found["image encoder"] = stays + vae + encoding
    found["denoising"] = stays + keeps * vae * bool(encoding) + networks * weights + running
    found["decoding"] = stays + keeps * networks * weights + vae + decoding
    return found


def beside_blocks(setup: Setup, request: Request) -> int:
    """What is on a device beside the blocks of a network that runs."""
    outside, _, running = _dit(setup, request)
    return outside + running


def least(setup: Setup, request: Request) -> dict[str, int]:
    """`stages`, with the last means of decoding: tiles, for which there may be memory."""
    tiles = replace(setup.execution, vae_tiling=True, vae_parallel=False)
    decoding = stages(replace(setup, execution=tiles), request)["decoding"]
    return stages(setup, request) | {"decoding": decoding}


def device(setup: Setup) -> Capabilities:
    """What --device and --chip mean; "auto" is the first accelerator that can run the setup."""
    rows = devices.candidates(setup.execution.device, setup.chip)
    for row in rows:
        if setup.execution.device != "auto" or row.type != "cpu":
            try:
                setup.check_device(row)
            except InputError:
                continue
            return row
    return rows[-1]


def _text_encoder(setup: Setup) -> tuple[int, int]:
    """Its weights on the rank that has it; what FSDP gathers: the word table, sent and placed."""
    path, parallel = setup.checkpoint.text_encoder, setup.parallel
    if setup.execution.t5_cpu and device(setup).type != "cpu":
        return 0, 0
    size = _TEXT_ENCODER if path is None else _stored(path)
    if setup.execution.offload_model == "block":  # of 24 blocks, without the word table
        blocks = size - _WORDS * size // _TEXT_ENCODER
        return buffers(device(setup).type) * blocks // 24, 0
    if not parallel.t5_fsdp:
        return size, 0
    return size // parallel.world_size, 2 * _WORDS * size // _TEXT_ENCODER


def _dit(setup: Setup, request: Request) -> tuple[int, int, int]:
    """On a rank, a network's weights outside its blocks and in them; what is beside them while it
    runs."""
    config, execution, parallel = setup.checkpoint.config, setup.execution, setup.parallel
    c, f, layers = config["dim"], config["ffn_dim"], config["num_layers"]
    on = device(setup).type
    e = {"bf16": 2, "fp32": 4}[execution.dit_precision_on(on)]
    fp32 = e if execution.convert_model_dtype else 4
    block = (8 * c + 2 * f) * c * e
    if setup.quantised is not None:
        block = sum(next(iter(setup.quantised.experts.values())).sizes.values()) // layers
    elif setup.keeps_fp8(on):
        block = (8 * c + 2 * f) * c
    outside = (config["text_dim"] + c) * c * e + (config["freq_dim"] + 7 * c) * c * fp32
    contexts = 2 if request.guided and parallel.cfg_size == 1 else 1
    contexts *= execution.text_kv_cache
    text = contexts * config["text_len"] * c * e * (1 + 2 * layers)
    tokens = -(-prod(request.grid) // parallel.sequence_size)
    beside = text + 5 * prod(request.latent_shape) * 4
    activations = tokens * (4 * c + e * max(5 * c, 2 * c + f))
    if not parallel.dit_fsdp:
        held = execution.blocks_held(layers, on)
        return outside, held * block, beside + activations
    gathered = outside + 2 * block + max(outside, activations)
    ranks = parallel.world_size
    return outside // ranks, layers * block // ranks, beside + gathered


def _vae(setup: Setup, request: Request) -> tuple[int, int, int]:
    """Weights; what is beside them while an image is encoded (0: none is), and while decoding."""
    (width, height), frames = request.video_size, request.latent_shape[1]
    weights = int(_vae_weights(setup) * _vae_bytes(setup) / 4)
    encoded = {"i2v": frames, "ti2v": int(request.image_size is not None)}.get(setup.preset.kind, 0)
    share, video = 1.0, 3 * request.frame_num * width * height * 4
    if setup.execution.vae_parallel:
        share = 1 / setup.parallel.world_size
    encoding = share * autoencoder(setup, "encode", (encoded, height, width)) if encoded else 0
    if setup.execution.vae_tiling:
        return weights, int(encoding), video
    decoding = share * (autoencoder(setup, "decode", (frames, height, width)) - video) + video
    return weights, int(encoding), int(decoding)


def autoencoder(setup: Setup, verb: str, size: tuple[int, int, int]) -> int:
    """What is beside the VAE's weights while it works, on all ranks that share it together.

    verb: "encode" or "decode". size: latent frames, pixels of a column and of a row.
    """
    version, (frames, height, width) = setup.preset.vae, size
    channels = min(1.0, (_vae_weights(setup) / _VAE[version]) ** 0.5)  # share of the published
    *few, more = {"encode": _ENCODE, "decode": _DECODE}[verb][version]
    each = few[min(frames, 3) - 1] * channels * _vae_bytes(setup) / 4 + max(0, frames - 3) * more
    return int(each * height * width)


def _vae_bytes(setup: Setup) -> int:
    return {"bf16": 2, "fp32": 4}[setup.execution.vae_precision]


def _vae_weights(setup: Setup) -> int:
    """In float32."""
    path = setup.checkpoint.vae
    return _VAE[setup.preset.vae] if path is None else _stored(path)


def _stored(path: Path) -> int:
    """Bytes of weights in files; a .pth is an uncompressed archive of them."""
    if path.is_file():
        return path.stat().st_size
    return sum(info.nbytes for info in (folder_tensors(path) or {}).values())
