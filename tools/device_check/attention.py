"""Steps 2, 3, 6: dense kernels, their log-sum-exp, merging, and the modes on one device.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks import common
from tools.device_check.bench import HEAD, LIMITS, Bench, Exact, exact
from tools.device_check.steps import (
    Figure,
    Measured,
    UnavailableError,
    error,
    gigabytes,
    milliseconds,
    share,
)
from wan.distributed.exchange import ALONE
from wan.distributed.ring import Merged
from wan.kernels import select
from wan.kernels.base import Kernel, Target
from wan.kernels.sdpa import SdpaKernel
from wan.modules.attnlayer import FAPowerCapAttention
from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.kernels import DENSE
from wan.settings.parallel import Parallel
from wan.settings.schedule import MODES, OVERLAP

QKV = tuple[Tensor, Tensor, Tensor]

TEXT = 512  # keys of cross-attention
LSE_LIMIT = 5e-3
LEAST_SHARE = 0.35  # of the rate of a matrix product, for a large call
LONG = (75_600, 37_800, 32_760)  # 720p, the half of it on each of a ring of two, 480p
_PYTORCH = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def shapes(bench: Bench) -> list[tuple[int, int, int]]:
    """(queries, keys, heads) of the calls, the hardest first."""
    if not bench.large:
        laser = [(2100, 2100, 1)] if bench.device.type == "npu" else []
        return [(1000, 1000, 5), (1000, 1000, 1), (1000, TEXT, 2), *laser]
    found = [(tokens, tokens, heads) for tokens in LONG for heads in (40, 5, 2, 1)]
    return [*found, (LONG[0], TEXT, 40)]


def kernels(bench: Bench, dtype: torch.dtype) -> dict[str, Callable[[], Kernel]]:
    """The kernels that a run may use here, by their --attention_algo or --attention_backend."""
    found = {}
    for name, row in DENSE.items():
        needs = ("xfuser", *row.modules) if row.member is not None else ()
        if bench.device.can.has(row) and all(find_spec(module.split(".")[0]) for module in needs):
            found[name] = replace(Attention(), **{row.flag: name})  # type: ignore[arg-type]

    def made(attention: Attention) -> Kernel:
        try:
            return select.dense(attention, Target(bench.device, HEAD, dtype))
        except InputError as error:
            raise UnavailableError(str(error)) from error

    return {name: partial(made, attention) for name, attention in found.items()}


def dense(bench: Bench) -> Measured:
    """Every kernel and PyTorch backend on every shape: error, time, name of the kernel."""
    for dtype in bench.dtypes:
        for shape in shapes(bench):
            qkv = bench.qkv(*shape, dtype=dtype)
            reference, short = exact(*qkv), _named(shape, dtype)
            for name, make in kernels(bench, dtype).items():
                yield f"{short}, {name}", partial(_kernel, bench, name, make, qkv, reference)
            for backend in _PYTORCH if bench.device.type == "cuda" else ():
                what = f"{short}, {backend.name.lower()}"
                yield what, partial(_backend, bench, backend, qkv, reference)


def _named(shape: tuple[int, int, int], dtype: torch.dtype) -> str:
    queries, keys, heads = shape
    noun = "head" if heads == 1 else "heads"
    return f"{queries} x {keys}, {heads} {noun}, {str(dtype).removeprefix('torch.')}"


def _kernel(
    bench: Bench, name: str, make: Callable[[], Kernel], qkv: QKV, reference: Exact
) -> list[Figure]:
    """A large call far below the rate of a matrix product counts as slow."""
    row, rows = DENSE[name], min(x.shape[1] for x in qkv)
    if rows < row.min_rows:
        raise UnavailableError(f"it takes {row.min_rows} rows or more")
    if qkv[0].dtype == torch.float32 and "fp32" not in row.precisions:
        raise UnavailableError("it takes 16-bit tensors")
    least = LEAST_SHARE if bench.large and qkv[1].shape[1] > TEXT else None
    return _attended(bench, make(), qkv, reference, least)


def _backend(bench: Bench, backend: SDPBackend, qkv: QKV, reference: Exact) -> list[Figure]:
    """One of PyTorch's backends, even if a run would not use it; its rate is not judged."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return SdpaKernel()(q, k, v)

    return _attended(bench, attend, qkv, reference, None)


def _attended(
    bench: Bench, attend: Callable[..., Tensor], qkv: QKV, reference: Exact, least: float | None
) -> list[Figure]:
    q, k, _ = qkv
    far = reference.error(attend(*qkv))
    taken = bench.seconds(lambda: attend(*qkv))
    rate = 4 * q.numel() * k.shape[1] / taken
    product, _ = bench.rates(q.dtype)
    return [
        error(far, LIMITS[q.dtype]),
        milliseconds(taken),
        Figure("rate", rate / 1e12, "TFLOP/s"),
        share("of a product's rate", rate / product, least),
        Figure("kernel", kernel_name(bench, lambda: attend(*qkv))),
    ]


def kernel_name(bench: Bench, run: common.Run) -> str:
    """The longest kernel on CUDA; on a CPU the innermost operation of PyTorch."""
    if bench.device.type == "npu":
        return "see step npu"
    on_gpu = bench.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as trace:
        run()
        common.synchronize(bench.place)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [e for e in trace.profiler.kineto_results.events() if e.device_type() == kind]
    names = [e for e in events if on_gpu or "attention" in e.name()]
    if not names:
        return "not known"
    inner = max(names, key=lambda e: e.duration_ns() if on_gpu else e.start_ns())
    return str(inner.name())[:80]


def lse(bench: Bench) -> Measured:
    """The log-sum-exp of every kernel that returns one, against logsumexp in float64."""
    for dtype in bench.dtypes:
        for shape in [s for s in shapes(bench) if s[2] in (5, 1)]:
            qkv = bench.qkv(*shape, dtype=dtype)
            reference = exact(*qkv)
            for name, make in kernels(bench, dtype).items():
                what = f"{_named(shape, dtype)}, {name}"
                yield what, partial(_with_lse, bench, make, qkv, reference)


def _with_lse(bench: Bench, make: Callable[[], Kernel], qkv: QKV, reference: Exact) -> list[Figure]:
    kernel = _returning_lse(make)
    out, sums = kernel.with_lse(*qkv)
    alone, both = (bench.seconds(partial(run, *qkv)) for run in (kernel, kernel.with_lse))
    return [
        error(reference.error(out), LIMITS[out.dtype]),
        error(reference.lse_error(sums), LSE_LIMIT, "error of the log-sum-exp"),
        milliseconds(both),
        Figure("times the result alone", both / alone),
        Figure("kernel", kernel_name(bench, lambda: kernel.with_lse(*qkv))),
    ]


def _returning_lse(make: Callable[[], Kernel]) -> Kernel:
    kernel = make()
    if not kernel.can_return_lse:
        raise UnavailableError("it returns no log-sum-exp; rings gather keys and values")
    return kernel


def merge(bench: Bench) -> Measured:
    """The memory of a call with its log-sum-exp, and keys in 2 and 4 parts merged."""
    tokens, heads = (LONG[0], 5) if bench.large else (1000, 5)
    for dtype in bench.dtypes:
        qkv = bench.qkv(tokens, tokens, heads, dtype)
        reference = exact(*qkv)
        for name, make in kernels(bench, dtype).items():
            short = f"{_named((tokens, tokens, heads), dtype)}, {name}"
            yield f"{short}: memory", partial(_memory, bench, make, qkv)
            for count in (2, 4):
                yield (
                    f"{short}: {count} parts merged",
                    partial(_merged, make, qkv, reference, count),
                )


def _memory(bench: Bench, make: Callable[[], Kernel], qkv: QKV) -> list[Figure]:
    kernel = _returning_lse(make)
    kernel.with_lse(*qkv)
    held = bench.peak(lambda: kernel.with_lse(*qkv))
    figures = [gigabytes("held", held)]
    if held is not None:  # the result alone is 1; copies of q, k, v would be 3 more
        figures.append(Figure("times q", held / qkv[0].nbytes))
    return figures


def _merged(make: Callable[[], Kernel], qkv: QKV, reference: Exact, count: int) -> list[Figure]:
    kernel, total = _returning_lse(make), Merged()
    q, k, v = qkv
    for k_piece, v_piece in zip(k.tensor_split(count, 1), v.tensor_split(count, 1), strict=True):
        total.add(*kernel.with_lse(q, k_piece, v_piece))
    return [error(reference.error(total.result()), LIMITS[q.dtype])]


def modes(bench: Bench) -> Measured:
    """The attention layer in every mode on this device alone: the same result, in what time?"""
    tokens, heads = (LONG[0], 40) if bench.large else (1000, 12)
    dtype = bench.dtypes[0]
    qkv = bench.qkv(tokens, tokens, heads, dtype)
    reference, make = exact(*qkv), kernels(bench, dtype)["fused"]
    first: tuple[Tensor, float] | None = None  # result and seconds of mode 0

    def measure(mode: int, overlap: bool) -> list[Figure]:
        nonlocal first
        layer = FAPowerCapAttention(Parallel(comm_type=mode), ALONE, overlap, kernel=make())
        out = layer(*qkv)
        taken = bench.seconds(partial(layer, *qkv))
        base, base_taken = first = first or (out, taken)
        return [
            error(reference.error(out), LIMITS[dtype]),
            error(
                float((out - base).abs().max() / base.abs().max()),
                LIMITS[dtype],
                "largest distance from mode 0",
            ),
            milliseconds(taken),
            Figure("times mode 0", taken / base_taken),
        ]

    ways = [(row.name, mode, False) for mode, row in MODES.items()]
    for name, mode, overlap in [*ways, (OVERLAP.name, 0, True)]:
        yield f"{name}, {tokens} tokens, {heads} heads", partial(measure, mode, overlap)
