"""Dense attention operators of torch_npu, and the arithmetic that all attention here shares.

Legend: B batch, N heads, S rows, D head size; q query and k key rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_npu.chip import (
    require,
    require_chip,
    require_contiguous,
    require_dtype,
    require_same_dtype,
    require_shape,
)
from torch_npu.log import outputs_alone, record

TILE = 128
HALF = (torch.float16, torch.bfloat16)
ALL = 2**31 - 1


class Attended(NamedTuple):
    """out [B,N,S,D], peak and total [B,N,S]: float32; total is the sum of exp(score - peak)."""

    out: Tensor
    peak: Tensor
    total: Tensor


def attend(
    q_BNSD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    scale: float,
    kept: Callable[[int, int, int, int], Tensor | None] | None = None,
) -> Attended:
    """Softmax attention in float32, one head and 128 query rows at a time.

    So a row's bits depend neither on how many heads nor, for cuts at multiples of 128, on which
    rows are in the call. kept(b, n, first, last): bool [last-first, S_k], or None for all.
    """
    batch, heads, rows, _ = q_BNSD.shape
    out = torch.zeros(batch, heads, rows, v_BNSD.shape[-1])
    peak = torch.full((batch, heads, rows), -math.inf)
    total = torch.zeros(batch, heads, rows)
    if q_BNSD.is_meta:
        return Attended(*(x.to("meta") for x in (out, peak, total)))
    for b in range(batch):
        for n in range(heads):
            q, k, v = (x[b, n].float().contiguous() for x in (q_BNSD, k_BNSD, v_BNSD))
            for first in range(0, rows, TILE):
                last = min(first + TILE, rows)
                keep = kept(b, n, first, last) if kept else None
                part = _attend_tile(q[first:last], k, v, scale, keep)
                out[b, n, first:last], peak[b, n, first:last], total[b, n, first:last] = part
    return Attended(out, peak, total)


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    scores = q @ k.T * scale
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    peak = scores.amax(-1)
    weights = (scores - peak.clamp_min(torch.finfo(torch.float32).min)[:, None]).exp()
    total = weights.sum(-1)
    return weights @ v / total.clamp_min(1e-30)[:, None], peak, total


def to_BNSD(x: Tensor, layout: str, heads: int, operation: str) -> Tensor:
    """A view of x. RuntimeError for other layouts and other head counts."""
    require(layout in ("BNSD", "BSND", "BSH", "SBH"), operation, f"unknown layout {layout}.")
    require(x.dim() == len(layout), operation, f"{x.dim()} dims do not fit the layout {layout}.")
    if "H" in layout:
        require(x.shape[-1] % heads == 0, operation, f"H {x.shape[-1]} over {heads} heads.")
        x, layout = x.unflatten(-1, (heads, -1)), layout.replace("H", "ND")
    x = x.permute(*(layout.index(axis) for axis in "BNSD"))
    require(x.shape[1] == heads, operation, f"{x.shape[1]} heads, head_num {heads}.")
    return x


def from_BNSD(x: Tensor, layout: str) -> Tensor:
    """Contiguous, as operators return it."""
    x = x.permute(*("BNSD".index(axis) for axis in layout.replace("H", "ND")))
    return (x.flatten(-2) if "H" in layout else x).contiguous()


@outputs_alone
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = ALL,
    next_tockens: int = ALL,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple:
    """(out, softmax_max, softmax_sum, softmax_out, seed, offset, numels); mask: True = dropped."""
    operation = "npu_fusion_attention"
    record(operation, query, key, value, layout=input_layout)
    require_chip(operation, "A2", "A3", "A5")
    require_dtype(operation, (*HALF, torch.float32), query=query, key=key, value=value)
    require_same_dtype(operation, query=query, key=key, value=value)
    require_contiguous(operation, query=query, key=key, value=value)
    require(pse is None and padding_mask is None and prefix is None, operation, "not simulated.")
    require(keep_prob == 1, operation, "dropout is not simulated.")
    require(isinstance(scale, float), operation, f"scale must be a float, got {type(scale)}.")
    require(pre_tockens >= ALL and next_tockens >= ALL, operation, "bands are not simulated.")
    require(sparse_mode == 0, operation, "sparse modes are not simulated.")
    q, k, v = (to_BNSD(x, input_layout, head_num, operation) for x in (query, key, value))
    _require_fit(operation, q, k, v)
    done = attend(q, k, v, scale, _dropped(operation, atten_mask, q, k))
    out = from_BNSD(done.out, input_layout).to(query.dtype)
    softmax = (x[..., None].expand(*x.shape, 8).contiguous() for x in (done.peak, done.total))
    return (out, *softmax, torch.empty(0), 0, 0, 0)


def _require_fit(operation: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    require_shape(operation, "key", k, (q.shape[0], q.shape[1], k.shape[2], q.shape[3]))
    require_shape(operation, "value", v, (*k.shape[:3], v.shape[3]))
    require(q.shape[3] <= 768, operation, f"head size {q.shape[3]} is above 768.")
    require(q.shape[1] <= 256, operation, f"{q.shape[1]} heads are above 256.")


def _dropped(operation: str, mask: Tensor | None, q: Tensor, k: Tensor):
    if mask is None:
        return None
    require_dtype(operation, (torch.bool, torch.uint8), atten_mask=mask)
    sizes = (q.shape[2], k.shape[2])
    shapes = (sizes, *((b, n, *sizes) for b in (1, q.shape[0]) for n in (1, q.shape[1])))
    require(tuple(mask.shape) in shapes, operation, f"atten_mask {tuple(mask.shape)}, {shapes}.")
    drop = mask.bool().expand(*q.shape[:3], k.shape[2])
    return lambda b, n, first, last: ~drop[b, n, first:last]
