"""Which chip is simulated, and the refusals that depend on it."""

from __future__ import annotations

import os

from torch import Tensor

NAMES = {200: "Duo", 220: "A2", 250: "A3", 260: "A5"}
DEVICE_NAMES = {
    "Duo": "Ascend310P3",
    "A2": "Ascend910B3",
    "A3": "Ascend910_9382",
    "A5": "Ascend950PR",
}


def soc() -> int:
    """NPU_SIM_SOC, read anew each time so that one process can test several chips."""
    return int(os.environ.get("NPU_SIM_SOC", "220"))


def name() -> str:
    """A2, A3, A5 or Duo."""
    return NAMES[soc()]


def device_count() -> int:
    return int(os.environ.get("NPU_SIM_COUNT", "8"))


def require(condition: bool, operation: str, text: str) -> None:
    """RuntimeError, as an operator of the real library raises it, unless condition."""
    if not condition:
        raise RuntimeError(f"{operation} (simulated {name()}): {text}")


def require_chip(operation: str, *chips: str) -> None:
    require(name() in chips, operation, f"not supported here, only on {', '.join(chips)}.")


def require_dtype(operation: str, allowed: tuple, **tensors: Tensor) -> None:
    for what, tensor in tensors.items():
        require(
            tensor.dtype in allowed,
            operation,
            f"{what} is {tensor.dtype}; supported: {', '.join(map(str, allowed))}.",
        )


def require_same_dtype(operation: str, **tensors: Tensor) -> None:
    found = {what: tensor.dtype for what, tensor in tensors.items()}
    require(len(set(found.values())) == 1, operation, f"one dtype is needed, got {found}.")


def require_contiguous(operation: str, **tensors: Tensor) -> None:
    for what, tensor in tensors.items():
        require(tensor.is_contiguous(), operation, f"{what} is not contiguous.")


def require_shape(operation: str, what: str, tensor: Tensor, shape: tuple) -> None:
    require(
        tuple(tensor.shape) == tuple(shape),
        operation,
        f"{what} has shape {tuple(tensor.shape)}; needed: {tuple(shape)}.",
    )
