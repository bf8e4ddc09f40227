"""Private functions of PyTorch, each with the reason why no public one serves.

Checked with torch 2.13. Nothing else in `wan` uses a private name of PyTorch.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

_aten = torch.ops.aten


def all_to_all_in_graph(send: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`dist.all_to_all_single` with equal parts, as an operation that returns what it received.

    The public function writes into a buffer, which a compiled graph turns into one more copy.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None, "there is a default group"
    return functional.all_to_all_single(send, None, None, group)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """DeviceMesh makes groups with PyTorch's default timeout, and no public function changes it."""
    _set_pg_timeout(timeout, group)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one of this name.

    There is no public way to a group along several axes, and groups made beside the mesh would be
    unknown to FSDP.
    """
    return mesh._flatten(name)


def flash_attention_on_cpu(q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp [B,N,S]; the public function returns no log-sum-exp."""
    return _aten._scaled_dot_product_flash_attention_for_cpu(q_BNSD, k_BNSD, v_BNSD)


def flash_attention_on_cuda(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same on CUDA, 16 bits, compute capability 8.0 and up."""
    found = _aten._scaled_dot_product_flash_attention(q_BNSD, k_BNSD, v_BNSD, scale=scale)
    return found[0], found[1]


def efficient_attention_on_cuda(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same on every CUDA device, in any dtype."""
    found = _aten._scaled_dot_product_efficient_attention(
        q_BNSD, k_BNSD, v_BNSD, None, True, scale=scale
    )
    return found[0], found[1][..., : q_BNSD.shape[2]]  # the kernel pads rows to 32


def int8_matmul(a_LI: Tensor, b_IO: Tensor) -> Tensor:
    """a b in int32, [L,O]; the public product of int8 matrices is int8."""
    return torch._int_mm(a_LI, b_IO)


def times_changed(x: Tensor) -> int:
    """How often a tensor was written in place; 0 in inference mode, where nobody counts."""
    return 0 if x.is_inference() else x._version
