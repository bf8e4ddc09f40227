"""RainFusion: block-sparse attention that skips, per head, the key blocks with the lowest scores.

`rainfusion_masks` computes the block masks. This module caches them and implements the attention
backend. A `BlockSparseKernel` computes the block-sparse product: the reference below, FlexAttention
on CUDA, MindIE-SD's operators on NPUs.

Legend: B batch, S tokens in RainFusion's order, N heads, D head size, q and k query and
key blocks, s this rank's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.kernels.fp8 import ConvertLayout, Fp8Quantizer, keep_layout
from wan.kernels.interfaces import QKV, AttendRows, AttentionInput, Target
from wan.kernels.rainfusion_masks import make_rainfusion_mask
from wan.kernels.reference import attend_in_tiles
from wan.settings.numerics import Q_ROWS
from wan.utils import trace

_MaskKey = tuple[int, str, int | None, int]


class BlockSparseKernel(Protocol):
    """softmax(q k^T / sqrt(D)) v, [B,S,N,D], with a mask of key blocks for each 128 queries.

    q, k, v: none quantized or, if the kernel supports it, all (then the result may have any
    floating dtype). mask_BNqk: bool [B, N, ceil(Sq / 128), ceil(Sk / k_rows)], True = attend.
    k_rows: rows of a key block.
    """

    @property
    def name(self) -> str:
        """For logs and records."""

    def __call__(
        self,
        q: AttentionInput,
        k: AttentionInput,
        v: AttentionInput,
        mask_BNqk: Tensor,
        k_rows: int,
        /,
    ) -> Tensor: ...


class ReferenceBlockSparseKernel:
    """Reference `BlockSparseKernel` for any device: slow.

    The result is bitwise the same however the queries are split.
    """

    name = "PyTorch SDPA, masked in tiles"

    def __init__(self, target: Target | None = None) -> None:
        """Makes the kernel; target is ignored."""

    def __call__(
        self,
        q: AttentionInput,
        k: AttentionInput,
        v: AttentionInput,
        mask_BNqk: Tensor,
        k_rows: int,
        /,
    ) -> Tensor:
        q_BSND, k_BSND, v_BSND = (x.dequantize(torch.float32) for x in (q, k, v))
        return attend_in_tiles(q_BSND, k_BSND, v_BSND, mask_BNqk, k_rows)


REFERENCE = ReferenceBlockSparseKernel()


class MaskCache:
    """Caches block masks by (sample, branch, layer, first head), each for `refresh` steps.

    The periods of `refresh` steps are counted from the first sparse step, start_step(num_steps). A
    mask is computed at the first step of a period, and whenever the period has no mask of that
    shape. A mask is freed at its last use. Another expert, or a step index that does not increase
    (another video), clears the cache.
    """

    def __init__(self, start_step: Callable[[int], int], refresh: int) -> None:
        self._start_step, self._refresh = start_step, refresh
        self._masks: dict[_MaskKey, tuple[int, Tensor]] = {}
        self._expert, self._last_index = "", dict[_MaskKey, int]()

    def take(self, step: StepInfo, shape: Sequence[int]) -> Tensor | None:
        """Returns the cached mask, or None if a new one must be computed.

        It is called once for each attention call, since it frees a mask that no later step uses.
        """
        if step.expert != self._expert or step.index <= self._last_index.get(
            _make_mask_key(step), -1
        ):
            self._masks.clear()
            self._last_index.clear()
        self._expert, self._last_index[_make_mask_key(step)] = step.expert, step.index
        period, age = divmod(step.index - self._start_step(step.count), self._refresh)
        mask_period, mask = self._masks.get(_make_mask_key(step), (None, None))
        if not self._is_reused_next(step):
            self._masks.pop(_make_mask_key(step), None)
        if age == 0 or mask is None or mask_period != period or mask.shape != tuple(shape):
            return None
        return mask

    def store(self, step: StepInfo, mask: Tensor) -> None:
        """Caches the mask of this call if the next step uses it."""
        if self._is_reused_next(step):
            period = (step.index - self._start_step(step.count)) // self._refresh
            self._masks[_make_mask_key(step)] = (period, mask)

    def _is_reused_next(self, step: StepInfo) -> bool:
        """Whether the next step uses the same mask."""
        next_index, first_sparse = step.index + 1, self._start_step(step.count)
        return next_index < step.count and (next_index - first_sparse) % self._refresh != 0


class RainFusionAttention:
    """An `AttentionBackend`: rf_v2 / rf_v3 of MindIE-SD from start_step.

    Args:
        rainfusion_type: "v2" or "v3"; they compute the same, but only v3 can be quantized.
        sparsity: Share of the key blocks that a row skips, 0 <= sparsity < 1.
        start_step: The first sparse step, or a function of the number of steps.
        refresh: Steps for which a mask is used, at least 1.
        quantizer: Quantizes q, k and v after the blocks have been scored; a key block has as many
            rows as a scale. None: no quantization.
    """

    q_multiple = Q_ROWS

    quantizes_before_exchange = False

    def __init__(
        self,
        rainfusion_type: str,
        sparsity: float,
        start_step: int | Callable[[int], int],
        refresh: int = 1,
        *,
        kernel: BlockSparseKernel = REFERENCE,
        quantizer: Fp8Quantizer | None = None,
        convert_layout: ConvertLayout = keep_layout,
    ) -> None:
        start = start_step if callable(start_step) else lambda _: start_step
        quantizer_name = f"{quantizer.name}; " if quantizer else ""
        self.name = f"rainfusion {rainfusion_type} ({quantizer_name}{kernel.name})"
        self.always_applies = start_step == 0
        self.k_rows = Q_ROWS if quantizer is None else quantizer.kv_rows
        self.masks = MaskCache(start, refresh)
        self._sparsity, self._start_step = sparsity, start
        self._kernel, self._quantizer, self._convert_layout = kernel, quantizer, convert_layout

    def applies_to(self, step: StepInfo | None) -> bool:
        """Whether the step of this call is sparse; raises ValueError without a step."""
        layer_step = _require_layer(step)
        return layer_step.index >= self._start_step(layer_step.count)

    def quantize(
        self, q_BsND: Tensor, k_BsND: Tensor, v_BsND: Tensor, num_valid: int, step: StepInfo | None
    ) -> QKV:
        """Returns q, k and v unchanged, because blocks are scored before quantization."""
        return AttentionInput(q_BsND), AttentionInput(k_BsND), AttentionInput(v_BsND)

    def prepare_kv(
        self, q: AttentionInput, k: AttentionInput, v: AttentionInput, step: StepInfo | None
    ) -> AttendRows:
        """Gets the mask, and quantizes keys and values, once for all query blocks.

        q: at least one row, from step.first_row on. k, v: all rows of step.grid. Raises ValueError
        if step is None, or does not fit q and k.
        """
        mask, fp8 = self._get_mask(q.values, k.values, _require_layer(step)), self._quantizer
        with trace.span("prepare", k.values, what="k v"):
            kernel_k = self._convert_layout(k if fp8 is None else fp8.quantize_k(k.values, step))
            kernel_v = self._convert_layout(v if fp8 is None else fp8.quantize_v(v.values))

        def attend(q_block: AttentionInput, first_local_row: int) -> Tensor:
            first_q_block = first_local_row // Q_ROWS
            num_q_blocks = math.ceil(q_block.values.shape[1] / Q_ROWS)
            block_mask = mask[:, :, first_q_block : first_q_block + num_q_blocks]
            queries, num_keys = q_block, kernel_k.values.shape[1]
            if fp8 is not None:
                with trace.span("quantise", q_block.values, what="q"):
                    queries = fp8.quantize_q(q_block.values, step)
            with trace.span("attention", queries.values, keys=num_keys, method="rainfusion"):
                out = self._kernel(queries, kernel_k, kernel_v, block_mask, self.k_rows)
            return out.to(q_block.values.dtype)

        return attend

    def _get_mask(self, q_BSND: Tensor, k_BSND: Tensor, step: StepInfo) -> Tensor:
        block_counts = math.ceil(q_BSND.shape[1] / Q_ROWS), math.ceil(k_BSND.shape[1] / self.k_rows)
        mask = self.masks.take(step, (q_BSND.shape[0], q_BSND.shape[2], *block_counts))
        if mask is None:
            with trace.span("mask", q_BSND):
                mask = make_rainfusion_mask(
                    q_BSND, k_BSND, step.grid, self._sparsity, step.first_row, self.k_rows
                )
            self.masks.store(step, mask)
        return mask


def _make_mask_key(step: StepInfo) -> _MaskKey:
    return step.sample, step.branch, step.layer, step.first_head


def _require_layer(step: StepInfo | None) -> StepInfo:
    if step is None or step.layer is None:
        raise ValueError("RainFusion needs `step` with a layer on every call")
    return step
