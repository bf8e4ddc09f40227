"""Transforms a DiT's layers and weights while they load: quantized layers, FP8, merged LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from wan.checkpoint.formats.tensor_info import E4M3, FP8, TensorInfo, view_as_bytes
from wan.checkpoint.formats.tensor_source import TensorSources
from wan.checkpoint.load import (
    DTYPES,
    WeightTransform,
    keep_sources,
    open_int8_sources,
    open_weight_only_sources,
)
from wan.checkpoint.lora.deltas import WeightDelta, list_factor_shapes
from wan.checkpoint.lora.merge import merge_loras, open_lora_sources
from wan.checkpoint.quant.dequantise import TO_FLOAT
from wan.checkpoint.quant.w8a8_export import Export
from wan.device import Device
from wan.kernels.compiled_dequantise import CompiledDequantizer
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.npu import linear as npu_linear
from wan.kernels.weight_only_linear import FP8Linear, UpcastMemory, WeightOnlyLinear
from wan.modules.model import WanModel
from wan.pipeline.setup import Setup
from wan.pipeline.weight_sizes import find_unconverted_layers


def make_weight_transform(
    setup: Setup, name: str, device: Device, compute_dtype: torch.dtype
) -> WeightTransform:
    """Returns the transform of an expert; `Setup` refuses LoRAs with quantized layers.

    Args:
        name: The expert.
        compute_dtype: The dtype of its matrix products.
    """
    if setup.quantized_dit is not None:
        return make_quantized_transform(setup.quantized_dit.experts[name], device, compute_dtype)

    def transform(network: nn.Module, sources: TensorSources) -> TensorSources:
        assert isinstance(network, WanModel)
        layers = install_weight_only_linears(setup, name, device.type, network, compute_dtype)
        lora_changes = {layer: changes for layer, (_, changes) in layers.items() if changes}
        unmerged_weights = {f"{layer}.weight" for layer in layers}
        return {
            **merge_loras(sources, setup.loras.get(name, ()), unmerged_weights),
            **open_weight_only_sources({layer: info for layer, (info, _) in layers.items()}),
            **open_lora_sources(lora_changes, compute_dtype, sources),
        }

    return transform


def install_weight_only_linears(
    setup: Setup, name: str, device_type: str, network: WanModel, compute_dtype: torch.dtype
) -> dict[str, tuple[TensorInfo, list[WeightDelta]]]:
    """Replaces linear layers of the blocks by layers that hold the stored weights.

    Returns:
        Layer -> its weight in the file, and its LoRA changes.
    """
    layers, memory = find_unconverted_layers(setup, name, device_type), UpcastMemory()
    is_auto = setup.attention.fused_ops == ("auto",)
    dequantizer = CompiledDequantizer() if is_auto and device_type == "cpu" else None
    for layer, (info, changes) in layers.items():
        in_fp8 = setup.multiplies_fp8 and info.dtype == E4M3 and not info.full_precision
        linear_class = FP8Linear if in_fp8 else WeightOnlyLinear
        module: Any = network.get_submodule(layer)
        network.set_submodule(
            layer,
            _make_empty_linear(
                linear_class, info, module, changes, compute_dtype, memory, dequantizer
            ),
        )
    if layers:
        network.hold_weights = memory.hold
        network.register_forward_hook(memory.free)
    return layers


def _make_empty_linear(
    linear_class: type[WeightOnlyLinear],
    info: TensorInfo,
    module: nn.Linear,
    changes: Sequence[WeightDelta],
    compute_dtype: torch.dtype,
    memory: UpcastMemory,
    dequantizer: CompiledDequantizer | None,
) -> WeightOnlyLinear:
    """Makes a layer on the meta device."""
    weight, scale = view_as_bytes(info), None
    if info.dtype in FP8:
        scale = torch.empty(info.scale_shape, device="meta")
    lora = {
        name: torch.empty(shape, dtype=compute_dtype, device="meta")
        for name, shape in list_factor_shapes(changes).items()
    }
    return linear_class(
        torch.empty(weight.shape, dtype=DTYPES[weight.dtype], device="meta"),
        TO_FLOAT[info.dtype],
        module.bias,
        in_features=module.in_features,
        scale=scale,
        scale_block=info.scale_block,
        lora=lora,
        memory=memory,
        try_fill=None if dequantizer is None else partial(dequantizer.fill, info.dtype),
    )


def make_quantized_transform(
    export: Export, device: Device, compute_dtype: torch.dtype
) -> WeightTransform:
    """Replaces a DiT's linear layers by the quantized layers of an export.

    On an NPU these are mindiesd's layers; on other devices `W8A8Linear`, the only algorithm that
    runs everywhere. The float weights of these layers are neither read nor allocated.

    Args:
        compute_dtype: The dtype of the layers' inputs and outputs; 16 bits on an NPU.
    """

    def install_npu_linears(network: nn.Module, sources: TensorSources) -> TensorSources:
        npu_linear.quantize_npu_linears(
            network,
            export.description,
            export.linears,
            use_nz=export.use_nz,
            dtype=compute_dtype,
            device=device.torch_device,
        )
        return sources

    def install_int8_linears(network: nn.Module, sources: TensorSources) -> TensorSources:
        install_w8a8_linears(network, export, device.type, compute_dtype)
        return {**sources, **open_int8_sources(export, compute_dtype)}

    if not export.linears:
        return keep_sources
    return install_npu_linears if device.type == "npu" else install_int8_linears


def install_w8a8_linears(
    network: nn.Module, export: Export, device_type: str, compute_dtype: torch.dtype
) -> None:
    """Replaces the quantized linear layers by `W8A8Linear` on the meta device."""
    for name, layer in export.linears.items():
        meta_tensors = {
            key: torch.empty(info.shape, device="meta") for key, info in layer.tensors.items()
        }
        linear = W8A8Linear(
            meta_tensors["weight"].to(torch.int8),
            meta_tensors["weight_scale"],
            meta_tensors.get("bias"),
            meta_tensors.get("mul_scale"),
            dtype=compute_dtype,
            device_type=device_type,
        )
        network.set_submodule(name, linear)
