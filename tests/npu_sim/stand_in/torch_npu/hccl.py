"""The process-group backend "hccl", carried by gloo; what is started is logged."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_npu.log import record

LOGGED = (
    "all_to_all_single",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "broadcast",
)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _ranks(group: Any) -> list[int]:
    """Whose group it is: by it exchanges of heads and of K/V can be told apart."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _logged(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
    def started(*args: Any, **named: Any) -> Any:
        given = (*args, *named.values())
        tensors = [x for x in given if isinstance(x, Tensor)]
        group = next((x for x in given if isinstance(x, dist.ProcessGroup)), None)
        facts = {"ranks": _ranks(group), "async_op": bool(named.get("async_op", False))}
        record(name, *tensors, **facts)
        return start(*args, **named)

    return started


def _logged_batch(start: Callable[..., Any]) -> Callable[..., Any]:
    def started(operations: list[Any]) -> Any:
        verbs = [f"{operation.op.__name__} {operation.group_peer}" for operation in operations]
        facts = {"ranks": _ranks(operations[0].group), "verbs": verbs}
        record("batch_isend_irecv", *(operation.tensor for operation in operations), **facts)
        return start(operations)

    return started


def _mesh_of_cpus(init: Callable[..., None]) -> Callable[..., None]:
    """FSDP insists that weights lie on the device of their mesh."""

    def made(self: DeviceMesh, device_type: str, *args: Any, **named: Any) -> None:
        init(self, "cpu" if device_type == "npu" else device_type, *args, **named)

    return made


def _unbound(init: Callable[..., None]) -> Callable[..., None]:
    """gloo cannot split a group, which PyTorch does for groups that are bound to a device."""

    def made(*args: Any, device_id: Any = None, **named: Any) -> None:
        bound = device_id is not None and torch.device(device_id).type == "npu"
        init(*args, device_id=None if bound else device_id, **named)

    return made


def install() -> None:
    """Register the backend and log the collectives that are called as torch.distributed.<name>."""
    dist.Backend.register_backend("hccl", _create, devices=["npu", "cpu"])
    for name in LOGGED:
        if hasattr(dist, name):
            setattr(dist, name, _logged(name, getattr(dist, name)))
    dist.batch_isend_irecv = _logged_batch(dist.batch_isend_irecv)
    dist.init_process_group = _unbound(dist.init_process_group)
    DeviceMesh.__init__ = _mesh_of_cpus(DeviceMesh.__init__)  # type: ignore[method-assign]
