"""Encodes videos to normalized latents and decodes latents with the video autoencoder.

Legend: F H W frames/height/width in pixels, f h w in latents, Z latent channels. Videos and latents
are float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wan.checkpoint.load import ModelSpec, describe_mismatch, read_headers
from wan.checkpoint.names.keymaps import rename_vae_to_diffusers
from wan.modules.vae import tiles
from wan.modules.vae.network import FRAMES_PER_LATENT, VERSIONS, Autoencoder
from wan.modules.vae.rows import ALL_ROWS, Rows
from wan.settings.errors import InputError
from wan.utils.log import make_progress_bar

# Per-channel statistics of the latents, published with the models.
# fmt: off
_MEAN_16 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
_STD_16 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916,
)
_MEAN_48 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813,
    0.0891, 0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108,
    -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313,
    -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944,
    0.3573, -0.0548, -0.1681, -0.0667,
)
_STD_48 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986,
    0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065,
    0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089,
    0.7468, 0.7744,
)
# fmt: on
LATENT_STATISTICS = {16: (_MEAN_16, _STD_16), 48: (_MEAN_48, _STD_48)}
_PUBLISHED_WIDTHS = {"2.1": (96, 96), "2.2": (160, 256)}  # base widths of encoder and decoder


class Sink(Protocol):
    """Receives the frames of a video during decoding."""

    def begin(self, size: tuple[int, int, int]) -> None:
        """Starts a video of (frames, height, width); called again if decoding is restarted."""

    def write_frames(self, frames_3FHW: Tensor) -> None:
        """Receives the next frames, in [-1, 1], on any device."""


class FrameCollector:
    """A `Sink` that collects the video as a tensor [3,F,H,W]."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._num_frames = device, 0
        self.video = torch.empty(0)

    def begin(self, size: tuple[int, int, int]) -> None:
        self.video, self._num_frames = torch.empty(0), 0
        self.video = torch.empty((3, *size), device=self._device)

    def write_frames(self, frames_3FHW: Tensor) -> None:
        end = self._num_frames + frames_3FHW.shape[1]
        self.video[:, self._num_frames : end] = frames_3FHW
        self._num_frames = end


class LatentBlocks:
    """The latents of a video, whose blocks may be denoised while the previous ones are decoded.

    A loop that denoises a video block by block passes its iterator to `Pipeline.decode_to_sink` in
    this object. A block is requested after the frames of the previous one were written. All ranks
    iterate at the same time, so that the iterator may run collectives, and an error that it raises
    on all of them, as for a cancelled video, ends decoding on all of them. It must not be inside a
    stage of the `StageTimer` when it yields. Blocks are kept, so that decoding can be restarted.

    Attributes:
        shape: (Z, f, h, w) of the whole video.
    """

    def __init__(self, shape: Sequence[int], blocks: Iterable[Tensor]) -> None:
        """Requests no block yet. blocks: Normalized latents [Z,n,h,w]; the sum of n is f."""
        self.shape, self._blocks = tuple(shape), iter(blocks)
        self._finished_blocks: list[Tensor] = []
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Tensor]:
        """Yields all blocks, from the first one."""
        yield from self._finished_blocks
        while sum(block.shape[1] for block in self._finished_blocks) < self.shape[1]:
            if self._error is not None:  # an iterator that has failed would only end
                raise self._error
            try:
                self._finished_blocks.append(next(self._blocks))
                if sum(block.shape[1] for block in self._finished_blocks) == self.shape[1]:
                    next(self._blocks, None)  # it releases networks after the last block
            except Exception as error:
                self._error = error
                raise
            yield self._finished_blocks[-1]

    def join(self) -> Tensor:
        """Returns the latents [Z,f,h,w] of all blocks."""
        return torch.cat([*self], dim=1)


class VideoVAE:
    """Encodes and decodes videos with a loaded autoencoder (`read_vae_spec`)."""

    def __init__(self, network: Autoencoder) -> None:
        device = next(network.parameters()).device
        # It is faster on these devices: cuDNN would convert every tensor to this layout and back.
        if device.type == "cuda" or (device.type == "cpu" and network.dtype == torch.bfloat16):
            network.to_channels_last()
        self._network = network
        mean, std = LATENT_STATISTICS[network.version.z_dim]
        self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1, 1)
        # The official code also stores the reciprocal, and divides by it when decoding.
        self.scale = 1 / torch.tensor(std, device=device).view(1, -1, 1, 1, 1)

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @torch.no_grad()
    def encode(self, video_3FHW: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
        """Encodes pixels in [-1, 1], F = 4n+1, to the normalized posterior mean [Z, n+1, h, w].

        Encoding is never tiled, because tiles would change the latents of an image.

        Args:
            rows: The rows of this rank. Only the main rank receives the latents.
        """
        video = rows.run_with_memory_agreement(lambda: video_3FHW[None].to(self.device))
        mean = self._network.encode(video, rows).float()
        return ((mean - self.mean) * self.scale)[0]

    def decode(self, latent_Zfhw: Tensor) -> Tensor:
        """Decodes normalized latents to pixels [3,F,H,W], clamped to [-1, 1]."""
        collector = FrameCollector(self.device)
        self.stream(LatentBlocks(latent_Zfhw.shape, [latent_Zfhw]), collector)
        return collector.video

    @torch.no_grad()
    def stream(self, blocks: LatentBlocks, sink: Sink, rows: Rows = ALL_ROWS) -> None:
        """Decodes latents, and writes the frames of each latent frame to the main rank's sink.

        The ranks agree once first, once more for the first block, twice for each block, and twice
        for each latent frame.
        """

        def begin() -> None:
            if rows.is_main:
                sink.begin(self._video_size(blocks.shape))

        def write_frames(frames_BCFHW: Tensor) -> None:
            if rows.is_main:
                sink.write_frames(frames_BCFHW[0].float().clamp_(-1, 1))

        rows.run_with_memory_agreement(begin)
        latents = (rows.run_with_memory_agreement(partial(self._denormalize, z)) for z in blocks)
        num_latent_frames = blocks.shape[1]
        with make_progress_bar(num_latent_frames, "decoding", "latent frame") as bar:
            for frames in self._network.decode_blocks(latents, num_latent_frames, rows):
                rows.run_with_memory_agreement(partial(write_frames, frames))
                bar.update()

    @torch.no_grad()
    def decode_in_tiles(self, latent_Zfhw: Tensor) -> Tensor:
        """Decodes in spatial tiles, with less memory; exact only with a single tile."""
        latent = self._denormalize(latent_Zfhw)
        with make_progress_bar(None, "decoding", "latent frame of a tile") as bar:
            if max(self._video_size(latent_Zfhw.shape)[1:]) <= tiles.SIDE:
                return self._decode_tile(latent, bar)[0].clamp_(-1, 1)
            video = torch.empty((1, 3, *self._video_size(latent_Zfhw.shape)), device=self.device)
            version = self._network.version
            decode_tile = partial(self._decode_tile, bar=bar)
            tiles.decode_tiles(decode_tile, latent, version.scale, version.patch, video)
            return video[0].clamp_(-1, 1)

    def _denormalize(self, latent_Zfhw: Tensor) -> Tensor:
        return latent_Zfhw[None].to(self.device, torch.float32) / self.scale + self.mean

    def _video_size(self, latent_shape: Sequence[int]) -> tuple[int, int, int]:
        """Returns frames, height and width of the decoded video. latent_shape: (Z, f, h, w)."""
        (_, f, h, w), scale = latent_shape, self._network.version.scale
        return 1 + (f - 1) * FRAMES_PER_LATENT, h * scale, w * scale

    def _decode_tile(self, latent_BZfhw: Tensor, bar: Any) -> Tensor:
        """Decodes a tile to pixels [B,3,F,H,W]."""
        video = torch.empty((1, 3, *self._video_size(latent_BZfhw.shape[1:])), device=self.device)
        offset = 0
        for frames in self._network.decode(latent_BZfhw):
            video[:, :, offset : offset + frames.shape[2]] = frames
            offset += frames.shape[2]
            bar.update()
        return video


def read_vae_spec(path: Path) -> ModelSpec[Autoencoder]:
    """Reads the sizes of an autoencoder from the headers of its weights, without loading it.

    Raises:
        InputError: The weights belong to another network.
    """
    tensors = read_headers(path, rename_vae_to_diffusers, "vae")
    try:
        base, channels = tensors["encoder.conv_in.weight"].shape[:2]
        z_dim = tensors["post_quant_conv.weight"].shape[0]
        version = {(v.pixel_channels, v.z_dim): name for name, v in VERSIONS.items()}[
            channels, z_dim
        ]
        decoder_base = tensors["decoder.conv_in.weight"].shape[0] // 4
        if min(base, decoder_base) < 1:
            raise ValueError("a size of 0")
    except (LookupError, ValueError) as error:
        why = f"does not hold the weights of a Wan 2.1 or 2.2 VAE ({describe_mismatch(error)})"
        remedy = "give Wan2.1_VAE.pth, Wan2.2_VAE.pth or a file with its weights"
        raise InputError(str(path), None, why, remedy) from error
    return ModelSpec("VAE", partial(Autoencoder, version, base, decoder_base), tensors, path)


def build_published_vae(version: str) -> Autoencoder:
    """Builds the autoencoder of Wan "2.1" or "2.2"."""
    return Autoencoder(version, *_PUBLISHED_WIDTHS[version])
