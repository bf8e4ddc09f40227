"""The simulated device: where tensors named "npu" live, and hccl between two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import nn

NPU = torch.device("npu", 1)


def test_tensors_of_the_npu_are_on_the_cpu() -> None:
    assert (NPU.type, NPU.index) == ("npu", 1) and torch.device("npu:1") == NPU
    made: list[torch.Tensor] = [
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
        made.append(torch.ones(2))
    assert {x.device.type for x in made} == {"cpu"}
    assert torch.zeros(1, device="meta").device.type == "meta"
    assert isinstance(torch.default_generator, torch.Generator)


def test_threads_see_the_npu_too() -> None:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(torch.zeros(1, device=NPU).device.type))
    thread.start()
    thread.join()
    assert seen == ["cpu"]


def test_the_device_module(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = torch.get_device_module("npu")
    assert npu is torch.npu is torch_npu.npu
    monkeypatch.setenv("NPU_SIM_COUNT", "2")
    npu.set_device("npu:1")
    assert (npu.current_device(), npu.device_count(), npu.is_available()) == (1, 2, True)
    with pytest.raises(RuntimeError, match="there is no device 2"):
        npu.set_device(2)
    npu.set_device(0)
    for soc, name in (("200", "Ascend310P3"), ("220", "Ascend910B3"), ("260", "Ascend950PR")):
        monkeypatch.setenv("NPU_SIM_SOC", soc)
        assert (npu.get_soc_version(), npu.get_device_name()) == (int(soc), name)
    stream, event = npu.Stream(device=NPU), npu.Event()
    with npu.stream(stream):
        event.record(npu.current_stream())
    stream.wait_event(event)
    stream.wait_stream(npu.current_stream())
    npu.synchronize()
    assert stream.device == NPU and event.query()


RANK = """
import os, sys, torch, torch_npu
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])
npu = torch.device("npu", rank)
torch.npu.set_device(npu)
dist.init_process_group("hccl", device_id=npu)
mesh = init_device_mesh("npu", (1, 2), mesh_dim_names=("a", "b"))
group = mesh["b"].get_group()
assert dist.get_backend(group) == "hccl"

own = torch.arange(4.0, device=npu) + 10 * rank
got, both = torch.empty_like(own), torch.empty(8, device=npu)
dist.all_to_all_single(got, own, group=group, async_op=True).wait()
assert got.tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
dist.all_gather_single(both, own, group)
assert both.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
send = dist.P2POp(dist.isend, own, group=group, group_peer=1 - rank)
receive = dist.P2POp(dist.irecv, got, group=group, group_peer=1 - rank)
for work in dist.batch_isend_irecv([send, receive]):
    work.wait()
assert torch.equal(got, torch.arange(4.0) + 10 * (1 - rank))
box = [rank]
dist.broadcast_object_list(box, src=0, device=npu)
dist.broadcast(own, src=0)
assert box == [0] and own[0] == 0

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(npu)
x = torch.randn(3, 8, device=npu)
with torch.no_grad():
    want = model(x)
    fully_shard(model, mesh=mesh._flatten("world"))
    assert torch.equal(model(x), want)
    torch_npu.npu_fusion_attention(*3 * (torch.zeros(1, 1, 8, 8),), 1, "BNSD")
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_over_hccl(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc_per_node=2", str(tmp_path / "rank.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NPU_SIM_LOG": str(tmp_path / "log"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        lines = (tmp_path / f"log.{rank}").read_text().splitlines()
        calls: list[dict[str, Any]] = [json.loads(line) for line in lines]
        names = [call["name"] for call in calls]
        assert names[:3] == ["all_to_all_single", "all_gather_single", "batch_isend_irecv"]
        assert names[3] == "broadcast" and names[-1] == "npu_fusion_attention"
        verbs = [f"isend {1 - rank}", f"irecv {1 - rank}"]
        assert calls[2]["facts"] == {"ranks": [0, 1], "verbs": verbs}
        assert calls[0]["facts"] == {"ranks": [0, 1], "async_op": True}
        assert calls[1]["facts"] == {"ranks": [0, 1], "async_op": False}
        assert calls[0]["shapes"] == [[4], [4]]
