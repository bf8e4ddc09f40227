"""Attention inside latent frames, and what is added to the video's tokens."""

from __future__ import annotations

from itertools import product

import torch
from torch.testing import assert_close

from wan.kernels.sdpa import SdpaKernel
from wan.modules.frame_attention import (
    CausalConv1d,
    add_to_video_tokens,
    apply_norm_silu,
    attend_in_frames,
    find_local_frames,
)


def test_the_frames_of_a_ranks_tokens() -> None:
    """Counted token by token, for every offset and number of tokens."""
    for size, offset, count in product((1, 4, 6), range(13), range(9)):
        frames = [token // size for token in range(offset, offset + count)]
        expected = {frame: frames.count(frame) for frame in frames}
        indices, counts = find_local_frames(offset, count, size)
        assert dict(zip(indices, counts, strict=True)) == expected, (size, offset, count)


def test_tokens_attend_to_their_own_frame() -> None:
    """Token by token, with frames that are cut."""
    counts = [2, 5, 1]
    q = torch.randn(1, sum(counts), 3, 8)
    k, v = torch.randn(2, len(counts), 4, 3, 8)
    output, first = attend_in_frames(SdpaKernel(), q, k, v, counts), 0
    for frame, count in enumerate(counts):
        for token in range(first, first + count):
            weights = (torch.einsum("nd,and->na", q[0, token], k[frame]) / 8**0.5).softmax(-1)
            expected = torch.einsum("na,and->nd", weights, v[frame])
            assert_close(output[0, token], expected, rtol=1e-5, atol=1e-6)
        first += count


def test_only_the_videos_tokens_are_changed() -> None:
    """By scale * y, in place in inference and in a new tensor with autograd."""
    for has_grad, scale in product((False, True), (1.0, 0.3)):
        x, y = torch.randn(2, 7, 4), torch.randn(2, 5, 4)
        original, expected = x.clone(), x.clone()
        expected[:, :5] += scale * y
        with torch.set_grad_enabled(has_grad):
            result = add_to_video_tokens(x, y, scale)
        assert_close(result, expected)
        assert torch.equal(x, original) if has_grad else result is x


def test_a_causal_convolution_repeats_the_first_step() -> None:
    for stride in (1, 2):
        layer, x = CausalConv1d(3, 5, stride).requires_grad_(False), torch.randn(2, 3, 9)
        padded = torch.cat([x[..., :1], x[..., :1], x], dim=-1)
        steps = range(0, 9, stride)
        windows = torch.stack([padded[..., step : step + 3] for step in steps], dim=1)
        expected = torch.einsum("btik,oik->bot", windows, layer.conv.weight)
        assert_close(layer(x), expected + layer.conv.bias[:, None], rtol=1e-5, atol=1e-5)
        assert layer.bfloat16()(x).dtype == torch.float32


def test_norm_and_silu() -> None:
    x = torch.randn(2, 6, 4, dtype=torch.float64) * 3
    rows = x.transpose(1, 2) - x.mean(1)[..., None]
    rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(apply_norm_silu(x), rows * torch.sigmoid(rows))
