"""Steps 2, 3, 6, 7: dense kernels, their log-sum-exp, merging, the modes on one device, and the
attention backends and weights that change results (FP8, RainFusion, int8), against references on
the host.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from math import prod

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.device_check.bench import (
    HEAD,
    LIMITS,
    Bench,
    ExactAttention,
    compute_row_distance,
    sample_rows,
)
from tools.device_check.steps import (
    Figure,
    Measurements,
    make_error,
    make_memory,
    make_share,
    make_time,
)
from wan.distributed.ring import LseMerger
from wan.distributed.ulysses import SINGLE_RANK
from wan.kernels import registry
from wan.kernels.forward_context import StepInfo
from wan.kernels.fp8 import Fp8Quantizer, Rotations, make_hadamard_rotation, make_sylvester_rotation
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.interfaces import AttentionInput, Kernel, Target
from wan.kernels.npu import linear as npu_linear
from wan.kernels.rainfusion_masks import make_rainfusion_mask
from wan.modules.attnlayer import FAPowerCapAttention
from wan.settings import devices
from wan.settings.attention import Attention
from wan.settings.attention_modes import MODES, OVERLAP
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.kernels import DENSE_KERNELS, DenseKernelRow
from wan.settings.numerics import KV_ROWS, Q_ROWS
from wan.settings.parallel import Parallel

QKV = tuple[Tensor, Tensor, Tensor]
Shape = tuple[int, int, int]  # queries, keys, heads

TEXT = 512  # text tokens: keys of cross-attention
LSE_LIMIT = 5e-3
LEAST_SHARE = 0.35  # of the rate of a matrix product, for a large call
LONG = (75_600, 37_800, 32_760)  # tokens of 720p, of half of it (a ring of two), of 480p
QUANTISED = 5e-2  # of a row: dequantized values are rounded to 16 bits, and logits are large
ROUNDED = 1.0  # percent of FP8 values that may be rounded differently from the host
FROM_EXACT = 0.2  # largest relative rms of FP8 against unquantized attention
MASKS = 1.0  # percent of blocks, close to the threshold, that may differ from the host's choice
INT8 = 8e-3  # of a row: one rounding of the result to bfloat16

V3 = Attention(use_rainfusion=True, rainfusion_type="v3", sparse_start_step=0)
BACKENDS = {
    "FP8": Attention(fa_quant="fp8"),
    "RainFusion v2": replace(V3, rainfusion_type="v2"),
    "RainFusion v3": V3,
    "RainFusion v3 in FP8": replace(V3, fa_quant="fp8"),
}


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, its reference, and a kernel that a run may use for it here.

    Attributes:
        label: Shape, dtype and name of the kernel as text.
        qkv: q, k, v [1,S,N,D].
        reference: Sampled rows of the result in float64.
        row: Row of the kernel in `DENSE_KERNELS`.
    """

    bench: Bench
    label: str
    qkv: QKV
    reference: ExactAttention
    row: DenseKernelRow

    def make_kernel(self, with_lse: bool = False) -> Kernel:
        """Makes the kernel; InputError if it does not take this call, or returns no sums."""
        q, k, _ = self.qkv
        if min(q.shape[1], k.shape[1]) < self.row.min_rows:
            raise InputError(f"it needs {self.row.min_rows} rows or more")
        attention = Attention(attention_backend=self.row.name)
        kernel = registry.make_dense_kernel(attention, Target(self.bench.device, HEAD, q.dtype))
        if with_lse and not kernel.can_return_lse:
            raise InputError("it returns no log-sum-exp; rings gather keys and values")
        return kernel


def make_calls(bench: Bench, shapes: list[Shape]) -> Iterator[AttentionCall]:
    """Makes the calls of these shapes, in every dtype and with every kernel of the device."""
    for dtype, (queries, keys, heads) in product(bench.dtypes, shapes):
        qkv = bench.make_qkv(queries, keys, heads, dtype)
        noun = "head" if heads == 1 else "heads"
        label = f"{queries} x {keys}, {heads} {noun}, {str(dtype).removeprefix('torch.')}"
        reference = ExactAttention(*qkv)
        for name, row in DENSE_KERNELS.items():
            needs = ("xfuser", *row.modules) if row.xfuser_member is not None else ()
            is_installed = all(find_spec(module.split(".")[0]) for module in needs)
            takes_dtype = dtype != torch.float32 or "fp32" in row.precisions
            if bench.device.capabilities.has_kernel(row) and is_installed and takes_dtype:
                yield AttentionCall(bench, f"{label}, {name}", qkv, reference, row)


def _list_shapes(bench: Bench) -> list[Shape]:
    """Lists shapes (queries, keys, heads), the largest first."""
    if not bench.large:
        laser = [(2100, 2100, 1)] if bench.device.type == "npu" else []
        return [(1000, 1000, 5), (1000, 1000, 1), (1000, TEXT, 2), *laser]
    shapes = [(tokens, tokens, heads) for tokens in LONG for heads in (40, 5, 2, 1)]
    return [*shapes, (LONG[0], TEXT, 40)]


def check_dense(bench: Bench) -> Measurements:
    """Checks every kernel on every shape: error, time, rate, kernel name.

    A large call far below the rate of a matrix product is slow; one head alone may not fill a
    device.
    """

    def measure(call: AttentionCall) -> list[Figure]:
        kernel, (q, k, _) = call.make_kernel(), call.qkv
        far = call.reference.measure_error(kernel(*call.qkv))
        seconds = bench.measure_seconds(lambda: kernel(*call.qkv))
        rate = 4 * q.numel() * k.shape[1] / seconds
        product_rate, _ = bench.measure_matmul(q.dtype)
        is_large = bench.large and k.shape[1] > TEXT and q.shape[2] > 1
        least = LEAST_SHARE if is_large else None
        return [
            make_error(far, LIMITS[q.dtype]),
            make_time(seconds),
            Figure("rate", rate / 1e12, "TFLOP/s"),
            make_share("of a product's rate", rate / product_rate, least),
            Figure("kernel", kernel.name),
        ]

    for call in make_calls(bench, _list_shapes(bench)):
        yield call.label, partial(measure, call)


def check_lse(bench: Bench) -> Measurements:
    """Checks the log-sum-exp of every kernel that returns one against logsumexp in float64."""

    def measure(call: AttentionCall) -> list[Figure]:
        kernel, qkv = call.make_kernel(with_lse=True), call.qkv
        out, sums = kernel.with_lse(*qkv)
        alone, both = (
            bench.measure_seconds(partial(run, *qkv)) for run in (kernel, kernel.with_lse)
        )
        lse_error = call.reference.measure_lse_error(sums)
        return [
            make_error(call.reference.measure_error(out), LIMITS[out.dtype]),
            make_error(lse_error, LSE_LIMIT, "error of the log-sum-exp"),
            make_time(both),
            Figure("times the result alone", both / alone),
            Figure("kernel", kernel.name),
        ]

    for call in make_calls(bench, [shape for shape in _list_shapes(bench) if shape[2] in (5, 1)]):
        yield call.label, partial(measure, call)


def check_merge(bench: Bench) -> Measurements:
    """Checks the memory of calls with log-sum-exp, and the merging of 2 and 4 parts of the keys."""

    def measure_memory(call: AttentionCall) -> list[Figure]:
        kernel = call.make_kernel(with_lse=True)
        kernel.with_lse(*call.qkv)
        held = bench.measure_peak(lambda: kernel.with_lse(*call.qkv))
        # The result alone is 1; copies of q, k, v would be 3 more.
        times = [] if held is None else [Figure("times q", held / call.qkv[0].nbytes)]
        return [make_memory("held", held), *times]

    def measure_merged(call: AttentionCall, count: int) -> list[Figure]:
        kernel, total, (q, k, v) = call.make_kernel(with_lse=True), LseMerger(), call.qkv
        for piece in zip(k.tensor_split(count, 1), v.tensor_split(count, 1), strict=True):
            total.add(*kernel.with_lse(q, *piece))
        return [make_error(call.reference.measure_error(total.result()), LIMITS[q.dtype])]

    tokens = LONG[0] if bench.large else 1000
    for call in make_calls(bench, [(tokens, tokens, 5)]):
        yield f"{call.label}: memory", partial(measure_memory, call)
        for count in (2, 4):
            yield f"{call.label}: {count} parts merged", partial(measure_merged, call, count)


def check_modes(bench: Bench) -> Measurements:
    """Checks that the layer gives the same result in every mode on one device; times it."""
    tokens, heads = (LONG[0], 40) if bench.large else (1000, 12)
    calls = make_calls(bench, [(tokens, tokens, heads)])
    call = next(call for call in calls if call.row.name == "fused")
    kernel, limit = call.make_kernel(), LIMITS[bench.dtypes[0]]
    first: tuple[Tensor, float] | None = None  # result and seconds of mode 0

    def measure(mode: int, overlap: bool) -> list[Figure]:
        nonlocal first
        layer = FAPowerCapAttention(Parallel(comm_type=mode), SINGLE_RANK, overlap, kernel=kernel)
        out, seconds = layer(*call.qkv), bench.measure_seconds(partial(layer, *call.qkv))
        base, base_seconds = first = first or (out, seconds)
        far = float((out - base).abs().max() / base.abs().max())
        return [
            make_error(call.reference.measure_error(out), limit),
            make_error(far, limit, "largest distance from mode 0"),
            make_time(seconds),
            Figure("times mode 0", seconds / base_seconds),
        ]

    ways = [(row.name, mode, False) for mode, row in MODES.items()]
    for name, mode, overlap in [*ways, (OVERLAP.name, 0, True)]:
        yield f"{name}, {tokens} tokens, {heads} heads", partial(measure, mode, overlap)


def check_backends(bench: Bench) -> Measurements:
    """Checks the selected blocks and the values of attention backends that change results."""
    grid, heads = ((21, 45, 80), 5) if bench.large else ((3, 10, 20), 2)
    tokens, dtype = prod(grid), bench.dtypes[0]
    q, k, v = bench.make_qkv(tokens, tokens, heads, dtype)
    random = torch.Generator().manual_seed(2)
    trend = torch.randn(1, tokens // Q_ROWS + 1, heads, HEAD, generator=random)
    rows = trend.repeat_interleave(Q_ROWS, 1)[:, :tokens].to(bench.torch_device, dtype)
    qkv = q + rows, k + rows, v  # blocks differ, so that their selection is unambiguous
    for name, attention in BACKENDS.items():
        label = f"{name}, {tokens} tokens, {heads} heads"
        yield label, partial(_measure_backend, bench, attention, qkv, grid)


def _measure_backend(
    bench: Bench, attention: Attention, qkv: QKV, grid: tuple[int, int, int]
) -> list[Figure]:
    q, k, v = qkv
    dtype = q.dtype
    precision = "fp32" if dtype == torch.float32 else "bf16"
    devices.check_device_support(
        (bench.device.capabilities,), attention, Execution(precision=precision), HEAD
    )
    target = Target(bench.device, HEAD, dtype)
    chosen = registry.select_kernels(attention, target, {})
    step = StepInfo(0, 4, "cond", "dit", grid, prod(grid), layer=0)

    def attend() -> Tensor:
        tensors = AttentionInput(q), AttentionInput(k), AttentionInput(v)
        return chosen.backends[0].prepare_kv(*tensors, step)(tensors[0], 0)

    out, get_attended_keys, figures = attend(), None, list[Figure]()
    if attention.use_rainfusion:
        k_rows = KV_ROWS if attention.fp8 else Q_ROWS
        here, on_host = (
            make_rainfusion_mask(a, b, grid, attention.sparsity, 0, k_rows).cpu()
            for a, b in ((q, k), (q.cpu(), k.cpu()))
        )
        differing = 100 * float((here != on_host).float().mean())
        figures.append(Figure("blocks selected differently on the CPU", differing, "%", MASKS))

        def get_attended_keys(head: int, row: int) -> Tensor:
            return here[0, head, row // Q_ROWS].repeat_interleave(k_rows)[: k.shape[1]]

    limit, rounded = LIMITS[dtype], qkv
    if attention.fp8:
        limit = limit if dtype == torch.float32 else QUANTISED
        rotations = Rotations(
            HEAD, make_sylvester_rotation if attention.use_rainfusion else make_hadamard_rotation
        )
        fp8 = _quantize_qkv(registry.make_fp8_quantizer(target, rotations), qkv)
        q_fp8, k_fp8, v_fp8 = (x.dequantize(torch.float32) for x in fp8)
        rounded = q_fp8, k_fp8, v_fp8
        want = _quantize_qkv(Fp8Quantizer(rotations), (q.cpu(), k.cpu(), v.cpu()))
        otherwise = max(_compute_differing_share(*pair) for pair in zip(fp8, want, strict=True))
        far = ExactAttention(*qkv, get_attended_keys).measure_rms(out)
        figures.append(make_error(far, FROM_EXACT, "distance from unquantized"))
        figures.append(Figure("rounded differently on the CPU", otherwise, "%", ROUNDED))
    figures.insert(
        0,
        make_error(ExactAttention(*rounded, get_attended_keys).measure_error(out), limit),
    )
    return [*figures, bench.measure_time(attend), Figure("kernel", chosen.describe())]


def _quantize_qkv(
    quantiser: Fp8Quantizer, qkv: QKV
) -> tuple[AttentionInput, AttentionInput, AttentionInput]:
    q, k, v = qkv
    return quantiser.quantize_q(q, None), quantiser.quantize_k(k, None), quantiser.quantize_v(v)


def _compute_differing_share(values: AttentionInput, expected: AttentionInput) -> float:
    """Computes the percent of values that differ by more than the rounding of a scale."""
    a, b = (x.dequantize(torch.float32).cpu() for x in (values, expected))
    return 100 * float((~torch.isclose(a, b, rtol=1e-5, atol=0)).float().mean())


def check_int8(bench: Bench) -> Measurements:
    """Checks a linear layer with int8 weights against our exactly defined reference on the host."""
    rows, inputs, outputs = (75_600, 5120, 13_824) if bench.large else (500, 512, 384)

    def measure() -> list[Figure]:
        dtype, random = torch.bfloat16, torch.Generator().manual_seed(3)
        tensors = {
            "layer.weight": torch.randint(-127, 128, (outputs, inputs), generator=random).char(),
            "layer.weight_scale": torch.rand(outputs, 1, generator=random) / 300,
            "layer.bias": torch.randn(outputs, generator=random),
        }
        reference = W8A8Linear(*tensors.values(), dtype=dtype)
        layer: nn.Module = W8A8Linear(*tensors.values(), dtype=dtype).to(bench.torch_device)
        if bench.device.type == "npu":
            layer = _load_with_mindiesd(bench, tensors, dtype)
        x, some = bench.randn(rows, inputs, dtype=dtype), sample_rows(rows)
        far = compute_row_distance(layer(x)[some], reference(x[some].cpu()).double())
        seconds = bench.measure_seconds(lambda: layer(x))
        plain = nn.Linear(inputs, outputs, device=bench.torch_device, dtype=dtype)
        ratio = seconds / bench.measure_seconds(lambda: plain(x))
        return [make_error(far, INT8), make_time(seconds), Figure("times a bfloat16 layer", ratio)]

    yield f"W8A8, {rows} x {inputs} -> {outputs}", measure


def _load_with_mindiesd(bench: Bench, tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Loads the layer with mindiesd from an export, whose files must not be writable by others."""
    name = "W8A8_DYNAMIC"
    description = bench.folder / f"quant_model_description_{name.lower()}.json"
    description.write_text(json.dumps({"model_quant_type": name, "layer.weight": name}))
    weights = bench.folder / f"quant_model_weight_{name.lower()}.safetensors"
    save_file(tensors, weights)
    for path in (description, weights):
        path.chmod(0o640)
    outputs, inputs = tensors["layer.weight"].shape
    network = nn.ModuleDict({"layer": nn.Linear(inputs, outputs, device="meta")})
    npu_linear.quantize_npu_linears(
        network, description, ["layer"], use_nz=False, dtype=dtype, device=bench.torch_device
    )
    return network["layer"]
