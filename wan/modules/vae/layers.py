"""The layers of both autoencoders: causal convolutions, norms, attention, resampling.

A video is processed 1, 2 or 4 frames at a time. The input of a convolution is written once, into a
tensor that also has space for the cached frames and the border.

Legend: B batch (1), C channels, F frames, H rows, W columns, L rows x columns.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.modules.vae.rows import VaeState

silu = partial(F.silu, inplace=True)
PAST = 2  # cached frames of a convolution with kernel size 3 in time


def _is_channels_last(x_BCFHW: Tensor) -> bool:
    return x_BCFHW.stride(1) == 1


def match_weight_layout(x_BCFHW: Tensor, weight: Tensor) -> Tensor:
    """Converts x to the dtype and memory format of a weight."""
    is_last = weight.is_contiguous(memory_format=torch.channels_last_3d)
    layout = torch.channels_last_3d if is_last else torch.contiguous_format
    return x_BCFHW.to(weight.dtype).contiguous(memory_format=layout)


def pad_conv_input(conv: nn.Conv3d, x_BCFHW: Tensor, state: VaeState) -> Tensor:
    """Pads the input of a causal 3x3x3 convolution and updates the frame cache.

    The two previous frames are prepended, and a border of one pixel is added. Frames before the
    first one and pixels outside the image are zeros.
    """
    _, channels, frames, rows, columns = x_BCFHW.shape
    layout = torch.channels_last_3d if _is_channels_last(x_BCFHW) else torch.contiguous_format
    shape = (1, channels, PAST + frames, rows + 2, columns + 2)
    padded = torch.empty(shape, dtype=x_BCFHW.dtype, device=x_BCFHW.device, memory_format=layout)
    current = padded[:, :, PAST:]
    current[..., 1:-1, 1:-1] = x_BCFHW
    current[..., 0].zero_()
    current[..., -1].zero_()
    state.rows.exchange_halo(current, 1, 1)
    cached_frames = state.cached_frames.setdefault(conv, deque(maxlen=PAST))
    padded[:, :, : PAST - len(cached_frames)].zero_()
    for index, frame in enumerate(cached_frames, PAST - len(cached_frames)):
        padded[:, :, index : index + 1] = frame
    cached_frames.extend(frame.clone() for frame in current[:, :, -PAST:].split(1, dim=2))
    return padded


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
        y = self.conv1(pad_conv_input(self.conv1, silu(self.norm1(x_BCFHW)), state))
        conv_input = pad_conv_input(self.conv2, silu(self.norm2(y, out=y)), state)
        del y  # free it before the next tensor of its size is allocated
        y = self.conv2(conv_input)
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
