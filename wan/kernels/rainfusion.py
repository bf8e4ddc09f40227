"""RainFusion: attention that leaves out, per head, the blocks of keys that matter least.

`sparse_masks` says which blocks; here is when a mask is made anew, and the way of attending. What
computes a block-sparse product is a `BlockSparseKernel`: the reference here, FlexAttention on CUDA,
MindIE-SD's operators on NPUs.

Legend: B batch, S tokens in RainFusion's order, N heads, D head size, nq and nk blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from wan.kernels.base import AttendRows, Call
from wan.kernels.fp8 import Place, Quantised, Quantiser, plain, unplaced
from wan.kernels.rainfusion_masks import Q_ROWS, plan
from wan.kernels.reference import tiled_attention

TYPES = ("v2", "v3")


class BlockSparseKernel(Protocol):
    """softmax(q k^T / sqrt(D)) v, [B,S,N,D], where a block of 128 queries sees some blocks of keys.

    q, k, v: [B,S,N,D], all tensors or, where the kernel takes them, all `Quantised` (then any
    floating dtype may come back).
    mask_BNqk: bool [B, N, ceil(Sq / 128), ceil(Sk / k_rows)], True = attend.
    """

    def __call__(self, q: Any, k: Any, v: Any, mask_BNqk: Tensor, k_rows: int, /) -> Tensor: ...


def reference_blocks(
    q: Tensor | Quantised, k: Tensor | Quantised, v: Tensor | Quantised, mask: Tensor, k_rows: int
) -> Tensor:
    """`BlockSparseKernel` on any device: correct, of the same bits for every cut, and slow."""
    q, k, v = (plain(x, torch.float32) for x in (q, k, v))
    return tiled_attention(q, k, v, mask, k_rows)


class MaskCache:
    """Masks of (sample, branch, layer, first head) of the expert at work, for `refresh` steps.

    Counted from start_step: steps start_step, start_step + refresh, ... make every mask anew, and
    so does a mask's absence, another shape, or a step that lies in another such period. A mask is
    dropped when used for the last time, before its period or the sampling ends; another expert, or
    an earlier step than the last (the next video), drops everything.
    """

    def __init__(self, start_step: int, refresh: int) -> None:
        self._start, self._refresh = start_step, refresh
        self._masks: dict[tuple[int, str, int, int], tuple[int, Tensor]] = {}
        self._expert, self._step = "", 0

    def get(self, call: Call, shape: Sequence[int]) -> Tensor | None:
        """The mask to use again, or None where a new one is due."""
        if call.expert != self._expert or call.step < self._step:
            self._masks.clear()
        self._expert, self._step = call.expert, call.step
        period, new = divmod(call.step - self._start, self._refresh)
        made, mask = self._masks.get(_key(call), (None, None))
        if not self._used_later(call):
            self._masks.pop(_key(call), None)
        if new == 0 or mask is None or made != period or mask.shape != tuple(shape):
            return None
        return mask

    def put(self, call: Call, mask: Tensor) -> None:
        """Keeps a mask made at this call if a later step will use it."""
        if self._used_later(call):
            self._masks[_key(call)] = ((call.step - self._start) // self._refresh, mask)

    def _used_later(self, call: Call) -> bool:
        """Whether the next step belongs to the same period."""
        following = call.step + 1
        return following < call.steps and (following - self._start) % self._refresh != 0


class RainFusionAttention:
    """Implements `wan.kernels.base.Method`: rf_v2 / rf_v3 of MindIE-SD, from start_step on.

    kind: "v2" or "v3"; they attend alike, only v3 can be quantised. sparsity: share of each row's
    blocks that is left out, 0 <= sparsity < 1. refresh: steps for which a mask is used.
    attend_blocks: the kernel. quantiser: FP8 numbers, scored before they are quantised; blocks of
    keys are then those of its scales. place: the form in which the kernel wants keys and values.

    Raises ValueError for values outside what is said here.
    """

    q_multiple = Q_ROWS

    def __init__(
        self,
        kind: str,
        sparsity: float,
        start_step: int,
        refresh: int = 1,
        *,
        attend_blocks: BlockSparseKernel = reference_blocks,
        quantiser: Quantiser | None = None,
        place: Place = unplaced,
    ) -> None:
        if kind not in TYPES:
            raise ValueError(f"RainFusion's type must be one of {', '.join(TYPES)}, got {kind!r}")
        if quantiser is not None and kind != "v3":
            raise ValueError(f"FP8 RainFusion exists as v3 only, got {kind}: take v3, or no FP8")
        if quantiser is not None and quantiser.q_rows != Q_ROWS:
            raise ValueError(f"queries need a scale per {Q_ROWS} rows, got {quantiser.q_rows}")
        if not 0 <= sparsity < 1 or start_step < 0 or refresh < 1:
            raise ValueError(
                "RainFusion needs 0 <= sparsity < 1, start_step >= 0 and refresh >= 1, got "
                f"sparsity={sparsity}, start_step={start_step}, refresh={refresh}"
            )
        self.name = f"rainfusion {kind}" + (f" ({quantiser.name})" if quantiser else "")
        self.k_rows = Q_ROWS if quantiser is None else quantiser.kv_rows
        self.masks = MaskCache(start_step, refresh)
        self._sparsity, self._start_step = sparsity, start_step
        self._attend_blocks, self._quantiser, self._place = attend_blocks, quantiser, place

    def applies(self, call: Call | None) -> bool:
        """Whether the call's step is sparse. Raises ValueError if nobody says which call it is."""
        return _known(call).step >= self._start_step

    def pack(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, valid: int, call: Call | None
    ) -> Sequence[Tensor]:
        """Whole numbers travel: blocks are scored before they are quantised."""
        return q_BsND, k_BsND, v_BsND

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, call: Call | None) -> AttendRows:
        """q: at least one row, from call.first_row on; k, v: all rows of call.grid.

        The mask is made (or found) here, once for all blocks of queries; keys and values are
        quantised here. Raises ValueError if call is None, or does not fit q and k.
        """
        mask = self._mask(q, k, _known(call))
        keys: Tensor | Quantised = k
        values: Tensor | Quantised = v
        if self._quantiser is not None:
            keys, values = self._quantiser.k(k, call), self._quantiser.v(v)
        keys, values = self._place(keys), self._place(values)

        def attend(q_block: Tensor, first: int) -> Tensor:
            begin = first // Q_ROWS
            seen = mask[:, :, begin : begin + math.ceil(q_block.shape[1] / Q_ROWS)]
            queries: Tensor | Quantised = q_block
            if self._quantiser is not None:
                queries = self._quantiser.q(q_block, call)
            out = self._attend_blocks(queries, keys, values, seen, self.k_rows)
            return out.to(q_block.dtype)

        return attend

    def _mask(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        blocks = math.ceil(q.shape[1] / Q_ROWS), math.ceil(k.shape[1] / self.k_rows)
        mask = self.masks.get(call, (q.shape[0], q.shape[2], *blocks))
        if mask is None:
            mask = plan(q, k, call.grid, self._sparsity, call.first_row, self.k_rows)
            self.masks.put(call, mask)
        return mask


def _key(call: Call) -> tuple[int, str, int, int]:
    return call.sample, call.branch, call.layer, call.first_head


def _known(call: Call | None) -> Call:
    if call is None:
        raise ValueError("RainFusion must be told step and layer of each call: pass step and layer")
    return call
