"""Private functions of torch that the code cannot do without, each with the reason.

All of them were checked with torch 2.13; look here first when torch is upgraded.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one of this name.

    DeviceMesh has no public way to a group along several axes, and groups made beside it would be
    unknown to FSDP. Checked with torch 2.13.
    """
    return mesh._flatten(name)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give a group that exists another timeout.

    DeviceMesh makes its groups with PyTorch's default, whatever the group of all ranks has.
    Checked with torch 2.13.
    """
    _set_pg_timeout(timeout, group)
