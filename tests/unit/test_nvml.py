"""NVML: nvidia-ml-py itself, with the functions of the driver's library replaced."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from wan.device import Device
from wan.metering.meter import Meter
from wan.metering.nvml import ClockLock, Nvml
from wan.metering.power_source import MeterError
from wan.settings.devices import get_capabilities

UUID = "3f1c2a54-0d3e-9b7a-6c11-5d2f8e7a9b10"
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, GPU_IS_LOST = 3, 4, 6, 15


class Driver:
    """libnvidia-ml's functions, with the values that one GPU gives.

    fields: value by (field, scope). errors: return codes by function.
    """

    def __init__(self) -> None:
        self.milliwatts, self.millijoules, self.mhz, self.bits = 312_500, 10_000_000, 1755, 0x5
        self.fields: dict[tuple[int, int], int] = {(186, 0): 487_250}
        self.errors: dict[str, int] = {}
        self.handles = {f"GPU-{UUID}"}
        self.open = 0
        self.locks: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """A function, as one of a ctypes library."""
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self.call(name, arguments)

    def call(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name in self.errors:
            return self.errors[name]
        if f"_{name}" in vars(Driver):
            return int(getattr(self, f"_{name}")(*arguments))
        values = {
            "nvmlDeviceGetPowerUsage": self.milliwatts,
            "nvmlDeviceGetTotalEnergyConsumption": self.millijoules,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": self.mhz,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": self.bits,
        }
        arguments[-1]._obj.value = values[name]
        return 0

    def _nvmlInitWithFlags(self, flags: int) -> int:
        self.open += 1
        return 0

    def _nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        return 0 if uuid.value.decode() in self.handles else NOT_FOUND

    def _nvmlDeviceSetGpuLockedClocks(self, handle: Any, lowest: Any, highest: Any) -> int:
        self.locks.append((lowest.value, highest.value))
        return 0

    def _nvmlDeviceResetGpuLockedClocks(self, handle: Any) -> int:
        self.locks.append("unlocked")
        return 0

    def _nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:
        for value in values._obj:
            number = self.fields.get((value.fieldId, value.scopeId))
            value.nvmlReturn = NOT_SUPPORTED if number is None else 0
            value.valueType = 3
            value.value.ullVal = number or 0
        return 0


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """nvidia-ml-py itself, that has not loaded the driver's library yet."""
    library = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    monkeypatch.setattr(library, "nvmlLib", None)
    monkeypatch.setattr(library, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(library, "_nvmlGetFunctionPointer_cache", {})
    return library


@pytest.fixture
def driver(pynvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    library = Driver()
    monkeypatch.setattr(pynvml, "CDLL", lambda name: library)
    yield library
    assert library.open == 0


def nvml() -> Any:
    return Nvml(UUID)


def test_nvml(driver: Driver) -> None:
    source = nvml()
    assert (source.device, source.limit_w, source.rated_mhz) == (f"GPU-{UUID}", 700, 1980)
    assert source.power_is == "instantaneous" and source.smoothing is None
    sample = source.read_sample()
    assert (sample.watts, sample.joules, sample.mhz) == (487.25, 10_000, 1755)
    assert sample.reasons == {"SW power cap"}, "idle is no reason"
    source.close()


def test_nvml_metered(driver: Driver) -> None:
    with Meter(nvml(), period=1e-3) as meter:
        driver.millijoules += 250_000
    result = meter.stop()
    assert result.source == "NVML" and result.samples >= 1 and not result.failed
    assert result.peak_w == 487.25 and result.throttled == 1 and result.limit_w == 700


def test_reasons_of_nvml(driver: Driver) -> None:
    names = {
        2: "SW power cap",
        3: "HW slowdown",
        5: "SW thermal slowdown",
        6: "HW thermal slowdown",
        7: "HW power brake",
        9: "board limit",
        10: "reliability",
    }
    source = nvml()
    for driver.bits in range(1 << 11):
        expected = {name for bit, name in names.items() if driver.bits >> bit & 1}
        assert source.read_sample().reasons == expected
    source.close()


def test_an_older_gpu(driver: Driver) -> None:
    """Neither power of this instant nor an energy counter, and a driver without reasons."""
    driver.fields.clear()
    driver.errors["nvmlDeviceGetTotalEnergyConsumption"] = NOT_SUPPORTED
    driver.errors["nvmlDeviceGetCurrentClocksEventReasons"] = NOT_SUPPORTED
    driver.errors["nvmlDeviceGetEnforcedPowerLimit"] = NOT_SUPPORTED
    source = nvml()
    sample = source.read_sample()
    assert (sample.watts, sample.joules, sample.reasons) == (312.5, None, None)
    assert source.power_is == "means of up to a second" and source.limit_w is None
    source.close()


def test_power_smoothing(driver: Driver, pynvml: ModuleType) -> None:
    if not hasattr(pynvml, "NVML_FI_PWR_SMOOTHING_ENABLED"):
        pytest.skip("older than 12.570")
    values = {  # of the GPU, then of profile 2; versions of the library number them differently
        ("ENABLED", 0): 1,
        ("ACTIVE_PRESET_PROFILE", 0): 2,
        ("PROFILE_PERCENT_TMP_FLOOR", 2): 50,
        ("PROFILE_RAMP_DOWN_RATE", 2): 9000,
        ("PROFILE_RAMP_DOWN_HYST_VAL", 2): 300,
    }
    for (name, scope), value in values.items():
        driver.fields[getattr(pynvml, f"NVML_FI_PWR_SMOOTHING_{name}"), scope] = value
    source = nvml()
    assert source.smoothing == {
        "enabled": 1,
        "profile": 2,
        "floor_percent": 50,
        "ramp_down_mw_per_s": 9000,
        "ramp_down_hysteresis_ms": 300,
    }
    source.close()


def test_a_gpu_without_a_meter(driver: Driver) -> None:
    driver.handles = {f"MIG-{UUID}"}
    with pytest.raises(MeterError, match="MIG instance"):
        nvml()
    driver.handles = set()
    with pytest.raises(MeterError, match=f"NVML shows no GPU-{UUID}"):
        nvml()
    driver.handles = {f"GPU-{UUID}"}
    driver.errors = dict.fromkeys(
        (
            "nvmlDeviceGetPowerUsage",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetTotalEnergyConsumption",
        ),
        NO_PERMISSION,
    )
    with pytest.raises(MeterError, match="neither its power nor its energy"):
        nvml()


def test_a_gpu_that_is_lost(driver: Driver) -> None:
    source = nvml()
    driver.errors["nvmlDeviceGetClockInfo"] = GPU_IS_LOST
    with pytest.raises(MeterError, match="GPU is lost"):
        source.read_sample()
    source.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return Device(torch.device("cuda", 0), get_capabilities("cuda"))


def test_a_locked_clock_is_unlocked_on_every_path(
    driver: Driver, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the interpreter exits inside the block."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    lock = ClockLock(gpu, 1500.9)
    with lock:
        assert driver.locks == [(1500, 1500)]
        (unlock,) = at_exit
    assert driver.locks == [(1500, 1500), "unlocked"] and not at_exit
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    assert driver.locks[2:] == [(1500, 1500), "unlocked"]
    unlock()
    assert driver.locks[4:] == ["unlocked"]
    driver.open = 0  # the program's end closes the library


def test_clocks_that_cannot_be_locked(driver: Driver, gpu: Device) -> None:
    driver.errors["nvmlDeviceSetGpuLockedClocks"] = NO_PERMISSION
    with pytest.raises(MeterError, match="may not be locked here"):
        ClockLock(gpu, 1500).__enter__()
    driver.handles = set()
    cpu = Device(torch.device("cpu"), get_capabilities("cpu"))
    for device, mhz, why in (
        (gpu, None, "could not be read"),
        (gpu, 1500, "NVML: Not Found"),
        (cpu, 1500, "only clocks of NVIDIA GPUs"),
    ):
        with pytest.raises(MeterError, match=why):
            ClockLock(device, mhz)
    driver.open = 0


def test_a_driver_that_does_not_start(driver: Driver) -> None:
    driver.errors["nvmlInitWithFlags"] = NO_PERMISSION
    with pytest.raises(MeterError, match="does not start: Insufficient Permissions"):
        nvml()


def test_no_driver(pynvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", missing)
    with pytest.raises(MeterError, match="NVML Shared Library Not Found"):
        nvml()


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MeterError, match=r"pip install -r requirements-power\.txt"):
        nvml()
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    with pytest.raises(MeterError, match=r"older than nvidia-ml-py 12\.535"):
        nvml()
