"""Block masks of the stand-in for torch_npu, against masks of rows.

mindiesd has no computation of its own for them, only these operators.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.npu_sim.oracles import compute_attention, make_qkv

ops = torch.ops.mindiesd
ROWS, KEYS = 300, 520
SCALE = 64**-0.5


def make_inputs() -> list[Tensor]:
    """Make contiguous q, k, v [1,2,S,64]."""
    return [x.transpose(1, 2).contiguous() for x in make_qkv(ROWS, KEYS)]


def quantize_blocks(x_BNSD: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return FP8 values and scales of the A5 operator, and the dequantized values."""
    quant_kwargs = {"dst_type": torch.float8_e4m3fn, "row_block_size": rows}
    payload, scale = torch_npu.npu_dynamic_block_quant(x_BNSD[0], **quant_kwargs)
    dequantized = payload.float() * scale.repeat_interleave(rows, 1)[:, : payload.shape[1]]
    return payload[None], scale[None], dequantized[None]


def make_block_mask(k_rows: int = 128) -> tuple[Tensor, Tensor]:
    """Make a random block mask [1,2,q,k] with a block in each row, and expand it to rows."""
    blocks = (-(-ROWS // 128), -(-KEYS // k_rows))
    mask = torch.rand(1, 2, *blocks, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., 0] = True
    row_mask = mask.repeat_interleave(128, 2).repeat_interleave(k_rows, 3)
    return mask, row_mask[:, :, :ROWS, :KEYS]


def check_attention(actual: Tensor, qkv_BNSD: tuple[Tensor, ...], row_mask: Tensor) -> None:
    """Compare a bfloat16 result [1,2,S,64] with float64 attention."""
    expected = compute_attention(*(x.transpose(1, 2) for x in qkv_BNSD), mask=row_mask)
    torch.testing.assert_close(
        actual.transpose(1, 2), expected.to(actual.dtype), rtol=2e-2, atol=2e-3
    )


def test_rainfusion_by_table() -> None:
    q, k, v = make_inputs()
    mask, row_mask = make_block_mask()
    counts = mask[0].sum(-1).T.contiguous()
    ids = torch.full((3, 2, 5), -1)
    for block, head in ((b, h) for b in range(3) for h in range(2)):
        chosen = mask[0, head, block].nonzero()[:, 0]
        ids[block, head, : len(chosen)] = chosen
    more: dict[str, Any] = {"head_num": 2, "scale": SCALE, "inner_precise": 0}
    more |= {"actual_seq_qlen": [ROWS], "actual_seq_kvlen": [KEYS]}
    qkv_TND = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    out_TND = ops.rainfusionattention(*qkv_TND, ids, counts, [128, 128], **more)[0]
    check_attention(out_TND.transpose(0, 1)[None], (q, k, v), row_mask)


def test_block_sparse_by_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = make_inputs()
    mask, row_mask = make_block_mask()
    more: dict[str, Any] = {"num_key_value_heads": 2, "scale_value": SCALE}
    out = ops.block_sparse_attention(*qkv, mask.to(torch.int8), **more)[0]
    check_attention(out, tuple(qkv), row_mask)
    monkeypatch.setenv("NPU_SIM_SOC", "260")
    mask, row_mask = make_block_mask(256)
    payloads, scales, dequantized = zip(*map(quantize_blocks, qkv, (128, 256, 256)), strict=True)
    more |= {f"{name}_dequant_scale": scale for name, scale in zip("qkv", scales, strict=True)}
    more |= {"block_shape": [128, 256], "inner_precise": 4}
    out = ops.block_sparse_attention(*payloads, mask.to(torch.int8), **more)[0]
    check_attention(out, dequantized, row_mask)
