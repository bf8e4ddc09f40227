"""The stand-in for torch_npu: its arithmetic against plain PyTorch, its refusals, its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

ops = torch.ops.mindiesd
LONG = 2**31 - 1


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    rows: int = 300, keys: int = 200, size: int = 64, dtype: torch.dtype = torch.float32
) -> Any:
    """[1,2,rows,size] and twice [1,2,keys,size]."""
    return tuple(made(1, 2, s, size, seed=i, dtype=dtype) for i, s in enumerate((rows, keys, keys)))


def fused(q: Tensor, k: Tensor, v: Tensor, layout: str = "BNSD", **more: Any) -> Any:
    more = {"scale": 0.125} | more
    return torch_npu.npu_fusion_attention(q, k, v, 2, layout, **more)


def plain(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.125, **more)


def test_dense_attention_in_every_layout() -> None:
    q, k, v = qkv()
    want = plain(q, k, v)
    torch.testing.assert_close(fused(q, k, v)[0], want)
    rows_first = [x.transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(fused(*rows_first, "BSND")[0], want.transpose(1, 2))
    flat = [x.flatten(2) for x in rows_first]
    torch.testing.assert_close(fused(*flat, "BSH")[0], want.transpose(1, 2).flatten(2))
    turned = [x.transpose(0, 1) for x in flat]
    torch.testing.assert_close(fused(*turned, "SBH")[0].transpose(0, 1), fused(*flat, "BSH")[0])


def test_masked_positions_are_dropped() -> None:
    q, k, v = qkv()
    drop = torch.rand(300, 200, generator=torch.Generator().manual_seed(1)) < 0.5
    want = plain(q, k, v, attn_mask=~drop)
    for mask in (drop, drop[None, None].to(torch.uint8)):
        torch.testing.assert_close(fused(q, k, v, atten_mask=mask)[0], want)


def test_maximum_and_sum_give_the_lse() -> None:
    q, k, v = qkv()
    _, peak, total, *_ = fused(q, k, v)
    assert peak.shape == total.shape == (1, 2, 300, 8)
    want = torch.logsumexp(q @ k.transpose(-1, -2) * 0.125, -1)
    torch.testing.assert_close((peak + total.log())[..., 0], want)
    assert torch.equal(peak, peak[..., :1].expand_as(peak))


def test_sequences_of_different_lengths() -> None:
    q, k, v = (x[0].transpose(0, 1) for x in qkv(50, 70))
    ends = ([20, 50], [40, 70])
    lengths = {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    out = fused(q, k, v, "TND", **lengths)[0]
    causal = torch.triu(torch.ones(2048, 2048), diagonal=1).bool()
    below = fused(q, k, v, "TND", **lengths, atten_mask=causal, sparse_mode=3)[0]
    for (a, b), (c, d) in (((0, 20), (0, 40)), ((20, 50), (40, 70))):
        one = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        torch.testing.assert_close(out[a:b], plain(*one)[0].transpose(0, 1))
        keep = torch.ones(b - a, d - c).tril((d - c) - (b - a)).bool()
        torch.testing.assert_close(below[a:b], plain(*one, attn_mask=keep)[0].transpose(0, 1))


@pytest.mark.parametrize("cut", [128, 256])
def test_bits_do_not_depend_on_heads_and_aligned_cuts(cut: int) -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    whole = fused(q, k, v)[0]
    parts = [fused(x.contiguous(), k, v)[0] for x in (q[:, :, :cut], q[:, :, cut:])]
    assert torch.equal(torch.cat(parts, 2), whole)
    heads = [
        torch_npu.npu_fusion_attention(
            *(x[:, n : n + 1].contiguous() for x in (q, k, v)), 1, "BNSD", scale=0.125
        )[0]
        for n in range(2)
    ]
    assert torch.equal(torch.cat(heads, 1), whole)


def test_laser_leaves_out_the_padding() -> None:
    q, k, v = qkv(256, 512, 128, torch.float16)
    k[:, :, 300:], v[:, :, 300:] = 0, 0
    lse, out = ops.la(q, k, v, scale_value=0.125, head_num=2, pre_tokens=212)
    torch.testing.assert_close(out, plain(q, k[:, :, :300], v[:, :, :300]))
    scores = q.float() @ k[:, :, :300].float().transpose(-1, -2) * 0.125
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


def quantised(x: Tensor, rows: int = 128) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_SOC", "260")
        return torch_npu.npu_dynamic_block_quant(
            x, dst_type=torch.float8_e4m3fn, row_block_size=rows
        )


def fp8_arguments(size: int = 64) -> tuple[list[Tensor], dict[str, Any]]:
    """Positional and named arguments of the per-block FP8 attention."""
    pairs = [
        quantised(x[0], 128 if i == 0 else 256)
        for i, x in enumerate(qkv(300, 700, size, torch.bfloat16))
    ]
    names = ("query", "key", "value")
    named: dict[str, Any] = {f"{name}_quant_mode": 7 for name in names}
    named |= {
        f"dequant_scale_{name}": scale[None] for name, (_, scale) in zip(names, pairs, strict=True)
    }
    named |= {"num_query_heads": 2, "input_layout": "BNSD", "softmax_scale": 0.125}
    return [payload[None] for payload, _ in pairs], named | {"out_dtype": torch.bfloat16}


def test_fp8_attention_of_dequantised_values(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads, named = fp8_arguments()
    whole = []
    for name, x, rows in zip(("query", "key", "value"), payloads, (128, 256, 256), strict=True):
        scale = named[f"dequant_scale_{name}"].repeat_interleave(rows, 2)[:, :, : x.shape[2]]
        whole.append(x.float() * scale)
    monkeypatch.setenv("NPU_SIM_SOC", "260")
    out = ops.fused_infer_attention_score_v2(*payloads, **named)[0]
    torch.testing.assert_close(out, plain(*whole).bfloat16())


def block_mask(rows: int, keys: int, k_rows: int = 128) -> tuple[Tensor, Tensor]:
    """A random mask of blocks [1,2,q,k] with at least one block a row, and the same by rows."""
    blocks = (-(-rows // 128), -(-keys // k_rows))
    mask = torch.rand(1, 2, *blocks, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., 0] = True
    spread = mask.repeat_interleave(128, 2).repeat_interleave(k_rows, 3)
    return mask, spread[:, :, :rows, :keys]


def test_rainfusion_by_table() -> None:
    q, k, v = qkv(300, 520, dtype=torch.bfloat16)
    mask, spread = block_mask(300, 520)
    counts = mask[0].sum(-1).T.contiguous()
    ids = torch.full((3, 2, 5), -1)
    for block, head in ((b, h) for b in range(3) for h in range(2)):
        chosen = mask[0, head, block].nonzero()[:, 0]
        ids[block, head, : len(chosen)] = chosen
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    lengths = {"actual_seq_qlen": [300], "actual_seq_kvlen": [520]}
    named = {"head_num": 2, "scale": 0.125, "inner_precise": 0} | lengths
    out = ops.rainfusionattention(*rows, ids, counts, [128, 128], **named)[0]
    want = plain(q, k, v, attn_mask=spread)
    torch.testing.assert_close(out, want[0].transpose(0, 1).bfloat16())
    named |= {"q_input_layout": "BNSD", "kv_input_layout": "BNSD"}
    out = ops.rainfusionattention(q, k, v, ids, counts, [128, 128], **named)[0]
    torch.testing.assert_close(out, want.bfloat16())
    ids[0, 0, 0] = 5
    with pytest.raises(RuntimeError, match="lie within the keys"):
        ops.rainfusionattention(q, k, v, ids, counts, [128, 128], **named)


def test_block_sparse_by_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(300, 520, dtype=torch.bfloat16)
    mask, spread = block_mask(300, 520)
    named: dict[str, Any] = {"num_key_value_heads": 2, "scale_value": 0.125}
    out = ops.block_sparse_attention(q, k, v, mask.to(torch.int8), **named)[0]
    torch.testing.assert_close(out, plain(q, k, v, attn_mask=spread).bfloat16())
    monkeypatch.setenv("NPU_SIM_SOC", "260")
    mask, spread = block_mask(300, 520, 256)
    pairs = [quantised(x[0], 128 if i == 0 else 256) for i, x in enumerate((q, k, v))]
    for name, (_, scale) in zip("qkv", pairs, strict=True):
        named[f"{name}_dequant_scale"] = scale[None]
    payloads = [payload[None] for payload, _ in pairs]
    named |= {"block_shape": [128, 256], "inner_precise": 4}
    out = ops.block_sparse_attention(*payloads, mask.to(torch.int8), **named)[0]
    whole = [
        p.float() * s[None].repeat_interleave(r, 2)[:, :, : p.shape[2]]
        for (p, (_, s)), r in zip(zip(payloads, pairs, strict=True), (128, 256, 256), strict=True)
    ]
    torch.testing.assert_close(out, plain(*whole, attn_mask=spread).bfloat16())


def test_calls_are_logged_in_memory_and_per_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[Any]
) -> None:
    monkeypatch.setenv("NPU_SIM_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("RANK", "3")
    fused(*qkv())
    torch_npu.npu_rms_norm(made(2, 8), made(8))
    lines = [json.loads(line) for line in (tmp_path / "log.3").read_text().splitlines()]
    assert [call.name for call in calls] == ["npu_fusion_attention", "npu_rms_norm"]
    assert [line["name"] for line in lines] == [call.name for call in calls]
    assert lines[0]["shapes"] == [[1, 2, 300, 64], [1, 2, 200, 64], [1, 2, 200, 64]]
    assert calls[1].dtypes == ("bfloat16", "bfloat16")
