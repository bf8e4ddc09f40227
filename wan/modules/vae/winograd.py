"""The decoder's and encoder's largest layers in float32 on CPUs with AVX-512, in C++.

PyTorch's direct convolution reaches the speed of matrix products there, so only fewer operations
are faster: Winograd's algorithm needs 16 products instead of 36 for 2x2 outputs, and 9 where the
input is upsampled by two first. Norm, SiLU and padding are one pass. docs/numerics.md states the
rounding errors.

Legend: C input channels, O output channels, F frames, H W rows/columns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from wan.utils.cpp_library import CppLibrary

_ROWS = 8  # output channels are padded to a multiple
# Rows x columns of latents x width^2 above which a few frames repay the time of compiling.
_MIN_OPERATIONS = 900 * 96**2


def is_faster(weight: Tensor, base_width: int, num_latents: int) -> bool:
    """Whether to use this module for frames of a size; the decision depends on nothing else.

    Args:
        weight: One weight of the autoencoder.
        base_width: Channels of the layers with the largest frames.
        num_latents: Rows x columns of a latent frame.
    """
    is_supported = weight.dtype == torch.float32 and weight.device.type == "cpu"
    is_large = num_latents * base_width**2 >= _MIN_OPERATIONS
    return is_supported and is_large and WINOGRAD_LIBRARY.is_available()


def convolve(
    conv: nn.Conv2d | nn.Conv3d, frames: Sequence[Tensor | None], upsampled: bool = False
) -> Tensor:
    """Convolves frames that have a border.

    Args:
        conv: A convolution of 3x3 (T = 1) or 3x3x3 (T = 3) without padding, with a bias.
        frames: T + F - 1 frames of float32 [C, H + 2, W + 2], of which a channel is contiguous;
            None: zeros. On the meta device nothing is computed.
        upsampled: Each pixel is doubled along rows and columns before the convolution.

    Returns:
        [O, F, H, W], or [O, F, 2H, 2W] if upsampled.
    """
    (outer, channels), time = conv.weight.shape[:2], conv.weight[0, 0].numel() // 9
    side, factor = (3, 2) if upsampled else (4, 1)
    last, num_frames = frames[-1], len(frames) - time + 1
    assert last is not None and conv.bias is not None
    _, rows, columns = last.shape
    out = last.new_empty(outer, num_frames, factor * (rows - 2), factor * (columns - 2))
    if out.is_meta:
        return out
    library, threads = WINOGRAD_LIBRARY.load(), torch.get_num_threads()
    depth = time * channels
    packed = last.new_empty(side**2, outer + -outer % _ROWS, depth)
    weight = conv.weight.contiguous()
    library.pack_weights(weight.data_ptr(), outer, channels, time, side, packed.data_ptr(), threads)
    workspaces = last.new_empty(threads, library.count_workspace_floats(side, depth, outer))
    library.convolve(
        _list_pointers(frames),
        packed.data_ptr(),
        conv.bias.data_ptr(),
        _list_pointers(out.unbind(1)),
        *(channels, outer, time, num_frames, rows, columns, last.stride(0), out.stride(0), side),
        workspaces.data_ptr(),
        threads,
    )
    return out


def normalize(gamma: Tensor, x_CHW: Tensor, out_CHW: Tensor) -> None:
    """Computes SiLU(x / |x| * sqrt(C) * gamma) of a frame, with the norm |x| over the channels.

    Args:
        gamma: One value for each channel.
        x_CHW: float32, of which a channel is contiguous.
        out_CHW: The result [C, H + 2, W + 2]; the border's rows are not written.
    """
    if out_CHW.is_meta:
        return
    library, sizes = WINOGRAD_LIBRARY.load(), (*x_CHW.shape, x_CHW.stride(0))
    pointers = (x.data_ptr() for x in (x_CHW, gamma, out_CHW))
    library.normalize(*pointers, *sizes, torch.get_num_threads())


def _list_pointers(frames: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    pointers = [None if frame is None else frame.data_ptr() for frame in frames]
    return (ctypes.c_void_p * len(pointers))(*pointers)


def _declare_convolution(library: ctypes.CDLL) -> None:
    pointer, integer, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.count_workspace_floats.restype = integer
    library.count_workspace_floats.argtypes = [integer] * 3
    library.normalize.restype = library.pack_weights.restype = library.convolve.restype = None
    library.normalize.argtypes = [pointer] * 3 + [integer] * 4 + [threads]
    library.pack_weights.argtypes = [pointer] + [integer] * 4 + [pointer, threads]
    library.convolve.argtypes = [pointer] * 4 + [integer] * 9 + [pointer, threads]


WINOGRAD_LIBRARY = CppLibrary(
    Path(__file__).with_suffix(".cpp"),
    _declare_convolution,
    "The VAE takes about twice as long, because its faster convolution does not compile",
)
