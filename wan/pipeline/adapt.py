"""What a DiT's layers and weights become while they are loaded: quantised, FP8, merged."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import nn

from wan.checkpoint.files import FP8, TensorInfo
from wan.checkpoint.load import Adapt, Sources, as_stored, fp8_sources, int8_sources, merged
from wan.checkpoint.quantised import Export
from wan.device import Device
from wan.kernels.fp8_linear import Fp8Linear
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.npu import linear as npu_linear
from wan.pipeline.setup import Setup


def adaptation(setup: Setup, name: str, device: Device, compute: torch.dtype) -> Adapt:
    """Returns how an expert is adapted; `Setup` refuses more than one of the three at once.

    Args:
        setup: The checkpoint and the settings.
        name: The expert.
        device: Where it runs.
        compute: The dtype of its matrix products.
    """
    if setup.quantised is not None:
        return quantised_layers(setup.quantised.experts[name], device, compute)
    loras = setup.loras.get(name, ())
    if loras:
        return lambda _, sources: merged(sources, loras)
    if setup.keeps_fp8(device.type):
        tensors = setup.checkpoint.experts[name].tensors
        return lambda network, sources: keep_fp8(tensors, network, sources)
    return as_stored


def keep_fp8(tensors: Mapping[str, TensorInfo], network: nn.Module, sources: Sources) -> Sources:
    """Puts `Fp8Linear` in the place of the blocks' linear layers that the files have in FP8."""
    kept: dict[str, TensorInfo] = {}
    for layer, module in list(network.named_modules()):
        info = tensors.get(f"{layer}.weight")
        if not (isinstance(module, nn.Linear) and layer.startswith("blocks.")):
            continue
        if info is None or info.dtype not in FP8:
            continue
        rows = 1 if info.scale is None else prod(info.scale.shape)
        scale = torch.empty(1 if rows == 1 else (rows, 1), device="meta")
        weight = torch.empty(info.shape, dtype=torch.float8_e4m3fn, device="meta")
        network.set_submodule(layer, Fp8Linear(weight, scale, module.bias))
        kept[layer] = info
    return {**sources, **fp8_sources(kept)}


def quantised_layers(export: Export, device: Device, compute: torch.dtype) -> Adapt:
    """Puts the layers of an export in the place of a DiT's linear layers.

    On an NPU they are mindiesd's, elsewhere our reference of the one algorithm that runs
    everywhere. The float weights of these layers are neither read nor given memory.

    Args:
        export: The quantised layers of the network.
        device: Where it runs.
        compute: What goes into the layers and comes out; 16 bits on an NPU.
    """

    def on_npu(network: nn.Module, sources: Sources) -> Sources:
        npu_linear.quantise(
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
