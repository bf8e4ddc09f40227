"""The operators torch.ops.mindiesd.* that mindiesd's own library defines on a real machine.

Schemas as printed in libPTAExtensionOPS.so of mindiesd 3.1.0, one in each line of schemas.txt.
mindiesd then attaches its shape functions to them, which fails where a name is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_npu import npu
from torch_npu.chip import (
    require,
    require_chip,
    require_contiguous,
    require_dtype,
    require_same_dtype,
)
from torch_npu.dense import ALL, HALF, attend
from torch_npu.log import record
from torch_npu.quantise import dequantised, require_block_scale
from torch_npu.small import FLOATS
from torch_npu.sparse import block_sparse_attention, rainfusionattention

SCHEMAS = Path(__file__).with_name("schemas.txt")
LIBRARY_NAME = "libPTAExtensionOPS.so"


def la(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None = None,
    alibi_mask: Tensor | None = None,
    drop_mask: Tensor | None = None,
    scale_value: float = 1.0,
    head_num: int = 2,
    input_layout: str = "BNSD",
    keep_prob: float = 1.0,
    pre_tokens: int = ALL,
    next_tokens: int = 1,
    is_highPrecision: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log of max and sum [B,N,S], out float32). pre_tokens: padded key rows to leave out."""
    operation = "mindiesd.la"
    record(operation, query, key, value, pre_tokens=pre_tokens)
    require_chip(operation, "A2", "A3")
    require_dtype(operation, (torch.float16,), query=query, key=key, value=value)
    require_contiguous(operation, query=query, key=key, value=value)
    require(atten_mask is alibi_mask is drop_mask is None, operation, "masks are not simulated.")
    require(input_layout == "BNSD" and keep_prob == 1, operation, "BNSD, no dropout.")
    require(query.shape[1] == head_num, operation, f"{query.shape[1]} heads, said {head_num}.")
    for name, x in (("query", query), ("key", key), ("value", value)):
        fits = x.shape[2] % 256 == 0 and x.shape[3] == 128
        require(fits, operation, f"{name} {tuple(x.shape)}: S must divide by 256, D be 128.")
    padded = 0 if pre_tokens == ALL else pre_tokens
    require(0 <= padded < 256, operation, f"pre_tokens {pre_tokens}: less than 256, or all.")
    rows = key.shape[2] - padded
    done = attend(query, key[:, :, :rows], value[:, :, :rows], scale_value)
    return done.peak + done.total.log(), done.out


def fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **given: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse): the per-block FP8 mode, the only one whose limits are known."""
    operation = "mindiesd.fused_infer_attention_score_v2"
    record(operation, query, key, value, layout=given.get("input_layout", "BSH"))
    require_chip(operation, "A5")
    require_dtype(operation, (torch.float8_e4m3fn,), query=query, key=key, value=value)
    require_contiguous(operation, query=query, key=key, value=value)
    layout = given.pop("input_layout", "BSH")
    require(layout == "BNSD", operation, f"layout {layout} is not simulated, BNSD is.")
    for name in ("query_quant_mode", "key_quant_mode", "value_quant_mode"):
        require(given.pop(name, 0) == 7, operation, f"{name} must be 7 (per block).")
    scales = [given.pop(f"dequant_scale_{name}", None) for name in ("query", "key", "value")]
    scale, dtype = given.pop("softmax_scale", 1.0), given.pop("out_dtype", None)
    heads = given.pop("num_query_heads", 1)
    kv_heads = given.pop("num_key_value_heads", 0)
    require(given.pop("inner_precise", 0) in (0, 1, 4), operation, "inner_precise 0, 1 or 4.")
    tokens = [given.pop(name, ALL) for name in ("pre_tokens", "next_tokens")]
    require(tokens == [ALL, ALL], operation, "bands are refused per block.")
    require(dtype in HALF, operation, f"out_dtype {dtype} must be float16 or bfloat16.")
    left = sorted(n for n, x in given.items() if isinstance(x, Tensor) or x not in (None, 0))
    require(not left, operation, f"refused per block: {', '.join(left)}.")
    require(query.shape[1] == heads, operation, f"{query.shape[1]} heads, said {heads}.")
    require(kv_heads in (0, heads) and key.shape[1] == heads, operation, "GQA is not simulated.")
    sizes = {x.shape[3] for x in (query, key, value)}
    require(sizes in ({64}, {128}), operation, f"head sizes {sizes}: 64 or 128 for all.")
    whole = []
    for name, x, s, rows in zip("qkv", (query, key, value), scales, (128, 256, 256), strict=True):
        require_block_scale(operation, name, x, s, rows)
        whole.append(dequantised(x, s, rows))
    return attend(*whole, scale).out.to(dtype), torch.zeros(1)


def layernorm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    impl_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised, mean, reciprocal deviation); mode 2 takes float16 only."""
    operation = "mindiesd.layernorm"
    record(operation, input, impl_mode=impl_mode)
    require_dtype(operation, FLOATS, input=input)
    require(impl_mode in (0, 1, 2), operation, f"impl_mode {impl_mode}.")
    if impl_mode == 2:
        require_dtype(operation, (torch.float16,), input=input)
    axes = tuple(range(-len(normalized_shape), 0))
    x = input.float()
    mean, rstd = x.mean(axes, keepdim=True), _rstd(x, axes, eps)
    return _affine((x - mean) * rstd, weight, bias).to(input.dtype), mean, rstd


def _rstd(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    return torch.rsqrt(x.var(axes, correction=0, keepdim=True) + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight.float()
    return x if bias is None else x + bias.float()


def adaln_v2(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    operation: str = "mindiesd.adaln_v2",
) -> tuple[Tensor, Tensor, Tensor]:
    """(LN(x) (1 + scale) + shift, mean, reciprocal deviation); scale, shift [B,H] or [B,1,H]."""
    record(operation, x, scale, shift)
    require_dtype(operation, FLOATS, x=x)
    require_same_dtype(operation, x=x, scale=scale, shift=shift)
    batch, _, size = x.shape
    for name, rows in (("scale", scale), ("shift", shift)):
        fits = tuple(rows.shape) in ((batch, size), (batch, 1, size))
        require(fits, operation, f"{name} {tuple(rows.shape)}: [B,H] or [B,1,H] is needed.")
    scale, shift = (rows.float().reshape(batch, 1, size) for rows in (scale, shift))
    mean, rstd = x.float().mean(-1, keepdim=True), _rstd(x.float(), (-1,), epsilon)
    out = _affine((x.float() - mean) * rstd, weight, bias) * (1 + scale) + shift
    return out.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def adaln(x: Tensor, scale: Tensor, shift: Tensor, *rest: Any, **named: Any) -> Tensor:
    require_chip("mindiesd.adaln", "A2", "A3", "Duo")
    return adaln_v2(x, scale, shift, *rest, **named, operation="mindiesd.adaln")[0]


def frequency_regulator(freq: int) -> Tensor:
    """Logged; the status tensor, 0 for success."""
    record("mindiesd.frequency_regulator", freq=freq, device=npu.current_device())
    return torch.zeros(1, dtype=torch.int64)


def _not_simulated(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **named: Any) -> Any:
        raise RuntimeError(f"mindiesd.{name} is not simulated.")

    return refuse


DONE = {
    f.__name__: f
    for f in (
        la, fused_infer_attention_score_v2, layernorm, adaln, adaln_v2,
        frequency_regulator, rainfusionattention, block_sparse_attention,
    )
}  # fmt: skip


def define() -> torch.library.Library:
    """Define all operators; the caller must keep the library, they live as long as it does."""
    library = torch.library.Library("mindiesd", "FRAGMENT")
    for schema in SCHEMAS.read_text().splitlines():
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, DONE.get(name) or _not_simulated(name), "CompositeExplicitAutograd")
    return library


def skip_library(load: Callable[[str], None]) -> Callable[[str], None]:
    """load, which leaves out the one file that needs CANN."""

    def load_library(path: str) -> None:
        if not path.endswith(LIBRARY_NAME):
            load(path)

    return load_library
