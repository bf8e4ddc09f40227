"""LoRA files for tests, and the weights that are merged with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lycoris.modules.glora import GLoRAModule
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from safetensors.torch import save_file
from torch import Tensor, nn

from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora.merge import merge_loras
from wan.checkpoint.lora.resolve import resolve_loras
from wan.checkpoint.names.keymaps import rename_dit_to_diffusers
from wan.settings.command import Loras

Q = "blocks.0.self_attn.q"
A, B = torch.ones(2, 96), torch.ones(96, 2)
PAIR = {f"{Q}.lora_down.weight": A, f"{Q}.lora_up.weight": B}
LINEARS = (Q, "blocks.1.cross_attn.o", "blocks.0.ffn.0", "blocks.1.ffn.2")
CONVOLUTION = "patch_embedding"
LYCORIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "LoRA": (LoConModule, {}),
    "rsLoRA": (LoConModule, {"rs_lora": True}),
    "DoRA": (LoConModule, {"weight_decompose": True}),
    "LoHa": (LohaModule, {}),
    "LoHa, DoRA": (LohaModule, {"weight_decompose": True}),
    "LoKr": (LokrModule, {}),
    "LoKr of 4": (LokrModule, {"factor": 4}),
    "LoKr, whole": (LokrModule, {"factor": 8, "full_matrix": True}),
    "LoKr, factorised": (LokrModule, {"factor": 8, "decompose_both": True}),
    "LoKr, unbalanced": (LokrModule, {"factor": 4, "unbalanced_factorization": True}),
    "GLoRA": (GLoRAModule, {}),
    "LoKr, DoRA": (LokrModule, {"weight_decompose": True}),
}
"""Kind -> LyCORIS' class and its arguments."""


def rename_to_diffusers(layer: str) -> str:
    return rename_dit_to_diffusers(f"{layer}.weight").removesuffix(".weight")


def make_pair(
    shape: torch.Size, rank: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Returns the matrices down and up of a weight's shape."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, *shape[1:], generator=generator)
    up = torch.randn(shape[0], rank, *(1 for _ in shape[2:]), generator=generator) / 30
    return down.to(dtype), up.to(dtype)


def merge_file(path: Path, checkpoint: Checkpoint, strength: float = 1.0) -> dict[str, Tensor]:
    """Returns the merged weights of a dense network that a file changes."""
    loras = resolve_loras(Loras((f"{path}={strength}",)), checkpoint)["dit"]
    sources = merge_loras(open_sources(checkpoint.experts["dit"].tensors), loras)
    return {name: sources[name].read(slice(None)) for lora in loras for name in lora.deltas}


def make_layer(weight: Tensor) -> Any:
    """Returns a weight's layer in float64: a linear one, or the patch embedding's convolution."""
    rows, columns, *kernel = weight.shape
    layer = (
        nn.Conv3d(columns, rows, tuple(kernel), tuple(kernel))
        if kernel
        else nn.Linear(columns, rows)
    ).double()
    layer.weight.data = weight.double()
    return layer


def randomise(module: nn.Module, seed: int) -> None:
    """Sets the adapter's factors; a DoRA's magnitudes are changed by up to a third."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if "base_layer" in name or "original_module" in name:
            continue
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
        is_magnitude = "dora_scale" in name or "magnitude" in name
        parameter.data = parameter.data * (1 + noise * 2 / 3) if is_magnitude else noise


def _merge_with_lycoris(module_class: Any, layer: Any, seed: int, **options: Any) -> Any:
    """Returns LyCORIS' adapter of a layer: its tensors, and its merged weight."""
    module = module_class("x", layer, **options).double()
    randomise(module, seed)
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            eye = torch.eye(layer.in_features, dtype=torch.float64)
            merged = (module(eye) - layer.bias).T
        else:
            change = (
                module.get_weight(module.shape)
                if module_class in (LohaModule, LokrModule)
                else module.make_weight() * (module.scale if module_class is LoConModule else 1)
            )
            merged = layer.weight + change
            if options.get("weight_decompose"):
                merged = module.apply_weight_decompose(merged)
    tensors = {name: x.detach().clone() for name, x in module.custom_state_dict().items()}
    return tensors, merged.detach()


def save_lycoris(
    kind: str, weights: Mapping[str, Tensor], path: Path, layers: tuple[str, ...], prefix: str = ""
) -> dict[str, Tensor]:
    """Saves an adapter of LyCORIS; returns the merged weights."""
    module_class, options = LYCORIS[kind]
    tensors, expected = {}, {}
    for seed, layer in enumerate(layers):
        rank = 3 if kind == "LoKr, factorised" else 2
        weight = weights[f"{layer}.weight"]
        options = {"lora_dim": rank, "alpha": 3, **options}
        parts, merged = _merge_with_lycoris(module_class, make_layer(weight), seed, **options)
        name = f"{prefix}{layer.replace('.', '_')}"
        tensors |= {f"{name}.{part}": x.contiguous() for part, x in parts.items()}
        expected[f"{layer}.weight"] = merged.reshape(weight.shape)
    save_file(tensors, path)
    return expected
