"""The vendor's operators on tensors without data, for `--plan`: what each makes, and copies.

They stand in for torch-npu and mindiesd where a plan runs the kernels of this folder, on any
machine. Read from mindiesd 3.1.0 and the operator reference of torch-npu; nothing was measured,
and what an operator takes for itself on the device is not in it.

Legend: B batch, S rows, N heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LSE = 8  # npu_fusion_attention's maximum and sum of each row stand there so often, in float32
_LASER_ROWS, _LASER_HEAD = 256, 128  # the laser kernel pads to multiples of these


@contextmanager
def vendor() -> Iterator[None]:
    """In it, the kernels of this folder import these operators."""
    modules = {name: ModuleType(name) for name in _OPERATORS}
    for name, module in modules.items():
        vars(module).update(_OPERATORS[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    real = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules |= modules
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules |= real


def _fusion_attention(
    q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads = q_BSND.shape[1:3]
    size = (len(q_BSND), heads, rows, _LSE)
    most, total = (q_BSND.new_empty(size, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(q_BSND), most, total


def _attention_forward(q: Tensor, k: Tensor, v: Tensor, *, op_type: str, **_: Any) -> Tensor:
    if op_type == "fused_attn_score":
        return _fusion_attention(q, k, v)[0]
    (rows, head), dtype = (q.shape[1], q.shape[3]), q.dtype
    q, k, v = _laser_inputs(*(x.transpose(1, 2) for x in (q, k, v)))
    out_BNSD = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    out_BNSD = out_BNSD.to(torch.float16).to(dtype)
    return out_BNSD[:, :, :rows, :head].transpose(1, 2)


def _laser_inputs(*qkv_BNSD: Tensor) -> list[Tensor]:
    halves = [x.to(torch.float16) for x in qkv_BNSD]
    for i, x in enumerate(halves):
        halves[i] = F.pad(x, (0, -x.shape[3] % _LASER_HEAD, 0, -x.shape[2] % _LASER_ROWS))
    return [x.contiguous() for x in halves]


def _block_quant(x_BNSD: Tensor, block_size: int, dst_type: torch.dtype, **_: Any) -> Any:
    blocks = (*x_BNSD.shape[:2], ceil(x_BNSD.shape[2] / block_size), 1)
    scale = x_BNSD.new_empty(blocks, dtype=torch.float32)
    return torch.empty_like(x_BNSD, dtype=dst_type), scale


def _fp8_attention(q_BNSD: Tensor, *_: Any, out_dtype: torch.dtype, **__: Any) -> list[Tensor]:
    return [torch.empty_like(q_BNSD, dtype=out_dtype)]


def _sparse_attention(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(q, dtype=torch.bfloat16)


def _like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


_FLASH = "mindiesd.layers.flash_attn"
_OPERATORS: dict[str, dict[str, Any]] = {
    "torch_npu": {
        "npu_fusion_attention": _fusion_attention,
        "npu_rms_norm": lambda x, *_, **__: (_like(x),),
        "float8_e4m3fn": torch.float8_e4m3fn,
    },
    "mindiesd": {
        "attention_forward": _attention_forward,
        "layernorm_scale_shift": lambda _, x, *__, **___: _like(x),
        "rotary_position_embedding": _like,
        "frequency_regulator": lambda _: None,
    },
    "mindiesd.layers": {},
    "mindiesd.layers._custom_ops": {"layernorm": lambda x, **_: (_like(x),)},
    "mindiesd.layers.quant": {},
    "mindiesd.layers.quant.block_quant": {"fa_block_quant_preprocess": _block_quant},
    _FLASH: {},
    f"{_FLASH}.fused_infer_attention_score": {"fused_infer_attention_score_v2": _fp8_attention},
    f"{_FLASH}.sparse_flash_attn_rf_v2": {"rain_fusion_attention": _sparse_attention},
    f"{_FLASH}.sparse_flash_attn_rf_v3": {"rain_fusion_attention_v3": _sparse_attention},
}


def quantise(network: nn.Module, sizes: Mapping[str, int]) -> None:
    """Replace the layers of an export in a network. sizes: name of a layer -> its stored bytes."""
    for name, nbytes in sizes.items():
        layer: Any = network.get_submodule(name)
        network.set_submodule(name, _QuantisedLinear(nbytes, layer.out_features))


class _QuantisedLinear(nn.Module):
    """Its tensors as stored, the input in 8 bits with a scale per token, the result."""

    def __init__(self, nbytes: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.register_buffer("stored", torch.empty(nbytes, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        payload = torch.empty_like(x, dtype=torch.int8)
        scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
        del payload, scale
        return x.new_empty(*x.shape[:-1], self.outputs)
