"""Power, energy and clock of an NVIDIA GPU, from nvidia-ml-py (NVML, the driver's library).

Checked with nvidia-ml-py 12.535 to 13.615. All that is read here is open to every user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wan.power.measured import Sample
from wan.power.meter import MeterError, PowerSource

REASONS = {  # bits of the "clocks event reasons" with which something lowers the clock
    0x004: "SW power cap",
    0x008: "HW slowdown",
    0x020: "SW thermal slowdown",
    0x040: "HW thermal slowdown",
    0x080: "HW power brake",
    0x200: "board limit",
    0x400: "reliability",
}
"""Not among them: idle, clocks that the user has set, sync boost, display."""
_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
_SMOOTHING = {  # of a GPU; library versions before 12.570 do not know these fields
    "enabled": "NVML_FI_PWR_SMOOTHING_ENABLED",
    "immediate_ramp_down": "NVML_FI_PWR_SMOOTHING_IMM_RAMP_DOWN_ENABLED",
    "applied_floor": "NVML_FI_PWR_SMOOTHING_APPLIED_TMP_FLOOR",
    "profile": "NVML_FI_PWR_SMOOTHING_ACTIVE_PRESET_PROFILE",
}
_PROFILE = {  # of its active profile
    "floor_percent": "NVML_FI_PWR_SMOOTHING_PROFILE_PERCENT_TMP_FLOOR",
    "ramp_up_mw_per_s": "NVML_FI_PWR_SMOOTHING_PROFILE_RAMP_UP_RATE",
    "ramp_down_mw_per_s": "NVML_FI_PWR_SMOOTHING_PROFILE_RAMP_DOWN_RATE",
    "ramp_down_hysteresis_ms": "NVML_FI_PWR_SMOOTHING_PROFILE_RAMP_DOWN_HYST_VAL",
}


class Nvml(PowerSource):
    """One GPU."""

    name = "NVML"

    def __init__(self, uuid: str) -> None:
        """uuid: of the GPU, without a prefix: CUDA_VISIBLE_DEVICES renumbers, NVML does not.

        Raises:
            MeterError: Where there is no library, no driver, no such GPU or nothing to read.
        """
        try:
            import pynvml
        except ModuleNotFoundError as error:
            raise MeterError(
                "nvidia-ml-py is not installed: pip install -r requirements-power.txt"
            ) from error
        if not hasattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons"):
            raise MeterError("the installed pynvml is older than nvidia-ml-py 12.535: update it")
        self._nvml: Any = pynvml
        self._error = pynvml.NVMLError
        self.device = f"GPU-{uuid}"
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise MeterError(f"NVML does not start: {error}") from error
        try:
            self._open(uuid)
        except MeterError:
            self.close()
            raise

    def _open(self, uuid: str) -> None:
        nvml = self._nvml
        handle = self._handle = self._found(uuid)
        instant = self._try(self._field, nvml.NVML_FI_DEV_POWER_INSTANT) is not None
        self.power_is = "instantaneous" if instant else "means of up to a second"
        self._watts = self._readable(self._instant_w if instant else self._average_w)
        self._joules = self._readable(self._energy_j)
        if self._watts is None and self._joules is None:
            raise MeterError(f"{self.device} tells neither its power nor its energy")
        self._mhz = self._readable(self._sm_mhz)
        self._reasons = self._readable(self._lowered_by)
        limit_mw = self._try(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        self.limit_w = None if limit_mw is None else limit_mw / 1000
        self.rated_mhz: float | None = self._try(
            nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM
        )
        self.smoothing = self._power_smoothing()

    def _found(self, uuid: str) -> Any:
        gpu, mig = (
            self._try(self._nvml.nvmlDeviceGetHandleByUUID, f"{kind}-{uuid}")
            for kind in ("GPU", "MIG")
        )
        if gpu is not None:
            return gpu
        if mig is not None:
            raise MeterError("a MIG instance has no power meter, only its whole GPU has")
        raise MeterError(f"NVML shows no {self.device}; a container may hide it")

    def read(self) -> Sample:
        try:
            return Sample(
                watts=self._watts() if self._watts else None,
                joules=self._joules() if self._joules else None,
                mhz=self._mhz() if self._mhz else None,
                reasons=self._reasons() if self._reasons else None,
            )
        except self._error as error:
            raise MeterError(f"NVML: {error}") from error

    def close(self) -> None:
        self._try(self._nvml.nvmlShutdown)

    def _instant_w(self) -> float:
        return self._field(self._nvml.NVML_FI_DEV_POWER_INSTANT) / 1000

    def _average_w(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000

    def _energy_j(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000

    def _sm_mhz(self) -> float:
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def _lowered_by(self) -> frozenset[str]:
        bits = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        return frozenset(name for bit, name in REASONS.items() if bits & bit)

    def _field(self, *field: int) -> float:
        """A field's value; field: its number and, where it has one, its scope."""
        (value,) = self._nvml.nvmlDeviceGetFieldValues(
            self._handle, [field if len(field) > 1 else field[0]]
        )
        if value.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._error(value.nvmlReturn)
        return getattr(value.value, _UNION[value.valueType])

    def _readable(self, read: Callable[[], Any]) -> Callable[[], Any] | None:
        return read if self._try(read) is not None else None

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a call returns; None where this GPU, driver or user does not have it."""
        try:
            return call(*arguments)
        except self._error:
            return None

    def _power_smoothing(self) -> dict[str, float] | None:
        """None before Blackwell: it is not supported there."""
        found = {name: self._smoothing_field(constant) for name, constant in _SMOOTHING.items()}
        if found["enabled"] is None:
            return None
        if found["profile"] is not None:
            profile = int(found["profile"])
            found |= {n: self._smoothing_field(c, profile) for n, c in _PROFILE.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _smoothing_field(self, constant: str, *scope: int) -> float | None:
        number = getattr(self._nvml, constant, None)
        return None if number is None else self._try(self._field, number, *scope)
