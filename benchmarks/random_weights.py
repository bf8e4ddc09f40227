"""Files of networks of published sizes with random weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from wan.checkpoint.formats.safetensors_stream import stream_safetensors


def draw_parameters(network: nn.Module, layer: str) -> Iterator[tuple[str, Tensor]]:
    """Yields names and random values (float32) of the parameters of a network without data.

    All layers share the values of one layer.

    Args:
        layer: Name of the list of layers, such as "blocks".
    """
    torch.manual_seed(0)
    cached: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        match = re.search(rf"{layer}\.(\d+)\.", name)
        key = name if match is None else name.replace(match[0], "")
        if key not in cached:
            mean = parameter.dim() == 1 and name.endswith("weight")
            std = 0.1 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            cached[key] = torch.randn(parameter.shape) * std + mean
        yield name, cached[key]
        if match is None:
            del cached[key]


def save_network(
    network: nn.Module,
    path: Path,
    layer: str,
    dtype: torch.dtype = torch.bfloat16,
    rename: Callable[[str], str] = str,
) -> None:
    """Writes random weights to a safetensors file, one tensor at a time.

    Args:
        layer: As for `draw_parameters`.
        rename: Maps the names of the network to those of the file.
    """
    specs = {rename(n): (dtype, tuple(p.shape)) for n, p in network.named_parameters()}
    tensors = ((rename(name), x.to(dtype)) for name, x in draw_parameters(network, layer))
    stream_safetensors(path, specs, tensors, path.name)
