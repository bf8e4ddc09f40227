"""Every operator call and every started collective, in the order they were made."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """What was called with what."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    facts: dict[str, Any]


calls: list[Call] = []


def record(name: str, *tensors: Tensor, **facts: Any) -> None:
    """Append to `calls`, and as one JSON line to NPU_SIM_LOG.<RANK> where that is set."""
    call = Call(
        name,
        tuple(tuple(t.shape) for t in tensors),
        tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
        facts,
    )
    calls.append(call)
    path = os.environ.get("NPU_SIM_LOG")
    if path:
        with open(f"{path}.{os.environ.get('RANK', '0')}", "a") as file:
            file.write(json.dumps(call._asdict()) + "\n")
