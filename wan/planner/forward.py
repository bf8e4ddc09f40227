"""What a run exchanges and what memory it takes: integer formulas, checked by measurement.

`docs/plan.md` derives them, `benchmarks/plan_memory.py` compares them with real forwards. All sizes
are bytes unless a name or docstring says otherwise.

Legend: S all tokens, L this rank's tokens, C channels, P Ulysses ranks, R ring ranks, e bytes of a
number in the matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan.modules import schedule
from wan.modules.schedule import TokenPlan
from wan.planner.chunk import FP32, Chunk
from wan.planner.network import Network
from wan.planner.ways import ways
from wan.settings.attention import Attention
from wan.settings.parallel import Parallel

SOLVER_LATENTS = 6  # noise, current latents, one velocity, and UniPC's two outputs and last sample
PLAIN = Attention()
ORDER = 16  # RainFusion's order of the tokens and its inverse, int64 each


@dataclass(frozen=True)
class Moment:
    """A point of the forward at which memory peaks, and the tensors that live then."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Forward:
    """One forward pass of one sample on the fullest rank.

    voxels: positions of the latents (frames x height x width). e: bytes of a number in the matrix
    products (4 or 2). conditioned: i2v's channels are joined to the latents. slice_elements: how
    many numbers the float32 steps handle at a time (2^20 on a CPU, 2^24 on accelerators). device:
    as in `Chunk`.
    """

    net: Network
    tokens: int
    voxels: int
    parallel: Parallel
    e: int
    conditioned: bool = False
    slice_elements: int = 1 << 24
    attention: Attention = PLAIN
    device: str = "cuda"

    @property
    def plan(self) -> TokenPlan:
        ranks, ring = self.parallel.sequence_size, self.parallel.ring_size
        return TokenPlan(self.tokens, ranks, self.attention.row_multiple(ring) if ranks > 1 else 1)

    @property
    def _is_local(self) -> bool:
        """One rank, on which a single kernel call is all of self-attention."""
        plain = self.attention.is_plain and self.attention.freq_cap is None
        return self.parallel.sequence_size == 1 and plain

    @property
    def stream(self) -> int:
        """Numbers in one [L,C] tensor."""
        return self.plan.shard_len * self.net.dim

    @property
    def chunks(self) -> tuple[int, ...]:
        """Heads per rank of each chunk."""
        most = self.parallel.mode.chunks
        return schedule.heads_per_chunk(self.net.heads, self.parallel.ulysses_size, most)

    def chunk(self, heads: int) -> Chunk:
        """A chunk of so many heads per rank."""
        return Chunk(
            rows=self.plan.shard_len * self.parallel.ulysses_size,
            tokens=self.tokens,
            heads=heads,
            head_dim=self.net.dim // self.net.heads,
            e=self.e,
            parallel=self.parallel,
            attention=self.attention,
            device=self.device,
        )

    def exchanged(self) -> int:
        """What one layer's exchanges hold: q, k, v, their scales, and the result."""
        chunks = map(self.chunk, self.chunks) if self.parallel.ulysses_size > 1 else ()
        return sum(chunk.sent + chunk.tensor for chunk in chunks)

    def masks(self) -> int:
        """RainFusion's masks of one prompt, where steps share them."""
        rain = self.attention.rainfusion
        if rain is None or rain.refresh == 1:
            return 0
        return self.net.layers * sum(self.chunk(heads).mask for heads in self.chunks)

    def standing(self) -> tuple[tuple[str, int], ...]:
        """What lives during the whole forward."""
        latents = self.net.in_dim * self.voxels * FP32 * (2 if self.conditioned else 1)
        rope = 2 * self.plan.shard_len * (self.net.dim // self.net.heads) * FP32
        found = (("latents", latents), ("positions", rope))
        if self.attention.rainfusion is None:
            return found
        return (*found, ("token order", ORDER * self.tokens))

    def moments(self) -> tuple[Moment, ...]:
        """The candidates for the peak. Blocks run through all but the first and last two."""
        n, e, net = self.stream, self.e, self.net
        slice_ = min(n, self.slice_elements) * FP32
        residual = ("residual stream", n * FP32)
        normed, qkv = ("modulated norm", n * e), ("q, k, v", 3 * n * e)
        patch, out = net.patch * net.in_dim, net.patch * net.out_dim * FP32
        hidden = self.plan.shard_len * net.ffn_dim * e
        head = self.plan.shard_len * out + (self.plan.padded + self.tokens) * out
        patches = self.tokens * patch * FP32 + (
            self.plan.shard_len * patch * e if e != FP32 or not self._is_local else 0
        )
        embedded = ("own tokens", n * (FP32 if e == FP32 else FP32 + e))
        crossed = max(3 * n * e, n * e + (2 if e == FP32 else 3) * slice_)
        candidates = [
            ("patch embedding", (("patches", patches), embedded)),
            ("q and k norms", (residual, normed, ("q, k", 2 * n * e), ("slices", 4 * slice_))),
            ("self-attention", (residual, normed, qkv, *self._attention())),
            ("cross-attention", (residual, normed, ("q, result", crossed))),
            ("feed-forward", (residual, normed, ("FFN hidden", hidden), ("FFN result", n * e))),
            ("head", (residual, ("modulated norm", n * FP32), ("slices", slice_))),
            ("gathered head output", (residual, ("head output", head))),
        ]
        return tuple(Moment(name, (*self.standing(), *parts)) for name, parts in candidates)

    def peak(self) -> Moment:
        return max(self.moments(), key=lambda moment: moment.total)

    def _attention(self) -> tuple[tuple[str, int], ...]:
        """What lives beside q, k, v: the result (once a chunk is back), and the chunk at work."""
        whole = self.stream * self.e
        if self._is_local:
            around = max(self.chunk(self.net.heads).dense()) - whole
            return ("attention result", whole), ("kernel", around)
        chunks = [self.chunk(heads) for heads in self.chunks]
        lead = 2 if self.parallel.fa_alltoall_overlap else 1  # chunks begun before one is back
        found = []
        for i, chunk in enumerate(chunks):
            ahead = 0
            if lead == 2:  # sent and received: q, k, v of the next chunk, the last one's result
                ahead = 2 * sum(c.sent for c in chunks[i + 1 : i + 2])
                ahead += 2 * (chunks[i - 1].tensor if i else 0)
            for way in ways(self.attention):
                found.append((whole if i >= lead else 0, chunk.at_work(way) + ahead, way))
        result, work, way = max(found, key=lambda parts: parts[0] + parts[1])
        name = {"dense": "chunk", "fp8": "FP8 chunk", "sparse": "sparse chunk"}[way]
        return ("attention result", result), (f"exchange buffers and {name}", work)
