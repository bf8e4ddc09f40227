"""Weight-only quantized linear layers, FP8 or GGUF: upcast in each call, or multiplied in FP8.

Legend: L tokens, I input channels, O output channels, R the ranks of all LoRAs together; of a LoKr
[A,C] and [B,D] are the matrices, with O = A B and I = C D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.checkpoint.quant.dequantise import multiply_by_block_scales
from wan.kernels.fp8 import E4M3_MAX
from wan.kernels.int8_linear import multiply_padded
from wan.kernels.interfaces import divide_exactly
from wan.kernels.linear import multiply, uses_onednn
from wan.settings.errors import InputError
from wan.settings.numerics import get_int8_slice_numel, get_slice_numel
from wan.utils import torch_private

_CUDA_MULTIPLE = 16  # sizes of CUDA's FP8 product are multiples of it
_MIN_CAPABILITY = (8, 9)  # compute capability of the first GPUs with FP8 products
_SLICE_ELEMENTS = 1 << 24  # FP8 values multiplied at a time in float32


class UpcastMemory:
    """Memory for the upcast weights of a network's layers, one layer after the other.

    On a CPU it is reused, because the first write to new memory takes longer than the conversion.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._held_weights: dict[nn.Module, Tensor] | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Upcasts each weight at most once inside the block, and keeps all until its end."""
        self._held_weights = {}
        try:
            yield
        finally:
            self._held_weights = None

    def get_or_fill(
        self, layer: nn.Module, like: Tensor, shape: tuple[int, int], fill: Callable[[Tensor], None]
    ) -> Tensor:
        """Returns a layer's weight, which `fill` computes if it is not held.

        Args:
            like: A tensor of the weight's dtype and device.
        """
        held_weights = {} if self._held_weights is None else self._held_weights
        if layer not in held_weights:
            held_weights[layer] = self._allocate(len(held_weights), like, shape)
            fill(held_weights[layer])
        return held_weights[layer]

    def free(self, *_: object) -> None:
        """Frees the memory; may be registered as a network's forward hook."""
        self._buffers.clear()

    def _allocate(self, index: int, like: Tensor, shape: tuple[int, int]) -> Tensor:
        if like.device.type != "cpu":
            return like.new_empty(shape)
        self._buffers += [torch.empty(0, dtype=torch.uint8)] * (index + 1 - len(self._buffers))
        size = prod(shape) * like.itemsize
        if len(self._buffers[index]) < size:
            with torch.inference_mode(False):  # it may be written outside of the mode later
                self._buffers[index] = torch.empty(size, dtype=torch.uint8)
        return self._buffers[index][:size].view(like.dtype).view(shape)


class WeightOnlyLinear(nn.Module):
    """x W^T + bias, and the products of LoRAs; takes [..., I] and returns [..., O] of one dtype.

    The weight is upcast to the dtype of x: results equal those of a weight that was upcast when it
    was loaded, bit for bit.
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
        scale_block: tuple[int, int] | None = None,
        lora: Mapping[str, Tensor] | None = None,
        memory: UpcastMemory | None = None,
        try_fill: Callable[[Tensor, Tensor | None, Tensor], bool] | None = None,
    ) -> None:
        """Makes the layer from stored tensors.

        Args:
            weight: O rows in the format of the file.
            to_float: Converts rows of the weight to float32 [rows, I].
            scale: Factor of the weight: float32 [1], one per row [O,1], or one per block.
            scale_block: Rows and columns of the block that has one scale.
            lora: `lora_up` [O,R], multiplied by its strength, and `lora_down` [R,I]; and of the
                I-th LoKr `lora_left_I` [A,C], multiplied by its strength, and `lora_right_I` [B,D].
            memory: Is shared by the layers of a network; None: new memory in each call.
            try_fill: Converts the weight, with its scale, to the third argument at once, or returns
                False.
        """
        super().__init__()
        self._memory = memory
        self.out_features, self.in_features = len(weight), in_features
        self._to_float, self._try_fill, self._scale_block = to_float, try_fill, scale_block
        factors = {"lora_up": None, "lora_down": None, **(lora or {})}
        self._num_kroneckers = sum(name.startswith("lora_left") for name in factors)
        for name, tensor in {"weight": weight, "weight_scale": scale, **factors}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.bias = bias_O

    def forward(self, x: Tensor) -> Tensor:
        y = self._multiply(x)
        if self.lora_up is not None and self.lora_down is not None:
            y = y + F.linear(F.linear(x, self.lora_down), self.lora_up)
        for index in range(self._num_kroneckers):
            left_AC = self.get_buffer(f"lora_left_{index}")
            right_BD = self.get_buffer(f"lora_right_{index}")
            x_LCD = x.unflatten(-1, (left_AC.shape[1], right_BD.shape[1]))
            y = y + (left_AC @ F.linear(x_LCD, right_BD)).flatten(-2)
        return y

    def _multiply(self, x: Tensor) -> Tensor:
        return multiply(x, self._get_weight(x), self.bias)

    def forward_gelu(self, x: Tensor) -> Tensor | None:
        """See `wan.kernels.linear.Linear`."""
        has_lora = self.lora_up is not None or self._num_kroneckers > 0
        if has_lora or not uses_onednn(x):
            return None
        return torch_private.multiply_with_onednn(x, self._get_weight(x), self.bias, gelu=True)

    def _get_weight(self, x: Tensor) -> Tensor:
        shape = self.out_features, self.in_features
        if self._memory is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            weight_OI = x.new_empty(shape)
            self._upcast(weight_OI)
            return weight_OI
        return self._memory.get_or_fill(self, x, shape, self._upcast_at_once)

    def _upcast_at_once(self, weight_OI: Tensor) -> None:
        """Writes the weight, in one pass where that is possible."""
        arguments = self.weight, self.weight_scale, weight_OI
        if self._try_fill is None or not self._try_fill(*arguments):
            self._upcast(weight_OI)

    def _upcast(self, weight_OI: Tensor) -> None:
        """Writes the weight, a slice of rows after the other."""
        device_type = weight_OI.device.type
        num_elements = get_slice_numel("" if torch.compiler.is_compiling() else device_type)
        rows_per_slice = max(1, num_elements // self.in_features)
        for first in range(0, self.out_features, rows_per_slice):
            rows = slice(first, first + rows_per_slice)
            rows_float = self._to_float(self.weight[rows])
            if self.weight_scale is not None and self._scale_block is not None:
                multiply_by_block_scales(rows_float, self.weight_scale, first, self._scale_block)
            elif self.weight_scale is not None:
                rows_float.mul_(
                    self.weight_scale if self.weight_scale.dim() == 1 else self.weight_scale[rows]
                )
            weight_OI[rows] = rows_float

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype}"


class FP8Linear(WeightOnlyLinear):
    """A `WeightOnlyLinear` with an FP8 weight that multiplies in FP8.

    Each token is quantized to E4M3 by its largest value (scale = max|x| / 448). Products are summed
    in float32, and ((sum * weight scale) * token scale) + bias is rounded once. LoRAs are computed
    in the dtype of x. On devices other than CUDA the values are multiplied in float32, as a
    reference.
    """

    def forward_gelu(self, x: Tensor) -> Tensor | None:
        return None

    def _multiply(self, x: Tensor) -> Tensor:
        x_LI = x.reshape(-1, self.in_features)
        rows = max(1, get_int8_slice_numel(x.device.type) // self.out_features)
        outputs = [
            self._multiply_tokens(x_LI[first : first + rows]) for first in range(0, len(x_LI), rows)
        ]
        out_LO = torch.cat(outputs) if outputs else x_LI.new_empty(0, self.out_features)
        return out_LO.view(*x.shape[:-1], self.out_features)

    def _multiply_tokens(self, x_LI: Tensor) -> Tensor:
        values_LI = x_LI.float()
        scale_L1 = divide_exactly(values_LI.abs().amax(-1, keepdim=True), E4M3_MAX)
        scale_L1 = torch.where(scale_L1 > 0, scale_L1, 1.0)
        values_LI = (values_LI / scale_L1).clamp_(-E4M3_MAX, E4M3_MAX)
        out_LO = multiply_fp8(values_LI.to(self.weight.dtype), self.weight)
        if self.weight_scale is not None:
            out_LO = out_LO.mul_(self.weight_scale.view(-1))
        out_LO = out_LO.mul_(scale_L1)
        out_LO = out_LO if self.bias is None else out_LO.add_(self.bias)
        return out_LO.to(x_LI.dtype)


def multiply_fp8(a_LI: Tensor, b_OI: Tensor) -> Tensor:
    """Computes a b^T of FP8 matrices, summed in float32, [L,O]."""
    if a_LI.device.type == "cuda":
        return multiply_padded(torch_private.fp8_matmul, a_LI, b_OI, _CUDA_MULTIPLE)
    a_LI, rows_per_slice = a_LI.float(), max(1, _SLICE_ELEMENTS // b_OI.shape[1])
    outputs = [
        F.linear(a_LI, b_OI[first : first + rows_per_slice].float())
        for first in range(0, len(b_OI), rows_per_slice)
    ]
    return torch.cat(outputs, dim=1)


def check_fp8_device(device: torch.device) -> None:
    """Refuses a GPU without FP8 products."""
    if device.type == "cuda":
        check_fp8_capability(torch.cuda.get_device_capability(device))


def check_fp8_capability(capability: tuple[int, int]) -> None:
    """Refuses the compute capability of a GPU without FP8 products."""
    if capability < _MIN_CAPABILITY:
        why = f"needs compute capability 8.9; this GPU has {capability[0]}.{capability[1]}"
        raise InputError("`stored_weights=multiply`", None, why, "use `stored_weights=keep`")
