"""What memory this machine has left for a run, without torch."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from wan import host
from wan.pipeline import bound
from wan.pipeline.setup import Setup
from wan.settings.errors import InputError
from wan.settings.request import Request

_NPUS = Path("/dev/davinci_manager")  # the driver's; it names no memory


def check(setup: Setup, request: Request, ranks_here: int) -> None:
    """InputError for a run that takes more than is free, as far as both are known.

    Which device "auto" is, only torch can tell: such a run must be too large for each that is here.

    ranks_here: how many ranks share this machine's memory.
    """
    device = setup.execution.device
    devices = (device,) if device != "auto" else _there()
    refusals = [_refusal(setup, request, ranks_here, device) for device in devices]
    if all(refusals):
        raise InputError(refusals[0])


def _there() -> tuple[str, ...]:
    """Types of the devices of this machine, accelerators first."""
    if _NPUS.exists():
        return "npu", "cpu"
    return ("cuda", "cpu") if gpu_memory("free") else ("cpu",)


def _refusal(setup: Setup, request: Request, ranks_here: int, device: str) -> str:
    """Why the run does not fit into the memory of a device type; empty if it may."""
    free = free_memory(device)
    if free is None:
        return ""
    stage, need = _need(setup, request, ranks_here, device=device)
    if need <= free:
        return ""
    remedy = "choose a smaller --size or --frame_num"
    with suppress(InputError):  # what it excludes was asked for
        _, less = _need(setup, request, ranks_here, device=device, offload_model="block")
        remedy = f"use --offload_model block ({less / 1e9:.1f} GB)" if less <= free else remedy
    where = "this machine has" if device == "cpu" else "a GPU has"
    return (
        f"The run needs at least {need / 1e9:.1f} GB ({stage}), and {where} {free / 1e9:.1f} GB "
        f"free; {remedy}, or see what fits with --plan."
    )


def _need(setup: Setup, request: Request, ranks_here: int, **execution: Any) -> tuple[str, int]:
    """The stage that takes the most, and its bytes. execution: other settings than the run's."""
    changed = replace(setup, execution=replace(setup.execution, **execution))
    needs = bound.least(changed, request)
    if changed.execution.device == "cpu":  # all of them denoise, one decodes
        needs["denoising"] *= ranks_here
    return max(needs.items(), key=lambda item: item[1])


def free_memory(device_type: str) -> int | None:
    """Bytes that a run on a device of this type may take; None where that is not known.

    Of several GPUs the emptiest counts.
    """
    if device_type == "cuda":
        return max(gpu_memory("free"), default=None)
    return host.available_memory() if device_type == "cpu" else None


def gpu_memory(kind: str) -> list[int]:
    """Bytes "free" or in "total" of each NVIDIA GPU here, as its driver's own program says.

    Empty where there is no such program, no GPU, or no answer within five seconds.
    """
    command = ["nvidia-smi", f"--query-gpu=memory.{kind}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return [int(line) * 2**20 for line in done.stdout.split("\n") if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
