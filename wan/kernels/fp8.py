"""FP8 numbers for attention: E4M3 with a scale per block of rows and head; Q and K rotated before.

After mindiesd 3.1.0 (FP8RotateQuantFA): Q and K are rotated by one orthogonal matrix, which leaves
q k^T as it was and spreads outliers; Q has a scale per 128 rows, K and V one per 256 rows.

Legend: B batch, S tokens, N heads, D head size, k blocks of rows.

FP8 attention as a method: what is quantised when, and the kernel for devices without FP8 units.

Legend: B batch, s this rank's tokens, S all tokens, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels.base import AttendRows, Call
from wan.kernels.reference import BLOCK, tiled_attention

KV_BLOCK = 256  # rows of a scale of keys or values; queries have BLOCK
E4M3_MAX = 448.0
HADAMARD_SEED = 1234  # mindiesd's
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Quantised:
    """Numbers as payload times scale.

    payload: float8_e4m3fn [B,S,N,D], any strides. scale: float32 [B,ceil(S/rows),N,1]. rows: tokens
    that share a scale.
    """

    payload: Tensor
    scale: Tensor
    rows: int

    @property
    def shape(self) -> torch.Size:
        return self.payload.shape

    @property
    def device(self) -> torch.device:
        return self.payload.device

    def cut(self, first: int, last: int) -> Quantised:
        """Tokens first to last (excluded), as views.

        Raises ValueError where `first` is not the beginning of a block.
        """
        if first % self.rows:
            raise ValueError(f"a cut must begin at a multiple of {self.rows} rows, not at {first}")
        scale = self.scale[:, first // self.rows : -(-last // self.rows)]
        return Quantised(self.payload[:, first:last], scale, self.rows)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[B,S,N,D], the product taken in float32."""
        scale = self.scale.repeat_interleave(self.rows, dim=1)[:, : self.payload.shape[1]]
        return (self.payload.float() * scale).to(dtype)


def plain(x: Tensor | Quantised, dtype: torch.dtype) -> Tensor:
    """x itself, or the numbers that it stands for, in dtype."""
    return x.dequantised(dtype) if isinstance(x, Quantised) else x


def unplaced(x: Tensor | Quantised) -> Tensor | Quantised:
    """Keys or values as they are, for kernels that take them so."""
    return x


Place = Callable[[Tensor | Quantised], Tensor | Quantised]
"""Brings keys or values into the form that a kernel wants, once for all blocks of queries."""

BlockQuantise = Callable[[Tensor, int], Quantised]
"""quantise(x_BSND, rows): E4M3 with one float32 scale per head and `rows` tokens."""


class Quantiser(Protocol):
    """How queries, keys and values become `Quantised`: another format is another of these."""

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

    def q(self, x_BSND: Tensor, call: Call | None) -> Quantised: ...

    def k(self, x_BSND: Tensor, call: Call | None) -> Quantised: ...

    def v(self, x_BSND: Tensor) -> Quantised: ...


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

    def of(self, x: Tensor, call: Call | None) -> Pair:
        """(of queries, of keys) in the dtype and on the device of `x`; moved there once."""
        layer = None if call is None else (call.expert, call.layer)
        layer = layer if layer in self._exported else None
        found = self._placed.get((layer, x.dtype, x.device))
        if found is None:
            q_rot, k_rot = self._shared if layer is None else self._exported[layer]
            found = (q_rot.to(x.device, x.dtype), k_rot.to(x.device, x.dtype))
            self._placed[layer, x.dtype, x.device] = found
        return found


def pad_rows(x_BSND: Tensor, missing: int) -> Tensor:
    """x with `missing` rows of zeros behind; x itself if there are none, where F.pad would copy."""
    return F.pad(x_BSND, (0, 0, 0, 0, 0, missing)) if missing else x_BSND


def rotate(x_BSND: Tensor, rotation_DD: Tensor) -> Tensor:
    """x @ R in x's dtype.

    On CPUs as products of 128 rows each: the bits of one large product depend on how many rows and
    heads are in it, and modes cut them differently.
    """
    if x_BSND.device.type != "cpu":
        return torch.matmul(x_BSND, rotation_DD)
    batch, rows, heads, head = x_BSND.shape
    padded_BSND = pad_rows(x_BSND, -rows % BLOCK)
    tiles = padded_BSND.transpose(1, 2).reshape(-1, BLOCK, head)
    rotated = torch.bmm(tiles, rotation_DD.expand(tiles.shape[0], -1, -1))
    return rotated.view(batch, heads, -1, head)[:, :, :rows].transpose(1, 2)


def quantise(x_BSND: Tensor, rows: int) -> Quantised:
    """`BlockQuantise` by plain operations, in float32: scale = absmax / 448, payload = x / scale.

    Payloads are rounded half to even. A last block of fewer rows has the scale of its real rows; a
    block of zeros has scale 1.
    """
    tokens = x_BSND.shape[1]
    x_BkrND = pad_rows(x_BSND.float(), -tokens % rows).unflatten(1, (-1, rows))
    scale = x_BkrND.abs().amax(dim=(2, 4), keepdim=True) / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    payload = (x_BkrND / scale).to(torch.float8_e4m3fn).flatten(1, 2)[:, :tokens]
    return Quantised(payload, scale.squeeze(2), rows)


class Fp8Quantiser:
    """Implements `Quantiser`: Q and K rotated, Q per 128 rows, K and V per 256 rows."""

    name = "per-block E4M3"
    q_rows = BLOCK
    kv_rows = KV_BLOCK

    def __init__(self, rotations: Rotations, quantise: BlockQuantise = quantise) -> None:
        self._rotations, self._quantise = rotations, quantise

    def q(self, x_BSND: Tensor, call: Call | None) -> Quantised:
        return self._quantise(rotate(x_BSND, self._rotations.of(x_BSND, call)[0]), self.q_rows)

    def k(self, x_BSND: Tensor, call: Call | None) -> Quantised:
        return self._quantise(rotate(x_BSND, self._rotations.of(x_BSND, call)[1]), self.kv_rows)

    def v(self, x_BSND: Tensor) -> Quantised:
        return self._quantise(x_BSND, self.kv_rows)


Fp8Attend = Callable[[Quantised, Any, Any, torch.dtype], Tensor]
"""attend(q, k, v, dtype): softmax(q k^T / sqrt(D)) v as [B,S,N,D] in `dtype`.

k, v: `Quantised`, or what the kernel's own `Place` made of them.
"""


def attend_dequantised(q: Quantised, k: Any, v: Any, dtype: torch.dtype) -> Tensor:
    """`Fp8Attend` for devices without an FP8 kernel.

    On CPUs in float32 and in tiles, so that no cut changes the bits; on GPUs one call in `dtype`.
    """
    if q.payload.device.type != "cpu":
        return attend_dense(q, k, v, dtype)
    q_BSND, k_BSND, v_BSND = (plain(x, torch.float32) for x in (q, k, v))
    return tiled_attention(q_BSND, k_BSND, v_BSND).to(dtype)


def attend_dense(q: Quantised, k: Any, v: Any, dtype: torch.dtype) -> Tensor:
    """`Fp8Attend` by PyTorch's attention on numbers dequantised to `dtype`."""
    q_BNSD, k_BNSD, v_BNSD = (plain(x, dtype).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD).transpose(1, 2)


class Fp8Attention:
    """Implements `wan.kernels.base.Method`: every call, at every step.

    quantiser: how q, k, v become FP8 numbers. dtype: of the results. attend: the kernel.
    before_exchange: they become so on the rank that made them, and travel as FP8 numbers. place:
    the form in which the kernel wants keys and values.
    """

    def __init__(
        self,
        quantiser: Quantiser,
        dtype: torch.dtype,
        attend: Fp8Attend = attend_dequantised,
        before_exchange: bool = False,
        place: Place = unplaced,
    ) -> None:
        self._quantiser, self._dtype, self._attend = quantiser, dtype, attend
        self._before_exchange, self._place = before_exchange, place
        self.name = f"fp8 ({quantiser.name})"
        self.q_multiple = quantiser.q_rows

    def applies(self, call: Call | None) -> bool:
        return True

    def pack(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, valid: int, call: Call | None
    ) -> tuple[Tensor | Quantised, Tensor | Quantised, Tensor | Quantised]:
        """q, k, v as they are, or quantised where that comes before the exchange.

        Then rows behind the `valid` ones become zeros, so that they change no scale. Raises
        ValueError if s is no multiple of the rows of a key's scale: ranks' scales could not be
        joined.
        """
        if not self._before_exchange:
            return q_BsND, k_BsND, v_BsND
        rows, multiple = q_BsND.shape[1], self._quantiser.kv_rows
        if rows % multiple:
            raise ValueError(
                f"FP8 numbers in exchanges need a multiple of {multiple} tokens on each rank, but "
                f"here are {rows}: pad them"
            )
        q, k, v = (pad_rows(x[:, :valid], rows - valid) for x in (q_BsND, k_BsND, v_BsND))
        return self._quantiser.q(q, call), self._quantiser.k(k, call), self._quantiser.v(v)

    def prepare(
        self,
        q: Tensor | Quantised,
        k: Tensor | Quantised,
        v: Tensor | Quantised,
        call: Call | None,
    ) -> AttendRows:
        """Keys and values are quantised here, once; queries when their block's turn comes."""
        keys = self._place(k if isinstance(k, Quantised) else self._quantiser.k(k, call))
        values = self._place(v if isinstance(v, Quantised) else self._quantiser.v(v))

        def attend(q_block: Tensor | Quantised, first: int) -> Tensor:
            queries = q_block
            if not isinstance(queries, Quantised):
                queries = self._quantiser.q(queries, call)
            return self._attend(queries, keys, values, self._dtype)

        return attend
