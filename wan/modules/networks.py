"""Builds the DiT that a configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wan.modules.interfaces import Collaborators
from wan.modules.model import WanModel


def network(config: Mapping[str, Any], collaborators: Collaborators | None = None) -> WanModel:
    """Builds a network.

    Args:
        config: As `wan.checkpoint.config.dit_config` returns it.
        collaborators: As for `WanModel`.
    """
    kind = WanModel
    if config["model_type"] == "s2v":
        from wan.modules.s2v import WanModel_S2V as kind  # type: ignore[assignment]
    return kind(**config, collaborators=collaborators)
