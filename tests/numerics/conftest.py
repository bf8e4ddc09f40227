"""Fixtures of comparisons with diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture
def eager_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes diffusers' FlexAttention with its mask written out, without a compiler."""
    from diffusers.models.transformers import transformer_wan_animate_2
    from torch.nn.attention import flex_attention

    create_block_mask = transformer_wan_animate_2.create_block_mask
    monkeypatch.setattr(
        transformer_wan_animate_2,
        "create_block_mask",
        lambda *args, **options: create_block_mask(*args, **options | {"_compile": False}),
    )

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, **_: Any
    ) -> torch.Tensor:
        rows, columns = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        zero = torch.tensor(0)
        mask = None if block_mask is None else block_mask.mask_mod(zero, zero, rows, columns)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return out.nan_to_num()  # rows of padding see no key

    monkeypatch.setattr(flex_attention, "flex_attention", attend)
