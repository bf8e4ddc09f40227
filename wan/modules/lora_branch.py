"""LoRA branches: products of LoRAs that are added to the output of a layer.

A branch belongs to one video. The layer's weight, which may be quantized, sharded or offloaded, is
not changed, so that the next video gets the bits of a network that never had a LoRA.

Legend: L tokens, I input channels, O output channels, R rank; of a LoKr [A,C] and [B,D] are the
matrices, with O = A B and I = C D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn

_BRANCHES = "lora_branches"


@dataclass(frozen=True)
class LoraBranch:
    """The product of a LoRA with the input of a layer.

    Attributes:
        scale: Factor of all products.
        factors: `lora_up` [O,R] and `lora_down` [R,I]; `lora_left_N` [A,C] and `lora_right_N` [B,D]
            of the N-th LoKr; `bias` [O].
    """

    scale: float
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    def add_product(self, x_LI: Tensor, y_LO: Tensor) -> None:
        """Adds the product to the output of the layer, in place."""
        factors = {name: factor.to(y_LO.dtype) for name, factor in self.factors.items()}
        x_LI = x_LI.to(y_LO.dtype)
        if "lora_up" in factors:
            h_LR = F.linear(x_LI, factors["lora_down"])
            y_LO.addmm_(h_LR, factors["lora_up"].T, alpha=self.scale)
        for name, left_AC in factors.items():
            if name.startswith("lora_left"):
                right_BD = factors[name.replace("left", "right")]
                x_LCD = x_LI.unflatten(-1, (left_AC.shape[1], right_BD.shape[1]))
                product_LO = (left_AC @ F.linear(x_LCD, right_BD)).flatten(-2)
                y_LO.add_(product_LO, alpha=self.scale)
        if "bias" in factors:
            y_LO.add_(factors["bias"], alpha=self.scale)


def add_lora_branches(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Adds the products of a layer's branches to its output [..., O], in place."""
    for branch in vars(layer).get(_BRANCHES, ()):
        branch.add_product(x.flatten(0, -2), y.view(-1, y.shape[-1]))
    return y


def set_lora_branches(layer: nn.Module, branches: tuple[LoraBranch, ...]) -> None:
    """Replaces the branches of a layer."""
    vars(layer)[_BRANCHES] = branches
