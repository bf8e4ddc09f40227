"""What a run exchanges and what memory it takes: integer formulas, checked by measurement.

`docs/plan.md` derives them, `benchmarks/plan_memory.py` compares them with real forwards. All sizes
are bytes unless a name or docstring says otherwise.

Legend: S all tokens, L this card's tokens, C channels, P Ulysses cards, R ring cards, e bytes of a
number in the matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from wan.distributed.tokenplan import TokenPlan
from wan.modules import schedule
from wan.settings.parallel import Parallel

Shapes = Mapping[str, tuple[int, ...]]
"""The tensors of a DiT under their official names."""

FP32 = 4
SOLVER_LATENTS = 6  # noise, current latents, one velocity, and UniPC's two outputs and last sample
_FP32_PREFIXES = ("time_embedding.", "time_projection.", "head.")


@dataclass(frozen=True)
class Network:
    """Sizes of a DiT. patch: numbers in a token's patch of one channel."""

    dim: int
    ffn_dim: int
    heads: int
    layers: int
    in_dim: int
    out_dim: int
    text_len: int = 512
    text_dim: int = 4096
    freq_dim: int = 256
    patch: int = 4

    def shapes(self, patch_size: tuple[int, int, int] = (1, 2, 2)) -> dict[str, tuple[int, ...]]:
        """The tensors of the network that has these sizes."""
        c, f = self.dim, self.ffn_dim
        linear = {
            "text_embedding.0": (c, self.text_dim),
            "text_embedding.2": (c, c),
            "time_embedding.0": (c, self.freq_dim),
            "time_embedding.2": (c, c),
            "time_projection.1": (6 * c, c),
            "head.head": (self.patch * self.out_dim, c),
            "patch_embedding": (c, self.in_dim, *patch_size),
        }
        plain: dict[str, tuple[int, ...]] = {"head.modulation": (1, 2, c)}
        for block in (f"blocks.{i}." for i in range(self.layers)):
            for attention in ("self_attn", "cross_attn"):
                linear |= {f"{block}{attention}.{part}": (c, c) for part in "qkvo"}
                plain |= {f"{block}{attention}.norm_{part}.weight": (c,) for part in "qk"}
            linear |= {f"{block}ffn.0": (f, c), f"{block}ffn.2": (c, f)}
            plain |= {f"{block}norm3.{part}": (c,) for part in ("weight", "bias")}
            plain[f"{block}modulation"] = (1, 6, c)
        weights = {f"{name}.weight": shape for name, shape in linear.items()}
        return weights | {f"{name}.bias": shape[:1] for name, shape in linear.items()} | plain


@dataclass(frozen=True)
class Weights:
    """One network in memory: whole, one card's share, and what is whole only while it runs."""

    whole: int
    share: int
    gathered: int


def weights(shapes: Shapes, e: int, convert_all: bool, cards: int) -> Weights:
    """A DiT's weights. cards: how many its rows are cut over (1: not cut).

    convert_all: nothing is kept in float32. Cut weights: the running block and the one that is
    being gathered after it are whole, and what lies outside the blocks during the whole call.
    """
    share = 0
    parts: dict[str, int] = {}
    for name, shape in shapes.items():
        fp32 = name.startswith(_FP32_PREFIXES) or name.endswith("modulation") or "norm" in name
        size = FP32 if fp32 and not convert_all else e
        part = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        parts[part] = parts.get(part, 0) + prod(shape) * size
        share += -(-shape[0] // cards) * prod(shape[1:]) * size
    outside = parts.pop("", 0)
    blocks = sorted(parts.values(), reverse=True)
    gathered = outside + sum(blocks[:2]) if cards > 1 else 0
    return Weights(outside + sum(blocks), share, gathered)


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
    """One forward pass of one sample on the fullest card.

    voxels: positions of the latents (frames x height x width). e: bytes of a number in the matrix
    products (4 or 2). conditioned: i2v's channels are joined to the latents. slice_elements: how
    many numbers the float32 steps handle at a time (2^20 on a CPU, 2^24 on accelerators).
    """

    net: Network
    tokens: int
    voxels: int
    parallel: Parallel
    e: int
    conditioned: bool = False
    slice_elements: int = 1 << 24

    @property
    def plan(self) -> TokenPlan:
        return TokenPlan(self.tokens, self.parallel.sequence_size)

    @property
    def stream(self) -> int:
        """Numbers in one [L,C] tensor."""
        return self.plan.shard_len * self.net.dim

    @property
    def chunks(self) -> tuple[int, ...]:
        """Heads per card of each chunk."""
        limit = 1 if self.parallel.mode == "baseline" else schedule.MAX_CHUNKS
        return schedule.heads_per_chunk(self.net.heads, self.parallel.ulysses_size, limit)

    def chunk_tensor(self, heads: int) -> int:
        """q, k, v or the result of a chunk of so many heads per card: what one exchange holds."""
        return self.rows * heads * (self.net.dim // self.net.heads) * self.e

    @property
    def rows(self) -> int:
        """Tokens that a card attends from: those of its Ulysses group."""
        return self.plan.shard_len * self.parallel.ulysses_size

    def exchanged(self) -> int:
        """What one layer's exchanges hold: q, k, v and the result."""
        return 4 * sum(map(self.chunk_tensor, self.chunks)) if self.parallel.ulysses_size > 1 else 0

    def hop(self, heads: int) -> int:
        """K and V of one card, as one ring hop carries them."""
        return 2 * self.chunk_tensor(heads) if self.parallel.ring_size > 1 else 0

    def standing(self) -> tuple[tuple[str, int], ...]:
        """What lives during the whole forward."""
        latents = self.net.in_dim * self.voxels * FP32 * (2 if self.conditioned else 1)
        rope = 2 * self.plan.shard_len * (self.net.dim // self.net.heads) * FP32
        return ("latents", latents), ("positions", rope)

    def moments(self) -> tuple[Moment, ...]:
        """The candidates for the peak. Blocks run through all but the first and last two."""
        n, e, net = self.stream, self.e, self.net
        slice_ = min(n, self.slice_elements) * FP32
        residual = ("residual stream", n * FP32)
        lse = self.plan.shard_len * net.heads * FP32
        normed, qkv = ("modulated norm", n * e), ("q, k, v", 3 * n * e)
        patch, out = net.patch * net.in_dim, net.patch * net.out_dim * FP32
        hidden = self.plan.shard_len * net.ffn_dim * e
        head = self.plan.shard_len * out + (self.plan.padded + self.tokens) * out
        copied = self.parallel.sequence_size > 1 or e != FP32
        patches = self.tokens * patch * FP32 + (self.plan.shard_len * patch * e if copied else 0)
        embedded = ("own tokens", n * (FP32 if e == FP32 else FP32 + e))
        crossed = max(3 * n * e, n * e + (2 if e == FP32 else 3) * slice_)
        candidates = [
            ("patch embedding", (("patches", patches), embedded)),
            ("q and k norms", (residual, normed, ("q, k", 2 * n * e), ("slices", 4 * slice_))),
            ("self-attention", (residual, normed, qkv, *self._attention(lse))),
            ("cross-attention", (residual, normed, ("q, result", crossed))),
            ("feed-forward", (residual, normed, ("FFN hidden", hidden), ("FFN result", n * e))),
            ("head", (residual, ("modulated norm", n * FP32), ("slices", slice_))),
            ("gathered head output", (residual, ("head output", head))),
        ]
        return tuple(Moment(name, (*self.standing(), *parts)) for name, parts in candidates)

    def peak(self) -> Moment:
        return max(self.moments(), key=lambda moment: moment.total)

    def _attention(self, lse: int) -> tuple[tuple[str, int], ...]:
        """What lives beside q, k, v: the result (once a chunk is back), and the chunk at work."""
        whole = self.stream * self.e
        if self.parallel.sequence_size == 1:
            return ("attention result", whole), ("lse", lse)
        sizes = [self.chunk_tensor(heads) for heads in self.chunks]
        lead = 2 if self.parallel.fa_alltoall_overlap else 1  # chunks begun before one is back
        found = []
        for i, size in enumerate(sizes):
            ahead = 0
            if lead == 2:  # sent and received: q, k, v of the next chunk, the last one's result
                ahead = 6 * sum(sizes[i + 1 : i + 2]) + 2 * (sizes[i - 1] if i else 0)
            found.append((whole if i >= lead else 0, self._at_work(size) + ahead))
        result, work = max(found, key=sum)
        return ("attention result", result), ("exchange buffers and chunk", work)

    def _at_work(self, f: int) -> int:
        """One chunk whose tensors have f bytes each, while it is attended to."""
        exchanged = 3 * f if self.parallel.ulysses_size > 1 else 0
        numbers = f // self.e
        row = self.net.dim // self.net.heads  # numbers per row and head
        blocks = 2 if self.parallel.comm_type == 2 and not self.parallel.fa_alltoall_overlap else 1
        joined = f if blocks == 2 or self.plan.padded > self.tokens else 0
        if self.parallel.ring_size == 1:
            return exchanged + f + joined + numbers // row * FP32
        upcast = 0 if self.e == FP32 else numbers
        merge = numbers * FP32 + (f + (numbers + upcast) * FP32) // blocks  # sum; part, difference
        lse = numbers // row * 40 // blocks
        done = numbers * FP32 + upcast * self.e + joined
        return exchanged + max(2 * f * self._ring_blocks() + merge + lse, 2 * f + done)

    def _ring_blocks(self) -> int:
        """K/V blocks of other cards that a card holds at once: at hand, and arriving."""
        size = self.parallel.ring_size
        if self.parallel.ring_type == "ring":
            return min(size - 1, 2)
        most = 0
        for rank in range(size):
            arriving = [(rank >= t) + (rank + t < size) for t in range(1, size)]
            pairs = zip([0, *arriving], [*arriving, 0], strict=True)
            most = max(most, *(held + new for held, new in pairs))
        return most


def text_bytes(net: Network, e: int, contexts: int, cached: bool) -> int:
    """A network's view of the prompts: embeddings, and each layer's keys and values.

    cached: both are kept for all contexts; else for the running one, two layers' at a time.
    """
    one = net.text_len * net.dim * e
    return contexts * one * (1 + 2 * net.layers) if cached else one * (1 + 2 * min(2, net.layers))
