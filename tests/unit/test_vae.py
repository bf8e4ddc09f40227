"""The autoencoders against diffusers' with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from tests.conftest import slow
from tests.pipelines import build_cpu_pipeline
from wan.checkpoint.names.keymaps import rename_vae_to_diffusers
from wan.modules.vae import network, tiles
from wan.modules.vae.network import VERSIONS, Autoencoder
from wan.modules.vae.video_vae import (
    LATENT_STATISTICS,
    FrameCollector,
    LatentBlocks,
    VideoVAE,
    build_published_vae,
)

FILES = {"2.1": ("t2v-A14B", "Wan2.1_VAE.pth"), "2.2": ("ti2v-5B", "Wan2.2_VAE.pth")}
VERSION = pytest.mark.parametrize("version", FILES)


@pytest.fixture(scope="session")
def tiny(usual_tiny: Any) -> Any:
    return usual_tiny


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
        widths = 8, 8 if version == "2.1" else 10
        reference, ours = make_diffusers_vae(version, *widths), Autoencoder(version, *widths)
        for vae in (reference, ours):
            vae.load_state_dict(state)
        return reference, ours.eval().requires_grad_(False)

    return load


def decode_clamped(vae: Autoencoder, z: Tensor) -> Tensor:
    return torch.cat(list(vae.decode(z)), dim=2).clamp(-1, 1)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


LIMITS = {"contiguous": 2e-6, "channels last": 5e-6}  # channels-last convolutions use other kernels


@VERSION
@pytest.mark.parametrize(
    ("layout", "size", "single_frames"),
    [
        ("contiguous", (2, 1, 2), True),
        ("channels last", (3, 3, 2), False),
        *(slow(layout, (21, 3, 2), single) for layout in LIMITS for single in (False, True)),
        slow("contiguous", (2, 1, 256), True),
    ],
)
def test_the_same_as_diffusers(
    pair,
    version: str,
    layout: str,
    size: tuple[int, ...],
    single_frames: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """size: latent frames, rows and columns.

    The largest layers get single frames of wide videos, and here also of small ones. Wide videos
    are compared in float32 only, because float64 takes seconds.
    """
    if single_frames:
        monkeypatch.setattr(network, "split_large_frames", lambda x, _: x.split(1, dim=2))
    reference, vae = pair(version)
    vae = vae.to_channels_last() if layout == "channels last" else vae
    random, (f, h, w) = torch.Generator().manual_seed(0), size
    z = torch.randn(1, vae.version.z_dim, *size, generator=random)
    assert distance(decode_clamped(vae, z), reference.decode(z).sample) <= LIMITS[layout]
    scale = vae.version.scale
    video = torch.rand(1, 3, 4 * f - 3, h * scale, w * scale, generator=random) * 2 - 1
    expected = reference.encode(video).latent_dist.mode()
    assert distance(vae.encode(video), expected) <= LIMITS[layout]
    if w < 100:
        latent = vae.double().encode(video.double())
        expected = reference.double().encode(video.double()).latent_dist.mode()
        assert distance(latent, expected) <= 1e-12


@VERSION
def test_the_first_latent_frame_alone_is_decoded_to_the_first_frame(pair, version: str) -> None:
    """Bit for bit, as is a window of latent frames from the start."""
    vae = VideoVAE(pair(version)[1])
    latents = torch.randn(vae.mean.shape[1], 3, 2, 2, generator=torch.Generator().manual_seed(1))
    video = vae.decode(latents)
    for window in (1, 2):
        frames = vae.decode(latents[:, :window])
        assert torch.equal(frames, video[:, : frames.shape[1]])


@pytest.mark.parametrize(
    ("version", "dtype"),
    [("2.1", torch.float32), ("2.1", torch.bfloat16), ("2.2", torch.bfloat16)],
    ids=str,
)
@pytest.mark.usefixtures("one_thread")
def test_blocks_are_decoded_as_the_whole_video(pair, version: str, dtype: torch.dtype) -> None:
    """Bit for bit."""
    vae = VideoVAE(pair(version)[1].to(dtype))
    shape = vae.mean.shape[1], 6, 2, 2
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = vae.decode(latents)
    for sizes in ((3, 3), (1, 4, 1)):
        collector = FrameCollector(vae.device)
        vae.stream(LatentBlocks(shape, latents.split(sizes, dim=1)), collector)
        assert torch.equal(collector.video, expected), sizes


def test_a_block_is_converted_as_in_the_whole_video(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit where PyTorch selects another algorithm for a block by itself, with threads."""
    vae = pair("2.2")[1]
    monkeypatch.setattr(vae.decoder, "forward", lambda z, _: z)
    z = torch.randn(1, 48, 9, 48, 2, generator=torch.Generator().manual_seed(1))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = vae.post_quant_conv(z)
        converted = torch.cat([*vae.decode_blocks(z.split(3, dim=2), 9)], dim=2)
        alone = torch.cat([vae.post_quant_conv(block) for block in z.split(3, dim=2)], dim=2)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(converted, expected) and not torch.equal(alone, expected)


def test_blocks_are_decoded_again() -> None:
    """After a lack of memory the kept blocks are decoded first; the loop yields each block once.

    A loop that fails, or yields too few blocks, ends decoding with its error.
    """
    blocks = torch.arange(12.0).view(1, 6, 1, 2).split(2, dim=1)
    num_yielded = 0

    def denoise(num_blocks: int) -> Iterator[Tensor]:
        nonlocal num_yielded
        for block in blocks[:num_blocks]:
            num_yielded += 1
            yield block
        if num_blocks == 2:
            raise MemoryError("no room")

    latents = LatentBlocks((1, 6, 1, 2), denoise(3))
    assert torch.equal(next(iter(latents)), blocks[0]) and num_yielded == 1
    assert torch.equal(latents.join(), torch.cat(blocks, dim=1)) and num_yielded == 3
    assert len([*latents]) == 3 == num_yielded
    failing = LatentBlocks((1, 6, 1, 2), denoise(2))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            failing.join()
    with pytest.raises(RuntimeError, match="StopIteration"):
        LatentBlocks((1, 6, 1, 2), denoise(1)).join()


def test_rows_that_make_no_latent_are_left_out(pair) -> None:
    """Officially, too: 2.1 rounds heights and widths down."""
    reference, vae = pair("2.1")
    video = torch.rand(1, 3, 5, 8 * 3 + 7, 8 * 2 + 3) * 2 - 1
    assert distance(vae.encode(video), reference.encode(video).latent_dist.mode()) <= 2e-6


@VERSION
def test_parameters_have_the_published_shapes(version: str) -> None:
    with torch.device("meta"):
        widths = {"2.1": (96, 96), "2.2": (160, 256)}[version]
        vaes = build_published_vae(version), make_diffusers_vae(version, *widths)
    shapes = [{n: tuple(p.shape) for n, p in vae.named_parameters()} for vae in vaes]
    assert shapes[0] == shapes[1]


@VERSION
@pytest.mark.parametrize("size", [(2, 17, 1), (1, 1, 18), slow((2, 17, 18))], ids=str)
def test_tiles_are_those_of_diffusers(pair, version: str, size: tuple[int, int, int]) -> None:
    """size: latent frames, and rows and columns of 16 pixels."""
    reference, ours = pair(version)
    f, h, w = size[0], *(side * 16 // ours.version.scale for side in size[1:])
    latent = torch.randn(ours.version.z_dim, f, h, w, generator=torch.Generator().manual_seed(0))
    vae = VideoVAE(ours)
    reference.enable_tiling()
    expected = reference.decode(latent[None] / vae.scale + vae.mean).sample[0]
    assert distance(vae.decode_in_tiles(latent), expected) <= 5e-6  # kernels choose by shape


@pytest.mark.parametrize("tiled", [False, True])
def test_a_rank_alone_decodes_in_tiles_where_a_run_asks_for_them(tiny, tiled: bool) -> None:
    pipeline = build_cpu_pipeline("t2v-1.3B", tiny("t2v-1.3B"), vae_tiling=tiled)
    latents, collector = torch.randn(16, 1, 1, 34), FrameCollector(torch.device("cpu"))
    pipeline.vae_runner.decode_alone(latents, collector)
    vae = pipeline.vae.get()
    ways = vae.decode(latents), vae.decode_in_tiles(latents)
    assert [torch.equal(collector.video, video) for video in ways] == [not tiled, tiled]


@VERSION
def test_bfloat16_is_near(pair, version: str) -> None:
    _, vae = pair(version)
    z = torch.randn(1, vae.version.z_dim, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    exact = decode_clamped(vae, z)
    near = decode_clamped(vae.bfloat16().to_channels_last(), z)
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


def test_the_source_of_blocks_ends_before_the_last_block_is_decoded() -> None:
    """It releases networks in its end."""
    events: list[str] = []

    def generate() -> Iterator[Tensor]:
        yield from torch.zeros(16, 4, 1, 1).split(2, dim=1)
        events.append("end")

    for _ in LatentBlocks((16, 4, 1, 1), generate()):
        events.append("block")
    assert events == ["block", "end", "block"]
