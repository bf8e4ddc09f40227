"""FP8 attention: E4M3 with a scale per block of rows and head, after a rotation of Q and K.

Follows mindiesd 3.1.0 (FP8RotateQuantFA): Q and K are rotated by the same orthogonal matrix, which
does not change q k^T and spreads outliers. Q has a scale per 128 rows, K and V per 256 rows.

Legend: B batch, s this rank's tokens, S tokens, N heads, D head size, k blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import QKV, AttendRows, AttentionInput, Target, divide_exactly
from wan.kernels.reference import attend_in_tiles
from wan.settings.numerics import KV_ROWS, Q_ROWS
from wan.utils import trace

E4M3_MAX = 448.0
HADAMARD_SEED = 1234  # mindiesd's
Pair = tuple[Tensor, Tensor]

QuantizeBlocks = Callable[[Tensor, int], AttentionInput]
"""quantize(x_BSND, rows): E4M3 with one float32 scale per head and `rows` tokens."""

ConvertLayout = Callable[[AttentionInput], AttentionInput]
"""Converts keys or values to a kernel's memory layout, once for all query blocks."""


class Fp8Kernel(Protocol):
    """softmax(q k^T / sqrt(D)) v, [B,S,N,D] in dtype; k and v have the kernel's layout."""

    @property
    def name(self) -> str:
        """For logs and records."""

    def __call__(
        self, q: AttentionInput, k: AttentionInput, v: AttentionInput, dtype: torch.dtype, /
    ) -> Tensor: ...


def quantize_blocks(x_BSND: Tensor, rows: int) -> AttentionInput:
    """Implements `QuantizeBlocks` in float32: scale = absmax / 448, values = x / scale.

    Values are rounded half to even. An incomplete last block has the scale of its rows; a block of
    zeros has scale 1.
    """
    num_tokens = x_BSND.shape[1]
    x_BkrND = pad_rows(x_BSND.float(), -num_tokens % rows).unflatten(1, (-1, rows))
    scale = divide_exactly(x_BkrND.abs().amax(dim=(2, 4), keepdim=True), E4M3_MAX)
    scale = torch.where(scale > 0, scale, 1.0)
    # With a rounded, subnormal scale values exceed 448, which torch 2.9 converts to NaN.
    values = (x_BkrND / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    values = values.to(torch.float8_e4m3fn).flatten(1, 2)[:, :num_tokens]
    return AttentionInput(values, scale.squeeze(2), rows)


def make_sylvester_rotation(
    size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Makes Sylvester's Hadamard matrix / sqrt(size), [size,size], the rotation of rf_v3.

    Raises ValueError if size is not a power of two.
    """
    return (_make_hadamard_signs(size) / size**0.5).to(device=device, dtype=dtype)


def make_hadamard_rotation(
    size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Makes the matrix with random row signs (seed 1234) of mindiesd's online FP8 attention.

    Raises ValueError if size is not a power of two.
    """
    signs, generator = _make_hadamard_signs(size), torch.Generator().manual_seed(HADAMARD_SEED)
    flips = 2.0 * torch.randint(0, 2, (size, 1), generator=generator) - 1.0
    return (flips * signs / size**0.5).to(device=device, dtype=dtype)


def _make_hadamard_signs(size: int) -> Tensor:
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard rotation needs a power of two as head size, not {size}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


class Rotations:
    """The rotation matrices [D,D] of queries and keys, by layer.

    Args:
        head_dim: D; ValueError if `build` refuses it.
        build: Makes the matrix that queries and keys share.
        exported: (expert, layer) -> matrices of queries and keys of a quantized checkpoint.
    """

    def __init__(
        self,
        head_dim: int,
        build: Callable[[int], Tensor] = make_hadamard_rotation,
        exported: Mapping[tuple[str, int], Pair] | None = None,
    ) -> None:
        shared = build(head_dim)
        self._shared: Pair = (shared, shared)
        self._exported = dict(exported or {})
        self._pairs_on_device: dict[tuple[object, torch.dtype, torch.device], Pair] = {}

    def get_pair(self, x: Tensor, step: StepInfo | None) -> Pair:
        """Returns the matrices of queries and keys in x's dtype on its device; cached."""
        key = None if step is None or step.layer is None else (step.expert, step.layer)
        key = key if key in self._exported else None
        pair = self._pairs_on_device.get((key, x.dtype, x.device))
        if pair is None:
            q_rot, k_rot = self._shared if key is None else self._exported[key]
            pair = (q_rot.to(x.device, x.dtype), k_rot.to(x.device, x.dtype))
            self._pairs_on_device[key, x.dtype, x.device] = pair
        return pair


def pad_rows(x_BSND: Tensor, missing: int) -> Tensor:
    """Appends `missing` rows of zeros; returns x itself for none, where F.pad would copy."""
    return F.pad(x_BSND, (0, 0, 0, 0, 0, missing)) if missing else x_BSND


def rotate_heads(x_BSND: Tensor, rotation_DD: Tensor, tiled: bool = True) -> Tensor:
    """Computes x @ R in x's dtype.

    tiled: multiplies 128 rows at a time. On CPUs the bits of one large product depend on its
    numbers of rows and heads, which differ by attention mode.
    """
    if not tiled:
        return torch.matmul(x_BSND, rotation_DD)
    batch, num_rows, num_heads, head_dim = x_BSND.shape
    padded_BSND = pad_rows(x_BSND, -num_rows % Q_ROWS)
    tiles = padded_BSND.transpose(1, 2).reshape(-1, Q_ROWS, head_dim)
    rotated = torch.bmm(tiles, rotation_DD.expand(tiles.shape[0], -1, -1))
    return rotated.view(batch, num_heads, -1, head_dim)[:, :, :num_rows].transpose(1, 2)


class Fp8Quantizer:
    """Quantizes queries, keys and values: Q and K rotated, Q per 128 rows, K and V per 256 rows.

    device_type: of the device that computes.

    Attributes:
        q_rows: Query rows per scale.
        kv_rows: Rows of keys or values per scale; a multiple of `q_rows`.
    """

    name = "per-block E4M3"
    q_rows = Q_ROWS
    kv_rows = KV_ROWS

    def __init__(
        self,
        rotations: Rotations,
        quantize: QuantizeBlocks = quantize_blocks,
        device_type: str = "cpu",
    ) -> None:
        self._rotations, self._quantize = rotations, quantize
        self._tiled = device_type == "cpu"

    def quantize_q(self, x_BSND: Tensor, step: StepInfo | None) -> AttentionInput:
        rotated_BSND = rotate_heads(x_BSND, self._rotations.get_pair(x_BSND, step)[0], self._tiled)
        return self._quantize(rotated_BSND, self.q_rows)

    def quantize_k(self, x_BSND: Tensor, step: StepInfo | None) -> AttentionInput:
        rotated_BSND = rotate_heads(x_BSND, self._rotations.get_pair(x_BSND, step)[1], self._tiled)
        return self._quantize(rotated_BSND, self.kv_rows)

    def quantize_v(self, x_BSND: Tensor) -> AttentionInput:
        return self._quantize(x_BSND, self.kv_rows)


class DequantizedAttention:
    """Implements `Fp8Kernel` for devices without FP8 units: attention on dequantized values.

    On CPUs, and without a target, it computes in float32 tiles, so that the bits do not depend on
    how heads and queries are divided; elsewhere by one call in `dtype`.
    """

    name = "PyTorch SDPA, dequantised"

    def __init__(self, target: Target | None = None) -> None:
        self._tiled = target is None or target.device.type == "cpu"

    def __call__(
        self, q: AttentionInput, k: AttentionInput, v: AttentionInput, dtype: torch.dtype, /
    ) -> Tensor:
        if self._tiled:
            q_BSND, k_BSND, v_BSND = (x.dequantize(torch.float32) for x in (q, k, v))
            return attend_in_tiles(q_BSND, k_BSND, v_BSND).to(dtype)
        return attend_dequantized(q, k, v, dtype)


def attend_dequantized(
    q: AttentionInput, k: AttentionInput, v: AttentionInput, dtype: torch.dtype
) -> Tensor:
    """Dequantizes to dtype and calls PyTorch's attention."""
    q_BNSD, k_BNSD, v_BNSD = (x.dequantize(dtype).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD).transpose(1, 2)


DEQUANTIZED = DequantizedAttention()


def keep_layout(x: AttentionInput) -> AttentionInput:
    """The `ConvertLayout` of kernels that take keys and values of any layout."""
    return x


class Fp8Attention:
    """Implements `wan.kernels.interfaces.AttentionBackend` for every call.

    Args:
        dtype: Of the results.
        quantize_before_exchange: q, k and v are quantized before the all-to-all and sent in FP8.
    """

    always_applies = True

    def __init__(
        self,
        quantizer: Fp8Quantizer,
        dtype: torch.dtype,
        kernel: Fp8Kernel = DEQUANTIZED,
        quantize_before_exchange: bool = False,
        convert_layout: ConvertLayout = keep_layout,
    ) -> None:
        self._quantizer, self._dtype, self._kernel = quantizer, dtype, kernel
        self.quantizes_before_exchange = quantize_before_exchange
        self._convert_layout = convert_layout
        self.name = f"fp8 ({quantizer.name}; {kernel.name})"
        self.q_multiple = quantizer.q_rows

    def applies_to(self, step: StepInfo | None) -> bool:
        return True

    def quantize(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, num_valid: int, step: StepInfo | None
    ) -> QKV:
        """Returns q, k, v, quantized if that happens before the exchange.

        Padding rows are set to zero, so that they do not change a scale. Raises ValueError if s is
        not a multiple of the rows of a key's scale: the scales of the ranks could not be joined.
        """
        if not self.quantizes_before_exchange:
            return AttentionInput(q_BsND), AttentionInput(k_BsND), AttentionInput(v_BsND)
        num_rows, multiple = q_BsND.shape[1], self._quantizer.kv_rows
        if num_rows % multiple:
            raise ValueError(
                f"FP8 exchanges need a multiple of {multiple} tokens on each rank, but here are "
                f"{num_rows}: pad them"
            )
        q, k, v = (
            pad_rows(x[:, :num_valid], num_rows - num_valid) for x in (q_BsND, k_BsND, v_BsND)
        )
        with trace.span("quantise", q, what="q k v"):
            return (
                self._quantizer.quantize_q(q, step),
                self._quantizer.quantize_k(k, step),
                self._quantizer.quantize_v(v),
            )

    def prepare_kv(
        self, q: AttentionInput, k: AttentionInput, v: AttentionInput, step: StepInfo | None
    ) -> AttendRows:
        """Quantizes keys and values once; each query block is quantized when it is attended."""
        quantizer = self._quantizer
        with trace.span("prepare", k.values, what="k v"):
            keys = self._convert_layout(
                quantizer.quantize_k(k.values, step) if k.scale is None else k
            )
            values = self._convert_layout(quantizer.quantize_v(v.values) if v.scale is None else v)

        def attend(q_block: AttentionInput, first: int) -> Tensor:
            queries = q_block
            if q_block.scale is None:
                with trace.span("quantise", q_block.values, what="q"):
                    queries = quantizer.quantize_q(q_block.values, step)
            with trace.span("attention", queries.values, keys=keys.values.shape[1], method="fp8"):
                return self._kernel(queries, keys, values, self._dtype)

        return attend
