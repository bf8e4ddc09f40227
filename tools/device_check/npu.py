"""Step 12: checks of Ascend NPUs.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.device_check.attention import LONG
from tools.device_check.bench import (
    HEAD,
    LIMITS,
    Bench,
    ExactAttention,
    compute_rms_distance,
)
from tools.device_check.network import make_case
from tools.device_check.steps import SLOW, Figure, Measurements, make_error
from wan.kernels.registry import make_vendor_ops
from wan.modules.rope import RopeTable, apply_rope, make_rope_table
from wan.settings.kernels import SMALL_OPS

ROPE_LIMIT = 1e-5  # float32 in and out
Rotate = Callable[[Tensor, RopeTable], Tensor]
_ALL = 2**31 - 1
_FALLBACK = "fall back to run on the cpu"  # torch-npu's warning about a missing operator


def check_npu(bench: Bench) -> Measurements:
    """Checks RoPE, attention layouts, and operators that fall back to the CPU."""
    grid = (21, 45, 80) if bench.large else (3, 8, 12)
    cos, sin = make_rope_table(grid, HEAD)
    table = (cos.to(bench.torch_device), sin.to(bench.torch_device))
    x = bench.randn(1, len(cos), 40 if bench.large else 4, HEAD, dtype=torch.float32)
    wanted = apply_rope(x.cpu().double(), (cos.double(), sin.double()))
    forms: dict[str, Rotate] = {"the plain form": apply_rope}
    has_rope = bench.device.capabilities.has_kernel(SMALL_OPS["rope"])
    one_kernel = make_vendor_ops(["rope"]).rope if has_rope else None
    if one_kernel is not None:
        forms["--fused_ops rope"] = one_kernel

    def measure_rotation(form: Rotate) -> list[Figure]:
        far = compute_rms_distance(form(x, table), wanted)
        return [make_error(far, ROPE_LIMIT), bench.measure_time(lambda: form(x, table))]

    for name, form in forms.items():
        yield f"RoPE, {name}", partial(measure_rotation, form)
    tokens, heads = (LONG[1], 5) if bench.large else (500, 2)
    qkv = bench.make_qkv(tokens, tokens, heads)
    for layout in ("BSND", "BNSD"):
        yield f"npu_fusion_attention, {layout}", partial(_check_layout, bench, qkv, layout)
    yield "operators on the CPU", partial(_find_fallbacks, bench)


def _check_layout(bench: Bench, qkv: tuple[Tensor, Tensor, Tensor], layout: str) -> list[Figure]:
    """Measures attention in a layout, including the copies from and to BSND."""
    import torch_npu

    operator: Any = torch_npu.npu_fusion_attention

    def attend() -> Tensor:
        inputs = qkv if layout == "BSND" else [x.transpose(1, 2).contiguous() for x in qkv]
        scale, heads = HEAD**-0.5, qkv[0].shape[2]
        out: Tensor = operator(
            *inputs, heads, layout, scale=scale, pre_tockens=_ALL, next_tockens=_ALL
        )[0]
        return out if layout == "BSND" else out.transpose(1, 2).contiguous()

    far = ExactAttention(*qkv).measure_error(attend())
    return [make_error(far, LIMITS[torch.bfloat16]), bench.measure_time(attend)]


def _find_fallbacks(bench: Bench) -> list[Figure]:
    """Finds operators without an NPU kernel: they run on the host and synchronize."""
    case = make_case(bench)
    model, inputs = case.make_model(case.make_weights()), case.make_inputs((3, 8, 12))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inputs.run(model)
        bench.device.synchronize()
    names = sorted(
        {str(w.message).split("'")[1] for w in caught if _FALLBACK in str(w.message).lower()}
    )
    figure = Figure("of a forward", len(names), "", 0, verdict=SLOW)
    return [figure, *([Figure("names", ", ".join(names))] if names else [])]
