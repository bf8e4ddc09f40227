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


def test_nvml(driver: Driver) -> None:
    source = Nvml(UUID)
    assert (source.device, source.limit_w, source.rated_mhz) == (f"GPU-{UUID}", 700, 1980)
    assert source.power_is == "instantaneous" and source.smoothing is None
    sample = source.read_sample()
    assert (sample.watts, sample.joules, sample.mhz) == (487.25, 10_000, 1755)
    assert sample.reasons == {"SW power cap"}, "idle is no reason"
    driver.errors["nvmlDeviceGetClockInfo"] = GPU_IS_LOST
    with pytest.raises(MeterError, match="GPU is lost"):
        source.read_sample()
    source.close()


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
    source = Nvml(UUID)
    for driver.bits in (0, 0x7FF, *(1 << bit for bit in range(11))):
        expected = {name for bit, name in names.items() if driver.bits >> bit & 1}
        assert source.read_sample().reasons == expected
    source.close()


def test_an_older_gpu(driver: Driver) -> None:
    """Neither power of this instant nor an energy counter, and a driver without reasons."""
    driver.fields.clear()
    for name in ("TotalEnergyConsumption", "CurrentClocksEventReasons", "EnforcedPowerLimit"):
        driver.errors[f"nvmlDeviceGet{name}"] = NOT_SUPPORTED
    source = Nvml(UUID)
    sample = source.read_sample()
    assert (sample.watts, sample.joules, sample.reasons) == (312.5, None, None)
    assert source.power_is == "means of up to a second" and source.limit_w is None
    source.close()


def test_power_smoothing(driver: Driver, pynvml: ModuleType) -> None:
    if not hasattr(pynvml, "NVML_FI_PWR_SMOOTHING_ENABLED"):
        pytest.skip("older than 12.570")
    values = {  # of the GPU, then of profile 2; versions of the library number them differently
        ("ENABLED", 0): ("enabled", 1),
        ("ACTIVE_PRESET_PROFILE", 0): ("profile", 2),
        ("PROFILE_PERCENT_TMP_FLOOR", 2): ("floor_percent", 50),
        ("PROFILE_RAMP_DOWN_RATE", 2): ("ramp_down_mw_per_s", 9000),
        ("PROFILE_RAMP_DOWN_HYST_VAL", 2): ("ramp_down_hysteresis_ms", 300),
    }
    for (name, scope), (_, value) in values.items():
        driver.fields[getattr(pynvml, f"NVML_FI_PWR_SMOOTHING_{name}"), scope] = value
    source = Nvml(UUID)
    assert source.smoothing == dict(values.values())
    source.close()


def test_a_gpu_without_a_meter(driver: Driver) -> None:
    readings = ("PowerUsage", "FieldValues", "TotalEnergyConsumption")
    for handles, errors, message in (
        ({f"MIG-{UUID}"}, (), "MIG instance"),
        (set(), (), f"NVML shows no GPU-{UUID}"),
        ({f"GPU-{UUID}"}, [f"nvmlDeviceGet{x}" for x in readings], "neither its power nor its"),
        (set(), ["nvmlInitWithFlags"], "does not start: Insufficient Permissions"),
    ):
        driver.handles, driver.errors = handles, dict.fromkeys(errors, NO_PERMISSION)
        with pytest.raises(MeterError, match=message):
            Nvml(UUID)


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


def test_no_driver_and_no_library(pynvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", missing)
    for module, message in (
        (pynvml, "NVML Shared Library Not Found"),
        (None, r"pip install -r requirements-power\.txt"),
        (ModuleType("pynvml"), r"older than nvidia-ml-py 12\.535"),
    ):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        with pytest.raises(MeterError, match=message):
            Nvml(UUID)
