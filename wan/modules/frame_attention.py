"""Per-frame cross-attention of S2V and Animate: tokens attend to the features of their own frame.

Legend: B batch, C channels, N the video's tokens on this rank, L all tokens on this rank, H heads,
D head size, T latent frames, A tokens that a frame attends to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.kernels.interfaces import Kernel


def find_local_frames(
    token_offset: int, num_local_tokens: int, frame_size: int
) -> tuple[range, list[int]]:
    """Finds the latent frames of this rank's tokens, and how many tokens of each are on the rank.

    Args:
        token_offset: Global index of this rank's first token.
        num_local_tokens: Video tokens on this rank.
        frame_size: Tokens of a latent frame.
    """
    if not num_local_tokens:
        return range(0), []
    frames = range(token_offset // frame_size, -(-(token_offset + num_local_tokens) // frame_size))
    begin, end = token_offset, token_offset + num_local_tokens
    return frames, [min((i + 1) * frame_size, end) - max(i * frame_size, begin) for i in frames]


def attend_in_frames(
    kernel: Kernel, q_BNHD: Tensor, k_TAHD: Tensor, v_TAHD: Tensor, tokens_per_frame: Sequence[int]
) -> Tensor:
    """Computes attention [1,N,H,D] of each token to the A keys and values of its frame.

    tokens_per_frame: at least one frame; the frames are padded to the longest and form a batch.
    """
    max_tokens, frames = max(tokens_per_frame), q_BNHD[0].split(list(tokens_per_frame))
    padded_frames = [F.pad(frame, (0, 0, 0, 0, 0, max_tokens - len(frame))) for frame in frames]
    out = kernel(torch.stack(padded_frames), k_TAHD, v_TAHD)
    return torch.cat(
        [frame_out[:length] for frame_out, length in zip(out, tokens_per_frame, strict=True)]
    )[None]


def add_to_video_tokens(x_BLC: Tensor, y_BNC: Tensor, scale: float = 1.0) -> Tensor:
    """Adds scale * y to the first N tokens of the residual stream; in place in inference."""
    num_tokens = y_BNC.shape[1]
    if torch.is_grad_enabled():
        return torch.cat(
            (x_BLC[:, :num_tokens].add(y_BNC, alpha=scale), x_BLC[:, num_tokens:]), dim=1
        )
    x_BLC[:, :num_tokens].add_(y_BNC, alpha=scale)
    return x_BLC


def check_shapes(x: Tensor, expected: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Raises ValueError if a conditioning tensor does not fit the latents x.

    expected: Name -> tensor and expected shape.
    """
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name} of shape {list(tensor.shape)} do not fit latents of shape "
                f"{list(x.shape)}, which take {list(shape)}."
            )


class CausalConv1d(nn.Module):
    """A causal convolution over time, padded by repeating the first step; in float32."""

    def __init__(self, dim_in: int, dim_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dim_in, dim_out, 3, stride)

    def forward(self, x_BCT: Tensor) -> Tensor:
        conv, padded = self.conv, F.pad(x_BCT, (2, 0), mode="replicate")
        assert conv.bias is not None
        return F.conv1d(padded, conv.weight.float(), conv.bias.float(), conv.stride)


def apply_norm_silu(x_BCT: Tensor) -> Tensor:
    """Applies layer norm without weights and SiLU; [B,C,T] to [B,T,C]."""
    x_BTC = x_BCT.transpose(1, 2)
    return F.silu(F.layer_norm(x_BTC, x_BTC.shape[-1:], eps=1e-6))
