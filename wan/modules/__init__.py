"""The networks and their layers; also the official classes, loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wan.modules.attention import flash_attention
    from wan.modules.model import WanModel
    from wan.modules.t5 import T5EncoderModel
    from wan.modules.tokenizers import HuggingfaceTokenizer
    from wan.modules.vae2_1 import Wan2_1_VAE
    from wan.modules.vae2_2 import Wan2_2_VAE

__all__ = [
    "HuggingfaceTokenizer",
    "T5EncoderModel",
    "Wan2_1_VAE",
    "Wan2_2_VAE",
    "WanModel",
    "flash_attention",
]

_MODULES = {
    "HuggingfaceTokenizer": "tokenizers",
    "T5EncoderModel": "t5",
    "Wan2_1_VAE": "vae2_1",
    "Wan2_2_VAE": "vae2_2",
    "WanModel": "model",
    "flash_attention": "attention",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"wan.modules.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'wan.modules' has no attribute {name!r}")
