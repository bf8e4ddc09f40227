"""A network's velocities on several ranks against those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.topology import ROWS, Topology, attention_layer, blocks_of
from wan.distributed.tokens import ShardedTokens


def randomised(net: nn.Module) -> None:
    """Draws the weights with a deviation that keeps activations near 1."""
    net.eval().requires_grad_(False)
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1 and "modulation" not in name:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)


@torch.inference_mode()
def compare(
    network: Callable[..., Any],
    velocities: Callable[[Any, Any], Tensor],
    inputs: Mapping[int, Any],
    topologies: Sequence[Topology],
    modes: Sequence[str],
    exchange: str,
) -> float:
    """All calls first, so that a difference leaves no other rank waiting; the largest velocity.

    inputs: Number of tokens -> what `velocities` gets beside a network.
    """
    largest = 0.0
    for count, given in inputs.items():
        expected, found = velocities(network(), given), {}
        for topology in topologies:
            for mode in modes:
                layer = attention_layer(topology, mode, exchange=exchange)
                net = network(attention=blocks_of(layer), tokens=ShardedTokens(None))
                found[topology, mode] = velocities(net, given)
        for case, ours in found.items():
            off = (ours - expected).abs().max()
            assert off <= 2e-5, f"off by {off} with {count} tokens, {case}"
        for (topology, mode), ours in found.items():
            assert ROWS[mode].blocks > 1 or torch.equal(ours, found[topology, modes[0]])
        largest = max(largest, expected.abs().max().item())
    return largest
