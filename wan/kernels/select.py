"""Which kernels and methods a run's attention is made of: what was asked for, on what is there.

A new dense kernel is its own file and a row of `DENSE`; xfuser's are rows of
`wan.settings.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wan.kernels.base import (
    PLAIN,
    Grid,
    Kernel,
    Method,
    Payload,
    SmallOps,
    Target,
)
from wan.kernels.compiled_ops import Compiled
from wan.kernels.fp8 import (
    DequantisedAttention,
    Fp8Attention,
    Fp8Kernel,
    Fp8Quantiser,
    Place,
    Rotations,
    as_they_are,
    hadamard,
    sylvester,
)
from wan.kernels.npu import small_ops
from wan.kernels.npu.fp8 import placed_head_first
from wan.kernels.rainfusion import REFERENCE, BlockSparseKernel, RainFusionAttention
from wan.kernels.rainfusion_masks import window_order
from wan.settings.attention import Attention

Exported = Mapping[tuple[str, int], tuple[Tensor, Tensor]]
"""(expert, layer) -> rotations of its queries and keys, as a quantised checkpoint brings them."""


_SDPA, _CUDA = "wan.kernels.sdpa:SdpaKernel", "wan.kernels.sdpa:on_cuda"
# (--attention_algo or one of PyTorch's own --attention_backend, device type) -> what makes the
# kernel for a target.
DENSE = {
    ("fused", "cpu"): _SDPA,
    ("fused", "cuda"): _CUDA,
    ("fused", "npu"): "wan.kernels.npu.dense:FusedKernel",
    ("laser", "npu"): "wan.kernels.npu.dense:LaserKernel",
    ("sdpa", "cpu"): _SDPA,
    ("sdpa", "cuda"): "wan.kernels.sdpa:sdpa_on_cuda",
    ("sdpa", "npu"): _SDPA,
    ("cudnn", "cuda"): "wan.kernels.sdpa:by_cudnn",
}


@dataclass(frozen=True)
class Selected:
    """What computes attention in a run.

    Attributes:
        device_type: Of the device that computes.
        dense: Self-attention's kernel where none of `methods` applies.
        text: Cross-attention's kernel.
        methods: In the order in which they are asked.
        listed: The (expert, layer) that `methods` serve; None: all.
        otherwise: The methods of the other layers.
        order: The order of the tokens of a grid; None: raster order.
        ops: Small operations that are a vendor's kernels.
        run: Carries out the small operations of a block; None: as they are written.
        clock: Entered around self-attention.
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
        """The methods of a block's self-attention."""
        is_listed = self.listed is None or (expert, layer) in self.listed
        return self.methods if is_listed else self.otherwise

    def describe(self) -> str:
        """What computes self-attention; of several, the first that applies to a call."""
        asked: list[Method | Kernel] = [*self.methods, *self.otherwise, self.dense]
        if self.listed is None:
            total = [i for i, method in enumerate(self.methods) if method.is_total]
            asked = asked[: total[0] + 1] if total else asked
        return ", else ".join(part.name for part in asked)


def select(
    attention: Attention, target: Target, exported: Exported, compiled: bool = False
) -> Selected:
    """What a checked run needs.

    Args:
        attention: What was asked for.
        target: What the kernels are built for.
        exported: Rotations of a quantised checkpoint; empty without one.
        compiled: Whole blocks are compiled.

    Raises:
        ValueError: A kernel does not exist on the device, or does not compute there.
    """
    device, load, cap = target.device, target.load, attention.fa_freq_cap
    names, ops, run, clock = device.can.fused(attention, compiled), PLAIN, None, None
    if device.type == "npu":
        ops = small_ops.fused(names, load)
        if cap is not None:
            clock = load("wan.kernels.npu.clock:FrequencyCap")(cap, attention.fa_freq_restore)
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


def dense(attention: Attention, target: Target) -> Kernel:
    """Self-attention's dense kernel, tried where it is xfuser's; see `select`."""
    backend, where = attention.backend, target.device.type
    if backend.member is not None:
        kernel: Kernel = target.load("wan.kernels.xfuser:kernel")(backend, target)
        return kernel
    name = attention.attention_algo if backend.name == "auto" else backend.name
    if (name, where) not in DENSE:
        known = ", ".join(f"{name} on {where}" for name, where in DENSE)
        raise ValueError(
            f"There is no dense kernel {name!r} on a {where} device; there are {known}."
        )
    made: Kernel = target.load(DENSE[name, where])(target)
    return made


def _rainfusion(attention: Attention, target: Target, exported: Exported) -> tuple[Method, ...]:
    if not attention.use_rainfusion:
        return ()
    kind, start = attention.rainfusion_type, attention.sparse_start_step
    quantiser = None
    if attention.fp8:
        quantiser = _quantiser(target, Rotations(target.head_dim, sylvester, exported))
    method = RainFusionAttention(
        kind,
        attention.sparsity,
        attention.start_step if start is None else start,
        attention.mask_refresh_interval,
        kernel=_block_sparse(kind, target),
        quantiser=quantiser,
        place=as_they_are if kind == "v2" else _place(target),
    )
    return (method,)


def _fp8(attention: Attention, target: Target, exported: Exported) -> tuple[Method, ...]:
    if not attention.fp8:
        return ()
    kernel: Fp8Kernel = DequantisedAttention(target.device.type)
    if target.device.type == "npu":
        kernel = target.load("wan.kernels.npu.fp8:NpuFp8Attention")(target)
    quantiser = _quantiser(target, Rotations(target.head_dim, hadamard, exported))
    place, before = _place(target), attention.quant_alltoall
    return (Fp8Attention(quantiser, target.dtype, kernel, before, place),)


def _block_sparse(kind: str, target: Target) -> BlockSparseKernel:
    makers = {
        "npu": f"wan.kernels.npu.block_sparse:RainKernelV{kind[1:]}",
        "cuda": "wan.kernels.flex:FlexBlocks",
    }
    if target.device.type not in makers:
        return REFERENCE
    kernel: BlockSparseKernel = target.load(makers[target.device.type])(target)
    return kernel


def _quantiser(target: Target, rotations: Rotations) -> Fp8Quantiser:
    if target.device.type == "npu":
        quantise = target.load("wan.kernels.npu.fp8:NpuBlockQuantise")(target)
        return Fp8Quantiser(rotations, quantise, "npu")
    return Fp8Quantiser(rotations, device_type=target.device.type)


def _place(target: Target) -> Place:
    """Devices without FP8 units compute with what the FP8 values stand for."""
    if target.device.type == "npu":
        return placed_head_first
    inner = torch.float32 if target.device.type == "cpu" else target.dtype
    return lambda x: Payload(x.dequantised(inner))
