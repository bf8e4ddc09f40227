"""What a DiT's config.json says, or, without one, what the shapes of its tensors say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError
from wan.settings.files import TensorInfo, read_json

KINDS = {16: "t2v", 36: "i2v", 48: "ti2v"}  # by input channels of the patch embedding
_OFFICIAL_KEYS = [
    "model_type",
    "dim",
    "ffn_dim",
    "freq_dim",
    "in_dim",
    "out_dim",
    "num_heads",
    "num_layers",
    "text_len",
    "text_dim",
    "eps",
    "patch_size",
    "qk_norm",
    "cross_attn_norm",
    "window_size",
]


def stated_config(path: Path) -> dict[str, Any]:
    """The official constructor arguments in an official or diffusers config.json."""
    raw = read_json(path)
    config = {key: raw[key] for key in _OFFICIAL_KEYS if key in raw}
    if "num_attention_heads" in raw:
        for key in ("in_channels", "out_channels", "attention_head_dim"):
            if key not in raw:
                raise InputError(f"{path} lacks {key}; download the file again.")
        config |= {
            "in_dim": raw["in_channels"],
            "out_dim": raw["out_channels"],
            "num_heads": raw["num_attention_heads"],
            "dim": raw["num_attention_heads"] * raw["attention_head_dim"],
        }
        config.pop("qk_norm", None)  # the name of a norm there, always the one we have
    heads = config.get("num_heads", 1)
    if not isinstance(heads, int) or heads < 1:
        raise InputError(f"{path}: num_heads is {heads!r}; download the file again.")
    return config


def config_from_shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What the tensors' shapes say; the head size (128) they cannot."""
    shape = {name: info.shape for name, info in tensors.items()}
    dim, in_dim, *patch = shape["patch_embedding.weight"]
    layers = {name.split(".")[1] for name in shape if name.startswith("blocks.")}
    config = {
        "model_type": KINDS.get(in_dim, "t2v"),
        "dim": dim,
        "in_dim": in_dim,
        "patch_size": tuple(patch),
        "num_heads": max(dim // 128, 1),
        "num_layers": len(layers),
    }
    for key, name, axis in (
        ("ffn_dim", "blocks.0.ffn.0.weight", 0),
        ("freq_dim", "time_embedding.0.weight", 1),
        ("text_dim", "text_embedding.0.weight", 1),
    ):
        if name in shape:
            config[key] = shape[name][axis]
    if "head.head.weight" in shape:
        config["out_dim"] = shape["head.head.weight"][0] // (patch[0] * patch[1] * patch[2])
    return config
