"""What one chunk of self-attention holds on a rank: integer formulas, derived in `docs/plan.md`.

There are three ways of attending: dense, FP8, and block-sparse (RainFusion), whose blocks may be
FP8 too. Each is a sum of what the attention layer keeps (the same on every device) and of what the
kernels copy around themselves: mindiesd's on NPUs, the plain references elsewhere. All sizes are
bytes, unless a name says numbers.

Legend: R ring ranks, P Ulysses ranks, e bytes of a number in the matrix products, n numbers of one
tensor of the chunk, m numbers of all keys at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from wan.planner.ways import ring_blocks
from wan.settings.attention import Attention, RainFusion
from wan.settings.numerics import KV_ROWS, Q_ROWS
from wan.settings.parallel import Parallel

FP32 = 4
INT64 = 8
NPU_LSE = 64  # npu_fusion_attention's maximum and sum of a row and head, eight float32 each


@dataclass(frozen=True)
class Chunk:
    """The heads of a chunk that a rank holds.

    rows: tokens that the rank attends from, padding included. tokens: real tokens of the video.
    heads: the rank's own of this chunk. device: "npu", "cuda" or "cpu".
    """

    rows: int
    tokens: int
    heads: int
    head_dim: int
    e: int
    parallel: Parallel
    attention: Attention
    device: str

    @property
    def numbers(self) -> int:
        """Of q, k, v or the result."""
        return self.rows * self.heads * self.head_dim

    @property
    def tensor(self) -> int:
        """q, k, v or the result in the run's number format."""
        return self.numbers * self.e

    def scale(self, rows: int) -> int:
        """The scales of a rank's q (rows 128), k or v (256)."""
        return ceil(self.rows / rows) * self.heads * FP32

    @property
    def scales(self) -> int:
        """Those that are exchanged."""
        return self.scale(Q_ROWS) + 2 * self.scale(KV_ROWS) if self.attention.quant_alltoall else 0

    @property
    def travels(self) -> int:
        """One of q, k, v as it is exchanged, without scales."""
        return self.numbers if self.attention.quant_alltoall else self.tensor

    @property
    def sent(self) -> int:
        """q, k and v as they are exchanged, with scales."""
        return 3 * self.travels + self.scales

    @property
    def hop(self) -> int:
        """K and V of one rank, as they go round a ring."""
        return 2 * self.travels + (2 * self.scale(KV_ROWS) if self.scales else 0)

    def gathers(self, way: str) -> bool:
        """Whether a rank holds a ring's keys and values at once: there is no log-sum-exp."""
        without_lse = way != "dense" or self.attention.algorithm == "laser"
        return self.parallel.ring_size > 1 and without_lse

    def at_work(self, way: str) -> int:
        """The most that lives beside the layer's q, k, v and result while it is attended to."""
        held = self.sent if self.parallel.ulysses_size > 1 else 0
        if self.gathers(way):
            held += self.parallel.ring_size * self.hop
        stages = {"dense": self.dense, "fp8": self._fp8, "sparse": self._sparse}[way]()
        joined = self.tensor * (2 if self._is_joined else 1)
        back = 2 * self.tensor if self.parallel.ulysses_size == 1 else 0  # and its copy
        packing = self._packing() if self.attention.quant_alltoall else 0
        return max(back, packing, held + joined, *(held + stage for stage in stages))

    @property
    def blocks(self) -> int:
        """Query blocks."""
        return self.parallel.mode.blocks

    @property
    def _is_joined(self) -> bool:
        return self.blocks > 1 or self._is_padded

    @property
    def _is_padded(self) -> bool:
        return self.rows * self.parallel.ring_size > self.tokens

    @property
    def _earlier(self) -> int:
        """Results of the query blocks before the last one."""
        return self.tensor - self.tensor // self.blocks

    def _keys(self, way: str) -> int:
        return self.numbers * (self.parallel.ring_size if self.gathers(way) else 1)

    def dense(self) -> list[int]:
        """Stages of dense attention: merging a ring's parts, joining the blocks' results."""
        n, b = self.numbers, self.blocks
        lse = self.rows * self.heads * (NPU_LSE if self.device == "npu" else FP32)
        if self.attention.algorithm == "laser":  # float16 copies, one more, float32 result
            m = self._keys("dense")
            return [self._earlier + 2 * (n // b + 2 * m) + max(2 * m, 8 * n // b)]
        joined = self.tensor if self._is_joined else 0
        if self.parallel.ring_size == 1:
            return [self.tensor + joined + lse]
        upcast = 0 if self.e == FP32 else n
        merge = n * FP32 + (self.tensor + (n + upcast) * FP32) // b  # sum; part, its difference
        statistics = (9 * FP32 * self.rows * self.heads + lse) // b
        hops = self.hop * ring_blocks(self.parallel)
        done = n * FP32 + upcast * self.e + joined
        return [hops + merge + statistics, self.hop + done]

    def _fp8(self) -> list[int]:
        """Stages of FP8 attention."""
        n, m, b = self.numbers, self._keys("fp8"), self.blocks
        if self.attention.quant_alltoall:
            if self.device != "npu":
                return self._dequantised(m, self._earlier, 0)
            copies = (n // b + 2 * m) if self.heads > 1 else 0
            return [self._earlier + copies + self._attending_fp8(n // b, m)]
        return self._quantised_here(m, 0)

    def _sparse(self) -> list[int]:
        """Stages of block-sparse attention: the mask, then the blocks."""
        rain = self.attention.rainfusion
        assert rain is not None, "the run is not sparse"
        n, m, b = self.numbers, self._keys("sparse"), self.blocks
        mask, planning = self.mask, self._planning(rain)
        if self.attention.fa_quant is not None:
            return [planning, *self._quantised_here(m, mask)]
        return [planning, mask + self._earlier + self._attending_sparse(rain, n // b, m)]

    def _quantised_here(self, m: int, mask: int) -> list[int]:
        """Keys, values, then each block of queries become FP8 numbers, and are attended to."""
        n, b = self.numbers, self.blocks
        ring = m // n
        scale = ring * self.scale(KV_ROWS)
        queries = n // b + self.scale(Q_ROWS) // b
        if self.device != "npu":
            return [
                mask + self._quantising(m, True),
                mask + m * self._wide + self._quantising(m, False),
                mask + 2 * m * self._wide + self._earlier + self._quantising(n // b, True),
                *self._dequantised(m, mask + self._earlier + queries, m + scale),
            ]
        stored = mask + 2 * (m + scale)
        return [
            mask + self._quantising(m, True),
            mask + m + scale + self._quantising(m, False),
            stored + self._earlier + self._quantising(n // b, True),
            stored + self._earlier + queries + self._attending_fp8(n // b, m),
        ]

    @property
    def _wide(self) -> int:
        """Bytes of a dequantised number: float32 on CPUs, the run's own on GPUs."""
        return FP32 if self.device == "cpu" else self.e

    def _dequantised(self, m: int, held: int, stored: int) -> list[int]:
        """FP8 keys and values become wide, once, and each block of queries attends to them.

        stored: what is left of their FP8 form, gone when both are wide.
        """
        converting = held + stored + m * self._wide + 2 * m * FP32
        attending = self._attending_fp8(self.numbers // self.blocks, m)
        return [converting, held + 2 * m * self._wide + attending]

    def _quantising(self, count: int, rotated: bool) -> int:
        """`count` numbers become FP8: rotated, copied head by head, payload."""
        turned = count * self.e if rotated else 0
        by_head = count * self.e if self.heads > 1 else 0
        if self.device == "npu":
            return turned + by_head + count
        widened = count * FP32 if self.e != FP32 or self.tokens % KV_ROWS else 0
        return max(turned + by_head, turned + widened + count * FP32 + count)

    def _packing(self) -> int:
        """Quantising before the exchange, or the exchange itself, whichever holds more."""
        padded = self._is_padded * 3 * self.tensor
        return max(
            padded + self.numbers + self._quantising(self.numbers, True),
            7 * self.numbers + 2 * self.scales,
        )

    def _attending_fp8(self, q: int, m: int) -> int:
        """The kernel's copies and its result, for q numbers of queries and m of keys."""
        if self.device == "npu":
            return q * self.e
        if self.device == "cuda":
            return q * self.e + 2 * q * FP32
        # Rotated keys lie head by head already, unless padding to whole blocks moved them.
        copied = 2 if self.attention.quant_alltoall or self.tokens % KV_ROWS else 1
        by_head = copied * m * FP32 + self._tile if self.heads > 1 else self._tile
        narrowed = q * self.e if self.e != FP32 else 0
        return q * FP32 + max(by_head + q * FP32, q * FP32 + narrowed)

    def _attending_sparse(self, rain: RainFusion, q: int, m: int) -> int:
        by_head, b = self.heads > 1, self.blocks
        if self.device == "npu" and rain.type == "v2":  # its table, and what makes it
            return max(2 * INT64 * self.mask // b, INT64 * self.mask // b + 2 * q * self.e)
        if self.device == "npu":
            return self.mask // b + q * self.e + ((q + 2 * m) * self.e if by_head else 0)
        if self.device == "cuda":  # tables of whole and of partly seen blocks
            return 2 * INT64 * self.mask // b + q * self.e
        widened = 2 * m * FP32 if by_head or self.e != FP32 else 0
        again = m * FP32 if by_head and self.e != FP32 else 0
        return widened + max(again, q * self.e + self._tile)

    @property
    def _tile(self) -> int:
        """A tile of 128 queries, its result and the last tile's, float32."""
        return 3 * Q_ROWS * self.heads * self.head_dim * FP32

    @property
    def mask(self) -> int:
        """Which blocks of keys each block of 128 queries sees, a byte each."""
        return self.heads * min(ceil(self.rows / Q_ROWS), self._all_blocks) * self._key_blocks

    @property
    def _all_blocks(self) -> int:
        return ceil(self.tokens / Q_ROWS)

    @property
    def _key_blocks(self) -> int:
        return ceil(self.tokens / (Q_ROWS if self.attention.fa_quant is None else KV_ROWS))

    def _planning(self, rain: RainFusion) -> int:
        """Scores of all blocks and their softmax, the highest ones and where they are, the mask."""
        scores = self.heads * self._all_blocks * self._key_blocks
        highest = ceil(self._key_blocks * (1 - rain.sparsity)) * self.heads * self._all_blocks
        return scores * (2 * self.e + 1) + highest * (self.e + INT64)
