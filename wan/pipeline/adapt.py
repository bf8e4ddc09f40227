"""Transforms a DiT's layers and weights while they load: quantized layers, FP8, merged LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import nn

from wan.checkpoint.config import IN_BLOCKS
from wan.checkpoint.dequantise import TO_FLOAT
from wan.checkpoint.files import FP8, GGUF, TensorInfo, as_bytes
from wan.checkpoint.load import (
    DTYPES,
    Adapt,
    as_stored,
    int8_sources,
    kept_sources,
    lora_sources,
    merged,
)
from wan.checkpoint.lora import Change, changes_of
from wan.checkpoint.quantised import Export
from wan.checkpoint.source import Sources
from wan.device import Device
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.npu import linear as npu_linear
from wan.kernels.weight_only_linear import FP8Linear, WeightOnlyLinear
from wan.pipeline.setup import Setup


def adaptation(setup: Setup, name: str, device: Device, compute: torch.dtype) -> Adapt:
    """Returns the transform of an expert; `Setup` refuses LoRAs with quantized layers.

    Args:
        name: The expert.
        compute_dtype: The dtype of its matrix products.
    """
    if setup.quantised is not None:
        return quantised_layers(setup.quantised.experts[name], device, compute)

    def adapt(network: nn.Module, sources: Sources) -> Sources:
        kept = kept_layers(setup, name, device.type, network, compute)
        beside = {layer: changes for layer, (_, changes) in kept.items() if changes}
        weights = {f"{layer}.weight" for layer in kept}
        return {
            **merged(sources, setup.loras.get(name, ()), weights),
            **kept_sources({layer: info for layer, (info, _) in kept.items()}),
            **lora_sources(beside, compute),
        }

    return adapt


def kept_layers(
    setup: Setup, name: str, device_type: str, network: nn.Module, compute: torch.dtype
) -> dict[str, tuple[TensorInfo, list[Change]]]:
    """Replaces linear layers of the blocks by `KeptLinear`, which holds the stored weight.

    A layer is not replaced if a LoRA file contains a full weight for it: this is merged instead.

    Returns:
        Layer -> its weight in the file, and its LoRA changes.
    """
    kinds, tensors = setup.kept(device_type), setup.checkpoint.experts[name].tensors
    added = changes_of(setup.loras.get(name, ()))
    kept: dict[str, tuple[TensorInfo, list[Change]]] = {}
    for layer, module in list(network.named_modules()) if kinds else ():
        info = tensors.get(f"{layer}.weight")
        if not (isinstance(module, nn.Linear) and layer.startswith(IN_BLOCKS)):
            continue
        if (
            info is None
            or info.dtype not in kinds
            or info.shape[-1] % GGUF.get(info.dtype, (1, 1))[0]
        ):
            continue
        changes = added.get(f"{layer}.weight", [])
        if any(change.full is not None for change in changes):
            continue
        in_fp8 = setup.multiplies_fp8 and info.dtype in FP8 and not info.full_precision
        kind = FP8Linear if in_fp8 else WeightOnlyLinear
        network.set_submodule(layer, _empty(kind, info, module, changes, compute))
        kept[layer] = info, changes
    return kept


def _empty(
    kind: type[WeightOnlyLinear],
    info: TensorInfo,
    module: nn.Linear,
    changes: Sequence[Change],
    compute: torch.dtype,
) -> WeightOnlyLinear:
    """Makes a layer on the meta device."""
    weight, scale, lora = as_bytes(info), None, None
    if info.dtype in FP8:
        rows = 1 if info.scale is None else prod(info.scale.shape)
        scale = torch.empty(1 if rows == 1 else (rows, 1), device="meta")
    if changes:
        rank = sum(change.rank for change in changes)
        sizes = (module.out_features, rank), (rank, module.in_features)
        up, down = (torch.empty(size, dtype=compute, device="meta") for size in sizes)
        lora = up, down
    return kind(
        torch.empty(weight.shape, dtype=DTYPES[weight.dtype], device="meta"),
        TO_FLOAT[info.dtype],
        module.bias,
        in_features=module.in_features,
        scale=scale,
        lora=lora,
    )


def quantised_layers(export: Export, device: Device, compute: torch.dtype) -> Adapt:
    """Replaces a DiT's linear layers by the quantized layers of an export.

    On an NPU these are mindiesd's layers; on other devices `W8A8Linear`, the only algorithm that
    runs everywhere. The float weights of these layers are neither read nor allocated.

    Args:
        compute_dtype: The dtype of the layers' inputs and outputs; 16 bits on an NPU.
    """

    def on_npu(network: nn.Module, sources: Sources) -> Sources:
        npu_linear.quantize_npu_linears(
            network,
            export.description,
            export.linears,
            use_nz=export.use_nz,
            dtype=compute,
            device=device.torch_device,
        )
        return sources

    def anywhere(network: nn.Module, sources: Sources) -> Sources:
        for name, layer in export.linears.items():
            empty = {
                part: torch.empty(info.shape, device="meta") for part, info in layer.tensors.items()
            }
            made = W8A8Linear(
                empty["weight"].to(torch.int8),
                empty["weight_scale"],
                empty.get("bias"),
                empty.get("mul_scale"),
                dtype=compute,
                device_type=device.type,
            )
            network.set_submodule(name, made)
        return {**sources, **int8_sources(export, compute)}

    if not export.linears:
        return as_stored
    return on_npu if device.type == "npu" else anywhere
