"""A GPU whose clock is locked for a while, where that is permitted (on most machines: to root)."""

from __future__ import annotations

import atexit
from contextlib import suppress
from typing import Any

from wan.device import Device
from wan.power.meter import MeterError


class Lock:
    """`with lock:` holds the clock at one frequency, and frees it afterwards, also at exit.

    What ends a process at once (SIGKILL, another rank's failure) leaves it locked:
    `nvidia-smi -rgc` frees it.
    """

    def __init__(self, device: Device, mhz: float | None) -> None:
        """MeterError where there is nothing to lock."""
        if device.type != "cuda":
            raise MeterError("only clocks of NVIDIA GPUs are locked")
        if mhz is None:
            raise MeterError("the clock could not be read")
        try:
            import pynvml
        except ModuleNotFoundError as error:
            raise MeterError("nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        self._mhz = int(mhz)
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid()}")
        except pynvml.NVMLError as error:
            raise MeterError(f"NVML: {error}") from error

    def __enter__(self) -> Lock:
        try:
            self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, self._mhz, self._mhz)
        except self._nvml.NVMLError as error:
            raise MeterError(f"the clock may not be locked here ({error})") from error
        atexit.register(self._free)
        return self

    def __exit__(self, *_: object) -> None:
        atexit.unregister(self._free)
        self._free()

    def _free(self) -> None:
        with suppress(self._nvml.NVMLError):  # where the lock itself was not permitted
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
