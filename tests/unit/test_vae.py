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
from wan.pipeline.vae import LATENT_STATISTICS, FrameCollector, VideoVAE
from wan.vae import tiles
from wan.vae.network import VERSIONS, Autoencoder

FILES = {"2.1": ("t2v-A14B", "Wan2.1_VAE.pth"), "2.2": ("ti2v-5B", "Wan2.2_VAE.pth")}
VERSION = pytest.mark.parametrize("version", FILES)


def theirs(version: str, base: int = 8, decoder_base: int = 8) -> Any:
    """diffusers' network of these widths; its weights are random."""
    sizes: dict[str, Any] = {"base_dim": base, "decoder_base_dim": decoder_base}
    of, (mean, std) = VERSIONS[version], LATENT_STATISTICS[VERSIONS[version].z_dim]
    sizes |= {"z_dim": of.z_dim, "latents_mean": mean, "latents_std": std}
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
        their = theirs(version, 8, 8 if version == "2.1" else 10)
        their.load_state_dict(state)
        our = Autoencoder(version, 8, 8 if version == "2.1" else 10).eval().requires_grad_(False)
        our.load_state_dict(state)
        return their, our

    return load


def decoded(network: Autoencoder, z: Tensor) -> Tensor:
    return torch.cat(list(network.decode(z)), dim=2).clamp(-1, 1)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


LIMITS = {"contiguous": 2e-6, "channels last": 5e-6}  # channels-last convolutions use other kernels
USUAL = {"contiguous": [(2, 1, 2), (2, 1, 256)], "channels last": [(1, 3, 5), (3, 4, 3)]}
SIZES = [(1, 3, 5), (2, 1, 2), (3, 4, 3), (2, 1, 256), (21, 3, 2)]


@VERSION
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (layout, size) if size in USUAL[layout] else slow(layout, size)
        for layout in LIMITS
        for size in SIZES
    ],
)
def test_the_same_as_diffusers(pair, version: str, layout: str, size: tuple[int, ...]) -> None:
    """size: latent frames, rows and columns; of wide videos, the largest layers get single frames.

    Those are compared in float32 only, because float64 takes seconds.
    """
    their, our = pair(version)
    our = our.to_channels_last() if layout == "channels last" else our
    random, (f, h, w) = torch.Generator().manual_seed(0), size
    z = torch.randn(1, our.version.z_dim, *size, generator=random)
    assert distance(decoded(our, z), their.decode(z).sample) <= LIMITS[layout]
    scale = our.version.scale
    video = torch.rand(1, 3, 4 * f - 3, h * scale, w * scale, generator=random) * 2 - 1
    assert distance(our.encode(video), their.encode(video).latent_dist.mode()) <= LIMITS[layout]
    if w < 100:
        ours, exact = our.double(), their.double()
        found = ours.encode(video.double())
        assert distance(found, exact.encode(video.double()).latent_dist.mode()) <= 1e-12


def test_rows_that_make_no_latent_are_left_out(pair) -> None:
    """Officially, too: 2.1 rounds heights and widths down."""
    their, our = pair("2.1")
    video = torch.rand(1, 3, 5, 8 * 3 + 7, 8 * 2 + 3) * 2 - 1
    assert distance(our.encode(video), their.encode(video).latent_dist.mode()) <= 2e-6


@VERSION
def test_parameters_have_the_published_shapes(version: str) -> None:
    from wan.pipeline.vae import build_published_vae

    with torch.device("meta"):
        widths = {"2.1": (96, 96), "2.2": (160, 256)}[version]
        our, their = build_published_vae(version), theirs(version, *widths)
    shapes = [{n: tuple(p.shape) for n, p in net.named_parameters()} for net in (our, their)]
    assert shapes[0] == shapes[1]


@VERSION
@pytest.mark.parametrize("size", [slow((17, 4)), (2, 18), slow((17, 18))], ids=str)
def test_tiles_are_those_of_diffusers(pair, version: str, size: tuple[int, int]) -> None:
    """size: rows and columns of 16 pixels."""
    their, our = pair(version)
    h, w = (side * 16 // our.version.scale for side in size)
    latent = torch.randn(our.version.z_dim, 2, h, w, generator=torch.Generator().manual_seed(0))
    vae = VideoVAE(our)
    their.enable_tiling()
    expected = their.decode(latent[None] / vae.scale + vae.mean).sample[0]
    assert distance(vae.decode_in_tiles(latent), expected) <= 5e-6  # kernels choose by shape
    assert distance(vae.decode(latent), expected) > 1e-3


@VERSION
def test_bfloat16_is_near(pair, version: str) -> None:
    _, our = pair(version)
    z = torch.randn(1, our.version.z_dim, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    rounded = copy.deepcopy(our).bfloat16().to_channels_last()
    near, exact = decoded(rounded, z), decoded(our, z)
    assert near.dtype == torch.bfloat16
    assert ((near - exact).square().mean() / exact.square().mean()).sqrt() <= 0.05


def test_what_a_plan_counts_of_tiles() -> None:
    """By hand: the video, 64 rows of each tile above, 64 columns of the one to the left."""
    widths, height = (256, 256, 116), 256  # of tiles that begin at the columns 0, 192 and 384
    pixels = 300 * 500 + 64 * (sum(widths) + height)
    assert tiles.estimate_tile_bytes((300, 500), 5) == 4 * 3 * 5 * pixels
    assert tiles.estimate_tile_bytes((256, 256), 5) == 0


def test_a_video_that_is_decoded_anew_begins_with_its_first_frame() -> None:
    whole, video = FrameCollector(torch.device("cpu")), torch.rand(3, 5, 4, 6)
    whole.begin((5, 4, 6))
    whole.write_frames(torch.rand(3, 1, 4, 6))  # then memory was too short
    whole.begin((5, 4, 6))
    for first, end in ((0, 1), (1, 5)):
        whole.write_frames(video[:, first:end])
    assert torch.equal(whole.video, video)
