"""Each simulated operator works on its chips, and refuses other chips and wrong arguments.

A case: the chips that have the operator, the operator, valid arguments, and wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.npu_sim.ranks import SOC

ops = torch.ops.mindiesd
BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
Named = dict[str, Any]


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ones(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


def make_qkv_arguments(dtype: torch.dtype, *shape: int) -> Named:
    return {name: zeros(*shape, dtype=dtype) for name in ("query", "key", "value")}


def make_fp8_arguments() -> Named:
    named = make_qkv_arguments(FP8, 1, 2, 300, 64) | {"num_query_heads": 2, "input_layout": "BNSD"}
    for name, blocks in (("query", 3), ("key", 2), ("value", 2)):
        named |= {f"{name}_quant_mode": 7, f"dequant_scale_{name}": ones(1, 2, blocks, 1)}
    return named | {"out_dtype": BF16}


SPARSE = make_qkv_arguments(BF16, 1, 2, 200, 64) | {
    "block_sparse_mask": ones(1, 2, 2, 2, dtype=torch.int8),
    "num_key_value_heads": 2,
}
WAVES = {name: zeros(1, 5, 1, 64) for name in ("r1", "r2")}
LENGTHS = {"actual_seq_qlen": [128], "actual_seq_kvlen": [128]}

CALLS: dict[str, tuple[str, Callable[..., Any], Named, tuple[Named, ...]]] = {
    "dense": (
        "A2 A3 A5",
        torch_npu.npu_fusion_attention,
        make_qkv_arguments(BF16, 1, 2, 8, 64)
        | {"head_num": 2, "input_layout": "BNSD", "scale": 1.0},
        (
            {"input_layout": "SBND"},
            {"head_num": 4},
            {"key": zeros(1, 2, 8, 64, dtype=F32)},
            {"key": zeros(1, 1, 8, 64)},
        ),
    ),
    "laser": (
        "A2 A3",
        ops.la,
        make_qkv_arguments(F16, 1, 2, 256, 128) | {"head_num": 2},
        (
            make_qkv_arguments(BF16, 1, 2, 256, 128),
            make_qkv_arguments(F16, 1, 2, 200, 128),
            make_qkv_arguments(F16, 1, 2, 256, 64),
            {"key": zeros(1, 256, 2, 128, dtype=F16).transpose(1, 2)},
            {"head_num": 1},
        ),
    ),
    "FP8": (
        "A5",
        ops.fused_infer_attention_score_v2,
        make_fp8_arguments(),
        (
            {"dequant_scale_query": ones(1, 2, 2, 1)},
            {"dequant_scale_key": ones(1, 2, 3, 1)},
            {"query": zeros(1, 2, 300, 64)},
            {"query": zeros(1, 300, 2, 64).to(FP8).transpose(1, 2)},
            {"atten_mask": zeros(300, 300, dtype=torch.bool)},
            {"query_quant_mode": 0},
        ),
    ),
    "FP8 blocks": (
        "A5",
        torch_npu.npu_dynamic_block_quant,
        {"x": zeros(2, 300, 64), "dst_type": FP8, "row_block_size": 128},
        (
            {"x": zeros(1, 2, 300, 64)},
            {"row_block_size": 64},
        ),
    ),
    "RainFusion v2": (
        "A2 A3",
        ops.rainfusionattention,
        make_qkv_arguments(BF16, 128, 2, 64)
        | {
            "select_idx": zeros(1, 2, 1, dtype=torch.int64),
            "select_num_idx": ones(1, 2, dtype=torch.int64),
            "blockshape": [128, 128],
            "head_num": 2,
        }
        | LENGTHS,
        ({"select_idx": ones(1, 2, 1, dtype=torch.int64)},),
    ),
    "block sparse": (
        "A2 A3 A5",
        ops.block_sparse_attention,
        SPARSE | {"inner_precise": 4},
        (
            {"block_sparse_mask": ones(1, 2, 2, 3, dtype=torch.int8)},
            {"block_sparse_mask": ones(1, 2, 2, 2, dtype=torch.bool)},
            {"block_sparse_mask": zeros(1, 2, 2, 2, dtype=torch.int8)},
            {"key": zeros(1, 200, 2, 64).transpose(1, 2)},
        ),
    ),
    "block sparse, precisely": ("A2 A3", ops.block_sparse_attention, SPARSE, ()),
    "integer product": (
        "A2 A3 A5",
        torch_npu.npu_quant_matmul,
        {
            "x1": zeros(5, 64, dtype=torch.int8),
            "x2": zeros(64, 48, dtype=torch.int8),
            "scale": ones(48),
            "pertoken_scale": ones(5),
            "output_dtype": F16,
        },
        (
            {"x2": zeros(48, 64, dtype=torch.int8)},
            {"scale": zeros(48)},  # bfloat16 scales go with a bfloat16 result only
            {"group_sizes": [1, 1, 32]},
        ),
    ),
    "rotary": (
        "A2 A3 A5",
        torch_npu.npu_rotary_mul,
        WAVES | {"input": zeros(1, 5, 4, 64), "rotary_mode": "interleave"},
        (
            {"input": zeros(1, 5, 1000, 64)},
            dict.fromkeys(WAVES, zeros(1, 5, 4, 64)),
            {"input": zeros(1, 5, 4, 896)} | dict.fromkeys(WAVES, zeros(1, 5, 1, 896)),
        ),
    ),
    "modulated norm": (
        "Duo A2 A3",
        ops.adaln,
        {"x": zeros(1, 5, 8), "scale": zeros(1, 8), "shift": zeros(1, 8)},
        (),
    ),
}


def is_refused(operation: Callable[..., Any], named: Named) -> bool:
    try:
        operation(**named)
    except RuntimeError as error:
        assert "simulated" in str(error), error
        return True
    return False


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = []
    for name, (chips, operation, works, wrongs) in CALLS.items():
        for chip, soc in SOC.items():
            monkeypatch.setenv("NPU_SIM_SOC", soc)
            if is_refused(operation, works) == (chip in chips.split()):
                failures.append(f"{name} on {chip}")
        monkeypatch.setenv("NPU_SIM_SOC", SOC[chips.split()[-1]])
        for i, wrong in enumerate(wrongs):
            if not is_refused(operation, works | wrong):
                failures.append(f"{name}, wrong call {i}")
    assert not failures
