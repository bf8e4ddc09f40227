"""The autoencoders of Wan 2.1 (16 latent channels) and 2.2 (48), a latent frame at a time.

Legend: B batch (1), C channels, F H W pixel frames/height/width, f h w latent frames/height/width,
Z latent channels.

Layers are causal, so results do not depend on how many frames are processed at a time. The first
layers of the encoder and the last of the decoder have the largest frames; they process the frames
of a latent frame one at a time to reduce activation memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wan.modules.vae.layers import (
    Downsample,
    MidBlock,
    ResidualBlock,
    RMSNorm,
    Upsample,
    add_repeated,
    average_shortcut,
    match_weight_layout,
    pad_conv_input,
    silu,
)
from wan.modules.vae.rows import ALL_ROWS, Rows, VaeState

_WIDTHS = (1, 2, 4, 4)  # channels of the levels, in units of the base width
_HALVES_TIME = (False, True, True)  # temporal downsampling after each level of the encoder
_FIRST_LARGE_LEVEL = 2  # the first level of the decoder in which a latent frame is four frames
FRAMES_PER_LATENT = 4  # frames per latent frame, except the first one


@dataclass(frozen=True)
class VaeVersion:
    """Parameters in which the two autoencoders differ.

    Attributes:
        z_dim: Latent channels.
        patch: Side of a patch of pixels that is moved to channels.
        shortcuts: Each level has a residual shortcut.
    """

    z_dim: int
    patch: int
    shortcuts: bool

    @property
    def pixel_channels(self) -> int:
        """Channels of a frame after patches are moved to channels."""
        return 3 * self.patch**2

    @property
    def scale(self) -> int:
        """Pixels per latent along height and width."""
        return 8 * self.patch


VERSIONS = {"2.1": VaeVersion(16, 1, False), "2.2": VaeVersion(48, 2, True)}


def run_blocks(blocks: Iterable[nn.Module], x_BCFHW: Tensor, state: VaeState) -> Tensor:
    """Runs blocks in sequence."""
    for block in blocks:
        x_BCFHW = block(x_BCFHW, state)
    return x_BCFHW


def split_large_frames(x_BCFHW: Tensor, channels: int) -> Sequence[Tensor]:
    """Splits x into single frames if they are large, with the same decision on all ranks.

    Small frames need little memory, and PyTorch on a CPU uses another convolution algorithm,
    with other rounding, where channels x frames x rows is 20 480 or less (PyTorch 2.13).

    channels: Channels of the following layers.
    """
    return x_BCFHW.split(1, dim=2) if channels * x_BCFHW.shape[4] >= 16_384 else [x_BCFHW]


class DownBlock(nn.Module):
    """A level of 2.2's encoder."""

    def __init__(self, channels: int, out: int, time: bool, down: bool) -> None:
        super().__init__()
        self.out, self.factors = out, (1 + time, 1 + down)
        self.resnets = nn.ModuleList([ResidualBlock(channels, out), ResidualBlock(out, out)])
        self.downsampler = Downsample(out, time) if down else None

    def forward(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        y = x_BCFHW
        for resnet in self.resnets:
            y = resnet(y, state)
        if self.downsampler is not None:
            y = self.downsampler(y, state)
        return y.add_(average_shortcut(x_BCFHW, self.out, *self.factors))


class Encoder(nn.Module):
    def __init__(self, version: VaeVersion, base: int) -> None:
        super().__init__()
        widths = [base * width for width in (1, *_WIDTHS)]
        self.patch = version.patch
        self.conv_in = nn.Conv3d(version.pixel_channels, base, 3)
        blocks: list[nn.Module] = []
        for level, (channels, out) in enumerate(zip(widths, widths[1:], strict=False)):
            down = level < len(_HALVES_TIME)
            time = down and _HALVES_TIME[level]
            if version.shortcuts:
                blocks.append(DownBlock(channels, out, time, down))
            else:
                blocks += [ResidualBlock(channels, out), ResidualBlock(out, out)]
                blocks += [Downsample(out, time)] if down else []
        self.down_blocks = nn.ModuleList(blocks)
        # Blocks that process one frame at a time.
        self._num_large_blocks = 1 if version.shortcuts else 3
        self.mid_block = MidBlock(widths[-1])
        self.norm_out = RMSNorm(widths[-1])
        self.conv_out = nn.Conv3d(widths[-1], 2 * version.z_dim, 3)

    def forward(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        """Encodes the first frame, or the next four, to the moments of a latent [B,2Z,1,h,w]."""
        x, p = match_weight_layout(x_BCFHW, self.conv_in.weight), self.patch
        x = x.unflatten(4, (-1, p)).unflatten(3, (-1, p)).permute(0, 1, 6, 4, 2, 3, 5)
        frame_groups = split_large_frames(x.flatten(1, 3), self.conv_in.out_channels)
        x = torch.cat([self._encode_large_frames(frames, state) for frames in frame_groups], dim=2)
        x = self.mid_block(run_blocks(self.down_blocks[self._num_large_blocks :], x, state), state)
        return self.conv_out(pad_conv_input(self.conv_out, silu(self.norm_out(x, out=x)), state))

    def _encode_large_frames(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        x = self.conv_in(pad_conv_input(self.conv_in, x_BCFHW, state))
        return run_blocks(self.down_blocks[: self._num_large_blocks], x, state)


class UpBlock(nn.Module):
    """A level of the decoder. shortcut: add the shortcut of 2.2."""

    def __init__(self, channels: int, out: int, time: bool, up: bool, shortcut: bool) -> None:
        super().__init__()
        self.factors = (1 + time, 2) if up and shortcut else None
        self.resnets = nn.ModuleList([ResidualBlock(channels, out)])
        self.resnets.extend(ResidualBlock(out, out) for _ in range(2))
        if up and shortcut:
            self.upsampler = Upsample(out, out, time)
        elif up:
            self.upsamplers = nn.ModuleList([Upsample(out, out // 2, time)])
        self._up = up

    def forward(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        y = x_BCFHW
        for resnet in self.resnets:
            y = resnet(y, state)
        if self._up:
            y = (self.upsamplers[0] if self.factors is None else self.upsampler)(y, state)
        if self.factors is not None:
            add_repeated(y, x_BCFHW, *self.factors)
        return y


class Decoder(nn.Module):
    def __init__(self, version: VaeVersion, base: int) -> None:
        super().__init__()
        widths = [base * width for width in (_WIDTHS[-1], *reversed(_WIDTHS))]
        self.patch = version.patch
        self.conv_in = nn.Conv3d(version.z_dim, widths[0], 3)
        self.mid_block = MidBlock(widths[0])
        self.up_blocks = nn.ModuleList()
        for level, (channels, out) in enumerate(zip(widths, widths[1:], strict=False)):
            up = level < len(_HALVES_TIME)
            time = up and _HALVES_TIME[-1 - level]
            is_halved = level > 0 and not version.shortcuts  # by the previous upsampling
            channels = channels // 2 if is_halved else channels
            self.up_blocks.append(UpBlock(channels, out, time, up, version.shortcuts))
        self.norm_out = RMSNorm(widths[-1])
        self.conv_out = nn.Conv3d(widths[-1], version.pixel_channels, 3)

    def forward(self, z_BZfhw: Tensor, state: VaeState) -> Tensor:
        """Decodes a latent frame to the first frame, or to the next four."""
        x = pad_conv_input(self.conv_in, match_weight_layout(z_BZfhw, self.conv_in.weight), state)
        x = self.mid_block(self.conv_in(x), state)
        x = run_blocks(self.up_blocks[:_FIRST_LARGE_LEVEL], x, state)
        frame_groups = split_large_frames(x, x.shape[1])
        x = torch.cat([self._decode_large_frames(frames, state) for frames in frame_groups], dim=2)
        x = x.unflatten(1, (3, self.patch, self.patch)).permute(0, 1, 4, 5, 3, 6, 2)
        return x.flatten(5, 6).flatten(3, 4)

    def _decode_large_frames(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        x = run_blocks(self.up_blocks[_FIRST_LARGE_LEVEL:], x_BCFHW, state)
        return self.conv_out(pad_conv_input(self.conv_out, silu(self.norm_out(x, out=x)), state))


class Autoencoder(nn.Module):
    """Encoder and decoder, with the parameter names of diffusers' AutoencoderKLWan."""

    def __init__(self, version: str, base_dim: int, decoder_base_dim: int) -> None:
        """version: a key of VERSIONS."""
        super().__init__()
        self.version = VERSIONS[version]
        z_dim = self.version.z_dim
        self.encoder = Encoder(self.version, base_dim)
        self.quant_conv = nn.Conv3d(2 * z_dim, 2 * z_dim, 1)
        self.post_quant_conv = nn.Conv3d(z_dim, z_dim, 1)
        self.decoder = Decoder(self.version, decoder_base_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.quant_conv.weight.dtype

    def to_channels_last(self) -> Autoencoder:
        """Converts weights, and so activations, to the channels-last format; returns self."""
        for parameter in self.parameters():
            if parameter.dim() >= 4:
                last = {4: torch.channels_last, 5: torch.channels_last_3d}[parameter.dim()]
                parameter.data = parameter.data.contiguous(memory_format=last)
        return self

    def encode(self, video_B3FHW: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
        """Encodes pixels in [-1, 1], F = 4n+1, to the mean of the latents [B,Z,f,h,w].

        rows: The rows of this rank. The main rank returns all rows, other ranks none.
        """
        state, local_video = VaeState(rows), rows.slice_local_rows(video_B3FHW, self.version.scale)
        ends = range(1, local_video.shape[2] + 1, FRAMES_PER_LATENT)
        frame_groups = (local_video[:, :, max(0, end - FRAMES_PER_LATENT) : end] for end in ends)
        latent_frames = [rows.run_network(self.encoder, x, state) for x in frame_groups]

        def compute_mean() -> Tensor:
            moments = torch.cat(latent_frames, dim=2)
            return (self.quant_conv(moments) if moments.numel() else moments).chunk(2, dim=1)[0]

        return rows.run_with_memory_agreement(compute_mean)

    def decode(self, z_BZfhw: Tensor, rows: Rows = ALL_ROWS) -> Iterator[Tensor]:
        """Decodes latents; yields [B,3,1,H,W], then [B,3,4,H,W] for each further latent frame."""
        state = VaeState(rows)
        z = rows.run_with_memory_agreement(lambda: self.post_quant_conv(z_BZfhw.to(self.dtype)))
        for local_z in rows.slice_local_rows(z, 1).split(1, dim=2):
            yield rows.run_network(self.decoder, local_z, state)
