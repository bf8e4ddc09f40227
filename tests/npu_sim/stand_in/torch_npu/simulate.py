"""Tensors "on npu:i" are CPU tensors: every torch call that names such a device gets the CPU."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "npu":
        return CPU
    if isinstance(value, str) and value.partition(":")[0] == "npu":
        return CPU
    return value


class OnCpu(TorchFunctionMode):
    """Maps the arguments of factories, .to and the like; pinned memory is ordinary memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return False
        if any(isinstance(value, torch.device | str) for value in args):
            args = tuple(map(_on_cpu, args))
        if not kwargs:
            return func(*args)
        named = {key: _on_cpu(value) for key, value in kwargs.items() if key != "pin_memory"}
        return func(*args, **named)


class _Generators(type(torch.Generator)):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PLAIN)


_PLAIN = torch.Generator


class Generator(torch.Generator, metaclass=_Generators):
    """torch.Generator, whose constructor no mode can see."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _PLAIN(device=_on_cpu(device))


def _same(self: Any, *args: Any, **named: Any) -> Any:
    return self


def install(npu: Any) -> None:
    """Make "npu" a device name of PyTorch, with `npu` as torch.npu, in all threads."""
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    torch._C._get_accelerator = lambda check=False: CPU  # type: ignore[attr-defined]
    torch._C._accelerator_getDeviceIndex = lambda: npu.current_device()  # type: ignore[attr-defined]
    torch.Generator = Generator  # type: ignore[misc]
    torch.Tensor.npu = _same  # type: ignore[attr-defined]
    torch.Tensor.record_stream = _same  # type: ignore[method-assign]  # its parser knows no others
    torch.nn.Module.npu = _same  # type: ignore[attr-defined]
    OnCpu().__enter__()
    plain = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start(self: threading.Thread) -> None:
        with OnCpu():  # a mode holds in the thread that entered it
            plain(self)

    threading.Thread._bootstrap_inner = start  # type: ignore[attr-defined]
