"""The autoencoders against diffusers' with the same weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from tests.conftest import slow
from wan.checkpoint.keymaps import rename_vae_to_diffusers
from wan.modules.vae import tiles
from wan.modules.vae.network import VERSIONS, Autoencoder
from wan.modules.vae.video_vae import LATENT_STATISTICS, FrameCollector, VideoVAE

FILES = {"2.1": ("t2v-A14B", "Wan2.1_VAE.pth"), "2.2": ("ti2v-5B", "Wan2.2_VAE.pth")}
VERSION = pytest.mark.parametrize("version", FILES)


def make_diffusers_vae(version: str, base: int = 8, decoder_base: int = 8) -> Any:
    """diffusers' network of these widths; its weights are random."""
    sizes: dict[str, Any] = {"base_dim": base, "decoder_base_dim": decoder_base}
    architecture, (mean, std) = VERSIONS[version], LATENT_STATISTICS[VERSIONS[version].z_dim]
    sizes |= {"z_dim": architecture.z_dim, "latents_mean": mean, "latents_std": std}
    if version == "2.2":
        sizes |= {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
        sizes |= {"scale_factor_spatial": 16}
    return AutoencoderKLWan(**sizes).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def pair(tiny):
    """pair(version): diffusers' tiny network and ours, with the same weights."""

    def load(version: str) -> tuple[Any, Autoencoder]:
        task, file = FILES[version]
        state = torch.load(tiny(task) / file, weights_only=True)
        state = {rename_vae_to_diffusers(name): tensor for name, tensor in state.items()}
        reference = make_diffusers_vae(version, 8, 8 if version == "2.1" else 10)
        reference.load_state_dict(state)
        network = (
            Autoencoder(version, 8, 8 if version == "2.1" else 10).eval().requires_grad_(False)
        )
        network.load_state_dict(state)
        return reference, network

    return load


def decode_clamped(network: Autoencoder, z: Tensor) -> Tensor:
    return torch.cat(list(network.decode(z)), dim=2).clamp(-1, 1)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


LIMITS = {"contiguous": 2e-6, "channels last": 5e-6}  # channels-last convolutions use other kernels
FAST_SIZES = {"contiguous": [(2, 1, 2), (2, 1, 256)], "channels last": [(1, 3, 5), (3, 4, 3)]}
SIZES = [(1, 3, 5), (2, 1, 2), (3, 4, 3), (2, 1, 256), (21, 3, 2)]


@VERSION
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (layout, size) if size in FAST_SIZES[layout] else slow(layout, size)
        for layout in LIMITS
        for size in SIZES
    ],
)
def test_the_same_as_diffusers(pair, version: str, layout: str, size: tuple[int, ...]) -> None:
    """size: latent frames, rows and columns; of wide videos, the largest layers get single frames.

    Those are compared in float32 only, because float64 takes seconds.
    """
    reference, network = pair(version)
    network = network.to_channels_last() if layout == "channels last" else network
    random, (f, h, w) = torch.Generator().manual_seed(0), size
    z = torch.randn(1, network.version.z_dim, *size, generator=random)
    assert distance(decode_clamped(network, z), reference.decode(z).sample) <= LIMITS[layout]
    scale = network.version.scale
    video = torch.rand(1, 3, 4 * f - 3, h * scale, w * scale, generator=random) * 2 - 1
    assert (
        distance(network.encode(video), reference.encode(video).latent_dist.mode())
        <= LIMITS[layout]
    )
    if w < 100:
        network_64, reference_64 = network.double(), reference.double()
        latent = network_64.encode(video.double())
        assert distance(latent, reference_64.encode(video.double()).latent_dist.mode()) <= 1e-12


@VERSION
def test_the_first_latent_frame_alone_is_decoded_to_the_first_frame(pair, version: str) -> None:
    """Bit for bit, as is a window of latent frames from the start."""
    vae = VideoVAE(pair(version)[1])
    latents = torch.randn(vae.mean.shape[1], 4, 6, 4, generator=torch.Generator().manual_seed(1))
    video = vae.decode(latents)
    for window in (1, 3):
        frames = vae.decode(latents[:, :window])
        assert torch.equal(frames, video[:, : frames.shape[1]])


def test_rows_that_make_no_latent_are_left_out(pair) -> None:
    """Officially, too: 2.1 rounds heights and widths down."""
    reference, network = pair("2.1")
    video = torch.rand(1, 3, 5, 8 * 3 + 7, 8 * 2 + 3) * 2 - 1
    assert distance(network.encode(video), reference.encode(video).latent_dist.mode()) <= 2e-6


@VERSION
def test_parameters_have_the_published_shapes(version: str) -> None:
    from wan.modules.vae.video_vae import build_published_vae

    with torch.device("meta"):
        widths = {"2.1": (96, 96), "2.2": (160, 256)}[version]
        network, reference = build_published_vae(version), make_diffusers_vae(version, *widths)
    shapes = [
        {n: tuple(p.shape) for n, p in model.named_parameters()} for model in (network, reference)
    ]
    assert shapes[0] == shapes[1]


@VERSION
@pytest.mark.parametrize("size", [slow((17, 4)), (2, 18), slow((17, 18))], ids=str)
def test_tiles_are_those_of_diffusers(pair, version: str, size: tuple[int, int]) -> None:
    """size: rows and columns of 16 pixels."""
    reference, network = pair(version)
    h, w = (side * 16 // network.version.scale for side in size)
    latent = torch.randn(network.version.z_dim, 2, h, w, generator=torch.Generator().manual_seed(0))
    vae = VideoVAE(network)
    reference.enable_tiling()
    expected = reference.decode(latent[None] / vae.scale + vae.mean).sample[0]
    assert distance(vae.decode_in_tiles(latent), expected) <= 5e-6  # kernels choose by shape
    assert distance(vae.decode(latent), expected) > 1e-3


@VERSION
def test_bfloat16_is_near(pair, version: str) -> None:
    _, network = pair(version)
    z = torch.randn(1, network.version.z_dim, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    rounded = copy.deepcopy(network).bfloat16().to_channels_last()
    near, exact = decode_clamped(rounded, z), decode_clamped(network, z)
    assert near.dtype == torch.bfloat16
    assert ((near - exact).square().mean() / exact.square().mean()).sqrt() <= 0.05


def test_what_a_plan_counts_of_tiles() -> None:
    """By hand: the video, 64 rows of each tile above, 64 columns of the one to the left."""
    widths, height = (256, 256, 116), 256  # of tiles that begin at the columns 0, 192 and 384
    pixels = 300 * 500 + 64 * (sum(widths) + height)
    assert tiles.estimate_tile_bytes((300, 500), 5) == 4 * 3 * 5 * pixels
    assert tiles.estimate_tile_bytes((256, 256), 5) == 0


def test_a_video_that_is_decoded_anew_begins_with_its_first_frame() -> None:
    collector, video = FrameCollector(torch.device("cpu")), torch.rand(3, 5, 4, 6)
    collector.begin((5, 4, 6))
    collector.write_frames(torch.rand(3, 1, 4, 6))  # then memory was too short
    collector.begin((5, 4, 6))
    for first, end in ((0, 1), (1, 5)):
        collector.write_frames(video[:, first:end])
    assert torch.equal(collector.video, video)
