"""A method for some layers of some networks.

The attention of a run: what was asked for, made of what the device has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wan.device import Device
from wan.kernels.base import AttendRows, Call, Kernel, Method
from wan.kernels.fp8 import (
    Fp8Attend,
    Fp8Attention,
    Fp8Quantiser,
    Place,
    Rotations,
    attend_dequantised,
    hadamard,
    plain,
    sylvester,
    unplaced,
)
from wan.kernels.rainfusion import BlockSparseKernel, RainFusionAttention, reference_blocks
from wan.kernels.rainfusion_masks import window_order
from wan.kernels.sdpa import SdpaKernel
from wan.modules import schedule
from wan.modules.blocks import PLAIN, SmallOps
from wan.settings.attention import Attention, RainFusion
from wan.settings.parallel import Parallel


class OnLayers:
    """Implements `wan.kernels.base.Method`: another one, where it applies and the layer is listed.

    layers: (expert, index of the block).
    """

    def __init__(self, method: Method, layers: Collection[tuple[str, int]]) -> None:
        self._method, self._layers = method, frozenset(layers)
        self.name, self.q_multiple = method.name, method.q_multiple

    def applies(self, call: Call | None) -> bool:
        if call is None:
            raise ValueError(f"{self.name} serves some layers only: pass step and layer.")
        return (call.expert, call.layer) in self._layers and self._method.applies(call)

    def pack(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, valid: int, call: Call | None
    ) -> Sequence[Any]:
        return self._method.pack(q_BsND, k_BsND, v_BsND, valid, call)

    def prepare(self, q: Any, k: Any, v: Any, call: Call | None) -> AttendRows:
        return self._method.prepare(q, k, v, call)


Exported = Mapping[tuple[str, int], tuple[Tensor, Tensor]]
"""(expert, layer) -> rotations of its queries and keys, as a quantised checkpoint brings them."""


@dataclass(frozen=True)
class AttentionParts:
    """What the blocks are given.

    dense: self-attention's kernel where none of `methods` applies. text: that of cross-attention.
    order: in which tokens stand, None: as in the raster. clock: entered around self-attention.
    """

    dense: Kernel
    text: Kernel
    methods: tuple[Method, ...] = ()
    order: Callable[[tuple[int, int, int]], Tensor] | None = None
    ops: SmallOps = PLAIN
    clock: AbstractContextManager[Any] | None = None


def parts(
    attention: Attention,
    device: Device,
    head_dim: int,
    dtype: torch.dtype,
    exported: Exported,
) -> AttentionParts:
    """The parts for a checked run. dtype: of q, k, v. exported: empty without a quantised one."""
    fp8 = _methods_fp8(attention, device, head_dim, dtype, exported)
    rain = _methods_rain(attention, device, head_dim, dtype, exported)
    order = window_order if attention.rainfusion is not None else None
    if device.chip is None:
        return AttentionParts(SdpaKernel(), SdpaKernel(), (*rain, *fp8), order)
    from wan.kernels.npu import clock as npu_clock
    from wan.kernels.npu import dense as npu
    from wan.kernels.npu import small_ops as npu_ops

    text = npu.FusedKernel()
    cap = attention.freq_cap
    return AttentionParts(
        dense=npu.LaserKernel(device.chip) if attention.algorithm == "laser" else text,
        text=text,  # texts are too short for the laser kernel
        methods=(*rain, *fp8),
        order=order,
        ops=SmallOps(**npu_ops.fused(attention.fused_ops)),
        clock=None if cap is None else npu_clock.FrequencyCap(cap, attention.freq_restore),
    )


def _methods_fp8(
    attention: Attention, device: Device, head_dim: int, dtype: torch.dtype, exported: Exported
) -> list[Method]:
    if attention.fa_quant is None:
        return []
    quantiser = _quantiser(device, Rotations(head_dim, hadamard, exported))
    attend: Fp8Attend = attend_dequantised
    if device.chip is not None:
        from wan.kernels.npu.fp8 import NpuFp8Attention

        attend = NpuFp8Attention(device.chip)
    place = _place(device, dtype)
    method = Fp8Attention(quantiser, dtype, attend, attention.quant_alltoall, place)
    return [OnLayers(method, exported)] if exported else [method]


def _methods_rain(
    attention: Attention, device: Device, head_dim: int, dtype: torch.dtype, exported: Exported
) -> list[Method]:
    rain = attention.rainfusion
    if rain is None:
        return []
    kernel = _block_sparse(rain, device, dtype)
    place = unplaced if rain.type == "v2" else _place(device, dtype)

    def method(quantiser: Fp8Quantiser | None) -> RainFusionAttention:
        return RainFusionAttention(
            rain.type,
            rain.sparsity,
            rain.start_step,
            rain.refresh,
            attend_blocks=kernel,
            quantiser=quantiser,
            place=place,
        )

    if attention.fa_quant is None:
        return [method(None)]
    quantised = method(_quantiser(device, Rotations(head_dim, sylvester, exported)))
    return [OnLayers(quantised, exported), method(None)] if exported else [quantised]


def _quantiser(device: Device, rotations: Rotations) -> Fp8Quantiser:
    if device.chip is None:
        return Fp8Quantiser(rotations)
    from wan.kernels.npu.fp8 import NpuBlockQuantise

    return Fp8Quantiser(rotations, NpuBlockQuantise(device.chip))


def _place(device: Device, dtype: torch.dtype) -> Place:
    """Devices without FP8 units compute with the numbers that FP8 stands for."""
    if device.chip is None:
        inner = torch.float32 if device.type == "cpu" else dtype
        return partial(plain, dtype=inner)
    from wan.kernels.npu.fp8 import placed_head_first

    return placed_head_first


def _block_sparse(rain: RainFusion, device: Device, dtype: torch.dtype) -> BlockSparseKernel:
    if device.chip is not None:
        from wan.kernels.npu import block_sparse as npu_sparse

        if rain.type == "v2":
            return npu_sparse.RainKernelV2(device.chip)
        return npu_sparse.RainKernelV3(device.chip)
    if device.type == "cuda":
        from wan.kernels.flex import FlexBlocks

        return FlexBlocks(device.torch_device, dtype)
    return reference_blocks


def line(attention: Attention, parallel: Parallel, heads: int, dense: Kernel) -> str:
    """How self-attention is carried out, in one line."""
    limit = 1 if parallel.mode == "baseline" else schedule.MAX_CHUNKS
    sizes = schedule.heads_per_chunk(heads, parallel.ulysses_size, limit)
    heads_each = "/".join(str(size) for size in sorted(set(sizes), reverse=True))
    ring = f" ({parallel.ring_type})" if parallel.ring_size > 1 else ""
    return (
        f"Attention: {parallel.mode}, {len(sizes)} x {heads_each} heads per rank; ulysses "
        f"{parallel.ulysses_size} x ring {parallel.ring_size}{ring} x cfg {parallel.cfg_size}; "
        f"kernel {dense.name}, {words(attention)}{_gathers(attention, parallel, dense)}"
    )


def words(attention: Attention) -> str:
    """Quantisation and sparsity in words."""
    quantised = "no quantisation"
    if attention.fa_quant is not None:
        quantised = f"{attention.fa_quant} attention"
        quantised += " and exchanges" if attention.quant_alltoall else ""
    rain = attention.rainfusion
    if rain is None:
        return f"{quantised}, no sparsity"
    kept = f", masks for {rain.refresh} steps" if rain.refresh > 1 else ""
    return (
        f"{quantised}, RainFusion {rain.type} of sparsity {rain.sparsity:g} from step "
        f"{rain.start_step}{kept}"
    )


def _gathers(attention: Attention, parallel: Parallel, dense: Kernel) -> str:
    """Whose keys and values are gathered over the ring instead of passed round."""
    found = [
        name
        for name, without_lse in (
            ("RainFusion", attention.rainfusion is not None),
            ("fp8 attention", attention.fa_quant is not None),
            (dense.name, attention.fa_quant is None and not dense.can_return_lse),
        )
        if without_lse
    ]
    if parallel.ring_size == 1 or not found:
        return ""
    return f"; K/V are gathered over the ring for {' and '.join(found)} (no log-sum-exp)"
