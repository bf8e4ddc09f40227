"""Step 7: FP8 attention, RainFusion and int8 weights against our references on the CPU.

Legend: B batch, S tokens, N heads, D head size, q and k in masks: blocks of queries, of keys.
"""

from __future__ import annotations

import json
from functools import partial
from math import prod

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.device_check.bench import HEAD, LIMITS, Bench, distance, exact, sampled
from tools.device_check.steps import Figure, Measured, error, milliseconds
from wan.kernels.base import Payload, StepInfo, Target
from wan.kernels.fp8 import Fp8Quantiser, Rotations, hadamard, sylvester
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.npu import linear as npu_linear
from wan.kernels.rainfusion_masks import plan
from wan.kernels.select import Selected, select
from wan.settings import devices
from wan.settings.attention import Attention
from wan.settings.execution import Execution
from wan.settings.numerics import KV_ROWS, Q_ROWS

SPARSITY = 0.64
QUANTISED = 3e-2  # queries are rotated in 16 bits there and here, and then rounded to 3 bits
FROM_EXACT = 0.2  # what FP8 may cost, in relative rms
MASKS = 1.0  # percent of blocks that may be chosen otherwise, close to the threshold
INT8 = 8e-3  # of a row: one rounding of the result to bfloat16

WAYS = {
    "FP8": Attention(fa_quant="fp8"),
    "RainFusion v2": Attention(use_rainfusion=True, rainfusion_type="v2", sparse_start_step=0),
    "RainFusion v3": Attention(use_rainfusion=True, rainfusion_type="v3", sparse_start_step=0),
    "RainFusion v3 in FP8": Attention(
        use_rainfusion=True, rainfusion_type="v3", sparse_start_step=0, fa_quant="fp8"
    ),
}


def methods(bench: Bench) -> Measured:
    """Each method of attention that changes results: the right blocks, the right values?"""
    grid, heads = ((21, 45, 80), 5) if bench.large else ((3, 10, 20), 2)
    qkv = _with_trend(bench, prod(grid), heads, bench.dtypes[0])
    for name, attention in WAYS.items():
        what = f"{name}, {prod(grid)} tokens, {heads} heads"
        yield what, partial(_method, bench, attention, qkv, grid)


def _with_trend(
    bench: Bench, tokens: int, heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1,S,N,D] whose blocks differ, so that it is clear which ones matter."""
    q, k, v = bench.qkv(tokens, tokens, heads, dtype)
    random = torch.Generator().manual_seed(2)
    trend = torch.randn(1, tokens // Q_ROWS + 1, heads, HEAD, generator=random)
    rows = trend.repeat_interleave(Q_ROWS, 1)[:, :tokens].to(bench.place, dtype)
    return q + rows, k + rows, v


def _method(
    bench: Bench,
    attention: Attention,
    qkv: tuple[Tensor, Tensor, Tensor],
    grid: tuple[int, int, int],
) -> list[Figure]:
    q, k, _ = qkv
    dtype = q.dtype
    precision = "fp32" if dtype == torch.float32 else "bf16"
    devices.check((bench.device.can,), attention, Execution(precision=precision), HEAD)
    chosen = select(attention, Target(bench.device, HEAD, dtype), {})
    out = _attended(chosen, qkv, grid)
    figures = []
    seen = None
    if attention.use_rainfusion:
        k_rows = KV_ROWS if attention.fp8 else Q_ROWS
        masks = [
            plan(a, b, grid, attention.sparsity, 0, k_rows).cpu()
            for a, b in ((q, k), (q.cpu(), k.cpu()))
        ]
        differing = 100 * float((masks[0] != masks[1]).float().mean())
        figures.append(Figure("blocks chosen otherwise than on the CPU", differing, "%", MASKS))

        def seen(head: int, row: int) -> Tensor:
            blocks = masks[0][0, head, row // Q_ROWS]
            return blocks.repeat_interleave(k_rows)[: k.shape[1]]

    rounded = _quantised(attention, qkv) if attention.fp8 else qkv
    limit = QUANTISED if attention.fp8 and dtype != torch.float32 else LIMITS[dtype]
    figures.insert(0, error(exact(*rounded, seen).error(out), limit))
    if attention.fp8:
        far = exact(*qkv, seen).rms(out)
        figures.append(error(far, FROM_EXACT, "distance from unquantised"))
    taken = bench.seconds(lambda: _attended(chosen, qkv, grid))
    return [*figures, milliseconds(taken), Figure("kernel", chosen.describe())]


def _attended(
    chosen: Selected, qkv: tuple[Tensor, Tensor, Tensor], grid: tuple[int, int, int]
) -> Tensor:
    step = StepInfo(0, 4, "cond", "dit", grid, prod(grid), layer=0)
    q, k, v = map(Payload, qkv)
    return chosen.methods[0].prepare(q, k, v, step)(q, 0)


def _quantised(
    attention: Attention, qkv: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What FP8 leaves of q, k, v, by our reference on the host."""
    turn = sylvester if attention.use_rainfusion else hadamard
    quantiser = Fp8Quantiser(Rotations(HEAD, turn))
    q, k, v = (x.cpu() for x in qkv)
    parts = quantiser.q(q, None), quantiser.k(k, None), quantiser.v(v)
    return tuple(x.dequantised(torch.float32) for x in parts)  # type: ignore[return-value]


def int8(bench: Bench) -> Measured:
    """A linear layer with int8 weights, against our reference on the host: every bit is defined."""
    rows, inputs, outputs = (75_600, 5120, 13_824) if bench.large else (500, 512, 384)
    what = f"W8A8, {rows} x {inputs} -> {outputs}"
    yield what, partial(_int8, bench, rows, inputs, outputs)


def _int8(bench: Bench, rows: int, inputs: int, outputs: int) -> list[Figure]:
    dtype = torch.bfloat16
    random = torch.Generator().manual_seed(3)
    tensors = {
        "layer.weight": torch.randint(-127, 128, (outputs, inputs), generator=random).char(),
        "layer.weight_scale": torch.rand(outputs, 1, generator=random) / 300,
        "layer.bias": torch.randn(outputs, generator=random),
    }
    reference = W8A8Linear(*tensors.values(), dtype=dtype)
    layer: nn.Module = W8A8Linear(*tensors.values(), dtype=dtype).to(bench.place)
    if bench.device.type == "npu":
        layer = _by_mindiesd(bench, tensors, dtype)
    x = bench.randn(rows, inputs, dtype=dtype)
    some = sampled(rows)
    far = distance(layer(x)[some], reference(x[some].cpu()).double())
    taken = bench.seconds(lambda: layer(x))
    plain = nn.Linear(inputs, outputs, device=bench.place, dtype=dtype)
    ratio = taken / bench.seconds(lambda: plain(x))
    return [error(far, INT8), milliseconds(taken), Figure("times a bfloat16 layer", ratio)]


def _by_mindiesd(bench: Bench, tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """The same layer as an export that mindiesd reads. It takes no file that others may write."""
    name = "W8A8_DYNAMIC"
    description = bench.folder / f"quant_model_description_{name.lower()}.json"
    description.write_text(json.dumps({"model_quant_type": name, "layer.weight": name}))
    weights = bench.folder / f"quant_model_weight_{name.lower()}.safetensors"
    save_file(tensors, weights)
    for path in (description, weights):
        path.chmod(0o640)
    outputs, inputs = tensors["layer.weight"].shape
    network = nn.ModuleDict({"layer": nn.Linear(inputs, outputs, device="meta")})
    npu_linear.quantise(
        network, description, ["layer"], use_nz=False, dtype=dtype, device=bench.place
    )
    return network["layer"]
