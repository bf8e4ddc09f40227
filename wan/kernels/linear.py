"""Linear layers of a block: kernels of oneDNN (bfloat16) and AMX (float32) on CPUs, else PyTorch's.

In bfloat16 PyTorch writes the bias first and adds the product to it. oneDNN adds the bias to the
sums before it writes them, with the same bits, and can apply GELU to them.

Legend: I input channels, O output channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.kernels.amx_linear import multiply_with_amx, uses_amx
from wan.utils.torch_private import has_onednn_bf16, multiply_with_onednn


class Linear(nn.Linear):
    """`nn.Linear`, computed by the faster kernels where that is possible."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)

    def forward_gelu(self, x: Tensor) -> Tensor | None:
        """Computes GELU (tanh) of the result in the same kernel; None: it cannot be computed so."""
        has_one_dtype = x.dtype == self.weight.dtype == self.bias.dtype
        if not (has_one_dtype and uses_onednn(x)):
            return None
        return multiply_with_onednn(x, self.weight, self.bias, gelu=True)


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Computes x W^T + bias of tensors of one dtype, [..., O]."""
    has_one_dtype = bias_O is not None and x.dtype == weight_OI.dtype == bias_O.dtype
    if has_one_dtype and uses_onednn(x):
        return multiply_with_onednn(x, weight_OI, bias_O)
    if uses_amx(x, weight_OI, bias_O):
        return multiply_with_amx(x, weight_OI, bias_O)
    return F.linear(x, weight_OI, bias_O)


def uses_onednn(x: Tensor) -> bool:
    """Whether a product with x is computed by oneDNN's kernel.

    PyTorch rounds the product with a strided x before it adds the bias, so that is left to it.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    is_supported = x.device.type == "cpu" and x.dtype == torch.bfloat16 and has_onednn_bf16()
    return is_supported and x.numel() > 0 and x.is_contiguous()
