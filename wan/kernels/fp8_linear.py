"""A linear layer whose weight stays in FP8 and is upcast in each call (ComfyUI's scaled files).

Legend: I input channels, O output channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Fp8Linear(nn.Module):
    """x W^T + bias with W = weight * scale; takes and returns [..., I] and [..., O] of one dtype.

    The product runs in the dtype of x, on the weight that loading all of it in that dtype would
    give: the results are the same bit for bit, for half of bfloat16's memory.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self, weight_OI: Tensor, weight_scale: Tensor, bias_O: nn.Parameter | None
    ) -> None:
        """weight_OI: float8. weight_scale: float32, one number [1], or one for each row [O,1]."""
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("weight", weight_OI, persistent=False)
        self.register_buffer("weight_scale", weight_scale, persistent=False)
        self.bias = bias_O

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, upcast(self.weight, self.weight_scale).to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype}"


def upcast(weight_OI: Tensor, scale: Tensor) -> Tensor:
    """weight * scale in float32."""
    return weight_OI.to(torch.float32).mul_(scale)
