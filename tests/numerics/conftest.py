"""Fixtures of comparisons with diffusers."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def eager_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps diffusers from compiling Animate-2's masks, which takes a C++ compiler and seconds."""
    from diffusers.models.transformers import transformer_wan_animate_2

    create_block_mask = transformer_wan_animate_2.create_block_mask

    def create_eagerly(*args: Any, **options: Any) -> Any:
        return create_block_mask(*args, **options | {"_compile": False})

    monkeypatch.setattr(transformer_wan_animate_2, "create_block_mask", create_eagerly)
