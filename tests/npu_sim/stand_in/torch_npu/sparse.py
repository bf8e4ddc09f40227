"""Block-sparse attention operators of mindiesd's library: RainFusion v2, v3, and the mixed one.

Legend: B batch, N heads, S rows, D head size, T rows of all samples, q and k blocks of rows.
"""

from __future__ import annotations

import math

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
from torch_npu.dense import HALF, TILE, attend
from torch_npu.log import record
from torch_npu.quantise import dequantised, require_block_scale


def _masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, k_rows: int) -> Tensor:
    """Attention of [B,N,S,D] where mask bool [B,N,ceil(S/128),ceil(S_k/k_rows)] says so."""

    def kept(b: int, n: int, first: int, last: int) -> Tensor:
        row = mask[b, n, first // TILE].repeat_interleave(k_rows)[: k.shape[2]]
        return row.expand(last - first, -1)

    return attend(q, k, v, scale, kept).out


def rainfusionattention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    select_idx: Tensor,
    select_num_idx: Tensor,
    blockshape: list[int],
    attn_mask: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    block_table: Tensor | None = None,
    q_input_layout: str = "TND",
    kv_input_layout: str = "TND",
    head_num: int = 1,
    mask_type: int = 0,
    scale: float = 1.0,
    inner_precise: int = 1,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out, lse). select_idx int64 [q blocks of all samples, N, most], padded with -1."""
    operation = "mindiesd.rainfusionattention"
    record(operation, query, key, value, select_idx, select_num_idx, layout=q_input_layout)
    require_chip(operation, "A2", "A3")
    require_dtype(operation, HALF, query=query, key=key, value=value)
    require_same_dtype(operation, query=query, key=key, value=value)
    require_contiguous(operation, query=query, key=key, value=value)
    require(list(blockshape) == [TILE, TILE], operation, f"blockshape {blockshape}: [128, 128].")
    layouts = (q_input_layout, kv_input_layout)
    require(layouts == ("TND", "TND"), operation, f"layouts {layouts} are not simulated.")
    require({query.dim(), key.dim(), value.dim()} == {3}, operation, "TND has three dims.")
    require(attn_mask is None and block_table is None, operation, "not simulated.")
    require(mask_type == 0 and inner_precise in (0, 1), operation, "mask_type 0, precise 0 or 1.")
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    q_rows, k_rows = actual_seq_qlen, actual_seq_kvlen
    require(q_rows is not None and k_rows is not None, operation, "lengths are needed.")
    require(q.shape[1] == head_num, operation, f"{q.shape[1]} heads, said {head_num}.")
    sizes = (sum(q_rows), sum(k_rows))
    require(sizes == (q.shape[2], k.shape[2]), operation, f"lengths {q_rows} and {k_rows}.")
    parts = zip(q.split(q_rows, 2), k.split(k_rows, 2), v.split(k_rows, 2), strict=True)
    out, block = [], 0
    for q_one, k_one, v_one in parts:
        blocks = math.ceil(q_one.shape[2] / TILE)
        chosen = slice(block, block := block + blocks)
        tables = (select_idx[chosen], select_num_idx[chosen])
        mask = _mask_of_tables(operation, *tables, blocks, math.ceil(k_one.shape[2] / TILE))
        out.append(_masked(q_one, k_one, v_one, scale, mask, TILE))
    require(select_idx.shape[0] == block, operation, f"{select_idx.shape[0]} rows, {block} blocks.")
    merged = torch.cat(out, 2)[0].transpose(0, 1)
    return merged.contiguous().to(query.dtype), torch.zeros(1)


def _mask_of_tables(operation: str, index: Tensor, count: Tensor, rows: int, blocks: int) -> Tensor:
    """bool [1,N,rows,blocks] from ascending ids and how many of them count."""
    require_dtype(operation, (torch.int64,), select_idx=index, select_num_idx=count)
    require(index.shape[0] == rows, operation, f"{index.shape[0]} table rows for {rows} blocks.")
    require_shape(operation, "select_num_idx", count, tuple(index.shape[:2]))
    inside = torch.arange(index.shape[2]) < count[..., None]
    used = index.masked_fill(~inside, -1)
    rising = (used.diff(dim=-1) > 0) | ~inside[..., 1:]
    fits = bool(rising.all() and (used < blocks).all() and (used[inside] >= 0).all())
    require(fits, operation, "block ids must rise and lie within the keys.")
    require(bool((count > 0).all()), operation, "a block of queries without keys.")
    mask = torch.zeros(*index.shape[:2], blocks + 1, dtype=torch.bool)
    mask.scatter_(2, torch.where(inside, index, blocks), True)
    return mask[..., :blocks].transpose(0, 1)[None]


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_sparse_mask: Tensor | None = None,
    block_shape: tuple[int, int] = (128, 128),
    q_input_layout: str = "BNSD",
    kv_input_layout: str = "BNSD",
    num_key_value_heads: int = 1,
    scale_value: float = 1.0,
    inner_precise: int = 0,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    softmax_lse_flag: int = 0,
    q_dequant_scale: Tensor | None = None,
    k_dequant_scale: Tensor | None = None,
    v_dequant_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). block_sparse_mask int8 [B,N,q blocks,k blocks], 1 = attended."""
    operation = "mindiesd.block_sparse_attention"
    record(operation, query, key, value, block_sparse_mask, block_shape=list(block_shape))
    require_chip(operation, "A2", "A3", "A5")
    fp8 = q_dequant_scale is not None
    if fp8:
        require_chip(operation + " in FP8", "A5")
    precise = (4,) if chip_name() == "A5" else (0, 1, 4)
    require(inner_precise in precise, operation, f"inner_precise {inner_precise}: {precise}.")
    require_dtype(
        operation, (torch.float8_e4m3fn,) if fp8 else HALF, query=query, key=key, value=value
    )
    layouts = (q_input_layout, kv_input_layout)
    require(layouts == ("BNSD", "BNSD"), operation, f"layouts {layouts} are not simulated.")
    require(softmax_lse_flag == 0, operation, "the LSE is not simulated.")
    mask = _checked_mask(operation, query, key, block_sparse_mask, block_shape, fp8)
    _require_one_length(operation, query, actual_seq_lengths)
    _require_one_length(operation, key, actual_seq_lengths_kv)
    require_contiguous(operation, query=query, key=key, value=value)
    require(key.shape[1] == num_key_value_heads, operation, f"{num_key_value_heads} key heads.")
    dtype = query.dtype
    if fp8:
        names, tensors = ("q", "k", "v"), (query, key, value)
        scales = (q_dequant_scale, k_dequant_scale, v_dequant_scale)
        sizes = (block_shape[0], block_shape[1], block_shape[1])
        for what, x, scale, rows in zip(names, tensors, scales, sizes, strict=True):
            require_block_scale(operation, what, x, scale, rows)
        query, key, value = map(dequantised, tensors, scales, sizes)
        dtype = torch.bfloat16
    out = _masked(query, key, value, scale_value, mask, block_shape[1])
    return out.to(dtype), torch.zeros(1)


def _checked_mask(
    operation: str, q: Tensor, k: Tensor, mask: Tensor | None, block: tuple[int, int], fp8: bool
) -> Tensor:
    require(block[0] == TILE, operation, f"block_shape {block}: 128 query rows are simulated.")
    step = 256 if fp8 else TILE
    require(block[1] % step == 0, operation, f"block_shape {block}: keys in multiples of {step}.")
    require(mask is not None, operation, "block_sparse_mask is needed.")
    require_dtype(operation, (torch.int8,), block_sparse_mask=mask)
    blocks = (math.ceil(q.shape[2] / block[0]), math.ceil(k.shape[2] / block[1]))
    require_shape(operation, "block_sparse_mask", mask, (*q.shape[:2], *blocks))
    require(bool((mask.sum(-1) > 0).all()), operation, "a block of queries without keys.")
    return mask.bool()


def _require_one_length(operation: str, x: Tensor, lengths: list[int] | None) -> None:
    whole = [x.shape[2]] * x.shape[0]
    require(
        lengths is None or list(lengths) == whole, operation, f"lengths {lengths}, not {whole}."
    )
