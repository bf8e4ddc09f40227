"""A reference implementation of Wan networks in float64, after the official description.

It uses nothing of `wan`; weights have their official names.

Legend: S tokens, T text tokens, C channels, N heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Position = tuple[int, int, int]
"""Position of a token: time, row, column."""


class Weights:
    """The weights of a network in float64, by their official names."""

    def __init__(self, network: nn.Module) -> None:
        self.tensors = {name: x.double() for name, x in network.state_dict().items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self[f"{name}.weight"].T + self[f"{name}.bias"]

    def conv(self, name: str, x_CFHW: Tensor) -> Tensor:
        """Apply a patch embedding as a convolution: tokens [S,C] in raster order."""
        weight = self[f"{name}.weight"]
        output = F.conv3d(x_CFHW[None].double(), weight, self[f"{name}.bias"], weight.shape[2:])
        return output[0].flatten(1).T

    def causal(self, name: str, x_TC: Tensor, stride: int = 1) -> Tensor:
        """Apply a causal convolution of 3 time steps; the first step is repeated as padding."""
        rows = torch.cat((x_TC[:1], x_TC[:1], x_TC))
        taps_TK, weight = rows.unfold(0, 3, stride).flatten(1), self[f"{name}.conv.weight"]
        return taps_TK @ weight.flatten(1).T + self[f"{name}.conv.bias"]


def normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalize to mean 0 and variance 1 over the channels."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def attention(q_SC: Tensor, k_TC: Tensor, v_TC: Tensor, heads: int) -> Tensor:
    """Compute dense attention, head by head."""
    head_outputs = []
    for q, k, v in zip(*(x.chunk(heads, -1) for x in (q_SC, k_TC, v_TC)), strict=True):
        head_outputs.append((q @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v)
    return torch.cat(head_outputs, -1)


def raster(times: Sequence[int], rows: Sequence[int], columns: Sequence[int]) -> list[Position]:
    return [(t, r, c) for t in times for r in rows for c in columns]


def rotate(x_SC: Tensor, positions: Sequence[Position], heads: int) -> Tensor:
    """Apply RoPE: neighboring channels form complex numbers, split among the three axes."""
    size = x_SC.shape[1] // heads
    third = size // 2 // 3
    pairs = size // 2 - 2 * third, third, third
    angles = [
        [p * 10000 ** (-i / n) for p, n in zip(position, pairs, strict=True) for i in range(n)]
        for position in positions
    ]
    angle_table = torch.tensor(angles, dtype=torch.float64)
    table = torch.complex(angle_table.cos(), angle_table.sin())
    complex_SND = torch.view_as_complex(x_SC.reshape(len(x_SC), heads, -1, 2))
    return torch.view_as_real(complex_SND * table[:, None]).flatten(1)


class PlainNetwork:
    """The parts that all kinds of Wan networks share.

    Args:
        network: The network with the weights.
        heads: Number of heads.
        text_len: Tokens to which a text is padded with zeros.
    """

    def __init__(self, network: nn.Module, heads: int, text_len: int) -> None:
        self.weights, self.heads, self.text_len = Weights(network), heads, text_len

    def text(self, context: Tensor) -> Tensor:
        padded = F.pad(context.double(), (0, 0, 0, self.text_len - len(context)))
        first = F.gelu(self.weights.linear("text_embedding.0", padded), approximate="tanh")
        return self.weights.linear("text_embedding.2", first)

    def time(self, t: float, channels: int) -> tuple[Tensor, Tensor]:
        """Return the embedding [C] of a timestep and its modulation [6,C]."""
        half = channels // 2
        angles = t * 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
        features = torch.cat((angles.cos(), angles.sin()))
        linear = self.weights.linear
        e = linear("time_embedding.2", silu(linear("time_embedding.0", features)))
        return e, linear("time_projection.1", silu(e)).unflatten(0, (6, -1))

    def qkv(self, name: str, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalized queries of x and keys of a context, and the context's values."""
        w, linear = self.weights, self.weights.linear
        q = rms(linear(f"{name}.q", x), w[f"{name}.norm_q.weight"])
        k = rms(linear(f"{name}.k", context), w[f"{name}.norm_k.weight"])
        return q, k, linear(f"{name}.v", context)

    def block(
        self,
        layer: int,
        x: Tensor,
        modulation_S6C: Tensor,
        positions: Sequence[Position],
        text: Tensor,
        image: Tensor | None = None,
    ) -> Tensor:
        """Run a block with one modulation per token. image: image tokens for cross-attention."""
        name, w = f"blocks.{layer}", self.weights
        parts = (w[f"{name}.modulation"] + modulation_S6C).unbind(1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        y = normalize(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(f"{name}.self_attn", y, y)
        q, k = (rotate(x_SC, positions, self.heads) for x_SC in (q, k))
        x = x + w.linear(f"{name}.self_attn.o", attention(q, k, v, self.heads)) * gate1
        y = normalize(x) * w[f"{name}.norm3.weight"] + w[f"{name}.norm3.bias"]
        cross = f"{name}.cross_attn"
        q, k, v = self.qkv(cross, y, text)
        attended = attention(q, k, v, self.heads)
        if image is not None:
            k = rms(w.linear(f"{cross}.k_img", image), w[f"{cross}.norm_k_img.weight"])
            attended = attended + attention(q, k, w.linear(f"{cross}.v_img", image), self.heads)
        x = x + w.linear(f"{cross}.o", attended)
        y = normalize(x) * (1 + scale2) + shift2
        y = F.gelu(w.linear(f"{name}.ffn.0", y), approximate="tanh")
        return x + w.linear(f"{name}.ffn.2", y) * gate2

    def velocity(self, x: Tensor, e: Tensor, grid: Position) -> Tensor:
        """Apply the head and assemble patches of 1 x 2 x 2 to [16,F,H,W]."""
        shift, scale = (self.weights["head.modulation"][0] + e).unbind(0)
        x = self.weights.linear("head.head", normalize(x) * (1 + scale) + shift)
        (frames, rows, columns), out = grid, torch.empty(16, grid[0], 2 * grid[1], 2 * grid[2])
        tokens = iter(x.reshape(-1, 2, 2, 16))
        for f, r, c in raster(range(frames), range(rows), range(columns)):
            out[:, f, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] = next(tokens).permute(2, 0, 1)
        return out


def tiny(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a network with random weights for activations near 1; none has its default value."""
    torch.manual_seed(0)
    network = make().eval().requires_grad_(False)
    for name, weight in network.named_parameters():
        wide = weight.dim() > 1 and "modulation" not in name and "padding" not in name
        spread = weight[0].numel() ** -0.5 if wide else 0.3
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        nn.init.normal_(weight, mean, spread)
    return network
