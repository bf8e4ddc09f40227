"""Counts the bytes that rank layouts send inside and between machines: `--plan --nodes N`.

Ranks are laid out as (cfg, ring, ulysses), ulysses innermost; a machine has consecutive ranks. The
bytes are those of dense attention in one layer: the ranks of a Ulysses group exchange q, k, v and
the output in all-to-alls, and the ranks of a ring send keys and values in one direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wan.settings.errors import InputError
from wan.settings.parallel import enumerate_topologies, format_topology


@dataclass(frozen=True)
class RankLayout:
    """The communication of a rank layout, for the slowest rank.

    Attributes:
        sizes: (cfg, ring, ulysses).
        bytes_inside: Bytes to ranks of the same machine.
        bytes_between: Bytes to other machines.
        seconds: Both, divided by the rates of the links.
    """

    sizes: tuple[int, int, int]
    bytes_inside: float
    bytes_between: float
    seconds: float


def count_sent_bytes(
    sizes: tuple[int, int, int], q_bytes: float, ranks_per_machine: int
) -> Iterator[tuple[float, float]]:
    """Yields the bytes (inside, between) of each rank. q_bytes: bytes of q on a rank."""
    _, ring, ulysses = sizes
    for rank in range(sizes[0] * ring * ulysses):
        bytes_to = dict[int, float]()
        first_rank = rank // ulysses * ulysses
        for peer in range(first_rank, first_rank + ulysses):
            bytes_to[peer] = 4 * q_bytes / ulysses
        bytes_to[rank] = 0.0
        if ring > 1:
            ring_rank = rank // ulysses % ring
            next_rank = rank + ((ring_rank + 1) % ring - ring_rank) * ulysses
            bytes_to[next_rank] = bytes_to.get(next_rank, 0.0) + 2 * q_bytes * (ring - 1)
        machine = rank // ranks_per_machine
        inside = sum(
            size for peer, size in bytes_to.items() if peer // ranks_per_machine == machine
        )
        yield inside, sum(bytes_to.values()) - inside


def list_layouts(
    world: int, heads: int, nodes: int, sequence_bytes: float, rates: Sequence[float] | None
) -> list[RankLayout]:
    """Lists every layout of these ranks, fastest first.

    Args:
        world: Number of ranks, a multiple of `nodes`; otherwise InputError.
        heads: Attention heads of the network.
        nodes: Number of machines.
        sequence_bytes: Bytes of q of the complete sequence.
        rates: GB/s of a rank inside a machine and between machines. None: layouts are sorted by
            the bytes between machines, then by those inside.
    """
    if world % nodes:
        why = f"does not divide the {world} ranks"
        raise InputError("`nodes`", nodes, why, "give machines of equally many ranks")
    candidates = []
    for sizes in enumerate_topologies(world, heads):
        sent_bytes = count_sent_bytes(sizes, sequence_bytes / (sizes[1] * sizes[2]), world // nodes)
        in_rate, out_rate = (1e15, 1e6) if rates is None else (rate * 1e9 for rate in rates)
        seconds, inside, between = max((a / in_rate + b / out_rate, a, b) for a, b in sent_bytes)
        candidates.append(RankLayout(sizes, inside, between, seconds))
    return sorted(candidates, key=lambda layout: layout.seconds)


def describe_layouts(
    rank_layouts: Sequence[RankLayout], chosen: tuple[int, int, int], rates: Sequence[float] | None
) -> Iterator[str]:
    """Describes the layouts with the same cfg size as the chosen layout, one per line."""
    rows = [layout for layout in rank_layouts if layout.sizes[0] == chosen[0]]
    order = "first between machines, then inside"
    if rates is not None:
        order = f"with {rates[0]:g} GB/s inside a machine and {rates[1]:g} GB/s between machines"
    yield f"Layouts, by what a rank sends per layer, {order}:"
    for layout in rows:
        duration = "" if rates is None else f", {layout.seconds * 1e3:.1f} ms"
        note = " (this run)" if layout.sizes == chosen else ""
        yield (
            f"  {format_topology(*layout.sizes)}: inside {layout.bytes_inside / 1e6:.0f} MB, "
            f"between {layout.bytes_between / 1e6:.0f} MB{duration}{note}"
        )
    yield f"The cheapest is {format_topology(*rows[0].sizes)}."
