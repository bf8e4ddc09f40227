"""FP8 attention as a method: what is quantised when, and the kernel for devices without FP8 units.

Legend: B batch, s this card's tokens, S all tokens, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels.attend import tiled_attention
from wan.kernels.base import AttendRows, Call
from wan.kernels.quant import Place, Quantised, Quantiser, pad_rows, plain, unplaced

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
    before_exchange: they become so on the card that made them, and travel as FP8 numbers. place:
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
        ValueError if s is no multiple of the rows of a key's scale: cards' scales could not be
        joined.
        """
        if not self._before_exchange:
            return q_BsND, k_BsND, v_BsND
        rows, multiple = q_BsND.shape[1], self._quantiser.kv_rows
        if rows % multiple:
            raise ValueError(
                f"FP8 numbers in exchanges need a multiple of {multiple} tokens on each card, but "
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
