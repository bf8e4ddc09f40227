"""The one interface to CPUs and accelerators. Vendor calls stand here and in `wan.kernels` only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wan.settings.errors import InputError


@dataclass(frozen=True)
class Device:
    """A device and what the rest of the code asks of it."""

    torch_device: torch.device

    @property
    def type(self) -> str:
        return self.torch_device.type

    @property
    def default_precision(self) -> torch.dtype:
        return torch.float32 if self.type == "cpu" else torch.bfloat16

    def synchronize(self) -> None:
        if self.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def empty_cache(self) -> None:
        if self.type == "cuda":
            torch.cuda.empty_cache()

    def reset_peak_memory(self) -> None:
        if self.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int | None:
        """Highest memory allocated on the accelerator, bytes; None on the CPU."""
        return torch.cuda.max_memory_allocated(self.torch_device) if self.type == "cuda" else None

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device) if self.type == "cuda" else "CPU"


def resolve(wish: str, index: int = 0) -> Device:
    """The device for --device auto, cpu or cuda. InputError where it is not there."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    if wish == "cpu":
        return Device(torch.device("cpu"))
    if wish != "cuda":
        raise InputError(f"--device {wish} is not built yet; use --device cuda or --device cpu.")
    if not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no CUDA device here; use --device cpu.")
    if index >= torch.cuda.device_count():
        raise InputError(f"CUDA device {index} does not exist; {torch.cuda.device_count()} do.")
    torch.cuda.set_device(index)
    return Device(torch.device("cuda", index))
