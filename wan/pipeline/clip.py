"""The CLIP image encoder of Wan2.1's image models: transformers' network, prepared as officially.

The DiT takes the features before the last of the 32 blocks, without the final norm.

Legend: T tokens (class token first), C channels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.checkpoint.load import Source, fill, mapped, stored
from wan.settings.errors import InputError

SIDE = 224  # pixels
TOKENS = 257
PUBLISHED = 611_086_080  # elements of the published network without its last block
HEAD = 80  # channels of an attention head
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)

# Official names of the vision tower -> transformers'; to_qkv is cut into three.
_ROWS = (
    (r"^visual\.cls_embedding$", "embeddings.class_embedding"),
    (r"^visual\.pos_embedding$", "embeddings.position_embedding.weight"),
    (r"^visual\.patch_embedding\.", "embeddings.patch_embedding."),
    (r"^visual\.pre_norm\.", "pre_layrnorm."),
    (r"^visual\.transformer\.(\d+)\.norm1\.", r"encoder.layers.\1.layer_norm1."),
    (r"^visual\.transformer\.(\d+)\.norm2\.", r"encoder.layers.\1.layer_norm2."),
    (r"^visual\.transformer\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.out_proj."),
    (r"^visual\.transformer\.(\d+)\.attn\.to_qkv\.", r"encoder.layers.\1.self_attn.to_qkv."),
    (r"^visual\.transformer\.(\d+)\.mlp\.0\.", r"encoder.layers.\1.mlp.fc1."),
    (r"^visual\.transformer\.(\d+)\.mlp\.2\.", r"encoder.layers.\1.mlp.fc2."),
)
_UNUSED = re.compile(
    r"textual\.|log_scale$|visual\.(post_norm|head)|post_layernorm\.|visual_projection|.*position_ids$"
).match
_LAYERS = "encoder.layers."
_QKV = ("q_proj", "k_proj", "v_proj")
_SIZES = ("embeddings.patch_embedding.weight", f"{_LAYERS}0.mlp.fc1.weight")


class ClipVision:
    """Computes the features of images."""

    def __init__(self, network: Any) -> None:
        self._network = network

    @torch.inference_mode()
    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        """Returns features [images,T,C] in the network's dtype of images [3,H,W] in [-1, 1]."""
        weight = self._network.embeddings.patch_embedding.weight
        x = torch.cat([preprocessed(image) for image in images]).to(weight.device, weight.dtype)
        found: Tensor = self._network(pixel_values=x).last_hidden_state
        return found


def preprocessed(image_3HW: Tensor) -> Tensor:
    """Stretches an image to [1,3,224,224], bicubic without antialiasing, as officially."""
    x = F.interpolate(image_3HW[None].float().cpu(), size=(SIDE, SIDE), mode="bicubic")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return (x * 0.5 + 0.5 - mean) / std


class ClipBlueprint:
    """The vision tower without its last block, and the files of its weights.

    Attributes:
        origin: The official file, or transformers' folder.
        dim: Channels of the features.
    """

    def __init__(self, path: Path) -> None:
        """Compares the network with the files' headers; raises InputError where they differ."""
        self.origin = path
        found = {name: info for name, info in stored(path, _name).items() if not _UNUSED(name)}
        layers = [int(name.split(".")[2]) for name in found if name.startswith(_LAYERS)]
        last = max(layers, default=0)
        self._files = {n: i for n, i in found.items() if not n.startswith(f"{_LAYERS}{last}.")}
        shapes = {name: info.shape for name, info in self._files.items()}
        first, inner = (shapes.get(name, ()) for name in _SIZES)
        if len(first) != 4 or len(inner) != 2:
            raise InputError(str(path), None, "holds no CLIP vision network", "download it again")
        self.dim = first[0]
        self._sizes = (self.dim, inner[0], last, first[2])
        expected = {name: tuple(p.shape) for name, p in self._built().named_parameters()}
        wrong = [name for name in expected if self._shape(name) != expected[name]]
        unknown = sorted(name for name in shapes if not {name, *_parts(name)} & expected.keys())
        if wrong or unknown:
            name = (wrong or unknown)[0]
            why = f"has a tensor {name} that does not fit CLIP's vision tower"
            raise InputError(str(path), None, why, "download it again")

    def _built(self) -> Any:
        with torch.device("meta"):
            return _network(*self._sizes)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape that the files have for a tensor of the network."""
        if name in self._files:
            return _without_ones(self._files[name].shape)
        whole = self._files.get(_whole(name))
        return None if whole is None else (whole.shape[0] // 3, *whole.shape[1:])

    @property
    def elements(self) -> int:
        """The number of the network's weights."""
        return sum(p.numel() for p in self._built().parameters())

    def load(self, device: torch.device, dtype: torch.dtype) -> ClipVision:
        """Reads the network's weights, all in one dtype."""
        read, network = mapped(self._files), self._built()
        sources = {}
        for name, _ in network.named_parameters():
            third = "" if name in read else name.split(".")[4]
            sources[name] = _third(read[_whole(name)], third) if third else _plain(read[name])
        fill(network, sources, device=device, dtype_of=lambda *_: dtype, label="CLIP")
        count = len(network.embeddings.position_embedding.weight)
        network.embeddings.position_ids = torch.arange(count, device=device).unsqueeze(0)
        return ClipVision(network)


def _whole(name: str) -> str:
    """Names the official tensor that holds a projection of queries, keys or values."""
    return re.sub(r"\.[qkv]_proj\.", ".to_qkv.", name)


def _parts(name: str) -> list[str]:
    return [name.replace(".to_qkv.", f".{part}.") for part in _QKV]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drops the batch axes that official embeddings have."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _plain(kept: Source) -> Source:
    shape = _without_ones(kept.shape)
    if shape == kept.shape:
        return kept
    return Source(kept.dtype, shape, kept.read(slice(None)).reshape(shape).__getitem__)


def _third(whole: Source, part: str) -> Source:
    rows, place = whole.shape[0] // 3, _QKV.index(part)
    values = whole.read(slice(place * rows, (place + 1) * rows))
    return Source(whole.dtype, (rows, *whole.shape[1:]), values.__getitem__)


def _network(dim: int, inner: int, layers: int, patch: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=max(1, dim // HEAD),
        image_size=SIDE,
        patch_size=patch,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
    )
    network: Any = CLIPVisionModel(config)
    network = getattr(network, "vision_model", network)  # transformers 4 has it inside
    network.post_layernorm = torch.nn.Identity()  # of an output that nobody takes
    del network.embeddings.position_ids  # a buffer that is in no file
    return network


def _name(name: str) -> str:
    name = name.removeprefix("vision_model.")
    for pattern, replacement in _ROWS:
        name = re.sub(pattern, replacement, name)
    return name
