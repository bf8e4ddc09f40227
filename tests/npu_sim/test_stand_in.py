"""Parts of the stand-in for torch_npu that no kernel's test covers: masks, devices, hccl, log."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist import Ranks, make_rank_envs
from tests.npu_sim import oracles
from tests.npu_sim.oracles import compute_attention, make_random

ops = torch.ops.mindiesd
NPU = torch.device("npu", 1)
HALF = {"rtol": 2e-2, "atol": 2e-3}  # of a bfloat16 result


def make_qkv(rows: int = 300, keys: int = 200, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Make contiguous q, k, v [1,2,S,64]."""
    return [x.transpose(1, 2).contiguous() for x in oracles.make_qkv(rows, keys, dtype=dtype)]


def run_fused_attention(*qkv: Tensor, layout: str = "BNSD", **extra_kwargs: Any) -> Any:
    heads = extra_kwargs.pop("head_num", 2)
    return torch_npu.npu_fusion_attention(*qkv, heads, layout, **{"scale": 0.125} | extra_kwargs)


def compute_attention_BNSD(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute float64 attention of [B,N,S,D]."""
    return compute_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask).transpose(1, 2)


def check_close(actual: Tensor, expected: Tensor, **limits: Any) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), **limits)


def test_bits_do_not_depend_on_heads_and_aligned_cuts() -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16)
    full_output = run_fused_attention(q, k, v)[0]
    for cut in (128, 256):
        parts = [
            run_fused_attention(x.contiguous(), k, v)[0] for x in (q[:, :, :cut], q[:, :, cut:])
        ]
        assert torch.equal(torch.cat(parts, 2), full_output)
    heads = [
        run_fused_attention(*(x[:, n : n + 1].contiguous() for x in (q, k, v)), head_num=1)[0]
        for n in range(2)
    ]
    assert torch.equal(torch.cat(heads, 1), full_output)


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


def test_calls_are_logged_in_memory_and_per_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[Any]
) -> None:
    monkeypatch.setenv("NPU_SIM_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("RANK", "3")
    run_fused_attention(*make_qkv())
    torch_npu.npu_rms_norm(make_random(2, 8), make_random(8))
    lines = [json.loads(line) for line in (tmp_path / "log.3").read_text().splitlines()]
    assert [call.name for call in calls] == ["npu_fusion_attention", "npu_rms_norm"]
    assert [line["name"] for line in lines] == [call.name for call in calls]
    assert lines[0]["shapes"] == [[1, 2, 300, 64], [1, 2, 200, 64], [1, 2, 200, 64]]
    assert calls[1].dtypes == ("bfloat16", "bfloat16")


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


def test_the_device_module(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = torch.get_device_module("npu")
    assert npu is torch.npu is torch_npu.npu
    monkeypatch.setenv("NPU_SIM_COUNT", "2")
    npu.set_device("npu:1")
    assert (npu.current_device(), npu.device_count(), npu.is_available()) == (1, 2, True)
    with pytest.raises(RuntimeError, match="there is no device 2"):
        npu.set_device(2)
    npu.set_device(0)
    stream, event = npu.Stream(device=NPU), npu.Event()
    with npu.stream(stream):
        event.record(npu.current_stream())
    stream.wait_event(event)
    stream.wait_stream(npu.current_stream())
    npu.synchronize()
    assert stream.device == NPU and event.query()


def run_over_hccl() -> int:
    rank = int(os.environ["RANK"])
    npu = torch.device("npu", rank)
    torch.npu.set_device(npu)
    dist.init_process_group("hccl", device_id=npu)
    mesh = init_device_mesh("npu", (1, 2), mesh_dim_names=("a", "b"))
    group = mesh["b"].get_group()
    assert dist.get_backend(group) == "hccl"
    local_values = torch.arange(4.0, device=npu) + 10 * rank
    received, gathered = torch.empty_like(local_values), torch.empty(8, device=npu)
    work = dist.all_to_all_single(received, local_values, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert received.tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
    dist.all_gather_single(gathered, local_values, group)
    assert gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    send = dist.P2POp(dist.isend, local_values, group=group, group_peer=1 - rank)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=1 - rank)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    assert torch.equal(received, torch.arange(4.0) + 10 * (1 - rank))
    box = [rank]
    dist.broadcast_object_list(box, src=0, device=npu)
    dist.broadcast(local_values, src=0)
    assert box == [0] and local_values[0] == 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(npu)
    x = torch.randn(3, 8, device=npu)
    with torch.no_grad():
        expected = model(x)
        fully_shard(model, mesh=mesh._flatten("world"))
        assert torch.equal(model(x), expected)
    dist.barrier()
    dist.destroy_process_group()
    return 0


@pytest.mark.dist
def test_two_ranks_over_hccl(tmp_path: Path) -> None:
    with Ranks(make_rank_envs(2, NPU_SIM_LOG=str(tmp_path / "log")), run_over_hccl) as ranks:
        assert ranks.wait_for_exit() == [0, 0], ranks.format_outputs()
    for rank in (0, 1):
        lines = (tmp_path / f"log.{rank}").read_text().splitlines()
        calls: list[dict[str, Any]] = [json.loads(line) for line in lines]
        names = ["all_to_all_single", "all_gather_single", "batch_isend_irecv", "broadcast"]
        assert [call["name"] for call in calls[:4]] == names
        verbs = [f"isend {1 - rank}", f"irecv {1 - rank}"]
        assert calls[2]["facts"] == {"ranks": [0, 1], "verbs": verbs}
        assert calls[0]["facts"] == {"ranks": [0, 1], "async_op": True}
        assert calls[1]["facts"] == {"ranks": [0, 1], "async_op": False}
        assert calls[0]["shapes"] == [[4], [4]]
