"""Every operator call and every started collective, in the order they were made."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only


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


def outputs_alone(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Of tensors without data an operator makes its results and nothing on the way."""

    @functools.wraps(operator)
    def called(*args: Any, **named: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.is_meta for x in args):
            return operator(*args, **named)
        with _disable_current_modes():
            made = operator(*args, **named)
        return tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), made)

    return called
