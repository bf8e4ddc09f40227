"""The official attention function: variable lengths, grouped heads, causal and windowed attention.

The networks of this package do not use it; their kernels are in `wan.kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Tensor | None = None,
    k_lens: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    q_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    version: int | None = None,
) -> Tensor:
    """Attends like the official function of this name, with PyTorch's scaled dot-product attention.

    Args:
        q: Queries [B,Lq,Nq,D].
        k: Keys [B,Lk,Nk,D]; Nk divides Nq, and consecutive queries' heads share a key's head.
        v: Values [B,Lk,Nk,Dv].
        q_lens: Valid queries [B]; the result's other rows are 0. None: all.
        k_lens: Valid keys [B]. None: all.
        dropout_p: 0; dropout is for training only.
        softmax_scale: Factor of the products; None: 1/sqrt(D).
        q_scale: Factor of the queries.
        causal: A query attends to no later key; the last query and the last key are aligned.
        window_size: Keys before and after each query that it attends to; -1: all.
        deterministic: No effect.
        dtype: Of the computation, unless the tensors have 16 bits; float32 is allowed here.
        version: No effect; PyTorch selects the kernel.

    Returns:
        [B,Lq,Nq,Dv] in the dtype of q.

    Raises:
        NotImplementedError: `dropout_p` is not 0.
    """
    if dropout_p:
        raise NotImplementedError("dropout_p is for training, which is not supported; leave it 0.")
    out_dtype = q.dtype
    dtype = v.dtype if v.dtype in _HALF_DTYPES else dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if q_scale is not None:
        q = q * q_scale
    if q_lens is None and k_lens is None:
        return _attend(q, k, v, softmax_scale, causal, window_size).to(out_dtype)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for b in range(len(q)):
        num_q = q.shape[1] if q_lens is None else int(q_lens[b])
        num_k = k.shape[1] if k_lens is None else int(k_lens[b])
        sample = q[b : b + 1, :num_q], k[b : b + 1, :num_k], v[b : b + 1, :num_k]
        out[b : b + 1, :num_q] = _attend(*sample, softmax_scale, causal, window_size)
    return out.to(out_dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, fa_version: int | None = None, **kwargs: Any
) -> Tensor:
    """Calls `flash_attention`, whose arguments it takes, with `fa_version` instead of `version`."""
    options: dict[str, Any] = {**kwargs, "version": fa_version}
    return flash_attention(q, k, v, *args, **options)


def _attend(
    q_BSND: Tensor,
    k_BSND: Tensor,
    v_BSND: Tensor,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
    num_earlier, num_later = window_size[0], 0 if causal else window_size[1]
    mask = None
    if num_earlier >= 0 or num_later >= 0:
        last_keys = torch.arange(q.shape[2], device=q.device) + k.shape[2] - q.shape[2]
        distance_QK = torch.arange(k.shape[2], device=q.device) - last_keys[:, None]
        mask = torch.ones_like(distance_QK, dtype=torch.bool)
        mask = mask if num_earlier < 0 else mask & (distance_QK >= -num_earlier)
        mask = mask if num_later < 0 else mask & (distance_QK <= num_later)
    has_groups = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=has_groups)
    return out.transpose(1, 2)
