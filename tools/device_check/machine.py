"""Step 1: versions, drivers, memory, the device of `--device auto`, matrix products."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import torch

import wan
from tools.device_check.bench import LIMITS, Bench
from tools.device_check.steps import Figure, Measured, absent, error, line
from wan import device as devices
from wan import system
from wan.device import Device
from wan.log import collect_versions
from wan.pipeline.memory import query_gpu_memory
from wan.settings.errors import InputError

_PREFIXES = ("ASCEND", "CUDA", "HCCL", "NCCL", "NPU", "OMP", "PYTORCH", "TORCH", "TASK_QUEUE")
_VERSION = re.compile(r"^version=(\S+)", re.MULTILINE | re.IGNORECASE)


def environment(device: Device) -> dict[str, Any]:
    """Describe the machine for the report: versions, driver, hardware, variables."""
    place = device.torch_device
    found: dict[str, Any] = {
        "wan": wan.__version__,
        **collect_versions(device.type),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": system.read_cpu_name(),
        "threads": torch.get_num_threads(),
        "device": device.name(),
        "devices": 1 if device.type == "cpu" else torch.get_device_module(place).device_count(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
    }
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        found |= {
            "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "CUDA": torch.version.cuda,
            "compute capability": "{}.{}".format(*torch.cuda.get_device_capability(place)),
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, nccl)) or "not there",
        }
    if device.type == "npu":
        home = os.environ.get("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend/ascend-toolkit/latest")
        found |= {
            "NPU model": device.capabilities.name,
            "driver": _version_in(Path("/usr/local/Ascend/driver/version.info")),
            "CANN": _version_in(*Path(home).glob("*/ascend_toolkit_install.info")),
        }
    return found


def _said(*command: str) -> str:
    """Return the first line of a program's output, or "not known"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return next(iter(done.stdout.splitlines()), "not known").strip()


def _version_in(*paths: Path) -> str:
    for path in paths:
        try:
            found = _VERSION.search(path.read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return found[1]
    return "not known"


def machine(bench: Bench) -> Measured:
    """Check versions, memory, the device of `--device auto`, TF32 or HF32, and matrix products."""
    device, found = bench.device, environment(bench.device)
    names = ("torch", "torch-npu", "mindiesd", "driver", "CUDA", "cuDNN", "NCCL", "CANN")
    yield line("versions", *(Figure(name, str(found[name])) for name in names if name in found))
    sizes = {"host memory free": system.read_available_memory()}
    if device.type == "cuda" and query_gpu_memory("total"):
        sizes["device memory"] = min(query_gpu_memory("total"))
    if device.type == "npu":
        place = device.torch_device
        sizes["device memory"] = torch.get_device_module(place).mem_get_info(place)[1]
    memory = [Figure(name, size / 1e9, "GB") for name, size in sizes.items() if size is not None]
    yield line(f"{found['devices']} x {found['device']}", *memory, words=str(found["cpu"]))
    yield "--device auto", partial(_auto, device)
    # TF32 and HF32 round the inputs of products and convolutions to 10 bits.
    if device.type == "cuda":
        convolutions = Figure("in convolutions", str(torch.backends.cudnn.allow_tf32))
        products = Figure("in products", str(torch.backends.cuda.matmul.allow_tf32))
        yield line("TF32", convolutions, products)
    elif device.type == "npu":
        yield absent("HF32", "PyTorch has no public query for it; step vae shows its error")
    else:
        yield absent("TF32", "CPUs have none")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        yield absent("C++ compiler", "none; --compile needs one on CPUs and GPUs")
    else:
        yield line("C++ compiler", Figure("path", compiler))
    for dtype in (torch.float32, torch.bfloat16):
        rate, far = bench.rates(dtype)
        what = f"matrix product, {str(dtype).removeprefix('torch.')}"
        yield line(what, Figure("rate", rate / 1e12, "TFLOP/s"), error(far, LIMITS[dtype]))


def _auto(device: Device) -> list[Figure]:
    """Check `--device auto`: an old driver or a missing CANN hides the device from PyTorch."""
    try:
        kind = devices.select_device("auto", device.torch_device.index or 0).type
    except InputError as refusal:
        raise RuntimeError(str(refusal)) from refusal  # it is wrong, not unavailable
    return [Figure("selects", kind)]
