"""The official functions of sequence parallelism, which that code binds to a network's methods.

Here a network is built with its parallel attention (`wan.modules.interfaces.ModelComponents`).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

_REMEDY = (
    "is bound to no network here; give `use_sp=True` to the constructor of WanT2V, WanI2V or the "
    "other classes, or run torchrun with generate.py"
)


def pad_freqs(original_tensor: Tensor, target_len: int) -> Tensor:
    """Appends rows of ones to a RoPE table [S,...] up to a length."""
    padding = original_tensor.new_ones(
        target_len - len(original_tensor), *original_tensor.shape[1:]
    )
    return torch.cat([original_tensor, padding])


def sp_attn_forward(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError with what to use instead."""
    raise NotImplementedError(f"sp_attn_forward {_REMEDY}.")


def sp_dit_forward(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError with what to use instead."""
    raise NotImplementedError(f"sp_dit_forward {_REMEDY}.")
