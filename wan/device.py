"""The one interface to CPUs and accelerators. Vendor calls stand here and in `wan.kernels` only."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan import host, trace
from wan.settings.devices import Capabilities, of_type
from wan.settings.errors import InputError


@dataclass(frozen=True)
class Device:
    """A device and what the rest of the code asks of it.

    can: its row of the table of devices, which a plan chooses for tensors without data.
    """

    torch_device: torch.device
    can: Capabilities

    @property
    def type(self) -> str:
        return self.can.type

    @property
    def _accelerator(self) -> Any:
        """torch.cuda or torch.npu, which offer the same functions; None for the CPU."""
        return None if self.type == "cpu" else torch.get_device_module(self.torch_device)

    def synchronize(self) -> None:
        if self._accelerator is not None:
            self._accelerator.synchronize(self.torch_device)

    def idle(self, seconds: float) -> None:
        """Give the device nothing to do for so long, when it has done what it was given."""
        self.synchronize()
        if self._accelerator is None:
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:  # a sleeping host would come back too late
            pass

    def empty_cache(self) -> None:
        if self._accelerator is not None:
            self._accelerator.empty_cache()

    def free_memory(self) -> int | None:
        """Bytes that this process may still take; None where the system does not tell.

        Of a CPU's, its share: the ranks of a machine have the same memory.
        """
        if self._accelerator is None:
            free = host.available_memory()
            return None if free is None else free // host.ranks()
        free, _ = self._accelerator.mem_get_info(self.torch_device)
        kept = self._accelerator.memory_reserved(self.torch_device)
        return free + kept - self._accelerator.memory_allocated(self.torch_device)

    def reset_peak_memory(self) -> None:
        if self._accelerator is not None:
            self._accelerator.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int | None:
        """Highest memory allocated on the accelerator, bytes; None on the CPU."""
        if self._accelerator is None:
            return None
        return self._accelerator.max_memory_allocated(self.torch_device)

    def clock(self) -> trace.Clock:
        """Says when what is recorded has begun and ended."""
        if self._accelerator is None:
            return trace.HostClock()
        return EventClock(self._accelerator, self.torch_device)

    @contextmanager
    def profiled(self, path: Path) -> Iterator[None]:
        """Runs PyTorch's profiler, or the NPU's, and writes what it saw as a trace of its own."""
        if self.type == "npu":
            import torch_npu

            profiler = torch_npu.profiler
        else:
            profiler = torch.profiler
        kinds = profiler.ProfilerActivity
        device = [] if self.type == "cpu" else [getattr(kinds, self.type.upper())]
        with profiler.profile(activities=[kinds.CPU, *device]) as running:
            yield
        path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(path))

    def range(self, name: str) -> AbstractContextManager[object]:
        """A named range of a profiler that runs."""
        return torch.profiler.record_function(name)

    def name(self) -> str:
        if self._accelerator is None:
            return "CPU"
        return self._accelerator.get_device_name(self.torch_device)

    def uuid(self) -> str:
        """Of a GPU, as the vendor's library knows it whatever CUDA_VISIBLE_DEVICES shows."""
        return str(self._accelerator.get_device_properties(self.torch_device).uuid)


class EventClock:
    """Implements `wan.trace.Clock` by events on the current stream of an accelerator."""

    name = "device events"

    def __init__(self, accelerator: Any, device: torch.device) -> None:
        self._accelerator, self._device = accelerator, device

    def start(self) -> None:
        """The device is idle: its first event happens when the host says so."""
        self._accelerator.synchronize(self._device)
        self._zero, self._host = self._event(), time.perf_counter_ns()

    def now(self) -> trace.Later:
        event, zero, host = self._event(), self._zero, self._host
        return lambda: host + round(zero.elapsed_time(event) * 1e6)

    def stop(self) -> None:
        self._accelerator.synchronize(self._device)

    def _event(self) -> Any:
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event


class CopyStream:
    """A stream of an accelerator for copies beside its computing, ordered by events.

    Nothing here makes the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def event(self) -> Any:
        """One that can be recorded again and again."""
        return self._module.Event()

    def computed(self, event: Any) -> None:
        """Record: all that has been given to the computing stream so far."""
        event.record(self._module.current_stream())

    def copy(self, target: Tensor, parts: Iterable[tuple[slice, Tensor]], after: Any) -> None:
        """Copy parts into their places, once an event of the computing stream has come."""
        self._stream.wait_event(after)
        with self._module.stream(self._stream):
            for place, part in parts:
                target[place].copy_(part, non_blocking=True)

    def copied(self, event: Any) -> None:
        """Record: all copies given so far."""
        event.record(self._stream)

    def compute_after(self, event: Any) -> None:
        """What is given to the computing stream from here on starts when the event has come."""
        self._module.current_stream().wait_event(event)

    def uses(self, memory: Tensor) -> None:
        """Freed memory of the computing stream is not used again while a copy may write to it."""
        memory.record_stream(self._stream)


def bf16_gain() -> float:
    """How many times as fast this CPU multiplies bfloat16 matrices as float32 ones, measured now.

    Takes some milliseconds; 1 is said without measuring where nothing can be expected.
    """
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():  # units for bfloat16 came after it
        return 1.0
    matrix, seconds = torch.full((640, 640), 0.5), []
    for x in (matrix, matrix.bfloat16()):
        x @ x  # its first product prepares
        start = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - start)
    return seconds[0] / seconds[1]


def resolve(wish: str, index: int = 0) -> Device:
    """The device for --device auto, cpu, cuda or npu. InputError where it is not there.

    auto: CUDA, else an NPU that PyTorch already sees (torch-npu registers itself), else the CPU;
    refused where an accelerator is there that PyTorch does not see.
    """
    if wish == "auto":
        wish = _best()
        unseen = hidden_accelerator() if wish == "cpu" else None
        if unseen is not None:
            raise InputError(f"{unseen}, or use `device=cpu`.")
    if wish == "cpu":
        return Device(torch.device("cpu"), of_type("cpu"))
    if wish == "cuda":
        return _cuda(index)
    if wish == "npu":
        return _npu(index)
    raise InputError(f"There is no `device={wish}`; use auto, cpu, cuda or npu.")


def _best() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "npu" if hasattr(torch, "npu") and torch.npu.is_available() else "cpu"


_VISIBLE = {
    "nvidia[0-9]*": "CUDA_VISIBLE_DEVICES",
    "davinci[0-9]*": "ASCEND_RT_VISIBLE_DEVICES",
}


def hidden_accelerator(folder: Path = Path("/dev")) -> str | None:
    """Why an accelerator of this machine is not used; None where there is none, or none is wanted.

    A run of the large models on the CPU, which nobody has asked for, would take hours and, with
    several ranks, more memory than there is.

    folder: where drivers put their devices.
    """
    for pattern, variable in _VISIBLE.items():
        found = sorted(path.name for path in folder.glob(pattern))
        if not found or host.hides(variable):
            continue
        if variable.startswith("ASCEND"):
            return (
                f"An Ascend NPU is here ({folder / found[0]}), but PyTorch sees none: install "
                "requirements-npu.txt and source CANN's set_env.sh"
            )
        wheel = torch.version.cuda
        built = f"is built for CUDA {wheel}" if wheel else "is built without CUDA"
        return (
            f"A CUDA GPU is here ({folder / found[0]}), but PyTorch sees none: torch "
            f"{torch.__version__} {built}; install a wheel that fits the driver (nvidia-smi shows "
            "its CUDA version) or a newer driver"
        )
    return None


def _cuda(index: int) -> Device:
    if not torch.cuda.is_available():
        raise InputError("`device=cuda`: PyTorch sees no CUDA device here; use `device=cpu`.")
    if index >= torch.cuda.device_count():
        raise InputError(f"CUDA device {index} does not exist; {torch.cuda.device_count()} do.")
    torch.cuda.set_device(index)
    return Device(torch.device("cuda", index), of_type("cuda"))


def _npu(index: int) -> Device:
    npu = _torch_npu()
    if not npu.is_available():
        raise InputError(
            "`device=npu`: torch-npu sees no NPU here; see whether npu-smi info lists one and "
            "whether ASCEND_RT_VISIBLE_DEVICES hides it, or use `device=cpu`."
        )
    if index >= npu.device_count():
        raise InputError(f"NPU {index} does not exist; {npu.device_count()} do.")
    # Before the first use of a device: the import tells CANN where mindiesd's operators are.
    _import_mindiesd()
    # After the import, which allows internal formats: weights in them would not be plain rows.
    npu.config.allow_internal_format = False
    npu.set_compile_mode(jit_compile=False)
    npu.set_device(index)
    return Device(torch.device("npu", index), of_type("npu", npu.get_soc_version()))


def _torch_npu() -> Any:
    """torch.npu. InputError where torch-npu is not installed or finds no CANN."""
    try:
        import torch_npu
    except ModuleNotFoundError as error:
        raise InputError(_not_installed(error)) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(
            f"`device=npu`: torch-npu does not load, most likely because CANN is missing: install "
            f"CANN and source its set_env.sh, or use `device=cpu` ({_reason(error)})."
        ) from error
    return torch_npu.npu


def _import_mindiesd() -> None:
    try:
        with warnings.catch_warnings():  # about Triton kernels for other models
            warnings.simplefilter("ignore", UserWarning)
            import mindiesd  # noqa: F401  (imported for what it registers)
    except ModuleNotFoundError as error:
        raise InputError(_not_installed(error)) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(
            f"`device=npu`: mindiesd does not load; it must fit PyTorch {torch.__version__}, "
            f"torch-npu and CANN: run pip install -r requirements-npu.txt ({_reason(error)})."
        ) from error


def _not_installed(error: ModuleNotFoundError) -> str:
    return (
        f"`device=npu` needs the Python package {error.name}, which is not installed: run "
        "pip install -r requirements-npu.txt, or use `device=cpu`."
    )


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
