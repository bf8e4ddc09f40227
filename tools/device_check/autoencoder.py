"""Step 8: the VAE, with random weights (the published ones may be missing) and published sizes.

Legend: F H W pixel frames/height/width, Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tools.device_check.bench import Bench, compute_rms_distance
from tools.device_check.network import make_case
from tools.device_check.steps import Figure, Measurements, make_error, make_memory
from wan.checkpoint import layout
from wan.modules.vae.network import Autoencoder
from wan.modules.vae.video_vae import VideoVAE, build_published_vae
from wan.planner.measure import Planner
from wan.settings.presets import PRESETS
from wan.tasks.base import make_video_params
from wan.testing import measuring

LIMIT = 1e-2  # relative rms; TF32 and HF32 round inputs to 10 bits, float32 alone gives 1e-5
PLAN = 1.1  # largest measured memory over planned memory
SMALL = (5, 48, 32)  # frames, width, height for the comparison with the host
VIDEOS = {"2.1": ("t2v-A14B", (1280, 720), 81), "2.2": ("ti2v-5B", (1280, 704), 121)}


def check_vae(bench: Bench) -> Measurements:
    """Checks both VAEs: error against the host, a video's time and memory."""
    for version, (_, size, count) in VIDEOS.items():
        torch.manual_seed(0)  # tiny on a CPU
        network = build_published_vae(version) if bench.large else Autoencoder(version, 8, 10)
        network = network.eval().requires_grad_(False)
        label = "{}: error, {} frames of {} x {}".format(version, *SMALL)
        yield label, partial(_measure_errors, bench, copy.deepcopy(network))
        network = network.to(bench.torch_device)
        for verb in ("encode", "decode") if bench.large else ():
            label = f"{version}: {verb}, {count} frames of {size[0]} x {size[1]}"
            yield label, partial(_measure_video, bench, network, version, verb)


def _measure_errors(bench: Bench, network: Autoencoder) -> list[Figure]:
    """Measures the errors of encoding and decoding a few frames, against float64 on the host."""
    frames, width, height = SMALL
    video = torch.rand(1, 3, frames, height, width, dtype=torch.float64) * 2 - 1
    exact = network.double()
    encoded = exact.encode(video)
    latents = torch.randn(encoded.shape, dtype=torch.float64)
    decoded = _decode_all(exact, latents)
    model = VideoVAE(network.float().to(bench.torch_device))
    mean, scale = (x.cpu().double() for x in (model.mean, model.scale))
    device_latents = model.encode(video[0].float())
    device_video = model.decode(((latents - mean) * scale)[0].float())
    return [
        make_error(
            compute_rms_distance(device_latents, ((encoded - mean) * scale)[0]), LIMIT, "encoding"
        ),
        make_error(compute_rms_distance(device_video, decoded[0].clamp(-1, 1)), LIMIT, "decoding"),
    ]


def _measure_video(bench: Bench, network: Autoencoder, version: str, verb: str) -> list[Figure]:
    """Measures a full video's seconds and peak memory; compares the memory with the plan."""
    task, (width, height), frames = VIDEOS[version]
    preset, model, seconds = PRESETS[task], VideoVAE(network), 0.0
    values = {"size": (width, height), "frame_num": frames, "prompt": "", "base_seed": 0}
    request = make_video_params(preset, values)
    shape = (3, frames, height, width) if verb == "encode" else request.latent_shape
    inputs = bench.randn(*shape, dtype=torch.float32).clamp_(-1, 1)

    def run_timed() -> None:
        nonlocal seconds
        seconds = measuring.measure_seconds(
            partial(getattr(model, verb), inputs), bench.torch_device
        )

    held = bench.measure_peak(run_timed)
    figures = [Figure("time", seconds, "s"), make_memory("memory without weights", held)]
    if held is not None and verb == "decode":
        setup = replace(
            make_case(bench).setup,
            preset=preset,
            checkpoint=layout.make_reference_checkpoint(preset),
        )
        planned = Planner(setup, request).compute_stage_memory()["decoding"]
        most = planned.total() - planned["VAE weights"] - inputs.nbytes
        figures.append(Figure("measured / planned", held / most, "", PLAN))
    return figures


def _decode_all(network: Autoencoder, z_BZfhw: Tensor) -> Tensor:
    return torch.cat(list(network.decode(z_BZfhw)), dim=2)
