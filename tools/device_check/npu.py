"""Step 12: checks of Ascend NPUs.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.device_check.attention import LONG
from tools.device_check.bench import HEAD, LIMITS, Bench, exact
from tools.device_check.network import apart, case
from tools.device_check.steps import SLOW, Figure, Measured, UnavailableError, absent, error
from wan.kernels.select import make_vendor_ops
from wan.modules.rope import RopeTable, apply_rope, make_rope_table
from wan.settings.kernels import SMALL_OPS

ROPE_LIMIT = 1e-5  # float32 in and out
Rotate = Callable[[Tensor, RopeTable], Tensor]
_ALL = 2**31 - 1
_FALLBACK = "fall back to run on the cpu"  # torch-npu's warning about a missing operator


def npu(bench: Bench) -> Measured:
    """Check RoPE forms, attention layouts, operators that fall back to the CPU, kernel names."""
    grid = (21, 45, 80) if bench.large else (3, 8, 12)
    cos, sin = make_rope_table(grid, HEAD)
    table = (cos.to(bench.place), sin.to(bench.place))
    x = bench.randn(1, len(cos), 40 if bench.large else 4, HEAD, dtype=torch.float32)
    wanted = apply_rope(x.cpu().double(), (cos.double(), sin.double()))
    forms: dict[str, Rotate] = {"the plain form": apply_rope, "pairs apart": _pairs}
    has_rope = bench.device.capabilities.has_kernel(SMALL_OPS["rope"])
    one_kernel = make_vendor_ops(["rope"]).rope if has_rope else None
    if one_kernel is not None:
        forms["--fused_ops rope"] = one_kernel

    def rotated(form: Rotate) -> list[Figure]:
        far = apart(form(x, table), wanted)
        return [error(far, ROPE_LIMIT), bench.time(lambda: form(x, table))]

    for name, form in forms.items():
        yield f"RoPE, {name}", partial(rotated, form)
    tokens, heads = (LONG[1], 5) if bench.large else (500, 2)
    qkv = bench.qkv(tokens, tokens, heads)
    for layout in ("BSND", "BNSD"):
        yield f"npu_fusion_attention, {layout}", partial(_layout, bench, qkv, layout)
    yield "operators on the CPU", partial(_fallbacks, bench)
    yield "kernels of a forward", partial(_kernels, bench)
    yield absent("clock", "mindiesd sets it (--fa_freq_cap), and no tool can read it")
    yield absent(
        "ASCEND_LAUNCH_BLOCKING",
        "set by the environment: run `ASCEND_LAUNCH_BLOCKING=1 python tools/check_device.py "
        "--only forward,layers` and compare the times",
    )


def _pairs(x_BSND: Tensor, table: RopeTable) -> Tensor:
    """Rotate by unbinding the halves of each pair and stacking them again, without a flip."""
    cos, signed = table
    a, b = x_BSND.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., ::2], signed[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _layout(bench: Bench, qkv: tuple[Tensor, Tensor, Tensor], layout: str) -> list[Figure]:
    """Measure attention in a layout, including the copies from and to BSND."""
    import torch_npu

    operator: Any = torch_npu.npu_fusion_attention

    def attend() -> Tensor:
        given = qkv if layout == "BSND" else [x.transpose(1, 2).contiguous() for x in qkv]
        scale, heads = HEAD**-0.5, qkv[0].shape[2]
        out: Tensor = operator(
            *given, heads, layout, scale=scale, pre_tockens=_ALL, next_tockens=_ALL
        )[0]
        return out if layout == "BSND" else out.transpose(1, 2).contiguous()

    far = exact(*qkv).error(attend())
    return [error(far, LIMITS[torch.bfloat16]), bench.time(attend)]


def _fallbacks(bench: Bench) -> list[Figure]:
    """Find operators without an NPU kernel: they run on the host and synchronize."""
    of = case(bench)
    model, given = of.model(of.weights()), of.inputs((3, 8, 12))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        given.call(model)
        bench.device.synchronize()
    names = sorted(
        {str(w.message).split("'")[1] for w in said if _FALLBACK in str(w.message).lower()}
    )
    figure = Figure("of a forward", len(names), "", 0, verdict=SLOW)
    return [figure, *([Figure("names", ", ".join(names))] if names else [])]


def _kernels(bench: Bench) -> list[Figure]:
    """List the longest kernels of a forward by torch-npu's profiler."""
    import torch_npu

    profiler: Any = getattr(torch_npu, "profiler", None)
    if profiler is None:
        raise UnavailableError("torch-npu has no profiler here")
    of = case(bench)
    model, given = of.model(of.weights()), of.inputs()
    given.call(model)
    folder = bench.folder / "profile"
    with profiler.profile(
        activities=[profiler.ProfilerActivity.NPU],
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder)),
    ):
        given.call(model)
        bench.device.synchronize()
    taken: dict[str, float] = {}
    for path in folder.rglob("kernel_details.csv"):
        with path.open(encoding="utf-8", errors="replace") as file:
            for entry in csv.DictReader(file):
                name = entry.get("Type") or entry.get("Name") or "?"
                taken[name] = taken.get(name, 0.0) + float(entry.get("Duration(us)") or 0)
    if not taken:
        raise UnavailableError("the profiler has written no kernel_details.csv")
    longest = sorted(taken.items(), key=lambda item: -item[1])[:12]
    return [Figure(name, us / 1e3, "ms") for name, us in longest]
