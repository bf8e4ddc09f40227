"""Selects the attention kernels and attention backends of a run, by its settings and device.

The rows of `wan.settings.kernels` name the factory of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from wan.kernels.base import PLAIN, Kernel, Load, Method, Payload, SmallOps, Target
from wan.kernels.compiled_ops import Compiled
from wan.kernels.fp8 import (
    Form,
    Fp8Attention,
    Fp8Quantiser,
    Rotations,
    as_they_are,
    hadamard,
    sylvester,
)
from wan.kernels.npu.fp8 import placed_head_first
from wan.kernels.rainfusion import RainFusionAttention
from wan.kernels.rainfusion_masks import window_order
from wan.settings.attention import Attention
from wan.settings.kernels import FP8, RAINFUSION, SMALL_OPS, KernelRow
from wan.settings.schedule import Grid

Exported = Mapping[tuple[str, int], tuple[Tensor, Tensor]]
"""(expert, layer) -> rotations of queries and keys, from a quantized checkpoint."""


@dataclass(frozen=True)
class Selected:
    """The kernels and attention backends of a run.

    Attributes:
        device_type: Of the device that computes.
        dense_kernel: Self-attention's kernel for calls to which no backend applies.
        text_kernel: Cross-attention's kernel.
        backends: The first that applies to a call computes it.
        layers: The (expert, layer) pairs that use `backends`; None: all.
        fallback: The backends of all other layers.
        token_order: Returns the token order of a grid; None: raster order.
        ops: Vendors' kernels for small operations.
        op_runner: Runs the small operations of a block; None: eagerly.
        clock: A context manager around self-attention.
    """

    device_type: str
    dense: Kernel
    text: Kernel
    methods: tuple[Method, ...] = ()
    listed: frozenset[tuple[str, int]] | None = None
    otherwise: tuple[Method, ...] = ()
    order: Callable[[Grid], Tensor] | None = None
    ops: SmallOps = PLAIN
    run: Compiled | None = None
    clock: AbstractContextManager[object] | None = None

    def methods_of(self, expert: str, layer: int) -> tuple[Method, ...]:
        """Returns the attention backends of a block."""
        is_listed = self.listed is None or (expert, layer) in self.listed
        return self.methods if is_listed else self.otherwise

    def describe(self) -> str:
        """Names the backends and the kernel of self-attention, in the order in which they apply."""
        asked: list[Method | Kernel] = [*self.methods, *self.otherwise, self.dense]
        if self.listed is None:
            total = [i for i, method in enumerate(self.methods) if method.is_total]
            asked = asked[: total[0] + 1] if total else asked
        return ", else ".join(part.name for part in asked)


def select(
    attention: Attention, target: Target, exported: Exported, compiled: bool = False
) -> Selected:
    """Selects the kernels and backends of a run whose settings have been checked.

    Args:
        exported: Rotations of a quantized checkpoint; empty without one.
        compile_blocks: Blocks are compiled, so small operations are not compiled separately.

    Raises:
        ValueError: A kernel does not exist on the device, or does not compute there.
    """
    device, load = target.device, target.load
    names, ops, run, clock = device.can.fused(attention, compiled), PLAIN, None, None
    if device.type == "npu":
        ops = vendor_ops(names, load)
        if attention.fa_freq_cap is not None:
            cap, restore = attention.fa_freq_cap, attention.fa_freq_restore
            clock = load("wan.kernels.npu.clock:FrequencyCap")(cap, restore)
    elif names:
        least = {} if attention.fused_ops == ("auto",) else {"least": 0}
        run = load("wan.kernels.compiled_ops:Compiled")(names, **least)
    return Selected(
        device.type,
        dense=dense(attention, target),
        text=dense(Attention(), target),  # too short for any other kernel
        methods=(*_rainfusion(attention, target, exported), *_fp8(attention, target, exported)),
        listed=frozenset(exported) if exported else None,
        otherwise=_rainfusion(replace(attention, fa_quant="none"), target, {}) if exported else (),
        order=window_order if attention.use_rainfusion else None,
        ops=ops,
        run=run,
        clock=clock,
    )


def vendor_ops(names: Collection[str], load: Load = resolve_name) -> SmallOps:
    """Makes the NPU vendor's kernels for these values of fused_ops; others stay PyTorch's."""
    ops = PLAIN
    for name, row in SMALL_OPS.items():
        if name in names:
            ops = load(row.make["npu"])(ops, load)
    return ops


def dense(attention: Attention, target: Target) -> Kernel:
    """Makes self-attention's dense kernel; one of xfuser is tried on the device."""
    kernel: Kernel = _made(attention.dense, replace(target, row=attention.dense))
    return kernel


def _made(row: KernelRow, target: Target) -> Any:
    """Makes the kernel of a row of the table; ValueError if the device does not have it."""
    can = target.device.can
    if not can.has(row):
        raise ValueError(f"There is no kernel {row.name!r} on this device ({can.name}).")
    return target.load(row.make[can.type])(target)


def _rainfusion(attention: Attention, target: Target, exported: Exported) -> tuple[Method, ...]:
    if not attention.use_rainfusion:
        return ()
    kind, start = attention.rainfusion_type, attention.sparse_start_step
    quantiser = None
    if attention.fp8:
        quantiser = fp8_quantiser(target, Rotations(target.head_dim, sylvester, exported))
    method = RainFusionAttention(
        kind,
        attention.sparsity,
        attention.start_step if start is None else start,
        attention.mask_refresh_interval,
        kernel=_made(RAINFUSION[kind], target),
        quantiser=quantiser,
        place=_place(target) if RAINFUSION[kind].has_fp8 else as_they_are,
    )
    return (method,)


def _fp8(attention: Attention, target: Target, exported: Exported) -> tuple[Method, ...]:
    if not attention.fp8:
        return ()
    quantiser = fp8_quantiser(target, Rotations(target.head_dim, hadamard, exported))
    kernel, before = _made(FP8, target), attention.quant_alltoall
    return (Fp8Attention(quantiser, target.dtype, kernel, before, _place(target)),)


def fp8_quantiser(target: Target, rotations: Rotations) -> Fp8Quantiser:
    """Makes the quantizer of queries, keys and values on this target."""
    where = target.device.type
    if where in FP8.quantise:
        return Fp8Quantiser(rotations, target.load(FP8.quantise[where])(target), where)
    return Fp8Quantiser(rotations, device_type=where)


def _place(target: Target) -> Form:
    """Returns the layout of keys and values; devices without FP8 units get dequantized values."""
    if target.device.type == "npu":
        return placed_head_first
    inner = torch.float32 if target.device.type == "cpu" else target.dtype
    return lambda x: Payload(x.dequantised(inner))
