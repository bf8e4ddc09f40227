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
from tools.device_check.steps import Figure, Measurements, make_error, make_line
from wan import device as devices
from wan.device import Device
from wan.pipeline.memory_estimate import query_gpu_memory
from wan.settings.errors import InputError
from wan.utils import system
from wan.utils.log import collect_versions

_PREFIXES = ("ASCEND", "CUDA", "HCCL", "NCCL", "NPU", "OMP", "PYTORCH", "TORCH", "TASK_QUEUE")
_VERSION = re.compile(r"^version=(\S+)", re.MULTILINE | re.IGNORECASE)


def describe_machine(device: Device) -> dict[str, Any]:
    """Describes the machine for the report: versions, driver, hardware, variables."""
    torch_device = device.torch_device
    entries: dict[str, Any] = {
        "wan": wan.__version__,
        **collect_versions(device.type),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": system.read_cpu_name(),
        "threads": torch.get_num_threads(),
        "device": device.name(),
        "devices": 1
        if device.type == "cpu"
        else torch.get_device_module(torch_device).device_count(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
    }
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        entries |= {
            "driver": _read_driver(),
            "CUDA": torch.version.cuda,
            "compute capability": "{}.{}".format(*torch.cuda.get_device_capability(torch_device)),
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, nccl)) or "not there",
        }
    if device.type == "npu":
        home = os.environ.get("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend/ascend-toolkit/latest")
        entries |= {
            "NPU model": device.capabilities.name,
            "driver": _read_version(Path("/usr/local/Ascend/driver/version.info")),
            "CANN": _read_version(*Path(home).glob("*/ascend_toolkit_install.info")),
        }
    return entries


def _read_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return process.stdout.partition("\n")[0].strip() or "not known"


def _read_version(*paths: Path) -> str:
    texts = [path.read_text(errors="replace") for path in paths if path.is_file()]
    match = _VERSION.search("\n".join(texts))
    return match[1] if match else "not known"


def check_machine(bench: Bench) -> Measurements:
    """Checks versions, memory, the device of `--device auto`, TF32 or HF32, and matrix products."""
    device, entries = bench.device, describe_machine(bench.device)
    names = ("torch", "torch-npu", "mindiesd", "driver", "CUDA", "cuDNN", "NCCL", "CANN")
    yield make_line(
        "versions", *(Figure(name, str(entries[name])) for name in names if name in entries)
    )
    sizes = {"host memory free": system.read_available_memory()}
    if device.type == "cuda" and query_gpu_memory("total"):
        sizes["device memory"] = min(query_gpu_memory("total"))
    if device.type == "npu":
        torch_device = device.torch_device
        sizes["device memory"] = torch.get_device_module(torch_device).mem_get_info(torch_device)[1]
    memory = [Figure(name, size / 1e9, "GB") for name, size in sizes.items() if size is not None]
    yield make_line(
        f"{entries['devices']} x {entries['device']}", *memory, reason=str(entries["cpu"])
    )
    yield "--device auto", partial(_check_auto, device)
    # TF32 and HF32 round the inputs of products and convolutions to 10 bits.
    if device.type == "cuda":
        convolutions = Figure("in convolutions", str(torch.backends.cudnn.allow_tf32))
        products = Figure("in products", str(torch.backends.cuda.matmul.allow_tf32))
        yield make_line("TF32", convolutions, products)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    yield make_line("C++ compiler", Figure("path", compiler or "none; --compile needs one"))
    for dtype in (torch.float32, torch.bfloat16):
        rate, far = bench.measure_matmul(dtype)
        label = f"matrix product, {str(dtype).removeprefix('torch.')}"
        yield make_line(
            label, Figure("rate", rate / 1e12, "TFLOP/s"), make_error(far, LIMITS[dtype])
        )


def _check_auto(device: Device) -> list[Figure]:
    """Checks `--device auto`: an old driver or a missing CANN hides the device from PyTorch."""
    try:
        kind = devices.select_device("auto", device.torch_device.index or 0).type
    except InputError as refusal:
        raise RuntimeError(str(refusal)) from refusal  # it is wrong, not unavailable
    return [Figure("selects", kind)]
