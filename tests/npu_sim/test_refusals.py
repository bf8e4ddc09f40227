"""What the simulated hardware refuses: each case is a call that works, with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

ops = torch.ops.mindiesd
BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
Named = dict[str, Any]


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def refused(operation: Callable[..., Any], works: Named, **wrong: Any) -> None:
    operation(**works)
    with pytest.raises(RuntimeError, match="simulated"):
        operation(**works | wrong)


def three(dtype: torch.dtype, *shape: int) -> Named:
    return {name: zeros(*shape, dtype=dtype) for name in ("query", "key", "value")}


FUSED = three(BF16, 1, 2, 8, 64) | {"head_num": 2, "input_layout": "BNSD", "scale": 1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_layout": "SBND"},
        {"head_num": 4},
        {"scale": 1},
        {"key": zeros(1, 2, 8, 64, dtype=F32)},
        {"query": zeros(1, 2, 8, 64, dtype=torch.int8)},
        {"key": zeros(1, 1, 8, 64)},
        {"atten_mask": zeros(8, 8)},
        {"atten_mask": zeros(8, 7, dtype=torch.bool)},
        {"pre_tockens": 3},
    ],
    ids=str,
)
def test_dense(wrong: Named) -> None:
    refused(torch_npu.npu_fusion_attention, FUSED, **wrong)


LASER = three(F16, 1, 2, 256, 128) | {"head_num": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        three(BF16, 1, 2, 256, 128),
        three(F16, 1, 2, 200, 128),
        three(F16, 1, 2, 256, 64),
        {"key": zeros(1, 256, 2, 128, dtype=F16).transpose(1, 2)},
        {"head_num": 1},
        {"input_layout": "BSND"},
        {"pre_tokens": 256},
    ],
    ids=range(7),
)
def test_laser(wrong: Named) -> None:
    refused(ops.la, LASER, **wrong)


def _fp8() -> Named:
    named = three(FP8, 1, 2, 300, 64) | {"num_query_heads": 2, "input_layout": "BNSD"}
    for name, blocks in (("query", 3), ("key", 2), ("value", 2)):
        named |= {f"{name}_quant_mode": 7, f"dequant_scale_{name}": torch.ones(1, 2, blocks, 1)}
    return named | {"out_dtype": BF16}


@pytest.mark.parametrize(
    "wrong",
    [
        {"dequant_scale_query": torch.ones(1, 2, 2, 1)},
        {"dequant_scale_key": torch.ones(1, 2, 3, 1)},
        {"dequant_scale_value": torch.ones(1, 2, 2, 1, dtype=BF16)},
        {"query": zeros(1, 2, 300, 64)},
        {"query": zeros(1, 300, 2, 64).to(FP8).transpose(1, 2)},
        three(FP8, 1, 2, 300, 32),
        {"atten_mask": zeros(300, 300, dtype=torch.bool)},
        {"return_softmax_lse": True},
        {"actual_seq_qlen": [300]},
        {"input_layout": "BSND"},
        {"query_quant_mode": 0},
        {"out_dtype": F32},
        {"pre_tokens": 5},
        {"inner_precise": 2},
    ],
    ids=range(14),
)
def test_fp8_attention(monkeypatch: pytest.MonkeyPatch, wrong: Named) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "260")
    refused(ops.fused_infer_attention_score_v2, _fp8(), **wrong)


def _sparse() -> Named:
    mask = torch.ones(1, 2, 2, 2, dtype=torch.int8)
    return three(BF16, 1, 2, 200, 64) | {"block_sparse_mask": mask, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_sparse_mask": torch.ones(1, 2, 2, 3, dtype=torch.int8)},
        {"block_sparse_mask": torch.ones(1, 2, 2, 2, dtype=torch.bool)},
        {"block_sparse_mask": torch.zeros(1, 2, 2, 2, dtype=torch.int8)},
        {"block_shape": [128, 100]},
        {"q_input_layout": "BSND"},
        {"actual_seq_lengths": [100]},
        {"num_key_value_heads": 1},
        {"key": zeros(1, 200, 2, 64).transpose(1, 2)},
    ],
    ids=range(8),
)
def test_block_sparse(wrong: Named) -> None:
    refused(ops.block_sparse_attention, _sparse(), **wrong)


PRODUCT = {
    "x1": zeros(5, 64, dtype=torch.int8),
    "x2": zeros(64, 48, dtype=torch.int8),
    "scale": torch.ones(48),
    "pertoken_scale": torch.ones(5),
    "output_dtype": F16,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"x2": zeros(48, 64, dtype=torch.int8)},
        {"x1": zeros(5, 64)},
        {"scale": torch.ones(48, 1)},
        {"scale": zeros(48)},  # bfloat16 scales go with a bfloat16 result only
        {"pertoken_scale": torch.ones(48)},
        {"bias": zeros(48)},
        {"output_dtype": None},
        {"group_sizes": [1, 1, 32]},
    ],
    ids=range(8),
)
def test_integer_product(wrong: Named) -> None:
    refused(torch_npu.npu_quant_matmul, PRODUCT, **wrong)


def test_block_quantiser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "260")
    works = {"x": zeros(2, 300, 64), "dst_type": FP8, "row_block_size": 128}
    quantise = torch_npu.npu_dynamic_block_quant
    for wrong in (
        {"x": zeros(1, 2, 300, 64)},
        {"x": zeros(2, 300, 64, dtype=F32)},
        {"row_block_size": 64},
        {"col_block_size": 64},
        {"dst_type": torch.float16},
    ):
        refused(quantise, works, **wrong)


def test_rotary() -> None:
    cos = zeros(1, 5, 1, 64)
    works = {"input": zeros(1, 5, 4, 64), "r1": cos, "r2": cos, "rotary_mode": "interleave"}
    many, whole = zeros(1, 5, 1000, 64), zeros(1, 5, 4, 64)
    for wrong in (
        {"input": many},
        {"input": zeros(1, 5, 4, 64, dtype=F32)},
        {"r1": whole, "r2": whole},
        {"input": zeros(1, 5, 4, 896), "r1": zeros(1, 5, 1, 896), "r2": zeros(1, 5, 1, 896)},
        {"rotary_mode": "quarter"},
    ):
        refused(torch_npu.npu_rotary_mul, works, **wrong)


ON_CHIPS: dict[str, tuple[str, Callable[[], Any]]] = {
    "dense": ("A2 A3 A5", lambda: torch_npu.npu_fusion_attention(**FUSED)),
    "prompt": (
        "Duo A2 A3",
        lambda: torch_npu.npu_prompt_flash_attention(
            **three(F16, 1, 2, 8, 64), num_heads=2, next_tokens=2**31 - 1, input_layout="BNSD"
        ),
    ),
    "laser": ("A2 A3", lambda: ops.la(**LASER)),
    "fp8": ("A5", lambda: ops.fused_infer_attention_score_v2(**_fp8())),
    "fp8 blocks": (
        "A5",
        lambda: torch_npu.npu_dynamic_block_quant(
            zeros(2, 300, 64), dst_type=FP8, row_block_size=128
        ),
    ),
    "sparse, 0": ("A2 A3", lambda: ops.block_sparse_attention(**_sparse(), inner_precise=0)),
    "sparse, 4": ("A2 A3 A5", lambda: ops.block_sparse_attention(**_sparse(), inner_precise=4)),
    "rainfusion": (
        "A2 A3",
        lambda: ops.rainfusionattention(
            **three(BF16, 128, 2, 64),
            select_idx=torch.zeros(1, 2, 1, dtype=torch.int64),
            select_num_idx=torch.ones(1, 2, dtype=torch.int64),
            blockshape=[128, 128],
            actual_seq_qlen=[128],
            actual_seq_kvlen=[128],
            head_num=2,
        ),
    ),
    "adaln": ("Duo A2 A3", lambda: ops.adaln(zeros(1, 5, 8), zeros(1, 8), zeros(1, 8))),
    "interleave in place": (
        "A5",
        lambda: torch_npu.npu_apply_rotary_pos_emb(
            *(zeros(1, 5, n, 64) for n in (4, 4, 1, 1)), rotary_mode="interleave"
        ),
    ),
}


@pytest.mark.parametrize("soc, chip", [(200, "Duo"), (220, "A2"), (250, "A3"), (260, "A5")])
@pytest.mark.parametrize("what", ON_CHIPS)
def test_chips(monkeypatch: pytest.MonkeyPatch, what: str, soc: int, chip: str) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", str(soc))
    chips, call = ON_CHIPS[what]
    if chip in chips.split():
        call()
        return
    with pytest.raises(RuntimeError, match=rf"simulated {chip}"):
        call()
