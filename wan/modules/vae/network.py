"""The autoencoders of Wan 2.1 (16 latent channels) and 2.2 (48), a latent frame at a time.

Legend: B batch (1), C channels, F H W pixel frames/height/width, f h w latent frames/height/width,
L rows x columns, Z latent channels.

Layers are causal, so results do not depend on how many frames are processed at a time: 1, 2 or 4.
The input of a convolution is written once, into a tensor that also has space for the cached frames
and the border. The first layers of the encoder and the last of the decoder have the largest frames;
they process the frames of a latent frame one at a time to reduce activation memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.modules.vae import winograd
from wan.modules.vae.rows import ALL_ROWS, Rows, VaeState

silu = partial(F.silu, inplace=True)
PAST = 2  # cached frames of a convolution with kernel size 3 in time


def _is_channels_last(x_BCFHW: Tensor) -> bool:
    return x_BCFHW.stride(1) == 1


def match_weight_layout(x_BCFHW: Tensor, weight: Tensor) -> Tensor:
    """Converts x to the dtype and memory format of a weight."""
    is_last = weight.is_contiguous(memory_format=torch.channels_last_3d)
    layout = torch.channels_last_3d if is_last else torch.contiguous_format
    return x_BCFHW.to(weight.dtype).contiguous(memory_format=layout)


ConvInput = Tensor | list[Tensor | None]
"""[B,C,F,H,W], or for `winograd.convolve` frames [C,H,W] (None: zeros), with their border."""


def make_conv_input(
    conv: nn.Conv3d,
    x_BCFHW: Tensor,
    state: VaeState,
    norm: RMSNorm | None = None,
    reuses_x: bool = True,
) -> ConvInput:
    """Pads the input of a causal 3x3x3 convolution and updates the frame cache.

    The two previous frames are prepended, and a border of one pixel is added. Frames before the
    first one and pixels outside the image are zeros.

    Args:
        norm: Applied to x first, and then SiLU.
        reuses_x: x may be overwritten.
    """
    cached_frames = state.cached_frames.setdefault(conv, deque(maxlen=PAST))
    if state.uses_winograd:
        current = _pad_frames(x_BCFHW, state, norm)
        earlier = [None] * (PAST - len(cached_frames)) + [frame[0, :, 0] for frame in cached_frames]
        last = current[:, :, -PAST:]  # cloned if it would keep more frames in memory
        cached_frames.extend((last if last.shape == current.shape else last.clone()).split(1, 2))
        return [*earlier, *current[0].unbind(1)]
    _, channels, frames, rows, columns = x_BCFHW.shape
    layout = torch.channels_last_3d if _is_channels_last(x_BCFHW) else torch.contiguous_format
    shape = (1, channels, PAST + frames, rows + 2, columns + 2)
    padded = torch.empty(shape, dtype=x_BCFHW.dtype, device=x_BCFHW.device, memory_format=layout)
    current = padded[:, :, PAST:]
    if norm is not None:
        x_BCFHW = silu(norm(x_BCFHW, out=x_BCFHW if reuses_x else None))
    current[..., 1:-1, 1:-1] = x_BCFHW
    current[..., 0].zero_()
    current[..., -1].zero_()
    state.rows.exchange_halo(current, 1, 1)
    padded[:, :, : PAST - len(cached_frames)].zero_()
    for index, frame in enumerate(cached_frames, PAST - len(cached_frames)):
        padded[:, :, index : index + 1] = frame
    cached_frames.extend(frame.clone() for frame in current[:, :, -PAST:].split(1, dim=2))
    return padded


def _pad_frames(x_BCFHW: Tensor, state: VaeState, norm: RMSNorm | None = None) -> Tensor:
    """Adds a border of one pixel to frames of x or, with a norm, of SiLU(norm(x)), in float32."""
    _, channels, frames, rows, columns = x_BCFHW.shape
    padded = x_BCFHW.new_empty(1, frames, channels, rows + 2, columns + 2).transpose(1, 2)
    if norm is None:
        padded[..., 0].zero_()
        padded[..., -1].zero_()
        padded[..., 1:-1, 1:-1] = x_BCFHW
    else:
        for index in range(frames):
            winograd.normalize(norm.gamma, x_BCFHW[0, :, index], padded[0, :, index])
    state.rows.exchange_halo(padded, 1, 1)
    return padded


def apply_conv(conv: nn.Conv3d, conv_input: ConvInput) -> Tensor:
    """Applies a 3x3x3 convolution to the result of `make_conv_input`."""
    if isinstance(conv_input, list):
        return winograd.convolve(conv, conv_input).unsqueeze(0)
    y_BCFHW: Tensor = conv(conv_input)
    return y_BCFHW


class RMSNorm(nn.Module):
    """RMS norm over the channels of each pixel. dims: number of axes after the channels."""

    def __init__(self, channels: int, dims: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *[1] * dims))

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalizes axis 1. The norm is computed at least in float32. out: may be x."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=dtype).clamp_min_(1e-12)
        out = torch.div(x, length, out=torch.empty_like(x) if out is None else out)
        return out.mul_(x.shape[1] ** 0.5).mul_(self.gamma)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(channels)
        self.conv1 = nn.Conv3d(channels, out_channels, 3)
        self.norm2 = RMSNorm(out_channels)
        self.conv2 = nn.Conv3d(out_channels, out_channels, 3)
        self.conv_shortcut = (
            nn.Conv3d(channels, out_channels, 1) if channels != out_channels else nn.Identity()
        )

    def forward(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        conv_input = make_conv_input(self.conv1, x_BCFHW, state, self.norm1, reuses_x=False)
        y = apply_conv(self.conv1, conv_input)
        del conv_input
        conv_input = make_conv_input(self.conv2, y, state, self.norm2)
        del y  # free it before the next tensor of its size is allocated
        y = apply_conv(self.conv2, conv_input)
        del conv_input
        return y.add_(self.conv_shortcut(x_BCFHW))


class FrameAttention(nn.Module):
    """Self-attention over the pixels of each frame, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, dims=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        x_FCHW = x_BCFHW[0].transpose(0, 1)
        channels, size = x_FCHW.shape[1], x_FCHW.shape[2:]
        qkv_FLC = self.to_qkv(self.norm(x_FCHW)).flatten(2).transpose(1, 2).contiguous()
        q_FLC, kv_FLC = qkv_FLC.split((channels, 2 * channels), dim=2)
        k_FLC, v_FLC = state.rows.gather_rows(kv_FLC).chunk(2, dim=2)
        q, k, v = (part_FLC.unsqueeze(1) for part_FLC in (q_FLC, k_FLC, v_FLC))
        out_FLC = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        y_FCHW = torch.empty_like(x_FCHW).copy_(out_FLC.transpose(1, 2).unflatten(2, size))
        return self.proj(y_FCHW).transpose(0, 1).unsqueeze(0) + x_BCFHW


class MidBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([FrameAttention(channels)])
        self.resnets = nn.ModuleList([ResidualBlock(channels, channels) for _ in range(2)])

    def forward(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        x = self.resnets[0](x_BCFHW, state)
        return self.resnets[1](self.attentions[0](x, state), state)


def _allocate_frames(x: Tensor, frames: int, channels: int, rows: int, columns: int) -> Tensor:
    """Allocates [B,C,F,H,W] whose frames have the memory format of a 2D convolution's input."""
    shape = (frames, channels, rows, columns)
    layout = torch.channels_last if _is_channels_last(x) else torch.contiguous_format
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    return out.transpose(0, 1).unsqueeze(0)


def _conv_frames(conv: nn.Module, x_BCFHW: Tensor) -> Tensor:
    """Applies a 2D convolution to each frame."""
    return conv(x_BCFHW[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0)


class Upsample(nn.Module):
    """Doubles rows and columns and, with `time`, all frames but the first one."""

    def __init__(self, channels: int, out_channels: int, time: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.Identity(), nn.Conv2d(channels, out_channels, 3))
        self.time_conv = nn.Conv3d(channels, 2 * channels, (3, 1, 1)) if time else None

    def forward(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        x_BCFkHW = x_BCFHW.unsqueeze(3)
        if self.time_conv is not None:
            x_BCFkHW = self._upsample_time(self.time_conv, x_BCFHW, state)
        _, channels, frames, k, rows, columns = x_BCFkHW.shape
        if state.uses_winograd:
            conv, padded = self.resample[1], _pad_frames(x_BCFkHW.flatten(2, 3), state)
            assert isinstance(conv, nn.Conv2d)
            return winograd.convolve(conv, padded[0].unbind(1), upsampled=True).unsqueeze(0)
        conv_input = _allocate_frames(x_BCFHW, frames * k, channels, 2 * rows + 2, 2 * columns + 2)
        inside = conv_input[..., 1:-1, 1:-1].unflatten(4, (columns, 2)).unflatten(3, (rows, 2))
        inside.unflatten(2, (frames, k)).copy_(x_BCFkHW[..., None, :, None])
        conv_input[..., 0].zero_()
        conv_input[..., -1].zero_()
        state.rows.exchange_halo(conv_input, 1, 1)
        return _conv_frames(self.resample, conv_input)

    @staticmethod
    def _upsample_time(conv: nn.Conv3d, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        """Upsamples [B,C,F,H,W] to [B,C,F,k,H,W] with k = 2, or k = 1 for the first frame.

        The first frame is not an input of the convolution for later frames.
        """
        cached_frames = state.cached_frames.get(conv)
        if cached_frames is None:
            state.cached_frames[conv] = deque([torch.zeros_like(x_BCFHW[:, :, :1])] * PAST, PAST)
            return x_BCFHW.unsqueeze(3)
        conv_input = torch.cat((*cached_frames, x_BCFHW), dim=2)
        cached_frames.extend(frame.clone() for frame in x_BCFHW[:, :, -PAST:].split(1, dim=2))
        doubled: Tensor = conv(conv_input)
        return doubled.unflatten(1, (2, -1)).movedim(1, 3)


class Downsample(nn.Module):
    """Halves rows and columns (rounding down) and, with `time`, all frames but the first one."""

    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.Identity(), nn.Conv2d(channels, channels, 3, stride=2))
        self.time_conv = (
            nn.Conv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if time else None
        )

    def forward(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        _, channels, frames, rows, columns = x_BCFHW.shape
        conv_input = _allocate_frames(x_BCFHW, frames, channels, rows + 1, columns + 1)
        conv_input[..., :-1, :-1].copy_(x_BCFHW)
        conv_input[..., -1].zero_()
        state.rows.exchange_halo(conv_input, 0, 1)
        y = _conv_frames(self.resample, conv_input)
        if self.time_conv is None:
            return y
        cached_frames = state.cached_frames.get(self.time_conv)
        state.cached_frames[self.time_conv] = deque([y[:, :, -1:].clone()])
        return y if cached_frames is None else self.time_conv(torch.cat((*cached_frames, y), dim=2))


def average_shortcut(x_BCFHW: Tensor, channels: int, time: int, space: int) -> Tensor:
    """Computes the shortcut of 2.2's encoder (AvgDown3D in diffusers).

    Pixels are moved to channels, and groups of channels are averaged.

    Args:
        x_BCFHW: The input of the level.
        channels: Channels of the result.
        time: Downsampling factor of frames; zeros are added before the first frame.
        space: Downsampling factor of rows and columns.
    """
    x = F.pad(x_BCFHW, (0, 0, 0, 0, -x_BCFHW.shape[2] % time, 0))
    for dim, factor in ((4, space), (3, space), (2, time)):
        x = x.unflatten(dim, (-1, factor))
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
    return x.unflatten(1, (channels, -1)).mean(dim=2)


def add_repeated(y_BCFHW: Tensor, x_BCFHW: Tensor, time: int, space: int) -> None:
    """Adds the shortcut of 2.2's decoder to y (DupUp3D in diffusers).

    Channels are repeated and moved to pixels.

    Args:
        y_BCFHW: The output of the level, changed in place.
        x_BCFHW: The input of the level.
        time: Upsampling factor of frames, except that the first frame stays one.
        space: Upsampling factor of rows and columns.
    """
    channels, frames = y_BCFHW.shape[1], x_BCFHW.shape[2]
    groups = x_BCFHW.unflatten(1, (channels, -1))
    repeats = time * space * space // groups.shape[2]
    repeated = groups.unsqueeze(3).expand(-1, -1, -1, repeats, -1, -1, -1)
    shortcut = repeated.reshape(1, channels, time, space, space, *x_BCFHW.shape[2:])
    if y_BCFHW.shape[2] < time * frames:
        shortcut, time = shortcut[:, :, -1:], 1
    y = y_BCFHW
    for dim, factor in ((4, space), (3, space), (2, time)):
        y = y.unflatten(dim, (-1, factor))
    y.add_(shortcut.permute(0, 1, 5, 2, 6, 3, 7, 4))


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
        return apply_conv(self.conv_out, make_conv_input(self.conv_out, x, state, self.norm_out))

    def _encode_large_frames(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        x = apply_conv(self.conv_in, make_conv_input(self.conv_in, x_BCFHW, state))
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
        x = match_weight_layout(z_BZfhw, self.conv_in.weight)
        x = apply_conv(self.conv_in, make_conv_input(self.conv_in, x, state))
        x = self.mid_block(x, state)
        x = run_blocks(self.up_blocks[:_FIRST_LARGE_LEVEL], x, state)
        frame_groups = split_large_frames(x, x.shape[1])
        x = torch.cat([self._decode_large_frames(frames, state) for frames in frame_groups], dim=2)
        x = x.unflatten(1, (3, self.patch, self.patch)).permute(0, 1, 4, 5, 3, 6, 2)
        return x.flatten(5, 6).flatten(3, 4)

    def _decode_large_frames(self, x_BCFHW: Tensor, state: VaeState) -> Tensor:
        x = run_blocks(self.up_blocks[_FIRST_LARGE_LEVEL:], x_BCFHW, state)
        return apply_conv(self.conv_out, make_conv_input(self.conv_out, x, state, self.norm_out))


class Autoencoder(nn.Module):
    """Encoder and decoder, with the parameter names of diffusers' AutoencoderKLWan."""

    def __init__(self, version: str, base_dim: int, decoder_base_dim: int) -> None:
        """version: a key of VERSIONS."""
        super().__init__()
        self.version = VERSIONS[version]
        self.z_dim = z_dim = self.version.z_dim
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

    def _make_state(self, rows: Rows, base_width: int, num_latents: int) -> VaeState:
        """num_latents: Rows x columns of a latent frame of all ranks."""
        is_faster = winograd.is_faster(self.quant_conv.weight, base_width, num_latents)
        return VaeState(rows, rows.agree(is_faster))  # the ranks may have different CPUs

    def encode(self, video_B3FHW: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
        """Encodes pixels in [-1, 1], F = 4n+1, to the mean of the latents [B,Z,f,h,w].

        rows: The rows of this rank. The main rank returns all rows, other ranks none.
        """
        width, num_pixels = self.encoder.conv_in.out_channels, video_B3FHW[0, 0, 0].numel()
        state = self._make_state(rows, width, num_pixels // self.version.scale**2)
        local_video = rows.slice_local_rows(video_B3FHW, self.version.scale)
        ends = range(1, local_video.shape[2] + 1, FRAMES_PER_LATENT)
        frame_groups = (local_video[:, :, max(0, end - FRAMES_PER_LATENT) : end] for end in ends)
        latent_frames = [rows.run_network(self.encoder, x, state) for x in frame_groups]

        def compute_mean() -> Tensor:
            moments = torch.cat(latent_frames, dim=2)
            return (self.quant_conv(moments) if moments.numel() else moments).chunk(2, dim=1)[0]

        return rows.run_with_memory_agreement(compute_mean)

    def decode(self, z_BZfhw: Tensor, rows: Rows = ALL_ROWS) -> Iterator[Tensor]:
        """Decodes latents; yields [B,3,1,H,W], then [B,3,4,H,W] for each further latent frame."""
        yield from self.decode_blocks([z_BZfhw], z_BZfhw.shape[2], rows)

    def decode_blocks(
        self, z_blocks: Iterable[Tensor], num_latent_frames: int, rows: Rows = ALL_ROWS
    ) -> Iterator[Tensor]:
        """Decodes blocks [B,Z,f,h,w] of a video in order; yields the frames of `decode`.

        The cached frames of the convolutions are kept between the blocks, so that each frame has
        the bits that it has if the video is one block.

        Args:
            num_latent_frames: Those of all blocks.
        """
        state, end = None, 0
        for z_BZfhw in z_blocks:
            if state is None:
                width, num_latents = self.decoder.conv_out.in_channels, z_BZfhw[0, 0, 0].numel()
                state = self._make_state(rows, width, num_latents)
            start, end = end, end + z_BZfhw.shape[2]
            padding = start, num_latent_frames - end
            convert = partial(self._convert_latents, z_BZfhw, padding)
            z = rows.run_with_memory_agreement(convert)[:, :, start:end]
            for local_z in rows.slice_local_rows(z, 1).split(1, dim=2):
                yield rows.run_network(self.decoder, local_z, state)

    def _convert_latents(self, z_BZfhw: Tensor, padding: tuple[int, int]) -> Tensor:
        """Converts latents to inputs of the decoder, between other latent frames of a video.

        PyTorch on a CPU selects the algorithm of a convolution, and so its rounding, by the size.
        """
        return self.post_quant_conv(F.pad(z_BZfhw.to(self.dtype), (0, 0, 0, 0, *padding)))
