"""Attention to some of the keys at a time, merged by log-sum-exp.

Legend: B batch, S queries, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from wan.utils import trace

KvBlock = tuple[int, Tensor, Tensor]
"""The owner's rank, k and v, [B,S,N,D] each."""

KeyPart = tuple[int, int, float]
"""Consecutive keys, first and end, and the number that is added to their logits."""

SplitKeys = Callable[[int, int], Sequence[KeyPart]]
"""split_keys(first_key, num_keys): the parts of a block whose first key has a global index."""


def attend_to_blocks(
    attend_with_lse: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q_blocks: Sequence[Tensor],
    kv_blocks: Iterable[KvBlock],
    valid_rows: Sequence[int],
    mergers: Sequence[LseMerger],
    split_keys: SplitKeys = lambda first_key, num_keys: ((0, num_keys, 0.0),),
) -> None:
    """Adds to each query block's merger its attention to the keys of all blocks.

    Args:
        valid_rows: Rows without padding of each owner; the owners' rows are consecutive.
        split_keys: Splits the keys of a block into parts.
    """
    for owner, k_block, v_block in kv_blocks:
        num_rows, first_key = valid_rows[owner], sum(valid_rows[:owner])
        if not num_rows:
            continue
        parts = split_keys(first_key, num_rows)
        attributes = {"owner": owner} if len(valid_rows) > 1 else {}
        for block, (q, merger) in enumerate(zip(q_blocks, mergers, strict=True)):
            with trace.span(
                "attention", q, block=block, keys=num_rows, method="dense", **attributes
            ):
                results = [
                    attend_with_lse(q, k_block[:, start:stop], v_block[:, start:stop])
                    for start, stop, _ in parts
                ]
            with trace.span("merge", block=block):
                for (out, lse), (*_, bias) in zip(results, parts, strict=True):
                    merger.add(out, lse + bias if bias else lse)
            del results, out, lse


class LseMerger:
    """Merges partial attention results by their log-sum-exp, in float32.

    A further normalized result (o_j, lse_j) is added by
    out <- out + sigmoid(lse_j - lse) (o_j - out) and lse <- logaddexp(lse, lse_j), which cannot
    overflow.

    On the CPU the weights are computed in float64 and rounded once, so that the bits of an element
    do not depend on how many heads are merged at once: a vectorized float32 exponential differs in
    the last bit from the scalar one at the end of a loop. Other operations round the same way.

    device_type: Type of the device whose kernels compute; None: that of the tensors.
    """

    def __init__(self, device_type: str | None = None) -> None:
        self._device_type = device_type
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out_BSND: Tensor, lse_BNS: Tensor) -> None:
        """Adds the result for further, disjoint keys; lse is a natural log in float32."""
        device_type = self._device_type or lse_BNS.device.type
        lse = lse_BNS.double() if device_type == "cpu" else lse_BNS.float()
        if self._out is None or self._lse is None:
            self._out, self._lse = out_BSND, lse
            return
        weight = torch.sigmoid(lse - self._lse).float().transpose(1, 2).unsqueeze(-1)
        self._out = self._out.float()
        self._out.add_(out_BSND.float().sub(self._out).mul_(weight))
        self._lse = torch.logaddexp(self._lse, lse)

    def result(self) -> Tensor:
        """Returns [B,S,N,D], in float32 if several results were added; there must be one."""
        assert self._out is not None, "no result was added"
        return self._out
