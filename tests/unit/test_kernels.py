"""The log-sum-exp of the dense kernel, and the padding that CUDA's operators need."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels.sdpa import SdpaKernel, padded_heads


def qkv(head: int, rows: int = 19, keys: int = 33) -> list[Tensor]:
    generator = torch.Generator().manual_seed(head)
    return [torch.randn(2, n, 3, head, generator=generator) for n in (rows, keys, keys)]


def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp in float64, from the definition; everything [B,N,S,D]."""
    q, k, v = (x.double() for x in (q, k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("head", [6, 8, 64, 128])
def test_with_lse(head: int) -> None:
    tensors = qkv(head)
    out, lse = SdpaKernel().with_lse(*tensors)
    expected, expected_lse = plain(*(x.transpose(1, 2) for x in tensors))
    assert lse.dtype == torch.float32 and lse.shape == (2, 3, 19)
    assert (out.transpose(1, 2) - expected).abs().max() <= 2e-6
    assert (lse - expected_lse).abs().max() <= 2e-6


@pytest.mark.parametrize("head", [6, 8, 20])
def test_padded_heads(head: int) -> None:
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        seen.append(q.shape[-1])
        return F.scaled_dot_product_attention(q, k, v, scale=scale), q

    tensors = [x.transpose(1, 2) for x in qkv(head)]
    out, _ = padded_heads(attend, *tensors)
    assert seen[0] % 8 == 0 and out.shape == tensors[0].shape
    assert (out - plain(*tensors)[0]).abs().max() <= 2e-6
