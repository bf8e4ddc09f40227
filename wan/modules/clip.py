"""The CLIP image encoder of Wan2.1's image models, with transformers' network.

The DiT uses the features before the last of the 32 blocks, without the final norm.

Legend: T tokens (class token first), C channels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.checkpoint.formats.tensor_source import TensorSource, TensorSources
from wan.checkpoint.load import ModelSpec, describe_mismatch, read_headers
from wan.checkpoint.names.keymaps import rename_clip_to_transformers
from wan.settings.errors import InputError

IMAGE_SIZE = 224  # pixels
NUM_TOKENS = 257
NUM_ELEMENTS = 611_086_080  # elements of the published network without its last block
HEAD_DIM = 80  # channels of an attention head
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_match_unused = re.compile(
    r"textual\.|log_scale$|visual\.head|post_layernorm\.|visual_projection|.*position_ids$"
    r"|text_model\.|text_projection|logit_scale$"
).match
_LAYERS = "encoder.layers."


class ClipVision:
    """Computes the features of images with the network of `make_clip_spec`."""

    def __init__(self, network: Any) -> None:
        self._network = network

    @torch.inference_mode()
    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        """Computes features [images,T,C], in the network's dtype, of images [3,H,W] in [-1, 1]."""
        weight = self._network.embeddings.patch_embedding.weight
        x = torch.cat([preprocess_clip_image(image) for image in images]).to(
            weight.device, weight.dtype
        )
        features: Tensor = self._network(pixel_values=x).last_hidden_state
        return features


def preprocess_clip_image(image_3HW: Tensor) -> Tensor:
    """Resizes an image to [1,3,224,224], bicubically without antialiasing, and normalizes it."""
    x = F.interpolate(image_3HW[None].float().cpu(), size=(IMAGE_SIZE, IMAGE_SIZE), mode="bicubic")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return (x * 0.5 + 0.5 - mean) / std


def make_clip_spec(path: Path) -> ModelSpec[Any]:
    """Describes CLIP's vision tower without its last block, from a file or folder of weights.

    Raises:
        InputError: The weights belong to another network.
    """
    all_infos = read_headers(path, rename_clip_to_transformers, "image_encoder")
    infos = {name: info for name, info in all_infos.items() if not _match_unused(name)}
    tensors: dict[str, TensorInfo] = {}
    try:
        layers = (int(name.split(".")[2]) for name in infos if name.startswith(_LAYERS))
        last = max(layers, default=0)
        for name, info in infos.items():
            if name.startswith(f"{_LAYERS}{last}."):
                continue
            shape = info.shape
            while len(shape) > 1 and shape[0] == 1:  # the official embeddings have a batch axis
                shape = shape[1:]
            if ".to_qkv." not in name:
                tensors[name] = replace(info, shape=shape)
                continue
            rows = shape[0] // 3
            for index, projection in enumerate(("q_proj", "k_proj", "v_proj")):
                projection_info = replace(info, shape=(rows, *shape[1:]), first_row=index * rows)
                tensors[name.replace("to_qkv", projection)] = projection_info
        dim, _, patch_size, _ = tensors["embeddings.patch_embedding.weight"].shape
        mlp_dim, _ = tensors[f"{_LAYERS}0.mlp.fc1.weight"].shape
        if min(dim, mlp_dim, patch_size) < 1 or dim % _count_heads(dim):
            raise ValueError("a size of 0, or channels that heads do not divide")
    except (LookupError, ValueError) as error:
        why = f"holds no CLIP vision network ({describe_mismatch(error)})"
        remedy = "give a file with the weights of CLIP ViT-H/14"
        raise InputError(str(path), None, why, remedy) from error
    return ModelSpec(
        "CLIP", partial(_build_clip_network, dim, mlp_dim, last, patch_size), tensors, path
    )


def add_clip_position_ids(network: Any, sources: TensorSources) -> TensorSources:
    """Adds the network's buffer of position ids, which no file contains."""
    ids = torch.arange(len(network.embeddings.position_embedding.weight)).unsqueeze(0)
    positions = TensorSource(ids.dtype, tuple(ids.shape), ids.__getitem__)
    return {**sources, "embeddings.position_ids": positions}


def _count_heads(dim: int) -> int:
    return max(1, dim // HEAD_DIM)


def _build_clip_network(dim: int, mlp_dim: int, num_layers: int, patch_size: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=dim,
        intermediate_size=mlp_dim,
        num_hidden_layers=num_layers,
        num_attention_heads=_count_heads(dim),
        image_size=IMAGE_SIZE,
        patch_size=patch_size,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
    )
    network: Any = CLIPVisionModel(config)
    network = getattr(network, "vision_model", network)  # transformers 4 nests it
    network.post_layernorm = torch.nn.Identity()  # its output is not used
    return network
