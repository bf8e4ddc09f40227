"""Builds the DiT of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel


def build_dit(config: Mapping[str, Any], components: ModelComponents | None = None) -> WanModel:
    """Builds the DiT of a model type.

    Args:
        config: From `wan.checkpoint.config.read_dit_config`; the arguments of the class.
        components: Attention, kernels, sharding and caches; None: those for one device.
    """
    module, class_name = _MODEL_CLASSES.get(config["model_type"], ("wan.modules.model", "WanModel"))
    model: WanModel = getattr(import_module(module), class_name)(**config, components=components)
    return model


_MODEL_CLASSES = {
    "s2v": ("wan.modules.s2v", "WanModel_S2V"),
    "animate": ("wan.modules.animate", "WanAnimateModel"),
    "vace": ("wan.modules.vace", "VaceWanModel"),
}
"""Model type -> module and class; other types are a `WanModel`."""
