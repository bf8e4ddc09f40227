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

from wan.kernels.compiled_ops import MIN_ELEMENTS, MIN_WORK, CompiledOps
from wan.kernels.fp8 import (
    ConvertLayout,
    Fp8Attention,
    Fp8Quantizer,
    Rotations,
    keep_layout,
    make_hadamard_rotation,
    make_sylvester_rotation,
)
from wan.kernels.interfaces import (
    PLAIN_OPS,
    AttentionBackend,
    AttentionInput,
    Kernel,
    Load,
    SmallOps,
    Target,
)
from wan.kernels.npu.fp8 import make_bnsd_contiguous
from wan.kernels.rainfusion import RainFusionAttention
from wan.kernels.rainfusion_masks import make_window_order
from wan.settings.attention import Attention
from wan.settings.attention_modes import Grid
from wan.settings.kernels import FP8, RAINFUSION, SMALL_OPS, KernelRow

CheckpointRotations = Mapping[tuple[str, int], tuple[Tensor, Tensor]]
"""(expert, layer) -> rotations of queries and keys, from a quantized checkpoint."""


@dataclass(frozen=True)
class SelectedKernels:
    """The kernels and attention backends of a run.

    Attributes:
        device_type: Type of the device that computes.
        dense_kernel: Self-attention's kernel for calls to which no backend applies.
        cross_attention_kernel: Dense, as prompts are short.
        backends: The first that applies to a call computes it.
        layers: The (expert, layer) pairs that use `backends`; None: all.
        fallback: The backends of all other layers.
        token_order: Returns the token order of a grid; None: raster order.
        vendor_ops: The NPU vendor's kernels for small operations.
        compiled_ops: Runs small operations compiled by torch.compile; None: eagerly.
        fuses_gelu: GELU is computed in the product before it, where that is possible.
        frequency_cap: Context manager that caps an NPU's frequency during self-attention.
    """

    device_type: str
    dense_kernel: Kernel
    cross_attention_kernel: Kernel
    backends: tuple[AttentionBackend, ...] = ()
    layers: frozenset[tuple[str, int]] | None = None
    fallback: tuple[AttentionBackend, ...] = ()
    token_order: Callable[[Grid], Tensor] | None = None
    vendor_ops: SmallOps = PLAIN_OPS
    compiled_ops: CompiledOps | None = None
    fuses_gelu: bool = False
    frequency_cap: AbstractContextManager[object] | None = None

    def get_backends(self, expert: str, layer: int) -> tuple[AttentionBackend, ...]:
        """Returns the attention backends of a block."""
        uses_backends = self.layers is None or (expert, layer) in self.layers
        return self.backends if uses_backends else self.fallback

    def describe(self) -> str:
        """Names the backends, the fallback backends of the other layers, and the dense kernel.

        Names after a backend that always applies are left out.
        """
        candidates: list[AttentionBackend | Kernel] = [
            *self.backends,
            *self.fallback,
            self.dense_kernel,
        ]
        if self.layers is None:
            always = [i for i, backend in enumerate(self.backends) if backend.always_applies]
            candidates = candidates[: always[0] + 1] if always else candidates
        return ", else ".join(candidate.name for candidate in candidates)


def select_kernels(
    attention: Attention,
    target: Target,
    checkpoint_rotations: CheckpointRotations,
    compile_blocks: bool = False,
) -> SelectedKernels:
    """Selects the kernels and backends of a run whose settings have been checked.

    Args:
        checkpoint_rotations: Rotations of a quantized checkpoint; empty without one.
        compile_blocks: Blocks are compiled, so small operations are not compiled separately.

    Raises:
        ValueError: A kernel does not exist on the device, or fails a test run there.
    """
    device, load = target.device, target.load
    fused_op_names = device.capabilities.list_fused_ops(attention, compile_blocks)
    vendor_ops = PLAIN_OPS
    compiled_ops, frequency_cap = None, None
    if device.type == "npu":
        vendor_ops = make_vendor_ops(fused_op_names, load)
        if attention.fa_freq_cap is not None:
            frequency_cap = load("wan.kernels.npu.clock:FrequencyCap")(*attention.fa_freq_cap)
    elif fused_op_names:
        is_auto = attention.fused_ops == ("auto",)
        compiled_ops = load("wan.kernels.compiled_ops:CompiledOps")(
            fused_op_names,
            MIN_ELEMENTS if is_auto else 0,
            MIN_WORK if is_auto and device.type == "cpu" else 0,
        )
    return SelectedKernels(
        device.type,
        dense_kernel=make_dense_kernel(attention, target),
        cross_attention_kernel=make_dense_kernel(_select_for_prompts(attention), target),
        backends=(
            *_make_rainfusion_backends(attention, target, checkpoint_rotations),
            *_make_fp8_backends(attention, target, checkpoint_rotations),
        ),
        layers=frozenset(checkpoint_rotations) if checkpoint_rotations else None,
        fallback=_make_rainfusion_backends(replace(attention, fa_quant="none"), target, {})
        if checkpoint_rotations
        else (),
        token_order=make_window_order if attention.use_rainfusion else None,
        vendor_ops=vendor_ops,
        compiled_ops=compiled_ops,
        fuses_gelu="gelu" in fused_op_names,
        frequency_cap=frequency_cap,
    )


def _select_for_prompts(attention: Attention) -> Attention:
    """Returns the settings of cross-attention: PyTorch's kernel if it is selected, else auto.

    The prompt is too short for sparse or quantizing attention to pay off.
    """
    backend = attention.attention_backend
    return Attention(attention_backend="sdpa" if backend == "sdpa" else "auto")


def make_vendor_ops(fused_op_names: Collection[str], load: Load = resolve_name) -> SmallOps:
    """Replaces the named small operations by the NPU vendor's; the others stay PyTorch's."""
    ops = PLAIN_OPS
    for name, row in SMALL_OPS.items():
        if name in fused_op_names:
            ops = load(row.factories["npu"])(ops, load)
    return ops


def make_dense_kernel(attention: Attention, target: Target) -> Kernel:
    """Makes the dense kernel that the settings select; one of xfuser is test-run on the device."""
    kernel: Kernel = _make_kernel(
        attention.dense_kernel, replace(target, dense_row=attention.dense_kernel)
    )
    return kernel


def _make_kernel(row: KernelRow, target: Target) -> Any:
    """Makes the kernel of a row of the table; ValueError if the device does not have it."""
    capabilities = target.device.capabilities
    if not capabilities.has_kernel(row):
        raise ValueError(f"There is no kernel {row.name!r} on this device ({capabilities.name}).")
    return target.load(row.factories[capabilities.type])(target)


def _make_rainfusion_backends(
    attention: Attention, target: Target, checkpoint_rotations: CheckpointRotations
) -> tuple[AttentionBackend, ...]:
    if not attention.use_rainfusion:
        return ()
    rainfusion_type, sparse_start = attention.rainfusion_type, attention.sparse_start_step
    quantizer = None
    if attention.fp8:
        quantizer = make_fp8_quantizer(
            target, Rotations(target.head_dim, make_sylvester_rotation, checkpoint_rotations)
        )
    backend = RainFusionAttention(
        rainfusion_type,
        attention.sparsity,
        attention.resolve_sparse_start_step if sparse_start is None else sparse_start,
        attention.mask_refresh_interval,
        kernel=_make_kernel(RAINFUSION[rainfusion_type], target),
        quantizer=quantizer,
        convert_layout=_select_layout_conversion(target)
        if RAINFUSION[rainfusion_type].has_fp8
        else keep_layout,
    )
    return (backend,)


def _make_fp8_backends(
    attention: Attention, target: Target, checkpoint_rotations: CheckpointRotations
) -> tuple[AttentionBackend, ...]:
    if not attention.fp8:
        return ()
    quantizer = make_fp8_quantizer(
        target, Rotations(target.head_dim, make_hadamard_rotation, checkpoint_rotations)
    )
    kernel, quantize_before_exchange = _make_kernel(FP8, target), attention.quant_alltoall
    return (
        Fp8Attention(
            quantizer,
            target.dtype,
            kernel,
            quantize_before_exchange,
            _select_layout_conversion(target),
        ),
    )


def make_fp8_quantizer(target: Target, rotations: Rotations) -> Fp8Quantizer:
    """Makes the quantizer of queries, keys and values on this target."""
    device_type = target.device.type
    if device_type in FP8.quantizers:
        return Fp8Quantizer(
            rotations, target.load(FP8.quantizers[device_type])(target), device_type
        )
    return Fp8Quantizer(rotations, device_type=device_type)


def _select_layout_conversion(target: Target) -> ConvertLayout:
    """Returns the function that converts keys and values for a kernel.

    Only NPU kernels take quantized keys and values; for other devices they are dequantized.
    """
    if target.device.type == "npu":
        return make_bnsd_contiguous
    compute_dtype = torch.float32 if target.device.type == "cpu" else target.dtype
    return lambda x: AttentionInput(x.dequantize(compute_dtype))
