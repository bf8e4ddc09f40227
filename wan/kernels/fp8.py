"""FP8 attention: E4M3 with a scale per block of rows and head; Q and K are rotated before.

After mindiesd 3.1.0 (FP8RotateQuantFA): Q and K are rotated by one orthogonal matrix, which leaves
q k^T as it was and spreads outliers; Q has a scale per 128 rows, K and V one per 256 rows.

Legend: B batch, s this rank's tokens, S tokens, N heads, D head size, k blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from wan import trace
from wan.kernels.base import QKV, AttendRows, Payload, StepInfo, Target, divide
from wan.kernels.reference import tiled_attention
from wan.settings.numerics import KV_ROWS, Q_ROWS

E4M3_MAX = 448.0
HADAMARD_SEED = 1234  # mindiesd's
Pair = tuple[Tensor, Tensor]

BlockQuantise = Callable[[Tensor, int], Payload]
"""quantise(x_BSND, rows): E4M3 with one float32 scale per head and `rows` tokens."""

Form = Callable[[Payload], Payload]
"""Brings keys or values into the form that a kernel wants, once for all blocks of queries."""


class Quantiser(Protocol):
    """How queries, keys and values are quantised: another format is another of these."""

    @property
    def name(self) -> str:
        """For logs and records."""
        ...

    @property
    def q_rows(self) -> int:
        """Rows of a query's scale."""
        ...

    @property
    def kv_rows(self) -> int:
        """Rows of a scale of keys or values; a multiple of q_rows."""
        ...

    def q(self, x_BSND: Tensor, step: StepInfo | None) -> Payload: ...

    def k(self, x_BSND: Tensor, step: StepInfo | None) -> Payload: ...

    def v(self, x_BSND: Tensor) -> Payload: ...


class Fp8Kernel(Protocol):
    """softmax(q k^T / sqrt(D)) v, [B,S,N,D] in dtype; k and v come through the kernel's `Form`."""

    @property
    def name(self) -> str:
        """What computes, for logs and records."""
        ...

    def __call__(self, q: Payload, k: Payload, v: Payload, dtype: torch.dtype, /) -> Tensor: ...


def quantise(x_BSND: Tensor, rows: int) -> Payload:
    """`BlockQuantise` by plain operations, in float32: scale = absmax / 448, values = x / scale.

    Values are rounded half to even. A last block of fewer rows has the scale of its real rows; a
    block of zeros has scale 1.
    """
    tokens = x_BSND.shape[1]
    x_BkrND = pad_rows(x_BSND.float(), -tokens % rows).unflatten(1, (-1, rows))
    scale = divide(x_BkrND.abs().amax(dim=(2, 4), keepdim=True), E4M3_MAX)
    scale = torch.where(scale > 0, scale, 1.0)
    # A subnormal scale is rounded so much that values exceed 448, of which torch 2.8 makes NaN.
    values = (x_BkrND / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    values = values.to(torch.float8_e4m3fn).flatten(1, 2)[:, :tokens]
    return Payload(values, scale.squeeze(2), rows)


def sylvester(
    size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Sylvester's Hadamard matrix / sqrt(size), [size,size]: the rotation of mindiesd's rf_v3.

    Raises ValueError if size is no power of two.
    """
    return (_signs(size) / size**0.5).to(device=device, dtype=dtype)


def hadamard(
    size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """The same with rows of random sign (seed 1234): mindiesd's rotation of online FP8 attention.

    Raises ValueError if size is no power of two.
    """
    signs, generator = _signs(size), torch.Generator().manual_seed(HADAMARD_SEED)
    flips = 2.0 * torch.randint(0, 2, (size, 1), generator=generator) - 1.0
    return (flips * signs / size**0.5).to(device=device, dtype=dtype)


def _signs(size: int) -> Tensor:
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard rotation needs a power of two as head size, not {size}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


class Rotations:
    """The matrices [D,D] of queries and of keys, for each layer.

    head_dim: D. build: makes the matrix that both share. exported: (expert, layer) -> matrices of
    queries and keys, where a quantised checkpoint brings its own.

    Raises ValueError for a head_dim that `build` refuses.
    """

    def __init__(
        self,
        head_dim: int,
        build: Callable[[int], Tensor] = hadamard,
        exported: Mapping[tuple[str, int], Pair] | None = None,
    ) -> None:
        shared = build(head_dim)
        self._shared: Pair = (shared, shared)
        self._exported = dict(exported or {})
        self._placed: dict[tuple[object, torch.dtype, torch.device], Pair] = {}

    def of(self, x: Tensor, step: StepInfo | None) -> Pair:
        """(of queries, of keys) in the dtype and on the device of `x`; moved there once."""
        key = None if step is None or step.layer is None else (step.expert, step.layer)
        key = key if key in self._exported else None
        found = self._placed.get((key, x.dtype, x.device))
        if found is None:
            q_rot, k_rot = self._shared if key is None else self._exported[key]
            found = (q_rot.to(x.device, x.dtype), k_rot.to(x.device, x.dtype))
            self._placed[key, x.dtype, x.device] = found
        return found


def pad_rows(x_BSND: Tensor, missing: int) -> Tensor:
    """x with `missing` rows of zeros behind; x itself if there are none, where F.pad would copy."""
    return F.pad(x_BSND, (0, 0, 0, 0, 0, missing)) if missing else x_BSND


def rotate(x_BSND: Tensor, rotation_DD: Tensor, tiled: bool = True) -> Tensor:
    """x @ R in x's dtype.

    tiled: By products of 128 rows each. On CPUs the bits of one large product depend on how many
    rows and heads are in it, and modes divide them differently.
    """
    if not tiled:
        return torch.matmul(x_BSND, rotation_DD)
    batch, rows, heads, head = x_BSND.shape
    padded_BSND = pad_rows(x_BSND, -rows % Q_ROWS)
    tiles = padded_BSND.transpose(1, 2).reshape(-1, Q_ROWS, head)
    rotated = torch.bmm(tiles, rotation_DD.expand(tiles.shape[0], -1, -1))
    return rotated.view(batch, heads, -1, head)[:, :, :rows].transpose(1, 2)


class Fp8Quantiser:
    """Implements `Quantiser`: Q and K rotated, Q per 128 rows, K and V per 256 rows.

    rotations: The matrices. quantise: Makes the blocks. device_type: Of the device that computes.
    """

    name = "per-block E4M3"
    q_rows = Q_ROWS
    kv_rows = KV_ROWS

    def __init__(
        self, rotations: Rotations, quantise: BlockQuantise = quantise, device_type: str = "cpu"
    ) -> None:
        self._rotations, self._quantise = rotations, quantise
        self._tiled = device_type == "cpu"

    def q(self, x_BSND: Tensor, step: StepInfo | None) -> Payload:
        rotated_BSND = rotate(x_BSND, self._rotations.of(x_BSND, step)[0], self._tiled)
        return self._quantise(rotated_BSND, self.q_rows)

    def k(self, x_BSND: Tensor, step: StepInfo | None) -> Payload:
        rotated_BSND = rotate(x_BSND, self._rotations.of(x_BSND, step)[1], self._tiled)
        return self._quantise(rotated_BSND, self.kv_rows)

    def v(self, x_BSND: Tensor) -> Payload:
        return self._quantise(x_BSND, self.kv_rows)


class DequantisedAttention:
    """Implements `Fp8Kernel` for devices without FP8 units: attention on what the values stand for.

    On CPUs, and without a target, it computes in float32 and in tiles, so that no division changes
    the bits; elsewhere by one call in `dtype`.
    """

    name = "PyTorch SDPA, dequantised"

    def __init__(self, target: Target | None = None) -> None:
        self._tiled = target is None or target.device.type == "cpu"

    def __call__(self, q: Payload, k: Payload, v: Payload, dtype: torch.dtype, /) -> Tensor:
        if self._tiled:
            q_BSND, k_BSND, v_BSND = (x.dequantised(torch.float32) for x in (q, k, v))
            return tiled_attention(q_BSND, k_BSND, v_BSND).to(dtype)
        return attend_dequantised(q, k, v, dtype)


def attend_dequantised(q: Payload, k: Payload, v: Payload, dtype: torch.dtype) -> Tensor:
    """PyTorch's attention, one call in dtype."""
    q_BNSD, k_BNSD, v_BNSD = (x.dequantised(dtype).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD).transpose(1, 2)


DEQUANTISED = DequantisedAttention()


def as_they_are(x: Payload) -> Payload:
    """`Form` of kernels that take keys and values as they are."""
    return x


class Fp8Attention:
    """Implements `wan.kernels.base.Method`: every call, at every step.

    quantiser: how q, k, v are quantised. dtype: of the results. kernel: what computes.
    before_exchange: they are quantised on the rank that made them, and exchanged in FP8. place: the
    form in which the kernel wants keys and values.
    """

    is_total = True

    def __init__(
        self,
        quantiser: Quantiser,
        dtype: torch.dtype,
        kernel: Fp8Kernel = DEQUANTISED,
        before_exchange: bool = False,
        place: Form = as_they_are,
    ) -> None:
        self._quantiser, self._dtype, self._kernel = quantiser, dtype, kernel
        self.packs, self._place = before_exchange, place
        self.name = f"fp8 ({quantiser.name}; {kernel.name})"
        self.q_multiple = quantiser.q_rows

    def applies(self, step: StepInfo | None) -> bool:
        return True

    def pack(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, valid: int, step: StepInfo | None
    ) -> QKV:
        """q, k, v as they are, or quantised where that comes before the exchange.

        Then rows behind the `valid` ones become zeros, so that they change no scale. Raises
        ValueError if s is no multiple of the rows of a key's scale: ranks' scales could not be
        joined.
        """
        if not self.packs:
            return Payload(q_BsND), Payload(k_BsND), Payload(v_BsND)
        rows, multiple = q_BsND.shape[1], self._quantiser.kv_rows
        if rows % multiple:
            raise ValueError(
                f"FP8 exchanges need a multiple of {multiple} tokens on each rank, but here are "
                f"{rows}: pad them"
            )
        q, k, v = (pad_rows(x[:, :valid], rows - valid) for x in (q_BsND, k_BsND, v_BsND))
        with trace.span("quantise", q, what="q k v"):
            return self._quantiser.q(q, step), self._quantiser.k(k, step), self._quantiser.v(v)

    def prepare(self, q: Payload, k: Payload, v: Payload, step: StepInfo | None) -> AttendRows:
        """Keys and values are quantised here, once; queries when their block's turn comes."""
        quantiser = self._quantiser
        with trace.span("prepare", k.values, what="k v"):
            keys = self._place(quantiser.k(k.values, step) if k.scale is None else k)
            values = self._place(quantiser.v(v.values) if v.scale is None else v)

        def attend(q_block: Payload, first: int) -> Tensor:
            queries = q_block
            if q_block.scale is None:
                with trace.span("quantise", q_block.values, what="q"):
                    queries = quantiser.q(q_block.values, step)
            with trace.span("attention", queries.values, keys=keys.values.shape[1], method="fp8"):
                return self._kernel(queries, keys, values, self._dtype)

        return attend
