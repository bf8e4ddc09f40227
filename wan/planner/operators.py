"""Fake operators for `--plan`, which run on tensors without data.

A plan runs the kernels of `wan.kernels` on any machine. The kernels load device operators by name,
and `load_operator` returns these functions, which allocate the same outputs and copies. Those for
NPUs follow mindiesd 3.1.0 and the operator reference of torch-npu; they are not measured, and leave
out an operator's scratch memory on the device.

Legend: B batch, S rows, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from math import ceil
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from wan.kernels.flex import FlexBlocks
from wan.kernels.interfaces import Target
from wan.kernels.sdpa import SdpaKernel

_LSE_COPIES = 8  # npu_fusion_attention repeats the maximum and sum of each row so often, in float32
_LASER_ROWS, _LASER_HEAD = 256, 128  # the laser kernel pads to multiples of these


def load_operator(name: str) -> Any:
    """Loads the fake operator of a name, or imports the object if there is none."""
    return _REPLACEMENTS[name] if name in _REPLACEMENTS else resolve_name(name)


class PlannedKernel(SdpaKernel):
    """PyTorch's SDPA as a replacement for a kernel of xfuser, which needs its device."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        assert target.dense_row is not None
        name, self.can_return_lse = target.dense_row.name, target.dense_row.has_lse
        lse = "with" if self.can_return_lse else "without"
        self.name = f"{name} backend (planned as PyTorch SDPA, assumed {lse} log-sum-exp)"


def _fake_fusion_attention(
    q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads = q_BSND.shape[1:3]
    size = (len(q_BSND), heads, rows, _LSE_COPIES)
    row_max, row_sum = (q_BSND.new_empty(size, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(q_BSND), row_max, row_sum


def _fake_attention_forward(q: Tensor, k: Tensor, v: Tensor, *, op_type: str, **_: Any) -> Tensor:
    if op_type == "fused_attn_score":
        return _fake_fusion_attention(q, k, v)[0]
    (rows, head), dtype = (q.shape[1], q.shape[3]), q.dtype
    q, k, v = _make_laser_inputs(*(x.transpose(1, 2) for x in (q, k, v)))
    out_BNSD = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    out_BNSD = out_BNSD.to(torch.float16).to(dtype)
    return out_BNSD[:, :, :rows, :head].transpose(1, 2)


def _make_laser_inputs(*qkv_BNSD: Tensor) -> list[Tensor]:
    halves = [x.to(torch.float16) for x in qkv_BNSD]
    for i in range(len(halves)):
        for axis, multiple in ((2, _LASER_ROWS), (3, _LASER_HEAD)):
            halves[i] = _pad_to_multiple(halves[i], axis, multiple)
    return [x.contiguous() for x in halves]


def _pad_to_multiple(x: Tensor, axis: int, multiple: int) -> Tensor:
    size = list(x.shape)
    size[axis] = -size[axis] % multiple
    return torch.cat([x, x.new_empty(size)], axis) if size[axis] else x


def _fake_block_quant(x_BNSD: Tensor, block_size: int, dst_type: torch.dtype, **_: Any) -> Any:
    blocks = (*x_BNSD.shape[:2], ceil(x_BNSD.shape[2] / block_size), 1)
    scale = x_BNSD.new_empty(blocks, dtype=torch.float32)
    return torch.empty_like(x_BNSD, dtype=dst_type), scale


def _fake_fp8_attention(q_BNSD: Tensor, *_: Any, out_dtype: torch.dtype, **__: Any) -> list[Tensor]:
    return [torch.empty_like(q_BNSD, dtype=out_dtype)]


def _fake_sparse_by_table(q_TND: Tensor, *_: Any, **__: Any) -> Tensor:
    lse = torch.empty_like(q_TND)  # mindiesd allocates it in this size, and returns the result only
    out_TND = torch.empty_like(q_TND, dtype=torch.bfloat16)
    del lse
    return out_TND


def _fake_sparse_by_mask(q_BNSD: Tensor, *_: Any, **__: Any) -> Tensor:
    lse_BNS = q_BNSD.new_empty(q_BNSD.shape[:3], dtype=torch.float32)
    out_BNSD = torch.empty_like(q_BNSD, dtype=torch.bfloat16)
    del lse_BNS
    return out_BNSD


def _make_empty_like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_flex_attention(q_BNSD: Tensor, *_: Tensor, block_mask: BlockMask, scale: float) -> Tensor:
    """Allocates the outputs of the compiled FlexAttention, which has no score matrix."""
    lse_BNS = q_BNSD.new_empty(q_BNSD.shape[:3], dtype=torch.float32)
    del lse_BNS
    return torch.empty_like(q_BNSD)


_FLASH = "mindiesd.layers.flash_attn"
_REPLACEMENTS: dict[str, Any] = {
    "torch_npu:npu_fusion_attention": _fake_fusion_attention,
    "torch_npu:npu_rms_norm": lambda x, *_, **__: (_make_empty_like(x),),
    "torch_npu:float8_e4m3fn": torch.float8_e4m3fn,
    "mindiesd:attention_forward": _fake_attention_forward,
    "mindiesd:layernorm_scale_shift": lambda _, x, *__, **___: _make_empty_like(x),
    "mindiesd:rotary_position_embedding": _make_empty_like,
    "mindiesd.layers._custom_ops:layernorm": lambda x, **_: (_make_empty_like(x),),
    "mindiesd.layers.quant.block_quant:fa_block_quant_preprocess": _fake_block_quant,
    f"{_FLASH}.fused_infer_attention_score:fused_infer_attention_score_v2": _fake_fp8_attention,
    f"{_FLASH}.sparse_flash_attn_rf_v2:rain_fusion_attention": _fake_sparse_by_table,
    f"{_FLASH}.sparse_flash_attn_rf_v3:rain_fusion_attention_v3": _fake_sparse_by_mask,
    # Objects that query their device, compile, or set a clock in their constructor.
    "wan.kernels.avx512_attention:make_cpu_kernel": SdpaKernel,
    "wan.kernels.sdpa:make_cuda_kernel": SdpaKernel,
    "wan.kernels.sdpa:make_cuda_sdpa_kernel": SdpaKernel,
    "wan.kernels.sdpa:make_cudnn_kernel": SdpaKernel,
    "wan.kernels.xfuser:build_xfuser_kernel": PlannedKernel,
    "wan.kernels.flex:FlexBlocks": lambda target: FlexBlocks(target, _fake_flex_attention),
    "wan.kernels.compiled_ops:CompiledOps": lambda *_, **__: None,
    "wan.kernels.npu.clock:FrequencyCap": lambda *_: nullcontext(),
}


def insert_quantized_linears(network: nn.Module, sizes: Mapping[str, int]) -> None:
    """Replaces the layers of a W8A8 export. sizes: name of a layer -> its stored bytes."""
    for name, nbytes in sizes.items():
        layer: Any = network.get_submodule(name)
        network.set_submodule(name, _FakeQuantizedLinear(nbytes, layer.out_features))


class _FakeQuantizedLinear(nn.Module):
    """Allocates the stored tensors, the 8-bit input with a scale per token, and the output."""

    def __init__(self, nbytes: int, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features
        self.register_buffer("stored", torch.empty(nbytes, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        values = torch.empty_like(x, dtype=torch.int8)
        scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
        del values, scale
        return x.new_empty(*x.shape[:-1], self.out_features)
