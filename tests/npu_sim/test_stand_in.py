"""Parts of the stand-in for torch_npu that no kernel's test covers: masks and devices."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor, nn

from tests.npu_sim import oracles
from tests.npu_sim.oracles import compute_attention

ops = torch.ops.mindiesd
NPU = torch.device("npu", 1)
HALF = {"rtol": 2e-2, "atol": 2e-3}  # of a bfloat16 result


def make_qkv(rows: int = 300, keys: int = 200, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Make contiguous q, k, v [1,2,S,64]."""
    return [x.transpose(1, 2).contiguous() for x in oracles.make_qkv(rows, keys, dtype=dtype)]


def compute_attention_BNSD(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute float64 attention of [B,N,S,D]."""
    return compute_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask).transpose(1, 2)


def check_close(actual: Tensor, expected: Tensor, **limits: Any) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), **limits)


def quantize_blocks(x_BNSD: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return FP8 values and scales of the A5 operator, and the dequantized values."""
    quant_kwargs = {"dst_type": torch.float8_e4m3fn, "row_block_size": rows}
    payload, scale = torch_npu.npu_dynamic_block_quant(x_BNSD[0], **quant_kwargs)
    dequantized = payload.float() * scale.repeat_interleave(rows, 1)[:, : payload.shape[1]]
    return payload[None], scale[None], dequantized[None]


def make_block_mask(rows: int, keys: int, k_rows: int = 128) -> tuple[Tensor, Tensor]:
    """Make a random block mask [1,2,q,k] with a block in each row, and expand it to rows."""
    blocks = (-(-rows // 128), -(-keys // k_rows))
    mask = torch.rand(1, 2, *blocks, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., 0] = True
    row_mask = mask.repeat_interleave(128, 2).repeat_interleave(k_rows, 3)
    return mask, row_mask[:, :, :rows, :keys]


def test_rainfusion_by_table() -> None:
    q, k, v = make_qkv(300, 520, torch.bfloat16)
    mask, row_mask = make_block_mask(300, 520)
    counts = mask[0].sum(-1).T.contiguous()
    ids = torch.full((3, 2, 5), -1)
    for block, head in ((b, h) for b in range(3) for h in range(2)):
        chosen = mask[0, head, block].nonzero()[:, 0]
        ids[block, head, : len(chosen)] = chosen
    expected = compute_attention_BNSD(q, k, v, row_mask)
    attention_kwargs: dict[str, Any] = {"head_num": 2, "scale": 0.125, "inner_precise": 0}
    attention_kwargs |= {"actual_seq_qlen": [300], "actual_seq_kvlen": [520]}
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    out = ops.rainfusionattention(*rows, ids, counts, [128, 128], **attention_kwargs)[0]
    check_close(out, expected[0].transpose(0, 1), **HALF)
    attention_kwargs |= {"q_input_layout": "BNSD", "kv_input_layout": "BNSD"}
    check_close(
        ops.rainfusionattention(q, k, v, ids, counts, [128, 128], **attention_kwargs)[0],
        expected,
        **HALF,
    )


def test_block_sparse_by_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(300, 520, torch.bfloat16)
    mask, row_mask = make_block_mask(300, 520)
    attention_kwargs: dict[str, Any] = {"num_key_value_heads": 2, "scale_value": 0.125}
    out = ops.block_sparse_attention(q, k, v, mask.to(torch.int8), **attention_kwargs)[0]
    check_close(out, compute_attention_BNSD(q, k, v, row_mask), **HALF)
    monkeypatch.setenv("NPU_SIM_SOC", "260")
    mask, row_mask = make_block_mask(300, 520, 256)
    parts = list(map(quantize_blocks, (q, k, v), (128, 256, 256)))
    attention_kwargs |= {
        f"{name}_dequant_scale": scale for name, (_, scale, _) in zip("qkv", parts, strict=True)
    }
    attention_kwargs |= {"block_shape": [128, 256], "inner_precise": 4}
    payloads, _, dequantized = zip(*parts, strict=True)
    out = ops.block_sparse_attention(*payloads, mask.to(torch.int8), **attention_kwargs)[0]
    check_close(out, compute_attention_BNSD(*dequantized, mask=row_mask), **HALF)


def test_tensors_of_the_npu_are_on_the_cpu() -> None:
    assert (NPU.type, NPU.index) == ("npu", 1) and torch.device("npu:1") == NPU
    tensors: list[Tensor] = [
        torch.zeros(2, device=NPU),
        torch.empty(2, device="npu"),
        torch.tensor([1.0], device="npu:0"),
        torch.zeros(2).to(NPU),
        torch.zeros(2).to("npu", torch.bfloat16),
        torch.zeros(2).npu(),
        torch.zeros(2).pin_memory().to(NPU, non_blocking=True),
        torch.randn(2, generator=torch.Generator(device=NPU).manual_seed(1), device=NPU),
        nn.Linear(2, 2).to(NPU).weight,
        nn.Linear(2, 2, device="meta").to_empty(device=NPU).weight,
    ]
    with torch.device("npu"):
        tensors.append(torch.ones(2))
    thread = threading.Thread(target=lambda: tensors.append(torch.zeros(1, device=NPU)))
    thread.start()
    thread.join()
    assert len(tensors) == 12 and {x.device.type for x in tensors} == {"cpu"}
    assert torch.zeros(1, device="meta").device.type == "meta"
    assert isinstance(torch.default_generator, torch.Generator)
