"""Interface to CPUs and accelerators.

Vendor-specific functions are called only here and in `wan.kernels`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan.settings.devices import Capabilities, get_capabilities
from wan.settings.errors import InputError
from wan.utils import system, trace
from wan.utils.files import KERNEL_TRACE_KIND, write_output
from wan.utils.log import summarize_error


@dataclass(frozen=True)
class Device:
    """A CPU or an accelerator.

    Attributes:
        torch_device: The device of PyTorch; "meta" in a plan.
        capabilities: Row of the device table; in a plan that of the planned device.
    """

    torch_device: torch.device
    capabilities: Capabilities

    @property
    def type(self) -> str:
        return self.capabilities.type

    @property
    def _accelerator(self) -> Any:
        """torch.cuda or torch.npu, which have the same functions; None for the CPU."""
        return None if self.type == "cpu" else torch.get_device_module(self.torch_device)

    def synchronize(self) -> None:
        if self._accelerator is not None:
            self._accelerator.synchronize(self.torch_device)

    def idle(self, seconds: float) -> None:
        """Waits until the device has finished its work, then leaves it idle for some seconds."""
        self.synchronize()
        if self._accelerator is None:
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:  # time.sleep can wake up too late
            pass

    def empty_cache(self) -> None:
        """Releases memory that the allocator caches to the system."""
        if self._accelerator is None:
            system.trim_heap()
        else:
            self._accelerator.empty_cache()

    def free_memory(self) -> int | None:
        """Returns the bytes that this process can still allocate; None if unknown.

        On the CPU it is the machine's available memory divided by the ranks on the machine.
        """
        if self._accelerator is None:
            free = system.read_available_memory()
            return None if free is None else free // system.count_local_ranks()
        process_memory: int = self.process_memory() or 0
        return process_memory - self._accelerator.memory_allocated(self.torch_device)

    def process_memory(self) -> int | None:
        """Returns the bytes of an accelerator that this process has or can allocate; else None."""
        if self._accelerator is None:
            return None
        free, _ = self._accelerator.mem_get_info(self.torch_device)
        return free + self._accelerator.memory_reserved(self.torch_device)

    def reset_peak_memory(self) -> None:
        if self._accelerator is not None:
            self._accelerator.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int | None:
        """Returns the peak of allocated accelerator memory in bytes; None on the CPU."""
        if self._accelerator is None:
            return None
        return self._accelerator.max_memory_allocated(self.torch_device)

    def make_clock(self) -> trace.Clock:
        """Returns a clock that measures when work on this device begins and ends."""
        if self._accelerator is None:
            return trace.HostClock()
        return EventClock(self._accelerator, self.torch_device)

    @contextmanager
    def profile(self, path: Path) -> Iterator[None]:
        """Profiles the block with PyTorch's or the NPU's profiler and writes its trace."""
        if self.type == "npu":
            import torch_npu

            profiler = torch_npu.profiler
        else:
            profiler = torch.profiler
        activities = profiler.ProfilerActivity
        device = [] if self.type == "cpu" else [getattr(activities, self.type.upper())]
        with profiler.profile(activities=[activities.CPU, *device]) as running:
            yield
        with write_output(path, KERNEL_TRACE_KIND) as temporary:
            running.export_chrome_trace(str(temporary))

    def record_range(self, name: str) -> AbstractContextManager[object]:
        """Returns a context that is a named range in the running profiler's trace."""
        return torch.profiler.record_function(name)

    def name(self) -> str:
        if self._accelerator is None:
            return "CPU"
        return self._accelerator.get_device_name(self.torch_device)

    def uuid(self) -> str:
        """Returns a GPU's UUID, by which NVML finds it despite CUDA_VISIBLE_DEVICES."""
        return str(self._accelerator.get_device_properties(self.torch_device).uuid)


class EventClock:
    """Implements `wan.utils.trace.Clock` with events on the current stream of an accelerator."""

    name = "device events"

    def __init__(self, accelerator: Any, device: torch.device) -> None:
        self._accelerator, self._device = accelerator, device

    def start(self) -> None:
        """Synchronizes, so that the first event has the host's current time."""
        self._accelerator.synchronize(self._device)
        self._start_event, self._start_ns = self._event(), time.perf_counter_ns()

    def now(self) -> trace.DeferredTime:
        event, start_event, start_ns = self._event(), self._start_event, self._start_ns
        return lambda: start_ns + round(start_event.elapsed_time(event) * 1e6)

    def stop(self) -> None:
        self._accelerator.synchronize(self._device)

    def _event(self) -> Any:
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event


class CopyStream:
    """An accelerator stream for copies that overlap with computation on the current stream.

    Events order the two streams; the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def make_event(self) -> Any:
        """Returns a new event, which can be recorded repeatedly."""
        return self._module.Event()

    def record_computed(self, event: Any) -> None:
        """Records an event on the compute stream, after its queued work."""
        event.record(self._module.current_stream())

    def copy(self, target: Tensor, slices: Iterable[tuple[slice, Tensor]], event: Any) -> None:
        """Copies each tensor into its slice of the target, after an event of the compute stream."""
        self._stream.wait_event(event)
        with self._module.stream(self._stream):
            for rows, source in slices:
                target[rows].copy_(source, non_blocking=True)

    def record_copied(self, event: Any) -> None:
        """Records an event on this stream, after all queued copies."""
        event.record(self._stream)

    def make_compute_wait(self, event: Any) -> None:
        """Makes later work on the compute stream wait for an event."""
        self._module.current_stream().wait_event(event)

    def record_stream(self, memory: Tensor) -> None:
        """Delays the reuse of freed memory until this stream's copies have finished."""
        memory.record_stream(self._stream)


@contextmanager
def use_side_stream(device: torch.device) -> Iterator[None]:
    """Runs a thread's work on a separate stream, after the work queued on the default stream.

    Synchronizes the stream at the end. No effect on a CPU.
    """
    if device.type == "cpu":
        yield
        return
    module: Any = torch.get_device_module(device)
    module.set_device(device)  # the current device is per thread
    stream = module.Stream(device=device)
    stream.wait_stream(module.default_stream(device))
    try:
        with module.stream(stream):
            yield
    finally:
        stream.synchronize()


def select_device(device_type: str, index: int = 0) -> Device:
    """Returns the device of a run.

    Args:
        device_type: "cpu", "cuda", "npu", or "auto": CUDA, else an NPU if torch-npu is installed,
            else the CPU.
        index: Index of the accelerator on this machine.

    Raises:
        InputError: The device does not exist, or it is "auto" and PyTorch cannot use an
            accelerator of this machine.
    """
    if device_type == "auto":
        device_type = "cpu"
        if torch.cuda.is_available():
            device_type = "cuda"
        elif hasattr(torch, "npu") and torch.npu.is_available():
            device_type = "npu"
        elif (refusal := find_hidden_accelerator()) is not None:
            raise refusal
    if device_type == "cpu":
        return Device(torch.device("cpu"), get_capabilities("cpu"))
    if device_type == "cuda":
        return _select_cuda(index)
    if device_type == "npu":
        return _select_npu(index)
    raise InputError("`device`", device_type, "is unknown", "use auto, cpu, cuda or npu")


_VISIBILITY_VARIABLES = {
    "nvidia[0-9]*": "CUDA_VISIBLE_DEVICES",
    "davinci[0-9]*": "ASCEND_RT_VISIBLE_DEVICES",
}


def find_hidden_accelerator(folder: Path = Path("/dev")) -> InputError | None:
    """Returns an error if this machine has an accelerator that PyTorch cannot use.

    Otherwise large models would run on the CPU for hours, and with several ranks they could need
    more memory than the machine has.

    Args:
        folder: Folder of device files.

    Returns:
        The error; None without an accelerator, or if an environment variable hides it.
    """
    for pattern, variable in _VISIBILITY_VARIABLES.items():
        device_files = sorted(path.name for path in folder.glob(pattern))
        if not device_files or system.hides_all_devices(variable):
            continue
        if variable.startswith("ASCEND"):
            return InputError(
                "An Ascend NPU",
                why=f"is here ({folder / device_files[0]}), but PyTorch sees none",
                remedy="install requirements-npu.txt and source CANN's set_env.sh, or use "
                "`device=cpu`",
            )
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        return InputError(
            "A CUDA GPU",
            why=f"is here ({folder / device_files[0]}), but PyTorch sees none: torch "
            f"{torch.__version__} is built {build}",
            remedy="install a wheel that fits the driver (nvidia-smi shows its CUDA version) or a "
            "newer driver, or use `device=cpu`",
        )
    return None


def _select_cuda(index: int) -> Device:
    if not torch.cuda.is_available():
        why = "cannot be used: PyTorch sees no CUDA device here"
        raise InputError("`device=cuda`", why=why, remedy="use `device=cpu`")
    _check_device_index("CUDA device", index, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return Device(torch.device("cuda", index), get_capabilities("cuda"))


def _select_npu(index: int) -> Device:
    npu = _import_npu_package(
        "torch_npu",
        "torch-npu does not load, most likely because CANN is missing",
        "install CANN and source its set_env.sh, or use `device=cpu`",
    ).npu
    if not npu.is_available():
        raise InputError(
            "`device=npu`",
            why="cannot be used: torch-npu sees no NPU here",
            remedy="see whether npu-smi info lists one and whether ASCEND_RT_VISIBLE_DEVICES hides "
            "it, or use `device=cpu`",
        )
    _check_device_index("NPU", index, npu.device_count())
    # Before the first use of a device: the import registers mindiesd's operators with CANN.
    _import_npu_package(
        "mindiesd",
        f"mindiesd does not load; it must fit PyTorch {torch.__version__}, torch-npu and CANN",
        "run pip install -r requirements-npu.txt",
    )
    # After the import, which allows internal formats: weights must stay in row-major layout.
    npu.config.allow_internal_format = False
    npu.set_compile_mode(jit_compile=False)
    npu.set_device(index)
    return Device(torch.device("npu", index), get_capabilities("npu", npu.get_soc_version()))


def _import_npu_package(name: str, problem: str, remedy: str) -> Any:
    """Imports a package; raises InputError if it is not installed or does not load."""
    try:
        with warnings.catch_warnings():  # mindiesd's, on Triton kernels of other models
            warnings.simplefilter("ignore", UserWarning)
            return import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            "`device=npu`",
            why=f"needs the Python package {error.name}, which is not installed",
            remedy="run pip install -r requirements-npu.txt, or use `device=cpu`",
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        why = f"cannot be used: {problem} ({summarize_error(error)})"
        raise InputError("`device=npu`", None, why, remedy) from error


def _check_device_index(device_name: str, index: int, count: int) -> None:
    if index >= count:
        remedy = f"start at most {count} ranks on this machine"
        raise InputError(device_name, index, f"does not exist; {count} do", remedy)
