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
    name as chip_name,
)
from torch_npu.chip import (
    require,
    require_chip,
    require_contiguous,
    require_dtype,
    require_same_dtype,
    require_shape,
)
from torch_npu.log import record

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
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
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
    require(pse is None and padding_mask is None and prefix is None, operation, "not simulated.")
    require(keep_prob == 1, operation, "dropout is not simulated.")
    require(isinstance(scale, float), operation, f"scale must be a float, got {type(scale)}.")
    require(pre_tockens >= ALL and next_tockens >= ALL, operation, "bands are not simulated.")
    if input_layout == "TND":
        lengths = actual_seq_qlen, actual_seq_kvlen
        out = _varlen(query, key, value, head_num, scale, lengths, atten_mask, sparse_mode)
        return (out, *(torch.empty(0) for _ in range(3)), 0, 0, 0)
    require(sparse_mode == 0, operation, "sparse modes are simulated for TND only.")
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


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    scale: float,
    lengths: tuple,
    mask: Tensor | None,
    sparse_mode: int,
) -> Tensor:
    """T rows of several sequences; lengths are running sums; mode 3 is causal, ends aligned."""
    operation = "npu_fusion_attention TND"
    require(sparse_mode in (0, 3), operation, f"sparse_mode {sparse_mode} is not simulated.")
    require(query.shape[1] == heads, operation, f"{query.shape[1]} heads, head_num {heads}.")
    require(None not in lengths, operation, "actual_seq_qlen and actual_seq_kvlen are needed.")
    if sparse_mode == 3:
        require(mask is not None and tuple(mask.shape) == (2048, 2048), operation, "mask 2048^2.")
    ends = [[0, *map(int, length)] for length in lengths]
    sizes = (query.shape[0], key.shape[0])
    require((ends[0][-1], ends[1][-1]) == sizes, operation, f"lengths {lengths}, rows {sizes}.")
    parts = []
    for i in range(len(ends[0]) - 1):
        (a, b), (c, d) = ends[0][i : i + 2], ends[1][i : i + 2]
        q, k, v = (x[None].transpose(1, 2) for x in (query[a:b], key[c:d], value[c:d]))
        causal = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        kept = (lambda _b, _n, x, y, m=causal: m[x:y]) if sparse_mode == 3 else None
        parts.append(attend(q, k, v, scale, kept))
    return torch.cat([p.out[0].transpose(0, 1) for p in parts]).to(query.dtype)


def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = ALL,
    next_tokens: int = 0,
    input_layout: str = "BSH",
) -> Tensor:
    """The dense attention of the Duo; next_tokens is 0, causal, unless given."""
    operation = "npu_prompt_flash_attention"
    record(operation, query, key, value, layout=input_layout)
    require_chip(operation, "Duo", "A2", "A3")
    dtypes = HALF[:1] if chip_name() == "Duo" else HALF
    require_dtype(operation, dtypes, query=query, key=key, value=value)
    require_same_dtype(operation, query=query, key=key, value=value)
    require_contiguous(operation, query=query, key=key, value=value)
    require(pre_tokens >= ALL and next_tokens >= ALL, operation, "bands are not simulated.")
    q, k, v = (to_BNSD(x, input_layout, num_heads, operation) for x in (query, key, value))
    _require_fit(operation, q, k, v)
    require(q.shape[3] <= 512, operation, f"head size {q.shape[3]} is above 512.")
    done = attend(q, k, v, scale_value, _dropped(operation, atten_mask, q, k))
    return from_BNSD(done.out, input_layout).to(query.dtype)


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = ALL,
    next_tokens: int = ALL,
    input_layout: str = "BSH",
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse): lse float32 [B,N,S,1], one zero where it is not asked for."""
    operation = "npu_fused_infer_attention_score"
    record(operation, query, key, value, layout=input_layout)
    require_chip(operation, "A2", "A3", "A5")
    require_dtype(operation, HALF, query=query, key=key, value=value)
    require_same_dtype(operation, query=query, key=key, value=value)
    require_contiguous(operation, query=query, key=key, value=value)
    require(pre_tokens >= ALL and next_tokens >= ALL, operation, "bands are not simulated.")
    q, k, v = (to_BNSD(x, input_layout, num_heads, operation) for x in (query, key, value))
    _require_fit(operation, q, k, v)
    done = attend(q, k, v, scale)
    lse = (done.peak + done.total.log())[..., None] if softmax_lse_flag else torch.zeros(1)
    return from_BNSD(done.out, input_layout).to(query.dtype), lse
