"""A linear layer whose weight stays as it is stored, and is upcast in each call: FP8 and GGUF.

Legend: I input channels, O output channels, R the ranks of all LoRAs together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SLICE = 1 << 24  # values that are upcast at a time, since they are float32 in between


class KeptLinear(nn.Module):
    """x W^T + bias, and up(down(x)) of LoRAs; takes [..., I] and returns [..., O] of one dtype.

    The product runs in the dtype of x, on the weight that loading all of it in that dtype would
    give: the results are the same bit for bit.
    """

    weight: Tensor
    weight_scale: Tensor | None
    lora_down: Tensor | None
    lora_up: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        to_float: Callable[[Tensor], Tensor],
        bias_O: nn.Parameter | None,
        *,
        in_features: int,
        scale: Tensor | None = None,
        lora: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Takes what the file holds.

        Args:
            weight: The O rows as they are stored.
            to_float: Makes float32 [rows, I] of some of them.
            bias_O: The bias.
            in_features: I.
            scale: What the values are multiplied by: float32 [1], or one for each row [O,1].
            lora: up [O,R], which its factor has been multiplied into, and down [R,I].
        """
        super().__init__()
        self.out_features, self.in_features = len(weight), in_features
        self._to_float = to_float
        up, down = (None, None) if lora is None else lora
        for name, tensor in (
            ("weight", weight),
            ("weight_scale", scale),
            ("lora_up", up),
            ("lora_down", down),
        ):
            self.register_buffer(name, tensor, persistent=False)
        self.bias = bias_O

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._upcast(x.dtype), self.bias)
        if self.lora_up is None or self.lora_down is None:
            return y
        return y + F.linear(F.linear(x, self.lora_down), self.lora_up)

    def _upcast(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [O,I]."""
        size = self.out_features, self.in_features
        upcast = torch.empty(size, dtype=dtype, device=self.weight.device)
        step = max(1, _SLICE // self.in_features)
        for first in range(0, self.out_features, step):
            rows = slice(first, first + step)
            part = self._to_float(self.weight[rows])
            if self.weight_scale is not None:
                part.mul_(
                    self.weight_scale if self.weight_scale.dim() == 1 else self.weight_scale[rows]
                )
            upcast[rows] = part
        return upcast

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype}"
