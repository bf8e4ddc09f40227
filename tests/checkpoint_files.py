"""Files of checkpoints for tests, and the values that a run reads from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.load import open_sources
from wan.modules import t5
from wan.modules.vae import video_vae

Tensors = dict[str, Tensor]


def load_tensors(path: Path) -> Tensors:
    """Returns all tensors of a file or folder."""
    if path.suffix == ".pth":
        return torch.load(path)
    tensors: Tensors = {}
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def save_tensors(tensors: Tensors, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def add_prefix(tensors: Tensors, prefix: str) -> Tensors:
    return {f"{prefix}{name}": tensor.clone().contiguous() for name, tensor in tensors.items()}


def read_values(infos: Mapping[str, TensorInfo]) -> Tensors:
    """Returns the values of tensors as they are loaded, in float32."""
    return {name: source.read(slice(None)).float() for name, source in open_sources(infos).items()}


def read_networks(checkpoint: Checkpoint) -> dict[str, Tensors]:
    """Returns the values of the DiTs, the text encoder and the VAE, by the networks' names."""
    values = {expert: read_values(files.tensors) for expert, files in checkpoint.experts.items()}
    for component, read_spec in (
        ("text_encoder", t5.read_text_encoder_spec),
        ("vae", video_vae.read_vae_spec),
    ):
        spec = read_spec(checkpoint.require(component))
        spec.check()
        values[component] = read_values(spec.tensors)
    return values


def are_equal(tensors: Tensors, expected: Tensors) -> bool:
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], expected[name].float()) for name in expected
    )


def hold_same_networks(checkpoint: Checkpoint, expected: Checkpoint) -> bool:
    """Returns whether two checkpoints have one configuration, and the same values."""
    if (checkpoint.kind, checkpoint.config) != (expected.kind, expected.config):
        return False
    actual, wanted = read_networks(checkpoint), read_networks(expected)
    return actual.keys() == wanted.keys() and all(are_equal(actual[x], wanted[x]) for x in wanted)
