"""Power, energy and clock of an NVIDIA GPU, from nvidia-ml-py (NVML, the driver's library).

Checked with nvidia-ml-py 12.535 to 13.615. Reading needs no permission; locking the clock usually
needs root.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from wan.metering.power_source import MeterError, PowerSource, Sample

if TYPE_CHECKING:
    from wan.device import Device

CLOCK_EVENT_REASONS = {  # bit of the clocks event reasons -> reason for throttling
    0x004: "SW power cap",
    0x008: "HW slowdown",
    0x020: "SW thermal slowdown",
    0x040: "HW thermal slowdown",
    0x080: "HW power brake",
    0x200: "board limit",
    0x400: "reliability",
}
"""Idle, clocks set by the user, sync boost and display are not counted as throttling."""
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # nvmlValueType_t
_SMOOTHING_FIELDS = {  # missing in nvidia-ml-py before 12.570
    "enabled": "ENABLED",
    "immediate_ramp_down": "IMM_RAMP_DOWN_ENABLED",
    "applied_floor": "APPLIED_TMP_FLOOR",
    "profile": "ACTIVE_PRESET_PROFILE",
    "floor_percent": "PROFILE_PERCENT_TMP_FLOOR",  # these belong to the active profile
    "ramp_up_mw_per_s": "PROFILE_RAMP_UP_RATE",
    "ramp_down_mw_per_s": "PROFILE_RAMP_DOWN_RATE",
    "ramp_down_hysteresis_ms": "PROFILE_RAMP_DOWN_HYST_VAL",
}


def _load_nvml() -> Any:
    """Imports and initializes nvidia-ml-py; raises MeterError if that fails."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise MeterError(
            "nvidia-ml-py is not installed: pip install -r requirements-power.txt"
        ) from error
    if not hasattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons"):
        raise MeterError("the installed pynvml is older than nvidia-ml-py 12.535: update it")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MeterError(f"NVML does not start: {error}") from error
    return pynvml


class Nvml(PowerSource):
    """Reads power, energy and clock of one GPU."""

    name = "NVML"

    def __init__(self, uuid: str) -> None:
        """Opens a GPU by its UUID: CUDA_VISIBLE_DEVICES changes CUDA's indices, but not NVML's.

        Args:
            uuid: The UUID, without the prefix "GPU-".

        Raises:
            MeterError: The library, the driver or the GPU is missing, or has no readings.
        """
        self._nvml, self.device = _load_nvml(), f"GPU-{uuid}"
        try:
            self._open_gpu(uuid)
        except MeterError:
            self.close()
            raise

    def _open_gpu(self, uuid: str) -> None:
        nvml = self._nvml
        handle = self._handle = self._call_or_none(nvml.nvmlDeviceGetHandleByUUID, self.device)
        if (
            handle is None
            and self._call_or_none(nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}") is not None
        ):
            raise MeterError("a MIG instance has no power meter, only its whole GPU has")
        if handle is None:
            raise MeterError(f"NVML shows no {self.device}; a container may hide it")
        instant = self._call_or_none(self._read_field, nvml.NVML_FI_DEV_POWER_INSTANT) is not None
        self.power_is = "instantaneous" if instant else "means of up to a second"

        def read_watts() -> float:
            if instant:
                return self._read_field(nvml.NVML_FI_DEV_POWER_INSTANT) / 1000
            return nvml.nvmlDeviceGetPowerUsage(handle) / 1000

        def read_reasons() -> frozenset[str]:
            bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            return frozenset(name for bit, name in CLOCK_EVENT_REASONS.items() if bits & bit)

        readers: dict[str, Callable[[], Any]] = {
            "watts": read_watts,
            "joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "reasons": read_reasons,
        }
        self._readers = {
            name: read for name, read in readers.items() if self._call_or_none(read) is not None
        }
        if not {"watts", "joules"} & {*self._readers}:
            raise MeterError(f"{self.device} reports neither its power nor its energy")
        limit_mw = self._call_or_none(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        self.limit_w = None if limit_mw is None else limit_mw / 1000
        self.rated_mhz = self._call_or_none(
            nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM
        )
        self.smoothing = self._read_power_smoothing()

    def read_sample(self) -> Sample:
        try:
            return Sample(**{name: read_value() for name, read_value in self._readers.items()})
        except self._nvml.NVMLError as error:
            raise MeterError(f"NVML: {error}") from error

    def close(self) -> None:
        self._call_or_none(self._nvml.nvmlShutdown)

    def _read_field(self, *field_and_scope: int) -> Any:
        """Returns the value of an NVML field, given by its ID and optionally a scope."""
        requests = [field_and_scope if len(field_and_scope) > 1 else field_and_scope[0]]
        (value,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, requests)
        if value.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(value.nvmlReturn)
        return getattr(value.value, _VALUE_MEMBERS[value.valueType])

    def _call_or_none(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Calls an NVML function; returns None if the GPU, driver or user does not support it."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None

    def _read_power_smoothing(self) -> dict[str, float] | None:
        """Returns the state of power smoothing; None on GPUs before Blackwell."""
        smoothing: dict[str, float] = {}
        for name, constant in _SMOOTHING_FIELDS.items():
            args = [getattr(self._nvml, f"NVML_FI_PWR_SMOOTHING_{constant}", None)]
            if constant.startswith("PROFILE_"):
                args.append(smoothing.get("profile"))
            value = None if None in args else self._call_or_none(self._read_field, *args)
            if value is not None:
                smoothing[name] = value
        return smoothing if "enabled" in smoothing else None


class ClockLock:
    """Locks a GPU's clock inside a `with` block and unlocks it afterwards, also at exit.

    A killed process (SIGKILL, another rank's failure) leaves the clock locked until
    `nvidia-smi -rgc`.
    """

    def __init__(self, device: Device, mhz: float | None) -> None:
        """Opens the GPU; raises MeterError if its clock cannot be locked."""
        if device.type != "cuda":
            raise MeterError("only clocks of NVIDIA GPUs are locked")
        if mhz is None:
            raise MeterError("the clock could not be read")
        self._nvml, self._mhz = _load_nvml(), int(mhz)
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid()}")
        except self._nvml.NVMLError as error:
            raise MeterError(f"NVML: {error}") from error

    def __enter__(self) -> ClockLock:
        try:
            self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, self._mhz, self._mhz)
        except self._nvml.NVMLError as error:
            raise MeterError(f"the clock may not be locked here ({error})") from error
        atexit.register(self._unlock)
        return self

    def __exit__(self, *_: object) -> None:
        atexit.unregister(self._unlock)
        self._unlock()

    def _unlock(self) -> None:
        with suppress(self._nvml.NVMLError):  # fails if locking was not permitted either
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
