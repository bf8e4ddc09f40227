"""Which kernels and methods a run's attention is made of: what was asked for, on what is there.

A new dense kernel is its own file and a row of `DENSE`; xfuser's are rows of
`wan.settings.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from wan.device import Device
from wan.kernels import xfuser
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
from wan.kernels.compiled_ops import Compiled
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
from wan.kernels.npu import small_ops
from wan.kernels.npu.block_sparse import RainKernelV2, RainKernelV3
from wan.kernels.npu.clock import FrequencyCap
from wan.kernels.npu.dense import FusedKernel, LaserKernel
from wan.kernels.npu.fp8 import NpuBlockQuantise, NpuFp8Attention, placed_head_first
from wan.kernels.rainfusion import REFERENCE, BlockSparseKernel, RainFusionAttention
from wan.kernels.rainfusion_masks import window_order
from wan.kernels.sdpa import PlannedKernel, SdpaKernel, by_cudnn, on_cuda
from wan.settings.attention import Attention

Exported = Mapping[tuple[str, int], tuple[Tensor, Tensor]]
"""(expert, layer) -> rotations of its queries and keys, as a quantised checkpoint brings them."""


# (--attention_algo or one of PyTorch's own --attention_backend, device type) -> what makes the
# kernel for a device, heads of so many channels, and a dtype.
DENSE: dict[tuple[str, str], Callable[[Device, int, torch.dtype], Kernel]] = {
    ("fused", "cpu"): lambda device, head, dtype: SdpaKernel(device.type),
    ("fused", "cuda"): lambda device, head, dtype: on_cuda(device.torch_device, dtype, head),
    ("fused", "npu"): lambda device, head, dtype: FusedKernel(),
    ("laser", "npu"): lambda device, head, dtype: LaserKernel(device.can),
    ("sdpa", "cpu"): lambda device, head, dtype: SdpaKernel(device.type),
    ("sdpa", "cuda"): lambda device, head, dtype: on_cuda(device.torch_device, dtype, head, False),
    ("sdpa", "npu"): lambda device, head, dtype: SdpaKernel(device.type),
    ("cudnn", "cuda"): lambda device, head, dtype: by_cudnn(device.torch_device, head),
}


@dataclass(frozen=True)
class Selected:
    """What computes attention in a run.

    Attributes:
        dense: Self-attention's kernel where none of `methods` applies.
        text: Cross-attention's kernel.
        methods: In the order in which they are asked.
        order: The order of the tokens of a grid; None: raster order.
        ops: Small operations that are a vendor's kernels.
        run: Carries out the small operations of a block; None: as they are written.
        clock: Entered around self-attention.
    """

    dense: Kernel
    text: Kernel
    methods: tuple[Method, ...] = ()
    order: Callable[[Grid], Tensor] | None = None
    ops: SmallOps = PLAIN
    run: Compiled | None = None
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
    compiled: bool = False,
) -> Selected:
    """What a checked run needs.

    Args:
        attention: What was asked for.
        device: Where it runs.
        head_dim: Channels of a head.
        dtype: Of q, k, v.
        exported: Rotations of a quantised checkpoint; empty without one.
        compiled: Whole blocks are compiled.

    Raises:
        ValueError: A kernel does not exist on the device, or does not compute there.
    """
    npu, cap = device.type == "npu", attention.fa_freq_cap
    fused = device.can.fused(attention, compiled)
    return Selected(
        dense=dense(attention, device, head_dim, dtype),
        text=dense(Attention(), device, head_dim, dtype),  # too short for any other kernel
        methods=(
            *_rainfusion(attention, device, head_dim, dtype, exported),
            *_fp8(attention, device, head_dim, dtype, exported),
        ),
        order=window_order if attention.use_rainfusion else None,
        ops=small_ops.fused(fused) if npu else PLAIN,
        run=_compiled(attention, device, fused),
        clock=FrequencyCap(cap, attention.fa_freq_restore) if npu and cap is not None else None,
    )


def dense(attention: Attention, device: Device, head_dim: int, dtype: torch.dtype) -> Kernel:
    """Self-attention's dense kernel, tried where it is xfuser's; see `select`."""
    backend = attention.backend
    name = attention.attention_algo if backend.name == "auto" else backend.name
    if backend.member is None and (name, device.type) not in DENSE:
        known = ", ".join(f"{name} on {where}" for name, where in DENSE)
        raise ValueError(
            f"There is no dense kernel {name!r} on a {device.type} device; there are {known}."
        )
    if device.torch_device.type == "meta":  # a plan: neither a GPU nor xfuser is asked
        if backend.member is not None:
            return PlannedKernel(f"{backend.name} backend", backend.has_lse)
        if device.type == "cuda":
            return SdpaKernel(device.type)
    if backend.member is not None:
        return xfuser.load(backend, device.torch_device, head_dim, dtype)
    return DENSE[name, device.type](device, head_dim, dtype)


def _compiled(attention: Attention, device: Device, names: Collection[str]) -> Compiled | None:
    if device.torch_device.type not in ("cpu", "cuda") or not names:  # a plan compiles nothing
        return None
    return Compiled(names) if attention.fused_ops == ("auto",) else Compiled(names, least=0)


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
