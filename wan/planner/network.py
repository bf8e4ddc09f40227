"""A DiT's sizes and what its weights and texts take in memory: integer formulas, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from wan.planner.chunk import FP32
from wan.settings.numerics import keeps_fp32

Shapes = Mapping[str, tuple[int, ...]]
"""The tensors of a DiT under their official names."""


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
    """One network in memory: whole, one rank's share, and what is whole only while it runs."""

    whole: int
    share: int
    gathered: int


def weights(
    shapes: Shapes,
    e: int,
    convert_all: bool,
    ranks: int,
    quantised: Mapping[str, int] = MappingProxyType({}),
) -> Weights:
    """A DiT's weights. ranks: how many its rows are sharded over (1: not cut).

    convert_all: nothing is kept in float32. quantised: bytes of tensors that are not kept in e
    bytes a number (uncut). Cut weights: the running block and the one that is
    being gathered after it are whole, and what lies outside the blocks during the whole call.
    """
    share = 0
    parts: dict[str, int] = {}
    for name, shape in shapes.items():
        size = FP32 if keeps_fp32(name) and not convert_all else e
        part = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        parts[part] = parts.get(part, 0) + quantised.get(name, prod(shape) * size)
        share += quantised.get(name, -(-shape[0] // ranks) * prod(shape[1:]) * size)
    outside = parts.pop("", 0)
    blocks = sorted(parts.values(), reverse=True)
    gathered = outside + sum(blocks[:2]) if ranks > 1 else 0
    return Weights(outside + sum(blocks), share, gathered)


def text_bytes(net: Network, e: int, contexts: int, cached: bool) -> int:
    """A network's view of the prompts: embeddings, and each layer's keys and values.

    cached: both are kept for all contexts; else for the running one, two layers' at a time.
    """
    one = net.text_len * net.dim * e
    return contexts * one * (1 + 2 * net.layers) if cached else one * (1 + 2 * min(2, net.layers))
