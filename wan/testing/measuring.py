"""Interleaved timing, peak memory, and matrix products of a forward.

A machine's speed drifts (clocks, other processes, page cache), so variants are never timed one
after the other: every round runs each variant once, and ratios are taken inside a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from wan.kernels.amx_linear import LINEAR_AMX
from wan.utils.torch_private import ONEDNN_LINEAR

CPU = torch.device("cpu")
Work = Callable[[], Any]
Times = dict[str, list[float]]
TorchCall = tuple[Callable[..., Tensor], tuple[Any, ...]]


def synchronize(device: torch.device) -> None:
    """Waits for the device's queued work; returns at once on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def measure_seconds(run: Work, device: torch.device) -> float:
    """Returns the wall time of one run, including its work on the device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def time_interleaved(
    variants: Mapping[str, Work], rounds: int, device: torch.device = CPU
) -> Times:
    """Returns the seconds of every variant in every round, after one round of warm-up.

    Odd rounds run in reverse order. A barrier precedes each run if there is a process group.
    """
    times: Times = {name: [] for name in variants}
    for number in range(-1, rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            if dist.is_initialized():
                dist.barrier()
            elapsed = measure_seconds(variants[name], device)
            if number >= 0:
                times[name].append(elapsed)
    return times


def measure_peak_bytes(run: Work, device: torch.device) -> int:
    """Returns a run's peak of allocated bytes, minus the bytes allocated before it."""
    if device.type == "cpu":
        return _measure_cpu_peak_bytes(run)
    module = torch.get_device_module(device)
    synchronize(device)
    bytes_before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return int(module.max_memory_allocated(device) - bytes_before)


def _measure_cpu_peak_bytes(run: Work) -> int:
    """Returns the highest running sum of the CPU allocator's events during a run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        run()
    events = trace.profiler.kineto_results.events()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak


class RecordProducts(TorchFunctionMode):
    """Records linear layers' products and `F.scaled_dot_product_attention`, with arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear: list[TorchCall] = []
        self.attention: list[TorchCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (F.linear, ONEDNN_LINEAR, LINEAR_AMX):
            self.linear.append((func, args))
        elif func is F.scaled_dot_product_attention:
            self.attention.append((func, args))
        return func(*args, **(kwargs or {}))

    def count_flops(self) -> int:
        """Counts the floating-point operations of the recorded calls; a multiply-add is two."""
        return sum(2 * x.numel() * len(weight) for _, (x, weight, *_) in self.linear) + sum(
            4 * q.numel() * k.shape[-2] for _, (q, k, _) in self.attention
        )


def replay_calls(calls: Sequence[TorchCall]) -> None:
    """Repeats recorded calls; each result is freed before the next call."""
    for func, args in calls:
        func(*args)
