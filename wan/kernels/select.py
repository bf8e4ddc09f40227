"""Which kernels and methods a run's attention is made of: what was asked for, on what is there.

A new dense kernel is its own file and a row of `DENSE`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from wan.device import Device
from wan.kernels.base import (
    PLAIN,
    QKV,
    AttendRows,
    Grid,
    Kernel,
    Method,
    Payload,
    SmallOps,
    StepInfo,
)
from wan.kernels.flex import FlexBlocks
from wan.kernels.fp8 import (
    DEQUANTISED,
    Fp8Attention,
    Fp8Kernel,
    Fp8Quantiser,
    Place,
    Rotations,
    as_they_are,
    hadamard,
    sylvester,
)
from wan.kernels.npu.block_sparse import RainKernelV2, RainKernelV3
from wan.kernels.npu.clock import FrequencyCap
from wan.kernels.npu.dense import FusedKernel, LaserKernel
from wan.kernels.npu.fp8 import NpuBlockQuantise, NpuFp8Attention, placed_head_first
from wan.kernels.npu.small_ops import fused
from wan.kernels.rainfusion import REFERENCE, BlockSparseKernel, RainFusionAttention
from wan.kernels.rainfusion_masks import window_order
from wan.kernels.sdpa import SdpaKernel
from wan.settings.attention import Attention

Exported = Mapping[tuple[str, int], tuple[Tensor, Tensor]]
"""(expert, layer) -> rotations of its queries and keys, as a quantised checkpoint brings them."""


# (--attention_algo, device type) -> what makes the kernel.
DENSE: dict[tuple[str, str], Callable[[Device], Kernel]] = {
    ("fused", "cpu"): lambda device: SdpaKernel(device.type),
    ("fused", "cuda"): lambda device: SdpaKernel(device.type),
    ("fused", "npu"): lambda device: FusedKernel(),
    ("laser", "npu"): lambda device: LaserKernel(device.can),
}


@dataclass(frozen=True)
class Selected:
    """What computes attention in a run.

    Attributes:
        dense: Self-attention's kernel where none of `methods` applies.
        text: Cross-attention's kernel.
        methods: In the order in which they are asked.
        order: The order of the tokens of a grid; None: raster order.
        ops: Fused small operations.
        clock: Entered around self-attention.
    """

    dense: Kernel
    text: Kernel
    methods: tuple[Method, ...] = ()
    order: Callable[[Grid], Tensor] | None = None
    ops: SmallOps = PLAIN
    clock: AbstractContextManager[object] | None = None

    def describe(self) -> str:
        """What computes self-attention; of several, the first that applies to a call."""
        return ", else ".join(part.name for part in self._asked())

    def _asked(self) -> Iterator[Method | Kernel]:
        for method in self.methods:
            yield method
            if method.is_total:
                return
        yield self.dense


def select(
    attention: Attention,
    device: Device,
    head_dim: int,
    dtype: torch.dtype,
    exported: Exported,
) -> Selected:
    """What a checked run needs.

    Args:
        attention: What was asked for.
        device: Where it runs.
        head_dim: Channels of a head.
        dtype: Of q, k, v.
        exported: Rotations of a quantised checkpoint; empty without one.

    Raises:
        ValueError: A kernel does not exist on the device.
    """
    npu, cap = device.type == "npu", attention.fa_freq_cap
    return Selected(
        dense=_dense(attention.attention_algo, device),
        text=_dense("fused", device),  # texts are too short for the laser kernel
        methods=(
            *_rainfusion(attention, device, head_dim, dtype, exported),
            *_fp8(attention, device, head_dim, dtype, exported),
        ),
        order=window_order if attention.use_rainfusion else None,
        ops=fused(attention.fused_ops) if npu else PLAIN,
        clock=FrequencyCap(cap, attention.fa_freq_restore) if npu and cap is not None else None,
    )


def _dense(algorithm: str, device: Device) -> Kernel:
    if (algorithm, device.type) not in DENSE:
        known = ", ".join(f"{name} on {where}" for name, where in DENSE)
        raise ValueError(
            f"There is no dense kernel {algorithm!r} on a {device.type} device; there are {known}."
        )
    return DENSE[algorithm, device.type](device)


def _rainfusion(
    attention: Attention, device: Device, head_dim: int, dtype: torch.dtype, exported: Exported
) -> list[Method]:
    if not attention.use_rainfusion:
        return []
    kind, given = attention.rainfusion_type, attention.sparse_start_step
    kernel = _block_sparse(kind, device, dtype)
    place = as_they_are if kind == "v2" else _place(device, dtype)

    def method(quantiser: Fp8Quantiser | None) -> RainFusionAttention:
        return RainFusionAttention(
            kind,
            attention.sparsity,
            attention.start_step if given is None else given,
            attention.mask_refresh_interval,
            kernel=kernel,
            quantiser=quantiser,
            place=place,
        )

    if not attention.fp8:
        return [method(None)]
    quantised = method(_quantiser(device, Rotations(head_dim, sylvester, exported)))
    return [OnLayers(quantised, exported), method(None)] if exported else [quantised]


def _fp8(
    attention: Attention, device: Device, head_dim: int, dtype: torch.dtype, exported: Exported
) -> list[Method]:
    if not attention.fp8:
        return []
    method = Fp8Attention(
        _quantiser(device, Rotations(head_dim, hadamard, exported)),
        dtype,
        _fp8_kernel(device),
        attention.quant_alltoall,
        _place(device, dtype),
    )
    return [OnLayers(method, exported)] if exported else [method]


def _block_sparse(kind: str, device: Device, dtype: torch.dtype) -> BlockSparseKernel:
    if device.type == "npu":
        return RainKernelV2(device.can) if kind == "v2" else RainKernelV3(device.can)
    return FlexBlocks(device.torch_device, dtype) if device.type == "cuda" else REFERENCE


def _fp8_kernel(device: Device) -> Fp8Kernel:
    return NpuFp8Attention(device.can) if device.type == "npu" else DEQUANTISED


def _quantiser(device: Device, rotations: Rotations) -> Fp8Quantiser:
    if device.type == "npu":
        return Fp8Quantiser(rotations, NpuBlockQuantise(device.can))
    return Fp8Quantiser(rotations)


def _place(device: Device, dtype: torch.dtype) -> Place:
    """Devices without FP8 units compute with what the FP8 values stand for."""
    if device.type == "npu":
        return placed_head_first
    inner = torch.float32 if device.type == "cpu" else dtype
    return lambda x: Payload(x.dequantised(inner))


class OnLayers:
    """Implements `wan.kernels.base.Method`: another one, where it applies and the layer is listed.

    layers: (expert, index of the block).
    """

    is_total = False

    def __init__(self, method: Method, layers: Collection[tuple[str, int]]) -> None:
        self._method, self._layers = method, frozenset(layers)
        self.name, self.q_multiple = method.name, method.q_multiple

    def applies(self, step: StepInfo | None) -> bool:
        if step is None or step.layer is None:
            raise ValueError(f"{self.name} serves some layers only: pass step and layer.")
        return (step.expert, step.layer) in self._layers and self._method.applies(step)

    def pack(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, valid: int, step: StepInfo | None
    ) -> QKV:
        return self._method.pack(q_BsND, k_BsND, v_BsND, valid, step)

    def prepare(self, q: Payload, k: Payload, v: Payload, step: StepInfo | None) -> AttendRows:
        return self._method.prepare(q, k, v, step)
