"""A small causal network with random weights, and the float64 oracle of its block-causal mask.

The oracle computes all frames in one forward pass: an entry of its sequence is a frame in one of
its versions (clean, noisy, with an earlier prompt), and a matrix says which entries see each other.
It uses nothing of `wan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.numerics.plain import (
    PlainNetwork,
    attention,
    normalize,
    raster,
    rotate,
    tiny,
)
from wan.modules.causal import WanCausalModel
from wan.modules.interfaces import ModelComponents

HEADS, TEXT_LEN, ROWS, COLUMNS = 12, 8, 2, 3
SIZES: dict[str, Any] = {
    "text_len": TEXT_LEN,
    "in_dim": 16,
    "dim": 96,
    "ffn_dim": 64,
    "freq_dim": 16,
    "text_dim": 24,
    "out_dim": 16,
    "num_heads": HEADS,
    "num_layers": 2,
}


@cache
def make_weights() -> dict[str, Tensor]:
    return tiny(lambda: WanCausalModel(**SIZES)).state_dict()


def make_network(**components: Any) -> WanCausalModel:
    with torch.device("meta"):
        model = WanCausalModel(**SIZES, components=ModelComponents(**components))
    weights = {name: x.clone() for name, x in make_weights().items()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Entry:
    """A version of a frame.

    Attributes:
        frame: Its index in the video.
        latents: [16,H,W].
        t: Its timestep.
        text: The embeddings of its prompt.
        sees: Indices of the entries to which its tokens attend, with itself.
    """

    frame: int
    latents: Tensor
    t: float
    text: Tensor
    sees: Sequence[int]


class MaskedNetwork(PlainNetwork):
    """Computes the velocities of all entries in one pass, in float64."""

    def __init__(self) -> None:
        super().__init__(make_network(), HEADS, TEXT_LEN)

    def compute_velocities(self, entries: Sequence[Entry]) -> Tensor:
        """Returns [16,entries,H,W]."""
        w, size = self.weights, ROWS * COLUMNS
        positions = [p for x in entries for p in raster([x.frame], range(ROWS), range(COLUMNS))]
        video = torch.stack([x.latents for x in entries], dim=1)
        tokens = w.conv("patch_embedding", video)
        times = [self.time(x.t, SIZES["freq_dim"]) for x in entries]
        e_SC = torch.stack([e for e, _ in times]).repeat_interleave(size, 0)
        modulation = torch.stack([m for _, m in times]).repeat_interleave(size, 0)
        mask = torch.full((len(entries), len(entries)), -math.inf, dtype=torch.float64)
        for index, entry in enumerate(entries):
            mask[index, [*entry.sees]] = 0
        mask = mask.repeat_interleave(size, 0).repeat_interleave(size, 1)
        texts = [self.text(x.text) for x in entries]
        for layer in range(SIZES["num_layers"]):
            tokens = self._run_block(layer, tokens, modulation, positions, texts, mask)
        shift, scale = (w["head.modulation"][0] + e_SC[:, None]).unbind(1)
        patches = w.linear("head.head", normalize(tokens) * (1 + scale) + shift)
        patches = patches.reshape(len(entries), ROWS, COLUMNS, 2, 2, 16)
        return patches.permute(5, 0, 1, 3, 2, 4).reshape(16, len(entries), 2 * ROWS, 2 * COLUMNS)

    def _run_block(
        self,
        layer: int,
        x: Tensor,
        modulation_S6C: Tensor,
        positions: Sequence[Any],
        texts: Sequence[Tensor],
        mask: Tensor,
    ) -> Tensor:
        name, w = f"blocks.{layer}", self.weights
        parts = (w[f"{name}.modulation"] + modulation_S6C).unbind(1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        y = normalize(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(f"{name}.self_attn", y, y)
        q, k = (rotate(tokens, positions, self.heads) for tokens in (q, k))
        outputs = []
        for head_q, head_k, head_v in zip(
            *(z.chunk(self.heads, -1) for z in (q, k, v)), strict=True
        ):
            logits = head_q @ head_k.T / math.sqrt(head_q.shape[-1]) + mask
            outputs.append(logits.softmax(-1) @ head_v)
        x = x + w.linear(f"{name}.self_attn.o", torch.cat(outputs, -1)) * gate1
        y = normalize(x) * w[f"{name}.norm3.weight"] + w[f"{name}.norm3.bias"]
        cross, size, attended = f"{name}.cross_attn", ROWS * COLUMNS, []
        for index, text in enumerate(texts):
            q, k, v = self.qkv(cross, y[index * size : (index + 1) * size], text)
            attended.append(attention(q, k, v, self.heads))
        x = x + w.linear(f"{cross}.o", torch.cat(attended))
        y = normalize(x) * (1 + scale2) + shift2
        y = torch.nn.functional.gelu(w.linear(f"{name}.ffn.0", y), approximate="tanh")
        return x + w.linear(f"{name}.ffn.2", y) * gate2


@dataclass(frozen=True)
class Case:
    """A causal video.

    Attributes:
        change: Block from which on the second prompt holds; None: there is one prompt.
    """

    window: int
    sink: int = 0
    size: int = 3
    num_blocks: int = 4
    change: int | None = None


CASES = {
    "all": Case(12),
    "window": Case(6),
    "window of partial blocks": Case(7),
    "window and sink": Case(8, 2),
    "sink of a block": Case(6, 3, num_blocks=5),
    "blocks of a frame": Case(3, 1, size=1, num_blocks=6),
    "prompt change": Case(12, change=2),
    "prompt change in a window": Case(7, change=3, num_blocks=5),
    "prompt change with a sink": Case(8, 2, change=2),
    "prompt change within the sink": Case(9, 5, change=1),
}


class History:
    """The entries of the finished frames of a video, and which of them are visible."""

    def __init__(self, case: Case) -> None:
        self.case, self.entries = case, list[Entry]()
        self.visible: dict[int, int] = {}  # frame -> its entry in the cache

    def see(self, stop: int) -> list[int]:
        """Lists the entries that a block that ends before frame `stop` sees, without its own."""
        first = stop - (self.case.window - self.case.sink)
        return [i for f, i in self.visible.items() if f < self.case.sink or f >= first]

    def add(self, frames: range, latents: Tensor, t: Sequence[float], text: Tensor) -> list[int]:
        """Adds a block, which sees the visible entries and itself; returns its entries."""
        earlier, start = self.see(frames.stop), len(self.entries)
        own = [*range(start, start + len(frames))]
        for index, frame in enumerate(frames):
            sees = [*earlier, *own]
            self.entries.append(Entry(frame, latents[:, index], t[index], text, sees))
        return own

    def keep(self, frames: range, latents: Tensor, text: Tensor) -> None:
        """Adds a clean block, which later ones see."""
        own = self.add(frames, latents, [0.0] * len(frames), text)
        self.visible |= dict(zip(frames, own, strict=True))

    def renew(self, num_frames: int, video: Tensor, text: Tensor) -> None:
        """Adds the frames of the window after the sink once more, with another prompt."""
        case = self.case
        start = max(case.sink, num_frames - (case.window - case.sink))
        self.visible = {f: i for f, i in self.visible.items() if f < case.sink}
        while start < num_frames:
            stop = min((start // case.size + 1) * case.size, num_frames)
            self.keep(range(start, stop), video[:, start:stop], text)
            start = stop
